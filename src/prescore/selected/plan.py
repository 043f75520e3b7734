"""Algorithm 2 as a plan: score, select, and say which queries meet which key rows.

This is where the three stages meet. A plan is a list of `Part`s; running it is `attend_parts`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from prescore.call import Call
from prescore.config import Exact, Lsh, Selected
from prescore.ops.parts import Centroids, Part, attend_parts, exact_parts
from prescore.rng import Streams
from prescore.scoring.base import Scorer
from prescore.scoring.hashing import hash_ranks, projections, zero_rank
from prescore.scoring.kmeans import centroid_clusters
from prescore.scoring.select import Chosen, bring_forward, membership, score_keys, select_keys, selection_of
from prescore.selected.blocks import BlockPair, KeyRows, exact_part, hyper_part
from prescore.selected.causal_grid import BlockPairs, Candidates, Queries, leaf_parts, levels
from prescore.selected.centroids import cluster_centroids
from prescore.types import Attended, Selection

Result = TypeVar("Result")


@dataclass(eq=False)
class Plan:
    """What one call will compute, and what was decided on the way.

    Attributes:
        parts: Which queries meet which keys.
        key, value: Tables the parts' rows refer to (with a zero row at the end under `mask="zero"`).
        centroids: Rows the parts' extra columns refer to.
        selections: One per full problem or off-diagonal block, in aligned positions.
        depth: Levels of the causal recursion.
        seconds: Time spent per stage.
    """

    key: Tensor
    value: Tensor
    parts: list[Part] = field(default_factory=list)
    centroids: Centroids | None = None
    selections: list[Selection] = field(default_factory=list)
    depth: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, stage: str, work: Callable[[], Result]) -> Result:
        """Run a stage and add its time to the books."""
        begin = time.perf_counter()
        result = work()
        if self.key.device.type == "cuda":
            torch.cuda.synchronize(self.key.device)
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begin
        return result

    def run(self, call: Call, parts: list[Part] | None = None) -> Attended:
        """Attend to the planned parts, or to some of them."""
        return attend_parts(
            call.query,
            self.key,
            self.value,
            self.parts if parts is None else parts,
            scale=call.scale,
            backend=call.backend,
            centroids=self.centroids,
        )


def make_plan(call: Call, config: Selected, given: Tensor | None = None) -> Plan:
    """What a call computes; `given [B, Hkv, Nk]` is a selection to use instead of making one."""
    return _Planner(call, config, given).build()


class _Planner:
    """Builds a plan for one call; holds nothing beyond it."""

    def __init__(self, call: Call, config: Selected, given: Tensor | None) -> None:
        batch, heads = call.key.shape[:2]
        self.call, self.config = call, config
        self.queries = Queries(batch, heads, call.group, call.n_query, call.query_start, call.query.device)
        self.problems = BlockPairs(call, config, self.queries, given)
        self.zeroing = config.coupling.mask == "zero"
        self.plan = Plan(*self._tables())
        self._ranks: tuple[Tensor, Tensor] | None = None

    def build(self) -> Plan:
        """The plan of the whole call."""
        plan, call = self.plan, self.call
        leaf = max(1, self.config.min_seq_len)
        if 0 in (self.queries.batch, call.n_query, call.n_keys):
            return plan
        if not call.is_causal:
            self._add(self.problems.full())
        elif call.n_keys <= leaf and isinstance(call.query_start, int):
            plan.parts += self._numbered(exact_parts(call.query, call.key, is_causal=True, valid=call.valid))
        else:
            plan.parts += self._numbered(leaf_parts(leaf, self.queries, call.n_keys, call.valid, call.query.dtype))
            grid = levels(leaf, self.queries)
            plan.depth = len(grid)
            for level in grid:
                self._add(self.problems.level(level))
        return plan

    def _tables(self) -> tuple[Tensor, Tensor]:
        key, value = self.call.key, self.call.value
        return (_with_zero_row(key), _with_zero_row(value)) if self.zeroing else (key, value)

    def _numbered(self, parts: list[Part]) -> list[Part]:
        """Number the keys of parts that take all of them, where the table ends in a zero row that is none."""
        if not self.zeroing:
            return parts
        rows = torch.arange(self.plan.key.shape[0] - 1, device=self.plan.key.device)
        return [
            part if part.key_rows is not None else dataclasses.replace(part, key_rows=rows.view(part.shape[0], -1))
            for part in parts
        ]

    def _add(self, candidates: Candidates) -> None:
        """Select, then append the part of these problems."""
        plan, config, dtype = self.plan, self.config, self.call.query.dtype
        streams = self.call.streams.child(candidates.name)
        chosen = plan.timed("scoring", lambda: self._choose(candidates, streams))
        selection = chosen.selection
        plan.selections += self._by_block(candidates, selection)
        nothing = selection.indices.shape[-1] == 0  # padding everywhere, or a given selection that lies elsewhere
        extra = None
        if config.remainder != "none" and not chosen.everything and candidates.any_valid():
            extra = plan.timed("centroids", lambda: self._centroids(candidates, chosen, streams))
        if nothing and extra is None:
            return
        pair = self._block_pair(candidates, selection, extra)
        if nothing or isinstance(config.inner, Exact):
            plan.parts.append(exact_part(pair, dtype))
            return
        lsh, exact = config.inner, candidates.exact.to(selection.indices.device)
        if bool(exact.any()):
            own = pair if bool(exact.all()) else pair.some(exact.nonzero()[:, 0])
            plan.parts.append(exact_part(own, dtype))
        if not bool(exact.all()):
            own = pair.some((~exact).nonzero()[:, 0]) if bool(exact.any()) else pair
            plan.parts.append(self._hyper_part(own, lsh, streams))

    def _hyper_part(self, pair: BlockPair, lsh: Lsh, streams: Streams) -> Part:
        query_ranks, key_ranks = self.plan.timed("hashing", lambda: self._hash(lsh))
        draws = streams.uniform("residual", lsh.sample_size, like=self.call.key)
        ranks = query_ranks[pair.query_rows], key_ranks[pair.key_rows]
        return self.plan.timed(
            "sorting",
            lambda: hyper_part(pair, *ranks, draws, lsh, self.config.coupling, self.call.query.dtype),
        )

    def _choose(self, candidates: Candidates, streams: Streams) -> Chosen:
        if candidates.given is not None:
            return Chosen(selection_of(candidates.given), False, None)
        return select_keys(
            candidates.key.detach(),
            self.config,
            valid=candidates.valid,
            streams=streams,
            protect=candidates.protect,
        )

    def _by_block(self, candidates: Candidates, selection: Selection) -> list[Selection]:
        """One selection per block of the grid, in positions of the whole sequence."""
        if not self.call.is_causal:
            return [selection]
        n_blocks, fallback = candidates.n_blocks, selection.fallback
        first = candidates.rows.view(self.queries.batch, n_blocks, self.queries.heads, -1)[0, :, 0, 0]
        found = []
        for number in range(n_blocks):
            own = slice(number, None, n_blocks)
            mark = None if fallback is None else fallback[own]
            found.append(Selection(selection.indices[own] + first[number], selection.valid[own], mark))
        return found

    def _centroids(self, candidates: Candidates, chosen: Chosen, streams: Streams) -> KeyRows:
        """Add centroids of these problems to the table; returns their rows and weights."""
        keys, scored = candidates.key.detach(), chosen.scored
        own = self.config.remainder if isinstance(self.config.remainder, Scorer) else None
        if scored is None or own is not None:  # with a given selection, the clusters as if it had been made here
            scored = score_keys(keys, own or self.config.scoring, valid=candidates.valid, streams=streams)
        if scored.labels is None:  # the scorer made no clusters
            scorer = centroid_clusters(keys.shape[-1], is_causal=self.call.is_causal)
            scored = score_keys(keys, scorer, valid=candidates.valid, streams=streams)
        if scored.labels is None:
            raise TypeError(f"kmeans must return labels, got {scored!r}")
        unselected = ~membership(chosen.selection, keys.shape[2])
        if candidates.valid is not None:
            unselected = unselected & candidates.valid[:, None, :]
        tables = Centroids(candidates.key, candidates.value)
        made, rows = cluster_centroids(tables, scored.labels, unselected, scored.n_clusters, self.call.query.dtype)
        before = self.plan.centroids
        if before is None:
            self.plan.centroids = made
            return rows
        self.plan.centroids = Centroids(torch.cat((before.key, made.key)), torch.cat((before.value, made.value)))
        return KeyRows(rows.rows + before.key.shape[0], rows.bias)

    def _block_pair(self, candidates: Candidates, selection: Selection, extra: KeyRows | None) -> BlockPair:
        indices, valid = selection.indices, selection.valid
        n_selected, kept = None, None
        rows = candidates.rows.gather(-1, indices)
        usable: Tensor | None = None if bool(valid.all()) else valid
        if self.zeroing:
            zero = self.plan.key.shape[0] - 1
            rows = torch.where(membership(selection, candidates.key.shape[2]), candidates.rows, zero)
            usable = None if candidates.valid is None else candidates.valid[:, None, :].expand(rows.shape)
            n_selected = valid.sum(-1)
        elif candidates.protect is not None and bool(candidates.protect.any()):
            apart = candidates.protect[:, None, :].expand(candidates.rows.shape).gather(-1, indices) & valid
            kept = kept_rows(rows, apart, self.call.query.dtype)
            rows, usable = bring_forward(rows, valid & ~apart)
        return BlockPair(
            query_rows=candidates.query_rows,
            query_valid=candidates.query_valid,
            query_real=candidates.query_real,
            key_rows=rows,
            key_valid=usable,
            kept=kept,
            extra=extra,
            n_all=candidates.n_keys(),
            n_selected=n_selected,
        )

    def _hash(self, lsh: Lsh) -> tuple[Tensor, Tensor]:
        """Gray ranks of all query and key rows, once for all levels."""
        if self._ranks is None:
            directions = projections(lsh.n_projections, self.call.key, self.call.streams)
            query = hash_ranks(self.call.query, directions).reshape(-1)
            key = hash_ranks(self.call.key, directions).reshape(-1)
            if self.zeroing:
                key = torch.cat((key, key.new_full((1,), zero_rank(lsh.n_projections))))
            self._ranks = query, key
        return self._ranks


def _with_zero_row(table: Tensor) -> Tensor:
    return torch.cat((table.reshape(-1, table.shape[-1]), table.new_zeros(1, table.shape[-1])))


def kept_rows(rows: Tensor, apart: Tensor, dtype: torch.dtype) -> KeyRows:
    """The rows `[P, H, S]` that are apart from the others, as columns that every query sees."""
    kept, valid = bring_forward(rows, apart)
    bias = torch.zeros(kept.shape, dtype=dtype, device=rows.device)
    return KeyRows(kept, bias if valid is None else bias.masked_fill_(~valid, -torch.inf))
