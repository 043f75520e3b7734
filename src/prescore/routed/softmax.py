"""One softmax over what lies near, sinks, rows found and centroids, with exact gradients.

Forward merges the parts by log-sum-exp; backward runs each part under the merged output and lse, so nothing is
stored but the inputs and each query's limit, from which its rows are found again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prescore.ops.backend import accumulation_dtype
from prescore.ops.parts import fold_lse_gradient
from prescore.routed.local import attend_near, attend_near_backward
from prescore.routed.native import attend_compiled, attend_compiled_backward, can_run
from prescore.routed.plain import attend_plain, attend_plain_backward
from prescore.routed.sources import N_LEARNED, Sources, View
from prescore.types import Attended

_MOST_EXPONENT = 80.0


class Merged(NamedTuple):
    """Output `[T, G, Q, Dv]`, lse `[T, G, Q]`, and two counts: keys searched, rows read."""

    output: Tensor
    lse: Tensor
    counts: Tensor


def attend_sources(query: Tensor, sources: Sources, view: View) -> Merged:
    """Attend to all sources at once; `query [T, G, Q, D]`."""
    return Merged(*_AttendSources.apply(view, query, *sources))  # type: ignore[no-untyped-call]


class _AttendSources(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, view: View, query: Tensor, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
        sources = Sources(*tensors)
        compiled = can_run(query, sources, view)
        if compiled:
            whole, limit, counts = attend_compiled(query, sources, view)
        else:
            whole, limit, counts = attend_plain(query, sources, view, attend_near(query, sources, view))
        result = whole.output.to(query.dtype)
        ctx.save_for_backward(query, *tensors, result, whole.lse, limit)
        ctx.view, ctx.compiled = view, compiled
        ctx.mark_non_differentiable(counts)
        ctx.set_materialize_grads(False)
        return result, whole.lse, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
        query, *tensors, output, lse, limit = ctx.saved_tensors  # once: checkpointing forbids a second look
        sources, dtype = Sources(*tensors), query.dtype
        wide = accumulation_dtype(dtype)
        if grad is None and grad_lse is None:
            return (None,) * (2 + len(sources))
        if grad is None:
            grad = torch.zeros_like(output)
        if grad_lse is not None:
            grad, output = _folded(grad.to(wide), output.to(wide), grad_lse)
        merged = Attended(output, lse)
        # contiguous, whatever the inputs are: compiled code adds to them by place
        sums = [torch.zeros(t.shape, dtype=wide, device=t.device) for t in (query, *sources[:N_LEARNED])]
        attend_backward = attend_compiled_backward if ctx.compiled else attend_plain_backward
        grad_limit = attend_backward(grad, query, sources, ctx.view, merged, limit, sums)
        grad, merged = _through_the_limit(grad, merged, limit + ctx.view.search.log_share, grad_limit)
        attend_near_backward(grad, query, sources, ctx.view, merged, sums[:3])
        own = [query, *sources[:N_LEARNED]]
        grads = [total.to(t.dtype) for total, t in zip(sums, own, strict=True)]
        return None, *grads, *(None,) * (len(sources) - N_LEARNED)


def _through_the_limit(
    grad: Tensor, merged: Attended, known: Tensor, grad_limit: Tensor
) -> tuple[Tensor, Attended]:
    """Gradient and merged result under which the near part also feels its share in each query's limit.

    A near key of logit `x` moves the limit by `exp(x - known)`, and has the weight `exp(x - lse)` in the result:
    the gradient of the limit, times `exp(lse - known)`, is one of lse.
    """
    # where that overflows, the near part weighs nothing
    more = grad_limit * torch.exp((merged.lse - known).clamp_max(_MOST_EXPONENT))
    more = more.masked_fill(grad_limit == 0, 0.0)  # perhaps nothing was looked for, and known is no number
    if not bool(more.any()):
        return grad, merged
    wide, dtype = merged.lse.dtype, merged.output.dtype
    moved, output = _folded(grad.to(wide), merged.output.to(wide), more)
    # a half type rounds it as it rounds the output itself
    return moved.to(grad.dtype), Attended(output.to(dtype), merged.lse)


def _folded(grad: Tensor, output: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
    """`fold_lse_gradient` of `[T, G, Q, Dv]` and `[T, G, Q]`."""
    rows = (-1, grad.shape[-1])
    folded, moved = fold_lse_gradient(grad.reshape(rows), output.reshape(rows), grad_lse.reshape(-1))
    return folded.view(grad.shape), moved.view(output.shape)
