"""The keys that truly receive most attention: a bound to compare with, not a method."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prescore import checks
from prescore.attention.parts import Part, attend_parts
from prescore.baselines.column_sums import all_column_sums, best_columns, column_sums
from prescore.baselines.tiles import Call, chunk_positions, prepare
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
    call = prepare(query, key, value, is_causal=is_causal, key_padding_mask=key_padding_mask, scale=scale)
    if call.empty:
        parts = []
    elif is_causal:
        parts = _causal_parts(call, budget, min(chunk_size, key.shape[2]))
    else:
        parts = [best_columns_part(call, all_column_sums(call), budget)]
    return attend_parts(call.query, call.key, call.value, parts, scale=call.scale)


def best_columns_part(call: Call, scores: Tensor, budget: int) -> Part:
    """Every query meeting the `budget` keys of the highest `scores [B, Hkv, Nk]`, -inf = never."""
    places, seen = best_columns(scores, budget)
    heads = torch.arange(scores.shape[0] * scores.shape[1], device=scores.device).view(*scores.shape[:2], 1)
    return call.part_of_all((places + heads * scores.shape[2]).flatten(0, 1), seen.flatten(0, 1))


def _causal_parts(call: Call, budget: int, size: int) -> list[Part]:
    first, last = call.first_position // size, math.ceil(call.key.shape[2] / size)
    chunks = chunk_positions(first, last, size, call.key)
    parts = [call.part(chunks, chunks, causal=True)]
    if budget == 0:
        return parts
    for queries in chunks[:, None]:  # [1, size]
        past = torch.arange(int(queries[0, 0]), device=call.key.device)
        if len(past) == 0:
            continue
        places, kept = best_columns(_chunk_sums(call, queries, past[None]), budget)
        parts.append(call.part(queries, places[:, :, None], hidden=~kept[:, :, None]))
    return parts


def _chunk_sums(call: Call, queries: Tensor, keys: Tensor) -> Tensor:
    """Column sums `[B, Hkv, c]` of the queries at positions `[1, t]` over the keys at positions `[1, c]`."""
    batch, heads, _, dim = call.key.shape
    query_rows, _ = call.query_tiles(queries)
    key_rows, seen = call.key_tiles(keys)
    sums = column_sums(
        call.query.reshape(-1, dim)[query_rows],
        call.key.reshape(-1, dim)[key_rows],
        voting=call.voting(queries),
        seen=seen,
        scale=call.scale,
    )
    return sums.view(batch, heads, -1)
