"""A balanced bisection tree: clusters of equal size.

The points are cut at the median along their first principal component, then each half is, until no part
has more than `cluster_size` points. The result is one permutation, in which every cluster is a run of equal
length.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIT_SIZE = 120
"""The first principal component of a part is found from at least this many of its points, evenly spaced."""


def tree_levels(n_points: int, cluster_size: int) -> int:
    """Bisections needed until no part of `n_points` has more than `cluster_size` points."""
    return max(0, -(-n_points // cluster_size) - 1).bit_length()


def bisection_tree(
    points: Tensor, levels: int, *, valid: Tensor | None = None, power_iterations: int = 3
) -> Tensor:
    """Row numbers of the points in tree order.

    Args:
        points: `[..., N, D]`, `N` a multiple of `2 ** levels`.
        levels: Bisections; cluster i is `order[..., i * m : (i + 1) * m]` with `m = N / 2 ** levels`.
        valid: `[..., N]`, False points come last in every part and move no cut direction.
        power_iterations: Steps towards the first principal component of each part.

    Returns:
        `[..., N]` int64, a permutation of `0 .. N - 1`. No gradient.
    """
    n_points, dim = points.shape[-2:]
    if n_points % 2**levels:
        raise ValueError(f"points must come in a multiple of {2**levels} for {levels} levels, got {n_points}")
    lead = points.shape[:-2]
    work = (
        points.detach()
        .to(torch.float64 if points.dtype == torch.float64 else torch.float32)
        .reshape(-1, n_points, dim)
        .contiguous()
    )
    n_trees = work.shape[0]
    alive = None if valid is None else valid.expand(*lead, n_points).reshape(n_trees, n_points)
    order = torch.arange(n_points, dtype=torch.int64, device=points.device).expand(n_trees, n_points).contiguous()
    for level in range(levels):
        n_parts = n_trees * 2**level
        size = n_points >> level
        parts = work.view(n_parts, size, dim)
        part_alive = None if alive is None else alive.view(n_parts, size)
        projection = _projection(parts, part_alive, power_iterations)
        ranks = projection.argsort(dim=-1, stable=True)  # equal points keep their order: deterministic
        order = order.view(n_parts, size).gather(1, ranks).view(n_trees, n_points)
        rows = ranks + torch.arange(0, n_parts * size, size, dtype=torch.int64, device=points.device)[:, None]
        if alive is not None:
            alive = alive.reshape(-1).index_select(0, rows.view(-1)).view(n_trees, n_points)
        if level + 1 < levels:
            work = work.view(-1, dim).index_select(0, rows.view(-1)).view(n_trees, n_points, dim)
    return order.view(*lead, n_points)


def _projection(parts: Tensor, alive: Tensor | None, power_iterations: int) -> Tensor:
    """`[parts, size]`: places of points on the first principal component of their part, +inf if invalid."""
    stride = max(1, parts.shape[1] // FIT_SIZE)
    sample = parts[:, ::stride]
    if alive is None:
        centred = sample - sample.mean(dim=1, keepdim=True)
    else:
        weight = alive[:, ::stride, None].to(parts.dtype)
        count = weight.sum(dim=1, keepdim=True).clamp_min(1)
        centred = (sample - (sample * weight).sum(dim=1, keepdim=True) / count) * weight
    if stride == 1 and 2 * parts.shape[1] <= parts.shape[2]:
        projection = _few_points(centred, power_iterations)
        return projection if alive is None else projection.masked_fill(~alive, torch.inf)
    # the covariance costs one matrix product; iterating on the points would read them twice per step
    covariance = centred.transpose(1, 2) @ centred
    widest = covariance.diagonal(dim1=1, dim2=2).argmax(dim=1)
    direction = covariance[torch.arange(len(parts), dtype=torch.int64, device=parts.device), widest]
    for _ in range(power_iterations):
        # row times matrix: the operator is several times slower at matrix times column
        direction = (_unit(direction)[:, None] @ covariance).squeeze(1)
    projection = (_unit(direction)[:, None] @ parts.transpose(1, 2)).squeeze(1)
    return projection if alive is None else projection.masked_fill(~alive, torch.inf)


def _few_points(centred: Tensor, power_iterations: int) -> Tensor:
    """The same places, less the mean of the part, by products of points with points, a far smaller matrix.

    With X the points in rows, every direction of the iteration is X'u: it starts with u the widest coordinate, a
    step makes u into XX'u, and the places X(X'u) are one more step.
    """
    products = centred @ centred.transpose(1, 2)
    widest = centred.square().sum(dim=1).argmax(dim=1)
    places = centred.gather(2, widest[:, None, None].expand(-1, centred.shape[1], 1)).squeeze(2)
    for _ in range(power_iterations + 1):
        places = (_unit(places)[:, None] @ products).squeeze(1)
    return places


def _unit(vectors: Tensor) -> Tensor:
    # by the largest entry first: squares of tiny or huge covariances leave the range of float32
    peak: Tensor = vectors.abs().amax(dim=-1, keepdim=True)
    vectors = vectors / peak.masked_fill(peak == 0, 1.0)
    norm: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / norm.masked_fill(norm == 0, 1.0)
