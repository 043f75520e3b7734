"""Reformer-style attention: queries meet the keys that hash to the same bucket, several times over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prescore import checks
from prescore.baselines.tiles import Placed, place
from prescore.ops.backend import accumulation_dtype
from prescore.ops.parts import Part
from prescore.rng import Streams, as_streams
from prescore.types import Attended


def reformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    n_buckets: int = 64,
    chunk_size: int = 64,
    n_rounds: int = 4,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    generator: torch.Generator | int | None = None,
) -> Attended:
    """Exact attention to the keys of the query's own bucket nearby, in the union of several hash rounds.

    A round hashes queries and keys by `argmax [x R, -x R]` with one random `R [D, n_buckets / 2]`. The keys of a
    bucket, in order of position, are cut into chunks of `chunk_size`. A query belongs to the chunk of the last
    key of its bucket that is not behind its own position, and sees that chunk and the one before it. A key seen
    in r rounds gets the weight 1 / r in each, so it counts once.

    The published method cuts the sequence sorted by bucket into chunks across buckets, so that a later key or
    query moves the cuts for earlier ones. Here chunks are counted from the start of their bucket, so what a
    query sees depends on nothing later than itself. Nor are queries and keys one projection here: a query
    whose bucket holds no earlier key, in any round, sees nothing.

    Without causality a query sees the same two chunks, later keys included; with `Nq != Nk` the queries are
    spread evenly over the positions. Time and memory are `O(n_rounds n chunk_size)` and more for the hash.

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`.
        value: `[B, Hkv, Nk, Dv]`.
        n_buckets: 1 (no hashing) or an even number.
        chunk_size: Keys in a chunk; a query sees at most `2 * chunk_size * n_rounds` keys.
        n_rounds: Independent hashes.
        is_causal: Queries are the last `Nq` positions and see no later key.
        key_padding_mask: `[B, Nk]`, True = a real key.
        scale: Factor of the logits, `D ** -0.5` by default.
        generator: Seed of the hashes.
    """
    checks.integer("n_buckets", n_buckets, minimum=1)
    if n_buckets > 1 and n_buckets % 2:
        raise ValueError(f"n_buckets must be 1 or even, got {n_buckets}")
    checks.integer("chunk_size", chunk_size, minimum=1)
    checks.integer("n_rounds", n_rounds, minimum=1)
    streams = as_streams(generator)
    placed = place(query, key, value, is_causal=is_causal, key_padding_mask=key_padding_mask, scale=scale)
    parts = []
    if not placed.empty:
        positions = _query_positions(placed)
        size = min(chunk_size, key.shape[2])
        rounds = [_hash_round(placed, positions, n_buckets, size, streams, r) for r in range(n_rounds)]
        parts = [_round_part(placed, rounds, r, positions) for r in range(n_rounds)]
    return placed.attend(parts)


@dataclass(frozen=True, eq=False)
class _Round:
    """One hash. A cell is a chunk of a bucket; cell numbers of neighbouring chunks of a bucket differ by one.

    Attributes:
        size: Keys in a chunk.
        key_cells: `[B * Hkv, Nk]`.
        query_cells: `[B * Hkv, G * Nq]`.
        order: `[B * Hkv, Nk]` keys sorted by bucket and position.
        query_chunks: `[B * Hkv, G * Nq]` place in `order` where the query's chunk begins.
        query_starts: `[B * Hkv, G * Nq]` place where its bucket begins.
        query_ends: `[B * Hkv, G * Nq]` place where its bucket ends.
    """

    size: int
    key_cells: Tensor
    query_cells: Tensor
    order: Tensor
    query_chunks: Tensor
    query_starts: Tensor
    query_ends: Tensor


def _query_positions(placed: Placed) -> Tensor:
    """`[B, Nq]` positions, counted from the first real key; negative where a query is before it."""
    n_query, n_keys = placed.call.n_query, placed.call.n_keys
    index = torch.arange(n_query, device=placed.shift.device)
    if placed.call.is_causal or n_query == n_keys:
        return index + (n_keys - n_query) - placed.shift[:, None]
    return index * placed.valid.sum(1, keepdim=True) // n_query


@torch.no_grad()
def _hash_round(
    placed: Placed, positions: Tensor, n_buckets: int, size: int, streams: Streams, number: int
) -> _Round:
    batch, heads, n_keys, dim = placed.call.key.shape
    wide = accumulation_dtype(placed.call.key.dtype)
    rotation = streams.normal(
        f"reformer round {number}", dim, n_buckets // 2, like=placed.call.key.new_empty(0, dtype=wide)
    )
    key_buckets = _buckets(placed.call.key.to(wide).flatten(0, 1), rotation)
    # padding goes to a bucket that no query has
    key_buckets = key_buckets.masked_fill(~placed.valid.repeat_interleave(heads, 0), n_buckets)
    query_buckets = _buckets(placed.call.query.to(wide).reshape(batch * heads, -1, dim), rotation)
    key_positions = torch.arange(n_keys, device=placed.call.key.device)
    codes, order = torch.sort(key_buckets * n_keys + key_positions)
    starts = torch.searchsorted(codes, key_buckets * n_keys)
    ranks = torch.empty_like(order).scatter_(1, order, key_positions.expand_as(order)) - starts
    # positions of queries as indices of keys, at most the last of the bucket's range
    own = (positions + placed.shift[:, None]).clamp(-1, n_keys - 1)
    own = own.repeat_interleave(heads, 0).repeat(1, placed.call.group)
    query_starts = torch.searchsorted(codes, query_buckets * n_keys)
    query_ends = torch.searchsorted(codes, (query_buckets + 1) * n_keys)
    earlier = torch.searchsorted(codes, query_buckets * n_keys + own, right=True) - query_starts
    chunks = (earlier - 1).clamp_min(0) // size
    # one more than any chunk's number, so that chunk 0 has no neighbour below it
    stride = n_keys // size + 2
    return _Round(
        size,
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
    place = turned.abs().argmax(-1, keepdim=True)
    opposite = turned.gather(-1, place) < 0
    return (place + opposite * turned.shape[-1]).squeeze(-1)


@torch.no_grad()
def _round_part(placed: Placed, rounds: list[_Round], number: int, positions: Tensor) -> Part:
    """Queries of one cell, in tiles of the chunk size, meeting the keys of the cell and of the one before."""
    this = rounds[number]
    n_keys, tiles_of = placed.call.n_keys, this.order.shape[0]
    slots, filled = _tile(this.query_cells, this.size)  # [b, T, t] places in [0, G * Nq)
    leaders = slots[:, :, 0]
    places = this.query_chunks.gather(1, leaders)[..., None] - this.size
    places = places + torch.arange(2 * this.size, device=places.device)  # [b, T, 2 * size]
    starts, ends = (t.gather(1, leaders)[..., None] for t in (this.query_starts, this.query_ends))
    there = (places >= starts) & (places < ends)
    keys = this.order.gather(1, places.clamp(0, n_keys - 1).flatten(1)).view_as(places)
    rounds_seen = torch.zeros(*slots.shape, keys.shape[2], dtype=torch.int32, device=keys.device)
    for other in rounds:
        query_cells = other.query_cells.gather(1, slots.flatten(1)).view(*slots.shape, 1)
        key_cells = other.key_cells.gather(1, keys.flatten(1)).view(*keys.shape[:2], 1, -1)
        rounds_seen += (key_cells == query_cells) | (key_cells == query_cells - 1)
    seen = there[:, :, None].expand_as(rounds_seen)
    if placed.call.is_causal:
        own = positions + placed.shift[:, None]
        own = own.repeat_interleave(placed.call.key.shape[1], 0).repeat(1, placed.call.group)
        seen = seen & (keys[:, :, None] <= own.gather(1, slots.flatten(1)).view(*slots.shape, 1))
    bias = -torch.log(rounds_seen.clamp_min(1).to(placed.call.query.dtype))
    bias = bias.masked_fill_(~seen, -torch.inf).flatten(0, 1)[:, None]  # [b * T, 1, t, 2 * size]
    base = torch.arange(tiles_of, device=keys.device).view(-1, 1, 1)
    query_rows = (slots + base * (placed.call.group * placed.call.n_query)).flatten(0, 1)[:, None]
    key_rows = (keys + base * n_keys).flatten(0, 1)
    shape = (query_rows.shape[0], 1, this.size)
    return Part(shape, query_rows, filled.flatten(0, 1)[:, None], key_rows, bias=bias)


def _tile(cells: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Group equal entries of `cells [b, n]` into tiles of `size`.

    Returns:
        Places `[b, T, size]` in the row, and which of them are not filler; filler repeats place 0 in tiles that
        no row needs, and the tile's first place otherwise.
    """
    ordered, order = torch.sort(cells, dim=1, stable=True)
    index = torch.arange(cells.shape[1], device=cells.device)
    rank = index - torch.searchsorted(ordered, ordered)
    within = rank % size
    tile = (within == 0).cumsum(1) - 1
    n_tiles = int(tile.max()) + 1
    slots = torch.full((cells.shape[0], n_tiles * size), -1, dtype=torch.int64, device=cells.device)
    slots = slots.scatter_(1, tile * size + within, order).view(-1, n_tiles, size)
    filled = slots >= 0
    slots = torch.where(filled, slots, slots[:, :, :1]).clamp_min(0)
    return slots, filled
