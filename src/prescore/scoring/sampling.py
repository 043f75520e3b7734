"""Stratified samples of the valid points, the same draws for every problem."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prescore.rng import Streams

_FEWEST_CLUSTERS = 64


def gather_rows(rows: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rows `[P, n, ...]` at `index [P, m]` as `[P, m, ...]`, whole rows at once (faster than `gather`).

    With `out`, a contiguous tensor of the result's shape, the rows are written there.
    """
    n_problems, n_rows = rows.shape[:2]
    offsets = torch.arange(n_problems, device=rows.device).unsqueeze(1) * n_rows
    flat = rows.reshape(n_problems * n_rows, *rows.shape[2:])
    into = None if out is None else out.view(-1, *rows.shape[2:])
    found = torch.index_select(flat, 0, (index + offsets).reshape(-1), out=into)
    return found.reshape(*index.shape, *rows.shape[2:])


def count_valid(points: Tensor, weights: Tensor | None) -> Tensor:
    """Number of points with weight above zero, `[P]`."""
    if weights is None:
        return points.new_full((points.shape[0],), points.shape[1], dtype=torch.int64)
    return (weights > 0).sum(dim=1)


def fit_counts(n_valid: Tensor, n_clusters: int, fit_size: int | None, *, per_cluster: int) -> Tensor:
    """Points to fit on, from each problem's own number of valid points and never from the padded length.

    A centre fitted on s points is off by 1/s of its cluster's variance, and so is the inertia: `per_cluster`
    decides the price of the sample.
    """
    if fit_size == 0:
        return n_valid
    size = per_cluster * max(n_clusters, _FEWEST_CLUSTERS) if fit_size is None else fit_size
    return n_valid.clamp(max=size)


def holes_last(points: Tensor, weights: Tensor | None, n_valid: Tensor) -> tuple[Tensor, Tensor | None]:
    """Move points of weight zero behind the others, keeping their order; a no-op when there are no holes."""
    if weights is None:
        return points, None
    present = weights > 0
    left_aligned = torch.arange(points.shape[1], device=points.device) < n_valid.unsqueeze(1)
    if torch.equal(present, left_aligned):
        return points, weights
    order = torch.argsort(present.to(torch.uint8), dim=1, descending=True, stable=True)
    return gather_rows(points, order), weights.gather(1, order)


def stratified(
    points: Tensor, weights: Tensor | None, n_valid: Tensor, counts: Tensor, streams: Streams, name: str
) -> tuple[Tensor, Tensor | None]:
    """One point from each of `counts [P]` equal slices of the valid points, which must come first.

    Position i is `floor((i + u_i) * n_valid / count)` with `u_i` the same in every problem. BlockPairs with fewer
    points than the largest get filler of weight zero.

    Returns:
        Points `[P, max(counts), d]` and weights, None when all weights are one.
    """
    # at least one slot, so that a problem without valid points is filler and no special case
    size = max(1, int(counts.max())) if counts.numel() else 0
    if size == points.shape[1] and bool((counts == n_valid).all()):
        return points, weights
    positions = strata(n_valid, counts, size, streams, name, like=points)
    sample = gather_rows(points, positions)
    inside = torch.arange(size, device=points.device) < counts.unsqueeze(1)
    if weights is None:
        return sample, None if bool(inside.all()) else inside.to(points.dtype)
    return sample, weights.gather(1, positions) * inside


def strata(n_valid: Tensor, counts: Tensor, size: int, streams: Streams, name: str, *, like: Tensor) -> Tensor:
    """`[P, size]` positions of a sample, see `stratified`; those behind a problem's count are filler."""
    jitter = torch.arange(size, device=like.device) + streams.uniform(name, size, like=like)
    stride = n_valid.to(torch.float64) / counts.clamp(min=1)
    last = (n_valid - 1).clamp(min=0).unsqueeze(1)
    return torch.minimum((jitter * stride.unsqueeze(1)).to(torch.int64), last)


# Memory that is reused from block to block.


class Scratch:
    """Named buffers that grow on demand and live as long as one pass over the points.

    A fresh temporary of a megabyte is mapped and cleared by the system each time, which costs several times what
    the operation on it does. What a name held is gone when the name is taken again.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of this shape on `like`'s device, in its dtype unless told otherwise; contents arbitrary."""
        size, kind = math.prod(shape), dtype or like.dtype
        held = self._held.get(name)
        if held is None or held.numel() < size or held.dtype != kind or held.device != like.device:
            held = self._held[name] = torch.empty(size, dtype=kind, device=like.device)
        return held[:size].view(shape)
