"""How little a key resembles the average key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.registry import register_scorer
from prescore.rng import Streams
from prescore.scoring.base import KeyShard, Scorer


@register_scorer("key-diff")
@dataclass(frozen=True)
class KeyDiff(Scorer):
    """`-cos(k_i, m)` with m the mean of the normalised real keys; a zero key or mean has cosine 0."""

    def score(self, keys: Tensor, *, valid: Tensor | None, streams: Streams) -> Tensor:
        """Score keys, see `Scorer.score`."""
        inverse = _inverse_norms(keys)
        return _difference(keys, inverse, _sum_of_directions(keys, inverse))

    def stats(self, shard: KeyShard) -> Tensor:
        """The sum of the normalised keys, `[B, H, D]`."""
        return _sum_of_directions(shard.keys, _inverse_norms(shard.keys))

    def score_from(self, stats: Sequence[Tensor], shard: KeyShard) -> Tensor:
        """Score the keys of a shard, see `Scorer.score_from`."""
        # added in order of position, so that all ranks get the same bits
        return _difference(shard.keys, _inverse_norms(shard.keys), sum(stats[1:], start=stats[0]))


def _inverse_norms(keys: Tensor) -> Tensor:
    """`1 / |k_i|`, 0 for zero keys, which padding is."""
    lengths = torch.linalg.vector_norm(keys, dim=-1)
    return torch.where(lengths > 0, lengths.clamp(min=torch.finfo(keys.dtype).tiny).reciprocal(), 0.0)


def _sum_of_directions(keys: Tensor, inverse: Tensor) -> Tensor:
    # a matrix product needs no normalised copy of the keys
    return torch.matmul(inverse.unsqueeze(2), keys).squeeze(2)


def _difference(keys: Tensor, inverse: Tensor, total: Tensor) -> Tensor:
    """`-cos(k_i, m)`; the length of the sum cancels."""
    direction = torch.nn.functional.normalize(total, dim=-1, eps=torch.finfo(total.dtype).tiny)
    return -torch.matmul(keys, direction.unsqueeze(2).transpose(2, 3)).squeeze(3) * inverse
