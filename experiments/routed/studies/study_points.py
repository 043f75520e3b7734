"""(h) What the trees cut: keys, unit keys, keys with values, keys in the metric of past queries."""

from __future__ import annotations

from clusters import Clustering
from variant import Variant, routed_variant

STUDY = "points"
POINTS = ("keys", "unit keys", "keys and values", "query metric", "unit keys, query metric")


def variants() -> list[Variant]:
    """Singles and centroids stay what they are; only the cuts move."""
    return [
        routed_variant(STUDY, f"{points}, leaf {leaf}", Clustering(leaf=leaf, points=points))
        for leaf in (128, 64)
        for points in POINTS
    ]
