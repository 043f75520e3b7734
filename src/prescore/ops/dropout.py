"""Dropout of attention weights: which weights are dropped is drawn again wherever it is needed, never stored.

With weights `w` normalised over all counted keys, the output is `sum_j m_j w_j v_j`, where `m_j` is 0 with
probability p and `1 / (1 - p)` otherwise; the log-sum-exp stays that of all keys. Every operator call has a
place, a name of its own below the call's seed, so the backward pass draws what the forward pass drew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.rng import Streams


@dataclass(frozen=True)
class Dropout:
    """What an operator call drops.

    Attributes:
        p: Probability of dropping a weight.
        streams: Where the draws come from.
    """

    p: float
    streams: Streams

    def at(self, place: str) -> Dropout:
        """Independent draws for a part of the work."""
        return Dropout(self.p, self.streams.child(place))

    def factors(self, size: tuple[int, ...], like: Tensor) -> Tensor:
        """0 or `1 / (1 - p)`, the same at every call; drawn on `like`'s device, whatever its dtype."""
        generator = torch.Generator(like.device)
        generator.manual_seed(self.streams.seed)
        drawn = torch.rand(size, generator=generator, device=like.device, dtype=torch.float32)
        return (drawn >= self.p).to(like.dtype).mul_(1 / (1 - self.p))
