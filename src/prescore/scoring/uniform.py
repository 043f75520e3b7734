"""The random baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from prescore.registry import register_scorer
from prescore.rng import Streams
from prescore.scoring.base import KeyShard, Scorer


@register_scorer("uniform")
@dataclass(frozen=True)
class Uniform(Scorer):
    """Uniform random scores, other ones in every head; a function of position only."""

    permutation_equivariant: ClassVar[bool] = False

    def score(self, keys: Tensor, *, valid: Tensor | None, streams: Streams) -> Tensor:
        """Score keys, see `Scorer.score`."""
        return self.score_from([], KeyShard(keys, 0, keys.shape[2], keys.dtype, streams))

    def stats(self, shard: KeyShard) -> Tensor:
        """Empty: scores do not depend on keys."""
        return shard.keys.new_zeros(*shard.keys.shape[:2], 0)

    def score_from(self, stats: Sequence[Tensor], shard: KeyShard) -> Tensor:
        """Score the keys of a shard, see `Scorer.score_from`."""
        draws = shard.streams.head_uniform("uniform", shard.n_keys, like=shard.keys).to(shard.keys.dtype)
        return draws[:, :, shard.positions].contiguous()
