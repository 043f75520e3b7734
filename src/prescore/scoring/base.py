"""What a scorer is."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from prescore import checks
from prescore.registry import get_scorer
from prescore.rng import Streams
from prescore.types import Values


@dataclass(frozen=True, eq=False)
class Scored:
    """Scores `[B, H, N]`, and the clusters behind them where the scorer made any.

    `labels [B, H, N]` are cluster numbers in `0..n_clusters-1`, so that attention can use the same clusters for
    centroids without clustering twice.
    """

    scores: Tensor
    labels: Tensor | None = None
    n_clusters: int = 0


class Scorer(ABC):
    """Ranks keys. Subclasses are frozen dataclasses whose fields are their hyper-parameters.

    All keys of a call come batched: no scorer may let one batch row or head influence another.
    """

    name: ClassVar[str]
    permutation_equivariant: ClassVar[bool] = True
    """Whether permuting the keys permutes the scores; False where seeding depends on positions."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Refuse a field that does not exist, with the nearest that does; `__init__` does everything else."""
        checks.known_argument(cls, given)
        return super().__new__(cls)

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

    def to_dict(self) -> Values:
        """Name and hyper-parameters in JSON values."""
        return {"name": self.name, **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}}  # type: ignore[arg-type]

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Scorer:
        """The inverse of `to_dict`; an unknown name or field is refused."""
        if "name" not in values:
            raise ValueError(f'a scorer must have a "name", got {dict(values)}')
        kind = get_scorer(values["name"])
        known = [f.name for f in dataclasses.fields(kind)]
        given = {name: value for name, value in values.items() if name != "name"}
        for name in given:
            checks.known_field(kind.__name__, name, known)
        made: Scorer = kind(**given)
        return made


def as_scorer(scorer: object) -> Scorer:
    """A scorer object as it is; a name as the object with its defaults."""
    if isinstance(scorer, Scorer):
        return scorer
    if not isinstance(scorer, str):
        got = f"{type(scorer).__name__} {scorer!r}"
        raise TypeError(f"scorer must be a name or a prescore.Scorer object, got {got}")
    made: Scorer = get_scorer(scorer)()
    return made


def with_noise(keys: Tensor, noise: float, valid: Tensor | None, streams: Streams) -> Tensor:
    """Keys `[B, H, N, D]` plus Gaussian noise of this standard deviation (Algorithm 1, line 1), 0 on padding."""
    if not noise:
        return keys
    noisy = keys + noise * streams.normal("noise", *keys.shape[2:], like=keys)
    return noisy if valid is None else noisy.masked_fill(~valid[:, None, :, None], 0.0)
