"""Keys that have received most attention so far: H2O, in chunks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prescore import checks
from prescore.baselines.oracle import best_places_part
from prescore.baselines.tiles import Placed, all_column_sums, best_places, chunk_positions, column_sums, place
from prescore.ops.parts import Part
from prescore.types import Attended


def heavy_hitter_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    budget: int = 256,
    recent: int = 0,
    chunk_size: int = 512,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    generator: torch.Generator | int | None = None,
) -> Attended:
    """Exact attention to a cache of heavy hitters; sees queries, of the past only when causal.

    Causal: the queries of a chunk see the cache and, exactly, their own chunk up to themselves. Their softmax
    weights are then added to the keys' totals, and the cache becomes the `recent` latest keys and, up to
    `budget`, those of the cache and the chunk with the largest totals; what falls out never returns. Totals are
    summed over the query heads that share a KV head. `chunk_size=1` is the published algorithm, which evicts
    after every token; larger chunks evict later, so that a query sees up to `chunk_size - 1` keys more. Equal
    totals go to the later key. Keys before the first query (`Nq < Nk`) start with a total of 0.

    Not causal: the `budget` keys with the largest column sums of the softmax, as the oracle.

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`.
        value: `[B, Hkv, Nk, Dv]`.
        budget: Keys in the cache.
        recent: Latest keys that are in the cache whatever their total, inside the budget; only when causal.
        chunk_size: Positions between two evictions.
        is_causal: Queries are the last `Nq` positions and see no later key.
        key_padding_mask: `[B, Nk]`, True = a real key.
        scale: Factor of the logits, `D ** -0.5` by default.
        generator: Not used; part of the common call shape.
    """
    checks.integer("budget", budget, minimum=0)
    checks.integer("recent", recent, minimum=0)
    if recent > budget:
        raise ValueError(f"recent must be at most the budget {budget}, got {recent}")
    checks.integer("chunk_size", chunk_size, minimum=1)
    placed = place(query, key, value, is_causal=is_causal, key_padding_mask=key_padding_mask, scale=scale)
    if placed.empty:
        parts = []
    elif is_causal:
        parts = _causal_parts(placed, budget, recent, min(chunk_size, key.shape[2]))
    else:
        parts = [best_places_part(placed, all_column_sums(placed), budget)]
    return placed.attend(parts)


@torch.no_grad()
def _causal_parts(placed: Placed, budget: int, recent: int, size: int) -> list[Part]:
    first, last = placed.first_position // size, math.ceil(placed.call.n_keys / size)
    chunks = chunk_positions(first, last, size, placed.call.key)
    parts = [placed.part(chunks, chunks, causal=True)]
    if budget == 0:
        return parts
    batch, heads = placed.call.key.shape[:2]
    start = first * size
    cache = torch.arange(max(0, start - budget), start, device=placed.call.key.device).expand(batch, heads, -1)
    totals = torch.zeros(cache.shape, dtype=torch.float64, device=placed.call.key.device)
    _, real = placed.key_tiles(cache[:, :, None])
    totals = totals.masked_fill(~real.view(cache.shape), -torch.inf)
    for queries in chunks[:, None]:  # [1, size]
        if cache.shape[2]:
            parts.append(placed.part(queries, cache[:, :, None], hidden=torch.isneginf(totals)[:, :, None]))
        candidates = torch.cat((cache, queries.expand(batch, heads, -1)), dim=2)
        totals = torch.nn.functional.pad(totals, (0, size)) + _weights(placed, queries, candidates, totals)
        end = int(queries[0, -1]) + 1
        urgent = (candidates >= end - recent) & ~torch.isneginf(totals)
        places, _ = best_places(totals.masked_fill(urgent, torch.inf), budget, latest=True)
        cache, totals = candidates.gather(2, places), totals.gather(2, places)
    return parts


def _weights(placed: Placed, queries: Tensor, candidates: Tensor, totals: Tensor) -> Tensor:
    """Attention `[B, Hkv, c]` of the queries at `[1, t]` to the candidates, which end with their own positions."""
    dim, own = placed.call.key.shape[-1], queries.shape[1]
    query_rows, _ = placed.query_tiles(queries)
    key_rows, seen = placed.key_tiles(candidates[:, :, None])
    kept = torch.nn.functional.pad(~torch.isneginf(totals), (0, own), value=True)
    sums = column_sums(
        placed.call.query.reshape(-1, dim)[query_rows],
        placed.call.key.reshape(-1, dim)[key_rows],
        voting=placed.voting(queries),
        seen=seen & kept.flatten(0, 1),
        scale=placed.call.scale,
        own=own,
    )
    return sums.view(candidates.shape).to(torch.float64)
