"""The length of a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.registry import register_scorer
from prescore.rng import Streams
from prescore.scoring.base import KeyShard, Scorer


@register_scorer("key-norm")
@dataclass(frozen=True)
class KeyNorm(Scorer):
    """`|k_i|`. The published code computes its square, after a rotation, under the name of leverage."""

    def score(self, keys: Tensor, *, valid: Tensor | None, streams: Streams) -> Tensor:
        """Score keys, see `Scorer.score`."""
        lengths: Tensor = torch.linalg.vector_norm(keys, dim=-1)
        return lengths

    def stats(self, shard: KeyShard) -> Tensor:
        """Empty: no key needs another."""
        return shard.keys.new_zeros(*shard.keys.shape[:2], 0)

    def score_from(self, stats: Sequence[Tensor], shard: KeyShard) -> Tensor:
        """Score the keys of a shard, see `Scorer.score_from`."""
        return self.score(shard.keys, valid=None, streams=shard.streams)
