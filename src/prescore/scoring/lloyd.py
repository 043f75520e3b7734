"""The one loop of every clustering scorer: seed, assign, update, converge, final assignment."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.devices import maybe_any
from prescore.rng import Streams
from prescore.scoring.metrics import Euclidean
from prescore.scoring.sampling import Sample, Scratch, arange, draw_sample, gather_rows

SEEDINGS = ("k-means++", "random")
_ASSIGN_ROWS = 8192
# dropping converged problems costs a copy of the others, which pays once this share or less is still moving
_CROWDED = 0.7
# k-means++ draws from a subsample whose pairwise distances are all held: 8 points per cluster, but not so many
# that the table outgrows the points when there are hundreds of clusters
_SEED_MIN, _SEED_PER_CLUSTER, _SEED_MAX, _SEED_MIN_PER_CLUSTER = 512, 8, 2048, 2
# scikit-learn takes 2 + log(k); with all pairs known more trials cost little, and fewer blobs are missed
_TRIALS = 16

Lift = Callable[[Tensor], Tensor]
"""Features `[P, m, f]` of a block of points `[P, m, d]`. A block's features are not read after the next call."""


class Clustering(NamedTuple):
    """Centres `[P, k, d]` of P independent problems, the nearest one of every point `[P, n]`, and its distance."""

    centres: Tensor
    labels: Tensor
    distances: Tensor


def fit(
    points: Tensor,
    sample: Sample | None = None,
    *,
    n_clusters: int,
    metric: Euclidean,
    streams: Streams,
    max_iter: int = 10,
    tol: float = 1e-4,
    seeding: str = "k-means++",
    lift: Lift | None = None,
) -> Clustering:
    """Cluster every problem of a batch `points [P, n, d]` on its own.

    Centres are fitted on the `sample` (None = all points) and every point is assigned once at the end, so labels
    and centres agree. There may be more clusters than points; some are then empty. With `max_iter=0` the seeds are
    the centres. A problem stops when its centres moved, in squared l_2, by no more than `tol` times the mean
    variance of its coordinates. A `lift` clusters the features of the points instead. Points are lifted block by
    block, so that the features of all points never exist at once.
    """
    n_problems, n_points, dim = points.shape
    if n_problems == 0 or n_points == 0:
        labels = torch.zeros(n_problems, n_points, dtype=torch.int64, device=points.device)
        return Clustering(points.new_zeros(n_problems, n_clusters, dim), labels, labels.to(points.dtype))
    if sample is None:
        sample = Sample(points, None, torch.zeros(n_problems, dtype=torch.bool, device=points.device))
    fitted = sample.points if lift is None else lift(sample.points)
    seeds = seed_centres(
        fitted, sample.weights, n_clusters=n_clusters, seeding=seeding, power=metric.p, streams=streams
    )
    weights = fitted.new_ones(fitted.shape[:2]) if sample.weights is None else sample.weights
    centres = _settle(fitted, weights, seeds, metric, max_iter, tol)
    return Clustering(centres, *assign(points, centres, metric, exact=~sample.is_partial, lift=lift))


def assign(
    points: Tensor, centres: Tensor, metric: Euclidean, *, exact: Tensor | None = None, lift: Lift | None = None
) -> tuple[Tensor, Tensor]:
    """Nearest centre of every point and the distance to it, in blocks so that no `n x k` table is held.

    Problems that are not `exact [P]` use the shortlist of the metric if it has one; None = all are exact. Each
    problem has its own choice, so that a short one does not notice a long one in its batch.
    """
    if exact is None or not metric.shortlists:
        choices = [True]
    else:  # who is exact is not asked for elsewhere than on CPUs: both are computed
        choices = sorted(set(exact.tolist())) if exact.device.type == "cpu" else [False, True]
    groups: list[tuple[bool, slice | Tensor]] = [(choice, slice(None)) for choice in choices]
    if exact is not None and len(choices) == 2 and exact.device.type == "cpu":
        groups = [(choice, torch.where(exact == choice)[0]) for choice in choices]
    labels = torch.zeros(points.shape[:2], dtype=torch.int64, device=points.device)
    distances, scratch, begin = points.new_zeros(points.shape[:2]), Scratch(), 0
    for block in torch.split(points, max(256, _ASSIGN_ROWS // len(points)), dim=1):
        lifted, rows = block if lift is None else lift(block), slice(begin, begin + block.shape[1])
        for choice, some in groups:
            label, distance = metric.nearest(lifted[some], centres[some], scratch, exact=choice)
            if exact is not None and isinstance(some, slice) and choices == [False, True] and choice:
                label = torch.where(exact[:, None], label, labels[:, rows])
                distance = torch.where(exact[:, None], distance, distances[:, rows])
            labels[some, rows], distances[some, rows] = label, distance
        begin = rows.stop
    return labels, distances


def _settle(
    points: Tensor, weights: Tensor, centres: Tensor, metric: Euclidean, max_iter: int, tol: float
) -> Tensor:
    """At most `max_iter` iterations: the first half in the opening metric if there is one, the last one fine."""
    if max_iter == 0:
        return centres
    threshold, scratch = tol * _mean_variance(points, weights), Scratch()
    if metric.opening is None:
        return _iterate(points, weights, centres, metric, max_iter, threshold, scratch)
    early = max_iter // 2
    centres = _iterate(points, weights, centres, metric.opening, early, threshold, scratch)
    centres = _iterate(points, weights, centres, metric, max_iter - early - 1, threshold, scratch)
    return _step(points, weights, centres, metric, scratch, final=True)


def _iterate(
    points: Tensor,
    weights: Tensor,
    centres: Tensor,
    metric: Euclidean,
    max_iter: int,
    threshold: Tensor,
    scratch: Scratch,
) -> Tensor:
    result = centres
    numbers = arange(len(points), like=points)
    moving = torch.ones(len(points), dtype=torch.bool, device=points.device)
    for _ in range(max_iter):
        updated = _step(points, weights, centres, metric, scratch, final=False)
        shift = (updated - centres).square().sum(dim=(1, 2))
        # a converged problem keeps its centres: its neighbours in the batch must not change them
        centres = torch.where(moving[:, None, None], updated, centres)
        result = result.index_copy(0, numbers, centres)
        moving = moving & (shift > threshold)
        if moving.device.type != "cpu":
            continue  # who has converged is not asked for: all go on, and keep what they have
        n_moving = int(moving.count_nonzero())
        if n_moving == 0:
            break
        if n_moving <= _CROWDED * len(points):
            (left,) = torch.where(moving)
            points, weights, centres, numbers, threshold, moving = (
                tensor.index_select(0, left) for tensor in (points, weights, centres, numbers, threshold, moving)
            )
    return result


def _step(
    points: Tensor, weights: Tensor, centres: Tensor, metric: Euclidean, scratch: Scratch, *, final: bool
) -> Tensor:
    """Centres of the clusters that the given centres make."""
    membership, labels = metric.membership(points, weights, centres, scratch)
    sizes = membership.sum(dim=2)
    empty = sizes <= 0
    updated = metric.update(points, labels, membership, sizes.masked_fill(empty, 1.0), final=final)
    if not maybe_any(empty):
        return updated
    labels = metric.labels(points, centres, scratch) if labels is None else labels
    distances = metric.distances(points, centres, labels, scratch).masked_fill_(weights <= 0, 0.0)
    return _reseed(points, torch.where(empty.unsqueeze(2), centres, updated), distances, empty)


def _mean_variance(points: Tensor, weights: Tensor) -> Tensor:
    total = weights.sum(dim=1).clamp(min=torch.finfo(weights.dtype).tiny)
    row = weights.unsqueeze(1)
    mean = torch.bmm(row, points) / total[:, None, None]
    variances = torch.bmm(row, (points - mean).square_()).squeeze(1) / total.unsqueeze(1)
    return variances.mean(dim=1)


def _reseed(points: Tensor, updated: Tensor, distances: Tensor, empty: Tensor) -> Tensor:
    """Give the j-th empty cluster the j-th farthest point, while there are points away from their centres."""
    farthest = distances.topk(min(empty.shape[1], points.shape[1]), dim=1)
    turn = (empty.cumsum(dim=1) - 1).clamp(min=0, max=farthest.indices.shape[1] - 1)
    candidates = gather_rows(points, farthest.indices.gather(1, turn))
    useful = empty & (farthest.values.gather(1, turn) > 0)
    return torch.where(useful.unsqueeze(2), candidates, updated)


def seed_centres(
    points: Tensor, weights: Tensor | None, *, n_clusters: int, seeding: str, power: float, streams: Streams
) -> Tensor:
    """Choose `n_clusters` points of each problem as first centres, `[P, n_clusters, d]`; they repeat if too few.

    Points of weight zero come last. k-means++ draws in proportion to the Euclidean distance to the given power.
    """
    if seeding == "random":
        return gather_rows(points, _random(points, weights, n_clusters, streams))
    per_cluster = max(min(_SEED_PER_CLUSTER * n_clusters, _SEED_MAX), _SEED_MIN_PER_CLUSTER * n_clusters)
    points, weights, _ = draw_sample(points, weights, max(_SEED_MIN, per_cluster), streams, "seed sample")
    if weights is None:
        weights = points.new_ones(points.shape[:2])
    return gather_rows(points, _plus_plus(points, weights, n_clusters, power, streams))


def _random(points: Tensor, weights: Tensor | None, n_clusters: int, streams: Streams) -> Tensor:
    n_problems, size = points.shape[:2]
    lots = streams.uniform("random seeds", size, like=points).expand(n_problems, size)
    n_valid = points.new_full((n_problems,), size, dtype=torch.int64)
    if weights is not None:
        n_valid = (weights > 0).sum(dim=1)
        lots = lots.masked_fill(weights <= 0, 2.0)
    turns = arange(n_clusters, like=points) % n_valid.clamp(min=1).unsqueeze(1)
    return torch.argsort(lots, dim=1, stable=True).gather(1, turns)


def _plus_plus(points: Tensor, weights: Tensor, n_clusters: int, power: float, streams: Streams) -> Tensor:
    """Positions `[P, n_clusters]` by greedy k-means++: of a few draws, keep the one that lowers the cost most.

    All pairwise costs are computed once, so that a step is a few operations on `[P, trials, size]`.
    """
    costs = pairwise_costs(points, power)
    draws = streams.uniform("k-means++", n_clusters, _TRIALS, like=points)
    last = ((weights > 0).sum(dim=1, keepdim=True) - 1).clamp(min=0)
    closest = torch.ones_like(weights)
    chosen = []
    for step in range(n_clusters):
        mass = (closest * weights).to(torch.float64).cumsum(dim=1)
        targets = mass[:, -1:] * draws[step]
        # right=True: never a point of zero cost while there is any other
        candidates = torch.minimum(torch.searchsorted(mass, targets, right=True), last)
        if step == 0:
            candidates = candidates[:, :1]
        reached = gather_rows(costs, candidates)
        if step > 0:
            reached = torch.minimum(reached, closest.unsqueeze(1))
        totals = torch.linalg.vecdot(reached, weights.unsqueeze(1))
        best = totals.argmin(dim=1, keepdim=True)
        # take_along_dim would first reduce the index modulo the size, which costs more than everything else here
        closest = reached.gather(1, best.unsqueeze(2).expand(-1, 1, reached.shape[2])).squeeze(1)
        chosen.append(candidates.gather(1, best))
    return torch.cat(chosen, dim=1)


def pairwise_costs(points: Tensor, power: float) -> Tensor:
    """Euclidean distances to the given power, `[P, n, n]`, by one matrix product; the diagonal is zero."""
    squares = points.square().sum(dim=2)
    costs = torch.bmm(points * -2.0, points.transpose(1, 2)).add_(squares.unsqueeze(1))
    costs = costs.add_(squares.unsqueeze(2)).clamp_(min=0.0)
    costs.diagonal(dim1=1, dim2=2).zero_()
    return costs if power == 2.0 else costs.pow_(power / 2.0)
