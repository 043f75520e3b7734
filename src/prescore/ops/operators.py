"""Softmax attention with its log-sum-exp, on each device's fused operator.

Every operator computes two functions of a `Tile`: `forward`, and `backward`, which takes the *merged* output and
lse of the tile's queries. The weights of a part are `exp(logit - lse)` under the lse of the union of all parts, so
the gradient of the part's own softmax would be wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from prescore import checks
from prescore.errors import Unsupported
from prescore.ops.dropout import Dropout
from prescore.types import Attended

BACKENDS = ("auto", "native", "triton", "plain", "cpu-flash", "cuda-efficient")


class Tile(NamedTuple):
    """One call of an operator.

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


class Gradients(NamedTuple):
    """Gradients of a tile's query, key and value."""

    query: Tensor
    key: Tensor
    value: Tensor


class Operator(ABC):
    """One implementation of softmax attention with its log-sum-exp."""

    name: ClassVar[str]
    dropout: Dropout | None = None
    """The dropout that it applies; only the plain operator can."""

    def at(self, name: str) -> Operator:
        """This operator for the call of this name, or for several calls named below it.

        The name decides which weights are dropped. Forward and backward of a call have one name; every other
        call has another.
        """
        return self

    @abstractmethod
    def unsupported(self, query: Tensor) -> list[str]:
        """Reasons why it cannot run a call with such queries; empty = it can."""

    @abstractmethod
    def forward(self, tile: Tile) -> Attended:
        """Output `[b, h, t, Dv]` and lse `[b, h, t]`, the latter at least float32."""

    @abstractmethod
    def backward(self, tile: Tile, grad: Tensor, merged: Attended) -> Gradients:
        """Gradients under the merged output and lse of the tile's queries."""


def pick_operator(query: Tensor, name: str = "auto", dropout: Dropout | None = None) -> Operator:
    """The named operator, or the first that can run a call with such queries; raises with reasons when none can.

    Dropout needs the plain operator: the fused operators cannot drop the same weights in the forward and backward
    pass of merged parts.
    """
    from prescore.ops import cpu, cuda, plain

    operators: tuple[Operator, ...] = (cpu.CpuFlash(), cuda.CudaEfficient(), plain.Plain(dropout))
    checks.one_of("backend", name, BACKENDS)
    if name not in BACKENDS[:3]:  # native and triton run the far keys of a `Routed`; this is for the rest
        operators = tuple(operator for operator in operators if operator.name == name)
    reasons = []
    for operator in operators:
        unsupported = operator.unsupported(query)
        if operator.dropout != dropout:
            unsupported.append("it cannot drop attention weights")
        if not unsupported:
            return operator
        reasons += [f"{operator.name}: {reason}" for reason in unsupported]
    raise Unsupported("attention", reasons)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and log-sum-exps: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def readable(rows: Tensor) -> Tensor:
    """The same numbers in memory, with a last stride of 1 and no pending negation: what operators assume."""
    plain = rows.clone() if rows._is_zerotensor() else rows.resolve_neg()
    return plain if plain.stride(-1) == 1 else plain.contiguous()


def softmax_with_lse(logits: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Softmax weights along `dim`, and the log-sum-exp; a row of -inf has weights 0 and lse -inf.

    The weights are divided by their computed sum. `exp(logit - lse)` would not sum to 1 for large logits, because
    lse is rounded: by 0.004 at 4e4 in float32. Merging attention results is the softmax of their lse.
    """
    if logits.shape[dim] == 0:
        return logits, logits.sum(dim) - torch.inf
    peak = logits.detach().amax(dim, keepdim=True)  # only shifts the exponents, so no gradient flows through it
    peak = peak.masked_fill(torch.isneginf(peak), 0.0)
    weights = torch.exp(logits - peak)
    total = weights.sum(dim, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (torch.log(total) + peak).masked_fill(empty, -torch.inf)
    return weights / total, lse.squeeze(dim)


def rounds_weights(lse: Tensor, dtype: torch.dtype, *, backward: bool) -> bool:
    """Whether rounding of lse changes `exp(logit - lse)` by more than inputs of `dtype` deserve.

    In float32 that is above 1024 in forward passes, which compare lse to merge parts, and above 4096 in
    `backward` passes, which compute all weights in this way: up to there gradients err as much as those of
    torch's operator. Only CPU tensors are looked at. Other devices would have to be waited for; there float32
    keeps its rounding, as FlashAttention does.
    """
    if lse.dtype == torch.float64 or lse.device.type != "cpu" or not lse.numel():
        return False
    largest = float(lse.detach().masked_fill(torch.isneginf(lse), 0.0).abs().amax())
    rounding, allowed = largest * torch.finfo(lse.dtype).eps, 2**-11 if backward else 2**-13
    return rounding > max(allowed, torch.finfo(dtype).eps / 4)


def empty_rows(tile: Tile) -> Tensor | None:
    """Which rows see no key at all, broadcastable to `[b, h, t]`; None = every row sees one."""
    bias = tile.bias
    if bias is None:
        return None
    visible = ~torch.isneginf(bias)
    if not tile.causal:
        return ~visible.any(dim=-1)
    if bias.shape[-2] == 1:
        last = torch.arange(tile.query.shape[2], dtype=torch.int64, device=bias.device)
        return ~(visible.squeeze(-2).cumsum(-1) > 0).index_select(-1, last.clamp_max(bias.shape[-1] - 1))
    return ~visible.tril().any(dim=-1)
