"""The values that one stage hands to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

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


class Aux(NamedTuple):
    """What `prescored_attention(return_aux=True)` tells beside the output.

    `selection` is one `Selection`, or in causal mode a list: one entry per off-diagonal block (`Selected`,
    `Hyper`), per chunk (`Routed`), or one of all keys (`Exact`).
    `stats` holds plain numbers: keys kept, recursion depth, fallbacks, captured mass, seconds per stage.
    """

    lse: Tensor
    selection: Selection | list[Selection]
    stats: Values
