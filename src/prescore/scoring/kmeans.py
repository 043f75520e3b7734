"""Clustering scorers: cluster the keys of each KV head, score a key by the distance to its own centre."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from prescore import checks
from prescore.registry import register_scorer
from prescore.rng import Streams, as_normal
from prescore.scoring.base import KeyShard, Scored, Scorer, with_noise
from prescore.scoring.lloyd import SEEDINGS, Draw, Lift, fit, pairwise_costs
from prescore.scoring.metrics import EUCLIDEAN, MEDIAN, Euclidean, metric_for
from prescore.scoring.rules import RULES, apply_rule
from prescore.scoring.sampling import Sample, draw_sample, sample_positions


@dataclass(frozen=True)
class ClusteringScorer(Scorer):
    """What the clustering scorers share; registers nothing itself.

    Attributes:
        n_clusters: None = `D + 1`, as in the paper.
        rule: How the distance to the own centre becomes a score: `nearest` (paper, Algorithm 1), `farthest`,
            `cluster-share` (distance over its cluster's total), `sensitivity` (d^2 over the cluster's sum of d^2,
            plus 1 / cluster size), `balanced` (equal share per cluster, nearest first).
        max_iter: Lloyd iterations at most.
        normalize: Cluster the l2-normalised keys.
        noise: Standard deviation of the Gaussian noise added before scoring (Algorithm 1, line 1).
        seeding: `k-means++` or `random`, of the keys that the clusters are fitted on.
        fit_size: None = clusters are seeded from and fitted on all keys (paper); an int = on an evenly spread
            sample of at most so many. Every key is assigned once at the end in either case.
    """

    n_clusters: int | None = None
    rule: str = "nearest"
    max_iter: int = 10
    normalize: bool = True
    noise: float = 0.0
    seeding: str = "k-means++"
    fit_size: int | None = None

    permutation_equivariant: ClassVar[bool] = False
    makes_clusters: ClassVar[bool] = True
    metric: ClassVar[Euclidean] = EUCLIDEAN
    """Of the clusters."""
    lift_size: ClassVar[int] = 0
    """Keys that `lift` looks at."""

    def __post_init__(self) -> None:
        checks.one_of("rule", self.rule, RULES)
        checks.one_of("seeding", self.seeding, SEEDINGS)
        checks.integer("max_iter", self.max_iter, minimum=0)
        checks.boolean("normalize", self.normalize)
        checks.number("noise", self.noise, minimum=0.0)
        if self.n_clusters is not None:
            checks.integer("n_clusters", self.n_clusters, minimum=1)
        if type(self.fit_size) is int and self.fit_size == 0:
            raise ValueError("fit_size must be None (fit on all keys) or at least 1, got 0")
        if self.fit_size is not None:
            checks.integer("fit_size", self.fit_size, minimum=1)

    def lift(self, points: Tensor, weights: Tensor | None, draw: Draw) -> Lift | None:
        """Features to cluster in, block by block, which may depend on `points [P, n, d]`; None = the keys."""
        return unit_rows if self.normalize else None

    def score(self, keys: Tensor, *, valid: Tensor | None, streams: Streams) -> Scored:
        """Score keys, see `Scorer.score`."""
        points = with_noise(keys, self.noise, streams, valid=valid).flatten(0, 1)
        present = flat_mask(keys, valid)
        weights = None if present is None else present.to(points.dtype)
        sample, draw = draw_sample(points, weights, self.fit_size), problem_draws(keys, streams)
        return self._scored(keys, points, present, sample, self.lift(points, weights, draw), draw)

    def stats(self, shard: KeyShard) -> Tensor | None:
        """The sampled keys that lie in the shard, `[B, H, n * D]`."""
        if self.rule not in ("nearest", "farthest"):
            return None  # the other rules compare all keys of a cluster
        first, end = shard.positions.start, shard.positions.stop
        sent = torch.cat(self._sampled_positions(shard)).unique()
        keys = with_noise(shard.keys, self.noise, shard.streams, shard=shard)
        keys = keys[:, :, sent[(sent >= first) & (sent < end)] - first].flatten(2)
        return keys if self.noise else keys.to(shard.dtype)

    def score_from(self, stats: Sequence[Tensor], shard: KeyShard) -> Scored:
        """Score the keys of a shard, see `Scorer.score_from`: every rank fits the same centres."""
        dim, dtype = shard.keys.shape[-1], shard.keys.dtype
        positions = self._sampled_positions(shard)
        sent = torch.cat(positions).unique()
        keys = torch.cat([part.to(dtype).unflatten(2, (-1, dim)) for part in stats], dim=2).flatten(0, 1)
        fitted, lifted = (keys[:, torch.searchsorted(sent, sampled)] for sampled in positions)
        is_partial = keys.new_full((len(keys),), fitted.shape[1] < shard.n_keys, dtype=torch.bool)
        points = with_noise(shard.keys, self.noise, shard.streams, shard=shard).flatten(0, 1)
        draw = problem_draws(shard.keys, shard.streams)
        lift = self.lift(lifted, None, draw)
        return self._scored(shard.keys, points, None, Sample(fitted, None, is_partial), lift, draw)

    def _sampled_positions(self, shard: KeyShard) -> tuple[Tensor, Tensor]:
        """Positions that the clusters are fitted on, and those that `lift` looks at."""
        return sample_positions(shard.n_keys, self.fit_size), sample_positions(shard.n_keys, self.lift_size)

    def _scored(
        self,
        keys: Tensor,
        points: Tensor,
        present: Tensor | None,
        sample: Sample,
        lift: Lift | None,
        draw: Draw,
    ) -> Scored:
        n_clusters = keys.shape[-1] + 1 if self.n_clusters is None else self.n_clusters
        _, labels, distances = fit(
            points,
            sample,
            n_clusters=n_clusters,
            metric=self.metric,
            draw=draw,
            max_iter=self.max_iter,
            seeding=self.seeding,
            lift=lift,
        )
        scores = apply_rule(self.rule, distances, labels, n_clusters=n_clusters, valid=present)
        return Scored(scores.reshape(keys.shape[:3]), labels.reshape(keys.shape[:3]), n_clusters)


@register_scorer("kmeans")
@dataclass(frozen=True)
class KMeans(ClusteringScorer):
    """Distance to the mean of the own k-means cluster (paper, Algorithm 1)."""


@register_scorer("kmedian")
@dataclass(frozen=True)
class KMedian(ClusteringScorer):
    """l_1 distance to the coordinate median of the own cluster; an outlier moves a median less than a mean."""

    metric: ClassVar[Euclidean] = MEDIAN


@register_scorer("minkowski")
@dataclass(frozen=True)
class Minkowski(ClusteringScorer):
    """l_p distance `(sum |x - c|^p)^(1/p)` to the l_p centre of the own cluster.

    The centre is the mean at p = 2 (then this is `kmeans`), the coordinate median at p = 1 (then this is
    `kmedian`), solved by bisection for other p > 1, and the coordinate median for p < 1.
    """

    p: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number("p", self.p, minimum=0.0, exclusive=True)

    @property
    def metric(self) -> Euclidean:  # type: ignore[override]
        """l_p."""
        return metric_for(self.p)


@register_scorer("gaussian-kmeans")
@dataclass(frozen=True)
class GaussianKMeans(ClusteringScorer):
    """Kernel k-means with a Gaussian kernel, in linear time by random Fourier features.

    Kernel k-means clusters the images `phi(x)` of the keys in the feature space of `exp(-|x - y|^2 / (2 h^2))`;
    the bandwidth h is the median distance of some keys. The centre of a cluster is a mean of images and has no
    preimage, so its distance

        |phi(x) - m_C|^2 = 1 - 2/|C| sum_{y in C} K(x, y) + 1/|C|^2 sum_{y, z in C} K(y, z)

    is not a function of the distance to any one point. Random Fourier features `z(x)` (cosine and sine pairs, so
    that `|z(x)| = 1` exactly) have `z(x).z(y) ~ K(x, y)` with error of order `1/sqrt(n_features)`, and Euclidean
    k-means on them is kernel k-means up to that error. `n_features` counts cosines and sines together.

    The paper's Appendix I calls something smaller "Gaussian kernel k-means": Euclidean clusters with the score
    `exp(-d^2 / (2 h^2))`. That falls as d grows, so its best keys are those that `kmeans` keeps by `nearest`.
    """

    n_features: int = 128

    lift_size: ClassVar[int] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("n_features", self.n_features, minimum=2)

    def lift(self, points: Tensor, weights: Tensor | None, draw: Draw) -> Lift:
        """Random Fourier features."""
        sample = draw_sample(points, weights, self.lift_size)
        widths = bandwidths(sample, unit=self.normalize)
        half = max(1, self.n_features // 2)
        frequencies = as_normal(draw("frequencies", half, points.shape[-1]), points)
        # the width goes into the small matrix, not into the points
        frequencies = frequencies.mT / widths[:, None, None]
        return lambda block: fourier_features(unit_rows(block) if self.normalize else block, frequencies)


def centroid_clusters(dim: int, *, is_causal: bool) -> KMeans:
    """The clusters that centroids represent where the scorer makes none.

    They are fitted on a sample, as nothing is scored by them: a centre fitted on s keys is off by 1/s of the
    variance of its cluster. Causal blocks are many and get the smaller sample.
    """
    per_cluster = 16 if is_causal else 32
    return KMeans(fit_size=per_cluster * max(dim + 1, 64))


def problem_draws(keys: Tensor, streams: Streams) -> Draw:
    """Uniforms for each problem, which is a sequence and head of `keys [B, H, N, D]`."""

    def draw(name: str, *size: int) -> Tensor:
        return streams.head_uniform(name, *size, like=keys).flatten(0, 1)

    return draw


def unit_rows(points: Tensor) -> Tensor:
    """Rows of `[P, n, d]` at unit length; a zero row stays zero."""
    lengths: Tensor = torch.linalg.vector_norm(points, dim=2, keepdim=True)
    return points / lengths.clamp_(min=torch.finfo(points.dtype).tiny)


def flat_mask(keys: Tensor, valid: Tensor | None) -> Tensor | None:
    """The mask `[B, N]` repeated for each head of `keys [B, H, N, D]`, as `[B * H, N]`."""
    if valid is None:
        return None
    return valid.unsqueeze(1).expand(keys.shape[:3]).flatten(0, 1)


def bandwidths(sample: Sample, *, unit: bool = False) -> Tensor:
    """Median of the pairwise distances of each sample `[P]`, of normalised points if `unit`; 1 where that is 0."""
    points, weights, _ = sample
    if points.numel() == 0:
        return points.new_ones(len(points))
    distances = pairwise_costs(unit_rows(points) if unit else points, 1.0)
    absent = torch.eye(points.shape[1], dtype=torch.bool, device=points.device)
    if weights is not None:
        absent = absent | (weights <= 0).unsqueeze(1) | (weights <= 0).unsqueeze(2)
    medians = distances.masked_fill(absent, torch.nan).flatten(1).nanmedian(dim=1).values
    return torch.where(medians > 0, medians, 1.0)


def fourier_features(points: Tensor, frequencies: Tensor) -> Tensor:
    """Cosines and sines of `x.w` for the columns w of `frequencies [P, d, f]`, of unit norm: `[P, n, 2 f]`."""
    angles = torch.bmm(points, frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=2).mul_(1.0 / math.sqrt(frequencies.shape[-1]))
