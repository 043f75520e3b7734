"""The far part of some lanes in plain torch, block by block, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.ops.dropout import Dropout
from prescore.routed.index import Codes
from prescore.routed.reference import (
    Found,
    Seen,
    find_rows,
    followed_limit,
    highest,
    limit_of,
    row_sums,
    scores_of,
    weigh,
)
from prescore.routed.sources import Sources, View
from prescore.types import Attended

QUERY_BLOCK = 512
"""Queries that are worked off together, at most."""
LOGITS_AT_ONCE = 2**24
"""Approximate ones formed at once."""


class _Block(NamedTuple):
    """Some queries of one head that see the same nodes."""

    lane: int
    head: int
    rows: slice
    nodes: int


def attend_plain(query: Tensor, sources: Sources, view: View, near: Attended) -> tuple[Attended, Tensor, Tensor]:
    """The far part on top of what lies near, in place; also each query's limit, and counts."""
    output, lse = near
    limit = torch.full_like(lse, torch.inf)
    counts = torch.zeros(2, dtype=torch.long, device=query.device)
    for block in far_blocks(query, sources, view):
        place = block[:3]
        own = query[place].to(lse.dtype) * view.scale
        before, seen = lse[place], seen_of(sources, view, block.lane, block.nodes)
        scores = scores_of(own, seen)
        own_limit = limit_of(scores, seen, view.search, before)
        found = find_rows(own, seen, view.search, scores, own_limit)
        row_key = seen.key.index_select(0, found.row).to(own.dtype)
        weighed = weigh(own, seen, scores, own_limit, found, row_key)
        peak = highest(weighed, found, before)
        row_value = seen.value.index_select(0, found.row).to(own.dtype)
        total, mass = row_sums(weighed, peak, seen, found, row_value, _dropout(view, block))
        weight = torch.exp(before - peak)
        mass = mass + weight
        total = total + output[place] * weight[:, None]
        output[place] = total / mass.masked_fill(mass == 0, 1.0)[:, None]
        lse[place] = peak + mass.log()
        limit[place] = own_limit
        counts += torch.stack((found.n_searched, torch.tensor(found.row.shape[0], device=query.device)))
    return Attended(output, lse), limit, counts


def attend_plain_backward(
    grad: Tensor, query: Tensor, sources: Sources, view: View, merged: Attended, limit: Tensor, sums: list[Tensor]
) -> Tensor:
    """Add the gradients of the far part to `sums`, of the query and the learned sources.

    Returns:
        `[T, G, Q]`, the gradient of each query's limit, which the near part has a share in.
    """
    grad_query, grad_key, grad_value, *grad_columns = sums[:7]
    grad_spread, grad_drift = sums[7:9]
    wide, grad_limit = merged.lse.dtype, torch.zeros_like(limit)
    product = (grad.to(wide) * merged.output.to(wide)).sum(-1)
    for block in far_blocks(query, sources, view):
        lane, place = block.lane, block[:3]
        seen = seen_of(sources, view, lane, block.nodes)
        own = query[place].to(wide) * view.scale
        found = find_rows(own, seen, view.search, scores_of(own, seen), limit[place])
        row_key, row_value = (t.index_select(0, found.row).to(wide) for t in (seen.key, seen.value))
        learned = [
            t.detach().requires_grad_()
            for t in (own, row_key, row_value, *seen[2:6], seen.spread, seen.drift, limit[place])
        ]
        with torch.enable_grad():
            both = _sums_again(learned, seen, found, view, merged.lse[place], _dropout(view, block))
        grads = torch.autograd.grad(both, learned, (grad[place].to(wide), -product[place]))
        grad_query[place] += grads[0] * view.scale
        grad_key[lane].index_add_(0, found.row, grads[1])
        grad_value[lane].index_add_(0, found.row, grads[2])
        for total, part in zip(grad_columns, grads[3:7], strict=True):
            total[lane, : part.shape[0]] += part
        pool = pool_of(view, block.nodes)
        grad_spread[lane, pool] += grads[7]
        grad_drift[lane, pool] += grads[8]
        grad_limit[place] = grads[9]
    return grad_limit


def _sums_again(
    learned: list[Tensor], seen: Seen, found: Found, view: View, lse: Tensor, dropout: Dropout | None
) -> tuple[Tensor, Tensor]:
    """What the forward pass summed, under the merged lse, as a function of all that gradients reach."""
    own, row_key, row_value, sink_key, sink_value, node_key, node_value, spread, drift, limit = learned
    seen = seen._replace(
        sink_key=sink_key,
        sink_value=sink_value,
        node_key=node_key,
        node_value=node_value,
        spread=spread,
        drift=drift,
    )
    scores = scores_of(own, seen)
    weighed = weigh(own, seen, scores, followed_limit(limit, scores, seen, view.search), found, row_key)
    shift = lse.masked_fill(torch.isneginf(lse), torch.inf)  # saw nothing: every weight is 0
    return row_sums(weighed, shift, seen, found, row_value, dropout)


def _dropout(view: View, block: _Block) -> Dropout | None:
    return view.backend.at(f"far {block.lane} {block.head} {block.rows.start}").dropout


def far_blocks(query: Tensor, sources: Sources, view: View) -> Iterator[_Block]:
    """The queries of a call, some of one head at a time."""
    for lane, rows, nodes in view.blocks():
        if not nodes:
            continue
        step = max(1, min(QUERY_BLOCK, LOGITS_AT_ONCE // (nodes * sources.rows.shape[2])))
        for head in range(query.shape[1]):
            for start in range(rows.start, rows.stop, step):
                yield _Block(lane, head, slice(start, min(start + step, rows.stop)), nodes)


def seen_of(sources: Sources, view: View, lane: int, nodes: int) -> Seen:
    """What blocks see."""
    pool = pool_of(view, nodes)
    wide = sources.node_key.dtype
    return Seen(
        key=sources.key[lane],
        value=sources.value[lane],
        sink_key=sources.sink_key[lane].to(wide),
        sink_value=sources.sink_value[lane].to(wide),
        node_key=sources.node_key[lane, :nodes],
        node_value=sources.node_value[lane, :nodes],
        rows=sources.rows[lane, :nodes],
        codes=Codes(sources.packed[lane, :nodes], sources.scales[lane, :nodes]),
        spread=sources.spread[lane, pool],
        drift=sources.drift[lane, pool],
    )


def pool_of(view: View, nodes: int) -> int:
    """Which pooled covariance belongs to so many nodes."""
    return (nodes - 1) // view.nodes_per_pool
