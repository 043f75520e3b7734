"""How little a key resembles the average key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.registry import register_scorer
from prescore.rng import Streams
from prescore.scoring.base import Scorer


@register_scorer("key-diff")
@dataclass(frozen=True)
class KeyDiff(Scorer):
    """`-cos(k_i, m)` with m the mean of the normalised real keys; a zero key or mean has cosine 0."""

    def score(self, keys: Tensor, *, valid: Tensor | None, streams: Streams) -> Tensor:
        """Score keys, see `Scorer.score`."""
        tiny = torch.finfo(keys.dtype).tiny
        lengths = torch.linalg.vector_norm(keys, dim=-1)
        inverse = torch.where(lengths > 0, lengths.clamp(min=tiny).reciprocal(), 0.0)
        weights = inverse if valid is None else inverse * valid.unsqueeze(1)
        # the mean as a matrix product: no normalised copy of the keys; its length cancels in the cosine
        total = torch.matmul(weights.unsqueeze(2), keys)
        direction = torch.nn.functional.normalize(total, dim=-1, eps=tiny)
        return -torch.matmul(keys, direction.transpose(2, 3)).squeeze(3) * inverse
