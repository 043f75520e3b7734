"""The CUDA memory-efficient operator of PyTorch: any float dtype but float64, bias, lse.

The flash operator takes neither a bias nor float32. The memory-efficient one takes both, so this one serves
every part. It wants one key head per query head and a bias whose rows are aligned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.ops.operators import Gradients, Operator, Tile, empty_rows, readable
from prescore.types import Attended

_BIAS_ALIGNMENT = 16
_ROW_ALIGNMENT = 32


class CudaEfficient(Operator):
    """`aten::_scaled_dot_product_efficient_attention`."""

    name = "cuda-efficient"

    def unsupported(self, query: Tensor) -> list[str]:
        """See `Operator`."""
        reasons = []
        if query.device.type != "cuda":
            reasons.append(f"device {query.device.type} is not CUDA")
        if query.dtype == torch.float64:
            reasons.append("dtype float64 (supported: float32, bfloat16, float16)")
        if query.shape[-1] % 8:
            reasons.append(f"head dimension {query.shape[-1]} is not a multiple of 8")
        return reasons

    def forward(self, tile: Tile) -> Attended:
        """See `Operator`."""
        key, value = _repeated(tile)
        output, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            readable(tile.query), key, value, _aligned(tile), True, 0.0, tile.causal, scale=tile.scale
        )
        lse = lse[..., : tile.query.shape[2]]  # the operator pads the rows
        empty = empty_rows(tile)
        if empty is not None:
            lse = lse.masked_fill(empty, -torch.inf)
            output = output.masked_fill(empty[..., None], 0)
        return Attended(output, lse)

    def backward(self, tile: Tile, grad: Tensor, merged: Attended) -> Gradients:
        """See `Operator`."""
        key, value = _repeated(tile)
        finite = merged.lse.masked_fill(torch.isneginf(merged.lse), 0.0)
        padded = torch.nn.functional.pad(finite, (0, -tile.query.shape[2] % _ROW_ALIGNMENT), value=0.0)
        empty = empty_rows(tile)
        if empty is not None:
            grad = grad.masked_fill(empty[..., None], 0)
        state = torch.zeros((), dtype=torch.int64, device=grad.device)  # no dropout: never read
        needed = [True, True, True, False]
        grad, query, output = (readable(t) for t in (grad, tile.query, merged.output))
        grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, _aligned(tile), output, padded, state, state, 0.0, needed,
            tile.causal, scale=tile.scale,
        )  # fmt: skip
        heads_per_kv = _heads_per_kv(tile)
        per_head = (
            part if heads_per_kv == 1 else part.unflatten(1, (-1, heads_per_kv)).sum(2) for part in grads[1:3]
        )
        return Gradients(grads[0], *per_head)


def _heads_per_kv(tile: Tile) -> int:
    return tile.query.shape[1] // tile.key.shape[1]


def _repeated(tile: Tile) -> tuple[Tensor, Tensor]:
    key, value, heads_per_kv = readable(tile.key), readable(tile.value), _heads_per_kv(tile)
    if heads_per_kv == 1:
        return key, value
    return key.repeat_interleave(heads_per_kv, dim=1), value.repeat_interleave(heads_per_kv, dim=1)


def _aligned(tile: Tile) -> Tensor | None:
    if tile.bias is None:
        return None
    bias, columns = tile.bias, tile.key.shape[2]
    empty = empty_rows(tile)
    if empty is not None:
        # a fully masked row is NaN in the operator: let it see every key, forward() overwrites it
        bias = torch.where(empty[..., None], torch.zeros_like(bias[..., :1]), bias)
    room = bias.new_zeros((*bias.shape[:-1], columns + (-columns % _BIAS_ALIGNMENT)), dtype=tile.query.dtype)
    room[..., :columns] = bias
    return room[..., :columns].expand(*tile.query.shape[:3], columns)
