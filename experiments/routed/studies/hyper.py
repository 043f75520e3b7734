"""HyperAttention over the far keys: one LSH block per query, and something for all others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from clusters import Clustering, cluster_sums, make_clusters
from scene import Answer, View, attend
from torch import Tensor

from prescore.scoring.hashing import hash_ranks
from prescore.scoring.hashing import projections
from prescore.rng import Streams
from selection import far_labels


@dataclass(frozen=True)
class Hyper:
    """A layout of 512 rows.

    Attributes:
        block: Keys of an LSH block, read exactly.
        samples: Keys drawn uniformly with replacement for the residual.
        centroids: Clusters whose means stand for the keys outside the block.
        clusters: `k-means` over unit keys, or `tree`.
    """

    block: int
    samples: int = 0
    centroids: int = 0
    clusters: str = "k-means"


def attend_hyper(view: View, hyper: Hyper, seed: int, n_projections: int = 7) -> Answer:
    """A query enters the block its hash falls into, so that nothing depends on later queries."""
    streams = Streams(seed)
    key = view.layer.key[:, view.far]
    directions = projections(n_projections, key, streams)
    ranks, order = hash_ranks(key, directions).sort(dim=-1, stable=True)
    n_blocks = -(-key.shape[1] // hyper.block)
    asked = hash_ranks(view.query, directions).flatten(1)
    middle = torch.searchsorted(ranks, asked) + torch.searchsorted(ranks, asked, right=True)
    block = (middle // (2 * hyper.block)).clamp_max(n_blocks - 1).view(view.query.shape[:3])  # [Hkv, G, P]
    place = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1]).expand_as(order) // hyper.block
    )
    inside = place[:, None, None] == block[..., None]  # [Hkv, G, P, F]
    bias = torch.zeros(inside.shape).masked_fill(~inside, -torch.inf)
    if hyper.samples:
        # a key drawn twice weighs twice; the own block is read already
        drawn = (streams.uniform(f"samples {view.chunk}", hyper.samples, like=key) * key.shape[1]).long()
        times = torch.bincount(drawn, minlength=key.shape[1]) * (key.shape[1] / hyper.samples)
        bias = torch.where(inside, bias, times.log())
    if not hyper.centroids:
        return attend(view, bias)
    return attend(view, bias, *_centroids(view, hyper, place, block, n_blocks))


def _centroids(view: View, hyper: Hyper, place: Tensor, block: Tensor, n_blocks: int) -> tuple[Tensor, Tensor]:
    """Logits and values of the clusters without the members in a query's own block."""
    key, value = view.layer.key[:, view.far], view.layer.value[:, view.far]
    if hyper.clusters == "tree":
        leaf = -(-key.shape[1] // hyper.centroids)
        labels = make_clusters(view, Clustering(leaf=leaf, singles=0.0, trees="all")).labels
    else:
        labels = far_labels(view, hyper.centroids)
    n_clusters = int(labels.max()) + 1
    both = place * n_clusters + labels

    def outside(points: Tensor) -> Tensor:
        """`[Hkv, blocks, M, d]`: sums over everything, less what each block holds."""
        held = cluster_sums(points, both, n_blocks * n_clusters).unflatten(1, (n_blocks, n_clusters))
        return held.sum(1, keepdim=True) - held

    count = outside(torch.ones_like(key[..., :1])).round()
    head = torch.arange(key.shape[0])[:, None, None]
    keys, values = (outside(points) / count.clamp_min(1) for points in (key, value))
    logits = (keys[head, block] @ view.query[..., None]).squeeze(-1) + count[head, block].squeeze(-1).log()
    return logits, values[head, block]
