"""What a scorer is."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from prescore.rng import Streams

ScorerT = TypeVar("ScorerT", bound="Scorer")


@dataclass(frozen=True, eq=False)
class Scored:
    """Scores `[B, H, N]`, and the clusters behind them where the scorer made any.

    `labels [B, H, N]` are cluster numbers in `0..n_clusters-1`, so that attention can use the same clusters for
    stand-ins without clustering twice.
    """

    scores: Tensor
    labels: Tensor | None = None
    n_clusters: int = 0


class Scorer(ABC):
    """Ranks keys. Subclasses are frozen dataclasses whose fields are their hyper-parameters.

    Fields named like a `PrescoreConfig` field are filled from the configuration. All keys of a call come
    batched: no scorer may let one batch row or head influence another.
    """

    name: ClassVar[str]
    normalizes: ClassVar[bool] = False
    """Whether keys are l2-normalised before scoring when the configuration does not say (`normalize=None`)."""
    permutation_equivariant: ClassVar[bool] = True
    """Whether permuting the keys permutes the scores; False where seeding depends on positions."""

    @abstractmethod
    def score(self, keys: Tensor, *, valid: Tensor | None, streams: Streams) -> Tensor | Scored:
        """Score keys.

        Args:
            keys: `[B, H, N, D]`, float32 or float64, finite, zero where not valid.
            valid: `[B, N]` bool, True = a real key; None = all are.
            streams: Randomness; draw with `streams.uniform(name, size, like=keys)`, never per row or head.

        Returns:
            `[B, H, N]`, higher = kept. Values at positions that are not valid are ignored.
        """

    @classmethod
    def from_config(cls: type[ScorerT], config: Any) -> ScorerT:
        """Build the scorer from the configuration fields it shares a name with."""
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        return cls(**{f.name: getattr(config, f.name) for f in fields if hasattr(config, f.name)})
