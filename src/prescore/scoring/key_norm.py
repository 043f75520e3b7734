"""The length of a key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.registry import register_scorer
from prescore.rng import Streams
from prescore.scoring.base import Scorer


@register_scorer("key-norm")
@dataclass(frozen=True)
class KeyNorm(Scorer):
    """`|k_i|`, what the published code computes under the name of leverage (up to a rotation and a square)."""

    def score(self, keys: Tensor, *, valid: Tensor | None, streams: Streams) -> Tensor:
        """Score keys, see `Scorer.score`."""
        lengths: Tensor = torch.linalg.vector_norm(keys, dim=-1)
        return lengths
