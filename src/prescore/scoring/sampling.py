"""Evenly spread samples of points; rows by index."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prescore.devices import largest, maybe_any, surely_all

_GOLDEN = (5**0.5 - 1) / 2


class Sample(NamedTuple):
    """Some of the points of each problem, `[P, m, d]`, with weights `[P, m]`: 0 = filler, None = all ones.

    `is_partial [P]` says whether a problem has points that are not in its sample.
    """

    points: Tensor
    weights: Tensor | None
    is_partial: Tensor


def draw_sample(points: Tensor, weights: Tensor | None, size: int | None) -> Sample:
    """One point from each of at most `size` equal slices of a problem's points of weight above zero.

    The size of a sample (None = all points) comes from a problem's own points, never from the padded length, and
    its places are fixed: padding a problem changes nothing, and no seed moves a sample.
    """
    n_problems, n_points = points.shape[:2]
    if not n_problems or not n_points:
        return Sample(points, weights, points.new_zeros(n_problems, dtype=torch.bool))
    if weights is None:
        n_valid = points.new_full((n_problems,), n_points, dtype=torch.int64)
    else:
        n_valid = (weights > 0).sum(dim=1)
        points, weights = _padding_last(points, weights, n_valid)
    counts = n_valid if size is None else n_valid.clamp(max=size)
    is_partial = counts < n_valid
    # at least one slot, so that a problem without points is all filler
    most = max(1, largest(counts, n_points if size is None else min(size, n_points)))
    if most == n_points and (size is None or size >= n_points or not maybe_any(is_partial)):
        return Sample(points, weights, is_partial)
    positions = _strata(n_valid, counts, most, like=points)
    inside = arange(most, like=points) < counts.unsqueeze(1)
    # without weights all problems have as many points
    kept = None if weights is None else weights.gather(1, positions) * inside
    return Sample(gather_rows(points, positions), kept, is_partial)


def sample_positions(n_points: int, size: int | None) -> Tensor:
    """The positions `[m]` that `draw_sample` takes of points that all have weight 1."""
    counts = torch.tensor([n_points if size is None else min(size, n_points)], dtype=torch.int64, device="cpu")
    if int(counts) in (0, n_points):
        return arange(int(counts), like=counts)
    return _strata(torch.full_like(counts, n_points), counts, int(counts), like=counts)[0]


def _strata(n_valid: Tensor, counts: Tensor, most: int, *, like: Tensor) -> Tensor:
    """`[P, most]`: position i is `floor((i + u_i) * n_valid / count)`; those beyond a count are filler.

    `u_i` is the fraction of i times the golden ratio, so that keys of any period are met in all their phases.
    """
    turn = arange(most, like=like).to(torch.float64)
    jitter = turn + (turn * _GOLDEN).frac()
    stride = n_valid.to(torch.float64) / counts.clamp(min=1)
    last = (n_valid - 1).clamp(min=0).unsqueeze(1)
    return torch.minimum((jitter * stride.unsqueeze(1)).to(torch.int64), last)


def _padding_last(points: Tensor, weights: Tensor, n_valid: Tensor) -> tuple[Tensor, Tensor]:
    """Points of weight zero after the others, which keep their order."""
    present = weights > 0
    if surely_all(present == (arange(points.shape[1], like=points) < n_valid.unsqueeze(1))):
        return points, weights
    order = torch.argsort(present.to(torch.uint8), dim=1, descending=True, stable=True)
    return gather_rows(points, order), weights.gather(1, order)


def arange(*bounds: int, like: Tensor) -> Tensor:
    """Consecutive integers on `like`'s device."""
    return torch.arange(*bounds, dtype=torch.int64, device=like.device)


def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Rows `[P, n, ...]` at `index [P, m]` as `[P, m, ...]`; faster than `gather`."""
    n_problems, n_rows = rows.shape[:2]
    offsets = arange(n_problems, like=rows).unsqueeze(1) * n_rows
    flat = rows.reshape(n_problems * n_rows, *rows.shape[2:])
    gathered = torch.index_select(flat, 0, (index + offsets).reshape(-1))
    return gathered.reshape(*index.shape, *rows.shape[2:])
