"""One softmax over what lies near, sinks, rows found and stand-ins, with exact gradients.

Forward merges the parts by log-sum-exp; backward runs each part under the merged output and lse, so nothing is
stored but the inputs and each query's limit, from which its rows are found again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prescore.ops.backend import Tile, accumulation_dtype
from prescore.ops.parts import fold_lse_gradient
from prescore.routed.compiled.far import attend_compiled, attend_compiled_backward, can_run
from prescore.routed.local import Chunks, attend_chunks, attend_chunks_backward
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
    """Attend to all sources at once; `query [T, G, Q, D]` holds whole blocks."""
    return Merged(*_AttendSources.apply(view, query, *sources))  # type: ignore[no-untyped-call]


class _AttendSources(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, view: View, query: Tensor, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
        sources, wide = Sources(*tensors), accumulation_dtype(query.dtype)
        output = query.new_empty((*query.shape[:3], sources.value.shape[-1]), dtype=wide)
        near = Attended(output, query.new_empty(query.shape[:3], dtype=wide))
        attend_near(query, sources, view, near)
        compiled = can_run(query, sources, view)
        attend = attend_compiled if compiled else attend_plain
        whole, limit, counts = attend(query, sources, view, near)
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
        _attend_near_backward(grad, query, sources, ctx.view, merged, sums)
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


def _blocks(tensor: Tensor, view: View) -> Tensor:
    """`[G, Q, ...]` of a lane -> `[n, G, t, ...]`, a view."""
    blocks: Tensor = tensor.unflatten(1, (view.n_blocks, view.size)).transpose(0, 1)
    return blocks


def _of_lane(view: View, lane: int) -> View:
    """The view with what a lane draws by itself."""
    return replace(view, backend=view.backend.at(f"near {lane}"))


def _tail(query: Tensor, sources: Sources, view: View) -> Tile:
    bias = None if sources.near_bias is None else sources.near_bias[:, None, None].to(query.dtype)
    return Tile(query, sources.near_key[:, None], sources.near_value[:, None], view.scale, bias)


def attend_near(query: Tensor, sources: Sources, view: View, into: Attended) -> None:
    """What queries read in any case, beside the sinks, written to `into`."""
    if not view.causal:
        if not sources.near_key.shape[1]:
            into.output.zero_()
            into.lse.fill_(-torch.inf)
            return
        found = view.backend.at("tail").forward(_tail(query, sources, view))
        into.output.copy_(found.output)
        into.lse.copy_(found.lse)
        return
    for filler in (slice(0, view.real.start), slice(view.real.stop, None)):
        into.output[:, :, filler] = 0
        into.lse[:, :, filler] = 0
    for lane in range(query.shape[0]):
        chunks = Chunks(sources.near_key[lane], sources.near_value[lane])
        own = Attended(_blocks(into.output[lane], view), _blocks(into.lse[lane], view))
        attend_chunks(_blocks(query[lane], view), chunks, _of_lane(view, lane), own)


def _attend_near_backward(
    grad: Tensor, query: Tensor, sources: Sources, view: View, merged: Attended, sums: list[Tensor]
) -> None:
    """Add the gradients of what lies near to `sums`, of the query and the learned sources."""
    grad_query, *grads = sums
    grad_near = Chunks(*grads[8:10])
    if merged.output.dtype != query.dtype:  # a gradient of lse is folded in, which half precision would round away
        query = query.to(merged.output.dtype)
        sources = sources._replace(
            near_key=sources.near_key.to(query.dtype), near_value=sources.near_value.to(query.dtype)
        )
    grad = grad.to(query.dtype)
    if not view.causal:
        if sources.near_key.shape[1]:
            tile = _tail(query, sources, view)
            found = view.backend.at("tail").backward(tile, grad.contiguous(), merged)
            grad_query += found.query
            for total, part in zip(grad_near, found[1:], strict=True):
                total.add_(part[:, 0])
        return
    for lane in range(query.shape[0]):
        chunks = Chunks(sources.near_key[lane], sources.near_value[lane])
        own = Attended(_blocks(merged.output[lane], view), _blocks(merged.lse[lane], view))
        attend_chunks_backward(
            _blocks(grad[lane], view),
            _blocks(query[lane], view),
            chunks,
            own,
            _of_lane(view, lane),
            (_blocks(grad_query[lane], view), Chunks(grad_near.key[lane], grad_near.value[lane])),
        )
