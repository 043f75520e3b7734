"""First centres: greedy k-means++ on a subsample, or random points."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore import checks
from prescore.clustering.sampling import count_valid, gather_rows, stratified
from prescore.rng import Streams

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
