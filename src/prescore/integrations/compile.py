"""A layer's attention as torch.compile sees it: one operator that it looks no further into.

Which keys are read depends on the keys, which no compiler can follow. So while a graph is traced the call becomes
`torch.ops.prescore.attend`, which asks whoever sits on the module when the graph runs; elsewhere the same function
is called directly. The backward pass attends once more, because nothing but tensors can be kept for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prescore.autograd import autocast_inputs
from prescore.errors import Unsupported
from prescore.integrations.attention import AttentionContext
from prescore.integrations.patch import Patch, patch_of

_SEEDS = 2**62
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, float? scale, bool is_causal, float dropout, "
    "bool is_local, str owner, int handle"
)
_LIBRARY = torch.library.Library("prescore", "DEF")


def attend_by(patch: Patch, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
    """What a seat's function gives, as one opaque operator where a graph is being traced."""
    if not torch.compiler.is_compiling():
        return patch.attend(query, key, value, context)
    if context.obstacles:
        raise Unsupported(f"compiled attention in {context.owner}", context.obstacles)
    query, key, value = autocast_inputs(query, key, value)
    output: Tensor = torch.ops.prescore.attend(
        query,
        key,
        value,
        context.mask,
        context.scale,
        context.is_causal,
        context.dropout,
        context.is_local,
        context.owner,
        patch.handle,
    )[0]
    return output


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    is_causal: bool,
    dropout: float,
    is_local: bool,
    owner: str,
    handle: int,
) -> Tensor:
    patch = patch_of(handle)
    if patch is None:
        raise Unsupported(f"compiled attention in {owner}", ["what was applied to the model has been undone"])
    context = AttentionContext(
        layer=patch.layer,
        n_prefix=patch.n_prefix,
        scale=scale,
        mask=mask,
        is_causal=is_causal,
        dropout=dropout,
        owner=owner,
        is_local=is_local,
    )
    return patch.attend(query, key, value, context)


def _forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The output, and the seed of what was dropped."""
    dropout = rest[3]
    seed = torch.randint(_SEEDS, (1,), dtype=torch.int64) if dropout else torch.zeros(1, dtype=torch.int64)
    with torch.no_grad(), _seeded(query, seed, dropout):
        return _own_memory(_run(query, key, value, *rest)), seed


def _backward(grad: Tensor, seed: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    with torch.enable_grad(), _seeded(query, seed, rest[3]):
        query, key, value = (tensor.detach().requires_grad_() for tensor in (query, key, value))
        grads = torch.autograd.grad(_run(query, key, value, *rest), (query, key, value), grad)
    return tuple(_own_memory(gradient) for gradient in grads)


def _seeded(query: Tensor, seed: Tensor, dropout: float) -> Any:
    """Torch's generators seeded for one call, and as before afterwards."""
    fork = torch.random.fork_rng(devices=[query.device] if query.is_cuda else [], enabled=bool(dropout))
    return _Seeded(fork, int(seed) if dropout else None)


class _Seeded:
    def __init__(self, fork: Any, seed: int | None) -> None:
        self._fork, self._seed = fork, seed

    def __enter__(self) -> None:
        self._fork.__enter__()
        if self._seed is not None:
            torch.manual_seed(self._seed)

    def __exit__(self, *error: Any) -> None:
        self._fork.__exit__(*error)


def _own_memory(tensor: Tensor) -> Tensor:
    """As the operator promises: dense, in order, and no view of an input."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _forward_shape(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    output = query.new_empty((*query.shape[:3], value.shape[-1]))
    return output, torch.empty(1, dtype=torch.int64, device="cpu")


def _backward_shapes(grad: Tensor, seed: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs[:3])
    return query, key, value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, *rest = inputs
    ctx.save_for_backward(query, key, value, mask, output[1])
    ctx.rest = rest


def _differentiate(ctx: Any, grad: Tensor, _seed_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, mask, seed = ctx.saved_tensors
    grads = torch.ops.prescore.attend_backward(grad, seed, query, key, value, mask, *ctx.rest)
    return (*grads, *(None for _ in range(1 + len(ctx.rest))))


def _define() -> None:
    _LIBRARY.define(f"attend({_ARGUMENTS}) -> (Tensor, Tensor)")
    _LIBRARY.define(f"attend_backward(Tensor grad, Tensor seed, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
    # on every device, and above autograd's keys, so that the backward pass can attend with gradients
    _LIBRARY.impl("attend", _forward, "CompositeExplicitAutograd")
    _LIBRARY.impl("attend_backward", _backward, "CompositeExplicitAutograd")
    torch.library.register_fake("prescore::attend", _forward_shape, lib=_LIBRARY)
    torch.library.register_fake("prescore::attend_backward", _backward_shapes, lib=_LIBRARY)
    torch.library.register_autograd("prescore::attend", _differentiate, setup_context=_keep, lib=_LIBRARY)


_define()
