"""HyperAttention over selected keys: one LSH block per query, plus a sampled residual.

Everything a query reads (its block, the residual samples, keys that every query reads, centroids) becomes columns
of one operator call, so there is one softmax and nothing to merge.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prescore.config import Coupling, Lsh
from prescore.devices import largest, maybe_any
from prescore.ops.operators import accumulation_dtype
from prescore.ops.parts import Part, mask_bias
from prescore.scoring.sampling import arange


class KeyRows(NamedTuple):
    """Columns that every query of a block pair reads: `rows [P, H, c]` and `bias [P, H, c]` (a log weight)."""

    rows: Tensor
    bias: Tensor


@dataclass(frozen=True, eq=False)
class BlockPairs:
    """Block pairs of one size: their queries, and the keys that were selected for them.

    `P` pairs (sequences, or off-diagonal blocks of the causal grid), `H` KV heads, `G` query heads for each.

    Attributes:
        query_rows: `[P, H, G, W]` flat rows of the queries.
        query_valid: `[P, W]`, False = filler; None = no filler.
        query_real: `[P, W]`, False = filler or padding, which moves no other query; None = all are real.
        key_rows: `[P, H, S]` flat rows of the keys that blocks are cut from.
        key_valid: `[P, H, S]`, False = filler; None = no filler.
        shared: Sinks and recent keys, then centroids, which are in no block and in no sample: every query reads
            them.
        n_centroids: How many of the last columns are centroids.
        n_all: `[P]` real keys before selection.
        draws: `[P, H, sample_size]` uniforms in [0, 1) of the residual samples; None = no `Lsh`.
        n_selected: `[P, H]` selected keys, where the rows of others are zeroed (`mask="zero"`); None = all rows.
        selected: `[P, H, S]`, False = in a block but not read (`blocks="all"`); None = all are read.
        fewest: Every pair and head has at least so many key rows that are not filler.
    """

    query_rows: Tensor
    query_valid: Tensor | None
    query_real: Tensor | None
    key_rows: Tensor
    key_valid: Tensor | None
    shared: list[KeyRows]
    n_centroids: int
    n_all: Tensor
    draws: Tensor | None = None
    n_selected: Tensor | None = None
    selected: Tensor | None = None
    fewest: int = 0

    def readable(self) -> Tensor | None:
        """`[P, H, S]`: keys that may be read; None = all."""
        if self.selected is None or self.key_valid is None:
            return self.key_valid if self.selected is None else self.selected
        return self.selected & self.key_valid

    def some(self, pairs: Tensor) -> BlockPairs:
        """Some of the pairs only."""

        def pick(value: Any) -> Any:
            return value.index_select(0, pairs) if isinstance(value, Tensor) else value

        picked = {field.name: pick(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return BlockPairs(**{**picked, "shared": [KeyRows(*map(pick, columns)) for columns in self.shared]})


def exact_part(pair: BlockPairs, dtype: torch.dtype) -> Part:
    """Every query over all selected keys of its pair; `dtype` is the query's."""
    dtype = accumulation_dtype(dtype)
    n_pairs, heads, heads_per_kv, width = pair.query_rows.shape
    readable = pair.readable()
    bias = torch.zeros(pair.key_rows.shape, dtype=dtype, device=pair.key_rows.device)
    columns = [KeyRows(pair.key_rows, bias if readable is None else mask_bias(readable, dtype)), *pair.shared]
    filled = pair.query_valid
    if filled is not None:
        filled = filled[:, None, None, :].expand(pair.query_rows.shape).flatten(0, 1)
    shape = (n_pairs * heads, heads_per_kv, width)
    part = _part(shape, pair.query_rows.flatten(0, 1), filled, columns, pair.n_centroids)
    return part if readable is not None or pair.shared else dataclasses.replace(part, bias=None)


def hyper_part(
    pair: BlockPairs,
    ranks: tuple[Tensor, Tensor],
    lsh: Lsh,
    coupling: Coupling,
    dtype: torch.dtype,
    placed: PlacedQueries | None = None,
) -> Part:
    """Each query over its LSH block and the residual samples.

    `ranks` are the Gray ranks of the queries `[P, H, G, W]` and of the keys `[P, H, S]`. `dtype` is the query's.
    Where other ranks have queries of the pair, `placed` has the places among all of them, for `alignment="rank"`.
    """
    # the bias holds logs of weights, which half precision would round by percents
    dtype, (query_ranks, key_ranks) = accumulation_dtype(dtype), ranks
    keys = _sort_keys(pair, key_ranks, lsh.block_size)
    if keys.most <= 1:
        tiles = _one_tile(pair)
    elif placed is not None:
        tiles = placed_tiles(placed, keys.n_blocks, keys.most)
    elif lsh.alignment == "rank":
        fewest = -(-pair.fewest // keys.block_size) if keys.block_size else 1
        blocks = keys.n_blocks, max(1, fewest), keys.most
        tiles = rank_tiles(query_ranks, blocks, pair.query_real, pair.query_valid)
    else:
        tiles = hash_tiles(query_ranks, keys, pair.query_valid)
    columns = []
    if keys.block_size:
        columns.append(_block_columns(pair, keys, dtype))
    residual = (0, 0)
    if pair.draws is not None and lsh.sample_size:
        residual = (keys.block_size, keys.block_size + lsh.sample_size)
        columns.append(_residual_columns(pair, keys, pair.draws, coupling, dtype))
    n_tiles = tiles.block.shape[-1]
    picked = [_of_block(column, tiles.block) for column in columns]
    picked += [KeyRows(*(t[:, :, None].expand(-1, -1, n_tiles, -1) for t in column)) for column in pair.shared]
    query_rows = pair.query_rows.flatten(2).gather(-1, tiles.places.flatten(2)).view(tiles.places.shape)
    shape = (tiles.block.numel(), *tiles.places.shape[3:])
    filled = None if tiles.filled is None else tiles.filled.flatten(0, 2)
    part = _part(shape, query_rows.flatten(0, 2), filled, picked, pair.n_centroids)
    return dataclasses.replace(part, residual=residual)


@dataclass(frozen=True, eq=False)
class _SortedKeys:
    """Keys in the order of their hash ranks, cut into blocks.

    Attributes:
        order: `[P, H, S]` places of the keys, by rank; filler last.
        ranks: `[P, H, S]` in that order.
        count: `[P, H]` keys that are not filler.
        block_size: Keys of a block; 0 = no blocks.
        n_blocks: An int, or `[P, H]` where pairs differ.
        most: The largest of them.
    """

    order: Tensor
    ranks: Tensor
    count: Tensor
    block_size: int
    n_blocks: Tensor | int
    most: int


def _sort_keys(pair: BlockPairs, key_ranks: Tensor, block_size: int) -> _SortedKeys:
    if pair.key_valid is not None:
        key_ranks = key_ranks.masked_fill(~pair.key_valid, torch.iinfo(key_ranks.dtype).max)
    ranks, order = torch.sort(key_ranks, dim=-1, stable=True)
    n_keys, count = pair.key_rows.shape[-1], _counts(pair.key_valid, pair.key_rows)
    block_size = min(block_size, n_keys)
    most = -(-n_keys // block_size) if block_size else 1
    n_blocks: Tensor | int = most
    if block_size and pair.key_valid is not None:
        n_blocks = ((count + block_size - 1) // block_size).clamp_min(1)
    return _SortedKeys(order, ranks, count, block_size, n_blocks, most)


def _counts(valid: Tensor | None, rows: Tensor) -> Tensor:
    if valid is not None:
        return valid.sum(-1)
    return torch.full(rows.shape[:2], rows.shape[2], dtype=torch.int64, device=rows.device)


def _block_columns(pair: BlockPairs, keys: _SortedKeys, dtype: torch.dtype) -> KeyRows:
    """`[P, H, blocks, block_size]` rows of the sorted keys, -inf on filler and on keys that are not read."""
    cut = (keys.most, keys.block_size)
    slot = arange(keys.most * keys.block_size, like=keys.order)
    order = keys.order.index_select(-1, slot.clamp_max(keys.order.shape[-1] - 1))
    visible = slot < keys.count[..., None]
    if pair.selected is not None:
        visible = visible & pair.selected.gather(-1, order)
    return KeyRows(
        pair.key_rows.gather(-1, order).unflatten(-1, cut), mask_bias(visible, dtype).unflatten(-1, cut)
    )


def _residual_columns(
    pair: BlockPairs, keys: _SortedKeys, draws: Tensor, coupling: Coupling, dtype: torch.dtype
) -> KeyRows:
    """`[P, H, blocks, samples]`: selected keys, sampled, each with the weight (keys / samples)."""
    n_samples, readable = draws.shape[-1], pair.readable()
    count = _counts(readable, pair.key_rows)
    sample = (draws * count[..., None]).floor().to(torch.int64)
    sample = torch.minimum(sample, (count[..., None] - 1).clamp_min(0))
    if readable is not None:
        # the i-th *readable* key: others may stand anywhere in the list
        sample = torch.sort(~readable, dim=-1, stable=True).indices.gather(-1, sample)
    size = count if pair.n_selected is None else pair.n_selected
    if coupling.residual_weight == "all":
        size = pair.n_all[:, None].expand_as(count)
    bias = torch.log(size.to(torch.float64) / n_samples).to(dtype)
    bias = bias.masked_fill(count == 0, -torch.inf)[..., None, None].expand(*count.shape, keys.most, n_samples)
    if keys.block_size and coupling.overlap == "exclude":
        # a sample that lies in the query's block is counted there
        numbers = arange(keys.order.shape[-1], like=sample)
        rank = torch.empty_like(keys.order).scatter_(-1, keys.order, numbers.expand_as(keys.order))
        block = torch.div(rank.gather(-1, sample), keys.block_size, rounding_mode="floor")
        bias = bias.masked_fill(block[:, :, None, :] == arange(keys.most, like=sample)[:, None], -torch.inf)
    rows = pair.key_rows.gather(-1, sample)
    return KeyRows(rows[:, :, None].expand(-1, -1, keys.most, -1), bias)


def _of_block(columns: KeyRows, block: Tensor) -> KeyRows:
    """Columns of the block that each tile reads."""
    index = block[..., None].expand(*block.shape, columns.rows.shape[-1])
    return KeyRows(*(tensor.gather(2, index) for tensor in columns))


def _part(
    shape: tuple[int, ...], query_rows: Tensor, filled: Tensor | None, columns: list[KeyRows], n_centroids: int
) -> Part:
    tiles, heads, width = shape
    rows, bias = (
        torch.cat([t.reshape(tiles, -1) for t in tensors], dim=1) for tensors in zip(*columns, strict=True)
    )
    return Part((tiles, heads, width), query_rows, filled, rows, bias, n_centroids=n_centroids)


# Cut queries into tiles that share one block of sorted keys.
#
# Two alignments. `rank` (published): sorted queries and sorted keys are cut into equally many blocks, so a query's
# block depends on all other queries. `hash`: a query reads the block where its own Gray rank falls among the
# sorted keys, so it depends on itself and the keys only; the queries of a block are then dispatched in tiles of
# fixed size.

_MOST_TILE_ROWS = 256
_LEAST_TILE_ROWS = 32


class Tiles(NamedTuple):
    """Query slots `[P, H, tiles, heads, rows]` and the key `block [P, H, tiles]` that each tile reads.

    `places` are positions in the pair's queries, counted over the query heads of a KV head:
    `head_of_kv * W + query`. `filled` is False on filler; None = no filler.
    """

    places: Tensor
    filled: Tensor | None
    block: Tensor


def _one_tile(pair: BlockPairs) -> Tiles:
    """One tile per pair and head with all queries in order, where there is one block."""
    n_pairs, heads, heads_per_kv, width = pair.query_rows.shape
    places = arange(heads_per_kv * width, like=pair.query_rows).view(1, 1, 1, heads_per_kv, width)
    places = places.expand(n_pairs, heads, 1, heads_per_kv, width)
    filled = pair.query_valid
    if filled is not None:
        filled = filled[:, None, None, None, :].expand(places.shape)
    return Tiles(places, filled, places.new_zeros(n_pairs, heads, 1))


def rank_tiles(
    ranks: Tensor, blocks: tuple[Tensor | int, int, int], real: Tensor | None, valid: Tensor | None
) -> Tiles:
    """Sort each head's queries by `ranks [P, H, G, W]`, and cut them into as many blocks as the keys have.

    `blocks` are their number, an int or `[P, H]`, and the fewest and most that it can be. `real [P, W]` is False
    on filler and padding, `valid [P, W]` on filler. Padding queries are cut apart from the real ones, so that they
    move none of them.
    """
    n_pairs, heads, heads_per_kv, width = ranks.shape
    n_blocks, fewest, most_blocks = blocks
    for mask, last in ((real, 1), (valid, 0)):
        if mask is not None:
            ranks = ranks.masked_fill(~mask[:, None, None, :], torch.iinfo(ranks.dtype).max - last)
    order = torch.sort(ranks, dim=-1, stable=True).indices
    position = order + arange(heads_per_kv, like=ranks)[:, None] * width
    block = arange(most_blocks, like=ranks).expand(n_pairs, heads, most_blocks)
    if real is None and isinstance(n_blocks, int) and width % n_blocks == 0:
        tiles = position.view(n_pairs, heads, heads_per_kv, n_blocks, width // n_blocks).transpose(2, 3)
        return Tiles(tiles, None, block)
    per_head = _per_head(n_blocks, order)
    n_real, n_valid = (per_head.new_full((n_pairs,), width) if t is None else t.sum(1) for t in (real, valid))
    most_rows = -(-width // fewest)
    slots, filled = _cut(n_real, per_head, most_blocks, most_rows)
    if real is not valid and maybe_any(n_valid > n_real):
        more, also = _cut(n_valid - n_real, per_head, most_blocks, most_rows)
        slots = torch.cat((slots, more + n_real[:, None, None, None]), dim=-1)
        filled = torch.cat((filled, also), dim=-1)
    rows = slots.shape[-1]
    slots = slots.clamp_max(width - 1)[:, :, None].expand(-1, -1, heads_per_kv, -1, -1).flatten(-2)
    tiles = position.gather(-1, slots).unflatten(-1, (most_blocks, rows)).transpose(2, 3)
    return Tiles(tiles, filled[:, :, :, None].expand_as(tiles), block)


class PlacedQueries(NamedTuple):
    """Places `[P, H, G, W]` of some queries in the rank order of all `n_queries` of their pair."""

    places: Tensor
    n_queries: int


def placed_tiles(placed: PlacedQueries, n_blocks: Tensor | int, most: int) -> Tiles:
    """Send each query to the block that `rank_tiles` gives it among all queries."""
    places = placed.places.flatten(2)
    blocks = _per_head(n_blocks, places)[..., None]
    block = torch.div(places * blocks, placed.n_queries, rounding_mode="floor")
    return _dispatch(block, largest(blocks, most))


def _per_head(n_blocks: Tensor | int, like: Tensor) -> Tensor:
    """`[P, H]`, as `like [P, H, ...]` has them."""
    if isinstance(n_blocks, Tensor):
        return n_blocks
    return torch.full(like.shape[:2], n_blocks, dtype=torch.int64, device=like.device)


def _cut(count: Tensor, blocks: Tensor, most_blocks: int, most_rows: int) -> tuple[Tensor, Tensor]:
    """Cut places `0..count [P]` into `blocks [P, H]` equal ones: slots `[P, H, most_blocks, rows]`, and a mask."""
    edge, total, blocks = arange(most_blocks + 1, like=count), count[:, None, None], blocks[..., None]
    # ceil(edge * count / blocks); blocks that a pair lacks are empty
    edges = torch.div(edge * total + blocks - 1, blocks, rounding_mode="floor").minimum(total)
    rows = max(1, largest(edges[..., 1:] - edges[..., :-1], most_rows))
    slots = edges[..., :-1, None] + arange(rows, like=count)
    return slots, slots < edges[..., 1:, None]


def hash_tiles(ranks: Tensor, keys: _SortedKeys, valid: Tensor | None) -> Tiles:
    """Send each query to the block that its rank falls into, then cut each block's queries into tiles.

    `ranks [P, H, G, W]` are Gray ranks; `valid [P, W]` is False on filler queries.
    """
    flat = ranks.flatten(2)
    low = torch.searchsorted(keys.ranks, flat)
    high = torch.searchsorted(keys.ranks, flat, right=True)
    # a bucket wider than a block is entered in its middle
    blocks = _per_head(keys.n_blocks, flat)[..., None]
    block = torch.minimum(torch.div(low + high, 2 * keys.block_size, rounding_mode="floor"), blocks - 1)
    most = largest(blocks, keys.most)
    if valid is not None:
        block = block.masked_fill(~valid.repeat(1, ranks.shape[2])[:, None, :], most)
    return _dispatch(block, most)


def _dispatch(block: Tensor, n_blocks: int) -> Tiles:
    """Tiles of queries with the same `block [P, H, R]`; block number `n_blocks` means that none is read."""
    n_rows, lead = block.shape[-1], block.shape[:2]
    rows = _MOST_TILE_ROWS
    while rows > _LEAST_TILE_ROWS and rows * n_blocks > n_rows:
        rows //= 2

    def numbers(n: int) -> Tensor:
        return arange(n, like=block).expand(*lead, n).contiguous()

    in_order, order = torch.sort(block, dim=-1, stable=True)
    edges = torch.searchsorted(in_order, numbers(n_blocks + 1))  # [P, H, blocks + 1]
    counts = edges[..., 1:] - edges[..., :-1]
    tiles_before = torch.nn.functional.pad(((counts + rows - 1) // rows).cumsum(-1), (1, 0))
    # every block has at most one tile that is not full
    n_tiles = max(1, largest(tiles_before[..., -1], n_rows // rows + n_blocks))
    tile = numbers(n_tiles)
    block_of = (torch.searchsorted(tiles_before, tile, right=True) - 1).clamp_max(n_blocks - 1)
    start = edges.gather(-1, block_of) + (tile - tiles_before.gather(-1, block_of)) * rows
    slots = start[..., None] + arange(rows, like=block)  # [P, H, tiles, rows]
    filled = slots < edges.gather(-1, block_of + 1)[..., None]
    places = order.gather(-1, slots.clamp(max=n_rows - 1).flatten(-2)).unflatten(-1, (n_tiles, rows))
    return Tiles(places[:, :, :, None], filled[:, :, :, None], block_of)
