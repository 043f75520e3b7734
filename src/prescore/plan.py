"""Algorithm 2 as a plan: score, select, and say which queries meet which key rows.

This is where the three stages meet. A plan is a list of `Part`s; running it is `attend_parts`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from prescore.attention.exact import exact_parts
from prescore.attention.grid import Queries, leaf_parts, levels
from prescore.attention.hyper import Columns, Problems, exact_part, hyper_part
from prescore.attention.lsh import hash_ranks, projections, zero_rank
from prescore.attention.parts import Part, StandIns
from prescore.attention.stand_ins import centroid_stand_ins
from prescore.blocks import Block, Blocks
from prescore.config import PrescoreConfig
from prescore.layout import Aligned
from prescore.rng import Streams
from prescore.scoring import Chosen, cluster_labels, score_keys, select_keys
from prescore.selection.budget import budget_count
from prescore.selection.members import compact, membership, selection_of
from prescore.types import Selection

SCORING_COLUMNS = 150
FITTING_COLUMNS = 3_000_000
SORTING_COLUMNS = 1_000_000
"""What scoring a key, fitting clusters and sorting by hash cost, in columns of exact attention per query.

From `prescore speed` on two cores: an assignment pass takes the time of about 150 columns, a fit that of 3e6 / n,
hashing, sorting and gathering that of 1e6 / n.
"""

CAUSAL_FIT_PER_CLUSTER = 16


@dataclass(eq=False)
class Plan:
    """What one call will compute, and what was decided on the way.

    Attributes:
        parts: Which queries meet which keys.
        key, value: Tables the parts' rows refer to (with a zero row at the end under `mask="zero"`).
        stand_ins: Rows the parts' extra columns refer to.
        selections: One per full problem or off-diagonal block, in aligned positions.
        seconds: Time spent per stage.
        counts: Plain numbers for the statistics.
    """

    key: Tensor
    value: Tensor
    parts: list[Part] = field(default_factory=list)
    stand_ins: StandIns | None = None
    selections: list[Selection] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)

    def timed(self, stage: str, work: Callable[[], Any]) -> Any:
        """Run a stage and add its time to the books."""
        begin = time.perf_counter()
        result = work()
        if self.key.device.type == "cuda":
            torch.cuda.synchronize(self.key.device)
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begin
        return result


def exact_everywhere(config: PrescoreConfig, n_keys: int, is_causal: bool) -> bool:
    """Whether a sequence is exact attention as a whole: one leaf, or too short for anything else to pay.

    Holds for calls without a given selection and without zeroed keys, whose queries end where the keys do.
    """
    if not is_causal:
        return config.inner == "auto" and cheaper_exactly(config, n_keys)
    width = max(1, config.min_seq_len)
    if n_keys <= width:
        return True
    while 2 * width < n_keys:
        width *= 2
    return config.inner == "auto" and cheaper_exactly(config, width)


def cheaper_exactly(config: PrescoreConfig, n_keys: int) -> bool:
    """Whether reading every one of `n_keys` costs no more than scoring them and reading a few."""
    kept = budget_count(config.top_k, n_keys)
    most = config.block_size + config.sample_size
    sorting = SORTING_COLUMNS / max(n_keys, 1) if kept > most else 0.0
    scoring = SCORING_COLUMNS + FITTING_COLUMNS / max(n_keys, 1) if kept < n_keys else 0.0
    return n_keys <= min(kept, most) + sorting + scoring


class Planner:
    """Builds a plan for one call; holds nothing beyond it."""

    def __init__(
        self, call: Aligned, config: PrescoreConfig, streams: Streams, given: Tensor | None, is_causal: bool
    ) -> None:
        batch, n_heads, n_query, _ = call.query.shape
        self.call, self.config, self.streams, self.given = call, config, streams, given
        self.n_keys, self.heads = call.key.shape[2], call.key.shape[1]
        self.queries = Queries(
            batch, self.heads, n_heads // self.heads, n_query, call.query_start, call.query.device
        )
        self.blocks = Blocks(call, config, self.queries, given)
        self.zeroing = config.coupling.mask == "zero" and (bool(config.top_k) or given is not None)
        self.plan = Plan(*self._tables())
        self._ranks: tuple[Tensor, Tensor] | None = None
        self.is_causal = is_causal

    def build(self) -> Plan:
        """The plan of the whole call."""
        plan, config = self.plan, self.config
        if 0 in (self.queries.batch, self.queries.length, self.n_keys):
            plan.counts["depth"] = 0
            return plan
        if self._exact_everywhere():
            plan.counts["depth"] = 0
            plan.parts += exact_parts(
                self.call.query, self.call.key, is_causal=self.is_causal, valid=self.call.valid
            )
            if not self.is_causal:
                self._report(None, self._everything())
            return plan
        if not self.is_causal:
            plan.counts["depth"] = 0
            self._add(self.blocks.full())
            return plan
        leaf = max(1, config.min_seq_len)
        leaves = leaf_parts(leaf, self.queries, self.n_keys, self.call.valid, self.call.query.dtype)
        plan.parts += [self._with_key_rows(part) for part in leaves] if self.zeroing else leaves
        grid = levels(leaf, self.queries)
        plan.counts["depth"] = len(grid)
        for level in grid:
            self._add(self.blocks.level(level))
        return plan

    def _exact_everywhere(self) -> bool:
        """Whether the whole call is exact attention: one leaf, or too short for anything else to pay."""
        if self.zeroing or self.given is not None or not isinstance(self.queries.start, int):
            return False
        valid = self.call.valid
        lengths = [self.n_keys] if self.is_causal or valid is None else valid.sum(1).tolist()
        return all(exact_everywhere(self.config, n_keys, self.is_causal) for n_keys in lengths)

    def _everything(self) -> Selection:
        valid = self.call.valid
        if valid is not None:
            return selection_of(valid[:, None, :].expand(self.call.key.shape[:3]))
        indices = torch.arange(self.n_keys, device=self.call.key.device).expand(self.call.key.shape[:3])
        return Selection(indices, torch.ones_like(indices, dtype=torch.bool))

    def _tables(self) -> tuple[Tensor, Tensor]:
        key, value = self.call.key, self.call.value
        if not self.zeroing:
            return key, value
        return tuple(torch.cat((t.reshape(-1, t.shape[-1]), t.new_zeros(1, t.shape[-1]))) for t in (key, value))  # type: ignore[return-value]

    def _with_key_rows(self, part: Part) -> Part:
        """Number the keys of a part that takes all of them: the zero row at the end is not one."""
        if part.key_rows is not None:
            return part
        rows = torch.arange(self.plan.key.shape[0] - 1, device=self.plan.key.device)
        return dataclasses.replace(part, key_rows=rows.view(part.shape[0], -1))

    def _add(self, block: Block) -> None:
        """Select, then append the part of these problems."""
        plan, config, dtype = self.plan, self.config, self.call.query.dtype
        streams = self.streams.child(block.name)
        chosen = plan.timed("scoring", lambda: self._choose(block, streams))
        selection = chosen.selection
        self._report(block, selection)
        if selection.indices.shape[-1] == 0:
            return  # padding everywhere: a budget of at least one key found none
        extra = None
        if config.remainder == "centroids" and not chosen.everything and not self.zeroing:
            extra = plan.timed("stand-ins", lambda: self._stand_ins(block, chosen, streams))
        problems = self._problems(block, selection, extra)
        exact = block.exact.to(selection.indices.device)
        if config.inner == "exact":
            # where the delta test failed, Algorithm 2 runs HyperAttention over all keys
            exact = exact | (torch.ones_like(exact) if selection.fallback is None else ~selection.fallback)
        elif config.inner == "auto":
            few = problems.counts().amax(-1) <= config.block_size + config.sample_size
            exact = exact | few | self._cheaper_exactly(block.n_keys())
        if bool(exact.all()):
            plan.parts.append(exact_part(problems, dtype))
        elif not bool(exact.any()):
            plan.parts.append(self._hyper_part(problems, streams))
        else:
            plan.parts.append(exact_part(_take(problems, exact.nonzero()[:, 0]), dtype))
            plan.parts.append(self._hyper_part(_take(problems, (~exact).nonzero()[:, 0]), streams))

    def _hyper_part(self, problems: Problems, streams: Streams) -> Part:
        plan, config = self.plan, self.config
        query_ranks, key_ranks = plan.timed("hashing", self._hash)
        draws = streams.uniform("residual", config.sample_size, like=self.call.key)
        block_size = min(config.block_size, problems.key_rows.shape[-1])
        return plan.timed(  # type: ignore[no-any-return]
            "sorting",
            lambda: hyper_part(
                problems,
                query_ranks[problems.query_rows],
                key_ranks[problems.key_rows],
                draws,
                block_size=block_size,
                alignment=config.alignment,
                coupling=config.coupling,
                dtype=self.call.query.dtype,
            ),
        )

    def _choose(self, block: Block, streams: Streams) -> Chosen:
        if block.given is not None:
            return Chosen(selection_of(block.given), False, None)
        return select_keys(
            block.key.detach(),
            valid=block.valid,
            config=self._scoring_config(),
            streams=streams,
            protect=block.protect,
            keep_all=self._cheaper_exactly(block.n_keys()) if self.config.inner == "auto" else None,
        )

    def _scoring_config(self) -> PrescoreConfig:
        """Causal blocks are many, so their clusters are fitted on smaller samples unless told otherwise."""
        config = self.config
        if not self.is_causal or config.fit_size is not None:
            return config
        n_clusters = config.n_clusters or self.call.key.shape[-1] + 1
        return config.replace(fit_size=CAUSAL_FIT_PER_CLUSTER * max(n_clusters, 64))

    def _cheaper_exactly(self, n_keys: Tensor) -> Tensor:
        """Which problems are so short that reading every key costs no more than scoring and reading a few."""
        cheaper = [cheaper_exactly(self.config, n) for n in n_keys.tolist()]
        return torch.tensor(cheaper, dtype=torch.bool, device=n_keys.device)

    def _report(self, block: Block | None, selection: Selection) -> None:
        plan, counts = self.plan, self.plan.counts
        kept = selection.valid.sum(-1)
        counts["kept"] = counts.get("kept", 0) + int(kept.sum())
        counts["problems"] = counts.get("problems", 0) + kept.numel()
        fallback = selection.fallback
        counts["fallbacks"] = counts.get("fallbacks", 0) + (0 if fallback is None else int(fallback.sum()))
        if block is None or not self.is_causal:
            plan.selections.append(selection)
            return
        n_blocks = block.n_blocks
        first = block.rows.view(self.queries.batch, n_blocks, self.heads, -1)[0, :, 0, 0]
        for number in range(n_blocks):
            own = slice(number, None, n_blocks)
            mark = None if fallback is None else fallback[own]
            plan.selections.append(Selection(selection.indices[own] + first[number], selection.valid[own], mark))

    def _stand_ins(self, block: Block, chosen: Chosen, streams: Streams) -> Columns:
        """Add this block's stand-ins to the table; returns their rows and weights."""
        scored = chosen.scored
        if scored is None:  # a given selection: the same clusters as if it had been made here
            keys, config = block.key.detach(), self._scoring_config()
            scored = score_keys(keys, valid=block.valid, config=config, streams=streams)
        labels, n_clusters = scored.labels, scored.n_clusters
        if labels is None:
            labels, n_clusters = cluster_labels(
                block.key.detach(), valid=block.valid, config=self._scoring_config(), streams=streams
            )
        unselected = ~membership(chosen.selection, block.key.shape[2])
        if block.valid is not None:
            unselected = unselected & block.valid[:, None, :]
        made, columns = centroid_stand_ins(
            block.key, block.value, labels, unselected, n_clusters, self.call.query.dtype
        )
        before = self.plan.stand_ins
        if before is None:
            self.plan.stand_ins = made
            return columns
        joined = StandIns(torch.cat((before.key, made.key)), torch.cat((before.value, made.value)))
        self.plan.stand_ins = joined
        return Columns(columns.rows + before.key.shape[0], columns.bias)

    def _problems(self, block: Block, selection: Selection, extra: Columns | None) -> Problems:
        indices, valid = selection.indices, selection.valid
        n_all = block.n_keys()
        n_selected = None
        rows, kept = block.rows.gather(-1, indices), None
        usable: Tensor | None = None if bool(valid.all()) else valid
        if self.zeroing:
            zero = self.plan.key.shape[0] - 1
            rows = torch.where(membership(selection, block.key.shape[2]), block.rows, zero)
            usable = None if block.valid is None else block.valid[:, None, :].expand(rows.shape)
            n_selected = valid.sum(-1)
        elif block.protect is not None and bool(block.protect.any()):
            apart = block.protect[:, None, :].expand(block.rows.shape).gather(-1, indices) & valid
            kept = _kept_columns(rows, apart, self.call.query.dtype)
            rows, usable = compact(rows, valid & ~apart)
        return Problems(
            block.query_rows, block.query_valid, block.query_real, rows, usable, kept, extra, n_all, n_selected
        )

    def _hash(self) -> tuple[Tensor, Tensor]:
        """Gray ranks of all query and key rows, once for all levels."""
        if self._ranks is None:
            directions = projections(self.config.n_projections, self.call.key, self.streams)
            query = hash_ranks(self.call.query, directions).reshape(-1)
            key = hash_ranks(self.call.key, directions).reshape(-1)
            if self.zeroing:
                key = torch.cat((key, key.new_full((1,), zero_rank(self.config.n_projections))))
            self._ranks = query, key
        return self._ranks


def _kept_columns(rows: Tensor, apart: Tensor, dtype: torch.dtype) -> Columns:
    kept, valid = compact(rows, apart)
    bias = torch.zeros(kept.shape, dtype=dtype, device=rows.device)
    return Columns(kept, bias if valid is None else bias.masked_fill_(~valid, -torch.inf))


def _take(problems: Problems, rows: Tensor) -> Problems:
    """Some of the problems only."""

    def pick(value: Tensor | Columns | None) -> Any:
        if value is None:
            return None
        if isinstance(value, Columns):
            return Columns(value.rows.index_select(0, rows), value.bias.index_select(0, rows))
        return value.index_select(0, rows)

    return Problems(*(pick(getattr(problems, f.name)) for f in dataclasses.fields(Problems)))
