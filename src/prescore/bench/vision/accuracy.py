"""Pre-scored attention in a trained vision transformer: accuracy and speed at a budget of keys and centroids.

A query reads `budget` selected keys, or selected keys and centroids that are `budget` together, so that methods
with and without centroids cost the same.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.bench.methods import CENTROIDS, PUBLISHED, RANDOM, ROUTED, ScorerName, full_budget, image_config
from prescore.bench.observed import Observed
from prescore.bench.records import Row, Values
from prescore.bench.vision.models import Images, VisionModel
from prescore.integrations.apply import Observer, observe, replace_attention
from prescore.integrations.attention import Attend, PrescoredAttention, original_attention
from prescore.rng import Streams

PAPER_GRID = (
    "exact",
    "kmeans",
    PUBLISHED,
    "kmeans-farthest-sample",
    "kmeans-cluster-share",
    "kmeans-balanced",
    "kmedian",
    "kmedian-farthest-sample",
    "leverage",
    "key-norm",
    "key-diff",
    RANDOM,
    "key-diff+centroids",
    "kmeans-farthest+centroids",
    CENTROIDS,
)
"""The paper's comparison and ours."""


class Predictions(NamedTuple):
    """Logits and labels of all images, and the seconds spent in the model and in its attention."""

    logits: Tensor
    labels: Tensor
    seconds: float
    attention_seconds: float

    def accuracy(self, k: int) -> float:
        """Images whose label is among the k best, in per cent."""
        best = self.logits.topk(min(k, self.logits.shape[1]), dim=-1).indices
        return 100 * float((best == self.labels[:, None]).any(-1).float().mean())


@dataclass(eq=False)
class Study:
    """A model on images; `described` identifies both in records."""

    model: VisionModel
    images: Images
    described: Values
    batch_size: int = 50
    device: str = "cpu"

    @cached_property
    def exact(self) -> Predictions:
        """The model's predictions with exact attention."""
        return self.predict(original_attention)

    @torch.inference_mode()
    def predict(self, attend: Attend, seed: int = 0) -> Predictions:
        """Run all images through the model with `attend` in every layer; every image has draws of its own."""
        observer = Observed(dict.fromkeys(range(self.model.n_layers), attend))
        undo = replace_attention(self.model.model, dict.fromkeys(observer.functions, observer))
        logits: list[Tensor] = []
        labels: list[Tensor] = []
        seconds = 0.0
        try:
            for pixels, truth in self.images.batches(self.model.preprocessing, self.batch_size):
                pixels = pixels.to(self.device)  # noqa: PLW2901
                if isinstance(attend, PrescoredAttention):
                    attend.seed = image_seeds(seed, sum(len(some) for some in labels), len(pixels))
                begin = time.perf_counter()
                logits.append(self.model.logits(pixels).float().cpu())
                seconds += time.perf_counter() - begin
                labels.append(truth)
        finally:
            undo()
        n_classes, highest = logits[0].shape[1], max(int(truth.max()) for truth in labels)
        if highest >= n_classes:
            raise ValueError(f"labels must lie below the model's {n_classes} classes, got {highest}")
        return Predictions(torch.cat(logits), torch.cat(labels), seconds, observer.sum())

    @torch.inference_mode()
    def observe(self, observer: Observer) -> None:
        """Run all images with exact attention, and show the queries and keys of every layer to `observer`."""
        with observe(self.model.model, observer):
            for pixels, _ in self.images.batches(self.model.preprocessing, self.batch_size):
                self.model.logits(pixels.to(self.device))

    def measure(self, attend: Attend, seed: int = 0) -> Values:
        """Accuracy, difference from the exact predictions, and speed."""
        exact = self.exact
        predictions = exact if attend is original_attention else self.predict(attend, seed)
        log_exact = exact.logits.log_softmax(-1)
        divergence = (log_exact.exp() * (log_exact - predictions.logits.log_softmax(-1))).sum(-1).mean()
        same = (predictions.logits.argmax(-1) == exact.logits.argmax(-1)).float().mean()
        return {
            "top1": predictions.accuracy(1),
            "top5": predictions.accuracy(5),
            "top1_exact": exact.accuracy(1),
            "agreement": 100 * float(same),
            "kl": float(divergence),
            "n_images": len(predictions.labels),
            "n_tokens": self.model.n_tokens,
            "images_per_second": len(predictions.labels) / predictions.seconds,
            "attention_seconds": predictions.attention_seconds,
            "attention_seconds_exact": exact.attention_seconds,
        }


def accuracy_rows(
    study: Study,
    *,
    methods: Sequence[str] = PAPER_GRID,
    budgets: Sequence[int] = (32, 64, 96, 128),
    n_clusters: Sequence[int] = (4,),
    centroid_shares: Sequence[float] = (0.5,),
    keep_prefix: Sequence[bool] = (True,),
    seeds: Sequence[int] = (0,),
) -> list[Row]:
    """A row for each combination; those that differ in nothing that matters to a method are equal."""
    model, rows = study.model, []
    grid = itertools.product(methods, budgets, n_clusters, centroid_shares, keep_prefix, seeds)
    for name, budget, n, share, keep, seed in grid:
        if name == "exact":
            exact = {**study.described, "method": name, "budget": model.n_tokens}
            rows.append(Row(exact, None, partial(study.measure, original_attention)))
            continue
        routes = name in ("default", ROUTED)
        scorer = None if routes else ScorerName.read(name)
        # no query reads more keys than there are
        most = budget if routes else min(budget, model.n_tokens)
        sizes = {"n_prefix": model.n_prefix, "n_tokens": model.n_tokens}
        config = image_config(name, most, n_clusters=n, share=share, **sizes)
        keeps = keep or routes or not model.n_prefix  # routing always reads its sinks
        described = {
            **study.described,
            "method": name,
            "budget": full_budget(config, most, model.n_tokens),
            "n_clusters": n if scorer and scorer.takes_n_clusters else None,
            "centroid_share": share if scorer and scorer.takes_share else None,
            "keep_prefix": keeps,
            "config": config.to_dict(),
        }
        drawn = seed if scorer and scorer.is_random else 0
        layer = PrescoredAttention(config, protect_prefix=keeps)
        rows.append(Row(described, drawn, partial(study.measure, layer, drawn)))
    return rows


def image_seeds(seed: int, first: int, n_images: int) -> list[int]:
    """A seed for each of so many images from the number `first` on: they do not depend on the batches."""
    return [Streams(seed).child(f"image {number}").seed for number in range(first, first + n_images)]
