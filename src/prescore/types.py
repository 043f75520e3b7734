"""The values that one stage hands to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:  # records and the command line's help use this module and must not load torch
    from torch import Tensor

Values: TypeAlias = dict[str, Any]
"""Plain values by name, as JSON has them: settings, stats, records."""


class Attended(NamedTuple):
    """An attention result that can still be merged with others.

    `output [B, Hq, Nq, Dv]`, and `lse [B, Hq, Nq]`, the log of the sum of exp of the scaled logits that were
    counted. A query that saw nothing has output 0 and lse -inf. The lse of a `Routed` is too small where single
    unread keys dominate their cluster, and a merge takes that error over.
    """

    output: Tensor
    lse: Tensor


@dataclass(frozen=True, eq=False)
class Selection:
    """Which keys were kept, per batch row and KV head.

    `indices [B, Hkv, S]` int64, ascending in position; `valid [B, Hkv, S]` is False on the filler of rows that
    keep fewer than `S` keys (filler repeats the last kept index, so the order stays ascending).
    `fallback [B]` (with `min_score` `[B, Hkv]`) marks rows in which the delta test selected all keys: fewer than
    `min_fraction * n` were to be kept, so attention runs unfiltered.
    """

    indices: Tensor
    valid: Tensor
    fallback: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        """Allow `indices, valid = select(...)`."""
        return iter((self.indices, self.valid))


class Reads(NamedTuple):
    """How many keys and centroids a query read, on average."""

    keys: float
    centroids: float = 0.0


@dataclass(frozen=True, eq=False)
class Result:
    """What an engine computed for one call.

    Attributes:
        output: `[B, Hq, Nq, Dv]`.
        lse: `[B, Hq, Nq]`; empty where the caller did not need it.
        count_reads: Counts what a query read. The counting is done when it is called, outside of any timer.
        stats: Fields of `Stats`: all where the caller asked for them, else those that cost nothing.
        selections: The keys that could be read, where the caller asked for them.
        why_exact: Why every query read every key; empty where the engine chose keys, and for `Exact`.
    """

    output: Tensor
    lse: Tensor
    count_reads: Callable[[], Reads]
    stats: Values = field(default_factory=dict)
    selections: list[Selection] = field(default_factory=list)
    why_exact: str = ""

    @property
    def attended(self) -> Attended:
        """Output and lse alone."""
        return Attended(self.output, self.lse)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Stats(Mapping[str, Any]):
    """Numbers about one call, see `Aux`; None = not defined for this configuration.

    `stats.keys_per_query` and `stats["keys_per_query"]` are the same; as a mapping it holds the fields that are
    not None, and those of `details`.

    Attributes:
        backend: What ran: `native`, `triton` or `plain` for the far keys of a `Routed`, else torch's operator.
        native_level: Instruction set of the native code that ran (`avx512_bf16`, `avx512`, `avx2`,
            `dotprod`, `baseline`).
        seconds: Seconds by stage.
        keys_per_query: Keys that a query read, on average; centroids are counted apart.
        centroids_per_query: Centroids that a query read, on average.
        keys_selected: Keys available after selection, mean over heads and blocks.
        depth: Levels of the causal grid.
        fallbacks: Blocks that ran unfiltered because fewer than `min_fraction` of their keys were selected.
        mass_read: Mean share of the attention mass that comes from keys read, not from the sampled residual.
        keys_compared: Int8 keys and centroids of subclusters that a routed query was compared with, on average.
        far_keys_read: Far keys that a routed query read, on average.
        exact_queries: Queries of a sequence that read every key because of their position.
        exact_sequences: Sequences that read every key because padding lies between their keys.
        exchange: Context parallel: what the ranks exchanged: `all-gather` (keys), `ulysses` (heads) or `selected`.
        exact_reason: Why every query read every key, as in the report; None where the engine chose keys.
        exchange_reason: Context parallel: why a `Selected` did not exchange its selected keys alone.
        ranks: Context parallel: number of ranks.
        bytes_sent: Context parallel: bytes that this rank sent in the forward pass.
        details: Numbers of the engine's own layout, by name; they may change with every version.
    """

    backend: str
    seconds: Mapping[str, float]
    keys_per_query: float
    centroids_per_query: float = 0.0
    keys_selected: float
    depth: int = 0
    fallbacks: int = 0
    native_level: str | None = None
    mass_read: float | None = None
    keys_compared: float | None = None
    far_keys_read: float | None = None
    exact_queries: int | None = None
    exact_sequences: int | None = None
    exact_reason: str | None = None
    exchange: str | None = None
    exchange_reason: str | None = None
    ranks: int | None = None
    bytes_sent: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, reported: Mapping[str, Any]) -> Stats:
        """From what an engine reports; names without a field of their own become `details`."""
        names = {stat.name for stat in fields(cls)} - {"details"}
        known = {name: number for name, number in reported.items() if name in names}
        return cls(**known, details={name: number for name, number in reported.items() if name not in names})

    def __getitem__(self, name: str) -> Any:
        return self._present()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._present())

    def __len__(self) -> int:
        return len(self._present())

    def __repr__(self) -> str:
        return f"Stats({', '.join(f'{name}={number!r}' for name, number in self._present().items())})"

    def _present(self) -> Values:
        numbers = {stat.name: getattr(self, stat.name) for stat in fields(self) if stat.name != "details"}
        return {**{name: number for name, number in numbers.items() if number is not None}, **self.details}


class Aux(NamedTuple):
    """What `prescored_attention(return_aux=True)` returns in addition to the output.

    Attributes:
        lse: `[B, Hq, Nq]`, log of the sum of exp of the scaled logits that were counted. `Routed` estimates the
            keys not read by centroids, and is too small where single unread keys dominate their cluster: by tenths
            at some hundred thousand random keys with sharp queries. `merge` inherits that error.
        selection: One `Selection`, or in causal mode a list: one entry per off-diagonal block (`Selected`,
            `Hyper`), or one of all keys (`Exact`). `Routed`: every visible key, by chunk; not the keys read.
        stats: Numbers about the call.
    """

    lse: Tensor
    selection: Selection | list[Selection]
    stats: Stats
