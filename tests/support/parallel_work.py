"""What the crew runs; every function takes the process group first and returns plain tensors."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from oracles.inputs import attention_tensors

import prescore
from prescore.parallel.comm import Group, agree, as_group
from prescore.parallel.ulysses import attend_by_heads


def shard(tensor, group, dim=2):
    """This rank's part of a tensor; all of it without a group."""
    if tensor is None or group is None:
        return tensor
    return tensor.chunk(group.size(), dim)[group.rank()].contiguous()


def refusal(call):
    """The sentence of a refusal; pytest.raises would end the rank where nothing is refused."""
    try:
        call()
    except (ValueError, TypeError) as error:
        return str(error)
    return "nothing was refused"


def attend(group, config, inputs, mask, options):
    """Output, lse, gradients of query, key and value, and stats: of this rank's shard, or in one process."""
    parts = [shard(tensor, group).clone().requires_grad_() for tensor in inputs]
    ranks = None if group is None else as_group(group)
    options = {**options, "key_padding_mask": shard(mask, group, 1), "group": ranks}
    output, aux = prescore.prescored_attention(*parts, config, return_aux=True, **options)
    assert ranks is None or aux.stats.bytes_sent == ranks.sent
    (output * shard(gradient_weights(inputs), group)).sum().backward()
    return output.detach(), aux.lse.detach(), *(part.grad for part in parts), aux.stats


def attend_without_lse(group, config, inputs, options):
    """The output alone."""
    parts = [shard(tensor, group) for tensor in inputs]
    return prescore.prescored_attention(*parts, config, group=group, **options)


def gradient_weights(inputs):
    """Weights of the output in the loss, so that every gradient differs."""
    query, _, value = inputs
    shape, generator = (*query.shape[:3], value.shape[3]), torch.Generator().manual_seed(99)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(query.dtype)


def joined(results):
    """Shards of all ranks behind one another: output, lse, gradients."""
    return [torch.cat(parts, dim=2) for parts in zip(*(result[:5] for result in results), strict=True)]


def run_model(group, config, ids, mask, family):
    """Logits of this rank's shard of a tiny model, its loss, and the gradients of all parameters, summed."""
    import torch.distributed as dist
    from tiny_models import tiny

    model = tiny(family)
    kwargs = {} if mask is None else {"attention_mask": shard(mask, group, 1)}
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    if mask is not None:
        labels = labels.masked_fill(torch.nn.functional.pad(mask[:, 1:], (0, 1)) == 0, -100)
    with prescore.apply(model, config, mesh=group) as applied:
        result = model(
            shard(ids, group, 1), labels=shard(ids, group, 1), shift_labels=shard(labels, group, 1),
            num_items_in_batch=(labels != -100).sum(), use_cache=False, **kwargs,
        )  # fmt: skip
        report = str(applied.report())
        result.loss.backward()
        grads = [parameter.grad for parameter in model.parameters()]
    for grad in grads:
        dist.all_reduce(grad, group=group)
    loss = result.loss.detach().clone()
    dist.all_reduce(loss, group=group)
    return result.logits.detach(), loss, grads, report


def run_generation(group, config, ids, new_tokens):
    """Greedy tokens of a tiny model whose prompt lies on all ranks, and the report."""
    from tiny_models import tiny

    from prescore.integrations.transformers import generate_context_parallel

    model = tiny("Llama")
    with prescore.apply(model, config, mesh=group) as applied:
        tokens = generate_context_parallel(model, shard(ids, group, 1), group, max_new_tokens=new_tokens)
        return tokens, str(applied.report())


def run_as_core(group, config, ids):
    """Logits of this rank's shard, where a wrapper around the registered function exchanges heads."""
    from tiny_models import tiny
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, ranks = tiny("Llama"), as_group(group)
    positions = torch.arange(ids.shape[1])[None]
    with prescore.apply(model, config), pytest.MonkeyPatch.context() as patch, torch.no_grad():
        core = ALL_ATTENTION_FUNCTIONS["prescored"]

        def exchange_heads(module, query, key, value, attention_mask, *args, **kwargs):
            def attend(*full):
                output, _ = core(module, *full, None, *args, **{**kwargs, "position_ids": positions})
                return [output.transpose(1, 2)]

            return attend_by_heads(ranks, query, key, value, attend)[0].transpose(1, 2), None

        patch.setitem(ALL_ATTENTION_FUNCTIONS, "prescored", exchange_heads)
        own = {"position_ids": shard(positions, group, 1), "use_cache": False}
        return model(shard(ids, group, 1), **own).logits


def run_tensor_parallel(group, config, ids, path):
    """Query heads that attention sees on this rank, and logits, of a model whose weights lie on all ranks."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    spread = DistributedConfig(tp_size=group.size())
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=spread).eval()
    n_heads = []
    with prescore.apply(model, config), pytest.MonkeyPatch.context() as patch, torch.no_grad():
        core = ALL_ATTENTION_FUNCTIONS["prescored"]

        def count_heads(module, query, *args, **kwargs):
            n_heads.append(query.shape[1])
            return core(module, query, *args, **kwargs)

        patch.setitem(ALL_ATTENTION_FUNCTIONS, "prescored", count_heads)
        return n_heads, model(ids, use_cache=False).logits


def bytes_sent(group, config, n_tokens, is_causal):
    """Bytes that this rank sends in one call of random keys, one head of 64 numbers."""
    ranks, generator = as_group(group), torch.Generator().manual_seed(group.rank())
    parts = [torch.randn(1, 1, n_tokens // group.size(), 64, generator=generator) for _ in range(3)]
    prescore.prescored_attention(*parts, config, is_causal=is_causal, group=ranks)
    return ranks.sent


def attend_wrongly(group, wrong):
    """A call in which rank 1 alone does something else; `wrong` says what."""
    inputs = attention_tensors(n_query=12, n_keys=12, dim=4, seed=group.rank(), dtype=torch.float32)
    config, mask = prescore.Selected("kmeans", 4, min_seq_len=4), torch.ones(1, 12, dtype=torch.bool)
    options = {"config": config, "is_causal": True, "generator": 5}
    if wrong == "hole":
        mask[:, -3 if group.rank() == 0 else 0 :] = group.rank() != 0
        options["key_padding_mask"] = mask
    changes = {
        "length": lambda: [tensor[:, :, :9] for tensor in inputs],
        "dtype": lambda: [tensor.double() for tensor in inputs],
        "gradients": lambda: [inputs[0], inputs[1].requires_grad_(), inputs[2]],
        "NaN": lambda: [inputs[0], inputs[1].index_fill(2, torch.tensor([3]), torch.nan), inputs[2]],
        "type": lambda: ["nothing", *inputs[1:]],
        "configuration": lambda: {"config": config.replace(top_k=5)},
        "seed": lambda: {"generator": 6},
        "generator": lambda: {"generator": "six"},
        "causality": lambda: {"is_causal": False},
        "mask": lambda: {"key_padding_mask": mask},
        "dropout": lambda: {"dropout_p": 0.1},
        "selection": lambda: {"selection": prescore.select(inputs[1], top_k=3)},
    }
    change = changes[wrong]() if wrong in changes and group.rank() == 1 else {}
    if isinstance(change, list):
        return prescore.prescored_attention(*change, group=group, **options)
    return prescore.prescored_attention(*inputs, group=group, **{**options, **change})


@dataclass(frozen=True)
class Limited(prescore.Scorer):
    """Refuses large keys; `sharded` scores them where they are."""

    sharded: bool = False
    name: ClassVar[str] = "limited"

    def score(self, keys, *, valid, streams):
        largest = float(keys.max())
        if largest > 100:
            raise ValueError(f"keys must be at most 100, got {largest:g}")
        return keys.norm(dim=-1)

    def stats(self, shard):
        return shard.keys.new_zeros(*shard.keys.shape[:2], 0) if self.sharded else None

    def score_from(self, stats, shard):
        return self.score(shard.keys, valid=None, streams=shard.streams)


def refuse_while_computing(group, heads, sharded):
    """The last head has keys that its rank refuses; with `sharded` the rank that holds them."""
    inputs = attention_tensors(heads=heads, kv_heads=heads, n_keys=48, dim=8)
    inputs[1][:, heads - 1, 4] = 200.0
    config = prescore.Selected(Limited(sharded), 4, min_seq_len=8, remainder="none")
    parts = [shard(tensor, group) for tensor in inputs]
    return prescore.prescored_attention(*parts, config, is_causal=True, group=group)


def generator_after_refusal(group):
    """What is refused because of another rank, and whether the generator stands where it stood."""
    generator, inputs = torch.Generator().manual_seed(1), attention_tensors(n_keys=12)
    options = {"is_causal": group.rank() == 0, "generator": generator, "group": group}
    before = generator.get_state()
    sentence = refusal(lambda: prescore.prescored_attention(*inputs, prescore.Exact(), **options))
    return sentence, torch.equal(before, generator.get_state())


def long_note(group, length):
    """Ranks that agree on a fact of so many letters."""
    agree(Group(group), {"config": "x" * length}, None)


def die_or_attend(group, in_backward):
    """Rank 1 dies, before the call or before the backward pass."""
    import os

    parts = [tensor.requires_grad_() for tensor in attention_tensors(n_keys=12)]
    if group.rank() == 1 and not in_backward:
        os._exit(3)
    output = prescore.prescored_attention(*parts, prescore.Routed(), is_causal=True, group=group)
    if group.rank() == 1:
        os._exit(3)
    output.sum().backward()


def in_meshes(group):
    """The same through a device mesh of one dimension, and what two dimensions say."""
    from torch.distributed.device_mesh import DeviceMesh

    parts = [shard(tensor, group) for tensor in attention_tensors(n_keys=24)]
    line, square = (DeviceMesh("cpu", torch.arange(4).view(shape)) for shape in (4, (2, 2)))
    output = prescore.exact_attention(*parts, is_causal=True, group=line)
    return *output, refusal(lambda: prescore.exact_attention(*parts, group=square))


def refused_models(group):
    """What a model on several ranks refuses, by name."""
    from tiny_models import prompts, tiny
    from transformers import DynamicCache

    ids, _ = prompts(batch=1, length=24, cut=0)
    own, alone = shard(ids, group, 1), group.rank() == 1
    other, uneven = own[:, : 12 - alone], prescore.Routed(min_weight=0.2 if alone else 0.1)

    def forward(family="Llama", ids=own, config=None, **options):
        model = tiny(family)
        with prescore.apply(model, config, mesh=group):
            model(ids, **options)

    calls = {
        "window": lambda: forward("Mistral"),
        "length": lambda: forward(ids=other),
        "mask": lambda: forward(attention_mask=torch.ones(1, 3)),
        "configuration": lambda: forward(config=uneven),
        "on_unsupported": lambda: prescore.apply(tiny("Llama"), mesh=group, on_unsupported="exact"),
        "group": lambda: prescore.apply(tiny("Llama"), mesh="all"),
        "cache": lambda: forward(past_key_values=DynamicCache()),
        "one cache": lambda: forward(past_key_values=DynamicCache() if alone else None),
        "weights": lambda: forward(output_attentions=alone),
        "new tokens": lambda: run_generation(group, prescore.Exact(), ids, 2 + alone),
        "no new tokens": lambda: run_generation(group, prescore.Exact(), ids, 2 - 2 * alone),
    }
    found = {name: refusal(call) for name, call in calls.items()}
    model = tiny("Llama")
    before = model(ids).logits
    with prescore.apply(model, prescore.Exact(), mesh=group):
        refusal(lambda: model(other))
        here = model(own, use_cache=False).logits  # after a refusal the group and the model go on
    torch.testing.assert_close(here, shard(before, group, 1), atol=1e-4, rtol=0)
    assert torch.equal(model(ids).logits, before)
    return found
