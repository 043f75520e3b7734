"""Everything that one run of `prescore speed` measures, as rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from prescore import checks
from prescore.bench.records import Row
from prescore.bench.speed.heads import (
    HeadsSetting,
    LayerSetting,
    SavedHeads,
    heads_row,
    layer_rows,
    lengths_of,
    measure_parts,
    measure_steps,
    saved_setting,
)
from prescore.bench.speed.studies import (
    RANKS,
    DecodeSetting,
    ParallelSetting,
    ScoringSetting,
    ShortSetting,
    decode_rows,
    parallel_row,
    scoring_row,
    short_rows,
)
from prescore.bench.speed.timing import LONG, Setting, length_rows

EVERY_RUN = ("lengths", "top-k", "clusters", "decode", "scoring", "short")
"""What is measured where nothing else is asked for."""
STUDIES = (*EVERY_RUN, "heads", "parts", "steps", "parallel")
BOTH = (False, True)
BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
CLUSTERS = (8, 16, 32, 65, 128, 256)
SHORT = (64, 128, 256, 512, 1024, 2048, 4096)
STEPS = 50
"""Timed steps of a routed generation."""
LEAST_ROUNDS = 5
"""Rounds of what takes little time, at least."""


@dataclass(frozen=True)
class SpeedPlan:
    """Studies, and what they share.

    Attributes:
        base: Sizes, methods and repeats of all; its length and kind are those of no row.
        lengths: Ascending.
        studies: Names of `STUDIES`.
        causal: Full, causal, or both.
        backward: Forward, forward and backward, or both.
        exact_heads: Heads that exact attention is measured on; None = one above `LONG`, else all.
        caches: Lengths that are decoded from.
        short: Lengths of the study of short inputs.
        step_caches: Lengths that routed steps are taken over.
        heads: Saved inputs; parts and steps then look at these instead of random ones.
        head_lengths: How much of them is used; None = all.
    """

    base: Setting
    lengths: Sequence[int]
    studies: Sequence[str] = EVERY_RUN
    causal: Sequence[bool] = BOTH
    backward: Sequence[bool] = BOTH
    exact_heads: int | None = None
    caches: Sequence[int] = (8192,)
    short: Sequence[int] = SHORT
    step_caches: Sequence[int] = (8192, 32768, 131072)
    heads: Sequence[SavedHeads] = ()
    head_lengths: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in self.studies:
            checks.one_of("--study", name, STUDIES)
        for name in self.base.methods:
            self.base.config(name)  # refuses an unknown one
        if "heads" in self.studies:
            if not self.heads:
                raise ValueError("--heads must be a directory of saved heads for --study heads, got none")
            if True not in self.causal or False not in self.backward:
                raise ValueError("--heads must come with causal and forward, the one way saved heads are timed")

    def rows(self, seed: int) -> list[Row]:
        """Rows of all studies, in the order of `STUDIES`."""
        made = {
            "lengths": self._lengths,
            "top-k": self._budgets,
            "clusters": self._clusters,
            "decode": self._decode,
            "scoring": self._scoring,
            "short": self._short,
            "heads": self._heads,
            "parts": self._parts,
            "steps": self._steps,
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

    def _heads(self, seed: int) -> list[Row]:
        base = self.base
        sizes = (base.methods, base.dtype, base.repeats, base.top_k, base.min_seq_len, base.memory)
        return [
            heads_row(saved, HeadsSetting(saved.name, saved.digest, n, *sizes), seed)
            for saved, n in lengths_of(self.heads, self.head_lengths)
        ]

    def _parts(self, seed: int) -> list[Row]:
        return layer_rows("parts", self._layers([self._longest], self._rounds), measure_parts, seed)

    def _steps(self, seed: int) -> list[Row]:
        return layer_rows("steps", self._layers(self.step_caches, STEPS), measure_steps, seed)

    def _layers(self, lengths: Sequence[int], repeats: int) -> list[tuple[LayerSetting, SavedHeads | None]]:
        """Layers that are looked at closer: the saved ones, or without them random ones."""
        base = self.base
        if not self.heads:
            random = LayerSetting(0, dim=base.dim, dtype=base.dtype, repeats=repeats, memory=base.memory)
            return [(replace(random, n=n), None) for n in lengths]
        return [
            (saved_setting(saved, n, dtype=base.dtype, repeats=repeats, memory=base.memory), saved)
            for saved, n in lengths_of(self.heads, self.head_lengths)
        ]

    def _parallel(self, seed: int) -> list[Row]:
        base, kinds = self.base, itertools.product(self.causal, self.backward, self.lengths, RANKS)
        sizes = (base.heads, base.dim, base.dtype, base.repeats, base.top_k, base.min_seq_len)
        return [
            parallel_row(ParallelSetting(n, ranks, causal, backward, *sizes), seed)
            for causal, backward, n, ranks in kinds
            if n <= LONG
        ]
