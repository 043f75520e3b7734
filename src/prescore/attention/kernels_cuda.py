"""The CUDA memory-efficient operator of PyTorch: any float dtype but float64, bias, lse.

The flash operator takes no bias and no float32; the memory-efficient one takes both, so one backend serves
every part. It wants one key head per query head and a bias whose rows are aligned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.attention.kernels import Call, dead_rows

_BIAS_ALIGNMENT = 16


class CudaEfficient:
    """`aten::_scaled_dot_product_efficient_attention`."""

    name = "cuda-efficient"
    dropout = None

    def at(self, place: str) -> CudaEfficient:
        """See `Backend`."""
        return self

    def unsupported(self, call: Call) -> list[str]:
        """See `Backend`."""
        reasons = []
        if call.device != "cuda":
            reasons.append(f"device {call.device} is not CUDA")
        if call.dtype == torch.float64:
            reasons.append("dtype float64 (supported: float32, bfloat16, float16)")
        if call.head_dim % 8:
            reasons.append(f"head dimension {call.head_dim} is not a multiple of 8")
        if call.dropout is not None:
            reasons.append("it cannot drop attention weights")
        return reasons

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Backend`."""
        group = query.shape[1] // key.shape[1]
        output, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, _per_query_head(key, group), _per_query_head(value, group),
            _aligned(bias, query, key.shape[2], causal), True, 0.0, causal, scale=scale,
        )  # fmt: skip
        lse = lse[..., : query.shape[2]]  # the operator pads the rows
        dead = dead_rows(bias, causal, query.shape[2])
        if dead is not None:
            lse = lse.masked_fill(dead, -torch.inf)
            output = output.masked_fill(dead[..., None], 0)
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
        group = query.shape[1] // key.shape[1]
        rows = query.shape[2]
        padded = torch.nn.functional.pad(lse.masked_fill(torch.isneginf(lse), 0.0), (0, -rows % 32), value=0.0)
        dead = dead_rows(bias, causal, query.shape[2])
        if dead is not None:
            grad = grad.masked_fill(dead[..., None], 0)
        state = torch.zeros((), dtype=torch.int64, device=query.device)  # no dropout: never read
        mask = _aligned(bias, query, key.shape[2], causal)
        grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, query, _per_query_head(key, group), _per_query_head(value, group), mask, output, padded,
            state, state, 0.0, [True, True, True, False], causal, scale=scale,
        )  # fmt: skip
        return grads[0], _per_key_head(grads[1], group), _per_key_head(grads[2], group)


def _per_query_head(tensor: Tensor, group: int) -> Tensor:
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=1)


def _per_key_head(grad: Tensor, group: int) -> Tensor:
    return grad if group == 1 else grad.unflatten(1, (-1, group)).sum(2)


def _aligned(bias: Tensor | None, query: Tensor, columns: int, causal: bool) -> Tensor | None:
    if bias is None:
        return None
    dead = dead_rows(bias, causal, query.shape[2])
    if dead is not None:
        # a fully masked row is NaN in the operator; let it see everything, forward() overwrites it
        bias = torch.where(dead[..., None], torch.zeros_like(bias[..., :1]), bias)
    room = bias.new_zeros((*bias.shape[:-1], columns + (-columns % _BIAS_ALIGNMENT)), dtype=query.dtype)
    room[..., :columns] = bias
    return room[..., :columns].expand(*query.shape[:3], columns)
