"""(a) Tree against k-means: equal mean cluster size, equal rows."""

from __future__ import annotations

import dataclasses

from clusters import Clustering
from variant import Variant, routed_variant

STUDY = "clustering"


def variants() -> list[Variant]:
    """Both methods, two sizes of clusters, with and without singles, in trees of 2048 and of 512 keys."""
    made = []
    for leaf in (128, 64):
        for trees, singles in (("2048", 1 / 128), ("2048", 0.0), ("512", 1 / 128)):
            for method in ("tree", "k-means"):
                clustering = Clustering(leaf=leaf, singles=singles, trees=trees, method=method)
                label = f"{method}, leaf {leaf}, over {trees} keys, {'with' if singles else 'no'} singles"
                made.append(routed_variant(STUDY, label, clustering))
        normalised = dataclasses.replace(Clustering(leaf=leaf), method="k-means", points="unit keys")
        made.append(
            routed_variant(STUDY, f"k-means on unit keys, leaf {leaf}, over 2048 keys, with singles", normalised)
        )
    return made
