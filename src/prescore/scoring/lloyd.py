"""The one loop of every clustering scorer: seed, assign, update, converge, final assignment."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.devices import largest, maybe_any
from prescore.scoring.metrics import Euclidean, distance_tables, nearest_columns, sum_clusters
from prescore.scoring.sampling import Sample, arange, gather_rows

SEEDINGS = ("k-means++", "random")
_ASSIGN_ROWS = 8192
# dropping converged problems costs a copy of the others, which pays once this share or less is still moving
_CROWDED = 0.7
# k-means||: rounds after the first candidate, and candidates of a round where clusters are few
_ROUNDS, _LEAST_PER_ROUND = 4, 64
# scikit-learn takes 2 + log(k); with all pairs known more trials cost little, and fewer blobs are missed
_TRIALS = 16

Lift = Callable[[Tensor], Tensor]
"""Features `[P, m, f]` of a block of points `[P, m, d]`."""

Draw = Callable[..., Tensor]
"""`draw(name, *size)`: uniforms `[P, *size]` in [0, 1), in float64, of the stream of a name."""


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
    draw: Draw,
    max_iter: int = 10,
    tol: float = 1e-4,
    seeding: str = "k-means++",
    lift: Lift | None = None,
) -> Clustering:
    """Cluster every problem of a batch `points [P, n, d]` on its own.

    Centres are seeded from and fitted on the `sample` (None = all points) and every point is assigned once at the
    end, so labels and centres agree. There may be more clusters than points; some are then empty. With
    `max_iter=0` the seeds are the centres. A problem stops when its centres moved, in squared l_2, by no more than
    `tol` times the mean variance of its coordinates. A `lift` clusters the features of the points instead; after a
    fit on a sample, points are lifted block by block, so that the features of all points never exist at once.
    """
    n_problems, n_points, dim = points.shape
    if n_problems == 0 or n_points == 0:
        labels = torch.zeros(n_problems, n_points, dtype=torch.int64, device=points.device)
        return Clustering(points.new_zeros(n_problems, n_clusters, dim), labels, labels.to(points.dtype))
    if sample is None:
        sample = Sample(points, None, torch.zeros(n_problems, dtype=torch.bool, device=points.device))
    fitted = sample.points if lift is None else lift(sample.points)
    seed = _plus_plus if seeding == "k-means++" else _random
    seeds = seed(fitted, sample.weights, n_clusters, metric.p, draw)
    centres = _settle(fitted, sample.weights, seeds, metric, max_iter, tol)
    if sample.points is points:
        points, lift = fitted, None
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
    distances, begin = points.new_zeros(points.shape[:2]), 0
    for block in torch.split(points, max(256, _ASSIGN_ROWS // len(points)), dim=1):
        lifted, rows = block if lift is None else lift(block), slice(begin, begin + block.shape[1])
        for choice, problems in groups:
            label, distance = metric.nearest(lifted[problems], centres[problems], exact=choice)
            if exact is not None and isinstance(problems, slice) and choices == [False, True] and choice:
                label = torch.where(exact[:, None], label, labels[:, rows])
                distance = torch.where(exact[:, None], distance, distances[:, rows])
            labels[problems, rows], distances[problems, rows] = label, distance
        begin = rows.stop
    return labels, distances


def _settle(
    points: Tensor, weights: Tensor | None, centres: Tensor, metric: Euclidean, max_iter: int, tol: float
) -> Tensor:
    """At most `max_iter` iterations: the first half in the opening metric if there is one, the last one fine."""
    if max_iter == 0:
        return centres
    threshold = tol * _mean_variance(points, weights)
    if metric.opening is None:
        return _iterate(points, weights, centres, metric, max_iter, threshold)
    early = max_iter // 2
    centres = _iterate(points, weights, centres, metric.opening, early, threshold)
    centres = _iterate(points, weights, centres, metric, max_iter - early - 1, threshold)
    return _step(points, weights, centres, metric, final=True)


def _iterate(
    points: Tensor,
    weights: Tensor | None,
    centres: Tensor,
    metric: Euclidean,
    max_iter: int,
    threshold: Tensor,
) -> Tensor:
    result = centres
    numbers = arange(len(points), like=points)
    moving = torch.ones(len(points), dtype=torch.bool, device=points.device)
    for _ in range(max_iter):
        updated = _step(points, weights, centres, metric, final=False)
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
            points, centres, numbers, threshold, moving = (
                tensor.index_select(0, left) for tensor in (points, centres, numbers, threshold, moving)
            )
            weights = None if weights is None else weights.index_select(0, left)
    return result


def _step(points: Tensor, weights: Tensor | None, centres: Tensor, metric: Euclidean, *, final: bool) -> Tensor:
    """Centres of the clusters that the given centres make."""
    labels = metric.labels(points, centres)
    ones = points.new_ones(*labels.shape, 1) if weights is None else weights.unsqueeze(2)
    sizes = sum_clusters(ones, labels, None, centres.shape[1]).squeeze(2)
    empty = sizes <= 0
    updated = metric.update(points, labels, weights, sizes.masked_fill(empty, 1.0), final=final)
    if not maybe_any(empty):
        return updated
    distances = metric.distances(points, centres, labels)
    if weights is not None:
        distances.masked_fill_(weights <= 0, 0.0)
    return _reseed(points, torch.where(empty.unsqueeze(2), centres, updated), distances, empty)


def _mean_variance(points: Tensor, weights: Tensor | None) -> Tensor:
    """Of the coordinates of each problem, `[P]`."""
    row = (points.new_ones(points.shape[:2]) if weights is None else weights).unsqueeze(1)
    total = row.sum(dim=2, keepdim=True).clamp(min=torch.finfo(points.dtype).tiny)
    mean = torch.bmm(row, points) / total
    variances = torch.bmm(row, (points - mean).square_()) / total
    return variances.mean(dim=(1, 2))


def _reseed(points: Tensor, updated: Tensor, distances: Tensor, empty: Tensor) -> Tensor:
    """Give the j-th empty cluster the j-th farthest point, while there are points away from their centres."""
    farthest = distances.topk(min(empty.shape[1], points.shape[1]), dim=1)
    turn = (empty.cumsum(dim=1) - 1).clamp(min=0, max=farthest.indices.shape[1] - 1)
    candidates = gather_rows(points, farthest.indices.gather(1, turn))
    useful = empty & (farthest.values.gather(1, turn) > 0)
    return torch.where(useful.unsqueeze(2), candidates, updated)


# Seeds `[P, n_clusters, d]`, which repeat if there are too few points; points of weight zero come last.


def _random(points: Tensor, weights: Tensor | None, n_clusters: int, power: float, draw: Draw) -> Tensor:
    n_problems, size = points.shape[:2]
    lots = draw("random seeds", size)
    n_valid = points.new_full((n_problems,), size, dtype=torch.int64)
    if weights is not None:
        n_valid = (weights > 0).sum(dim=1)
        lots = lots.masked_fill(weights <= 0, 2.0)
    turns = arange(n_clusters, like=points) % n_valid.clamp(min=1).unsqueeze(1)
    return gather_rows(points, torch.argsort(lots, dim=1, stable=True).gather(1, turns))


def _plus_plus(points: Tensor, weights: Tensor | None, n_clusters: int, power: float, draw: Draw) -> Tensor:
    """k-means++ over all points, by k-means||: draw a few candidates per cluster, then choose greedily among them.

    Bahmani et al., *Scalable k-means++*, 2012. A round draws as many candidates as there are clusters, in
    proportion to the cost `|x - nearest candidate|^power` of all points, so a group of points is found however
    small it is. Greedy k-means++ then chooses among the means of the points nearest to each candidate, weighted
    with the number of these points. (Among the candidates themselves a large spread-out group would look twice as
    costly as it is to its mean, and would get a second seed before a small group gets its first.)
    """
    means, weights = _candidates(points, weights, max(n_clusters, _LEAST_PER_ROUND), power, draw)
    return gather_rows(means, _greedy(means, weights, n_clusters, power, draw))


def _candidates(
    points: Tensor, weights: Tensor | None, per_round: int, power: float, draw: Draw
) -> tuple[Tensor, Tensor]:
    """Means `[P, m, d]` of the points nearest to each candidate, and the weights of these points.

    A problem with at most m points has all of them as candidates, whatever the size of its batch.
    """
    (n_problems, size), most = points.shape[:2], 1 + _ROUNDS * per_round
    weights = points.new_ones(n_problems, size) if weights is None else weights
    n_valid = (weights > 0).sum(dim=1, keepdim=True)
    if largest(n_valid, size) <= most:
        return points[:, :most], weights[:, :most]
    squares, costs = points.square().sum(dim=2), torch.ones_like(weights)
    labels, last = torch.zeros_like(weights, dtype=torch.int64), (n_valid - 1).clamp(min=0)
    begin = 0
    for number in range(_ROUNDS + 1):
        mass = (costs * weights).to(torch.float64).cumsum(dim=1)
        lots = draw(f"candidates {number}", per_round if number else 1)
        # right=True: never a point of zero cost while there is any other
        drawn = torch.searchsorted(mass, mass[:, -1:] * lots, right=True).minimum(last)
        nearest, cost = _nearest_candidates(points, squares, gather_rows(points, drawn), power)
        closer = cost < costs if number else torch.ones_like(labels, dtype=torch.bool)
        labels, costs = torch.where(closer, nearest + begin, labels), torch.where(closer, cost, costs)
        begin += drawn.shape[1]
    counts = sum_clusters(weights.unsqueeze(2), labels, None, most)
    means = sum_clusters(points, labels, weights, most) / counts.clamp(min=torch.finfo(counts.dtype).tiny)
    is_short = n_valid <= most
    short_weights = weights[:, :most].masked_fill(arange(most, like=points) >= n_valid, 0.0)
    return torch.where(is_short.unsqueeze(2), points[:, :most], means), torch.where(
        is_short, short_weights, counts.squeeze(2)
    )


def _nearest_candidates(
    points: Tensor, squares: Tensor, candidates: Tensor, power: float
) -> tuple[Tensor, Tensor]:
    """The nearest of `candidates [P, c, d]` to each point of these squared lengths, and the cost, `[P, n]`."""
    nearest = [(nearest_columns(table), table.amin(dim=1)) for table in distance_tables(points, candidates)]
    numbers, values = (torch.cat(parts, dim=1) for parts in zip(*nearest, strict=True))
    costs = values.add_(squares).clamp_(min=0.0)
    return numbers, costs if power == 2.0 else costs.pow_(power / 2.0)


def _greedy(points: Tensor, weights: Tensor, n_clusters: int, power: float, draw: Draw) -> Tensor:
    """Positions `[P, n_clusters]` by greedy k-means++: of a few draws, keep the one that lowers the cost most.

    All pairwise costs are computed once, so that a step is a few operations on `[P, trials, size]`.
    """
    costs = pairwise_costs(points, power)
    draws = draw("k-means++", n_clusters, _TRIALS)
    last = (torch.where(weights > 0, arange(weights.shape[1], like=weights), 0)).amax(dim=1, keepdim=True)
    closest = torch.ones_like(weights)
    chosen = []
    for step in range(n_clusters):
        mass = (closest * weights).to(torch.float64).cumsum(dim=1)
        candidates = torch.searchsorted(mass, mass[:, -1:] * draws[:, step], right=True).minimum(last)
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
