"""Angular LSH whose buckets are ordered so that neighbours differ in one bit."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.rng import Streams


def gray_rank(code: Tensor, n_bits: int) -> Tensor:
    """Position of a bit pattern in the reflected Gray sequence: the inverse of `rank ^ (rank >> 1)`.

    Sorting by the rank puts patterns that differ in one bit side by side; sorting by the pattern would not.
    """
    shift = 1
    while shift < n_bits:
        code = code ^ (code >> shift)
        shift *= 2
    return code


def hash_ranks(vectors: Tensor, directions: Tensor) -> Tensor:
    """`[..., D]` and `directions [D, bits]` -> int32 `[...]`: Gray rank of the signs of the projections."""
    n_bits = directions.shape[1]
    # `linear` with a contiguous weight takes half the time of `@` with a few columns
    weight = directions.T.contiguous().to(vectors.dtype)
    signs = torch.nn.functional.linear(vectors.detach(), weight) >= 0
    # float32 holds integers below 2^24; above that many bits the sum needs float64
    wide = torch.float32 if n_bits <= 24 else torch.float64
    powers = 2.0 ** torch.arange(n_bits, device=vectors.device, dtype=wide)
    return gray_rank((signs.to(wide) @ powers).to(torch.int32), n_bits)


def projections(n_projections: int, like: Tensor, streams: Streams) -> Tensor:
    """`[D, n_projections]` Gaussian directions, the same for every sequence, head and recursion level."""
    return streams.normal("lsh", like.shape[-1], n_projections, like=like)
