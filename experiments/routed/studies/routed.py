"""Routed attention with dense masks, its parts open to being replaced one at a time."""

from __future__ import annotations

import torch
from clusters import Clustering, Clusters, make_clusters
from scene import Answer, View, attend
from torch import Tensor

ROWS = 512


def scores(view: View, clusters: Clusters) -> Tensor:
    """`[Hkv, G, P, M]`: `q . mean key + log(members)`, the logit of a centroid; -inf for an empty cluster."""
    return view.query @ clusters.key[:, None].transpose(-1, -2) + clusters.count.log()[:, None, None]


def choose(liking: Tensor, clusters: Clusters, rows: Tensor | float) -> Tensor:
    """`[Hkv, G, P, M]`: the clusters a query likes best, as many as come nearest to `rows` keys.

    Args:
        liking: `[Hkv, G, P, M]`, larger = sooner.
        clusters: Their sizes.
        rows: Keys a query may read; a tensor that broadcasts to `[Hkv, G, P]` for budgets of their own.
    """
    order = liking.argsort(dim=-1, descending=True)
    size = clusters.count[:, None, None].expand_as(liking).gather(-1, order)
    budget = torch.as_tensor(rows, dtype=size.dtype)
    # half of the last cluster may lie beyond: on average exactly `rows` keys, whatever the sizes
    taken = (size.cumsum(-1) - size / 2 <= budget[..., None]) & (size > 0)
    return torch.zeros_like(taken).scatter(-1, order, taken)


def budget_of(clustering: Clustering, rows: int) -> float:
    """Keys of the `rows / leaf` clusters a query reads: singles make leaves a little smaller."""
    leaf = clustering.leaf * (1 - clustering.singles)
    return rows // clustering.leaf * leaf


def read(
    view: View,
    clusters: Clusters,
    chosen: Tensor,
    *,
    stand_in_logits: Tensor | None = None,
    stand_in_values: Tensor | None = None,
    centroids: bool = True,
) -> Answer:
    """Exact over single keys and the chosen clusters, a centroid for every other."""
    bias = torch.zeros(()).where(clusters.spread(chosen, True), -torch.inf)
    if not centroids:
        return attend(view, bias)
    logits = scores(view, clusters) if stand_in_logits is None else stand_in_logits
    values = clusters.value if stand_in_values is None else stand_in_values
    return attend(view, bias, logits.masked_fill(chosen, -torch.inf), values)


def routed(view: View, clustering: Clustering, rows: int = ROWS) -> Answer:
    """The default: every query chooses for itself by the centroids' logits."""
    clusters = make_clusters(view, clustering)
    chosen = choose(scores(view, clusters), clusters, budget_of(clustering, rows))
    return read(view, clusters, chosen)
