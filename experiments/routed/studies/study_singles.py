"""(i) How many keys are set apart as singles, and how many keys share a tree."""

from __future__ import annotations

from clusters import Clustering
from variant import Variant, routed_variant

STUDY = "singles"
SINGLES = (0, 512, 256, 128, 64, 32)
TREES = ("512", "2048", "doubling", "all")


def variants() -> list[Variant]:
    """Every pair at the default leaf; sizes of trees at the smaller leaf."""
    made = []
    for leaf, choices in ((128, SINGLES), (64, (0, 128))):
        for keys in choices:
            for trees in TREES:
                clustering = Clustering(leaf=leaf, singles=1 / keys if keys else 0.0, trees=trees)
                share = f"1 single per {keys} keys" if keys else "no singles"
                made.append(routed_variant(STUDY, f"leaf {leaf}, {share}, trees over {trees}", clustering))
    return made
