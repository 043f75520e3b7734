"""What a scorer is, and the one place where its result is checked."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from prescore import checks
from prescore.registry import get_scorer
from prescore.rng import Streams
from prescore.types import Values


@dataclass(frozen=True, eq=False)
class Scored:
    """Scores `[B, H, N]`, and the clusters they were made from, if any.

    `labels [B, H, N]` are cluster numbers in `0..n_clusters-1`. Attention uses them for centroids, so that nothing
    is clustered twice.
    """

    scores: Tensor
    labels: Tensor | None = None
    n_clusters: int = 0


@dataclass(frozen=True, eq=False)
class KeyShard:
    """Consecutive keys of a longer sequence, as one rank of several holds them.

    Attributes:
        keys: `[B, H, n, D]`, float32 or float64, finite, without padding.
        begin: Position of the first of them.
        n_keys: Keys of the full sequence.
        dtype: Of the caller's keys. Statistics that are keys can be sent in it without loss.
        streams: Randomness, the same on every rank.
    """

    keys: Tensor
    begin: int
    n_keys: int
    dtype: torch.dtype
    streams: Streams

    @property
    def positions(self) -> slice:
        """Where the keys stand in the full sequence."""
        return slice(self.begin, self.begin + self.keys.shape[2])


class Scorer(ABC):
    """Ranks keys. Subclasses are frozen dataclasses whose fields are their hyper-parameters.

    All keys of a call come batched: no scorer may let one sequence or head influence another.

    Context parallel: a scorer that implements `stats` and `score_from` scores keys where they are. Any other
    scorer gets all keys of a head on one rank.
    """

    name: ClassVar[str]
    permutation_equivariant: ClassVar[bool] = True
    """Whether permuting the keys permutes the scores; False where seeding depends on positions."""
    makes_clusters: ClassVar[bool] = False
    """Whether its clusters may carry centroids, as those of a `ClusteringScorer`."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Refuse an unknown field and name the nearest known one; `__init__` does everything else."""
        checks.known_argument(cls, given)
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Drop inherited statistics where a subclass overrides `score` alone: they belong to another score."""
        super().__init_subclass__(**kwargs)
        if "score" in vars(cls) and "score_from" not in vars(cls):
            cls.stats = Scorer.stats  # type: ignore[method-assign]

    @abstractmethod
    def score(self, keys: Tensor, *, valid: Tensor | None, streams: Streams) -> Tensor | Scored:
        """Score keys.

        Args:
            keys: `[B, H, N, D]`, float32 or float64, finite, zero where not valid.
            valid: `[B, N]` bool, True = a real key; None = all are.
            streams: Randomness; `streams.head_uniform(name, size, like=keys)` draws for each sequence and head.

        Returns:
            `[B, H, N]` in the keys' dtype, finite, higher = kept. Values of padding are ignored.
        """

    def stats(self, shard: KeyShard) -> Tensor | None:
        """The statistics `[B, H, size]` that all ranks need of this shard; None = the scorer needs all keys.

        Shape and dtype must depend only on position and length, so that ranks can compute them with an empty
        batch. With statistics, only a `ClusteringScorer` may return labels.
        """
        return None

    def score_from(self, stats: Sequence[Tensor], shard: KeyShard) -> Tensor | Scored:
        """Score the keys of a shard from the statistics of all shards, which come in order of position."""
        raise NotImplementedError(f"{type(self).__name__} has no statistics")

    def to_dict(self) -> Values:
        """Name and hyper-parameters in JSON values."""
        return {"name": self.name, **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}}  # type: ignore[arg-type]

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Scorer:
        """The inverse of `to_dict`; an unknown name or field is refused."""
        if "name" not in values:
            raise ValueError(f'a scorer must have a "name", got {dict(values)}')
        kind = get_scorer(values["name"])
        given = {name: value for name, value in values.items() if name != "name"}
        for name in given:
            checks.known_field(kind.__name__, name, [f.name for f in dataclasses.fields(kind)])
        made: Scorer = kind(**given)
        return made


def as_scorer(scorer: object) -> Scorer:
    """A scorer object as it is; a name as the object with its defaults."""
    if isinstance(scorer, Scorer):
        return scorer
    if not isinstance(scorer, str):
        got = f"{type(scorer).__name__} {checks.shown(scorer)}"
        raise TypeError(f"scorer must be a name or a prescore.Scorer object, got {got}")
    made: Scorer = get_scorer(scorer)()
    return made


def checked_scores(result: Any, scorer: Scorer, keys: Tensor, valid: Tensor | None) -> Scored:
    """The result of a scorer, -inf where not valid; refuses what breaks the rules of `Scorer.score`.

    Numbers are checked on CPUs only: elsewhere the host would wait for them.
    """
    scored = result if isinstance(result, Scored) else Scored(result)
    owner, shape = type(scorer).__name__, tuple(keys.shape[:3])
    tensors = {"scores": (scored.scores, keys.dtype), "labels": (scored.labels, torch.int64)}
    for name, (given, dtype) in tensors.items():
        if name == "labels" and given is None:
            continue
        tensor = checks.dense(f"{name} of {owner}", given)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} of {owner} must have shape {shape}, got {tuple(tensor.shape)}")
        if tensor.dtype != dtype:
            raise TypeError(f"{name} of {owner} must be {dtype}, got {tensor.dtype}")
    scores, labels = scored.scores, scored.labels
    padding = None if valid is None else ~valid.unsqueeze(1)
    on_cpu = scores.device.type == "cpu"
    if on_cpu and scores.numel():
        real = scores if padding is None else scores.masked_fill(padding, 0.0)
        if not all(math.isfinite(bound) for bound in torch.aminmax(real)):
            index = tuple((~torch.isfinite(real)).nonzero()[0].tolist())
            raise ValueError(f"scores of {owner} must be finite, got {real[index].item()} at {index}")
    if on_cpu and labels is not None and labels.numel():
        low, high = torch.aminmax(labels if padding is None else labels.masked_fill(padding, 0))
        if low < 0 or high >= scored.n_clusters:
            wrong = int(low if low < 0 else high)
            raise ValueError(f"labels of {owner} must be in 0..{scored.n_clusters - 1}, got {wrong}")
    if padding is None:
        return scored
    return Scored(scores.masked_fill(padding, -torch.inf), labels, scored.n_clusters)


def with_noise(
    keys: Tensor, noise: float, streams: Streams, *, valid: Tensor | None = None, shard: KeyShard | None = None
) -> Tensor:
    """Keys `[B, H, N, D]` plus Gaussian noise of this standard deviation (Algorithm 1, line 1), 0 on padding."""
    if not noise or not keys.numel():
        return keys
    n_keys, positions = (keys.shape[2], slice(None)) if shard is None else (shard.n_keys, shard.positions)
    noisy = keys + noise * streams.head_normal("noise", n_keys, keys.shape[3], like=keys)[:, :, positions]
    return noisy if valid is None else noisy.masked_fill(~valid[:, None, :, None], 0.0)
