"""The routed half: (query, leaf) pairs, dispatched by leaf into dense tiles.

Every query has chosen its own leaves. The pairs are sorted by leaf and cut into tiles of queries that read one
and the same leaf, as mixture-of-experts kernels do with tokens and experts; each query then sums its results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from prescore.attention.kernels import Backend, accumulation_dtype

TILES = (64, 128, 192)
ROWS_AT_ONCE = 2**14
"""Tiles are worked off in batches of this many query rows, whose tensors stay in the cache."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Tiles of queries that read one leaf each.

    Attributes:
        tile: Query rows of a tile.
        leaf: `[tiles]` leaf number.
        query_rows: `[tiles * tile]` row number of every slot's query, -1 on filler.
        slots: `[rows, J]`: where each query's j-th pair lies.
    """

    tile: int
    leaf: Tensor
    query_rows: Tensor
    slots: Tensor

    def batches(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Slots, their query rows (filler repeats row 0) and their tiles' leaves, some tiles at a time."""
        step = max(1, ROWS_AT_ONCE // self.tile)
        for start in range(0, self.leaf.shape[0], step):
            leaf = self.leaf[start : start + step]
            slots = slice(start * self.tile, (start + leaf.shape[0]) * self.tile)
            yield slots, self.query_rows[slots], leaf


def dispatch(leaves: Tensor, n_leaves: int) -> Pairs:
    """Sort pairs into tiles.

    Args:
        leaves: `[rows, J]` leaf numbers below `n_leaves`.
        n_leaves: Leaves in all.
    """
    rows, per_query = leaves.shape
    flat = leaves.reshape(-1)
    # half a tile per leaf is filler on average: keep it small against the pairs of a leaf
    per_leaf = flat.shape[0] // max(n_leaves, 1)
    tile = next((size for size in reversed(TILES) if per_leaf >= 3 * size), TILES[0])
    in_order, pair = torch.sort(flat.to(torch.int32), stable=True)
    count = torch.bincount(flat, minlength=n_leaves)
    tiles = (count + tile - 1) // tile
    first_pair, first_tile = count.cumsum(0) - count, tiles.cumsum(0) - tiles
    shift = (first_tile * tile - first_pair).index_select(0, in_order)
    slot = torch.arange(flat.shape[0], device=flat.device) + shift
    leaf = torch.repeat_interleave(torch.arange(n_leaves, device=flat.device), tiles)
    query_rows = torch.full((leaf.shape[0] * tile,), -1, dtype=torch.int64, device=flat.device)
    query_rows.index_copy_(0, slot, pair.div(per_query, rounding_mode="floor"))
    slots = torch.empty_like(slot).index_copy_(0, pair, slot)
    return Pairs(tile, leaf, query_rows, slots.view(rows, per_query))


@dataclass(frozen=True, eq=False)
class Leaves:
    """All leaves: `key [M, L, D]`, `value [M, L, Dv]`, `bias [M, L]` (-inf on filler) or None."""

    key: Tensor
    value: Tensor
    bias: Tensor | None

    def columns(self, leaf: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and bias of some leaves, as the operator wants them."""
        key, value = (t.index_select(0, leaf)[:, None] for t in (self.key, self.value))
        bias = None if self.bias is None else self.bias.index_select(0, leaf)[:, None, None]
        return key, value, bias


def attend_pairs(
    query: Tensor, leaves: Leaves, pairs: Pairs, scale: float, backend: Backend, room: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend inside the tiles.

    Args:
        query: `[rows, D]`.
        leaves: Keys and values.
        pairs: Who reads what.
        scale: Factor of the logits.
        backend: The operator.
        room: `[at least the slots, Dv]`, overwritten: fresh memory costs more than the arithmetic.

    Returns:
        Output `[slots, Dv]`, a part of `room`, and lse `[rows, J]`.
    """
    n_slots = pairs.query_rows.shape[0]
    output, lses = room[:n_slots], []
    for slots, rows, leaf in pairs.batches():
        tiles = query.index_select(0, rows.clamp_min(0)).view(-1, 1, pairs.tile, query.shape[-1])
        result, lse = backend.forward(tiles, *leaves.columns(leaf), False, scale)
        output[slots] = result.reshape(-1, output.shape[-1])
        lses.append(lse.reshape(-1))
    flat = torch.cat(lses).index_select(0, pairs.slots.view(-1))
    return output, flat.view(pairs.slots.shape)


def sum_pairs(output: Tensor, weights: Tensor, pairs: Pairs) -> Tensor:
    """`[rows, Dv]`: every query's weighted sum of its pairs, `weights [rows, J]`."""
    return embedding_bag(pairs.slots, output, mode="sum", per_sample_weights=weights.to(output.dtype))


def attend_pairs_backward(
    grad: Tensor, query: Tensor, leaves: Leaves, pairs: Pairs, output: Tensor, lse: Tensor, scale: float,
    backend: Backend,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query `[rows, D]`, leaf keys and leaf values under the merged `output` and `lse`."""
    wide = accumulation_dtype(query.dtype)
    grad_rows = query.new_empty((pairs.query_rows.shape[0], query.shape[-1]), dtype=wide)
    sums = [torch.zeros_like(t, dtype=wide) for t in (leaves.key, leaves.value)]
    for slots, rows, leaf in pairs.batches():
        real, filled = rows.clamp_min(0), (rows >= 0).view(-1, 1, pairs.tile)
        tiles = [t.index_select(0, real).view(-1, 1, pairs.tile, t.shape[-1]) for t in (grad, query, output)]
        tiles[0].masked_fill_(~filled[..., None], 0)
        key, value, bias = leaves.columns(leaf)
        weights_lse = lse.index_select(0, real).view(filled.shape)
        grads = backend.backward(tiles[0], tiles[1], key, value, bias, tiles[2], weights_lse, False, scale)
        grad_rows[slots] = grads[0].reshape(-1, query.shape[-1])
        for total, part in zip(sums, grads[1:], strict=True):
            total.index_add_(0, leaf, part.squeeze(1).to(wide))
    return embedding_bag(pairs.slots, grad_rows, mode="sum"), sums[0], sums[1]
