"""What the clustering scorers share; registers nothing itself."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from prescore import checks
from prescore.registry import register_scorer
from prescore.rng import Streams
from prescore.scoring.base import Scored, Scorer, with_noise
from prescore.scoring.lloyd import fit, pairwise_costs
from prescore.scoring.metrics import EUCLIDEAN, MEDIAN, SPHERICAL, Metric, metric_for
from prescore.scoring.rules import RULES, apply_rule
from prescore.scoring.sampling import Scratch, count_valid, holes_last, stratified


@dataclass(frozen=True)
class ClusteringScorer(Scorer):
    """Cluster the keys of each KV head, score each key by its distance to its own centre.

    Attributes:
        n_clusters: None = `D + 1`, as in the paper.
        rule: How the distance to the own centre becomes a score: `nearest` (paper, Algorithm 1), `farthest`,
            `cluster-share` (distance over its cluster's total), `sensitivity` (d^2 over the cluster's sum of d^2,
            plus 1 / cluster size), `balanced` (equal share per cluster, nearest first).
        max_iter: Lloyd iterations at most.
        normalize: Cluster the l2-normalised keys; block by block, without a normalised copy of all.
        noise: Standard deviation of the Gaussian noise added before scoring (Algorithm 1, line 1).
        seeding: `k-means++` or `random`.
        fit_size: Keys the clusters are fitted on, at most; None = 32 for each cluster, counted as at least 64
            (16 for metrics other than the Euclidean, and in the blocks of causal attention); 0 = all keys. Every
            key is assigned once at the end in either case.
    """

    n_clusters: int | None = None
    rule: str = "nearest"
    max_iter: int = 10
    normalize: bool = True
    noise: float = 0.0
    seeding: str = "k-means++"
    fit_size: int | None = None

    permutation_equivariant: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checks.one_of("rule", self.rule, RULES)
        checks.one_of("seeding", self.seeding, ("k-means++", "random"))
        checks.integer("max_iter", self.max_iter, minimum=0)
        checks.boolean("normalize", self.normalize)
        checks.number("noise", self.noise, minimum=0.0)
        for name, minimum in (("n_clusters", 1), ("fit_size", 0)):
            if getattr(self, name) is not None:
                checks.integer(name, getattr(self, name), minimum=minimum)

    @abstractmethod
    def metric(self) -> Metric:
        """The metric of the clusters."""

    def score(self, keys: Tensor, *, valid: Tensor | None, streams: Streams) -> Scored:
        """Score keys, see `Scorer.score`."""
        n_clusters = keys.shape[-1] + 1 if self.n_clusters is None else self.n_clusters
        points = with_noise(keys, self.noise, valid, streams).flatten(0, 1)
        present = flat_mask(keys, valid)
        clusters = fit(
            points,
            n_clusters=n_clusters,
            metric=self.metric(),
            max_iter=self.max_iter,
            seeding=self.seeding,
            weights=None if present is None else present.to(points.dtype),
            streams=streams.child("clusters"),
            fit_size=self.fit_size,
            lift=self.lift(points, present, streams),
        )
        scores = apply_rule(self.rule, clusters.distances, clusters.labels, n_clusters=n_clusters, valid=present)
        return Scored(scores.reshape(keys.shape[:3]), clusters.labels.reshape(keys.shape[:3]), n_clusters)

    def lift(self, points: Tensor, present: Tensor | None, streams: Streams) -> Callable[[Tensor], Tensor] | None:
        """Features of blocks of the flattened keys, to cluster in; None = the keys themselves."""
        return partial(unit_rows, scratch=Scratch()) if self.normalize else None


def unit_rows(points: Tensor, scratch: Scratch) -> Tensor:
    """Rows of `[P, n, d]` at unit length, in scratch memory; a zero row stays zero."""
    lengths = torch.linalg.vector_norm(points, dim=2, keepdim=True).clamp_(min=torch.finfo(points.dtype).tiny)
    return torch.div(points, lengths, out=scratch.take("unit", *points.shape, like=points))


def flat_mask(keys: Tensor, valid: Tensor | None) -> Tensor | None:
    """The mask `[B, N]` repeated for each head of `keys [B, H, N, D]`, as `[B * H, N]`."""
    if valid is None:
        return None
    return valid.unsqueeze(1).expand(keys.shape[:3]).flatten(0, 1)


# k-means: Euclidean clusters, the paper's Algorithm 1.


@register_scorer("kmeans")
@dataclass(frozen=True)
class KMeans(ClusteringScorer):
    """Distance to the mean of the own k-means cluster."""

    def metric(self) -> Metric:
        """Euclidean."""
        return EUCLIDEAN


# k-median: clusters in the l_1 metric around coordinate medians.


@register_scorer("kmedian")
@dataclass(frozen=True)
class KMedian(ClusteringScorer):
    """l_1 distance to the coordinate median of the own cluster; an outlier moves a median less than a mean."""

    def metric(self) -> Metric:
        """l_1."""
        return MEDIAN


# Minkowski k-means: clusters in the l_p metric, any p > 0.


@register_scorer("minkowski")
@dataclass(frozen=True)
class Minkowski(ClusteringScorer):
    """l_p distance `(sum |x - c|^p)^(1/p)` to the l_p centre of the own cluster.

    The centre is the mean at p = 2 (then this is `kmeans`), the coordinate median at p = 1 (then this is
    `kmedian`), solved by bisection for other p > 1, and the best of a few members for p < 1.
    """

    p: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number("p", self.p, minimum=0.0, exclusive=True)

    def metric(self) -> Metric:
        """l_p."""
        return metric_for(self.p)


# Kernel k-means with a Gaussian kernel, in linear time by random Fourier features.
#
# Kernel k-means clusters the images `phi(x)` of the keys in the feature space of `exp(-|x - y|^2 / (2 h^2))`; the
# centre of a cluster is a mean of images and has no preimage, so its distance
#
#     |phi(x) - m_C|^2 = 1 - 2/|C| sum_{y in C} K(x, y) + 1/|C|^2 sum_{y, z in C} K(y, z)
#
# is no function of the distance to any one point. Random Fourier features `z(x)` (cosine and sine pairs, so that
# `|z(x)| = 1` exactly) have `z(x).z(y) ~ K(x, y)` with error of order `1/sqrt(n_features)`, and Euclidean
# k-means on
# them is kernel k-means up to that error.
#
# The paper's Appendix I uses "Gaussian kernel k-means" for something smaller: Euclidean clusters, with
# `1 - exp(-d^2 / (2 h^2))` of the distance to the centre as the score. That map is monotone, so `nearest` and
# `farthest` keep the same keys as plain `kmeans`; the method here is not of that kind.

BANDWIDTH_SAMPLE = 128
"""Keys whose distances tell the bandwidth, at most."""


@register_scorer("gaussian-kmeans")
@dataclass(frozen=True)
class GaussianKMeans(ClusteringScorer):
    """Distance to the own cluster's mean in Gaussian feature space; the bandwidth is the median distance.

    `n_features` counts cosines and sines together.
    """

    n_features: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("n_features", self.n_features, minimum=2)

    def metric(self) -> Metric:
        """Euclidean, in feature space; features are approximations, so their distances may be too."""
        return SPHERICAL

    def lift(self, points: Tensor, present: Tensor | None, streams: Streams) -> Callable[[Tensor], Tensor]:
        """Random Fourier features."""
        widths = bandwidth(points, present, streams, unit=self.normalize)
        half = max(1, self.n_features // 2)
        frequencies = streams.normal("frequencies", half, points.shape[-1], like=points)
        # the width goes into the small matrix, not into the points
        frequencies, scratch = frequencies.t() / widths[:, None, None], Scratch()
        if self.normalize:
            return lambda block: fourier_features(unit_rows(block, scratch), frequencies, scratch)
        return partial(fourier_features, frequencies=frequencies, scratch=scratch)


def bandwidth(points: Tensor, present: Tensor | None, streams: Streams, *, unit: bool = False) -> Tensor:
    """Median of the pairwise distances in a stratified sample of each problem, `[P]`; 1 where that is 0.

    `unit` normalises the sample first.
    """
    if points.numel() == 0:
        return points.new_ones(len(points))
    weights = None if present is None else present.to(points.dtype)
    n_valid = count_valid(points, weights)
    points, weights = holes_last(points, weights, n_valid)
    counts = n_valid.clamp(max=BANDWIDTH_SAMPLE)
    sample, weights = stratified(points, weights, n_valid, counts, streams, "bandwidth sample")
    if unit:
        sample = unit_rows(sample, Scratch())
    distances = pairwise_costs(sample, 1.0)
    absent = torch.eye(sample.shape[1], dtype=torch.bool, device=sample.device)
    if weights is not None:
        absent = absent | (weights <= 0).unsqueeze(1) | (weights <= 0).unsqueeze(2)
    medians = distances.masked_fill(absent, torch.nan).flatten(1).nanmedian(dim=1).values
    return torch.where(medians > 0, medians, 1.0)


def fourier_features(points: Tensor, frequencies: Tensor, scratch: Scratch | None = None) -> Tensor:
    """Cosines and sines of `x.w` for the columns w of `frequencies [P, d, f]`, of unit norm: `[P, n, 2 f]`."""
    scratch = scratch or Scratch()
    n_problems, n_points, _ = points.shape
    half = frequencies.shape[-1]
    angles = torch.bmm(points, frequencies, out=scratch.take("angles", n_problems, n_points, half, like=points))
    features = scratch.take("features", n_problems, n_points, 2 * half, like=points)
    torch.cos(angles, out=features[:, :, :half])
    torch.sin(angles, out=features[:, :, half:])
    return features.mul_(1.0 / math.sqrt(half))
