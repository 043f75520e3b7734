"""k-means: Euclidean clusters, the paper's Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass

from prescore.clustering.metrics import Metric
from prescore.clustering.minkowski import EUCLIDEAN
from prescore.registry import register_scorer
from prescore.scorers.clustered import ClusteringScorer


@register_scorer("kmeans")
@dataclass(frozen=True)
class KMeans(ClusteringScorer):
    """Distance to the mean of the own k-means cluster."""

    def metric(self) -> Metric:
        """Euclidean."""
        return EUCLIDEAN
