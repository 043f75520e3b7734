"""The nearest centres of each point by matrix product, without a reduction that returns indices.

Such a reduction runs one number at a time; one that returns values is vectorised. So the number of a centre takes
the place of the lowest bits of its squared distance, read as an integer (which orders positive floats as their
values do), and the smallest integer names the nearest centre. Distances that agree in the bits that are left (16
of 23 for 65 centres in float32) count as equal; among equals the lower number comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.clustering.scratch import Scratch

MOST_CENTRES = 1024
"""With more centres too few bits of the distance would be left."""
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def two_nearest(points: Tensor, centres: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Numbers of the nearest and the second nearest centre of each point, as a shortlist for other metrics.

    Args:
        points: `[P, n, d]`, float32 or float64.
        centres: `[P, k, d]`, k at least 2.
        scratch: Buffers to reuse.

    Returns:
        Two `[P, n]` of integers.
    """
    order = _order(points, centres, centres.square().sum(dim=2), scratch)
    if centres.shape[1] > MOST_CENTRES:
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


def nearest_on_sphere(points: Tensor, centres: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Number of the nearest centre of each point of length 1, and the distance to it, both from the packed bits.

    A squared distance is good to 2^-16 of itself (for at most 128 centres in float32) and to a few 2^-23.
    """
    order = _order(points, centres, centres.square().sum(dim=2).add_(1.0), scratch)
    packed, low = _pack(order)
    first = packed.amin(dim=1)
    labels = (first & low).to(torch.int64)
    return labels, first.bitwise_and_(~low).view(points.dtype).sqrt()


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
