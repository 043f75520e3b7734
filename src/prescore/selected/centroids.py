"""One centroid per cluster for its keys that were not selected."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.ops.backend import accumulation_dtype
from prescore.ops.parts import Centroids
from prescore.selected.blocks import KeyRows

_CHUNK = 8192


def cluster_centroids(
    tables: Centroids, labels: Tensor, unselected: Tensor, n_clusters: int, dtype: torch.dtype
) -> tuple[Centroids, KeyRows]:
    """Mean keys and values of each cluster's unselected members, weighted by their number.

    A centroid enters the softmax with logit `q . mean key + log(count)` and the mean value: exact where the
    cluster's keys are equal, and an underestimate of its mass otherwise (exp is convex).

    Args:
        tables: Keys `[P, H, N, D]` and values `[P, H, N, Dv]`; gradients flow into them.
        labels: `[P, H, N]` cluster numbers.
        unselected: `[P, H, N]` bool, real keys that were not selected.
        n_clusters: Centroids per block pair and head.
        dtype: Of the queries; log weights are at least float32.

    Returns:
        The centroids, and their rows and log weights `[P, H, n_clusters]` (-inf for an empty cluster).
    """
    wide = torch.promote_types(tables.key.dtype, torch.float32)
    points = [table.flatten(0, 1).to(wide) for table in tables]
    totals = cluster_totals(points, labels, unselected, n_clusters)
    return centroids_of(totals, (*labels.shape[:2], n_clusters), dtype)


def centroids_of(
    totals: tuple[Tensor, Tensor, Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Centroids, KeyRows]:
    """The centroids of clusters, from sums of keys and values and numbers of members.

    Args:
        totals: The result of `cluster_totals`.
        shape: Block pairs, heads, clusters.
        dtype: Of the queries, keys and values.
    """
    key_sum, value_sum, count = totals
    safe = count.clamp_min(1)
    centroids = Centroids((key_sum / safe).flatten(0, 1).to(dtype), (value_sum / safe).flatten(0, 1).to(dtype))
    rows = torch.arange(centroids.key.shape[0], dtype=torch.int64, device=count.device)
    # log(0) = -inf is the weight of an empty cluster
    return centroids, KeyRows(rows.view(shape), torch.log(count).view(shape).to(accumulation_dtype(dtype)))


def cluster_totals(
    points: list[Tensor], labels: Tensor, members: Tensor, n_clusters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of two tables `[P * H, N, d]` as `[P * H, clusters, d]`, and the numbers of members `[..., 1]`.

    By matrix products with one-hot labels, in chunks.
    """
    numbers = torch.arange(n_clusters, dtype=torch.int64, device=labels.device)
    labels, members = labels.flatten(0, 1), members.flatten(0, 1)
    first, second = (table.new_zeros(table.shape[0], n_clusters, table.shape[-1]) for table in points)
    count = first.new_zeros(*first.shape[:2], 1)
    for start in range(0, labels.shape[-1], _CHUNK):
        rows = slice(start, start + _CHUNK)
        one_hot = (labels[:, None, rows] == numbers[:, None]) & members[:, None, rows]
        weights = one_hot.to(first.dtype)
        first = first + weights @ points[0][:, rows]
        second = second + weights @ points[1][:, rows]
        count = count + weights.sum(dim=-1, keepdim=True)
    return first, second, count
