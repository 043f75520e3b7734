"""(e) HyperAttention's residual: sampled keys against centroid centroids, sinks exact in both."""

from __future__ import annotations

from dataclasses import asdict

from clusters import Clustering
from variant import Variant, routed_variant

from hyper import Hyper, attend_hyper

STUDY = "hyper"
LAYOUTS = {
    "block 512, no residual": Hyper(512),
    "block 256 + 256 samples": Hyper(256, samples=256),
    "block 256 + 256 centroids (k-means)": Hyper(256, centroids=256),
    "block 256 + 256 centroids (tree)": Hyper(256, centroids=256, clusters="tree"),
    "block 448 + 64 samples": Hyper(448, samples=64),
    "block 448 + 64 centroids (k-means)": Hyper(448, centroids=64),
    "block 448 + 64 centroids (tree)": Hyper(448, centroids=64, clusters="tree"),
}


def variants() -> list[Variant]:
    """512 far rows in all, three seeds."""
    made = [
        Variant(STUDY, label, lambda view, seed, hyper=hyper: attend_hyper(view, hyper, seed), asdict(hyper), 3)
        for label, hyper in LAYOUTS.items()
    ]
    return [*made, routed_variant(STUDY, "routed, leaf 128", Clustering())]
