"""(j) How to split equal rows between keys that everyone reads and leaves that each query chooses."""

from __future__ import annotations

from clusters import Clustering
from variant import Variant, routed_variant

STUDY = "shared"
SPLITS = ((0, 576), (128, 512), (64, 448), (32, 384), (16, 192))
"""Keys per single, and far rows that keep the total near 560 in the second half of 8192 tokens."""


def variants() -> list[Variant]:
    """Singles by cosine and by past shares; then the best measure at the default split and leaf."""
    made = []
    for by in ("cosine", "past"):
        for keys, rows in SPLITS[0 if by == "cosine" else 1 :]:
            clustering = Clustering(leaf=64, singles=1 / keys if keys else 0.0, singles_by=by)
            made.append(
                routed_variant(
                    STUDY, f"leaf 64, 1 single per {keys or 'no'} keys by {by}, {rows} rows", clustering, rows
                )
            )
        for keys in (256, 128, 64):
            clustering = Clustering(singles=1 / keys, singles_by=by)
            made.append(routed_variant(STUDY, f"leaf 128, 1 single per {keys} keys by {by}, 512 rows", clustering))
    return made
