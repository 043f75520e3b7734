"""The values that one stage hands to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from torch import Tensor

from prescore.values import Values


class Attended(NamedTuple):
    """An attention result that can still be merged with others.

    `output [B, Hq, Nq, Dv]`, and `lse [B, Hq, Nq]`, the log of the sum of exp of the scaled logits that were
    counted. A query that saw nothing has output 0 and lse -inf.
    """

    output: Tensor
    lse: Tensor


@dataclass(frozen=True, eq=False)
class Selection:
    """Which keys were kept, per batch row and KV head.

    `indices [B, Hkv, S]` int64, ascending in position; `valid [B, Hkv, S]` is False on the filler of rows that
    keep fewer than `S` keys (filler repeats the last kept index, so the order stays ascending).
    `fallback [B]` marks the rows where fewer than `min_fraction * n` keys were asked for, so that attention
    runs unfiltered: there every real key is "selected".
    """

    indices: Tensor
    valid: Tensor
    fallback: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        """Allow `indices, valid = select(...)`."""
        return iter((self.indices, self.valid))


@dataclass(frozen=True, eq=False)
class Outcome:
    """What an engine did with a call.

    Attributes:
        attended: The result.
        count_rows: Counts the key and stand-in rows that a query met, on average; work is done when it is called.
        selections: What could be read, where that was asked for.
        stats: Figures about the call, where they were asked for.
    """

    attended: Attended
    count_rows: Callable[[], float]
    selections: list[Selection] = field(default_factory=list)
    stats: Values = field(default_factory=dict)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Stats(Mapping[str, Any]):
    """Figures about one call, see `Aux`; None = the configuration's engine has no such figure.

    `stats.rows_per_query` and `stats["rows_per_query"]` are the same; as a mapping it holds the figures that are
    not None, those of `details` included.

    Attributes:
        backend: Operator backend that ran.
        seconds: Seconds by stage.
        rows_per_query: Key and stand-in rows that a query met, on average.
        keys_kept: Keys that could be read, on average over heads and blocks: the budget of a `Selected`.
        depth: Levels of the causal recursion.
        fallbacks: Blocks that ran unfiltered because fewer than `min_fraction` of their keys were selected.
        seen_mass: Mean share of the attention mass that comes from keys read, not from the sampled residual.
        certified_mass: Certified lower bound on the mean share of the true attention mass that is on rows read.
        sampled_error: Relative error of the output against exact attention, at some sampled positions.
        sampled_error_se: Its standard error.
        misplaced_bound_mean: Certified bound on the share of attention on other keys than it should be; mean.
        misplaced_bound_max: The same for the worst query.
        lost_bound_mean: Certified bound on the share of the true attention mass on keys not read; mean.
        lost_bound_max: The same for the worst query.
        exact_queries: Queries of a sequence that read everything because they come before `exact_until`.
        exact_sequences: Sequences that read everything because padding lies between their keys.
        recomputed_queries: Queries that read everything because their bound exceeded `tolerance`.
        fine_heads: Heads that were found to copy, and choose among small clusters.
        local_rows: Nearby rows of a late query, at most.
        far_rows: Rows of chosen clusters.
        single_rows: Rows read by every query: first tokens, and keys unlike all others.
        stand_in_rows: Stand-ins of a late query, at most.
        details: Figures of the engine's own geometry, by name; they may change with every version.
    """

    backend: str
    seconds: Mapping[str, float]
    rows_per_query: float
    keys_kept: float
    depth: int = 0
    fallbacks: int = 0
    seen_mass: float | None = None
    certified_mass: float | None = None
    sampled_error: float | None = None
    sampled_error_se: float | None = None
    misplaced_bound_mean: float | None = None
    misplaced_bound_max: float | None = None
    lost_bound_mean: float | None = None
    lost_bound_max: float | None = None
    exact_queries: int | None = None
    exact_sequences: int | None = None
    recomputed_queries: int | None = None
    fine_heads: int | None = None
    local_rows: float | None = None
    far_rows: float | None = None
    single_rows: float | None = None
    stand_in_rows: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> Stats:
        """What an engine tells; figures that have no field of their own are `details`."""
        named = {_FIGURES.get(name, name): figure for name, figure in figures.items()}
        own = {each.name for each in fields(cls)} - {"details"}
        known = {name: figure for name, figure in named.items() if name in own}
        return cls(**known, details={name: figure for name, figure in named.items() if name not in own})

    def __getitem__(self, name: str) -> Any:
        return self._present()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._present())

    def __len__(self) -> int:
        return len(self._present())

    def __repr__(self) -> str:
        return f"Stats({', '.join(f'{name}={figure!r}' for name, figure in self._present().items())})"

    def _present(self) -> Values:
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "details"}
        return {**{name: figure for name, figure in own.items() if figure is not None}, **self.details}


_FIGURES = {"captured_mass": "certified_mass"}
"""Figures that an engine calls by another name."""


class Aux(NamedTuple):
    """What `prescored_attention(return_aux=True)` tells beside the output.

    Attributes:
        lse: `[B, Hq, Nq]`, log of the sum of exp of the scaled logits that were counted.
        selection: One `Selection`, or in causal mode a list: one entry per off-diagonal block (`Selected`,
            `Hyper`), per chunk (`Routed`), or one of all keys (`Exact`).
        stats: Figures about the call.
    """

    lse: Tensor
    selection: Selection | list[Selection]
    stats: Stats
