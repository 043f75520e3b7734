"""Memory that is reused from block to block."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Scratch:
    """Named buffers that grow on demand and live as long as one pass over the points.

    A fresh temporary of a megabyte is mapped and cleared by the system each time, which costs several times what
    the operation on it does. What a name held is gone when the name is taken again.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of this shape on `like`'s device, in its dtype unless told otherwise; contents arbitrary."""
        size, kind = math.prod(shape), dtype or like.dtype
        held = self._held.get(name)
        if held is None or held.numel() < size or held.dtype != kind or held.device != like.device:
            held = self._held[name] = torch.empty(size, dtype=kind, device=like.device)
        return held[:size].view(shape)
