"""Everything that one run of `prescore speed` measures, as rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from prescore import checks
from prescore.evaluation.speed.decode import DecodeSetting, decode_rows
from prescore.evaluation.speed.parallel import RANKS, ParallelSetting, parallel_row
from prescore.evaluation.speed.studies import ScoringSetting, ShortSetting, scoring_row, short_rows
from prescore.evaluation.speed.timing import LONG, Setting, length_rows
from prescore.records import Row

STUDIES = ("lengths", "top-k", "clusters", "decode", "scoring", "short")
ON_REQUEST = ("parallel",)
"""Studies that run only when they are named."""
BOTH = (False, True)
BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
CLUSTERS = (8, 16, 32, 65, 128, 256)
SHORT = (64, 128, 256, 512, 1024, 2048, 4096)
LEAST_ROUNDS = 5
"""Rounds of what takes little time, at least."""


@dataclass(frozen=True)
class SpeedPlan:
    """Studies, and what they share.

    Attributes:
        base: Sizes, methods and repeats of all; its length and kind are those of no row.
        lengths: Ascending.
        studies: Names of `STUDIES` and `ON_REQUEST`.
        causal: Full, causal, or both.
        backward: Forward, forward and backward, or both.
        exact_heads: Heads that exact attention is measured on; None = one above `LONG`, else all.
        caches: Lengths that are decoded from.
        short: Lengths of the study of short inputs.
    """

    base: Setting
    lengths: Sequence[int]
    studies: Sequence[str] = STUDIES
    causal: Sequence[bool] = BOTH
    backward: Sequence[bool] = BOTH
    exact_heads: int | None = None
    caches: Sequence[int] = (8192,)
    short: Sequence[int] = SHORT

    def __post_init__(self) -> None:
        for name in self.studies:
            checks.one_of("--study", name, (*STUDIES, *ON_REQUEST))
        for name in self.base.methods:
            self.base.config(name)  # refuses an unknown one

    def rows(self, seed: int) -> list[Row]:
        """Rows of all studies, in the order of `STUDIES`."""
        made = {
            "lengths": self._lengths,
            "top-k": self._budgets,
            "clusters": self._clusters,
            "decode": self._decode,
            "scoring": self._scoring,
            "short": self._short,
            "parallel": self._parallel,
        }
        return [row for name, make in made.items() if name in self.studies for row in make(seed)]

    def _at(self, n: int, **changes: Any) -> Setting:
        few = min(self.base.heads, self.exact_heads or (1 if n > LONG else self.base.heads))
        return replace(self.base, n=n, exact_heads=few, **changes)

    def _full(self, **changes: Any) -> Setting:
        return self._at(self._longest, causal=False, backward=False, **changes)

    @property
    def _longest(self) -> int:
        return min(self.lengths[-1], LONG)

    @property
    def _rounds(self) -> int:
        return max(self.base.repeats, LEAST_ROUNDS)

    def _lengths(self, seed: int) -> list[Row]:
        kinds = itertools.product(self.causal, self.backward, self.lengths)
        return length_rows([self._at(n, causal=causal, backward=backward) for causal, backward, n in kinds], seed)

    def _budgets(self, seed: int) -> list[Row]:
        budgets = [top_k for top_k in BUDGETS if top_k < self._longest]
        return length_rows([self._full(top_k=top_k) for top_k in budgets], seed, "top-k")

    def _clusters(self, seed: int) -> list[Row]:
        return length_rows([self._full(n_clusters=number) for number in CLUSTERS], seed, "clusters")

    def _decode(self, seed: int) -> list[Row]:
        base = self.base
        return decode_rows([DecodeSetting(n, base.top_k, base.heads, base.dim) for n in self.caches], seed)

    def _scoring(self, seed: int) -> list[Row]:
        return [scoring_row(ScoringSetting(self._longest, self.base.heads, self.base.dim, self._rounds), seed)]

    def _short(self, seed: int) -> list[Row]:
        sizes = self.base.heads, self.base.dim, self._rounds
        kinds = itertools.product(BOTH, BOTH, self.short)
        return short_rows([ShortSetting(n, causal, backward, *sizes) for causal, backward, n in kinds], seed)

    def _parallel(self, seed: int) -> list[Row]:
        base, kinds = self.base, itertools.product(self.causal, self.backward, self.lengths, RANKS)
        return [
            parallel_row(
                ParallelSetting(
                    n,
                    ranks,
                    causal,
                    backward,
                    base.heads,
                    base.dim,
                    base.dtype,
                    base.repeats,
                    base.top_k,
                    base.min_seq_len,
                ),
                seed,
            )
            for causal, backward, n, ranks in kinds
            if n <= LONG
        ]
