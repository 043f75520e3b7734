"""What a metric must give to the Lloyd loop: nearest centre, distance, and the centre of a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from prescore.clustering.sampling import gather_rows
from prescore.clustering.scratch import Scratch


class Metric(ABC):
    """`d(x, c) = (sum_j |x_j - c_j|^p)^(1/p)`; a cluster's centre minimises its sum of `d^p`."""

    p: float
    shortlists: ClassVar[bool]
    """Whether `nearest` has a cheaper form that compares a shortlist of centres only."""
    samples_per_cluster: ClassVar[int]
    """Points per cluster that a fit on a sample looks at."""
    opening: ClassVar[Metric | None] = None
    """A cheaper metric for the first half of the Lloyd iterations, which only bring the centres near."""

    @abstractmethod
    def labels(self, points: Tensor, centres: Tensor, scratch: Scratch) -> Tensor:
        """Nearest centre of each point inside the Lloyd loop, `[P, n]` from `[P, n, d]` and `[P, k, d]`."""

    def membership(
        self, points: Tensor, weights: Tensor, centres: Tensor, scratch: Scratch
    ) -> tuple[Tensor, Tensor | None]:
        """`[P, k, n]`: the weight of a point in its cluster's row, zero elsewhere; and the labels if known."""
        labels = self.labels(points, centres, scratch)
        clusters = torch.arange(centres.shape[1], device=labels.device).unsqueeze(1)
        hot = (labels.unsqueeze(1) == clusters).to(weights.dtype)
        return hot.mul_(weights.unsqueeze(1)), labels

    @abstractmethod
    def nearest(self, points: Tensor, centres: Tensor, scratch: Scratch, *, exact: bool) -> tuple[Tensor, Tensor]:
        """Nearest centre and distance for a block of points, `[P, n]` each, in the final pass.

        With `exact=False` a metric that has no matrix-product form may compare a shortlist of centres only.
        """

    @abstractmethod
    def distances(self, points: Tensor, centres: Tensor, labels: Tensor, scratch: Scratch) -> Tensor:
        """Distance of each point to its own centre, `[P, n]`."""

    @abstractmethod
    def update(
        self, points: Tensor, labels: Tensor | None, membership: Tensor, sizes: Tensor, *, final: bool
    ) -> Tensor:
        """The centre of each cluster, `[P, k, d]`; anything where a cluster is empty.

        Args:
            points: `[P, n, d]`.
            labels: `[P, n]`, or None where `membership` came without them.
            membership: `[P, k, n]`, the weight of a point in its own cluster's row, zero elsewhere.
            sizes: `[P, k]`, row sums of `membership`, made positive where a cluster is empty.
            final: Solve finely; before the last iteration a coarse solution is enough.
        """


class Euclidean(Metric):
    """Least squares: the centre is the mean."""

    p = 2.0
    shortlists = False
    samples_per_cluster = 32

    def labels(self, points: Tensor, centres: Tensor, scratch: Scratch) -> Tensor:
        """By matrix product: `|c|^2 - 2 x.c` orders centres as the squared distance does."""
        order = scratch.take("order", *points.shape[:2], centres.shape[1], like=points)
        # not baddbmm, which first writes the squares to every entry of the result
        torch.bmm(points, (centres * -2.0).transpose(1, 2), out=order)
        return order.add_(centres.square().sum(dim=2).unsqueeze(1)).min(dim=2).indices

    def nearest(self, points: Tensor, centres: Tensor, scratch: Scratch, *, exact: bool) -> tuple[Tensor, Tensor]:
        """By matrix product, always exact."""
        labels = self.labels(points, centres, scratch)
        return labels, self.distances(points, centres, labels, scratch)

    def distances(self, points: Tensor, centres: Tensor, labels: Tensor, scratch: Scratch) -> Tensor:
        """From the difference itself: `|x|^2 + |c|^2 - 2 x.c` would lose the small distances to rounding."""
        distances: Tensor = torch.linalg.vector_norm(differences(points, centres, labels, scratch), dim=2)
        return distances

    def membership(
        self, points: Tensor, weights: Tensor, centres: Tensor, scratch: Scratch
    ) -> tuple[Tensor, Tensor | None]:
        """Where the matrix product attains its minimum: a reduction without indices is faster than one with."""
        order = scratch.take("order", len(points), centres.shape[1], points.shape[1], like=points)
        torch.bmm(centres * -2.0, points.transpose(1, 2), out=order).add_(centres.square().sum(2, keepdim=True))
        nearest = order == order.amin(dim=1, keepdim=True)
        if int(nearest.count_nonzero()) > points.shape[0] * points.shape[1]:
            # equal distances: the first centre takes all
            return super().membership(points, weights, centres, scratch)
        return nearest.to(weights.dtype).mul_(weights.unsqueeze(1)), None

    def update(
        self, points: Tensor, labels: Tensor | None, membership: Tensor, sizes: Tensor, *, final: bool
    ) -> Tensor:
        """Weighted means by one matrix product."""
        return torch.bmm(membership, points) / sizes.unsqueeze(2)


def differences(points: Tensor, centres: Tensor, labels: Tensor, scratch: Scratch) -> Tensor:
    """`c - x` with the centre of each point, `[P, n, d]` in scratch memory."""
    buffer = scratch.take("differences", *points.shape, like=points)
    return gather_rows(centres, labels, out=buffer).sub_(points)
