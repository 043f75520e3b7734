"""LevAttention: attend to the keys of high leverage, the universal set."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore import checks
from prescore.bench.baselines.tiles import Placed, baseline, best_places
from prescore.ops.operators import accumulation_dtype
from prescore.ops.parts import Part
from prescore.scoring.leverage import exact_leverage
from prescore.scoring.select import selection_of


@baseline
def lev_attention(
    placed: Placed, *, epsilon: float | None = None, budget: int | None = None, chunk_size: int = 512
) -> list[Part]:
    """Exact attention to the universal set `{i : k_i^T (K^T K)^+ k_i >= epsilon}`, or to the `budget` best of it.

    Causal: leverage among all keys depends on the future, so the queries of a chunk of `chunk_size` positions see
    their own chunk exactly, and the universal set of the keys before the chunk, computed from those alone.

    Args:
        placed: The call.
        epsilon: Smallest leverage; None = no threshold, and then a budget must be given.
        budget: Largest number of keys, those of highest leverage first; None = all of the set.
        chunk_size: Causal: positions that share a universal set.
    """
    if epsilon is None and budget is None:
        raise ValueError("epsilon or budget must be given, got None for both")
    if epsilon is not None:
        checks.number("epsilon", epsilon, minimum=0.0)
    if budget is not None:
        checks.integer("budget", budget, minimum=0)
    checks.integer("chunk_size", chunk_size, minimum=1)
    if placed.empty:
        return []
    if placed.call.is_causal:
        return placed.chunk_parts(chunk_size, lambda _, past: _universal_set(placed, past, epsilon, budget))
    places, chosen = _universal_set(placed, placed.arange(placed.call.n_keys)[None], epsilon, budget)
    rows, visible = placed.key_tiles(places[:, :, None])
    return [placed.part_of_all(rows, visible & chosen.flatten(0, 1))]


@torch.no_grad()
def _universal_set(
    placed: Placed, positions: Tensor, epsilon: float | None, budget: int | None
) -> tuple[Tensor, Tensor]:
    """Chosen positions among the first `positions [1, c]`, and which are not filler: `[B, Hkv, s]`."""
    batch, heads, _, dim = placed.call.key.shape
    rows, visible = placed.key_tiles(positions)
    keys = placed.call.key.reshape(-1, dim)[rows].to(accumulation_dtype(placed.call.key.dtype))
    # a row of zeros adds nothing to the Gram matrix
    scores = exact_leverage(keys.masked_fill(~visible[..., None], 0)).masked_fill(~visible, -torch.inf)
    if epsilon is not None:
        scores = scores.masked_fill(scores < epsilon, -torch.inf)
    scores = scores.view(batch, heads, -1)
    if budget is not None:
        # with no more keys than dimensions all leverages are 1, and rounding must not decide among equals
        return best_places(scores.round(decimals=5), budget)
    selection = selection_of(~torch.isneginf(scores))
    return selection.indices, selection.valid
