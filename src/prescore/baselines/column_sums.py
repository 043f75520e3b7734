"""How much attention each key receives, and the keys that receive most."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.baselines.tiles import Placed
from prescore.ops.backend import accumulation_dtype

_LARGEST_BLOCK = 2**21


@torch.no_grad()
def column_sums(query: Tensor, key: Tensor, *, voting: Tensor, seen: Tensor, scale: float, own: int = 0) -> Tensor:
    """Sum over the queries of their softmax weights, in blocks of queries.

    Args:
        query: `[b, G, t, D]`.
        key: `[b, c, D]`.
        voting: `[b, t]`, False on queries that do not count.
        seen: `[b, c]`, False on keys nobody sees.
        scale: Factor of the logits.
        own: The last `own` keys are those of the queries: query i sees the first i + 1 of them.

    Returns:
        `[b, c]`, -inf where not seen.
    """
    wide = accumulation_dtype(query.dtype)
    tiles, group, n_query, _ = query.shape
    n_keys = key.shape[1]
    total = torch.zeros(tiles, n_keys, dtype=wide, device=key.device)
    transposed = key.to(wide).transpose(1, 2)[:, None]  # [b, 1, D, c]
    rank = torch.arange(n_keys, device=key.device) - (n_keys - own)
    step = max(1, _LARGEST_BLOCK // max(1, tiles * group * n_keys))
    for start in range(0, n_query, step):
        rows = slice(start, min(start + step, n_query))
        logits = (query[:, :, rows].to(wide) @ transposed) * scale
        logits.masked_fill_(~seen[:, None, None, :], -torch.inf)
        if own:
            later = rank > torch.arange(rows.start, rows.stop, device=key.device)[:, None]
            logits.masked_fill_(later, -torch.inf)
        weights = torch.softmax(logits, dim=-1)
        # a query that sees nothing gives NaN, and one that is padding may hold anything
        counted = voting[:, None, rows, None] & ~torch.isneginf(logits.amax(-1, keepdim=True))
        total += torch.where(counted, weights, 0.0).sum(dim=(1, 2))
    return total.masked_fill(~seen, -torch.inf)


def all_column_sums(placed: Placed) -> Tensor:
    """Column sums over all queries and keys without causality, `[B, Hkv, Nk]`.

    With as many queries as keys, queries at padded positions are taken for padding and do not vote.
    """
    batch, heads, length, dim = placed.call.key.shape
    n_query = placed.call.n_query
    voting = placed.valid if n_query == length else placed.valid.new_ones(batch, n_query)
    sums = column_sums(
        placed.call.query.reshape(batch * heads, placed.call.group, n_query, dim),
        placed.call.key.reshape(batch * heads, length, dim),
        voting=voting.repeat_interleave(heads, 0),
        seen=placed.valid.repeat_interleave(heads, 0),
        scale=placed.call.scale,
    )
    return sums.view(batch, heads, length)


def best_places(scores: Tensor, budget: int, *, latest: bool = False) -> tuple[Tensor, Tensor]:
    """The `budget` highest scores along the last axis.

    Equal scores go to the lower place, or to the higher one with `latest`.

    Returns:
        Places in ascending order, and whether each holds a score above -inf; both `[..., min(budget, n)]`.
    """
    n_scores = scores.shape[-1]
    ranked = scores.flip(-1) if latest else scores
    places = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., : min(budget, n_scores)]
    if latest:
        places = n_scores - 1 - places
    places = places.sort(dim=-1).values
    return places, ~torch.isneginf(scores.gather(-1, places))
