"""Three ways to choose clusters that look at no later query."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from clusters import Clustering, Clusters, make_clusters
from scene import CHUNK, SINKS, Answer, View
from torch import Tensor

from prescore.routed.tree import bisection_tree, tree_levels
from routed import ROWS, budget_of, choose, read, scores


@dataclass(frozen=True)
class Way:
    """Who shares a choice.

    Attributes:
        kind: `own` (every query for itself), `heads` (the query heads of a KV head at one position), `groups` (a
            query joins the nearest group of the previous chunk's queries, whose clusters those past queries
            chose together).
        group_size: `groups`: past queries in a group.
        pooled: `groups`: whether the query heads of a KV head form groups together.
    """

    kind: str = "own"
    group_size: int = 32
    pooled: bool = False

    def liking(self, view: View, clusters: Clusters) -> Tensor:
        """`[Hkv, G, P, M]`: the order in which a query takes clusters."""
        if self.kind == "own":
            return scores(view, clusters)
        if self.kind == "heads":
            return scores(view, clusters).softmax(-1).sum(1, keepdim=True).expand(-1, view.query.shape[1], -1, -1)
        return self._groups(view, clusters)

    def _groups(self, view: View, clusters: Clusters) -> Tensor:
        begin = SINKS + (view.chunk - 1) * CHUNK
        past = view.layer.query[:, :, begin : begin + CHUNK].contiguous()
        query = view.query
        if self.pooled:
            past, query = past.flatten(1, 2)[:, None], query.flatten(1, 2)[:, None]
        # groups are leaves of a tree over past queries: the j-th run of `order` is group j
        levels = tree_levels(past.shape[2], self.group_size)
        order = bisection_tree(past, levels)
        past = past.gather(2, order[..., None].expand_as(past))
        shares = past @ clusters.key[:, None].transpose(-1, -2) + clusters.count.log()[:, None, None]
        wanted = shares.softmax(-1).unflatten(2, (1 << levels, -1)).sum(3)  # [Hkv, G, groups, M]
        means = past.unflatten(2, (1 << levels, -1)).mean(3)
        nearest = torch.cdist(query, means).argmin(-1)  # [Hkv, G, P]
        liking = wanted.gather(2, nearest[..., None].expand(-1, -1, -1, wanted.shape[-1]))
        return liking.view(*view.query.shape[:3], -1)


def attend_way(view: View, way: Way, clustering: Clustering, rows: int = ROWS) -> Answer:
    """Routed attention with a shared choice; centroids belong to each query all the same."""
    clusters = make_clusters(view, clustering)
    chosen = choose(way.liking(view, clusters), clusters, budget_of(clustering, rows))
    return read(view, clusters, chosen)
