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

from prescore.ops.backend import Backend, Gradients, Tile, accumulation_dtype
from prescore.types import Attended

TILES = (256, 64)
"""Query rows of a tile: large ones while a leaf fills them, small ones for its remaining pairs."""
ROWS_AT_ONCE = 2**14
"""Tiles are worked off in batches of this many query rows, whose tensors stay in the cache."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Tiles of queries that read one leaf each, all large tiles before all small ones.

    Attributes:
        leaves: Leaf numbers of the large tiles, and of the small ones.
        query_rows: `[slots]` row number of every slot's query, -1 on filler.
        slots: `[rows, J]`: where each query's j-th pair lies.
    """

    leaves: tuple[Tensor, Tensor]
    query_rows: Tensor
    slots: Tensor

    def batches(self) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
        """Tile size, slots, their query rows and their tiles' leaves, some tiles at a time."""
        offset = 0
        for tile, leaves in zip(TILES, self.leaves, strict=True):
            for leaf in leaves.split(ROWS_AT_ONCE // tile):
                slots = slice(offset, offset + leaf.shape[0] * tile)
                offset = slots.stop
                if leaf.shape[0]:
                    yield tile, slots, self.query_rows[slots], leaf


def dispatch(leaves: Tensor, n_leaves: int) -> Pairs:
    """Sort pairs into tiles.

    Args:
        leaves: `[rows, J]` leaf numbers below `n_leaves`.
        n_leaves: Leaves in all.
    """
    rows, per_query = leaves.shape
    flat = leaves.reshape(-1)
    in_order, pair = torch.sort(flat.to(torch.int32), stable=True)
    count = torch.bincount(flat, minlength=n_leaves)
    large = count // TILES[0]
    small = (count - large * TILES[0] + TILES[1] - 1) // TILES[1]
    numbers = torch.arange(n_leaves, device=flat.device)
    tiles = (torch.repeat_interleave(numbers, large), torch.repeat_interleave(numbers, small))
    start_small = tiles[0].shape[0] * TILES[0]
    # a pair's rank within its leaf says whether it lies in a large tile, and so where
    in_large, rank = (large * TILES[0]).index_select(0, in_order), torch.arange(len(flat), device=flat.device)
    rank = rank - (count.cumsum(0) - count).index_select(0, in_order)
    first_large = ((large.cumsum(0) - large) * TILES[0]).index_select(0, in_order)
    first_small = ((small.cumsum(0) - small) * TILES[1] + start_small).index_select(0, in_order)
    slot = torch.where(rank < in_large, first_large + rank, first_small + rank - in_large)
    n_slots = start_small + tiles[1].shape[0] * TILES[1]
    query_rows = torch.full((n_slots,), -1, dtype=torch.int64, device=flat.device)
    query_rows.index_copy_(0, slot, pair.div(per_query, rounding_mode="floor"))
    slots = torch.empty_like(slot).index_copy_(0, pair, slot)
    return Pairs(tiles, query_rows, slots.view(rows, per_query))


@dataclass(frozen=True, eq=False)
class Leaves:
    """All leaves: `key [M, L, D]`, `value [M, L, Dv]`, `bias [M, L]` (-inf on filler) or None."""

    key: Tensor
    value: Tensor
    bias: Tensor | None

    def tile(self, query: Tensor, leaf: Tensor, scale: float) -> Tile:
        """What the operator is called with: `query [tiles, 1, t, D]` against some leaves."""
        key, value = (t.index_select(0, leaf)[:, None] for t in (self.key, self.value))
        bias = None if self.bias is None else self.bias.index_select(0, leaf)[:, None, None]
        return Tile(query, key, value, scale, bias)


def attend_pairs(
    query: Tensor, leaves: Leaves, pairs: Pairs, scale: float, backend: Backend, room: Tensor
) -> Attended:
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
    for tile, slots, rows, leaf in pairs.batches():
        tiles = query.index_select(0, rows.clamp_min(0)).view(-1, 1, tile, query.shape[-1])
        found = backend.at(f"slots {slots.start}").forward(leaves.tile(tiles, leaf, scale))
        output[slots] = found.output.reshape(-1, output.shape[-1])
        lses.append(found.lse.reshape(-1))
    flat = torch.cat(lses).index_select(0, pairs.slots.view(-1))
    return Attended(output, flat.view(pairs.slots.shape))


def sum_pairs(output: Tensor, weights: Tensor, pairs: Pairs) -> Tensor:
    """`[rows, Dv]`: every query's weighted sum of its pairs, `weights [rows, J]`."""
    return embedding_bag(pairs.slots, output, mode="sum", per_sample_weights=weights.to(output.dtype))


def attend_pairs_backward(
    grad: Tensor,
    query: Tensor,
    leaves: Leaves,
    pairs: Pairs,
    merged: Attended,
    scale: float,
    backend: Backend,
) -> Gradients:
    """Gradients of query `[rows, D]`, leaf keys and leaf values under the merged output and lse of the rows."""
    wide = accumulation_dtype(query.dtype)
    grad_rows = query.new_empty((pairs.query_rows.shape[0], query.shape[-1]), dtype=wide)
    grad_key, grad_value = (torch.zeros_like(t, dtype=wide) for t in (leaves.key, leaves.value))
    for tile, slots, rows, leaf in pairs.batches():
        real, filled = rows.clamp_min(0), (rows >= 0).view(-1, 1, tile)
        own_grad, own_query, output = (
            t.index_select(0, real).view(-1, 1, tile, t.shape[-1]) for t in (grad, query, merged.output)
        )
        own_grad.masked_fill_(~filled[..., None], 0)
        # filler borrows a query that never met this leaf: exp(logit - lse) may overflow, 0 * inf is NaN
        lse = merged.lse.index_select(0, real).view(filled.shape)
        lse = lse.masked_fill_(~filled, torch.finfo(lse.dtype).max / 2)
        own = backend.at(f"slots {slots.start}")
        found = own.backward(leaves.tile(own_query, leaf, scale), own_grad, Attended(output, lse))
        grad_rows[slots] = found.query.reshape(-1, query.shape[-1])
        grad_key.index_add_(0, leaf, found.key.squeeze(1).to(wide))
        grad_value.index_add_(0, leaf, found.value.squeeze(1).to(wide))
    return Gradients(embedding_bag(pairs.slots, grad_rows, mode="sum"), grad_key, grad_value)
