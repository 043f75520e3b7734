"""What the crew is told to do; every function takes the process group first and returns plain tensors."""

import torch

import prescore
from prescore.testing.inputs import attention_tensors


def piece(tensor, group, dim=2):
    """This rank's part of a tensor."""
    if tensor is None:
        return None
    return tensor.chunk(group.size(), dim)[group.rank()].contiguous()


def attend(group, config, inputs, mask, options, learned=True):
    """Output, lse, gradients of query, key and value, and statistics, all of this rank's piece."""
    parts = [piece(tensor, group).requires_grad_(learned) for tensor in inputs]
    output, aux = prescore.prescored_attention(
        *parts, config, key_padding_mask=piece(mask, group, 1), group=group, return_aux=True, **options
    )
    if learned:
        weights = piece(gradient_weights(inputs), group)
        (output * weights).sum().backward()
    grads = [part.grad for part in parts]
    return output.detach(), aux.lse.detach(), *grads, aux.stats


def attend_quietly(group, config, inputs, mask, options):
    """The output alone, without lse or gradients."""
    parts = [piece(tensor, group) for tensor in inputs]
    return prescore.prescored_attention(
        *parts, config, key_padding_mask=piece(mask, group, 1), group=group, **options
    )


def gradient_weights(inputs):
    """What the output is weighed with, so that every gradient is another."""
    query, _, value = inputs
    return attention_tensors(
        batch=query.shape[0], heads=query.shape[1], kv_heads=1, n_query=query.shape[2], n_keys=1,
        dim=value.shape[3], dtype=query.dtype, seed=99,
    )[0]  # fmt: skip


def alone(config, inputs, mask, options):
    """The same in one process."""
    parts = [tensor.clone().requires_grad_() for tensor in inputs]
    output, aux = prescore.prescored_attention(*parts, config, key_padding_mask=mask, return_aux=True, **options)
    (output * gradient_weights(inputs)).sum().backward()
    return output.detach(), aux.lse.detach(), *(part.grad for part in parts), aux.stats


def joined(results):
    """Pieces of all ranks behind one another: output, lse, gradients."""
    return [torch.cat(parts, dim=2) for parts in zip(*(result[:5] for result in results), strict=True)]


def run_model(group, config, ids, mask, family, learned):
    """Logits of this rank's piece of a tiny model, its loss, and the gradients of all parameters, summed."""
    import torch.distributed as dist
    from tiny_models import tiny

    model = tiny(family)
    kwargs = {} if mask is None else {"attention_mask": piece(mask, group, 1)}
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    if mask is not None:
        labels = labels.masked_fill(torch.nn.functional.pad(mask[:, 1:], (0, 1)) == 0, -100)
    with prescore.apply(model, config, mesh=group) as applied:
        result = model(
            piece(ids, group, 1), labels=piece(ids, group, 1), shift_labels=piece(labels, group, 1),
            num_items_in_batch=(labels != -100).sum(), use_cache=False, **kwargs,
        )  # fmt: skip
        report = str(applied.report())
        grads = []
        if learned:
            result.loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
                grads.append(parameter.grad)
    loss = result.loss.detach().clone()
    dist.all_reduce(loss, group=group)
    return result.logits.detach(), loss, grads, report


def run_generation(group, config, ids, new_tokens):
    """Greedy tokens of a tiny model whose prompt lies on all ranks, and keys held by each layer's cache."""
    from tiny_models import tiny

    from prescore.integrations.transformers import generate_together

    model = tiny("Llama")
    with prescore.apply(model, config, mesh=group) as applied:
        tokens = generate_together(model, piece(ids, group, 1), group, max_new_tokens=new_tokens)
        return tokens, str(applied.report())


def bytes_of(group, config, n_tokens, is_causal):
    """Bytes that this rank sends in one call of random keys, one head of 64 numbers; and the way it went."""
    generator = torch.Generator().manual_seed(group.rank())
    parts = [torch.randn(1, 1, n_tokens // group.size(), 64, generator=generator) for _ in range(3)]
    _, aux = prescore.prescored_attention(*parts, config, is_causal=is_causal, group=group, return_aux=True)
    return aux.stats["bytes_sent"], aux.stats["way"]
