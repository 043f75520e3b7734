"""Centres of clusters in l_p, for all clusters and coordinates at once."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.clustering.powers import power
from prescore.clustering.sampling import gather_rows

_CANDIDATES = 8
_TIE = 1e-6


def zero_of_gradient(
    points: Tensor, labels: Tensor, membership: Tensor, sizes: Tensor, p: float, *, steps: int | None = None
) -> Tensor:
    """Minimise `sum_i w_i |x_i - c|^p` per cluster and coordinate for p >= 1 by bisection.

    The derivative `-p sum_i w_i sign(x_i - c) |x_i - c|^(p - 1)` rises with c. A bisection step is one row
    gather, one power and one matrix product. For p <= 2 the zero lies within one standard deviation of the mean
    (at p = 1 it is the median, at p = 2 the mean); for larger p the bracket is the cluster's range.

    Args:
        points: `[P, n, d]`.
        labels: `[P, n]`.
        membership: `[P, k, n]`, weights by cluster.
        sizes: `[P, k]`, total weights, positive.
        p: Exponent.
        steps: Bisection steps; None = until the dtype has no more digits.

    Returns:
        `[P, k, d]`.
    """
    totals = sizes.unsqueeze(2)
    means = torch.bmm(membership, points) / totals
    deviations = points - gather_rows(means, labels)
    if p <= 2.0:
        half_width = (torch.bmm(membership, deviations.square()) / totals).sqrt_()
    else:
        # the l_inf radius of each cluster in each coordinate is at most its l_6 norm, a matrix product
        half_width = torch.bmm(membership, deviations.abs().pow_(6.0)).pow_(1.0 / 6.0)
    # offsets from the mean, not absolute positions: digits are spent on the difference
    middle = torch.zeros_like(means)
    if steps is None:
        steps = 20 if points.dtype == torch.float32 else 50
    for _ in range(steps):
        residuals = deviations - gather_rows(middle, labels)
        pull = torch.sign(residuals)
        if p != 1.0:
            pull = pull.mul_(power(residuals.abs_(), p - 1.0))
        half_width = half_width * 0.5
        middle = middle + torch.sign(torch.bmm(membership, pull)) * half_width
    return means + middle


def best_members(points: Tensor, labels: Tensor, membership: Tensor, sizes: Tensor, p: float) -> Tensor:
    """For p < 1: per cluster, the cheapest of the few members nearest to its mean.

    The cost is concave between members in every coordinate, so its minima are coordinates of members; a few
    members near the middle stand for all of them. Costs equal up to rounding (both members of a pair) go to the
    lower position.
    """
    means = torch.bmm(membership, points) / sizes.unsqueeze(2)
    spread = (points - gather_rows(means, labels)).square_().sum(dim=2)
    ranked = spread.unsqueeze(1).expand_as(membership).masked_fill(membership <= 0, torch.inf)
    nearest = ranked.topk(min(_CANDIDATES, points.shape[1]), dim=2, largest=False)
    costs = torch.stack(
        [
            _cost(points, labels, membership, gather_rows(points, candidate), p)
            for candidate in nearest.indices.unbind(2)
        ],
        dim=2,
    ).masked_fill_(nearest.values.isinf(), torch.inf)
    near_best = costs <= costs.amin(dim=2, keepdim=True) * (1 + _TIE)
    chosen = nearest.indices.masked_fill(~near_best, points.shape[1]).amin(dim=2)
    return gather_rows(points, chosen.clamp(max=points.shape[1] - 1))


def _cost(points: Tensor, labels: Tensor, membership: Tensor, centres: Tensor, p: float) -> Tensor:
    costs = power((points - gather_rows(centres, labels)).abs_(), p).sum(dim=2)
    return torch.bmm(membership, costs.unsqueeze(2)).squeeze(2)
