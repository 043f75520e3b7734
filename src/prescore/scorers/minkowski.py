"""Minkowski k-means: clusters in the l_p metric, any p > 0."""

from __future__ import annotations

from dataclasses import dataclass

from prescore import checks
from prescore.clustering.metrics import Metric
from prescore.clustering.minkowski import metric_for
from prescore.registry import register_scorer
from prescore.scorers.clustered import ClusteringScorer


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
