"""k-median: clusters in the l_1 metric around coordinate medians."""

from __future__ import annotations

from dataclasses import dataclass

from prescore.clustering.metrics import Metric
from prescore.clustering.minkowski import MEDIAN
from prescore.registry import register_scorer
from prescore.scorers.clustered import ClusteringScorer


@register_scorer("kmedian")
@dataclass(frozen=True)
class KMedian(ClusteringScorer):
    """l_1 distance to the coordinate median of the own cluster; an outlier moves a median less than a mean."""

    def metric(self) -> Metric:
        """l_1."""
        return MEDIAN
