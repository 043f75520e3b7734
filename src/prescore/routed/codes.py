"""Keys in four bits, queries in six: logits that are good enough to say which keys to read.

What is coded is how a key differs from the mean of its node, whose logit is known: that is a bit more than the key
itself would give. It is cut into two halves of its dimensions, each with a scale of its own, and its numbers
become whole numbers from -7 to 7; a query has one scale and numbers from -31 to 31. Sums of their products are
exact in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

UNIT = 16
"""Dimensions are filled up with zeros to a multiple of this, so that both halves are whole bytes in any layout."""


LARGEST = 7.49
"""What the largest number of a half becomes: rounded to 7 or -7 on every machine, where 7.5 would be a tie."""


class Codes(NamedTuple):
    """Keys as whole numbers.

    Attributes:
        packed: `[..., D' / 2]` uint8, the number of dimension i plus 8 in the low half of byte i, that of
            dimension `i + D' / 2` in the high half.
        scales: `[..., 2]` what a unit of each half is worth.
    """

    packed: Tensor
    scales: Tensor


def encode_keys(keys: Tensor) -> Codes:
    """Codes of keys `[..., D]`."""
    halves = pad(keys, (0, -keys.shape[-1] % UNIT)).unflatten(-1, (2, -1))
    scales = halves.abs().amax(-1) / LARGEST
    numbers = (halves / scales.clamp_min(torch.finfo(keys.dtype).tiny)[..., None]).round().clamp(-8, 7)
    numbers = numbers.add_(8).to(torch.uint8)
    return Codes(numbers[..., 0, :] | (numbers[..., 1, :] << 4), scales)


def encode_queries(queries: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers `[..., 2, D' / 2]`, in the queries' dtype, and what a unit is worth, `[..., 1]`."""
    halves = pad(queries, (0, -queries.shape[-1] % UNIT)).unflatten(-1, (2, -1))
    scale = halves.abs().amax((-1, -2)).clamp_min(1e-30)[..., None] / 31
    return (halves / scale[..., None]).round(), scale


def coded_logits(queries: Tensor, codes: Codes, margin: float = 0.0) -> Tensor:
    """`[t, D]` and codes of `[n]` keys -> approximate logits `[t, n]`.

    They are lifted by `margin` deviations of their own error: a key's number is off by a uniform part of a unit.
    """
    asked, scale = encode_queries(queries)
    low, high = (codes.packed & 15), (codes.packed >> 4)
    sums = [
        half @ (part.to(queries.dtype) - 8).t() for half, part in zip(asked.unbind(-2), (low, high), strict=True)
    ]
    first, second = codes.scales.to(queries.dtype).unbind(-1)
    if margin:
        halves = pad(queries, (0, -queries.shape[-1] % UNIT)).unflatten(-1, (2, -1))
        lift = torch.linalg.vector_norm(halves, dim=-1) * (margin / 12**0.5) / scale
        sums = [part + own[:, None] for part, own in zip(sums, lift.unbind(-1), strict=True)]
    return scale * (first * sums[0] + second * sums[1])
