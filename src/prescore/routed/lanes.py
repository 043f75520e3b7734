"""Routed attention of sequences that begin at one position: the exact beginning, then some key heads at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.call import Call
from prescore.config import Routed
from prescore.ops.backend import Backend
from prescore.routed.compiled.far import level_for
from prescore.routed.compiled.nodes import build_nodes_compiled, can_build
from prescore.routed.far import Search
from prescore.routed.layout import Layout, make_layout
from prescore.routed.softmax import attend_sources
from prescore.routed.sources import Sources, View
from prescore.routed.tables import build_nodes, pooled
from prescore.routed.tolerance.within import attend_to_tolerance, is_over
from prescore.types import Attended
from prescore.values import Values

QUERY_BLOCK = 512
SHARE_PER_ROW = 2
"""A key is read where its weight may exceed one part in so many times `rows`: at most as many can."""
NUMBERS_AT_ONCE = 2**22
"""Numbers in the keys (or values) of the sequences that go together: copies of them are mapped memory in use."""

ERROR_FIGURES = ("error_estimate", "error_limit_mean", "error_limit_max", "read_further", "read_everything")
"""What a call with a tolerance tells; all zero where everything is read."""


class Answer(NamedTuple):
    """A result, and figures about it."""

    attended: Attended
    figures: Values


def attend_lanes(call: Call, config: Routed) -> Answer:
    """Attention over local chunks, sinks, rows found and stand-ins.

    Args:
        call: Aligned inputs whose queries all begin at one position. Padding may only lie behind the last real
            key, and in causal mode only where each query has its own key; without a causal mask every sequence
            has a full chunk.
        config: The geometry, and how many rows are looked for.
    """
    layout = make_layout(call.n_query, call.n_keys, causal=call.is_causal, config=config)
    n_exact = layout.n_exact if call.query.numel() and call.key.numel() else layout.n_query
    figures = geometry(layout, n_exact, config)
    results = []
    if n_exact or not layout.n_query:
        results.append(_beginning(call, layout, n_exact))
    if n_exact < layout.n_query:
        routed = _attend_heads(call, layout, n_exact, config)
        results.append(routed.attended)
        _count(figures, layout, n_exact, routed.counts / routed.attended.lse.numel())
        figures["native"] = level_for(call.query, call.value.shape[-1], layout.leaf, call.backend)
    whole = results[0]
    if len(results) > 1:
        whole = Attended(*(torch.cat(tensors, dim=2) for tensors in zip(*results, strict=True)))
    if config.tolerance is None or n_exact == layout.n_query:
        return Answer(whole, figures)
    limit, error, further = (pad(bar, (n_exact, 0)) for bar in routed.bars)
    over = is_over(limit, config)
    if call.query_valid is not None:
        over &= call.query_valid[:, None]
    real = torch.ones_like(over) if call.query_valid is None else call.query_valid[:, None].expand_as(over)
    figures["rows_per_query"] += float((over * layout.visible_rows().to(over.device)).mean())
    figures.update(error_figures(limit[real], error[real], further[real], over[real]))
    return Answer(whole, figures)


def error_figures(limit: Tensor, error: Tensor, further: Tensor, over: Tensor) -> Values:
    """Figures about the error bars of some queries, of which those `over` the tolerance read everything."""
    if not limit.numel():
        return dict.fromkeys(ERROR_FIGURES, 0.0)
    bars = limit.masked_fill(over, 0.0)
    return {
        "error_estimate": float(error.masked_fill(over, 0.0).mean()),
        "error_limit_mean": float(bars.mean()),
        "error_limit_max": float(bars.max()),
        "read_further": float((further | over).double().mean()),
        "read_everything": float(over.double().mean()),
    }


def search_of(config: Routed) -> Search:
    """What is looked for with so many rows."""
    return Search(float(SHARE_PER_ROW * config.rows))


def exact_answer(call: Call, config: Routed) -> Answer:
    """Every query of the call reads every key it may see."""
    layout = make_layout(call.n_query, call.n_keys, causal=call.is_causal, config=config)
    return Answer(call.exactly("few"), geometry(layout, layout.n_query, config))


def geometry(layout: Layout, n_exact: int, config: Routed) -> Values:
    """What is known before anything was read, as if all queries read everything."""
    met = float(layout.visible_rows().mean()) if layout.n_query else 0.0
    nothing = dict.fromkeys(("searched_keys", "far_rows", "stand_in_rows"), 0.0)
    bars = dict.fromkeys(ERROR_FIGURES if config.tolerance is not None else (), 0.0)
    return {**asdict(layout), "exact_queries": n_exact, **nothing, "rows_per_query": met, **bars}


def _count(figures: Values, layout: Layout, n_exact: int, each: Tensor) -> None:
    """Figures with what was found: `each` holds keys searched and rows read by a routed query, on average."""
    position = torch.arange(n_exact, layout.n_query) + layout.first
    searched, found = each.tolist()
    figures["searched_keys"], figures["far_rows"] = searched, found
    figures["stand_in_rows"] = float(layout.chunks_seen(position).double().mean()) * layout.nodes_per_chunk
    routed = 1 - n_exact / layout.n_query
    figures["rows_per_query"] = float(layout.rows_in_any_case().mean()) + found * routed


def _beginning(call: Call, layout: Layout, n_exact: int) -> Attended:
    """The first queries, which read everything exactly."""
    query, key, value, valid = call.query[:, :, :n_exact], call.key, call.value, call.valid
    if layout.causal:
        stop = layout.first + n_exact
        key, value = key[:, :, :stop], value[:, :, :stop]
        valid = None if valid is None else valid[:, :stop]
    return replace(call, query=query, key=key, value=value, valid=valid).exactly("head")


class _Routed(NamedTuple):
    """Results of routed queries, what all of them searched and read, and with a tolerance their error bars."""

    attended: Attended
    counts: Tensor
    bars: tuple[Tensor, ...]


def _attend_heads(call: Call, layout: Layout, n_exact: int, config: Routed) -> _Routed:
    """The queries behind the first `n_exact`."""
    frame, search = Frame.of(call, layout, n_exact), search_of(config)
    lanes: list[tuple[Tensor, ...]] = []
    counts = torch.zeros(2, dtype=torch.double, device=call.query.device)
    for lane in frame.lanes(call):
        backend = call.backend.at(f"lane {len(lanes)}")
        view = View(
            layout.causal,
            frame.size,
            frame.visible(lane, layout),
            layout.nodes_per_chunk,
            slice(frame.before, frame.before + frame.n_query),
            search,
            call.scale,
            backend,
        )
        sources = _sources(lane, layout, frame, backend)
        if config.tolerance is None:
            found = attend_sources(lane.query, sources, view)
            lanes.append((found.output, found.lse))
            counts += found.counts
        else:
            bars = attend_to_tolerance(lane.query, sources, view, config, call.streams.child("samples").seed)
            lanes.append(bars[:5])
            counts += bars.counts
    output, *each = (torch.cat(part) if len(part) > 1 else part[0] for part in zip(*lanes, strict=True))
    lse, *told = (frame.join(part[..., None]).squeeze(-1) for part in each)
    return _Routed(Attended(frame.join(output), lse), counts, tuple(told))


class Lane(NamedTuple):
    """Some lanes: queries `[t, G, n * size, D]`, keys and values `[t, Nk, D]`, valid keys `[t, Nk]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor | None


@dataclass(frozen=True)
class Frame:
    """How routed queries lie in blocks; causal blocks lie on the grid of chunks, filled up at both ends."""

    batch: int
    n_kv_heads: int
    group: int
    n_query: int
    size: int
    n_blocks: int
    first_chunk: int
    before: int

    @classmethod
    def of(cls, call: Call, layout: Layout, skipped: int) -> Frame:
        """The frame of the queries behind the first `skipped`."""
        n_query = call.n_query - skipped
        size = layout.chunk if layout.causal else min(QUERY_BLOCK, n_query)
        behind = layout.first + skipped - layout.sinks
        first_chunk, before = divmod(behind, size) if layout.causal else (0, 0)
        return cls(
            batch=call.key.shape[0],
            n_kv_heads=call.key.shape[1],
            group=call.group,
            n_query=n_query,
            size=size,
            n_blocks=-(-(before + n_query) // size),
            first_chunk=first_chunk,
            before=before,
        )

    def lanes(self, call: Call) -> Iterator[Lane]:
        """Some lanes at a time.

        So few that what is made on the way is memory in use: fresh memory costs more than the arithmetic. A long
        sequence goes alone, short ones go together.
        """
        after = self.n_blocks * self.size - self.before - self.n_query
        queries = call.query[:, :, call.n_query - self.n_query :]
        queries = pad(queries, (0, 0, self.before, after)) if self.before or after else queries
        queries = queries.reshape(-1, self.group, self.n_blocks * self.size, queries.shape[-1])
        keys, values = (tensor.flatten(0, 1) for tensor in (call.key, call.value))
        valids = None if call.valid is None else call.valid.repeat_interleave(self.n_kv_heads, dim=0)
        step = max(1, NUMBERS_AT_ONCE // (call.n_keys * max(keys.shape[-1], values.shape[-1])))
        for start in range(0, len(queries), step):
            some = slice(start, start + step)
            yield Lane(queries[some], keys[some], values[some], None if valids is None else valids[some])

    def visible(self, lane: Lane, layout: Layout) -> Tensor:
        """`[t, n]` nodes that each block sees."""
        n_lanes = lane.query.shape[0]
        if layout.causal:
            chunks = torch.arange(self.n_blocks).expand(n_lanes, -1) + self.first_chunk - 1
        else:
            chunks = chunks_of(lane, layout).cpu()[:, None].expand(-1, self.n_blocks)
        return (chunks * layout.nodes_per_chunk).to(torch.int32)

    def join(self, lanes: Tensor) -> Tensor:
        """`[B * Hkv, G, n * size, d]` -> `[B, Hq, Nq, d]`."""
        heads = (self.batch, self.n_kv_heads * self.group)
        whole = lanes.reshape(*heads, self.n_blocks * self.size, lanes.shape[-1])
        return whole[:, :, self.before : self.before + self.n_query]


def chunks_of(lane: Lane, layout: Layout) -> Tensor:
    """`[t]` full chunks of each lane, without a causal mask."""
    if lane.valid is None:
        return torch.full((lane.query.shape[0],), layout.n_chunks)
    return (lane.valid.sum(1) - layout.sinks) // layout.chunk


def _sources(lane: Lane, layout: Layout, frame: Frame, backend: Backend) -> Sources:
    build = build_nodes_compiled if can_build(lane.key, lane.value, layout, backend) else build_nodes
    nodes = build(lane.key, lane.value, layout, layout.sinks, layout.n_chunks)
    near_bias = None
    if layout.causal:
        near_key, near_value = (_chunks(t, layout, frame) for t in (lane.key, lane.value))
    elif lane.valid is None:
        tail = layout.sinks + layout.n_chunks * layout.chunk
        near_key, near_value = (t[:, tail:] for t in (lane.key, lane.value))
    else:
        near_key, near_value, near_bias = _tails(lane, lane.valid, layout)
    return Sources(
        key=lane.key,
        value=lane.value,
        sink_key=lane.key[:, : layout.sinks],
        sink_value=lane.value[:, : layout.sinks],
        node_key=nodes.key,
        node_value=nodes.value,
        spread=pooled(nodes.spread),
        drift=pooled(nodes.drift),
        near_key=near_key,
        near_value=near_value,
        near_bias=near_bias,
        rows=nodes.rows,
        packed=nodes.codes.packed,
        scales=nodes.codes.scales,
    )


def _chunks(tensor: Tensor, layout: Layout, frame: Frame) -> Tensor:
    """Chunks before and of every block, `[T, n + 1, chunk, D]`."""
    start = layout.sinks + (frame.first_chunk - 1) * layout.chunk
    length = (frame.n_blocks + 1) * layout.chunk
    tail = tensor[:, start : start + length]
    if tail.shape[1] < length:
        tail = pad(tail, (0, 0, 0, length - tail.shape[1]))
    return tail.contiguous().view(-1, frame.n_blocks + 1, layout.chunk, tensor.shape[-1])


def _tails(lane: Lane, valid: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values behind the last full chunk of lanes that differ in length, and a bias that hides filler."""
    first = layout.sinks + chunks_of(lane, layout) * layout.chunk
    place = first[:, None] + torch.arange(layout.chunk, device=first.device)
    inside = place < valid.sum(1, keepdim=True)
    place = place.clamp_max(layout.n_key - 1)[..., None]
    near = (t.gather(1, place.expand(-1, -1, t.shape[-1])) for t in (lane.key, lane.value))
    bias = torch.zeros(inside.shape, dtype=lane.key.dtype, device=first.device).masked_fill(~inside, -torch.inf)
    return *near, bias  # type: ignore[return-value]
