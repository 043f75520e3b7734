"""The far part of some lanes in plain torch, block by block, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.routed.codes import Codes
from prescore.routed.far import Seen, find_rows, highest, row_sums, weigh
from prescore.routed.sources import Sources, View
from prescore.types import Attended

NUMBERS_AT_ONCE = 2**24
"""Approximate logits formed at once."""


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
    for lane, head, rows, nodes in far_blocks(query, sources, view):
        own = query[lane, head, rows].to(lse.dtype) * view.scale
        before, seen = lse[lane, head, rows], seen_of(sources, view, lane, nodes)
        found = find_rows(own, seen, view.search, near=before)
        weighed = weigh(own, seen, found, seen.key.index_select(0, found.row).to(own.dtype))
        peak = highest(weighed, found, before)
        dropout = view.backend.at(f"far {lane} {head} {rows.start}").dropout
        row_value = seen.value.index_select(0, found.row).to(own.dtype)
        total, mass = row_sums(weighed, peak, seen, found, row_value, dropout)
        weight = torch.exp(before - peak)
        mass = mass + weight
        output[lane, head, rows] = (total + output[lane, head, rows] * weight[:, None]) / mass.masked_fill(
            mass == 0, 1.0
        )[:, None]
        lse[lane, head, rows] = peak + mass.log()
        limit[lane, head, rows] = found.limit
        counts += torch.stack((found.n_searched, torch.tensor(found.row.shape[0], device=query.device)))
    return Attended(output, lse), limit, counts


def attend_plain_backward(
    grad: Tensor, query: Tensor, sources: Sources, view: View, merged: Attended, limit: Tensor, sums: list[Tensor]
) -> None:
    """Add the gradients of the far part to `sums`, of the query and the learned sources."""
    grad_query, grad_key, grad_value, *grad_columns = sums
    wide = merged.lse.dtype
    product = (grad.to(wide) * merged.output.to(wide)).sum(-1)
    for lane, head, rows, nodes in far_blocks(query, sources, view):
        own = query[lane, head, rows].to(wide) * view.scale
        seen = seen_of(sources, view, lane, nodes)
        found = find_rows(own, seen, view.search, near=None, limit=limit[lane, head, rows])
        shift = merged.lse[lane, head, rows]
        shift = shift.masked_fill(torch.isneginf(shift), torch.inf)  # saw nothing: every weight is 0
        row_key, row_value = (t.index_select(0, found.row).to(wide) for t in (seen.key, seen.value))
        learned = [t.detach().requires_grad_() for t in (own, row_key, row_value, *seen[2:6])]
        with torch.enable_grad():
            own, row_key, row_value, *columns = learned
            seen = seen._replace(
                sink_key=columns[0], sink_value=columns[1], node_key=columns[2], node_value=columns[3]
            )
            dropout = view.backend.at(f"far {lane} {head} {rows.start}").dropout
            weighed = weigh(own, seen, found, row_key)
            total, mass = row_sums(weighed, shift, seen, found, row_value, dropout)
        grads = torch.autograd.grad(
            (total, mass), learned, (grad[lane, head, rows].to(wide), -product[lane, head, rows])
        )
        grad_query[lane, head, rows] += grads[0] * view.scale
        grad_key[lane].index_add_(0, found.row, grads[1])
        grad_value[lane].index_add_(0, found.row, grads[2])
        for total, part in zip(grad_columns, grads[3:], strict=False):
            total[lane, : part.shape[0]] += part


def far_blocks(query: Tensor, sources: Sources, view: View) -> Iterator[_Block]:
    """The queries of a call, some of one head at a time."""
    for lane, nodes in enumerate(view.visible.tolist()):
        for block, seen in enumerate(nodes):
            if not seen and not sources.sink_key.shape[1]:
                continue
            step = max(1, min(view.size, NUMBERS_AT_ONCE // max(1, seen * sources.rows.shape[2])))
            for head in range(query.shape[1]):
                first = max(block * view.size, view.real.start)
                last = min((block + 1) * view.size, view.real.stop)
                for start in range(first, last, step):
                    yield _Block(lane, head, slice(start, min(start + step, last)), seen)


def seen_of(sources: Sources, view: View, lane: int, nodes: int) -> Seen:
    """What blocks see; without nodes the spread is that of none."""
    pool = max(0, (nodes - 1) // view.nodes_per_chunk)
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
