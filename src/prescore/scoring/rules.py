"""From the distance to the own centre to a score: the five rules of a clustering scorer."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.scoring.sampling import arange

RULES = ("nearest", "farthest", "cluster-share", "sensitivity", "balanced")


def apply_rule(
    rule: str, distances: Tensor, labels: Tensor, *, n_clusters: int, valid: Tensor | None = None
) -> Tensor:
    """Turn distances into scores, higher = kept.

    With d the distance of a key to the centre of its cluster C:

    - `nearest` (paper, Algorithm 1): `-d`
    - `farthest`: `d`
    - `cluster-share`: `d / sum of d over C`
    - `sensitivity`: `d^2 / sum of d^2 over C + 1 / |C|`
    - `balanced`: minus the rank of d within C, so that the best s keys hold an equal share of every cluster,
      nearest first. A cluster that runs out leaves its share to the others; equal ranks go by distance.

    Distances, labels and scores are `[P, n]`. Points that are not `valid` count for nothing, and their scores are
    arbitrary.
    """
    if rule == "nearest":
        return -distances
    if rule == "farthest":
        return distances
    present = torch.ones_like(labels, dtype=torch.bool) if valid is None else valid
    if rule == "balanced":
        return _balanced(distances, labels, n_clusters, present)
    if rule == "cluster-share":
        (totals,) = cluster_sums(labels, n_clusters, present, distances)
        return _share(distances, totals.gather(1, labels))
    squares = distances.square()
    totals, sizes = cluster_sums(labels, n_clusters, present, squares, torch.ones_like(squares))
    return _share(squares, totals.gather(1, labels)) + sizes.gather(1, labels).clamp(min=1.0).reciprocal()


def cluster_sums(labels: Tensor, n_clusters: int, present: Tensor, *values: Tensor) -> list[Tensor]:
    """Sum each `values [P, n]` over the present points of each cluster, `[P, n_clusters]`.

    Sorted segments and differences of running sums are deterministic on every device, unlike atomic adds. Running
    sums are float64, so that the differences keep more digits than the values have.
    """
    sorted_labels, order = torch.sort(labels.masked_fill(~present, n_clusters), dim=1, stable=True)
    ends = _starts(sorted_labels, n_clusters)
    sums = []
    for value in values:
        running = value.gather(1, order).to(torch.float64).cumsum(dim=1)
        running = torch.nn.functional.pad(running, (1, 0))
        sums.append(running.gather(1, ends).diff(dim=1).to(value.dtype))
    return sums


def _starts(sorted_labels: Tensor, n_clusters: int) -> Tensor:
    """`[P, n_clusters + 1]`: where each cluster, and then the absent points, begin in the sorted labels."""
    numbers = arange(n_clusters + 1, like=sorted_labels)
    return torch.searchsorted(sorted_labels, numbers.expand(len(sorted_labels), -1).contiguous())


def _share(part: Tensor, total: Tensor) -> Tensor:
    # a cluster of coinciding keys has total 0, and each key has no share of it
    return torch.where(total > 0, part / total.clamp(min=torch.finfo(part.dtype).tiny), 0.0)


def _balanced(distances: Tensor, labels: Tensor, n_clusters: int, present: Tensor) -> Tensor:
    if distances.shape[1] == 0:
        return distances
    largest = distances.masked_fill(~present, 0.0).amax(dim=1, keepdim=True)
    fraction = 0.5 * _share(distances, largest)
    groups = labels.masked_fill(~present, n_clusters)
    # one sort does both levels: cluster number before the decimal point, distance after it
    order = torch.argsort(groups.to(torch.float64) + fraction, dim=1, stable=True)
    sorted_groups = groups.gather(1, order)
    starts = _starts(sorted_groups, n_clusters).gather(1, sorted_groups)
    rank = arange(distances.shape[1], like=labels) - starts
    ranks = torch.empty_like(rank).scatter_(1, order, rank)
    return -(ranks + fraction)
