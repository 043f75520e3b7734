"""(f) Size of the leaves against rows read; large leaves opened into small ones."""

from __future__ import annotations

from dataclasses import asdict

from clusters import Clustering
from two_levels import TwoLevels, attend_two_levels
from variant import Variant, routed_variant

STUDY = "grid"
LEAVES = (16, 32, 64, 128)
ROWS = (128, 256, 512, 1024)


def variants() -> list[Variant]:
    """Every pair; smaller leaves need more centroids, which the table counts."""
    two = [(TwoLevels(128, fine, opened), rows) for rows in (256, 512) for fine in (32, 16) for opened in (8, 16)]
    two += [(TwoLevels(64, fine, 16), 512) for fine in (32, 16)]
    made = [
        routed_variant(STUDY, f"leaf {leaf}, {rows} rows", Clustering(leaf=leaf), rows)
        for leaf in LEAVES
        for rows in ROWS
    ]
    for levels, rows in two:
        label = f"{levels.opened} leaves of {levels.coarse} opened into leaves of {levels.fine}, {rows} rows"
        settings = {**asdict(levels), "rows": rows}
        made.append(
            Variant(
                STUDY,
                label,
                lambda view, _, levels=levels, rows=rows: attend_two_levels(view, levels, rows),
                settings,
            )
        )
    return made
