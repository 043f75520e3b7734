"""Dropout of attention weights, drawn again wherever it is needed and never stored.

With weights `w` normalised over all counted keys, the output is `sum_j m_j w_j v_j`, where `m_j` is 0 with
probability p and `1 / (1 - p)` otherwise. The log-sum-exp is that of all keys. Every operator call has a
name below the call's seed, so the backward pass draws what the forward pass drew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.rng import Streams


@dataclass(frozen=True)
class Dropout:
    """Dropout of one operator call.

    Attributes:
        p: Probability of dropping a weight.
        streams: Randomness.
    """

    p: float
    streams: Streams

    def at(self, name: str) -> Dropout:
        """Independent dropout for a part of the work."""
        return Dropout(self.p, self.streams.child(name))

    def factors(self, size: tuple[int, ...], like: Tensor) -> Tensor:
        """0 or `1 / (1 - p)`, the same at every call; drawn on `like`'s device, independent of its dtype."""
        generator = torch.Generator(like.device)
        generator.manual_seed(self.streams.seed)
        drawn = torch.rand(size, generator=generator, device=like.device, dtype=torch.float32)
        return (drawn >= self.p).to(like.dtype).mul_(1 / (1 - self.p))
