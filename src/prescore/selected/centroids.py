"""One centroid per cluster for its keys that were not selected."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.ops.backend import accumulation_dtype
from prescore.ops.parts import Centroids
from prescore.scoring.sampling import arange
from prescore.selected.blocks import KeyRows

_CHUNK = 8192


def add_centroids(
    table: Centroids | None, totals: tuple[Tensor, Tensor, Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Centroids, KeyRows]:
    """Add the centroids of clusters to a table; also returns their rows and log weights, in the given shape.

    A centroid enters the softmax with logit `q . mean key + log(count)` and the mean value: exact where the
    cluster's keys are equal, and an underestimate of its mass otherwise (exp is convex). `totals` come from
    `cluster_totals`; `shape` is pairs, heads, clusters; `dtype` is that of the queries.
    """
    *sums, count = totals
    keys, values = ((total / count.clamp_min(1)).flatten(0, 1).to(dtype) for total in sums)
    begin = 0 if table is None else len(table.key)
    rows = arange(begin, begin + len(keys), like=count).view(shape)
    if table is not None:
        keys, values = torch.cat((table.key, keys)), torch.cat((table.value, values))
    # log(0) = -inf is the weight of an empty cluster
    return Centroids(keys, values), KeyRows(rows, torch.log(count).view(shape).to(accumulation_dtype(dtype)))


def cluster_totals(
    points: list[Tensor], labels: Tensor, members: Tensor, n_clusters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of two tables `[P * H, N, d]` as `[P * H, clusters, d]`, and the numbers of members `[..., 1]`.

    By matrix products with one-hot labels, in chunks.
    """
    numbers = arange(n_clusters, like=labels)
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
