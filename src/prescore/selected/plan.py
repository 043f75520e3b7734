"""Algorithm 2 as a plan: which queries read which keys.

For every block pair (all queries and keys, or an off-diagonal block of the causal grid):

1. Score the keys and select some of them (line 1, which is Algorithm 1); where too few are selected, select all
   (lines 2 to 4, the delta test).
2. Replace the unselected keys of each cluster by its centroid (not in the paper; `remainder="none"` leaves it
   out).
3. Attend to the selected keys (line 5): exactly, or by HyperAttention, which sorts the keys by their hash, cuts
   them into blocks, and samples a residual.

Everything a query reads becomes a column of a `Part`, and `attend_parts` runs one softmax over all columns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prescore.call import Call
from prescore.config import Exact, Lsh, Selected
from prescore.devices import maybe_any, surely_all
from prescore.ops.operators import accumulation_dtype
from prescore.ops.parts import Part, exact_parts, mask_bias
from prescore.rng import Streams
from prescore.scoring.base import Scorer
from prescore.scoring.hashing import hash_ranks, projections
from prescore.scoring.kmeans import centroid_clusters
from prescore.scoring.select import (
    Chosen,
    bring_forward,
    membership,
    protected_positions,
    score_keys,
    select_keys,
    selection_of,
)
from prescore.selected.blocks import BlockPairs, KeyRows, exact_part, hyper_part
from prescore.selected.causal_grid import FULL, Level, Queries, key_rows, key_valid, leaf_parts, levels
from prescore.selected.centroids import Tables, add_centroids, cluster_totals
from prescore.types import Selection


def make_plan(call: Call, config: Selected, given: Tensor | None = None, *, explain: bool = False) -> Plan:
    """Plan a call; `given [B, Hkv, Nk]` is a selection to use instead of making one, in aligned positions.

    With `explain` the seconds of every stage are those of its work on the device, which is waited for.
    """
    plan = Plan(call, config, explain)
    queries, leaf = plan.queries, max(1, config.min_seq_len)
    if 0 in (queries.batch, call.n_query, call.n_keys):
        return plan
    if not call.is_causal:
        positions = queries.arange(call.n_keys)[None], queries.arange(call.n_query)[None]
        level = Level([FULL], call.n_query, *positions, (0, call.n_query))
        plan.add(_candidates(call, config, queries, level, given))
    elif call.n_keys <= leaf and isinstance(call.query_start, int):
        plan.parts = exact_parts(call.query, call.key, is_causal=True, valid=call.valid)
    else:
        plan.parts = leaf_parts(leaf, queries, call.n_keys, call.valid, call.query.dtype)
        for level in levels(leaf, queries):
            plan.add(_candidates(call, config, queries, level, given))
            plan.depth += 1
    return plan


@dataclass(frozen=True, eq=False)
class Candidates:
    """Block pairs of one size before selection, `P = B * n` for `n` blocks of each sequence.

    Attributes:
        names: Of the random streams of the `n` blocks.
        query_rows: `[P, H, G, W]` flat rows of the queries.
        query_valid: `[P, W]`, False = filler; None = no filler.
        query_real: `[P, W]`, False = filler or padding; None = all are real.
        key: `[P, H, N, D]` candidate keys.
        value: Their values, where centroids need them.
        rows: `[P, H, N]` flat rows of the candidates.
        valid: `[P, N]`, False = padding; None = all are real.
        protect: `[P, N]`, sinks and recent keys, selected before any score is compared and read by every query.
        exact: `[P]`, pairs with so few queries that they are exact, over their selection or, with
            `leaf_inclusive`, over all their keys; a bool = all or none.
        given: `[P, H, N]`, the caller's selection; None = make one.
    """

    names: list[str]
    query_rows: Tensor
    query_valid: Tensor | None
    query_real: Tensor | None
    key: Tensor
    value: Tensor
    rows: Tensor
    valid: Tensor | None
    protect: Tensor
    exact: Tensor | bool
    given: Tensor | None


def _candidates(call: Call, config: Selected, queries: Queries, level: Level, given: Tensor | None) -> Candidates:
    """The off-diagonal blocks of one level of the causal grid, or all queries and all keys of a sequence."""
    key_positions, query_positions = level.key_positions, level.query_positions
    inside = key_positions.clamp_max(call.n_keys - 1)
    query_rows, there = queries.rows(query_positions)
    valid = key_valid(key_positions, queries, call.n_keys, call.valid)
    rows = key_rows(key_positions, queries, call.n_keys)

    def gather(table: Tensor) -> Tensor:
        return table.reshape(-1, table.shape[-1]).index_select(0, rows.reshape(-1)).view(*rows.shape, -1)

    key, value = call.key, call.value
    if call.is_causal:
        key, value = gather(key), value if config.remainder == "none" else gather(value)
        key = key if valid is None else key * valid[:, None, :, None]
    real = query_valid = None if queries.fill(level.query_span) else there
    if call.query_valid is not None:
        real = there & call.query_valid[:, query_positions.clamp_max(call.n_keys - 1)].flatten(0, 1)
        real = None if surely_all(real) else real
    n_query: Tensor | int = level.width if call.is_causal or real is None else real.sum(1)
    sinks = protected_positions(call.valid, call.key, config.sinks, 0)[:, inside].flatten(0, 1)
    return Candidates(
        names=level.names,
        query_rows=query_rows,
        query_valid=query_valid,
        query_real=real,
        key=key,
        value=value,
        rows=rows,
        valid=valid,
        protect=sinks | protected_positions(valid, key, 0, config.recent),
        exact=n_query <= config.min_seq_len if config.leaf_inclusive else n_query < config.min_seq_len,
        given=None if given is None else given[:, :, inside].transpose(1, 2).flatten(0, 1),
    )


class Plan:
    """What one call computes, and what was decided on the way.

    Attributes:
        parts: Which queries read which keys.
        tables: What the parts' rows refer to: keys and values, then centroids, or a zero row with `mask="zero"`.
        selections: One per full pair or off-diagonal block, in aligned positions.
        depth: Levels of the causal recursion.
        ranks: Gray ranks of the hashes of all query and key rows, once for all levels.
        seconds: Time spent per stage; where the device is not a CPU, to start its work, unless `explain`.
    """

    def __init__(self, call: Call, config: Selected, explain: bool = False) -> None:
        batch, heads = call.key.shape[:2]
        self.call, self.config, self.explain = call, config, explain
        self.queries = Queries(batch, heads, call.heads_per_kv, call.n_query, call.query_start, call.query.device)
        self.tables = Tables(call.key, call.value)
        self.zero_row: Tensor | None = None  # with `mask="zero"`, from the first block pair on
        self.parts: list[Part] = []
        self.selections: list[Selection] = []
        self.depth = 0
        self.ranks: tuple[Tensor, Tensor] | None = None
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of a stage to `seconds`."""
        begin = time.perf_counter()
        yield
        if self.explain and self.call.key.device.type == "cuda":
            torch.cuda.synchronize(self.call.key.device)
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begin

    def add(self, candidates: Candidates) -> None:
        """Algorithm 2 for block pairs of one size."""
        call, config, dtype = self.call, self.config, self.call.query.dtype
        streams = call.streams.blocks(candidates.names, call.key.shape[0])
        if config.coupling.mask == "zero" and self.zero_row is None:
            self.zero_row = self.tables.add(*(t.new_zeros(1, t.shape[-1]) for t in (call.key, call.value)))
        with self.timed("scoring"):
            chosen = self._select(candidates, streams)
        self.selections += self._by_block(candidates, chosen.selection)
        centroids = None
        any_key = candidates.valid is None or maybe_any(candidates.valid)
        if config.remainder != "none" and not chosen.everything and any_key:
            with self.timed("centroids"):
                centroids = self._add_centroids(candidates, chosen, streams)
        # only padding, scores below `min_score`, or a given selection elsewhere; zeroed keys are read all the same
        none_selected = chosen.selection.indices.shape[-1] == 0 and self.zero_row is None
        if none_selected and centroids is None:
            return
        pair = self._block_pair(candidates, chosen.selection, centroids)
        if isinstance(config.inner, Lsh):
            pair = replace(
                pair, draws=streams.head_uniform("residual", config.inner.sample_size, like=pair.key_rows)
            )
        if none_selected or isinstance(config.inner, Exact):
            self.parts.append(exact_part(pair, dtype))
            return
        groups: list[tuple[bool, BlockPairs]] = []
        if isinstance(candidates.exact, bool):
            groups = [(candidates.exact, pair)]
        else:
            for exact, which in ((True, candidates.exact), (False, ~candidates.exact)):
                if bool(which.any()):
                    groups.append((exact, pair if bool(which.all()) else pair.some(which.nonzero()[:, 0])))
        for exact, some in groups:
            part = exact_part(some, dtype) if exact else self._hyper_part(some, config.inner)
            self.parts.append(part)

    def _select(self, candidates: Candidates, streams: Streams) -> Chosen:
        """Algorithm 1 and the delta test."""
        keep_all = candidates.exact if self.config.leaf_inclusive else False
        if candidates.given is not None:
            member = candidates.given
            if keep_all is not False:  # padding has no place in a selection
                real = torch.ones_like(member) if candidates.valid is None else candidates.valid[:, None]
                member = member | (real & (keep_all[:, None, None] if isinstance(keep_all, Tensor) else real))
            return Chosen(selection_of(member), False, None)
        keys, protect = candidates.key.detach(), candidates.protect
        return select_keys(
            keys, self.config, valid=candidates.valid, streams=streams, protect=protect, keep_all=keep_all
        )

    def _by_block(self, candidates: Candidates, selection: Selection) -> Iterator[Selection]:
        """One selection per block, in positions of the whole sequence."""
        n_blocks, fallback = len(candidates.names), selection.fallback
        first = candidates.rows[:n_blocks, 0, 0]  # rows of the first sequence and head are positions
        for number in range(n_blocks):
            of_block = slice(number, None, n_blocks)
            marks = None if fallback is None else fallback[of_block]
            yield Selection(selection.indices[of_block] + first[number], selection.valid[of_block], marks)

    def _add_centroids(self, candidates: Candidates, chosen: Chosen, streams: Streams) -> KeyRows:
        """Add the centroids of these pairs to the table; returns their rows and weights."""
        keys, scored, scorer = candidates.key.detach(), chosen.scored, self.config.scoring
        if isinstance(self.config.remainder, Scorer):
            scored, scorer = None, self.config.remainder
        k_means = centroid_clusters(keys.shape[-1], is_causal=self.call.is_causal)
        for clustering in (scorer, k_means):  # k-means where the scorer makes no clusters
            if scored is None or scored.labels is None:
                scored = score_keys(keys, clustering, valid=candidates.valid, streams=streams)
        if scored is None or scored.labels is None:
            raise TypeError(f"kmeans must return labels, got {scored!r}")
        unselected = ~membership(chosen.selection, keys.shape[2])
        if candidates.valid is not None:
            unselected = unselected & candidates.valid[:, None, :]
        dtype, n_clusters = self.call.query.dtype, scored.n_clusters
        points = [t.flatten(0, 1).to(accumulation_dtype(dtype)) for t in (candidates.key, candidates.value)]
        totals = cluster_totals(points, scored.labels, unselected, n_clusters)
        return add_centroids(self.tables, totals, (*keys.shape[:2], n_clusters), dtype)

    def _block_pair(self, candidates: Candidates, selection: Selection, centroids: KeyRows | None) -> BlockPairs:
        """The keys that blocks are cut from, and those that every query reads."""
        all_rows, valid = candidates.rows, candidates.valid
        if valid is None:
            valid = torch.ones(all_rows.shape[::2], dtype=torch.bool, device=all_rows.device)
        real, protect = (t[:, None].expand_as(all_rows) for t in (valid, candidates.protect))
        n_selected, selected, kept = None, None, None
        n_apart = min(self.config.sinks + self.config.recent, all_rows.shape[-1])
        pooled: Tensor | None  # which rows blocks are cut from
        if self.zero_row is not None:
            member = membership(selection, all_rows.shape[-1])
            rows, pooled, n_selected = torch.where(member, all_rows, self.zero_row), real, member.sum(-1)
        elif self.config.coupling.blocks == "all":
            selected = membership(selection, all_rows.shape[-1])
            apart = selected & protect
            rows, pooled = all_rows, real & ~apart
            if n_apart and maybe_any(apart):
                kept = kept_rows(rows, apart, self.call.query.dtype, n_apart)
        else:
            rows, pooled = all_rows.gather(-1, selection.indices), selection.valid
            apart = protect.gather(-1, selection.indices) & pooled
            if n_apart and maybe_any(apart):
                kept = kept_rows(rows, apart, self.call.query.dtype, n_apart)
                rows, pooled = bring_forward(rows, pooled & ~apart)
        # without padding all heads select as many keys
        same = candidates.valid is None and candidates.given is None and self.config.min_score is None
        filled = same and (kept is None or self.zero_row is not None)
        return BlockPairs(
            query_rows=candidates.query_rows,
            query_valid=candidates.query_valid,
            query_real=candidates.query_real,
            key_rows=rows,
            key_valid=None if pooled is None or filled or surely_all(pooled) else pooled,
            shared=[columns for columns in (kept, centroids) if columns is not None],
            n_centroids=0 if centroids is None else centroids.rows.shape[-1],
            n_all=valid.sum(1),
            n_selected=n_selected,
            selected=selected,
            fewest=max(0, rows.shape[-1] - n_apart) if same else 0,
        )

    def _hyper_part(self, pair: BlockPairs, lsh: Lsh) -> Part:
        call = self.call
        if self.ranks is None:
            with self.timed("hashing"):
                directions = projections(lsh.n_projections, call.key, call.streams)
                tables = call.query, call.key, call.key.new_zeros(1, 1, 1, call.key.shape[-1])
                query, key, zero = (hash_ranks(table, directions).reshape(-1) for table in tables)
                self.ranks = query, key if self.zero_row is None else torch.cat((key, zero[:1]))
        query_ranks, key_ranks = self.ranks
        ranks = query_ranks[pair.query_rows], key_ranks[pair.key_rows]
        with self.timed("sorting"):
            return hyper_part(pair, ranks, lsh, self.config.coupling, call.query.dtype)


def kept_rows(rows: Tensor, apart: Tensor, dtype: torch.dtype, most: int | None = None) -> KeyRows:
    """The rows `[P, H, S]` that are set apart, at most `most`, as columns that every query reads."""
    kept, valid = bring_forward(rows, apart, most)
    every = torch.ones_like(kept, dtype=torch.bool) if valid is None else valid
    return KeyRows(kept, mask_bias(every, dtype))
