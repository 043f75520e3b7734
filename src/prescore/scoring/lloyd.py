"""The one loop behind every clustering scorer: assign, update, converge, final assignment."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from prescore import checks
from prescore.rng import Streams
from prescore.scoring.metrics import Metric
from prescore.scoring.sampling import Scratch, count_valid, fit_counts, gather_rows, holes_last, stratified

_ASSIGN_ROWS = 8192
# share of the problems still moving from which on dropping the finished ones pays for the copy
_CROWDED = 0.7


class Clustering(NamedTuple):
    """Clusters of P independent problems.

    `centres [P, k, d]`; `labels [P, n]`, the nearest centre of every point; `distances [P, n]`, in the metric,
    `(sum |x - c|^p)^(1/p)`, to the own centre. Values at points of weight zero mean nothing.
    """

    centres: Tensor
    labels: Tensor
    distances: Tensor


def fit(
    points: Tensor,
    *,
    n_clusters: int,
    metric: Metric,
    max_iter: int = 10,
    tol: float = 1e-4,
    seeding: str = "k-means++",
    weights: Tensor | None = None,
    streams: Streams,
    fit_size: int | None = None,
    lift: Callable[[Tensor], Tensor] | None = None,
) -> Clustering:
    """Cluster every problem of a batch on its own.

    Centres are fitted on a stratified sample of the points when there are many; every point is assigned once at
    the end, so labels and centres agree. All sizes come from a problem's own valid points, so that padding a
    problem changes nothing.

    Args:
        points: `[P, n, d]`, float32 or float64.
        n_clusters: Clusters per problem; may exceed the number of points, some clusters are then empty.
        metric: From `metric_for(p)`.
        max_iter: Lloyd iterations at most; 0 = the seeds are the centres.
        tol: A problem stops when its centres moved, in squared l_2, by no more than `tol` times the mean
            variance of its coordinates.
        seeding: `k-means++` or `random`.
        weights: `[P, n]`, at least 0; a point of weight 0 influences nothing. None = all ones.
        streams: Randomness, the same draws for every problem.
        fit_size: Points to fit on; None = at most 32 for each of n_clusters, counted as at least 64 (16 for
            metrics other than the Euclidean); 0 = all.
        lift: Features `[P, m, f]` of a block of points `[P, m, d]`, in which to cluster instead. Applied to the
            sample and then block by block, so that the features of all points never exist at once; a block's
            features are not read after the next call, so they may share memory.

    Returns:
        Centres, labels and distances.
    """
    checks.integer("n_clusters", n_clusters, minimum=1)
    checks.integer("max_iter", max_iter, minimum=0)
    checks.number("tol", tol, minimum=0.0)
    if fit_size is not None:
        checks.integer("fit_size", fit_size, minimum=0)
    n_problems, n_points, dim = points.shape
    if n_problems == 0 or n_points == 0:
        return Clustering(
            points.new_zeros(n_problems, n_clusters, dim),
            torch.zeros(n_problems, n_points, dtype=torch.int64, device=points.device),
            points.new_zeros(n_problems, n_points),
        )
    n_valid = count_valid(points, weights)
    counts = fit_counts(n_valid, n_clusters, fit_size, per_cluster=metric.samples_per_cluster)
    sample, sample_weights = holes_last(points, weights, n_valid)
    sample, sample_weights = stratified(sample, sample_weights, n_valid, counts, streams, "fit sample")
    if lift is not None:
        sample = lift(sample)
    centres = seed_centres(
        sample, sample_weights, n_clusters=n_clusters, seeding=seeding, power=metric.p, streams=streams
    )
    if sample_weights is None:
        sample_weights = sample.new_ones(sample.shape[:2])
    centres = _settle(sample, sample_weights, centres, metric, max_iter, tol)
    if not metric.shortlists:
        return Clustering(centres, *assign(points, centres, metric, lift=lift))
    return Clustering(centres, *_assign_sampled(points, centres, metric, counts < n_valid, lift))


def assign(
    points: Tensor,
    centres: Tensor,
    metric: Metric,
    *,
    exact: bool = True,
    lift: Callable[[Tensor], Tensor] | None = None,
    problems: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Nearest centre of every point and the distance to it, in blocks so that no `n x k` table is held.

    With `problems`, of those only.
    """
    rows = max(256, _ASSIGN_ROWS // len(points))
    scratch = Scratch()
    if problems is not None:
        centres = centres[problems]
    labels, distances = [], []
    for block in torch.split(points, rows, dim=1):
        lifted = block if lift is None else lift(block)
        some = lifted if problems is None else lifted[problems]
        nearest = metric.nearest(some, centres, scratch, exact=exact)
        labels.append(nearest[0])
        distances.append(nearest[1])
    return torch.cat(labels, dim=1), torch.cat(distances, dim=1)


def _assign_sampled(
    points: Tensor, centres: Tensor, metric: Metric, sampled: Tensor, lift: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Assign by shortlist where a problem was fitted on a sample `[P]`, exactly where not.

    Decided for each problem: whether a short one shares its batch with a long one must not matter.
    """
    if bool((sampled == sampled[0]).all()):
        return assign(points, centres, metric, exact=not bool(sampled[0]), lift=lift)
    labels = torch.zeros(points.shape[:2], dtype=torch.int64, device=points.device)
    distances = points.new_zeros(points.shape[:2])
    for exact in (False, True):
        (problems,) = torch.where(sampled != exact)
        found = assign(points, centres, metric, exact=exact, lift=lift, problems=problems)
        labels[problems], distances[problems] = found
    return labels, distances


def _settle(points: Tensor, weights: Tensor, centres: Tensor, metric: Metric, max_iter: int, tol: float) -> Tensor:
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
    metric: Metric,
    max_iter: int,
    threshold: Tensor,
    scratch: Scratch,
) -> Tensor:
    result = centres
    numbers = torch.arange(len(points), device=points.device)
    moving = torch.ones(len(points), dtype=torch.bool, device=points.device)
    for _ in range(max_iter):
        updated = _step(points, weights, centres, metric, scratch, final=False)
        shift = (updated - centres).square().sum(dim=(1, 2))
        # a finished problem keeps its centres: neighbours in the batch must not change them
        centres = torch.where(moving[:, None, None], updated, centres)
        result = result.index_copy(0, numbers, centres)
        moving = moving & (shift > threshold)
        n_moving = int(moving.count_nonzero())
        if n_moving == 0:
            break
        if n_moving <= _CROWDED * len(points):
            # most problems finish early; those that do not go on without them
            (left,) = torch.where(moving)
            points, weights, centres, numbers, threshold, moving = (
                tensor.index_select(0, left) for tensor in (points, weights, centres, numbers, threshold, moving)
            )
    return result


def _step(
    points: Tensor, weights: Tensor, centres: Tensor, metric: Metric, scratch: Scratch, *, final: bool
) -> Tensor:
    """Centres of the clusters that the given centres make."""
    membership, labels = metric.membership(points, weights, centres, scratch)
    sizes = membership.sum(dim=2)
    empty = sizes <= 0
    updated = metric.update(points, labels, membership, sizes.masked_fill(empty, 1.0), final=final)
    if not bool(empty.any()):
        return updated
    labels = metric.labels(points, centres, scratch) if labels is None else labels
    distances = metric.distances(points, centres, labels, scratch).masked_fill_(weights <= 0, 0.0)
    return _reseed(points, torch.where(empty.unsqueeze(2), centres, updated), distances, empty)


def _mean_variance(points: Tensor, weights: Tensor) -> Tensor:
    total = weights.sum(dim=1).clamp(min=torch.finfo(weights.dtype).tiny)
    row = weights.unsqueeze(1)
    mean = torch.bmm(row, points) / total[:, None, None]
    spread = torch.bmm(row, (points - mean).square_()).squeeze(1) / total.unsqueeze(1)
    return spread.mean(dim=1)


def _reseed(points: Tensor, updated: Tensor, distances: Tensor, empty: Tensor) -> Tensor:
    """Give the j-th empty cluster the j-th farthest point, while there are points away from their centres."""
    farthest = distances.topk(min(empty.shape[1], points.shape[1]), dim=1)
    turn = (empty.cumsum(dim=1) - 1).clamp(min=0, max=farthest.indices.shape[1] - 1)
    candidates = gather_rows(points, farthest.indices.gather(1, turn))
    useful = empty & (farthest.values.gather(1, turn) > 0)
    return torch.where(useful.unsqueeze(2), candidates, updated)


# First centres: greedy k-means++ on a subsample, or random points.

SEEDINGS = ("k-means++", "random")
# Points that k-means++ draws from, of which all pairwise distances are held: 8 per cluster, but not so many that
# the table outgrows the points when there are hundreds of clusters.
_FEWEST, _PER_CLUSTER, _MANY, _LEAST_PER_CLUSTER = 512, 8, 2048, 2
# scikit-learn takes 2 + log(k); with all pairs known more trials cost little, and fewer blobs are missed
_TRIALS = 16


def seed_centres(
    points: Tensor, weights: Tensor | None, *, n_clusters: int, seeding: str, power: float, streams: Streams
) -> Tensor:
    """Choose `n_clusters` points of each problem as first centres.

    Args:
        points: `[P, n, d]`, points of weight zero last.
        weights: `[P, n]` or None.
        n_clusters: Centres per problem; with fewer distinct points, centres repeat.
        seeding: `k-means++` or `random`.
        power: k-means++ draws in proportion to the Euclidean distance to this power.
        streams: Randomness.

    Returns:
        `[P, n_clusters, d]`.
    """
    checks.one_of("seeding", seeding, SEEDINGS)
    n_valid = count_valid(points, weights)
    if seeding == "random":
        chosen = _random(n_valid, points, n_clusters, streams)
        return gather_rows(points, chosen)
    size = max(_FEWEST, min(_PER_CLUSTER * n_clusters, _MANY), _LEAST_PER_CLUSTER * n_clusters)
    counts = n_valid.clamp(max=size)
    points, weights = stratified(points, weights, n_valid, counts, streams, "seed sample")
    if weights is None:
        weights = points.new_ones(points.shape[:2])
    return gather_rows(points, _plus_plus(points, weights, counts, n_clusters, power, streams))


def _random(n_valid: Tensor, points: Tensor, n_clusters: int, streams: Streams) -> Tensor:
    size = points.shape[1]
    lots = streams.uniform("random seeds", size, like=points)
    absent = torch.arange(size, device=points.device) >= n_valid.unsqueeze(1)
    order = torch.argsort(lots.expand(len(n_valid), size).masked_fill(absent, 2.0), dim=1, stable=True)
    turns = torch.arange(n_clusters, device=points.device) % n_valid.clamp(min=1).unsqueeze(1)
    return order.gather(1, turns)


def _plus_plus(
    points: Tensor, weights: Tensor, counts: Tensor, n_clusters: int, power: float, streams: Streams
) -> Tensor:
    """Positions `[P, n_clusters]` by greedy k-means++: of a few draws, keep the one that helps most.

    All pairwise costs are computed once, so that a step is a few operations on `[P, trials, size]`.
    """
    costs = pairwise_costs(points, power)
    draws = streams.uniform("k-means++", n_clusters, _TRIALS, like=points)
    last = (counts - 1).clamp(min=0).unsqueeze(1)
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
        # gather, because take_along_dim first reduces the index modulo the size, which costs more than the rest
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
