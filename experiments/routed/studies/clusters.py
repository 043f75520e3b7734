"""Far keys as single keys and clusters: which runs of chunks share a tree, what is clustered, and how."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scene import CHUNK, SINKS, Layer, View, even_positions
from torch import Tensor
from torch.nn.functional import normalize

from prescore.scoring.lloyd import fit
from prescore.scoring.metrics import metric_for
from prescore.routed.tree import bisection_tree, tree_levels
from prescore.rng import Streams


@dataclass(frozen=True)
class Clustering:
    """How the far keys are cut.

    Attributes:
        leaf: Keys of a cluster, on average and before the singles are taken out.
        singles: Share of the keys that every query reads.
        singles_by: Which ones: `cosine` (lowest to the mean key), or `past` (largest summed shares among 32
            queries of each head in the chunk behind the tree, all of them past for whoever sees the tree).
        trees: Which chunks are cut together: `512` each for itself; `2048` four at a time as soon as all four are
            far, the others by themselves; `doubling` the largest aligned powers of two; `all` one tree over all
            far keys, made anew for every chunk.
        points: What is cut: `keys`, `unit keys`, `keys and values`, `query metric` (keys times the root of the
            past queries' second moment), `unit keys, query metric`.
        method: `tree`, or `k-means` with as many clusters.
    """

    leaf: int = 128
    singles: float = 1 / 128
    singles_by: str = "cosine"
    trees: str = "2048"
    points: str = "keys"
    method: str = "tree"

    def runs(self, n_chunks: int) -> list[tuple[int, int]]:
        """First and last-plus-one chunk of each tree over the first `n_chunks`."""
        if self.trees == "all":
            return [(0, n_chunks)] if n_chunks else []
        found, begin = [], 0
        while begin < n_chunks:
            size = (
                int(self.trees) // CHUNK if self.trees != "doubling" else 1 << (n_chunks - begin).bit_length() - 1
            )
            size = size if begin + size <= n_chunks else 1
            found.append((begin, begin + size))
            begin += size
        return found


@dataclass(frozen=True, eq=False)
class Clusters:
    """Clusters of the far keys of a view.

    Attributes:
        labels: `[Hkv, F]` cluster numbers, -1 for single keys.
        count: `[Hkv, M]` members.
        key: `[Hkv, M, D]` mean keys.
        value: `[Hkv, M, D]` mean values.
        run_of: `[M]` number of the tree a cluster belongs to.
    """

    labels: Tensor
    count: Tensor
    key: Tensor
    value: Tensor
    run_of: Tensor

    def sums(self, points: Tensor) -> Tensor:
        """`[Hkv, F, ...]` -> `[Hkv, M, ...]`, summed over members."""
        return cluster_sums(points, self.labels, self.count.shape[1])

    def means(self, points: Tensor) -> Tensor:
        """Likewise, averaged."""
        count = self.count.clamp_min(1)
        return self.sums(points) / count.view(*count.shape, *[1] * (points.ndim - 2))

    def spread(self, per_cluster: Tensor, single: float | bool) -> Tensor:
        """`[Hkv, ..., M]` -> `[Hkv, ..., F]`: the figure of a key's cluster, `single` for single keys."""
        shape = (self.labels.shape[0], *[1] * (per_cluster.ndim - 2), self.labels.shape[1])
        labels = self.labels.view(shape).expand(*per_cluster.shape[:-1], -1)
        return per_cluster.gather(-1, labels.clamp_min(0)).masked_fill(labels < 0, single)


def cluster_sums(points: Tensor, labels: Tensor, n_clusters: int) -> Tensor:
    """`[H, F, ...]` -> `[H, n_clusters, ...]`; points labelled -1 count nowhere."""
    shape = (points.shape[0], n_clusters + 1, *points.shape[2:])
    place = labels.masked_fill(labels < 0, n_clusters)
    place = place.view(*labels.shape, *[1] * (points.ndim - 2)).expand_as(points)
    return points.new_zeros(shape).scatter_add_(1, place, points)[:, :n_clusters]


def make_clusters(view: View, clustering: Clustering) -> Clusters:
    """Clusters of everything that is far for a view; trees are remembered by their layer."""
    labels, run_of = [], []
    for number, run in enumerate(clustering.runs(view.n_pieces)):
        own, n_clusters = run_labels(view.layer, run, clustering)
        labels.append(torch.where(own < 0, own, own + len(run_of)))
        run_of += [number] * n_clusters
    whole = torch.cat(labels, dim=1)
    key, value = view.layer.key[:, view.far], view.layer.value[:, view.far]
    count = cluster_sums(torch.ones_like(key[..., 0]), whole, len(run_of))
    safe = count.clamp_min(1)[..., None]
    means = [cluster_sums(points, whole, len(run_of)) / safe for points in (key, value)]
    return Clusters(whole, count, *means, torch.tensor(run_of))


def run_labels(layer: Layer, run: tuple[int, int], clustering: Clustering) -> tuple[Tensor, int]:
    """`[Hkv, n]` cluster numbers inside a run of chunks, -1 for singles, and how many clusters there are."""
    name = (run, clustering)
    if name not in layer.memory:
        layer.memory[name] = _cut(layer, run, clustering)
    found: tuple[Tensor, int] = layer.memory[name]
    return found


def _cut(layer: Layer, run: tuple[int, int], clustering: Clustering) -> tuple[Tensor, int]:
    inside = slice(SINKS + run[0] * CHUNK, SINKS + run[1] * CHUNK)
    size = inside.stop - inside.start
    n_clusters = -(-size // clustering.leaf)
    labels = torch.full((layer.key.shape[0], size), -1)
    n_singles = round(size * clustering.singles)
    liking = unlikeness(layer.key[:, inside]) if clustering.singles_by == "cosine" else past_shares(layer, inside)
    ranked = liking.argsort(dim=-1, descending=True)
    rest = ranked[:, n_singles:].sort(dim=-1).values
    points = _points(layer, inside, clustering.points)
    points = points.gather(1, rest[..., None].expand(-1, -1, points.shape[-1]))
    if clustering.method == "k-means":
        settings = {"n_clusters": n_clusters, "metric": metric_for(2.0), "streams": Streams(0)}
        return labels.scatter(1, rest, fit(points, **settings).labels), n_clusters
    levels = tree_levels(size, clustering.leaf)
    leaf = -(-rest.shape[1] // n_clusters)
    # dead points go last in every node: leaves stay full, the surplus ones stay empty
    filler = (leaf << levels) - rest.shape[1]
    padded = torch.nn.functional.pad(points, (0, 0, 0, filler))
    valid = (torch.arange(padded.shape[1]) < rest.shape[1]).expand(padded.shape[:2])
    order = bisection_tree(padded, levels, valid=valid if filler else None)
    place = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1]).expand_as(order) // leaf)
    return labels.scatter(1, rest, place[:, : rest.shape[1]]), 1 << levels


def unlikeness(points: Tensor) -> Tensor:
    """`[H, n, D] -> [H, n]`: minus the cosine to the mean, the routed layout's own measure for singles."""
    return -(normalize(points, dim=-1) @ normalize(points.mean(1), dim=-1)[..., None]).squeeze(-1)


def past_shares(layer: Layer, inside: slice, n_queries: int = 32) -> Tensor:
    """`[Hkv, n]`: what queries of the next chunk give to each key.

    Shares among these keys, the queries' own chunk and the sinks only, so that the cost stays linear in n.
    """
    asked = even_positions(inside.stop, inside.stop + CHUNK, n_queries)
    own = torch.arange(inside.stop, inside.stop + CHUNK)
    key = torch.cat((layer.key[:, inside], layer.key[:, :SINKS], layer.key[:, own]), dim=1)
    logits = layer.query[:, :, asked] @ key[:, None].transpose(-1, -2)
    logits[..., -CHUNK:].masked_fill_(own > asked[:, None], -torch.inf)
    return logits.softmax(-1).sum((1, 2))[:, : inside.stop - inside.start]


def _points(layer: Layer, inside: slice, kind: str) -> Tensor:
    """`[Hkv, n, d]` of float32."""
    key = layer.key[:, inside]
    if kind == "keys and values":
        value = layer.value[:, inside]
        # equal total variance: neither half decides alone
        parts = [points - points.mean(1, keepdim=True) for points in (key, value)]
        return torch.cat([part / part.square().mean(dim=(1, 2), keepdim=True).sqrt() for part in parts], dim=-1)
    if kind.startswith("unit keys"):
        key = normalize(key, dim=-1)
    if kind.endswith("query metric"):
        past = layer.query[:, :, : inside.stop].flatten(1, 2)
        moment = past.transpose(1, 2) @ past / past.shape[1]
        values, vectors = torch.linalg.eigh(moment.double())
        key = key @ (vectors * values.clamp_min(0).sqrt()[:, None]).to(key.dtype)
    return key
