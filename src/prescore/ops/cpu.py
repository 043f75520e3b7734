"""The CPU flash operator of PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.ops.backend import Gradients, Needs, Tile, accumulation_dtype, dead_rows, readable
from prescore.types import Attended


class CpuFlash:
    """`aten::_scaled_dot_product_flash_attention_for_cpu`: grouped heads, broadcast bias, float64 too."""

    name = "cpu-flash"
    dropout = None

    def at(self, place: str) -> CpuFlash:
        """See `Backend`."""
        return self

    def unsupported(self, needs: Needs) -> list[str]:
        """See `Backend`."""
        reasons = [] if needs.device == "cpu" else [f"device {needs.device} is not the CPU"]
        return reasons if needs.dropout is None else [*reasons, "it cannot drop attention weights"]

    def forward(self, tile: Tile) -> Attended:
        """See `Backend`."""
        if tile.key.shape[2] == 0 or tile.query.numel() == 0:
            return _nothing_seen(tile)  # the operator divides by zero on empty inputs
        wide = _same_width(tile)
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            wide.query, wide.key, wide.value, 0.0, tile.causal, attn_mask=_as_mask(tile), scale=tile.scale
        )
        output = output[..., : tile.value.shape[-1]]
        dead = dead_rows(tile)
        if dead is not None:
            # the operator reports lse 0 for a fully masked row, which is a valid lse for another row
            lse = lse.masked_fill(dead, -torch.inf)
            if bool(dead.any()):
                output = output.masked_fill(dead[..., None], 0)  # a padded query may be NaN
        return Attended(output, lse)

    def backward(self, tile: Tile, grad: Tensor, merged: Attended) -> Gradients:
        """See `Backend`."""
        if tile.key.shape[2] == 0 or tile.query.numel() == 0:
            return Gradients(*(torch.zeros_like(t) for t in tile[:3]))
        dim, value_dim = tile.query.shape[-1], tile.value.shape[-1]
        wide, output = _same_width(tile), merged.output
        extra = wide.value.shape[-1] - value_dim
        if extra:
            grad, output = pad(grad, (0, extra)), pad(output, (0, extra))
        # exp(-inf - -inf) is NaN: a row that saw nothing gets any finite lse, its weights are zero anyway
        lse = merged.lse.masked_fill(torch.isneginf(merged.lse), 0.0)
        grad, output = readable(grad), readable(output)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *wide[:3], output, lse, 0.0, tile.causal, attn_mask=_as_mask(tile), scale=tile.scale
        )
        return Gradients(grads[0][..., :dim], grads[1][..., :dim], grads[2][..., :value_dim])


def _as_mask(tile: Tile) -> Tensor | None:
    bias, dtype = tile.bias, tile.query.dtype
    if bias is None or bias.dtype == torch.float32 == accumulation_dtype(dtype):
        return bias  # half-precision inputs take a float32 bias too, and log weights need it
    return bias.to(dtype)


def _same_width(tile: Tile) -> Tile:
    # the operator wants one head dimension; zeros change neither the logits nor the other value columns
    dim, value_dim = tile.query.shape[-1], tile.value.shape[-1]
    tile = tile._replace(query=readable(tile.query), key=readable(tile.key), value=readable(tile.value))
    if dim < value_dim:
        query, key = (pad(t, (0, value_dim - dim)) for t in (tile.query, tile.key))
        return tile._replace(query=query, key=key)
    return tile._replace(value=pad(tile.value, (0, dim - value_dim))) if value_dim < dim else tile


def _nothing_seen(tile: Tile) -> Attended:
    rows = tile.query.shape[:3]
    lse = tile.query.new_full(rows, -torch.inf, dtype=accumulation_dtype(tile.query.dtype))
    return Attended(tile.query.new_zeros((*rows, tile.value.shape[-1])), lse)
