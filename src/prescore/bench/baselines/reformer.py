"""Reformer-style attention: queries read the keys that hash to the same bucket, in several rounds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prescore import checks
from prescore.bench.baselines.tiles import Placed, baseline
from prescore.ops.operators import accumulation_dtype
from prescore.ops.parts import Part
from prescore.rng import Streams, as_streams


@baseline
def reformer_attention(
    placed: Placed, *, n_buckets: int = 64, chunk_size: int = 64, n_rounds: int = 4
) -> list[Part]:
    """Exact attention to nearby keys of the query's bucket, in the union of several hash rounds.

    A round hashes queries and keys by `argmax [x R, -x R]` with one random `R [D, n_buckets / 2]`. The keys of a
    bucket, in order of position, are cut into chunks of `chunk_size`. A query belongs to the chunk of the last
    key of its bucket that is not after its position, and sees that chunk and the one before it. A key seen in r
    rounds gets the weight 1 / r in each, so it counts once.

    The published method cuts the sequence sorted by bucket into chunks across buckets, so that a later key or
    query moves the cuts for earlier ones. Here chunks are counted from the start of their bucket, so what a
    query sees depends on nothing later than itself. Queries and keys are not one projection here: a query whose
    bucket holds no earlier key, in any round, sees nothing.

    Without causality a query sees the same two chunks, later keys included; with `Nq != Nk` the queries are
    spread evenly over the positions. Time and memory are `O(n_rounds n chunk_size)` and more for the hash.

    Args:
        placed: The call; its generator seeds the hashes.
        n_buckets: 1 (no hashing) or an even number.
        chunk_size: Keys in a chunk; a query sees at most `2 * chunk_size * n_rounds` keys.
        n_rounds: Independent hashes.
    """
    checks.integer("n_buckets", n_buckets, minimum=1)
    if n_buckets > 1 and n_buckets % 2:
        raise ValueError(f"n_buckets must be 1 or even, got {n_buckets}")
    checks.integer("chunk_size", chunk_size, minimum=1)
    checks.integer("n_rounds", n_rounds, minimum=1)
    streams = as_streams(placed.generator)
    if placed.empty:
        return []
    index, size = _query_index(placed), min(chunk_size, placed.call.n_keys)
    names = [f"reformer round {number}" for number in range(n_rounds)]
    rounds = [_hash_round(placed, index, n_buckets, size, streams, name) for name in names]
    return [_round_part(placed, rounds, this, index, size) for this in rounds]


class _Round(NamedTuple):
    """One hash. A cell is a chunk of a bucket; cell numbers of neighbouring chunks of a bucket differ by one.

    Attributes:
        key_cells: `[B * Hkv, Nk]`.
        query_cells: `[B * Hkv, G * Nq]`.
        order: `[B * Hkv, Nk]` keys sorted by bucket and position.
        query_chunks: `[B * Hkv, G * Nq]` place in `order` where the query's chunk begins.
        query_starts: `[B * Hkv, G * Nq]` place where its bucket begins.
        query_ends: `[B * Hkv, G * Nq]` place where its bucket ends.
    """

    key_cells: Tensor
    query_cells: Tensor
    order: Tensor
    query_chunks: Tensor
    query_starts: Tensor
    query_ends: Tensor


def _query_index(placed: Placed) -> Tensor:
    """`[B * Hkv, G * Nq]` index of the key at each query's position; it may lie before the first real key."""
    n_query, n_keys = placed.call.n_query, placed.call.n_keys
    index = placed.arange(n_query).expand(len(placed.shift), n_query)
    if placed.call.is_causal or n_query == n_keys:
        index = index + (n_keys - n_query)
    else:
        index = index * placed.valid.sum(1, keepdim=True) // n_query + placed.shift[:, None]
    return index.repeat_interleave(placed.call.key.shape[1], 0).repeat(1, placed.call.heads_per_kv)


@torch.no_grad()
def _hash_round(placed: Placed, index: Tensor, n_buckets: int, size: int, streams: Streams, name: str) -> _Round:
    batch, heads, n_keys, dim = placed.call.key.shape
    query, key = (t.to(accumulation_dtype(t.dtype)) for t in (placed.call.query, placed.call.key))
    rotation = streams.normal(name, dim, n_buckets // 2, like=key)
    # padding goes to a bucket that no query has
    padding = ~placed.valid.repeat_interleave(heads, 0)
    key_buckets = _buckets(key.flatten(0, 1), rotation).masked_fill(padding, n_buckets)
    query_buckets = _buckets(query.reshape(batch * heads, -1, dim), rotation)
    key_index = placed.arange(n_keys)
    codes, order = torch.sort(key_buckets * n_keys + key_index)
    starts = torch.searchsorted(codes, key_buckets * n_keys)
    ranks = torch.empty_like(order).scatter_(1, order, key_index.expand_as(order)) - starts
    query_starts = torch.searchsorted(codes, query_buckets * n_keys)
    query_ends = torch.searchsorted(codes, (query_buckets + 1) * n_keys)
    reach = query_buckets * n_keys + index.clamp(-1, n_keys - 1)
    earlier = torch.searchsorted(codes, reach, right=True) - query_starts
    chunks = (earlier - 1).clamp_min(0) // size
    # one more than any chunk's number, so that chunk 0 has no neighbour below it
    stride = n_keys // size + 2
    return _Round(
        key_buckets * stride + ranks // size,
        query_buckets * stride + chunks,
        order,
        query_starts + chunks * size,
        query_starts,
        query_ends,
    )


def _buckets(rows: Tensor, rotation: Tensor) -> Tensor:
    """`[b, n, D] -> [b, n]` angular hash."""
    if rotation.shape[1] == 0:
        return rows.new_zeros(rows.shape[:2], dtype=torch.int64)
    turned = rows @ rotation
    # the largest of [x R, -x R] is the entry of largest size, on the side of its sign
    largest = turned.abs().argmax(-1, keepdim=True)
    opposite = turned.gather(-1, largest) < 0
    return (largest + opposite * turned.shape[-1]).squeeze(-1)


@torch.no_grad()
def _round_part(placed: Placed, rounds: list[_Round], this: _Round, index: Tensor, size: int) -> Part:
    """Queries of one cell, in tiles of the chunk size, over the keys of the cell and of the one before."""
    n_keys = placed.call.n_keys
    slots, filled = _tile(this.query_cells, size)  # [b, T, t] places in [0, G * Nq)

    def of_slots(table: Tensor) -> Tensor:
        return table.gather(1, slots.flatten(1)).view(*slots.shape, 1)

    first = slots[:, :, 0]
    begin, bucket_start, bucket_end = (
        t.gather(1, first)[..., None] for t in (this.query_chunks, this.query_starts, this.query_ends)
    )
    places = begin - size + placed.arange(2 * size)  # [b, T, 2 * size]
    there = (places >= bucket_start) & (places < bucket_end)
    keys = this.order.gather(1, places.clamp(0, n_keys - 1).flatten(1)).view_as(places)
    n_rounds = torch.zeros(*slots.shape, keys.shape[2], dtype=torch.int32, device=keys.device)
    for other in rounds:
        query_cells = of_slots(other.query_cells)
        key_cells = other.key_cells.gather(1, keys.flatten(1)).view(*keys.shape[:2], 1, -1)
        n_rounds += (key_cells == query_cells) | (key_cells == query_cells - 1)
    visible = there[:, :, None].expand_as(n_rounds)
    if placed.call.is_causal:
        visible = visible & (keys[:, :, None] <= of_slots(index))
    bias = -torch.log(n_rounds.clamp_min(1).to(placed.call.query.dtype))
    bias = bias.masked_fill_(~visible, -torch.inf).flatten(0, 1)[:, None]  # [b * T, 1, t, 2 * size]
    head = placed.arange(len(keys)).view(-1, 1, 1)
    query_rows = (slots + head * (placed.call.heads_per_kv * placed.call.n_query)).flatten(0, 1)[:, None]
    key_rows = (keys + head * n_keys).flatten(0, 1)
    return Part((len(query_rows), 1, size), query_rows, filled.flatten(0, 1)[:, None], key_rows, bias=bias)


def _tile(cells: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Group equal entries of `cells [b, n]` into tiles: places `[b, T, size]` in the row, and which are filled.

    Filler repeats place 0 in tiles that no row needs, and the tile's first place otherwise.
    """
    ordered, order = torch.sort(cells, dim=1, stable=True)
    index = torch.arange(cells.shape[1], dtype=torch.int64, device=cells.device)
    within = (index - torch.searchsorted(ordered, ordered)) % size
    tile = (within == 0).cumsum(1) - 1
    n_tiles = int(tile.max()) + 1
    slots = torch.full((cells.shape[0], n_tiles * size), -1, dtype=torch.int64, device=cells.device)
    slots = slots.scatter_(1, tile * size + within, order).view(-1, n_tiles, size)
    filled = slots >= 0
    return torch.where(filled, slots, slots[:, :, :1]).clamp_min(0), filled
