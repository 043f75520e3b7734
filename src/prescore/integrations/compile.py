"""A layer's attention under torch.compile: one opaque operator.

Which keys are read depends on the keys, which a compiler cannot trace. While a graph is traced, the call becomes
`torch.ops.prescore.attend`, which finds the patch by its handle when the graph runs. The backward pass attends
once more, because an operator can keep nothing but tensors for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prescore.autograd import autocast_inputs
from prescore.errors import Unsupported
from prescore.integrations.attention import Attend, AttentionContext
from prescore.integrations.patch import PATCHES_BY_HANDLE, Patch

_SEEDS = 2**62
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, float? scale, bool is_causal, float dropout, "
    "bool is_local, str owner, int first_head, int handle"
)
_LIBRARY = torch.library.Library("prescore", "DEF")


def attention_of(patch: Patch) -> Attend:
    """The function of a patch; while a graph is traced, the operator that calls it."""
    return partial(_attend_in_graph, patch) if torch.compiler.is_compiling() else patch.attend


def _attend_in_graph(patch: Patch, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
    if context.obstacles:
        if not context.is_local:
            _refuse_or_warn(patch, context.owner, context.obstacles)
        if context.original is not None:
            return context.original(query, key, value)
    settings = (context.scale, context.is_causal, context.dropout, context.is_local, context.owner)
    numbers = (context.first_head, patch.handle)
    inputs = autocast_inputs(query, key, value)
    output: Tensor = torch.ops.prescore.attend(*inputs, context.mask, *settings, *numbers)[0]
    return output


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refuse_or_warn(patch: Patch, owner: str, obstacles: tuple[str, ...]) -> None:
    """While a graph is traced: what the operator cannot do is refused, or becomes the model's own attention."""
    refuse = getattr(patch.attend, "refuse_or_warn", None)
    if refuse is not None:
        refuse(patch.layer, owner, obstacles)


def _run(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> Tensor:
    mask, scale, is_causal, dropout, is_local, owner, first_head, handle = settings
    patch = PATCHES_BY_HANDLE.get(handle)
    if patch is None:
        raise Unsupported(f"compiled attention in {owner}", ["what was applied to the model has been undone"])
    context = AttentionContext(
        *(patch.layer, patch.n_prefix, scale, mask, is_causal, dropout, owner),
        is_local=is_local,
        no_index="a compiled graph keeps none",
        first_head=first_head,
    )
    return patch.attend(query, key, value, context)


def _forward(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """The output, and the seed of the dropout."""
    dropout = settings[3]
    seed = torch.zeros(1, dtype=torch.int64, device="cpu")
    if dropout:
        seed = torch.randint(_SEEDS, (1,), dtype=torch.int64, device="cpu")
    with torch.no_grad(), _seeded(query, seed, dropout):
        return _contiguous_copy(_run(query, key, value, *settings)), seed


def _backward(grad: Tensor, seed: Tensor, query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> Any:
    with torch.enable_grad(), _seeded(query, seed, settings[3]):
        query, key, value = (tensor.detach().requires_grad_() for tensor in (query, key, value))
        grads = torch.autograd.grad(_run(query, key, value, *settings), (query, key, value), grad)
    return tuple(_contiguous_copy(gradient) for gradient in grads)


@contextmanager
def _seeded(query: Tensor, seed: Tensor, dropout: float) -> Iterator[None]:
    """Seed torch's generators for one call with dropout, and restore them afterwards."""
    with torch.random.fork_rng(devices=[query.device] if query.is_cuda else [], enabled=bool(dropout)):
        if dropout:
            torch.manual_seed(int(seed))
        yield


def _contiguous_copy(tensor: Tensor) -> Tensor:
    """As an operator must return it: contiguous, and no view of an input."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _forward_shapes(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    output = query.new_empty((*query.shape[:3], value.shape[-1]))
    return output, torch.empty(1, dtype=torch.int64, device="cpu")


def _backward_shapes(grad: Tensor, seed: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, *settings = inputs
    ctx.save_for_backward(query, key, value, mask, output[1])
    ctx.settings = settings


def _differentiate(ctx: Any, grad: Tensor, _seed_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, mask, seed = ctx.saved_tensors
    grads = torch.ops.prescore.attend_backward(grad, seed, query, key, value, mask, *ctx.settings)
    return (*grads, *(None for _ in range(1 + len(ctx.settings))))


_LIBRARY.define(f"attend({_ARGUMENTS}) -> (Tensor, Tensor)")
_LIBRARY.define(f"attend_backward(Tensor grad, Tensor seed, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
# on every device, and above autograd's keys, so that the backward pass can attend with gradients
_LIBRARY.impl("attend", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("attend_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("prescore::attend", _forward_shapes, lib=_LIBRARY)
torch.library.register_fake("prescore::attend_backward", _backward_shapes, lib=_LIBRARY)
torch.library.register_autograd("prescore::attend", _differentiate, setup_context=_save, lib=_LIBRARY)
