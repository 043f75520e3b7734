"""Metrics of the Lloyd loop: nearest centres, distances, and the centre of a cluster."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from prescore.scoring.sampling import Scratch, arange, gather_rows

# Bisection steps before the last iteration and in it; the bracket is wider above p = 2. Ten halvings of a standard
# deviation change a cluster's cost by less than 1e-6 of itself.
_STEPS, _STEPS_WIDE = (3, 10), (5, 12)
_EXACT_ELEMENTS = 2**20
_CANDIDATES = 8
_TIE = 1e-6
MAX_PACKED_CENTRES = 1024
"""With more centres, packing their numbers into distances would leave too few bits of the distance."""
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


class Euclidean:
    """Least squares: `d(x, c) = |x - c|`, and the centre of a cluster is its mean. Other metrics derive from it.

    All methods take `points [P, n, d]` and `centres [P, k, d]`.
    """

    p: float = 2.0
    """`d(x, c) = (sum_j |x_j - c_j|^p)^(1/p)`; a cluster's centre minimises its sum of `d^p`."""
    shortlists: ClassVar[bool] = False
    """Whether `nearest` has a cheaper form that compares a shortlist of centres only."""
    opening: ClassVar[Euclidean | None] = None
    """A cheaper metric for the first half of the Lloyd iterations, which only bring the centres near."""

    def labels(self, points: Tensor, centres: Tensor, scratch: Scratch) -> Tensor:
        """Nearest centre of each point inside the Lloyd loop, `[P, n]`."""
        order = scratch.take("order", *points.shape[:2], centres.shape[1], like=points)
        # |c|^2 - 2 x.c orders centres as the squared distance does; baddbmm would first write the squares to every
        # entry of the result
        torch.bmm(points, (centres * -2.0).transpose(1, 2), out=order)
        return order.add_(centres.square().sum(dim=2).unsqueeze(1)).min(dim=2).indices

    def nearest(self, points: Tensor, centres: Tensor, scratch: Scratch, *, exact: bool) -> tuple[Tensor, Tensor]:
        """Nearest centre and distance of a block of points in the final pass, `[P, n]` each.

        With `exact=False` a metric with `shortlists` compares a shortlist of centres only.
        """
        labels = self.labels(points, centres, scratch)
        return labels, self.distances(points, centres, labels, scratch)

    def distances(self, points: Tensor, centres: Tensor, labels: Tensor, scratch: Scratch) -> Tensor:
        """Distance of each point to the centre of its label, `[P, n]`."""
        # |x|^2 + |c|^2 - 2 x.c would lose the small distances to rounding
        distances: Tensor = torch.linalg.vector_norm(differences(points, centres, labels, scratch), dim=2)
        return distances

    def membership(
        self, points: Tensor, weights: Tensor, centres: Tensor, scratch: Scratch
    ) -> tuple[Tensor, Tensor | None]:
        """`[P, k, n]`: the weight of a point in its cluster's row, zero elsewhere; and the labels if known."""
        if points.device.type != "cpu":  # ties would have to be counted, and waited for
            return one_hot(self.labels(points, centres, scratch), weights, centres.shape[1])
        order = _order(points, centres, centres.square().sum(dim=2), scratch)
        # a reduction without indices is faster than one with
        nearest = order == order.amin(dim=1, keepdim=True)
        if int(nearest.count_nonzero()) > points.shape[0] * points.shape[1]:
            # equal distances: the first centre takes all
            return one_hot(self.labels(points, centres, scratch), weights, centres.shape[1])
        return nearest.to(weights.dtype).mul_(weights.unsqueeze(1)), None

    def update(
        self, points: Tensor, labels: Tensor | None, membership: Tensor, sizes: Tensor, *, final: bool
    ) -> Tensor:
        """The centre of each cluster, `[P, k, d]`; anything where a cluster is empty.

        `sizes [P, k]` are the row sums of `membership`, made positive where a cluster is empty. Before the `final`
        iteration a coarse solution is enough.
        """
        return torch.bmm(membership, points) / sizes.unsqueeze(2)


def one_hot(labels: Tensor, weights: Tensor, n_clusters: int) -> tuple[Tensor, Tensor]:
    """`[P, k, n]`: the weight of a point in the row of its label, zero elsewhere; and the labels."""
    clusters = arange(n_clusters, like=labels).unsqueeze(1)
    hot = (labels.unsqueeze(1) == clusters).to(weights.dtype)
    return hot.mul_(weights.unsqueeze(1)), labels


def differences(points: Tensor, centres: Tensor, labels: Tensor, scratch: Scratch) -> Tensor:
    """`c - x` with the centre of each point, `[P, n, d]` in scratch memory."""
    buffer = scratch.take("differences", *points.shape, like=points)
    return gather_rows(centres, labels, out=buffer).sub_(points)


EUCLIDEAN = Euclidean()


class Spherical(Euclidean):
    """Euclidean, for points of length 1 whose distances need no more than four digits."""

    def nearest(self, points: Tensor, centres: Tensor, scratch: Scratch, *, exact: bool) -> tuple[Tensor, Tensor]:
        """From the matrix product alone: no second pass over the points.

        Number and distance both come from the packed bits. A squared distance is good to 2^-16 of itself (for at
        most 128 centres in float32) and to a few 2^-23.
        """
        if centres.shape[1] > MAX_PACKED_CENTRES:
            return super().nearest(points, centres, scratch, exact=exact)
        packed, low = _pack(_order(points, centres, centres.square().sum(dim=2).add_(1.0), scratch))
        first = packed.amin(dim=1)
        labels = (first & low).to(torch.int64)
        return labels, first.bitwise_and_(~low).view(points.dtype).sqrt()


SPHERICAL = Spherical()


class LpMetric(Euclidean):
    """The l_p metrics other than the Euclidean one; centres are coordinate medians at p = 1.

    An l_p distance has no matrix-product form. So the Lloyd loop compares the two nearest Euclidean centres only,
    and so does the final pass over all points after a fit on a sample. The final pass after a fit on all points
    compares every centre. The first half of the iterations is Euclidean.
    """

    shortlists = True
    opening = EUCLIDEAN

    def __init__(self, p: float) -> None:
        self.p = p

    def labels(self, points: Tensor, centres: Tensor, scratch: Scratch) -> Tensor:
        """Exact among the centres that are nearest in the Euclidean metric."""
        return self._shortlisted(points, centres, scratch)[0]

    def membership(
        self, points: Tensor, weights: Tensor, centres: Tensor, scratch: Scratch
    ) -> tuple[Tensor, Tensor | None]:
        """By the labels."""
        return one_hot(self.labels(points, centres, scratch), weights, centres.shape[1])

    def nearest(self, points: Tensor, centres: Tensor, scratch: Scratch, *, exact: bool) -> tuple[Tensor, Tensor]:
        """Over all centres if `exact`, else over a shortlist of two."""
        if not exact:
            labels, costs = self._shortlisted(points, centres, scratch)
            return labels, power(costs, 1.0 / self.p)
        if self.p == 1.0:
            nearest = torch.cdist(points, centres, p=1.0).min(dim=2)
            return nearest.indices, nearest.values
        step = max(1, _EXACT_ELEMENTS // max(1, len(points) * centres.shape[1] * centres.shape[2]))
        blocks = [self._compared(block, centres.unsqueeze(1)) for block in torch.split(points, step, dim=1)]
        labels = torch.cat([block[0] for block in blocks], dim=1)
        return labels, power(torch.cat([block[1] for block in blocks], dim=1), 1.0 / self.p)

    def distances(self, points: Tensor, centres: Tensor, labels: Tensor, scratch: Scratch) -> Tensor:
        """`(sum |x - c|^p)^(1/p)`."""
        return power(self._costs(points, centres, labels, scratch), 1.0 / self.p)

    def update(
        self, points: Tensor, labels: Tensor | None, membership: Tensor, sizes: Tensor, *, final: bool
    ) -> Tensor:
        """The minimiser for p >= 1; for p < 1, where the cost is not convex, the best of a few members."""
        if labels is None:
            labels = membership.argmax(dim=1)
        if self.p < 1.0:
            return best_members(points, labels, membership, sizes, self.p)
        coarse, fine = _STEPS if self.p <= 2.0 else _STEPS_WIDE
        return zero_of_gradient(points, labels, membership, sizes, self.p, steps=fine if final else coarse)

    def _compared(self, points: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
        """Nearest of all centres `[P, 1, k, d]` of each point, and the cost `sum |x - c|^p`."""
        costs = power((points.unsqueeze(2) - centres).abs_(), self.p).sum(dim=3)
        nearest = costs.min(dim=2)
        return nearest.indices, nearest.values

    def _shortlisted(self, points: Tensor, centres: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        if centres.shape[1] <= 2:
            return self._compared(points, centres.unsqueeze(1))
        first, second = two_nearest(points, centres, scratch)
        costs, others = (self._costs(points, centres, labels, scratch) for labels in (first, second))
        return torch.where(others < costs, second, first).to(torch.int64), torch.minimum(costs, others)

    def _costs(self, points: Tensor, centres: Tensor, labels: Tensor, scratch: Scratch) -> Tensor:
        """`sum |x - c|^p` with the centre of each point, `[P, n]`."""
        gaps = differences(points, centres, labels, scratch).abs_()
        return power(gaps, self.p, out=scratch.take("powers", *gaps.shape, like=gaps)).sum(dim=2)


MEDIAN = LpMetric(1.0)


def metric_for(p: float) -> Euclidean:
    """The metric of exponent p > 0: exactly the k-means one at 2 and the k-median one at 1."""
    if p == 2:
        return EUCLIDEAN
    return MEDIAN if p == 1 else LpMetric(float(p))


def zero_of_gradient(
    points: Tensor, labels: Tensor, membership: Tensor, sizes: Tensor, p: float, *, steps: int
) -> Tensor:
    """Minimise `sum_i w_i |x_i - c|^p` per cluster and coordinate for p >= 1 by bisection, `[P, k, d]`.

    The derivative `-p sum_i w_i sign(x_i - c) |x_i - c|^(p - 1)` rises with c. A bisection step is one row
    gather, one power and one matrix product. For p <= 2 the zero lies within one standard deviation of the mean
    (at p = 1 it is the median, at p = 2 the mean); for larger p the bracket is the cluster's range. Arguments are
    those of `Euclidean.update`.
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
    squares = (points - gather_rows(means, labels)).square_().sum(dim=2)
    ranked = squares.unsqueeze(1).expand_as(membership).masked_fill(membership <= 0, torch.inf)
    nearest = ranked.topk(min(_CANDIDATES, points.shape[1]), dim=2, largest=False)

    def cost(candidate: Tensor) -> Tensor:
        centres = gather_rows(gather_rows(points, candidate), labels)
        return torch.bmm(membership, power((points - centres).abs_(), p).sum(dim=2, keepdim=True)).squeeze(2)

    costs = torch.stack([cost(candidate) for candidate in nearest.indices.unbind(2)], dim=2)
    costs.masked_fill_(nearest.values.isinf(), torch.inf)
    near_best = costs <= costs.amin(dim=2, keepdim=True) * (1 + _TIE)
    chosen = nearest.indices.masked_fill(~near_best, points.shape[1]).amin(dim=2)
    return gather_rows(points, chosen.clamp(max=points.shape[1] - 1))


# The nearest centres of each point by matrix product. A reduction that returns indices runs one number at a
# time, one that returns values is vectorised. So the number of a centre takes the place of the lowest bits of
# its squared distance, read as an integer (which orders positive floats as their values do), and the smallest
# integer names the nearest centre. Distances that agree in the bits that are left (16 of 23 for 65 centres in
# float32) count as equal; among equals the lower number comes first.


def two_nearest(points: Tensor, centres: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Numbers `[P, n]` of the nearest and the second nearest of at least two centres, as a shortlist."""
    order = _order(points, centres, centres.square().sum(dim=2), scratch)
    if centres.shape[1] > MAX_PACKED_CENTRES:
        nearest = order.topk(2, dim=1, largest=False).indices
        return nearest[:, 0], nearest[:, 1]
    # the true squared distance: nonnegative, and small where the bits matter
    order.add_(torch.linalg.vecdot(points, points).unsqueeze(1))
    packed, low = _pack(order)
    first = packed.amin(dim=1, keepdim=True)
    above = first + 1
    # the winner's -1 becomes the largest integer, the others keep their order
    packed.sub_(above).bitwise_and_(torch.iinfo(packed.dtype).max)
    second = packed.amin(dim=1, keepdim=True).add_(above)
    return first.bitwise_and_(low).squeeze(1), second.bitwise_and_(low).squeeze(1)


def _order(points: Tensor, centres: Tensor, offsets: Tensor, scratch: Scratch) -> Tensor:
    """`offset - 2 x.c`, `[P, k, n]`."""
    order = scratch.take("order", len(points), centres.shape[1], points.shape[1], like=points)
    return torch.bmm(centres * -2.0, points.transpose(1, 2), out=order).add_(offsets.unsqueeze(2))


def _pack(squares: Tensor) -> tuple[Tensor, int]:
    """Squared distances `[P, k, n]` as integers whose lowest bits are the centre's number; and the bits' mask."""
    low = (1 << (squares.shape[1] - 1).bit_length()) - 1
    packed = squares.clamp_(min=0.0).view(_INTEGERS[squares.dtype])
    numbers = torch.arange(squares.shape[1], dtype=packed.dtype, device=packed.device).unsqueeze(1)
    return packed.bitwise_and_(~low).bitwise_or_(numbers), low


def power(values: Tensor, exponent: float, *, out: Tensor | None = None) -> Tensor:
    """`values ** exponent` for `values >= 0`; may overwrite `values` and `out`."""
    if exponent == 1.0:
        return values
    if exponent == 1.5:
        return torch.sqrt(values, out=out).mul_(values)
    if exponent in (0.5, 2.0, 3.0):
        return values.pow_(exponent)
    # a third of the time of pow, and 0 stays 0
    return values.log2_().mul_(exponent).exp2_()
