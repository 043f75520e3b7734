"""One centroid per cluster for its keys that were not selected."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.ops.operators import accumulation_dtype
from prescore.scoring.sampling import arange
from prescore.selected.blocks import KeyRows

_CHUNK = 8192


class Tables:
    """The key and value rows that parts refer to by number, and rows added behind those of the call."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self._keys, self._values = [key.reshape(-1, key.shape[-1])], [value.reshape(-1, value.shape[-1])]

    def add(self, keys: Tensor, values: Tensor) -> Tensor:
        """Add rows; returns their numbers."""
        first = sum(len(rows) for rows in self._keys)
        self._keys.append(keys)
        self._values.append(values)
        return arange(first, first + len(keys), like=keys)

    def joined(self) -> tuple[Tensor, Tensor]:
        """All key rows and all value rows."""
        if len(self._keys) == 1:
            return self._keys[0], self._values[0]
        return torch.cat(self._keys), torch.cat(self._values)


def add_centroids(
    tables: Tables, totals: tuple[Tensor, Tensor, Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> KeyRows:
    """Add the centroids of clusters to the tables; returns their rows and log weights, in the given shape.

    A centroid enters the softmax with logit `q . mean key + log(count)` and the mean value: exact where the
    cluster's keys are equal, and an underestimate of its mass otherwise (exp is convex). `totals` come from
    `cluster_totals`; `shape` is pairs, heads, clusters; `dtype` is that of the queries.
    """
    *sums, count = totals
    keys, values = ((total / count.clamp_min(1)).flatten(0, 1).to(dtype) for total in sums)
    # log(0) = -inf is the weight of an empty cluster
    return KeyRows(
        tables.add(keys, values).view(shape), torch.log(count).view(shape).to(accumulation_dtype(dtype))
    )


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
