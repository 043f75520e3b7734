"""Plain torch on any device: the reference of the fused operators, and the only one with dropout.

Blocked to bound memory: over queries, and with dropout, where it has to serve real training, over tiles too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from prescore.ops.dropout import Dropout
from prescore.ops.operators import Gradients, Operator, Tile, accumulation_dtype, softmax_with_lse
from prescore.types import Attended

QUERY_BLOCK = 1024
LOGITS_AT_ONCE = 2**22
"""With dropout, logits formed at once, unless one row of queries has more."""


@dataclass(frozen=True)
class Plain(Operator):
    """Matrix products, a softmax, and dropout where the call has it."""

    dropout: Dropout | None = None

    name: ClassVar[str] = "plain"

    def at(self, name: str) -> Plain:
        """See `Operator`."""
        return self if self.dropout is None else replace(self, dropout=self.dropout.at(name))

    def unsupported(self, query: Tensor) -> list[str]:
        """See `Operator`."""
        return []

    def forward(self, tile: Tile) -> Attended:
        """See `Operator`."""
        query, value = tile.query, tile.value
        wide = accumulation_dtype(query.dtype)
        output = query.new_empty((*query.shape[:3], value.shape[-1]))
        lse = query.new_empty(query.shape[:3], dtype=wide)
        for tiles, rows in self._blocks(tile):
            weights, block_lse = softmax_with_lse(_logits(tile, tiles, rows), -1)  # [tiles, g, h/g, rows, c]
            factors = self._factors(weights, tiles, rows)
            weights = weights if factors is None else weights * factors
            output[tiles, :, rows] = (weights @ value[tiles].to(wide)[:, :, None]).flatten(1, 2).to(query.dtype)
            lse[tiles, :, rows] = block_lse.flatten(1, 2)
        return Attended(output, lse)

    def backward(self, tile: Tile, grad: Tensor, merged: Attended) -> Gradients:
        """See `Operator`."""
        query, key, value = tile[:3]
        wide = accumulation_dtype(query.dtype)
        heads = (key.shape[1], query.shape[1] // max(key.shape[1], 1))
        grad_query, grad_key, grad_value = (torch.zeros_like(t, dtype=wide) for t in (query, key, value))
        for tiles, rows in self._blocks(tile):
            q, g, o = (t[tiles, :, rows].to(wide).unflatten(1, heads) for t in (query, grad, merged.output))
            k, v = key[tiles].to(wide)[:, :, None], value[tiles].to(wide)[:, :, None]
            merged_lse = merged.lse[tiles, :, rows].unflatten(1, heads)
            merged_lse = merged_lse.masked_fill(torch.isneginf(merged_lse), 0.0)
            # the tile's share of the merged softmax, times its own weights, which sum to 1 by construction
            weights, lse = softmax_with_lse(_logits(tile, tiles, rows), -1)
            weights = weights * torch.exp(lse - merged_lse)[..., None]
            grad_weights, dropped = g @ v.transpose(-1, -2), weights
            factors = self._factors(weights, tiles, rows)
            if factors is not None:
                grad_weights, dropped = grad_weights * factors, weights * factors
            grad_logits = weights * (grad_weights - (g * o).sum(-1, keepdim=True)) * tile.scale
            grad_query[tiles, :, rows] = (grad_logits @ k).flatten(1, 2)
            grad_key[tiles] += (grad_logits.transpose(-1, -2) @ q).sum(2)
            grad_value[tiles] += (dropped.transpose(-1, -2) @ g).sum(2)
        return Gradients(grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype))

    def _blocks(self, tile: Tile) -> Iterator[tuple[slice, slice]]:
        """Slices of tiles and query rows that are computed at once."""
        n_tiles, n_heads, n_rows = tile.query.shape[:3]
        tiles, rows = max(n_tiles, 1), QUERY_BLOCK
        if self.dropout is not None:
            per_row = max(1, n_heads * tile.key.shape[2])
            rows = max(1, min(QUERY_BLOCK, n_rows, LOGITS_AT_ONCE // per_row))
            tiles = max(1, LOGITS_AT_ONCE // (per_row * rows))
        for first in range(0, n_tiles, tiles):
            for row in range(0, n_rows, rows):
                yield slice(first, first + tiles), slice(row, row + rows)

    def _factors(self, weights: Tensor, tiles: slice, rows: slice) -> Tensor | None:
        if self.dropout is None:
            return None
        return self.dropout.at(f"{tiles.start}/{rows.start}").factors(tuple(weights.shape), weights)


def _logits(tile: Tile, tiles: slice, rows: slice) -> Tensor:
    query, key, bias = tile.query[tiles, :, rows], tile.key[tiles], tile.bias
    wide = accumulation_dtype(query.dtype)
    heads_per_kv = query.shape[1] // max(key.shape[1], 1)
    grouped = query.to(wide).unflatten(1, (key.shape[1], heads_per_kv))
    logits: Tensor = (grouped @ key.to(wide)[:, :, None].transpose(-1, -2)) * tile.scale  # [b, g, h/g, t, c]
    if bias is not None:
        bias = bias if bias.shape[0] == 1 else bias[tiles]
        bias = bias if bias.shape[-2] == 1 else bias[..., rows, :]
        bias = bias[:, :, None] if bias.shape[1] == 1 else bias.unflatten(1, (key.shape[1], heads_per_kv))
        logits = logits + bias.to(wide)
    if tile.causal:
        columns = torch.arange(key.shape[2], dtype=torch.int64, device=query.device)
        position = torch.arange(query.shape[2], dtype=torch.int64, device=query.device) + rows.start
        logits = logits.masked_fill(columns > position[:, None], -torch.inf)
    return logits
