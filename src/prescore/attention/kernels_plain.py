"""Plain torch on any device: the oracle of the fused operators, blocked over queries to bound memory."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.attention.kernels import Call, accumulation_dtype

QUERY_BLOCK = 1024


class Plain:
    """Matrix products and a softmax, nothing else."""

    name = "plain"

    def unsupported(self, call: Call) -> list[str]:
        """See `Backend`."""
        return []

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Backend`."""
        wide = accumulation_dtype(query.dtype)
        outputs, lses = [], []
        for start in range(0, max(query.shape[2], 1), QUERY_BLOCK):
            rows = slice(start, start + QUERY_BLOCK)
            logits = _logits(query[:, :, rows], key, bias, causal, scale, start)  # [b, g, h/g, rows, c]
            lse = _logsumexp(logits)
            weights = torch.exp(logits - _finite(lse)[..., None])
            outputs.append((weights @ value.to(wide)[:, :, None]).flatten(1, 2))
            lses.append(lse.flatten(1, 2))
        return torch.cat(outputs, dim=2).to(query.dtype), torch.cat(lses, dim=2)

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
        """See `Backend`."""
        wide = accumulation_dtype(query.dtype)
        heads = (key.shape[1], query.shape[1] // max(key.shape[1], 1))
        grad_query = torch.zeros_like(query, dtype=wide)
        grad_key, grad_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
        for start in range(0, query.shape[2], QUERY_BLOCK):
            rows = slice(start, start + QUERY_BLOCK)
            q, g, o = (t[:, :, rows].to(wide).unflatten(1, heads) for t in (query, grad, output))
            logits = _logits(query[:, :, rows], key, bias, causal, scale, start)
            weights = torch.exp(logits - _finite(lse[:, :, rows].unflatten(1, heads))[..., None])
            grad_weights = g @ value.to(wide)[:, :, None].transpose(-1, -2)
            grad_logits = weights * (grad_weights - (g * o).sum(-1, keepdim=True)) * scale
            grad_query[:, :, rows] = (grad_logits @ key.to(wide)[:, :, None]).flatten(1, 2)
            grad_key += (grad_logits.transpose(-1, -2) @ q).sum(2)
            grad_value += (weights.transpose(-1, -2) @ g).sum(2)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _logits(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float, start: int) -> Tensor:
    wide = accumulation_dtype(query.dtype)
    group = query.shape[1] // max(key.shape[1], 1)
    grouped = query.to(wide).unflatten(1, (key.shape[1], group))
    logits: Tensor = (grouped @ key.to(wide)[:, :, None].transpose(-1, -2)) * scale  # [b, g, h/g, t, c]
    if bias is not None:
        rows = bias if bias.shape[-2] == 1 else bias[..., start : start + query.shape[2], :]
        heads = rows[:, :, None] if rows.shape[1] == 1 else rows.unflatten(1, (key.shape[1], group))
        logits = logits + heads.to(wide)
    if causal:
        position = torch.arange(start, start + query.shape[2], device=query.device)
        later = torch.arange(key.shape[2], device=query.device) > position[:, None]
        logits = logits.masked_fill(later, -torch.inf)
    return logits


def _logsumexp(logits: Tensor) -> Tensor:
    if logits.shape[-1] == 0:
        return logits.new_full(logits.shape[:-1], -torch.inf)
    return torch.logsumexp(logits, dim=-1)


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(torch.isneginf(lse), 0.0)
