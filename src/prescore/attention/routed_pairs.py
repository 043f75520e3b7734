"""The routed half: (query, leaf) pairs, dispatched by leaf into dense tiles.

Every query has chosen its own leaves. The pairs are sorted by leaf and cut into tiles of queries that read one
and the same leaf, as mixture-of-experts kernels do with tokens and experts; each query then sums its results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from prescore.attention.kernels import Backend, accumulation_dtype

TILE = 128


@dataclass(frozen=True, eq=False)
class Pairs:
    """Tiles of queries that read one leaf each.

    Attributes:
        leaf: `[tiles]` leaf number.
        query_rows: `[tiles * TILE]` row number of every slot's query; filler repeats row 0.
        filled: `[tiles * TILE]`, False on filler.
        slots: `[rows, J]`: where each query's j-th pair lies.
    """

    leaf: Tensor
    query_rows: Tensor
    filled: Tensor
    slots: Tensor


def dispatch(leaves: Tensor, n_leaves: int) -> Pairs:
    """Sort pairs into tiles.

    Args:
        leaves: `[rows, J]` leaf numbers below `n_leaves`.
        n_leaves: Leaves in all.
    """
    rows, per_query = leaves.shape
    flat = leaves.reshape(-1)
    small = flat.to(torch.int32) if n_leaves < 2**31 else flat
    in_order, pair = torch.sort(small, stable=True)
    count = torch.bincount(flat, minlength=n_leaves)
    tiles = (count + TILE - 1) // TILE
    first_pair, first_tile = count.cumsum(0) - count, tiles.cumsum(0) - tiles
    shift = (first_tile * TILE - first_pair).index_select(0, in_order.to(torch.int64))
    slot = torch.arange(flat.shape[0], device=flat.device) + shift
    leaf = torch.repeat_interleave(torch.arange(n_leaves, device=flat.device), tiles)
    n_slots = leaf.shape[0] * TILE
    query_rows = torch.zeros(n_slots, dtype=torch.int64, device=flat.device)
    query_rows[slot] = pair // per_query
    filled = torch.zeros(n_slots, dtype=torch.bool, device=flat.device)
    filled[slot] = True
    slots = torch.empty_like(slot)
    slots[pair] = slot
    return Pairs(leaf, query_rows, filled, slots.view(rows, per_query))


@dataclass(frozen=True, eq=False)
class Leaves:
    """All leaves: `key [M, L, D]`, `value [M, L, Dv]`, `bias [M, L]` (-inf on filler) or None."""

    key: Tensor
    value: Tensor
    bias: Tensor | None


def attend_pairs(
    query: Tensor, leaves: Leaves, pairs: Pairs, scale: float, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Output `[tiles * TILE, Dv]` and lse `[rows, J]` of every pair."""
    tiles = _tiles(query, pairs)
    output, lse = backend.forward(tiles, *_columns(leaves, pairs), False, scale)
    return output.reshape(-1, output.shape[-1]), lse.reshape(-1)[pairs.slots]


def sum_pairs(output: Tensor, weights: Tensor, pairs: Pairs) -> Tensor:
    """`[rows, Dv]`: every query's weighted sum of its pairs, `weights [rows, J]`."""
    return embedding_bag(pairs.slots, output, mode="sum", per_sample_weights=weights.to(output.dtype))


def attend_pairs_backward(
    grad: Tensor, query: Tensor, leaves: Leaves, pairs: Pairs, output: Tensor, lse: Tensor, scale: float,
    backend: Backend,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query `[rows, D]`, leaf keys and leaf values under the merged `output` and `lse`."""
    wide = accumulation_dtype(query.dtype)
    key, value, bias = _columns(leaves, pairs)
    filled = pairs.filled.view(-1, 1, TILE)
    grad_tiles = _tiles(grad, pairs) * filled[..., None]
    lse_tiles = lse.index_select(0, pairs.query_rows).view(filled.shape)
    grads = backend.backward(
        grad_tiles, _tiles(query, pairs), key, value, bias, _tiles(output, pairs), lse_tiles, False, scale
    )
    flat = grads[0].reshape(-1, query.shape[-1])
    grad_query = embedding_bag(pairs.slots, flat.to(wide), mode="sum")
    grad_key = torch.zeros_like(leaves.key, dtype=wide).index_add_(0, pairs.leaf, grads[1].squeeze(1).to(wide))
    grad_value = torch.zeros_like(leaves.value, dtype=wide).index_add_(0, pairs.leaf, grads[2].squeeze(1).to(wide))
    return grad_query, grad_key, grad_value


def _tiles(rows: Tensor, pairs: Pairs) -> Tensor:
    return rows.index_select(0, pairs.query_rows).view(-1, 1, TILE, rows.shape[-1])


def _columns(leaves: Leaves, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor | None]:
    key, value = (t.index_select(0, pairs.leaf)[:, None] for t in (leaves.key, leaves.value))
    bias = None if leaves.bias is None else leaves.bias.index_select(0, pairs.leaf)[:, None, None]
    return key, value, bias
