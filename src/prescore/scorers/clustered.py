"""What the clustering scorers share; registers nothing itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from prescore import checks
from prescore.clustering.lloyd import fit
from prescore.clustering.metrics import Metric
from prescore.clustering.scratch import Scratch
from prescore.rng import Streams
from prescore.scorers.base import Scored, Scorer, with_noise
from prescore.scorers.rules import RULES, apply_rule


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
