"""Kernel k-means with a Gaussian kernel, in linear time by random Fourier features.

Kernel k-means clusters the images `phi(x)` of the keys in the feature space of `exp(-|x - y|^2 / (2 h^2))`; the
centre of a cluster is a mean of images and has no preimage, so its distance

    |phi(x) - m_C|^2 = 1 - 2/|C| sum_{y in C} K(x, y) + 1/|C|^2 sum_{y, z in C} K(y, z)

is no function of the distance to any one point. Random Fourier features `z(x)` (cosine and sine pairs, so that
`|z(x)| = 1` exactly) have `z(x).z(y) ~ K(x, y)` with error of order `1/sqrt(n_features)`, and Euclidean k-means on
them is kernel k-means up to that error.

The paper's Appendix I uses "Gaussian kernel k-means" for something smaller: Euclidean clusters, with
`1 - exp(-d^2 / (2 h^2))` of the distance to the centre as the score. That map is monotone, so `nearest` and
`farthest` keep the same keys as plain `kmeans`; the method here is not of that kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from prescore import checks
from prescore.clustering.metrics import Metric
from prescore.clustering.minkowski import SPHERICAL
from prescore.clustering.sampling import count_valid, holes_last, stratified
from prescore.clustering.scratch import Scratch
from prescore.clustering.seeding import pairwise_costs
from prescore.registry import register_scorer
from prescore.rng import Streams
from prescore.scorers.clustered import ClusteringScorer, unit_rows

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
