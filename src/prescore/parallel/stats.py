"""Scores of keys that lie on several ranks: what the holders of a block tell one another before they can score.

A key's score is a function of the key and of something small that all keys decide together: a mean, a Gram matrix,
the centres of clusters fitted on a sample. Every holder tells its part of that, hears the others', computes the
same something from all parts in the order of ranks, and scores its own keys.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.parallel.shards import Span
from prescore.rng import Streams
from prescore.scoring.base import Scored, Scorer
from prescore.scoring.key_diff import KeyDiff
from prescore.scoring.key_norm import KeyNorm
from prescore.scoring.kmeans import BANDWIDTH_SAMPLE, ClusteringScorer, GaussianKMeans, KMeans, KMedian, Minkowski
from prescore.scoring.leverage import (
    Leverage,
    lengths_after,
    sketch_of,
    sketch_rows,
    sketch_signs,
    sketched_whitening,
    whitening_of,
)
from prescore.scoring.lloyd import assign, fit
from prescore.scoring.sampling import fit_counts, strata
from prescore.scoring.uniform import Uniform


@dataclass(frozen=True)
class Held:
    """A holder's keys of a block: columns `span` of `n_keys`, all keys `[B, H, n, D]` in at least float32.

    Attributes:
        keys: The columns of this rank, without gradients.
        span: Which of the block's columns they are.
        n_keys: Keys of the whole block.
        streams: Randomness of the block.
    """

    keys: Tensor
    span: Span
    n_keys: int
    streams: Streams

    def noisy(self, noise: float) -> Held:
        """The same with the noise that one process would add."""
        if not noise:
            return self
        drawn = self.streams.normal("noise", self.n_keys, self.keys.shape[-1], like=self.keys)
        return dataclasses.replace(self, keys=self.keys + noise * drawn[self.span.begin : self.span.end])


class ScoreStats(NamedTuple):
    """What the holder of some columns told: `numbers [B, H, size]`."""

    span: Span
    numbers: Tensor


class StatsKind(ABC):
    """How one scorer scores keys that lie on several ranks."""

    def wire(self, keys: torch.dtype, wide: torch.dtype) -> torch.dtype:
        """The dtype in which it is told, given that of the keys and that of the computation."""
        return wide

    @abstractmethod
    def size(self, like: Held, span: Span) -> int:
        """Numbers for each sequence and head that the holder of other columns of the same block tells."""

    @abstractmethod
    def tell(self, held: Held) -> Tensor:
        """`[B, H, size]`: what this holder tells the others."""

    @abstractmethod
    def score(self, held: Held, told: Sequence[ScoreStats]) -> Scored:
        """Scores of this holder's keys, from what all holders told, in the order of their columns."""


def stats_kind_of(scorer: Scorer) -> StatsKind | None:
    """How a scorer does it; None = it needs all keys in one place."""
    if type(scorer) is KeyNorm or type(scorer) is Uniform:
        return _Alone(scorer)
    if type(scorer) is KeyDiff:
        return _Mean()
    if type(scorer) is Leverage:
        return _Gram(scorer) if scorer.sketch_size is None else _Sketch(scorer, scorer.sketch_size)
    known = type(scorer) in (KMeans, KMedian, Minkowski, GaussianKMeans)
    if known and isinstance(scorer, ClusteringScorer) and scorer.rule in ("nearest", "farthest"):
        return _Centres(scorer)
    return None


@dataclass(frozen=True)
class _Alone(StatsKind):
    """Every key for itself."""

    scorer: Scorer

    def size(self, like: Held, span: Span) -> int:
        return 0

    def tell(self, held: Held) -> Tensor:
        return held.keys.new_zeros(*held.keys.shape[:2], 0)

    def score(self, held: Held, told: Sequence[ScoreStats]) -> Scored:
        if isinstance(self.scorer, KeyNorm):
            return Scored(torch.linalg.vector_norm(held.keys, dim=-1))
        draws = held.streams.uniform("uniform", held.n_keys, like=held.keys).to(held.keys.dtype)
        return Scored(draws[held.span.begin : held.span.end].expand(held.keys.shape[:3]).contiguous())


@dataclass(frozen=True)
class _Mean(StatsKind):
    """`KeyDiff`: sums of the normalised keys."""

    def size(self, like: Held, span: Span) -> int:
        return like.keys.shape[-1]

    def tell(self, held: Held) -> Tensor:
        return torch.matmul(self._inverse(held.keys).unsqueeze(2), held.keys).squeeze(2)

    def score(self, held: Held, told: Sequence[ScoreStats]) -> Scored:
        total = _in_order(told).unsqueeze(2)
        direction = torch.nn.functional.normalize(total, dim=-1, eps=torch.finfo(total.dtype).tiny)
        cosines = torch.matmul(held.keys, direction.transpose(2, 3)).squeeze(3)
        return Scored(-cosines * self._inverse(held.keys))

    def _inverse(self, keys: Tensor) -> Tensor:
        lengths = torch.linalg.vector_norm(keys, dim=-1)
        tiny = torch.finfo(keys.dtype).tiny
        return torch.where(lengths > 0, lengths.clamp(min=tiny).reciprocal(), 0.0)


@dataclass(frozen=True)
class _Gram(StatsKind):
    """`Leverage`: triangular factors, whose Gram matrices add up to that of all keys."""

    scorer: Leverage

    def wire(self, keys: torch.dtype, wide: torch.dtype) -> torch.dtype:
        return torch.float64

    def size(self, like: Held, span: Span) -> int:
        dim = like.keys.shape[-1]
        return min(span.length, dim) * dim

    def tell(self, held: Held) -> Tensor:
        factors: Tensor = torch.linalg.qr(_leverage_rows(self.scorer, held).to(torch.float64), mode="r").R
        return factors.flatten(2)

    def score(self, held: Held, told: Sequence[ScoreStats]) -> Scored:
        dim, dtype = held.keys.shape[-1], held.keys.dtype
        stacked = torch.cat([factors.unflatten(2, (-1, dim)) for _, factors in told], dim=2).flatten(0, 1)
        whitening = whitening_of(stacked, dim * torch.finfo(dtype).eps)
        rows = _leverage_rows(self.scorer, held)
        return Scored(lengths_after(rows.flatten(0, 1), whitening).to(dtype).view(rows.shape[:3]))


@dataclass(frozen=True)
class _Sketch(StatsKind):
    """`Leverage` from a sketch: the sum of the holders' sketches."""

    scorer: Leverage
    sketch_size: int

    def size(self, like: Held, span: Span) -> int:
        dim = like.keys.shape[-1]
        return sketch_rows(self.sketch_size, dim) * dim

    def tell(self, held: Held) -> Tensor:
        rows = _leverage_rows(self.scorer, held)
        signs = sketch_signs(held.n_keys, held.streams, like=rows)[held.span.begin : held.span.end]
        size = sketch_rows(self.sketch_size, rows.shape[-1])
        return sketch_of(rows.flatten(0, 1), signs, size, held.span.begin).flatten(1).view(*rows.shape[:2], -1)

    def score(self, held: Held, told: Sequence[ScoreStats]) -> Scored:
        rows = _leverage_rows(self.scorer, held)
        sketch = _in_order(told).unflatten(2, (-1, rows.shape[-1])).flatten(0, 1)
        whitening = sketched_whitening(sketch, torch.finfo(rows.dtype).eps, held.streams)
        lengths = torch.bmm(rows.flatten(0, 1), whitening.to(rows.dtype)).square_().sum(dim=2)
        return Scored(lengths.view(rows.shape[:3]))


@dataclass(frozen=True)
class _Centres(StatsKind):
    """Clustering scorers: every holder fits the same centres on the same sample, and assigns its own keys."""

    scorer: ClusteringScorer

    def wire(self, keys: torch.dtype, wide: torch.dtype) -> torch.dtype:
        return wide if self.scorer.noise else keys

    def size(self, like: Held, span: Span) -> int:
        inside = [_inside(places, span).numel() for places in self._samples(like)]
        return sum(inside) * like.keys.shape[-1]

    def tell(self, held: Held) -> Tensor:
        keys = held.noisy(self.scorer.noise).keys
        rows = [keys[:, :, _inside(places, held.span)] for places in self._samples(held)]
        return torch.cat(rows, dim=2).flatten(2)

    def score(self, held: Held, told: Sequence[ScoreStats]) -> Scored:
        scorer, shape = self.scorer, held.keys.shape
        fitted, widths = self._together(held, told)
        lift = scorer.lift(widths, None, held.streams)
        n_clusters = self._n_clusters(held)
        metric = scorer.metric()
        centres = fit(
            fitted,
            n_clusters=n_clusters,
            metric=metric,
            max_iter=scorer.max_iter,
            seeding=scorer.seeding,
            streams=held.streams.child("clusters"),
            fit_size=0,
            lift=lift,
        ).centres
        points = held.noisy(scorer.noise).keys.flatten(0, 1)
        exact = not metric.shortlists or fitted.shape[1] == held.n_keys
        labels, distances = assign(points, centres, metric, exact=exact, lift=lift)
        scores = -distances if scorer.rule == "nearest" else distances
        return Scored(scores.view(shape[:3]), labels.view(shape[:3]), n_clusters)

    def _n_clusters(self, held: Held) -> int:
        return held.keys.shape[-1] + 1 if self.scorer.n_clusters is None else self.scorer.n_clusters

    def _samples(self, held: Held) -> tuple[Tensor, Tensor]:
        """Columns that the clusters are fitted on, and those that tell the width of a Gaussian, ascending."""
        n_keys = torch.tensor([held.n_keys])
        per_cluster = self.scorer.metric().samples_per_cluster
        counts = fit_counts(n_keys, self._n_clusters(held), self.scorer.fit_size, per_cluster=per_cluster)
        clusters = held.streams.child("clusters")
        fitted = _sample(n_keys, counts, clusters, "fit sample")
        few = n_keys.clamp(max=BANDWIDTH_SAMPLE if isinstance(self.scorer, GaussianKMeans) else 0)
        return fitted, _sample(n_keys, few, held.streams, "bandwidth sample")

    def _together(self, held: Held, told: Sequence[ScoreStats]) -> tuple[Tensor, Tensor]:
        """The two samples `[B * H, n, D]` out of what all holders told."""
        dim, dtype = held.keys.shape[-1], held.keys.dtype
        fitted, _ = self._samples(held)
        whole: tuple[list[Tensor], list[Tensor]] = ([], [])
        for span, rows in told:
            split = _inside(fitted, span).numel() * dim
            for place, part in enumerate((rows[..., :split], rows[..., split:])):
                whole[place].append(part.to(dtype).unflatten(2, (-1, dim)))
        first, second = (torch.cat(parts, dim=2).flatten(0, 1) for parts in whole)
        return first, second


def _sample(n_keys: Tensor, counts: Tensor, streams: Streams, name: str) -> Tensor:
    """Columns of a stratified sample, as `prescore.scoring.sampling.stratified` takes them."""
    size = int(counts)
    if size in (0, int(n_keys)):
        return torch.arange(size)
    return strata(n_keys, counts, size, streams, name, like=n_keys)[0]


def _inside(places: Tensor, span: Span) -> Tensor:
    """The places of a sample that lie in a span, counted from its beginning."""
    return places[(places >= span.begin) & (places < span.end)] - span.begin


def _leverage_rows(scorer: Leverage, held: Held) -> Tensor:
    keys = held.noisy(scorer.noise).keys
    if scorer.normalize:
        keys = torch.nn.functional.normalize(keys, dim=-1, eps=torch.finfo(keys.dtype).tiny)
    return keys


def _in_order(told: Sequence[ScoreStats]) -> Tensor:
    """The sum in the order of ranks, so that all get the same bits."""
    total = told[0].numbers
    for part in told[1:]:
        total = total + part.numbers
    return total
