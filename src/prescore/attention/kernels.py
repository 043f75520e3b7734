"""Softmax attention with its log-sum-exp, on each device's fused operator.

Every backend computes the same two functions, `forward` and `backward`, on
`query [b, h, t, D]`, `key [b, g, c, D]`, `value [b, g, c, Dv]` with `h` a multiple of `g` and an additive
`bias` broadcastable to `[b, h, t, c]`. `backward` takes the output and lse of the *merged* result the part went
into: the softmax weights of a part are `exp(logit - lse)` under the lse of the whole, which is why a part's own
softmax gradient would be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from prescore.attention.dropout import Dropout
from prescore.errors import Unsupported


@dataclass(frozen=True)
class Call:
    """What a backend needs to know to say whether it can run."""

    device: str
    dtype: torch.dtype
    head_dim: int
    dropout: Dropout | None = None


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

    def unsupported(self, call: Call) -> list[str]:
        """Reasons it cannot run this call; empty means it may."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output `[b, h, t, Dv]` and lse `[b, h, t]`, the latter at least float32."""

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        output: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""


def pick_backend(call: Call, name: str = "auto") -> Backend:
    """The named backend, or the first that can run the call; raises with every reason when none can.

    The fused operators cannot drop attention weights such that forward and backward of merged parts agree, so a
    call with dropout is the plain backend's.
    """
    from prescore.attention import kernels_cpu, kernels_cuda, kernels_plain

    backends: tuple[Backend, ...] = (
        kernels_cpu.CpuFlash(),
        kernels_cuda.CudaEfficient(),
        kernels_plain.Plain(call.dropout),
    )
    if name != "auto":
        backends = tuple(backend for backend in backends if backend.name == name)
        if not backends:
            raise ValueError(f"backend must be one of auto, cpu-flash, cuda-efficient, plain, got {name!r}")
    reasons = []
    for backend in backends:
        found = backend.unsupported(call)
        if not found:
            return backend
        reasons += [f"{backend.name}: {reason}" for reason in found]
    raise Unsupported("attention", reasons)


def as_backend(backend: str | Backend, query: Tensor) -> Backend:
    """A backend as it is; a name, or `auto`, as the backend for these queries."""
    if not isinstance(backend, str):
        return backend
    return pick_backend(Call(query.device.type, query.dtype, query.shape[-1]), backend)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Where sums and log-sum-exps live: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dead_rows(bias: Tensor | None, causal: bool, n_rows: int) -> Tensor | None:
    """Which rows see no key at all, broadcastable to `[b, h, t]`; None = none can be."""
    if bias is None:
        return None
    seen = ~torch.isneginf(bias)
    if not causal:
        return ~seen.any(dim=-1)
    if bias.shape[-2] == 1:
        last = torch.arange(n_rows, device=bias.device).clamp_max(bias.shape[-1] - 1)
        return ~(seen.squeeze(-2).cumsum(-1) > 0).index_select(-1, last)
    return ~seen.tril().any(dim=-1)
