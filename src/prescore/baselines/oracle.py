"""The keys that truly receive most attention: a bound to compare with, not a method."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prescore import checks
from prescore.baselines.tiles import Placed, all_column_sums, best_places, chunk_positions, column_sums, place
from prescore.ops.parts import Part
from prescore.types import Attended


def oracle_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    budget: int = 256,
    chunk_size: int = 512,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    generator: torch.Generator | int | None = None,
) -> Attended:
    """Exact attention to the `budget` keys with the largest column sums of the true softmax, per KV head.

    Causal: the queries of a chunk of `chunk_size` positions see their own chunk exactly, and of all earlier keys
    the `budget` with the largest column sums of the softmax of the chunk's queries over the earlier keys. That
    is cheating: which far keys a query sees depends on later queries of its chunk. It never depends on later
    keys or values. Quadratic in time; memory is that of a block of queries.

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`.
        value: `[B, Hkv, Nk, Dv]`.
        budget: Keys kept (causal: beside the own chunk).
        chunk_size: Causal: positions that share a choice.
        is_causal: Queries are the last `Nq` positions and see no later key.
        key_padding_mask: `[B, Nk]`, True = a real key.
        scale: Factor of the logits, `D ** -0.5` by default.
        generator: Not used; part of the common call shape.
    """
    checks.integer("budget", budget, minimum=0)
    checks.integer("chunk_size", chunk_size, minimum=1)
    placed = place(query, key, value, is_causal=is_causal, key_padding_mask=key_padding_mask, scale=scale)
    if placed.empty:
        parts = []
    elif is_causal:
        parts = _causal_parts(placed, budget, min(chunk_size, key.shape[2]))
    else:
        parts = [best_places_part(placed, all_column_sums(placed), budget)]
    return placed.attend(parts)


def best_places_part(placed: Placed, scores: Tensor, budget: int) -> Part:
    """Every query meeting the `budget` keys of the highest `scores [B, Hkv, Nk]`, -inf = never."""
    places, seen = best_places(scores, budget)
    heads = torch.arange(scores.shape[0] * scores.shape[1], device=scores.device).view(*scores.shape[:2], 1)
    return placed.part_of_all((places + heads * scores.shape[2]).flatten(0, 1), seen.flatten(0, 1))


def _causal_parts(placed: Placed, budget: int, size: int) -> list[Part]:
    first, last = placed.first_position // size, math.ceil(placed.call.n_keys / size)
    chunks = chunk_positions(first, last, size, placed.call.key)
    parts = [placed.part(chunks, chunks, causal=True)]
    if budget == 0:
        return parts
    for queries in chunks[:, None]:  # [1, size]
        past = torch.arange(int(queries[0, 0]), device=placed.call.key.device)
        if len(past) == 0:
            continue
        places, kept = best_places(_chunk_sums(placed, queries, past[None]), budget)
        parts.append(placed.part(queries, places[:, :, None], hidden=~kept[:, :, None]))
    return parts


def _chunk_sums(placed: Placed, queries: Tensor, keys: Tensor) -> Tensor:
    """Column sums `[B, Hkv, c]` of the queries at positions `[1, t]` over the keys at positions `[1, c]`."""
    batch, heads, _, dim = placed.call.key.shape
    query_rows, _ = placed.query_tiles(queries)
    key_rows, seen = placed.key_tiles(keys)
    sums = column_sums(
        placed.call.query.reshape(-1, dim)[query_rows],
        placed.call.key.reshape(-1, dim)[key_rows],
        voting=placed.voting(queries),
        seen=seen,
        scale=placed.call.scale,
    )
    return sums.view(batch, heads, -1)
