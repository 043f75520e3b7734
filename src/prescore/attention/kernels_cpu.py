"""The CPU flash operator of PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.attention.kernels import Call, accumulation_dtype, dead_rows


class CpuFlash:
    """`aten::_scaled_dot_product_flash_attention_for_cpu`: grouped heads, broadcast bias, float64 too."""

    name = "cpu-flash"
    dropout = None

    def at(self, place: str) -> CpuFlash:
        """See `Backend`."""
        return self

    def unsupported(self, call: Call) -> list[str]:
        """See `Backend`."""
        reasons = [] if call.device == "cpu" else [f"device {call.device} is not the CPU"]
        return reasons if call.dropout is None else [*reasons, "it cannot drop attention weights"]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Backend`."""
        if key.shape[2] == 0 or query.numel() == 0 or query.shape[2] == 0:
            return _nothing_seen(query, value)  # the operator divides by zero on empty inputs
        query, key, wide = _same_width(query, key, value)
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, wide, 0.0, causal, attn_mask=_as_mask(bias, query), scale=scale
        )
        output = output[..., : value.shape[-1]]
        dead = dead_rows(bias, causal, query.shape[2])
        if dead is not None:
            # the operator reports lse 0 for a fully masked row, which is a valid lse for another row
            lse = lse.masked_fill(dead, -torch.inf)
            if bool(dead.any()):
                output = output.masked_fill(dead[..., None], 0)  # a padded query may be NaN
        return output, lse

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
        if key.shape[2] == 0 or query.numel() == 0:
            return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        dim, value_dim = query.shape[-1], value.shape[-1]
        query, key, wide = _same_width(query, key, value)
        extra = wide.shape[-1] - value_dim
        if extra:
            grad, output = pad(grad, (0, extra)), pad(output, (0, extra))
        # exp(-inf - -inf) is NaN: a row that saw nothing gets any finite lse, its weights are zero anyway
        lse = lse.masked_fill(torch.isneginf(lse), 0.0)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, wide, output, lse, 0.0, causal, attn_mask=_as_mask(bias, query), scale=scale
        )
        return grads[0][..., :dim], grads[1][..., :dim], grads[2][..., :value_dim]


def _as_mask(bias: Tensor | None, query: Tensor) -> Tensor | None:
    if bias is None or bias.dtype == torch.float32 == accumulation_dtype(query.dtype):
        return bias  # half-precision inputs take a float32 bias too, and log weights need it
    return bias.to(query.dtype)


def _same_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # the operator wants one head dimension; zeros change neither the logits nor the other value columns
    dim, value_dim = query.shape[-1], value.shape[-1]
    width = max(dim, value_dim)
    if dim < width:
        query, key = pad(query, (0, width - dim)), pad(key, (0, width - dim))
    if value_dim < width:
        value = pad(value, (0, width - value_dim))
    return query, key, value


def _nothing_seen(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    rows = query.shape[:3]
    lse = query.new_full(rows, -torch.inf, dtype=accumulation_dtype(query.dtype))
    return query.new_zeros((*rows, value.shape[-1])), lse
