"""Zero-shot substitution in vision transformers: accuracy and speed at a given number of key rows.

Rows are counted in all: what a query reads is `rows` selected keys, or selected keys and stand-ins that
together are `rows`. So methods with and without stand-ins are compared at equal cost of attention.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from prescore.evaluation.vision_data import Images
from prescore.evaluation.vision_methods import DEFAULT, EXACT, PAPER_GRID, Method, parse_method
from prescore.evaluation.vision_models import VisionModel
from prescore.integrations.vision_attention import (
    Attend,
    PrescoredLayer,
    Situation,
    attend_exactly,
    vision_adapter,
)
from prescore.records import Row


@dataclass(frozen=True)
class Grid:
    """What to measure: all combinations, exact attention once.

    `share` is the part of the rows that are stand-ins in `+centroids` methods; `protect` says whether the class
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
    _exact: Outcome | None = field(default=None, repr=False)

    def exact(self) -> Outcome:
        """The model's own answers."""
        if self._exact is None:
            self._exact = self.run(attend_exactly)
        return self._exact

    @torch.inference_mode()
    def run(self, attend: Attend) -> Outcome:
        """All images through the model with `attend` in every layer."""
        clock = _Timed(attend, self.device)
        undo = vision_adapter(self.model.model).replace_attention(
            self.model.model, dict.fromkeys(range(self.model.n_layers), clock)
        )
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
        outcome = Outcome(torch.cat(logits), torch.cat(labels), seconds, clock.seconds)
        n_classes, highest = outcome.logits.shape[1], int(outcome.labels.max())
        if highest >= n_classes:
            raise ValueError(f"labels must lie below the model's {n_classes} classes, got {highest}")
        return outcome

    def figures(self, attend: Attend) -> dict[str, Any]:
        """Accuracy, distance to the exact answers, and speed."""
        exact = self.exact()
        outcome = exact if attend is attend_exactly else self.run(attend)
        sure = exact.logits.log_softmax(-1)
        distance = (sure.exp() * (sure - outcome.logits.log_softmax(-1))).sum(-1).mean()
        same = (outcome.logits.argmax(-1) == exact.logits.argmax(-1)).float().mean()
        n_images = len(outcome.labels)
        return {
            "top1": 100 * outcome.hits(1),
            "top5": 100 * outcome.hits(min(5, outcome.logits.shape[1])),
            "top1_exact": 100 * exact.hits(1),
            "agreement": 100 * float(same),
            "kl": float(distance),
            "n_images": n_images,
            "n_tokens": self.model.n_tokens,
            "images_per_second": n_images / outcome.seconds,
            "attention_seconds": outcome.attention_seconds,
            "attention_seconds_exact": exact.attention_seconds,
        }


@dataclass(frozen=True, eq=False)
class Outcome:
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
    for method, fields in _combinations(grid, study.model.n_prefix):
        n_rows, clusters, share, protect = fields
        model = study.model
        # nobody reads more keys than there are, and no table may say so
        n_rows = n_rows if method.routed else min(n_rows, model.n_tokens)
        config = method.config(
            n_rows, clusters=clusters, share=share or 0.0, n_prefix=model.n_prefix, n_tokens=model.n_tokens
        )
        n_rows = method.rows(config, n_rows, n_tokens=model.n_tokens)
        for seed in grid.seeds if method.random else (0,):
            described = {
                **study.described,
                "method": method.name,
                "rows": n_rows,
                "clusters": clusters,
                "share": share,
                "protect": protect,
                "config": config.to_dict(),
            }
            layer = PrescoredLayer(config, protect, seed)
            rows.append(Row(described, seed, lambda layer=layer: study.figures(layer)))  # type: ignore[misc]
    return rows


def _exact_row(study: Study) -> Row:
    described = {**study.described, "method": EXACT, "rows": study.model.n_tokens}
    return Row(described, None, lambda: study.figures(attend_exactly))


def _combinations(
    grid: Grid, n_prefix: int
) -> Iterable[tuple[Method, tuple[int, int | None, float | None, bool]]]:
    for name in grid.methods:
        if name == EXACT:
            continue
        method = parse_method(name)
        clusters: Sequence[int | None] = grid.clusters if method.clusters else (None,)
        shares: Sequence[float | None] = grid.shares if method.stand_ins and not method.only_stand_ins else (None,)
        # without prefix tokens there is nothing to protect, and routing always reads its sinks
        protections = grid.protect if n_prefix and not method.routed else (True,)
        for n_rows in grid.rows if method.name != DEFAULT else (0,):
            for n_clusters in clusters:
                for share in shares:
                    for protect in protections:
                        yield method, (n_rows, n_clusters, share, protect)


class _Timed:
    """An attention function and the time spent in it."""

    def __init__(self, attend: Attend, device: str) -> None:
        self.attend, self.device, self.seconds = attend, device, 0.0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, situation: Situation) -> Tensor:
        """Run it between two looks at the clock."""
        begin = time.perf_counter()
        result = self.attend(query, key, value, situation)
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)
        self.seconds += time.perf_counter() - begin
        return result
