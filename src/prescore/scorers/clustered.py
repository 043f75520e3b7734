"""What the clustering scorers share; registers nothing itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from prescore.clustering.lloyd import fit
from prescore.clustering.metrics import Metric
from prescore.clustering.scratch import Scratch
from prescore.rng import Streams
from prescore.scorers.base import Scored, Scorer
from prescore.scorers.rules import apply_rule


@dataclass(frozen=True)
class ClusteringScorer(Scorer):
    """Cluster the keys of each KV head, score each key by its distance to its own centre.

    `n_clusters=None` is `D + 1`, as in the paper. `rule`, `seeding` and `fit_size` are those of
    `PrescoreConfig`. `unit` normalises the keys on the way, block by block, without a normalised copy of all.
    """

    n_clusters: int | None = None
    max_iter: int = 10
    rule: str = "nearest"
    seeding: str = "k-means++"
    fit_size: int | None = None
    unit: bool = False

    normalizes: ClassVar[bool] = True
    permutation_equivariant: ClassVar[bool] = False

    @abstractmethod
    def metric(self) -> Metric:
        """The metric of the clusters."""

    def score(self, keys: Tensor, *, valid: Tensor | None, streams: Streams) -> Scored:
        """Score keys, see `Scorer.score`."""
        n_clusters = keys.shape[-1] + 1 if self.n_clusters is None else self.n_clusters
        points, present = keys.flatten(0, 1), flat_mask(keys, valid)
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
        return partial(unit_rows, scratch=Scratch()) if self.unit else None


def unit_rows(points: Tensor, scratch: Scratch) -> Tensor:
    """Rows of `[P, n, d]` at unit length, in scratch memory; a zero row stays zero."""
    lengths = torch.linalg.vector_norm(points, dim=2, keepdim=True).clamp_(min=torch.finfo(points.dtype).tiny)
    return torch.div(points, lengths, out=scratch.take("unit", *points.shape, like=points))


def flat_mask(keys: Tensor, valid: Tensor | None) -> Tensor | None:
    """The mask `[B, N]` repeated for each head of `keys [B, H, N, D]`, as `[B * H, N]`."""
    if valid is None:
        return None
    return valid.unsqueeze(1).expand(keys.shape[:3]).flatten(0, 1)
