"""(b) Ways to stay strictly causal: quality. Loss is `ways_loss.py`, time is `ways_time.py`."""

from __future__ import annotations

from dataclasses import asdict

from clusters import Clustering
from variant import Variant
from ways import Way, attend_way

STUDY = "ways"
WAYS = {
    "every query for itself": Way(),
    "query heads of a KV head": Way("heads"),
    "groups of 8 past queries, each head": Way("groups", 8),
    "groups of 32 past queries, each head": Way("groups", 32),
    "groups of 32 past queries, heads pooled": Way("groups", 32, pooled=True),
    "groups of 128 past queries, each head": Way("groups", 128),
}


def variants() -> list[Variant]:
    """Every way at three sizes of leaves, and shared choices of twice the rows."""
    made = []
    for leaf, rows in ((128, 512), (64, 512), (32, 512), (128, 1024), (64, 1024)):
        for label, way in WAYS.items():
            settings = {**asdict(way), "leaf": leaf, "rows": rows}
            made.append(
                Variant(
                    STUDY,
                    f"leaf {leaf}, {rows} rows, {label}",
                    lambda view, _, way=way, leaf=leaf, rows=rows: attend_way(
                        view, way, Clustering(leaf=leaf), rows
                    ),
                    settings,
                )
            )
    return made
