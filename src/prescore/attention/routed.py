"""Routed attention: queries choose clusters of keys; exact inside them, stand-ins for all others.

Why each part is there, with figures in docs/default.md: *local chunks*, because nearby tokens are read by
almost every head; *sinks and single keys*, because a few keys unlike all others draw mass from every query and
drown in any mean; *leaves chosen per query*, because what else matters depends on the query, and a choice shared
with later queries would leak the future; *fine leaves for heads that copy*, because a large leaf hides the one key
they look for; *stand-ins*, because many small weights add up. The ideas come from tree and multipole methods (one
mean for a far cluster), from cluster attention, and from mixture-of-experts dispatch (tiles of queries that read
one leaf).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.attention.bounds import ErrorBar, bound_figures, exact_rows, sampled_error, unread_bounds
from prescore.attention.exact import exact_parts
from prescore.attention.kernels import Backend, as_backend
from prescore.attention.parts import attend_parts
from prescore.attention.routed_clusters import Clusters, TreeBuilder, build_clusters
from prescore.attention.routed_core import Sources, attend_routed
from prescore.attention.routed_heads import HeadLayout, head_layouts, in_order
from prescore.attention.routed_layout import Layout, make_layout
from prescore.attention.routed_levels import single_ranges, stand_in_ranges
from prescore.attention.routed_plan import Plan
from prescore.attention.routed_rows import KINDS, mean_rows, most_rows, visible_rows
from prescore.config import PrescoreConfig
from prescore.types import Attended

Lane = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Query blocks, keys, values and valid keys of some sequences."""

QUERY_BLOCK = 512
PAIRS_AT_ONCE = 2**18
"""Pairs of queries and leaves that are sorted and worked off together."""
NUMBERS_AT_ONCE = 2**22
"""Numbers in the keys (or values) of the sequences that go together: copies of them are mapped memory in use."""


def routed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    valid: Tensor | None = None,
    query_valid: Tensor | None = None,
    config: PrescoreConfig,
    scale: float,
    tree_builder: TreeBuilder,
    backend: str | Backend = "auto",
    error_bar: bool = False,
) -> tuple[Attended, dict[str, Any]]:
    """Attention over local chunks, single keys, chosen leaves and stand-ins.

    Args:
        query: `[B, Hq, Nq, D]`; with `is_causal` the last `Nq` positions.
        key: `[B, Hkv, Nk, D]`, left-aligned: each sequence's first real token at position 0, padding zeroed.
        value: `[B, Hkv, Nk, Dv]`, likewise.
        is_causal: No query sees a later key, nor anything that depends on a later query.
        valid: `[B, Nk]`, True = a real key, or None.
        query_valid: `[B, Nq]`, False on queries that no figure and no tolerance counts, or None.
        config: `rows`, `leaf_size`, `chunk_size`, `sinks`; with `tolerance`, queries whose bound on misplaced
            mass exceeds it are recomputed exactly.
        scale: Factor of the logits.
        tree_builder: See `TreeBuilder`.
        backend: An operator backend, or its name, or `auto`.
        error_bar: Report the bounds and a sampled error in the figures.

    Returns:
        Output with lse, and figures: rows of each kind a query reads at most, queries read exactly, error bar.
    """
    layout = make_layout(query.shape[2], key.shape[2], causal=is_causal, config=config, padded=valid is not None)
    chosen = as_backend(backend, query)
    n_exact = layout.n_exact if query.numel() and key.numel() else layout.n_query
    stats = _stats(layout, n_exact)
    results = []
    bars = []
    if n_exact or not layout.n_query:
        results.append(_exact(query[:, :, :n_exact], key, value, layout, valid, scale, chosen.at("head")))
        bars.append(ErrorBar(*(torch.zeros_like(results[0].lse, requires_grad=False),) * 2))
    if n_exact < layout.n_query:
        frame = Frame.of(query, key.shape[1], layout, n_exact)
        bounded = error_bar or config.tolerance is not None
        layouts = head_layouts(
            query, key, value, results[0] if n_exact else None,
            layout=layout, config=config, scale=scale, tree_builder=tree_builder,
        )  # fmt: skip
        n_sequences = frame.batch * frame.n_kv_heads
        stats.update(most_rows(layouts, n_sequences), rows_per_query=mean_rows(layouts, n_sequences))
        stats["fine_heads"] = sum(own.count(n_sequences) for own in layouts if own.fine)
        lanes: list[tuple[Tensor, ...]] = []
        for own, lane in frame.lanes(query[:, :, n_exact:], key, value, valid, layouts):
            plan = _plan(own, frame, scale, chosen.at(f"lane {len(lanes)}"))
            lanes.append(_attend_lane(lane, frame, plan, tree_builder, bounded))
        output, lse, *bounds = (in_order(list(part), layouts) for part in zip(*lanes, strict=True))
        results.append(Attended(frame.join(output), frame.join(lse[..., None]).squeeze(-1)))
        if bounded:
            bars.append(ErrorBar(*(frame.join(bound[..., None]).squeeze(-1) for bound in bounds)))
    whole = results[0]
    if len(results) > 1:
        outputs, lses = zip(*results, strict=True)
        whole = Attended(torch.cat(outputs, dim=2), torch.cat(lses, dim=2))
    if len(bars) == len(results) and (error_bar or config.tolerance is not None):
        bar = ErrorBar(*(torch.cat([getattr(b, f) for b in bars], dim=2) for f in ("lost", "misplaced")))
        real = torch.ones_like(bar.lost, dtype=torch.bool)
        if query_valid is not None:
            real &= query_valid[:, None]
        whole = _within_tolerance(whole, bar, real, query, key, value, valid, layout, config, scale, chosen, stats)
    return whole, stats


def _attend_lane(
    lane: Lane, frame: Frame, plan: Plan, tree_builder: TreeBuilder, bounded: bool
) -> tuple[Tensor, ...]:
    """Output, lse and, where asked for, bounds of some sequences."""
    blocks, key, value, valid = lane
    clusters = build_clusters(key, value, plan.layout, valid, tree_builder)
    sources = _sources(key, value, plan.layout, clusters, frame)
    output, lse, read = attend_routed(blocks, sources, plan)
    return output, lse, *(unread_bounds(blocks, lse, read, clusters, plan) if bounded else ())


def _within_tolerance(
    whole: Attended, bar: ErrorBar, real: Tensor, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None,
    layout: Layout, config: PrescoreConfig, scale: float, backend: Backend, stats: dict[str, Any],
) -> Attended:  # fmt: skip
    """Recompute what the tolerance does not allow, and report the bounds that hold afterwards."""
    causal = layout.causal
    if config.tolerance is not None:
        over = ~(bar.misplaced <= config.tolerance) & real  # what is not a number certifies nothing
        stats["recomputed_queries"] = int(over.sum())
        if stats["recomputed_queries"]:
            # they meet every key they may see, beside what they have read
            stats["rows_per_query"] += float((over * visible_rows(layout).to(over.device)).mean())
            exact = exact_rows(
                query, key, value, over, causal=causal, valid=valid, scale=scale, backend=backend.at("recomputed")
            )
            output = torch.where(over[..., None], exact.output, whole.output)
            whole = Attended(output, torch.where(over, exact.lse, whole.lse))
            bar = ErrorBar(bar.lost.masked_fill(over, 0.0), bar.misplaced.masked_fill(over, 0.0))
    stats.update(bound_figures(bar, real))
    if backend.dropout is None:  # else most of the difference is what was dropped
        stats.update(sampled_error(query, key, value, whole, real, causal=causal, valid=valid, scale=scale))
    return whole


def _exact(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, valid: Tensor | None, scale: float, backend: Backend
) -> Attended:
    if layout.causal:
        stop = layout.first + query.shape[2]
        key, value = key[:, :, :stop], value[:, :, :stop]
        valid = None if valid is None else valid[:, :stop]
    parts = exact_parts(query, key, is_causal=layout.causal, valid=valid)
    return attend_parts(query, key, value, parts, scale=scale, backend=backend)


@dataclasses.dataclass(frozen=True)
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
    def of(cls, query: Tensor, n_kv_heads: int, layout: Layout, skipped: int) -> Frame:
        """The frame of the queries behind the first `skipped`."""
        batch, n_heads, n_query = query.shape[:3]
        n_query -= skipped
        size = layout.chunk if layout.causal else min(QUERY_BLOCK, n_query)
        behind = layout.first + skipped - layout.sinks
        first_chunk, before = divmod(behind, size) if layout.causal else (0, 0)
        n_blocks = -(-(before + n_query) // size)
        group = n_heads // n_kv_heads
        return cls(batch, n_kv_heads, group, n_query, size, n_blocks, first_chunk, before)

    def split(self, query: Tensor) -> Tensor:
        """`[B, Hq, Nq, D]` -> `[B * Hkv, n, G, size, D]`."""
        after = self.n_blocks * self.size - self.before - self.n_query
        filled = pad(query, (0, 0, self.before, after))
        shape = (self.batch * self.n_kv_heads, self.group, self.n_blocks, self.size, query.shape[-1])
        return filled.reshape(shape).transpose(1, 2)

    def lanes(
        self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, layouts: list[HeadLayout]
    ) -> Iterator[tuple[Layout, Lane]]:
        """Some sequences (key heads of the batch) at a time, so that what is made on the way is memory in use.

        Fresh memory costs more than the arithmetic: a long sequence goes alone, short ones go together. Yields
        query blocks, keys and values `[t, 1, Nk, D]`, and valid keys `[t, Nk]`, after the geometry of each.
        """
        blocks = self.split(query)
        keys, values = (tensor.reshape(-1, 1, *tensor.shape[2:]) for tensor in (key, value))
        valids = None if valid is None else valid.repeat_interleave(self.n_kv_heads, dim=0)
        step = max(1, NUMBERS_AT_ONCE // (keys.shape[2] * max(key.shape[-1], value.shape[-1])))
        for own in layouts:
            queries, some_keys, some_values = (own.of(tensor) for tensor in (blocks, keys, values))
            some_valids = None if valids is None else own.of(valids)
            for start in range(0, len(queries), step):
                lane = slice(start, start + step)
                real = None if some_valids is None else some_valids[lane]
                yield own.layout, (queries[lane], some_keys[lane], some_values[lane], real)

    def join(self, blocks: Tensor) -> Tensor:
        """The inverse of `split`, for any last dimension."""
        n_heads = self.n_kv_heads * self.group
        shape = (self.batch, n_heads, self.n_blocks * self.size, blocks.shape[-1])
        return blocks.transpose(1, 2).reshape(shape)[:, :, self.before : self.before + self.n_query]


def _plan(layout: Layout, frame: Frame, scale: float, backend: Backend) -> Plan:
    pieces = [layout.n_pieces] * frame.n_blocks
    if layout.causal:
        pieces = list(range(frame.first_chunk - 1, frame.first_chunk - 1 + frame.n_blocks))
    pairs_per_block = frame.group * frame.size * max(1, layout.n_chosen)
    return Plan(
        layout,
        tuple(stand_in_ranges(layout, seen) for seen in pieces),
        tuple(single_ranges(layout, seen) for seen in pieces),
        layout.n_chosen,
        scale,
        backend,
        max(1, PAIRS_AT_ONCE // pairs_per_block),
    )


def _sources(key: Tensor, value: Tensor, layout: Layout, clusters: Clusters, frame: Frame) -> Sources:
    local = _local(key, value, layout, frame.first_chunk, frame.n_blocks) if layout.causal else None
    leaf_bias = None
    if clusters.alive is not None or layout.leaf_room > layout.leaf:
        leaf_bias = torch.full(clusters.leaf_key.shape[:3], -torch.inf, dtype=key.dtype, device=key.device)
        member = torch.ones_like(clusters.rows, dtype=torch.bool) if clusters.alive is None else clusters.alive
        leaf_bias[:, :, : layout.leaf].masked_fill_(member, 0.0)
    return Sources(
        local, (clusters.mean_key, clusters.mean_value), (clusters.single_key, clusters.single_value),
        (clusters.leaf_key, clusters.leaf_value), clusters.log_count, clusters.single_bias, leaf_bias,
    )  # fmt: skip


def _local(key: Tensor, value: Tensor, layout: Layout, first_chunk: int, n_blocks: int) -> tuple[Tensor, Tensor]:
    """Chunks before and of every block, `[T, n + 1, chunk, D]` of keys and values."""
    start = layout.sinks + (first_chunk - 1) * layout.chunk
    length = (n_blocks + 1) * layout.chunk
    grids = []
    for tensor in (key, value):
        tail = tensor[:, :, start : start + length]
        tail = pad(tail, (0, 0, 0, length - tail.shape[2])).contiguous()
        grids.append(tail.view(-1, n_blocks + 1, layout.chunk, tensor.shape[-1]))
    return grids[0], grids[1]


def exact_figures(query: Tensor, key: Tensor, config: PrescoreConfig, error_bar: bool) -> dict[str, Any]:
    """The figures of a call without causality that read every key exactly."""
    layout = make_layout(query.shape[2], key.shape[2], causal=False, config=config)
    figures = _stats(layout, layout.n_query)
    if config.tolerance is not None:
        figures["recomputed_queries"] = 0
    if error_bar or config.tolerance is not None:
        nothing = torch.zeros(0)
        figures.update(bound_figures(ErrorBar(nothing, nothing), nothing.bool()))
        figures.update(sampled_error=0.0, sampled_error_se=0.0)
    return figures


def _stats(layout: Layout, n_exact: int) -> dict[str, Any]:
    figures = dataclasses.asdict(layout)
    figures.update(exact_queries=n_exact, local_rows=2 * layout.chunk if layout.causal else 0)
    return {**figures, **dict.fromkeys(KINDS, 0), "rows_per_query": _exact_rows(layout), "fine_heads": 0}


def _exact_rows(layout: Layout) -> float:
    """Keys that a query meets on average when all of them read everything."""
    return float(visible_rows(layout).mean()) if layout.n_query else 0.0
