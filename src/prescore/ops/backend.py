"""Softmax attention with its log-sum-exp, on each device's fused operator.

Every backend computes the same two functions on a `Tile`: `forward`, and `backward`, which takes the output and
lse of the *merged* result the tile went into: the softmax weights of a part are `exp(logit - lse)` under the lse
of the whole, which is why a part's own softmax gradient would be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from prescore.errors import Unsupported
from prescore.ops.dropout import Dropout
from prescore.types import Attended


class Tile(NamedTuple):
    """One call of the operator.

    Attributes:
        query: `[b, h, t, D]`.
        key: `[b, g, c, D]`, `h` a multiple of `g`.
        value: `[b, g, c, Dv]`.
        scale: Factor of the logits.
        bias: Added to the logits, broadcastable to `[b, h, t, c]`; None = nothing.
        causal: Row i sees its first i + 1 columns only.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    bias: Tensor | None = None
    causal: bool = False


def readable(rows: Tensor) -> Tensor:
    """The same numbers, those of a row side by side: operators look at no other stride, nor at a pending sign."""
    plain = rows.resolve_neg()
    return plain if plain.stride(-1) == 1 else plain.contiguous()


class Gradients(NamedTuple):
    """Of a tile's query, key and value."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class Needs:
    """What a backend needs to know to say whether it can run."""

    device: str
    dtype: torch.dtype
    head_dim: int
    dropout: Dropout | None = None

    @classmethod
    def of(cls, query: Tensor, dropout: Dropout | None = None) -> Needs:
        """Those of a call with such queries."""
        return cls(query.device.type, query.dtype, query.shape[-1], dropout)


class Backend(Protocol):
    """One implementation of the operator."""

    name: str

    @property
    def dropout(self) -> Dropout | None:
        """What it drops; only the plain backend can."""

    def at(self, place: str) -> Backend:
        """The backend for one operator call, or for several named below it.

        Calls of forward and backward that belong together must have the same place, all others their own: it
        decides which weights are dropped.
        """

    def unsupported(self, needs: Needs) -> list[str]:
        """Reasons it cannot run such a call; empty means it may."""

    def forward(self, tile: Tile) -> Attended:
        """Output `[b, h, t, Dv]` and lse `[b, h, t]`, the latter at least float32."""

    def backward(self, tile: Tile, grad: Tensor, merged: Attended) -> Gradients:
        """Gradients under the merged output and lse of the tile's queries."""


def pick_backend(needs: Needs, name: str = "auto") -> Backend:
    """The named backend, or the first that can run the call; raises with every reason when none can.

    The fused operators cannot drop attention weights such that forward and backward of merged parts agree, so a
    call with dropout is the plain backend's.
    """
    from prescore.ops import cpu, cuda, plain

    backends: tuple[Backend, ...] = (cpu.CpuFlash(), cuda.CudaEfficient(), plain.Plain(needs.dropout))
    if name not in ("auto", "native"):  # native code runs the far keys of a `Routed`; this is for everything else
        backends = tuple(backend for backend in backends if backend.name == name)
        if not backends:
            raise ValueError(
                f"backend must be one of auto, native, plain, cpu-flash, cuda-efficient, got {name!r}"
            )
    reasons = []
    for backend in backends:
        found = backend.unsupported(needs)
        if not found:
            return backend
        reasons += [f"{backend.name}: {reason}" for reason in found]
    raise Unsupported("attention", reasons)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Where sums and log-sum-exps live: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dead_rows(tile: Tile) -> Tensor | None:
    """Which rows see no key at all, broadcastable to `[b, h, t]`; None = none can be."""
    bias = tile.bias
    if bias is None:
        return None
    seen = ~torch.isneginf(bias)
    if not tile.causal:
        return ~seen.any(dim=-1)
    if bias.shape[-2] == 1:
        last = torch.arange(tile.query.shape[2], device=bias.device).clamp_max(bias.shape[-1] - 1)
        return ~(seen.squeeze(-2).cumsum(-1) > 0).index_select(-1, last)
    return ~seen.tril().any(dim=-1)
