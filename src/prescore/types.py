"""Plain values by name, as JSON has them: settings, figures, records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

Values: TypeAlias = dict[str, Any]


# The values that one stage hands to the next.


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
        count_keys: Counts the key and centroid rows that a query met, on average; work is done when it is called.
        selections: What could be read, where that was asked for.
        stats: Figures about the call: all where they were asked for, else those that cost nothing.
    """

    attended: Attended
    count_keys: Callable[[], float]
    selections: list[Selection] = field(default_factory=list)
    stats: Values = field(default_factory=dict)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Stats(Mapping[str, Any]):
    """Figures about one call, see `Aux`; None = the configuration's engine has no such figure.

    `stats.keys_per_query` and `stats["keys_per_query"]` are the same; as a mapping it holds the figures that are
    not None, those of `details` included.

    Attributes:
        backend: Operator backend that ran.
        native: Level of compiled code that ran the far part of a `Routed` (`avx512`, `avx2`, `baseline`); `none`
            where plain torch did. None where no query had a far part, and for other configurations.
        seconds: Seconds by stage.
        keys_per_query: Key and centroid rows that a query met, on average.
        keys_selected: Keys that could be read, on average over heads and blocks: the budget of a `Selected`.
        depth: Levels of the causal recursion.
        fallbacks: Blocks that ran unfiltered because fewer than `min_fraction` of their keys were selected.
        mass_read: Mean share of the attention mass that comes from keys read, not from the sampled residual.
        keys_compared: Keys whose codes a routed query was compared with, on average.
        far_keys_read: Far keys that a routed query found and read, on average.
        centroids_per_query: Centroids that a routed query met, on average.
        exact_queries: Queries of a sequence that read everything because they come before `exact_until`.
        exact_sequences: Sequences that read everything because padding lies between their keys.
        error_estimate: Relative error that is expected of a query's output, a root mean square over draws; mean.
            This and the next four are there where a `tolerance` was asked for; queries that read everything count
            with error 0.
        error_bound_mean: Relative error that a query's output stays below, by its error bar; mean.
        error_bound_max: The same for the worst query.
        refined: Share of queries that looked for lighter keys than `rows` asks for, or read everything.
        read_all: Share of queries that read everything at last.
        way: With a group: what travelled between the ranks, `gather`, `heads` or `rows`.
        ranks: With a group: how many.
        bytes_sent: With a group: bytes that this rank sent in the forward pass.
        why_not_selected: With a group: why the rows of a `Selected` did not travel by themselves.
        details: Figures of the engine's own geometry, by name; they may change with every version.
    """

    backend: str
    seconds: Mapping[str, float]
    keys_per_query: float
    keys_selected: float
    depth: int = 0
    fallbacks: int = 0
    native: str | None = None
    mass_read: float | None = None
    keys_compared: float | None = None
    far_keys_read: float | None = None
    centroids_per_query: float | None = None
    exact_queries: int | None = None
    exact_sequences: int | None = None
    error_estimate: float | None = None
    error_bound_mean: float | None = None
    error_bound_max: float | None = None
    refined: float | None = None
    read_all: float | None = None
    way: str | None = None
    ranks: int | None = None
    bytes_sent: int | None = None
    why_not_selected: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> Stats:
        """What an engine tells; figures that have no field of their own are `details`."""
        own = {each.name for each in fields(cls)} - {"details"}
        known = {name: figure for name, figure in figures.items() if name in own}
        return cls(**known, details={name: figure for name, figure in figures.items() if name not in own})

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
