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
    """`[..., D]` and `directions [..., D, bits]` -> int32 `[...]`: Gray rank of the signs of the projections."""
    n_bits, vectors, directions = directions.shape[-1], vectors.detach(), directions.to(vectors.dtype)
    if directions.ndim == 2:
        # `linear` with a contiguous weight takes half the time of `@` with a few columns
        signs = torch.nn.functional.linear(vectors, directions.T.contiguous()) >= 0
    else:
        signs = vectors @ directions >= 0
    # float32 holds integers below 2^24; above that many bits the sum needs float64
    wide = torch.float32 if n_bits <= 24 else torch.float64
    powers = 2.0 ** torch.arange(n_bits, device=vectors.device, dtype=wide)
    return gray_rank((signs.to(wide) @ powers).to(torch.int32), n_bits)


def projections(n_projections: int, like: Tensor, streams: Streams) -> Tensor:
    """`[D, n_projections]` Gaussian directions, the same for every head and recursion level, as published.

    `[B, 1, D, n_projections]` where each sequence has a seed of its own.
    """
    directions = streams.row_normal("lsh", like.shape[-1], n_projections, like=like)
    return directions[:, None] if streams.rows else directions[0]
