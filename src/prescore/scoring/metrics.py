"""Metrics of the Lloyd loop: nearest centres, distances, and the centre of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from prescore.scoring.sampling import arange, gather_rows

# Bisection steps before the last iteration and in it; the bracket is wider above p = 2. Ten halvings of a standard
# deviation change a cluster's cost by less than 1e-6 of itself.
_STEPS, _STEPS_WIDE = (3, 10), (5, 12)
_EXACT_ELEMENTS = 2**20
# a table of points by centres is made in blocks that stay in the cache
_TABLE_ELEMENTS = 2**18
_SUMMED_ROWS = 8192


class Euclidean:
    """Least squares: `d(x, c) = |x - c|`, and the centre of a cluster is its mean. Other metrics derive from it.

    All methods take `points [P, n, d]`, `centres [P, k, d]`, and `weights [P, n]`, where None = all ones.
    """

    p: float = 2.0
    """`d(x, c) = (sum_j |x_j - c_j|^p)^(1/p)`; a cluster's centre minimises its sum of `d^p`."""
    shortlists: ClassVar[bool] = False
    """Whether `nearest` has a cheaper form that compares a shortlist of centres only."""
    opening: ClassVar[Euclidean | None] = None
    """A cheaper metric for the first half of the Lloyd iterations, which only bring the centres near."""

    def labels(self, points: Tensor, centres: Tensor) -> Tensor:
        """Nearest centre of each point inside the Lloyd loop, `[P, n]`."""
        return torch.cat([nearest_columns(table) for table in distance_tables(points, centres)], dim=1)

    def nearest(self, points: Tensor, centres: Tensor, *, exact: bool) -> tuple[Tensor, Tensor]:
        """Nearest centre and distance of a block of points in the final pass, `[P, n]` each.

        With `exact=False` a metric with `shortlists` compares a shortlist of centres only.
        """
        labels = self.labels(points, centres)
        return labels, self.distances(points, centres, labels)

    def distances(self, points: Tensor, centres: Tensor, labels: Tensor) -> Tensor:
        """Distance of each point to the centre of its label, `[P, n]`."""
        # |x|^2 + |c|^2 - 2 x.c would lose the small distances to rounding
        distances: Tensor = torch.linalg.vector_norm(gather_rows(centres, labels).sub_(points), dim=2)
        return distances

    def update(
        self, points: Tensor, labels: Tensor, weights: Tensor | None, sizes: Tensor, *, final: bool
    ) -> Tensor:
        """The centre of each cluster, `[P, k, d]`; anything where a cluster is empty.

        `sizes [P, k]` are the weights of the clusters, made positive where one is empty. Before the `final`
        iteration a coarse solution is enough.
        """
        return sum_clusters(points, labels, weights, sizes.shape[1]).div_(sizes.unsqueeze(2))


EUCLIDEAN = Euclidean()


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

    def labels(self, points: Tensor, centres: Tensor) -> Tensor:
        """Exact among the centres that are nearest in the Euclidean metric."""
        return self._shortlisted(points, centres)[0]

    def nearest(self, points: Tensor, centres: Tensor, *, exact: bool) -> tuple[Tensor, Tensor]:
        """Over all centres if `exact`, else over a shortlist of two."""
        if not exact:
            labels, costs = self._shortlisted(points, centres)
            return labels, power(costs, 1.0 / self.p)
        if self.p == 1.0:
            nearest = torch.cdist(points, centres, p=1.0).min(dim=2)
            return nearest.indices, nearest.values
        step = max(1, _EXACT_ELEMENTS // max(1, len(points) * centres.shape[1] * centres.shape[2]))
        blocks = [self._compared(block, centres.unsqueeze(1)) for block in torch.split(points, step, dim=1)]
        labels = torch.cat([block[0] for block in blocks], dim=1)
        return labels, power(torch.cat([block[1] for block in blocks], dim=1), 1.0 / self.p)

    def distances(self, points: Tensor, centres: Tensor, labels: Tensor) -> Tensor:
        """`(sum |x - c|^p)^(1/p)`."""
        return power(self._costs(points, centres, labels), 1.0 / self.p)

    def update(
        self, points: Tensor, labels: Tensor, weights: Tensor | None, sizes: Tensor, *, final: bool
    ) -> Tensor:
        """The minimiser for p >= 1; the coordinate median for p < 1, where the cost is not convex.

        Below 1 the cost has many minima, and the median costs within 0.1 % of the best of them.
        """
        coarse, fine = _STEPS if self.p <= 2.0 else _STEPS_WIDE
        return zero_of_gradient(points, labels, weights, sizes, max(1.0, self.p), steps=fine if final else coarse)

    def _compared(self, points: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
        """Nearest of all centres `[P, 1, k, d]` of each point, and the cost `sum |x - c|^p`."""
        costs = power((points.unsqueeze(2) - centres).abs_(), self.p).sum(dim=3)
        nearest = costs.min(dim=2)
        return nearest.indices, nearest.values

    def _shortlisted(self, points: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
        if centres.shape[1] <= 2:
            return self._compared(points, centres.unsqueeze(1))
        first, second = two_nearest(points, centres)
        costs, others = (self._costs(points, centres, labels) for labels in (first, second))
        return torch.where(others < costs, second, first), torch.minimum(costs, others)

    def _costs(self, points: Tensor, centres: Tensor, labels: Tensor) -> Tensor:
        """`sum |x - c|^p` with the centre of each point, `[P, n]`."""
        return power(gather_rows(centres, labels).sub_(points).abs_(), self.p).sum(dim=2)


MEDIAN = LpMetric(1.0)


def metric_for(p: float) -> Euclidean:
    """The metric of exponent p > 0: exactly the k-means one at 2 and the k-median one at 1."""
    if p == 2:
        return EUCLIDEAN
    return MEDIAN if p == 1 else LpMetric(float(p))


def zero_of_gradient(
    points: Tensor, labels: Tensor, weights: Tensor | None, sizes: Tensor, p: float, *, steps: int
) -> Tensor:
    """Minimise `sum_i w_i |x_i - c|^p` per cluster and coordinate for p >= 1 by bisection, `[P, k, d]`.

    The derivative `-p sum_i w_i sign(x_i - c) |x_i - c|^(p - 1)` rises with c. A bisection step is one row
    gather, one power and one sum over clusters. For p <= 2 the zero lies within one standard deviation of the mean
    (at p = 1 it is the median, at p = 2 the mean); for larger p the bracket is the cluster's range. Arguments are
    those of `Euclidean.update`.
    """
    totals, n_clusters = sizes.unsqueeze(2), sizes.shape[1]
    means = sum_clusters(points, labels, weights, n_clusters) / totals
    deviations = points - gather_rows(means, labels)
    if p <= 2.0:
        half_width = (sum_clusters(deviations.square(), labels, weights, n_clusters) / totals).sqrt_()
    else:
        # the l_inf radius of each cluster in each coordinate is at most its l_6 norm
        half_width = sum_clusters(deviations.abs().pow_(6.0), labels, weights, n_clusters).pow_(1.0 / 6.0)
    # offsets from the mean, not absolute positions: digits are spent on the difference
    middle = torch.zeros_like(means)
    for _ in range(steps):
        residuals = deviations - gather_rows(middle, labels)
        pull = torch.sign(residuals)
        if p != 1.0:
            pull = pull.mul_(power(residuals.abs_(), p - 1.0))
        half_width = half_width * 0.5
        middle = middle + torch.sign(sum_clusters(pull, labels, weights, n_clusters)) * half_width
    return means + middle


def sum_clusters(values: Tensor, labels: Tensor, weights: Tensor | None, n_clusters: int) -> Tensor:
    """Weighted sums of `values [P, n, d]` over the clusters of `labels [P, n]`: `[P, n_clusters, d]`."""
    if weights is not None:
        values = values * weights.unsqueeze(2)
    if values.device.type != "cpu":  # atomic additions would round in another order at every call
        numbers, sums = arange(n_clusters, like=labels).unsqueeze(1), values.new_zeros(len(values), n_clusters, 1)
        for label, value in zip(labels.split(_SUMMED_ROWS, dim=1), values.split(_SUMMED_ROWS, dim=1), strict=True):
            sums = sums + torch.bmm((label.unsqueeze(1) == numbers).to(value.dtype), value)
        return sums
    n_problems, _, dim = values.shape
    rows = labels + arange(n_problems, like=labels).unsqueeze(1) * n_clusters
    sums = values.new_zeros(n_problems * n_clusters, dim)
    return sums.index_add_(0, rows.reshape(-1), values.reshape(-1, dim)).view(n_problems, n_clusters, dim)


def two_nearest(points: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers `[P, n]` of the nearest and the second nearest of at least two centres."""
    pairs = []
    for table in distance_tables(points, centres):
        first = nearest_columns(table)
        table.scatter_(1, first.unsqueeze(1), torch.inf)
        pairs.append((first, nearest_columns(table)))
    first, second = (torch.cat(numbers, dim=1) for numbers in zip(*pairs, strict=True))
    return first, second


def distance_tables(points: Tensor, centres: Tensor) -> Iterator[Tensor]:
    """`|c|^2 - 2 x.c`, which orders centres as the distance does, in blocks `[P, k, m]` of the points."""
    doubled, squares = centres * -2.0, centres.square().sum(dim=2, keepdim=True)
    step = max(256, _TABLE_ELEMENTS // max(1, squares.numel()))
    for block in torch.split(points, step, dim=1):
        # baddbmm would first write the squares to every entry of the result
        yield torch.bmm(doubled, block.transpose(1, 2)).add_(squares)


def nearest_columns(table: Tensor) -> Tensor:
    """`[P, m]`: which entry of each column of `table [P, k, m]` is the smallest; the first of equals."""
    if table.device.type != "cpu":
        return table.argmin(dim=1)
    # a reduction that returns positions runs one number at a time; one that returns values is vectorised, and so
    # is a comparison that writes floats
    hits = torch.eq(table, table.amin(dim=1, keepdim=True), out=torch.empty_like(table))
    numbers = torch.arange(table.shape[1], dtype=table.dtype, device=table.device)
    label, count = torch.matmul(torch.stack((numbers, torch.ones_like(numbers))), hits).unbind(1)
    labels, tied = label.to(torch.int64), count != 1
    if bool(tied.any()):  # equal distances, of candidates drawn twice or of equal keys
        labels[tied] = table.transpose(1, 2)[tied].min(dim=1).indices
    return labels


def power(values: Tensor, exponent: float) -> Tensor:
    """`values ** exponent` for `values >= 0`; may overwrite `values`."""
    if exponent == 1.0:
        return values
    if exponent == 1.5:
        return torch.sqrt(values).mul_(values)
    if exponent in (0.5, 2.0, 3.0):
        return values.pow_(exponent)
    # a third of the time of pow, and 0 stays 0
    return values.log2_().mul_(exponent).exp2_()
