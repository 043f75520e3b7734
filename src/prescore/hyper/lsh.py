"""sortLSH: the random directions of a call, and where they put the zero vector."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.clustering.hashing import gray_rank
from prescore.rng import Streams


def projections(n_projections: int, like: Tensor, streams: Streams) -> Tensor:
    """`[D, n_projections]` Gaussian directions, the same for every row, head and recursion level."""
    return streams.normal("lsh", like.shape[-1], n_projections, like=like)


def zero_rank(n_bits: int) -> int:
    """The rank of the zero vector, whose projections all count as non-negative."""
    return int(gray_rank(torch.tensor(2**n_bits - 1), n_bits))
