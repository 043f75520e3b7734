"""The keys that receive most attention: a bound to compare with, not a method."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore import checks
from prescore.baselines.tiles import Placed, best_places, column_sums, place
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
        budget: Keys kept (causal: in addition to the query's chunk).
        chunk_size: Causal: positions that share a choice.
        is_causal: Queries are the last `Nq` positions and see no later key.
        key_padding_mask: `[B, Nk]`, True = a real key.
        scale: Factor of the logits, `D ** -0.5` by default.
        generator: Not used; part of the common call shape.
    """
    checks.integer("budget", budget, minimum=0)
    checks.integer("chunk_size", chunk_size, minimum=1)
    placed = place(query, key, value, is_causal=is_causal, key_padding_mask=key_padding_mask, scale=scale)
    parts = []
    if not placed.empty and not is_causal:
        parts = [heaviest_keys(placed, budget)]
    elif not placed.empty:
        parts = placed.chunk_parts(chunk_size, lambda q, past: best_places(placed.column_sums(q, past), budget))
    return placed.attend(parts)


def heaviest_keys(placed: Placed, budget: int) -> Part:
    """Every query over the `budget` keys with the largest column sums over all queries, without causality.

    With as many queries as keys, queries at padded positions are padding and do not count.
    """
    batch, heads, length, dim = placed.call.key.shape
    n_query = placed.call.n_query
    counted = placed.valid if n_query == length else placed.valid.new_ones(batch, n_query)
    sums = column_sums(
        placed.call.query.reshape(batch * heads, placed.call.group, n_query, dim),
        placed.call.key.reshape(batch * heads, length, dim),
        counted=counted.repeat_interleave(heads, 0),
        visible=placed.valid.repeat_interleave(heads, 0),
        scale=placed.call.scale,
    )
    places, chosen = best_places(sums, budget)
    return placed.part_of_all(places + placed.arange(batch * heads)[:, None] * length, chosen)
