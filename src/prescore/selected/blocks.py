"""HyperAttention over given keys: one LSH block per query, plus a sampled residual.

All columns a query sees (its block, the residual samples, keys that are always kept, centroids) go into one
call of the operator, so there is one softmax and nothing to merge.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prescore.config import Coupling, Lsh
from prescore.ops.backend import accumulation_dtype
from prescore.ops.parts import Part


@dataclass(frozen=True, eq=False)
class KeyRows:
    """Key rows that every query of a problem sees: `rows [P, H, c]`, `bias [P, H, c]` (0 or -inf or a weight)."""

    rows: Tensor
    bias: Tensor

    def some(self, problems: Tensor) -> KeyRows:
        """Those of some of the problems."""
        return KeyRows(self.rows.index_select(0, problems), self.bias.index_select(0, problems))


@dataclass(frozen=True, eq=False)
class BlockPair:
    """Independent attention problems of one size: queries over selected keys.

    `P` problems (batch rows, or blocks of the causal recursion), `H` KV heads, `G` query heads for each.

    Attributes:
        query_rows: `[P, H, G, W]` flat rows of the queries.
        query_valid: `[P, W]`, False = filler; None = none.
        query_real: `[P, W]`, False = filler or padding, which moves no other query; None = none.
        key_rows: `[P, H, S]` flat rows of the selected keys.
        key_valid: `[P, H, S]`, False = filler; None = none.
        kept: Keys outside blocks and residual, seen exactly by every query.
        extra: Centroids, likewise.
        n_all: `[P]` real keys before selection.
        n_selected: `[P, H]` selected keys, where `key_rows` hold others too (`mask="zero"`); None = all of them.
    """

    query_rows: Tensor
    query_valid: Tensor | None
    query_real: Tensor | None
    key_rows: Tensor
    key_valid: Tensor | None
    kept: KeyRows | None
    extra: KeyRows | None
    n_all: Tensor
    n_selected: Tensor | None = None

    def counts(self) -> Tensor:
        """`[P, H]` keys that are not filler."""
        shape = self.key_rows.shape
        if self.key_valid is None:
            return torch.full(shape[:2], shape[2], device=self.key_rows.device)
        return self.key_valid.sum(-1)

    def some(self, problems: Tensor) -> BlockPair:
        """Some of the problems only."""

        def pick(value: Any) -> Any:
            if value is None:
                return None
            return value.some(problems) if isinstance(value, KeyRows) else value.index_select(0, problems)

        return BlockPair(*(pick(getattr(self, f.name)) for f in dataclasses.fields(self)))


def exact_part(pair: BlockPair, dtype: torch.dtype) -> Part:
    """Every query over all selected keys of its problem; `dtype` is the query's."""
    dtype = accumulation_dtype(dtype)
    n_problems, heads, group, width = pair.query_rows.shape
    columns = [KeyRows(pair.key_rows, _validity_bias(pair, dtype))]
    columns += [pair.kept] if pair.kept is not None else []
    filled = pair.query_valid
    if filled is not None:
        filled = filled[:, None, None, :].expand(pair.query_rows.shape).flatten(0, 1)
    shape = (n_problems * heads, group, width)
    biased = pair.key_valid is not None
    return _part(shape, pair.query_rows.flatten(0, 1), filled, columns, pair.extra, biased)


def hyper_part(
    pair: BlockPair,
    query_ranks: Tensor,
    key_ranks: Tensor,
    draws: Tensor,
    lsh: Lsh,
    coupling: Coupling,
    dtype: torch.dtype,
    placed: PlacedQueries | None = None,
) -> Part:
    """Each query over its LSH block and the residual samples.

    Args:
        meeting: What to attend to.
        query_ranks: `[P, H, G, W]` Gray ranks.
        key_ranks: `[P, H, S]` Gray ranks of the selected keys.
        draws: `[sample_size]` uniforms in [0, 1), shared by all problems and heads.
        lsh: Size of a block, and which one a query reads.
        coupling: Weight of the residual and what happens to keys that are in block and sample.
        dtype: Of the queries; the bias holds logs of weights, which half precision would round by percents.
        placed: Where the queries stand among more than these, for `alignment="rank"`; None = these are all.
    """
    dtype = accumulation_dtype(dtype)
    n_problems, heads, _ = pair.key_rows.shape
    keys = _sort_keys(pair, key_ranks, lsh.block_size)
    if keys.most <= 1:
        tiles = _whole(pair)
    elif placed is not None:
        tiles = placed_tiles(placed, keys.n_blocks)
    elif lsh.alignment == "rank":
        tiles = rank_tiles(query_ranks, keys.n_blocks, keys.most, pair.query_real, pair.query_valid)
    else:
        tiles = hash_tiles(query_ranks, keys.ranks, keys.block_size, keys.n_blocks, pair.query_valid)
    columns = []
    if keys.block_size:
        columns.append(_block_columns(pair, keys, dtype))
    residual = (0, 0)
    if draws.numel():
        residual = (keys.block_size, keys.block_size + draws.numel())
        columns.append(_residual_columns(pair, keys, draws, coupling, dtype))
    n_tiles = tiles.block.shape[-1]
    picked = [_pick(column, tiles.block) for column in columns]
    if pair.kept is not None:
        picked.append(_spread(pair.kept, n_tiles))
    extra = None if pair.extra is None else _spread(pair.extra, n_tiles)
    query_rows = pair.query_rows.flatten(2).gather(-1, tiles.places.flatten(2)).view(tiles.places.shape)
    shape = (n_problems * heads * n_tiles, *tiles.places.shape[3:])
    filled = None if tiles.filled is None else tiles.filled.flatten(0, 2)
    part = _part(shape, query_rows.flatten(0, 2), filled, picked, extra, True)
    return dataclasses.replace(part, residual=residual)


@dataclass(frozen=True, eq=False)
class _SortedKeys:
    """Keys in the order of their ranks, cut into blocks.

    Attributes:
        order: `[P, H, S]` places of the keys, by rank; filler last.
        ranks: `[P, H, S]` in that order.
        count: `[P, H]` keys that are not filler.
        block_size: Keys of a block; 0 = no blocks.
        n_blocks: An int, or `[P, H]` where problems differ.
        most: The largest of them.
    """

    order: Tensor
    ranks: Tensor
    count: Tensor
    block_size: int
    n_blocks: Tensor | int
    most: int


def _sort_keys(pair: BlockPair, key_ranks: Tensor, block_size: int) -> _SortedKeys:
    if pair.key_valid is not None:
        key_ranks = key_ranks.masked_fill(~pair.key_valid, torch.iinfo(key_ranks.dtype).max)
    ranks, order = torch.sort(key_ranks, dim=-1, stable=True)
    n_keys, count = pair.key_rows.shape[-1], pair.counts()
    block_size = min(block_size, n_keys)
    most = -(-n_keys // block_size) if block_size else 1
    n_blocks: Tensor | int = most
    if block_size and pair.key_valid is not None:
        n_blocks = ((count + block_size - 1) // block_size).clamp_min(1)
    return _SortedKeys(order, ranks, count, block_size, n_blocks, most)


def _whole(pair: BlockPair) -> Tiles:
    """One tile per problem and head holding all queries in order: nothing to sort."""
    n_problems, heads, group, width = pair.query_rows.shape
    places = torch.arange(group * width, device=pair.query_rows.device).view(1, 1, 1, group, width)
    places = places.expand(n_problems, heads, 1, group, width)
    filled = pair.query_valid
    if filled is not None:
        filled = filled[:, None, None, None, :].expand(places.shape)
    return Tiles(places, filled, places.new_zeros(n_problems, heads, 1))


def _block_columns(pair: BlockPair, keys: _SortedKeys, dtype: torch.dtype) -> KeyRows:
    """`[P, H, blocks, block_size]` rows of the sorted keys, -inf on filler."""
    cut = (keys.most, keys.block_size)
    slot = torch.arange(keys.most * keys.block_size, device=keys.order.device)
    rows = pair.key_rows.gather(-1, keys.order)
    rows = rows.index_select(-1, slot.clamp_max(rows.shape[-1] - 1)).unflatten(-1, cut)
    bias = torch.zeros((), dtype=dtype, device=slot.device).where(slot < keys.count[..., None], -torch.inf)
    return KeyRows(rows, bias.unflatten(-1, cut))


def _residual_columns(
    pair: BlockPair, keys: _SortedKeys, draws: Tensor, coupling: Coupling, dtype: torch.dtype
) -> KeyRows:
    """`[P, H, blocks, samples]`: sampled keys weighted by (keys / samples), own block left out."""
    n_samples, count, order = draws.numel(), keys.count, keys.order
    sample = (draws * count[..., None]).floor().to(torch.int64)
    sample = torch.minimum(sample, (count[..., None] - 1).clamp_min(0))
    if pair.key_valid is not None:
        # the i-th *valid* key: filler may stand anywhere in a ragged list
        sample = torch.sort(~pair.key_valid, dim=-1, stable=True).indices.gather(-1, sample)
    rows = pair.key_rows.gather(-1, sample)
    size = count if pair.n_selected is None else pair.n_selected
    if coupling.residual_weight == "all":
        size = pair.n_all[:, None].expand_as(count)
    bias = torch.log(size.to(torch.float64) / n_samples).to(dtype)
    bias = bias.masked_fill(count == 0, -torch.inf)[..., None, None].expand(*count.shape, keys.most, n_samples)
    if keys.block_size and coupling.overlap == "exclude":
        place = torch.empty_like(order).scatter_(-1, order, _positions(order))
        block = torch.div(place.gather(-1, sample), keys.block_size, rounding_mode="floor")
        own = block[:, :, None, :] == torch.arange(keys.most, device=order.device)[:, None]
        bias = bias.masked_fill(own, -torch.inf)
    return KeyRows(rows[:, :, None].expand(-1, -1, keys.most, -1), bias)


def _positions(order: Tensor) -> Tensor:
    return torch.arange(order.shape[-1], device=order.device).expand_as(order)


def _pick(columns: KeyRows, block: Tensor) -> KeyRows:
    """KeyRows of the block each tile reads."""
    index = block[..., None].expand(*block.shape, columns.rows.shape[-1])
    return KeyRows(columns.rows.gather(2, index).flatten(0, 2), columns.bias.gather(2, index).flatten(0, 2))


def _spread(columns: KeyRows, n_tiles: int) -> KeyRows:
    rows, bias = (t[:, :, None].expand(-1, -1, n_tiles, -1).flatten(0, 2) for t in (columns.rows, columns.bias))
    return KeyRows(rows, bias)


def _validity_bias(pair: BlockPair, dtype: torch.dtype) -> Tensor:
    bias = torch.zeros(pair.key_rows.shape, dtype=dtype, device=pair.key_rows.device)
    return bias if pair.key_valid is None else bias.masked_fill_(~pair.key_valid, -torch.inf)


def _part(
    shape: tuple[int, ...],
    query_rows: Tensor,
    filled: Tensor | None,
    columns: list[KeyRows],
    extra: KeyRows | None,
    biased: bool,
) -> Part:
    tiles = shape[0]
    rows = [column.rows.reshape(tiles, -1) for column in columns]
    biases = [column.bias.reshape(tiles, -1) for column in columns]
    if not rows:
        rows, biases = [query_rows.new_zeros(tiles, 0)], [torch.zeros(tiles, 0, device=query_rows.device)]
    extra_rows = None
    if extra is not None:
        extra_rows = extra.rows.reshape(tiles, -1)
        biases.append(extra.bias.reshape(tiles, -1))
    needs_bias = biased or extra is not None or len(columns) > 1
    return Part(
        (tiles, shape[1], shape[2]),
        query_rows=query_rows,
        query_valid=filled,
        key_rows=torch.cat(rows, dim=1),
        extra_rows=extra_rows,
        bias=torch.cat(biases, dim=1) if needs_bias else None,
    )


# Cut queries into tiles that share one block of sorted keys.
#
# Two alignments. `rank` (published): sorted queries and sorted keys are cut into equally many blocks, so a query's
# block depends on all other queries. `hash`: a query reads the block where its own Gray rank falls among the
# sorted keys, so it depends on itself and the keys only; the queries of a block are then dispatched in tiles of
# fixed size.

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
