"""The CPU flash operator of PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.ops.operators import Gradients, Operator, Tile, accumulation_dtype, empty_rows, readable
from prescore.types import Attended


class CpuFlash(Operator):
    """`aten::_scaled_dot_product_flash_attention_for_cpu`: grouped heads, broadcast bias, float64 too."""

    name = "cpu-flash"

    def unsupported(self, query: Tensor) -> list[str]:
        """See `Operator`."""
        return [] if query.device.type == "cpu" else [f"device {query.device.type} is not the CPU"]

    def forward(self, tile: Tile) -> Attended:
        """See `Operator`."""
        query, value = tile.query, tile.value
        if tile.key.shape[2] == 0 or query.numel() == 0:  # the operator divides by zero on empty inputs
            lse = query.new_full(query.shape[:3], -torch.inf, dtype=accumulation_dtype(query.dtype))
            return Attended(query.new_zeros((*query.shape[:3], value.shape[-1])), lse)
        wide = _same_width(tile)
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            wide.query, wide.key, wide.value, 0.0, tile.causal, attn_mask=_as_mask(tile), scale=tile.scale
        )
        output = output[..., : value.shape[-1]]
        empty = empty_rows(tile)
        if empty is not None:
            # the operator reports lse 0 for a fully masked row, which is a valid lse for another row
            lse = lse.masked_fill(empty, -torch.inf)
            if bool(empty.any()):
                output = output.masked_fill(empty[..., None], 0)  # a padding query may be NaN
        return Attended(output, lse)

    def backward(self, tile: Tile, grad: Tensor, merged: Attended) -> Gradients:
        """See `Operator`."""
        if tile.key.shape[2] == 0 or tile.query.numel() == 0:
            return Gradients(*(torch.zeros_like(t) for t in tile[:3]))
        dim, value_dim = tile.query.shape[-1], tile.value.shape[-1]
        wide, output = _same_width(tile), merged.output
        extra = wide.value.shape[-1] - value_dim
        if extra:
            grad, output = pad(grad, (0, extra)), pad(output, (0, extra))
        # exp(-inf - -inf) is NaN: a row that sees nothing gets a finite lse; its weights are 0 all the same
        lse = merged.lse.masked_fill(torch.isneginf(merged.lse), 0.0)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            readable(grad), *wide[:3], readable(output), lse, 0.0, tile.causal, attn_mask=_as_mask(tile),
            scale=tile.scale,
        )  # fmt: skip
        return Gradients(grads[0][..., :dim], grads[1][..., :dim], grads[2][..., :value_dim])


def _as_mask(tile: Tile) -> Tensor | None:
    bias, dtype = tile.bias, tile.query.dtype
    if bias is None or bias.dtype == torch.float32 == accumulation_dtype(dtype):
        return bias  # half-precision inputs take a float32 bias too, and log weights need it
    return bias.to(dtype)


def _same_width(tile: Tile) -> Tile:
    # the operator wants one head dimension; zeros change neither the logits nor the other value columns
    dim, value_dim = tile.query.shape[-1], tile.value.shape[-1]
    query, key, value = (readable(t) for t in tile[:3])
    if dim < value_dim:
        query, key = (pad(t, (0, value_dim - dim)) for t in (query, key))
    elif value_dim < dim:
        value = pad(value, (0, dim - value_dim))
    return tile._replace(query=query, key=key, value=value)
