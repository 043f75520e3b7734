"""Cut queries into tiles that share one block of sorted keys.

Two alignments. `rank` (published): sorted queries and sorted keys are cut into equally many blocks, so a query's
block depends on all other queries. `hash`: a query reads the block where its own Gray rank falls among the
sorted keys, so it depends on itself and the keys only; the queries of a block are then dispatched in tiles of
fixed size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_TILE_ROWS = 256
_LEAST_TILE_ROWS = 32


@dataclass(frozen=True, eq=False)
class Tiles:
    """Query slots `[P, H, tiles, heads, rows]` and the key block of each tile.

    Attributes:
        places: Positions in the problem's queries, counted over the group: `head_in_group * W + query`.
        filled: False on filler; None = no filler.
        block: `[P, H, tiles]` the key block a tile reads.
    """

    places: Tensor
    filled: Tensor | None
    block: Tensor


def rank_tiles(
    ranks: Tensor, n_blocks: Tensor | int, most_blocks: int, real: Tensor | None, valid: Tensor | None
) -> Tiles:
    """Sort each head's queries, cut them into as many blocks as the keys have.

    Args:
        ranks: `[P, H, G, W]` Gray ranks of the queries.
        n_blocks: Key blocks, an int or `[P, H]`.
        most_blocks: The largest of them.
        real: `[P, W]`, False = filler or padding; None = all are real. Padding is spread over the blocks after
            the real queries were, so that it moves none of them.
        valid: `[P, W]`, False = filler; None = no filler.
    """
    problems, heads, group, width = ranks.shape
    if real is not None:
        ranks = ranks.masked_fill(~real[:, None, None, :], torch.iinfo(ranks.dtype).max - 1)
    if valid is not None:
        ranks = ranks.masked_fill(~valid[:, None, None, :], torch.iinfo(ranks.dtype).max)
    order = torch.sort(ranks, dim=-1, stable=True).indices
    place = order + torch.arange(group, device=ranks.device)[:, None] * width
    block = torch.arange(most_blocks, device=ranks.device).expand(problems, heads, most_blocks)
    if real is None and isinstance(n_blocks, int) and width % n_blocks == 0:
        tiles = place.view(problems, heads, group, n_blocks, width // n_blocks).transpose(2, 3)
        return Tiles(tiles, None, block)
    blocks = torch.as_tensor(n_blocks, device=ranks.device).expand(problems, heads)
    n_real = blocks.new_full((problems,), width) if real is None else real.sum(1)
    n_valid = blocks.new_full((problems,), width) if valid is None else valid.sum(1)
    slots, filled = _cut(n_real, blocks, most_blocks)
    if bool((n_valid > n_real).any()):
        more, also = _cut(n_valid - n_real, blocks, most_blocks)
        slots = torch.cat((slots, more + n_real[:, None, None, None]), dim=-1)
        filled = torch.cat((filled, also), dim=-1)
    rows = slots.shape[-1]
    slots = slots.clamp_max(width - 1)[:, :, None].expand(-1, -1, group, -1, -1).flatten(-2)
    tiles = place.gather(-1, slots).unflatten(-1, (most_blocks, rows)).transpose(2, 3)
    return Tiles(tiles, filled[:, :, :, None].expand_as(tiles), block)


@dataclass(frozen=True, eq=False)
class PlacedQueries:
    """Places `[P, H, G, W]` of some queries in the order of the ranks of all `n_queries` of their problem."""

    places: Tensor
    n_queries: int


def placed_tiles(placed: PlacedQueries, n_blocks: Tensor | int) -> Tiles:
    """Send each query to the block that `rank_tiles` gives it among all queries."""
    places = placed.places.flatten(2)
    blocks = torch.as_tensor(n_blocks, device=places.device).expand(places.shape[:2])[..., None]
    return _dispatch(torch.div(places * blocks, placed.n_queries, rounding_mode="floor"), int(blocks.max()))


def _cut(count: Tensor, blocks: Tensor, most_blocks: int) -> tuple[Tensor, Tensor]:
    """Cut places `0..count [P]` into `blocks [P, H]` equal blocks: `[P, H, most_blocks, rows]`, which exist."""
    edge = torch.arange(most_blocks + 1, device=count.device)
    total, blocks = count[:, None, None], blocks[..., None]
    # ceil(edge * count / blocks); blocks that a problem lacks are empty
    edges = torch.div(edge * total + blocks - 1, blocks, rounding_mode="floor").minimum(total)
    rows = max(1, int((edges[..., 1:] - edges[..., :-1]).max()))
    slots = edges[..., :-1, None] + torch.arange(rows, device=count.device)
    return slots, slots < edges[..., 1:, None]


def hash_tiles(
    ranks: Tensor, sorted_keys: Tensor, block_size: int, n_blocks: Tensor | int, valid: Tensor | None
) -> Tiles:
    """Send each query to the block its rank falls into, then cut each block's queries into tiles.

    Args:
        ranks: `[P, H, G, W]` Gray ranks of the queries.
        sorted_keys: `[P, H, S]` Gray ranks of the keys in order, filler last.
        block_size: Keys in a block.
        n_blocks: Key blocks, an int or `[P, H]`.
        valid: `[P, W]`, False = a query that takes no part; None = all do.
    """
    flat = ranks.flatten(2)
    low = torch.searchsorted(sorted_keys, flat)
    high = torch.searchsorted(sorted_keys, flat, right=True)
    last = (n_blocks if isinstance(n_blocks, int) else n_blocks[..., None]) - 1
    # a bucket wider than a block is entered in its middle
    block = torch.minimum(torch.div(low + high, 2 * block_size, rounding_mode="floor"), torch.as_tensor(last))
    most = int(torch.as_tensor(n_blocks).max())
    if valid is not None:
        hidden = ~valid.repeat(1, ranks.shape[2])[:, None, :]
        block = block.masked_fill(hidden, most)
    return _dispatch(block, most)


def _dispatch(block: Tensor, n_blocks: int) -> Tiles:
    """Tiles of queries with the same `block [P, H, R]`; block number `n_blocks` means nowhere."""
    device, n_rows = block.device, block.shape[-1]
    rows = _MOST_TILE_ROWS
    while rows > _LEAST_TILE_ROWS and rows * n_blocks > n_rows:
        rows //= 2
    in_order, order = torch.sort(block, dim=-1, stable=True)
    numbers = torch.arange(n_blocks + 1, device=device).expand(*block.shape[:2], n_blocks + 1).contiguous()
    edges = torch.searchsorted(in_order, numbers)  # [P, H, blocks + 1]
    counts = edges[..., 1:] - edges[..., :-1]
    tiles_before = torch.nn.functional.pad(((counts + rows - 1) // rows).cumsum(-1), (1, 0))
    n_tiles = max(1, int(tiles_before[..., -1].max()))
    tile = torch.arange(n_tiles, device=device).expand(*block.shape[:2], n_tiles).contiguous()
    owner = (torch.searchsorted(tiles_before, tile, right=True) - 1).clamp_max(n_blocks - 1)
    start = edges.gather(-1, owner) + (tile - tiles_before.gather(-1, owner)) * rows
    slots = start[..., None] + torch.arange(rows, device=device)  # [P, H, tiles, rows]
    filled = slots < edges.gather(-1, owner + 1)[..., None]
    places = order.gather(-1, slots.clamp(max=n_rows - 1).flatten(-2)).unflatten(-1, (n_tiles, rows))
    return Tiles(places[:, :, :, None], filled[:, :, :, None], owner)
