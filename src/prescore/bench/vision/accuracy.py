"""Zero-shot substitution in vision transformers: accuracy and speed at a given number of key rows.

Rows are counted in all: what a query reads is `rows` selected keys, or selected keys and centroids that
together are `rows`. So methods with and without centroids are compared at equal cost of attention.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prescore.bench.records import Row
from prescore.bench.vision.methods import DEFAULT, EXACT, PAPER_GRID, VisionMethod, parse_method
from prescore.bench.vision.models import Images, VisionModel
from prescore.integrations.apply import replace_attention
from prescore.integrations.attention import Attend, AttentionContext, PrescoredAttention, attend_exactly
from prescore.types import Values


@dataclass(frozen=True)
class Grid:
    """What to measure: all combinations, exact attention once.

    `share` is the part of the rows that are centroids in `+centroids` methods; `protect` says whether the class
    token and its like are always kept.
    """

    methods: tuple[str, ...] = PAPER_GRID
    rows: tuple[int, ...] = (32, 64, 96, 128)
    clusters: tuple[int, ...] = (4,)
    shares: tuple[float, ...] = (0.5,)
    protect: tuple[bool, ...] = (True,)
    seeds: tuple[int, ...] = (0,)


@dataclass(eq=False)
class Study:
    """A model on images, with the exact answers worked out when they are first needed."""

    model: VisionModel
    images: Images
    described: Mapping[str, Any]
    batch_size: int = 50
    device: str = "cpu"
    _exact: Answers | None = field(default=None, repr=False)

    def exact(self) -> Answers:
        """The model's own answers."""
        if self._exact is None:
            self._exact = self.run(attend_exactly)
        return self._exact

    @torch.inference_mode()
    def run(self, attend: Attend) -> Answers:
        """All images through the model with `attend` in every layer."""
        clock = _Timed(attend, self.device)
        undo = replace_attention(self.model.model, dict.fromkeys(range(self.model.n_layers), clock))
        logits, labels, seconds = [], [], 0.0
        try:
            for pixels, truth in self.images.batches(self.model.preprocessing, self.batch_size):
                here = pixels.to(self.device)
                begin = time.perf_counter()
                logits.append(self.model.logits(here).float().cpu())
                seconds += time.perf_counter() - begin
                labels.append(truth)
        finally:
            undo()
        answers = Answers(torch.cat(logits), torch.cat(labels), seconds, clock.seconds)
        n_classes, highest = answers.logits.shape[1], int(answers.labels.max())
        if highest >= n_classes:
            raise ValueError(f"labels must lie below the model's {n_classes} classes, got {highest}")
        return answers

    def figures(self, attend: Attend) -> Values:
        """Accuracy, distance to the exact answers, and speed."""
        exact = self.exact()
        answers = exact if attend is attend_exactly else self.run(attend)
        sure = exact.logits.log_softmax(-1)
        distance = (sure.exp() * (sure - answers.logits.log_softmax(-1))).sum(-1).mean()
        same = (answers.logits.argmax(-1) == exact.logits.argmax(-1)).float().mean()
        n_images = len(answers.labels)
        return {
            "top1": 100 * answers.hits(1),
            "top5": 100 * answers.hits(min(5, answers.logits.shape[1])),
            "top1_exact": 100 * exact.hits(1),
            "agreement": 100 * float(same),
            "kl": float(distance),
            "n_images": n_images,
            "n_tokens": self.model.n_tokens,
            "images_per_second": n_images / answers.seconds,
            "attention_seconds": answers.attention_seconds,
            "attention_seconds_exact": exact.attention_seconds,
        }


@dataclass(frozen=True, eq=False)
class Answers:
    """Logits and labels of all images, and the seconds spent in the model and in its attention."""

    logits: Tensor
    labels: Tensor
    seconds: float
    attention_seconds: float

    def hits(self, k: int) -> float:
        """Share of the images whose label is among the k best."""
        best = self.logits.topk(k, dim=-1).indices
        return float((best == self.labels[:, None]).any(-1).float().mean())


def study_rows(study: Study, grid: Grid) -> list[Row]:
    """One row per combination; combinations that differ in nothing that matters appear once."""
    rows = [_exact_row(study)] if EXACT in grid.methods else []
    model = study.model
    for method, asked, clusters, share, protect in _combinations(grid, model.n_prefix):
        # nobody reads more keys than there are, and no table may say so
        n_rows = asked if method.routed else min(asked, model.n_tokens)
        config = method.config(
            n_rows, clusters=clusters, share=share or 0.0, n_prefix=model.n_prefix, n_tokens=model.n_tokens
        )
        described = {
            **study.described,
            "method": method.name,
            "rows": method.rows(config, n_rows, n_tokens=model.n_tokens),
            "clusters": clusters,
            "share": share,
            "protect": protect,
            "config": config.to_dict(),
        }
        for seed in grid.seeds if method.random else (0,):
            layer = PrescoredAttention(config, protect_prefix=protect, seed=seed)
            rows.append(Row(described, seed, partial(study.figures, layer)))
    return rows


def _exact_row(study: Study) -> Row:
    described = {**study.described, "method": EXACT, "rows": study.model.n_tokens}
    return Row(described, None, partial(study.figures, attend_exactly))


class _Combination(NamedTuple):
    method: VisionMethod
    n_rows: int
    clusters: int | None
    share: float | None
    protect: bool


def _combinations(grid: Grid, n_prefix: int) -> Iterator[_Combination]:
    for name in grid.methods:
        if name == EXACT:
            continue
        method = parse_method(name)
        clusters: Sequence[int | None] = grid.clusters if method.clusters else (None,)
        shares: Sequence[float | None] = grid.shares if method.centroids and not method.only_stand_ins else (None,)
        # without prefix tokens there is nothing to protect, and routing always reads its sinks
        protections = grid.protect if n_prefix and not method.routed else (True,)
        rows = grid.rows if method.name != DEFAULT else (0,)
        for fields in itertools.product(rows, clusters, shares, protections):
            yield _Combination(method, *fields)


class _Timed:
    """An attention function and the time spent in it."""

    def __init__(self, attend: Attend, device: str) -> None:
        self.attend, self.device, self.seconds = attend, device, 0.0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        """Run it between two looks at the clock."""
        begin = time.perf_counter()
        result = self.attend(query, key, value, context)
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)
        self.seconds += time.perf_counter() - begin
        return result
