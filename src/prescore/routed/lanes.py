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
from prescore.routed.bounds import ErrorBar, bound_figures, exact_for, sampled_error, unread_bounds
from prescore.routed.clusters import Clusters, build_clusters
from prescore.routed.heads import HeadLayout, head_layouts, in_order
from prescore.routed.layout import Layout, make_layout
from prescore.routed.levels import single_ranges, stand_in_ranges
from prescore.routed.rows import KINDS, mean_rows, most_rows, visible_rows
from prescore.routed.softmax import Sources, attend_sources
from prescore.routed.view import View
from prescore.types import Attended
from prescore.values import Values

QUERY_BLOCK = 512
PAIRS_AT_ONCE = 2**18
"""Pairs of queries and leaves that are sorted and worked off together."""
NUMBERS_AT_ONCE = 2**22
"""Numbers in the keys (or values) of the sequences that go together: copies of them are mapped memory in use."""


class Answer(NamedTuple):
    """A result, and figures: rows of each kind a query reads at most, queries read exactly, error bar."""

    attended: Attended
    figures: Values


def attend_lanes(call: Call, config: Routed, explain: bool) -> Answer:
    """Attention over local chunks, single keys, chosen leaves and stand-ins.

    Args:
        call: Aligned inputs whose queries all begin at one position. Padding may only lie behind the last real
            key, and in causal mode only where each query has its own key.
        config: The geometry; with `tolerance`, queries whose bound on misplaced mass exceeds it are recomputed
            exactly.
        explain: Report the bounds and a sampled error in the figures.
    """
    layout = make_layout(call.n_query, call.n_keys, causal=call.is_causal, config=config, padded=call.padded)
    n_exact = layout.n_exact if call.query.numel() and call.key.numel() else layout.n_query
    figures = _figures(layout, n_exact)
    bounded = explain or config.tolerance is not None
    results, bars = [], []
    if n_exact or not layout.n_query:
        results.append(_beginning(call, layout, n_exact))
        bars.append(ErrorBar(*(torch.zeros_like(results[0].lse, requires_grad=False),) * 2))
    if n_exact < layout.n_query:
        layouts = head_layouts(call, results[0] if n_exact else None, layout, config)
        attended, bar = _attend_heads(call, layouts, n_exact, bounded)
        results.append(attended)
        bars += [bar] if bar is not None else []
        n_sequences = call.key.shape[:2].numel()
        figures.update(most_rows(layouts, n_sequences), rows_per_query=mean_rows(layouts, n_sequences))
        figures["fine_heads"] = sum(own.count(n_sequences) for own in layouts if own.fine)
    whole = results[0]
    if len(results) > 1:
        whole = Attended(*(torch.cat(tensors, dim=2) for tensors in zip(*results, strict=True)))
    if not bounded:
        return Answer(whole, figures)
    bar = ErrorBar(*(torch.cat([getattr(b, f) for b in bars], dim=2) for f in ("lost", "misplaced")))
    return _within_tolerance(call, Answer(whole, figures), bar, config, explain)


def exact_answer(call: Call, config: Routed, explain: bool) -> Answer:
    """Every query of the call reads every key it may see."""
    layout = make_layout(call.n_query, call.n_keys, causal=call.is_causal, config=config)
    figures = _figures(layout, layout.n_query)
    if config.tolerance is not None:
        figures["recomputed_queries"] = 0
    if explain or config.tolerance is not None:
        nothing = torch.zeros(0)
        figures.update(bound_figures(ErrorBar(nothing, nothing), nothing.bool()))
        figures.update(sampled_error=0.0, sampled_error_se=0.0)
    return Answer(call.exactly("few"), figures)


def _attend_heads(
    call: Call, layouts: list[HeadLayout], n_exact: int, bounded: bool
) -> tuple[Attended, ErrorBar | None]:
    """The queries behind the first `n_exact`, each key head by its own geometry."""
    frame = Frame.of(call, layouts[0].layout, n_exact)
    lanes: list[tuple[Tensor, ...]] = []
    for own, lane in frame.lanes(call, layouts):
        clusters = build_clusters(lane.key, lane.value, own, lane.valid)
        sources = _sources(lane, own, clusters, frame)
        view = _view(own, frame, replace(call, backend=call.backend.at(f"lane {len(lanes)}")))
        found = attend_sources(lane.query, sources, view)
        bounds = unread_bounds(lane.query, found.lse, found.read, clusters, view) if bounded else ()
        lanes.append((found.output, found.lse, *bounds))
    output, *figures = (in_order(list(part), layouts) for part in zip(*lanes, strict=True))
    lse, *limits = (frame.join(figure[..., None]).squeeze(-1) for figure in figures)
    return Attended(frame.join(output), lse), ErrorBar(*limits) if bounded else None


def _within_tolerance(call: Call, answer: Answer, bar: ErrorBar, config: Routed, explain: bool) -> Answer:
    """Recompute what the tolerance does not allow, and report the bounds that hold afterwards."""
    whole, figures = answer
    real = torch.ones_like(bar.lost, dtype=torch.bool)
    if call.query_valid is not None:
        real &= call.query_valid[:, None]
    if config.tolerance is not None:
        over = ~(bar.misplaced <= config.tolerance) & real  # what is not a number certifies nothing
        figures["recomputed_queries"] = int(over.sum())
        if figures["recomputed_queries"]:
            layout = make_layout(call.n_query, call.n_keys, causal=call.is_causal, config=config)
            # they meet every key they may see, beside what they have read
            figures["rows_per_query"] += float((over * visible_rows(layout).to(over.device)).mean())
            exact = exact_for(replace(call, backend=call.backend.at("recomputed")), over)
            output = torch.where(over[..., None], exact.output, whole.output)
            whole = Attended(output, torch.where(over, exact.lse, whole.lse))
            bar = ErrorBar(bar.lost.masked_fill(over, 0.0), bar.misplaced.masked_fill(over, 0.0))
    if not explain:
        return Answer(whole, figures)
    figures.update(bound_figures(bar, real))
    if call.backend.dropout is None:  # else most of the difference is what was dropped
        figures.update(sampled_error(call, whole, real))
    return Answer(whole, figures)


def _beginning(call: Call, layout: Layout, n_exact: int) -> Attended:
    """The first queries, which read everything exactly."""
    query, key, value, valid = call.query[:, :, :n_exact], call.key, call.value, call.valid
    if layout.causal:
        stop = layout.first + n_exact
        key, value = key[:, :, :stop], value[:, :, :stop]
        valid = None if valid is None else valid[:, :stop]
    return replace(call, query=query, key=key, value=value, valid=valid).exactly("head")


class Lane(NamedTuple):
    """Some sequences: query blocks `[t, n, G, size, D]`, keys and values `[t, 1, Nk, D]`, valid keys `[t, Nk]`."""

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

    def split(self, query: Tensor) -> Tensor:
        """`[B, Hq, Nq, D]` -> `[B * Hkv, n, G, size, D]`."""
        after = self.n_blocks * self.size - self.before - self.n_query
        filled = pad(query, (0, 0, self.before, after))
        shape = (self.batch * self.n_kv_heads, self.group, self.n_blocks, self.size, query.shape[-1])
        return filled.reshape(shape).transpose(1, 2)

    def lanes(self, call: Call, layouts: list[HeadLayout]) -> Iterator[tuple[Layout, Lane]]:
        """Some sequences (key heads of the batch) at a time, each with its geometry.

        So few that what is made on the way is memory in use: fresh memory costs more than the arithmetic. A long
        sequence goes alone, short ones go together.
        """
        blocks = self.split(call.query[:, :, call.n_query - self.n_query :])
        keys, values = (tensor.reshape(-1, 1, *tensor.shape[2:]) for tensor in (call.key, call.value))
        valids = None if call.valid is None else call.valid.repeat_interleave(self.n_kv_heads, dim=0)
        step = max(1, NUMBERS_AT_ONCE // (call.n_keys * max(keys.shape[-1], values.shape[-1])))
        for own in layouts:
            queries, some_keys, some_values = (own.of(tensor) for tensor in (blocks, keys, values))
            some_valids = None if valids is None else own.of(valids)
            for start in range(0, len(queries), step):
                lane = slice(start, start + step)
                real = None if some_valids is None else some_valids[lane]
                yield own.layout, Lane(queries[lane], some_keys[lane], some_values[lane], real)

    def join(self, blocks: Tensor) -> Tensor:
        """The inverse of `split`, for any last dimension."""
        n_heads = self.n_kv_heads * self.group
        shape = (self.batch, n_heads, self.n_blocks * self.size, blocks.shape[-1])
        return blocks.transpose(1, 2).reshape(shape)[:, :, self.before : self.before + self.n_query]


def _view(layout: Layout, frame: Frame, call: Call) -> View:
    pieces = [layout.n_pieces] * frame.n_blocks
    if layout.causal:
        pieces = list(range(frame.first_chunk - 1, frame.first_chunk - 1 + frame.n_blocks))
    pairs_per_block = frame.group * frame.size * max(1, layout.n_chosen)
    return View(
        layout,
        tuple(stand_in_ranges(layout, seen) for seen in pieces),
        tuple(single_ranges(layout, seen) for seen in pieces),
        layout.n_chosen,
        call.scale,
        call.backend,
        max(1, PAIRS_AT_ONCE // pairs_per_block),
    )


def _sources(lane: Lane, layout: Layout, clusters: Clusters, frame: Frame) -> Sources:
    leaf_bias = None
    if clusters.alive is not None or layout.leaf_room > layout.leaf:
        leaf_bias = lane.key.new_full(clusters.leaf_key.shape[:3], -torch.inf)
        member = torch.ones_like(clusters.rows, dtype=torch.bool) if clusters.alive is None else clusters.alive
        leaf_bias[:, :, : layout.leaf].masked_fill_(member, 0.0)
    return Sources(
        mean_key=clusters.mean_key,
        mean_value=clusters.mean_value,
        single_key=clusters.single_key,
        single_value=clusters.single_value,
        leaf_key=clusters.leaf_key,
        leaf_value=clusters.leaf_value,
        log_count=clusters.log_count,
        single_bias=clusters.single_bias,
        leaf_bias=leaf_bias,
        local_key=_chunks(lane.key, layout, frame) if layout.causal else None,
        local_value=_chunks(lane.value, layout, frame) if layout.causal else None,
    )


def _chunks(tensor: Tensor, layout: Layout, frame: Frame) -> Tensor:
    """Chunks before and of every block, `[T, n + 1, chunk, D]`."""
    start = layout.sinks + (frame.first_chunk - 1) * layout.chunk
    length = (frame.n_blocks + 1) * layout.chunk
    tail = tensor[:, :, start : start + length]
    tail = pad(tail, (0, 0, 0, length - tail.shape[2])).contiguous()
    return tail.view(-1, frame.n_blocks + 1, layout.chunk, tensor.shape[-1])


def _figures(layout: Layout, n_exact: int) -> Values:
    """What is known before anything was read, as if all queries read everything."""
    met = float(visible_rows(layout).mean()) if layout.n_query else 0.0
    return {
        **asdict(layout),
        "exact_queries": n_exact,
        "local_rows": 2 * layout.chunk if layout.causal else 0,
        **dict.fromkeys(KINDS, 0),
        "rows_per_query": met,
        "fine_heads": 0,
    }
