"""Autograd, autocast and compiler guards: autocast, graphs, function transforms, derivatives beyond the first.

Autocast acts on a call as on torch's own attention: inputs are cast to its dtype, and nothing inside is. Function
transforms, forward-mode and second derivatives are refused, with the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from prescore.errors import Unsupported

_NO_TRANSFORMS = "torch.func transforms (grad, vmap, jvp, ...) cannot differentiate a selection of keys"
_NO_TANGENTS = "forward-mode derivatives are not defined for it; backward gives first derivatives"
_NO_GRAPH = (
    "which keys are read depends on their numbers, which a graph does not have: call it outside of the graph"
)
_NO_SECOND = "second derivatives are not defined for it; create_graph=True ends at its inputs"

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function at which `torch.compile` breaks its graph; under `fullgraph=True` torch says why."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        torch._dynamo.graph_break(msg=f"prescore.{function.__name__}: {_NO_GRAPH}")
        run: Callable[_P, _R] = torch.compiler.disable(function)
        return run(*args, **kwargs)

    return call


def refuse_tracing() -> None:
    """Refuse `torch.jit.trace`, which would record the keys that one input reads."""
    if torch._C._get_tracing_state() is not None:
        raise Unsupported("attention", ["torch.jit.trace would record the choice of keys of one input"])


def without_autocast(*tensors: Tensor) -> AbstractContextManager[tuple[Tensor, ...]]:
    """Cast the tensors as autocast does and switch it off for the body; refuses transforms of torch.func."""
    given = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    _refuse_transforms(given)
    kinds = {tensor.device.type for tensor in given if tensor.device.type != "meta"}
    active = [kind for kind in kinds if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)]
    if len(kinds) != 1 or not active:
        return nullcontext(tensors)
    return _switched_off(active[0], tuple(autocast_inputs(*tensors)))


@contextmanager
def _switched_off(kind: str, tensors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    with torch.autocast(kind, enabled=False):
        yield tensors


def autocast_inputs(*tensors: Tensor) -> Iterator[Tensor]:
    """The tensors as autocast, where it is on, passes them to torch's own attention: float64 and integers stay."""
    for tensor in tensors:
        lowered = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
        if lowered and torch.is_autocast_enabled(tensor.device.type):
            yield tensor.to(torch.get_autocast_dtype(tensor.device.type))
        else:
            yield tensor


def records_gradients(*tensors: Tensor) -> bool:
    """Whether autograd records a gradient for some of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def differentiable_once(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same tensors; a second derivative with respect to them is refused.

    Without this, a graph of the backward pass would lack what the engines compute outside of autograd, and second
    derivatives would be silently wrong.
    """
    tensors = query, key, value
    if not records_gradients(*tensors):
        return tensors
    once: tuple[Tensor, Tensor, Tensor] = _Once.apply(*tensors)  # type: ignore[no-untyped-call]
    return once


def _refuse_transforms(tensors: list[Tensor]) -> None:
    if torch._C._are_functorch_transforms_active():
        raise Unsupported("attention", [_NO_TRANSFORMS])
    level = forward_ad._current_level
    if level >= 0 and any(forward_ad.unpack_dual(t, level=level).tangent is not None for t in tensors):
        raise Unsupported("attention", [_NO_TANGENTS])


class _Once(torch.autograd.Function):
    """Identity, whose gradient refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return grads
        inputs = [tensor for tensor in ctx.saved_tensors if tensor.requires_grad]
        return tuple(None if grad is None else _Refusal.apply(grad, *inputs) for grad in grads)  # type: ignore[no-untyped-call]


class _Refusal(torch.autograd.Function):
    """Identity of its first argument that depends on all of them, and cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *inputs: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise Unsupported("attention", [_NO_SECOND])
