"""The keys that receive most attention: a bound to compare with, not a method."""

from __future__ import annotations

from prescore import checks
from prescore.bench.baselines.tiles import Placed, baseline, best_places, column_sums
from prescore.ops.parts import Part


@baseline
def oracle_attention(placed: Placed, *, budget: int = 256, chunk_size: int = 512) -> list[Part]:
    """Exact attention to the `budget` keys with the largest column sums of the true softmax, per KV head.

    Causal: the queries of a chunk of `chunk_size` positions see their own chunk exactly, and of all earlier keys
    the `budget` with the largest column sums of the softmax of the chunk's queries over the earlier keys. That
    is cheating: which far keys a query sees depends on later queries of its chunk. It never depends on later
    keys or values. Quadratic in time; memory is that of a block of queries.

    Args:
        placed: The call.
        budget: Keys kept (causal: in addition to the query's chunk).
        chunk_size: Causal: positions that share a choice.
    """
    checks.integer("budget", budget, minimum=0)
    checks.integer("chunk_size", chunk_size, minimum=1)
    if placed.empty:
        return []
    if not placed.call.is_causal:
        return [heaviest_keys(placed, budget)]
    return placed.chunk_parts(chunk_size, lambda q, past: best_places(placed.column_sums(q, past), budget))


def heaviest_keys(placed: Placed, budget: int) -> Part:
    """Every query over the `budget` keys with the largest column sums over all queries, without causality.

    With as many queries as keys, queries at padded positions are padding and do not count.
    """
    batch, heads, length, dim = placed.call.key.shape
    n_query = placed.call.n_query
    counted = placed.valid if n_query == length else placed.valid.new_ones(batch, n_query)
    sums = column_sums(
        placed.call.query.reshape(batch * heads, placed.call.heads_per_kv, n_query, dim),
        placed.call.key.reshape(batch * heads, length, dim),
        counted=counted.repeat_interleave(heads, 0),
        visible=placed.valid.repeat_interleave(heads, 0),
        scale=placed.call.scale,
    )
    places, chosen = best_places(sums, budget)
    return placed.part_of_all(places + placed.arange(batch * heads)[:, None] * length, chosen)
