"""The keys that have received most attention so far: H2O, in chunks."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from prescore import checks
from prescore.bench.baselines.oracle import heaviest_keys
from prescore.bench.baselines.tiles import Placed, baseline, best_places
from prescore.ops.parts import Part


@baseline
def heavy_hitter_attention(
    placed: Placed, *, budget: int = 256, recent: int = 0, chunk_size: int = 512
) -> list[Part]:
    """Exact attention to a cache of heavy hitters, which depends on queries: when causal, on earlier ones only.

    Causal: the queries of a chunk see the cache and, exactly, their own chunk up to themselves. Their softmax
    weights are then added to the keys' totals. The cache becomes the `recent` latest keys and, up to `budget`,
    those of the cache and the chunk with the largest totals; an evicted key never returns. Totals are summed
    over the query heads that share a KV head. `chunk_size=1` is the published algorithm, which evicts after
    every token; larger chunks evict later, so that a query sees up to `chunk_size - 1` keys more. Equal totals
    go to the later key. Keys before the first query (`Nq < Nk`) start with a total of 0.

    Not causal: the `budget` keys with the largest column sums of the softmax, as the oracle.

    Args:
        placed: The call.
        budget: Keys in the cache.
        recent: Latest keys that are in the cache whatever their total, inside the budget; only when causal.
        chunk_size: Positions between two evictions.
    """
    checks.integer("budget", budget, minimum=0)
    checks.integer("recent", recent, minimum=0)
    if recent > budget:
        raise ValueError(f"recent must be at most the budget {budget}, got {recent}")
    checks.integer("chunk_size", chunk_size, minimum=1)
    if placed.empty:
        return []
    if not placed.call.is_causal:
        return [heaviest_keys(placed, budget)]
    return _causal_parts(placed, budget, recent, min(chunk_size, placed.call.n_keys))


@torch.no_grad()
def _causal_parts(placed: Placed, budget: int, recent: int, size: int) -> list[Part]:
    chunks = placed.chunks(size)
    parts = [placed.part(chunks, chunks, causal=True)]
    if budget == 0:
        return parts
    batch, heads = placed.call.key.shape[:2]
    start = int(chunks[0, 0])
    cache = placed.arange(max(0, start - budget), start).expand(batch, heads, -1)
    real = placed.key_tiles(cache[:, :, None])[1].view(cache.shape)
    totals = torch.zeros(cache.shape, dtype=torch.float64, device=cache.device).masked_fill(~real, -torch.inf)
    for queries in chunks[:, None]:  # [1, size]
        usable = ~torch.isneginf(totals)
        if cache.shape[2]:
            parts.append(placed.part(queries, cache[:, :, None], hidden=~usable[:, :, None]))
        candidates = torch.cat((cache, queries.expand(batch, heads, -1)), dim=2)
        received = placed.column_sums(
            queries, candidates[:, :, None], n_local=size, chosen=pad(usable, (0, size), value=True)
        )
        totals = pad(totals, (0, size)) + received.to(torch.float64)
        first_recent = int(queries[0, -1]) + 1 - recent
        ranked = totals.masked_fill((candidates >= first_recent) & ~torch.isneginf(totals), torch.inf)
        places, _ = best_places(ranked, budget, latest=True)
        cache, totals = candidates.gather(2, places), totals.gather(2, places)
    return parts
