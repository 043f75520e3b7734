"""The random baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from prescore.registry import register_scorer
from prescore.rng import Streams
from prescore.scoring.base import Scorer


@register_scorer("uniform")
@dataclass(frozen=True)
class Uniform(Scorer):
    """Uniform random scores, a function of position only: the same for all rows and heads."""

    permutation_equivariant: ClassVar[bool] = False

    def score(self, keys: Tensor, *, valid: Tensor | None, streams: Streams) -> Tensor:
        """Score keys, see `Scorer.score`."""
        draws = streams.uniform("uniform", keys.shape[2], like=keys).to(keys.dtype)
        return draws.expand(keys.shape[:3]).contiguous()
