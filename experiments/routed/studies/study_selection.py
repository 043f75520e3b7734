"""(d) Selection alone at the rows of routed attention: which keys, drawn how, with and without centroids."""

from __future__ import annotations

from dataclasses import asdict

import torch
from clusters import Clustering
from scene import View, attend
from variant import Variant, routed_variant

from selection import Kept, attend_selection

STUDY = "selection"
SCORERS = {
    "key-diff": ("key-diff", "nearest"),
    "k-means sensitivity": ("kmeans", "sensitivity"),
    "k-means nearest (Algorithm 1)": ("kmeans", "nearest"),
    "leverage": ("leverage", "nearest"),
    "uniform": ("uniform", "nearest"),
}
N_SEEDS = 3


def variants() -> list[Variant]:
    """Every scorer: its top, the same with centroids, drawn in proportion."""
    made = [
        routed_variant(STUDY, "routed, leaf 128", Clustering()),
        Variant(STUDY, "nothing far", lambda view, _: attend(view, torch.full((1, 1, 1, 1), -torch.inf))),
    ]
    for label, (method, rule) in SCORERS.items():
        for draw, centroids in (("top", False), ("top", True), ("sampled", False)):
            if draw == "sampled" and rule == "nearest" and method == "kmeans":
                continue  # minus a distance is no weight
            kept = Kept(method, rule, draw, centroids)
            made.append(_variant(f"{label}, {draw}{' + centroids' if centroids else ''}", kept))
    made.append(_variant("oracle columns (sees the queries)", Kept("oracle")))
    made.append(_variant("oracle columns (sees the queries) + centroids", Kept("oracle", centroids=True)))
    return made


def _variant(label: str, kept: Kept) -> Variant:
    def run(view: View, seed: int):  # noqa: ANN202
        return attend_selection(view, kept, seed)

    random = kept.draw == "sampled" or kept.method in ("uniform", "kmeans")
    return Variant(STUDY, label, run, asdict(kept), N_SEEDS if random else 1)
