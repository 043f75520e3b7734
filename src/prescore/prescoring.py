"""Algorithm 1: score the keys and choose which to keep, before any query is seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.config import Selected
from prescore.rng import Streams
from prescore.scorers.base import Scored, Scorer
from prescore.selection.budget import budget_counts
from prescore.selection.fallback import fallback_rows
from prescore.selection.sample import race_scores
from prescore.selection.top import select_top
from prescore.types import Selection


@dataclass(frozen=True, eq=False)
class Chosen:
    """What `select_keys` decided.

    `everything` says that every real key is kept, in which case nothing was scored and `scored` is None.
    """

    selection: Selection
    everything: bool
    scored: Scored | None


@torch.no_grad()
def score_keys(keys: Tensor, scorer: Scorer, *, valid: Tensor | None, streams: Streams) -> Scored:
    """Score checked keys.

    Args:
        keys: `[B, H, N, D]`, real keys first, zero where not valid.
        scorer: What ranks them.
        valid: `[B, N]` bool, True = a real key; None = all.
        streams: Randomness.

    Returns:
        Scores `[B, H, N]` in at least float32, -inf where not valid, and the clusters if the scorer made any.
    """
    keys = keys.detach().to(torch.promote_types(keys.dtype, torch.float32))
    result = scorer.score(keys, valid=valid, streams=streams)
    scored = result if isinstance(result, Scored) else Scored(result)
    if valid is None:
        return scored
    scores = scored.scores.masked_fill(~valid.unsqueeze(1), -torch.inf)
    return Scored(scores, scored.labels, scored.n_clusters)


@torch.no_grad()
def select_keys(
    keys: Tensor,
    config: Selected,
    *,
    valid: Tensor | None,
    streams: Streams,
    protect: Tensor | None = None,
) -> Chosen:
    """Choose the keys to keep; nothing is scored when that is all of them.

    Args:
        keys: `[B, H, N, D]`, real keys first, zero where not valid.
        config: Scorer, budget, selector, delta test.
        valid: `[B, N]` bool, True = a real key; None = all.
        streams: Randomness.
        protect: `[B, N]` bool, positions kept before any score is looked at, inside the budget.
    """
    n_rows, n_heads, n_keys, _ = keys.shape
    if valid is None:
        n_valid = torch.full((n_rows,), n_keys, dtype=torch.int64, device=keys.device)
    else:
        n_valid = valid.sum(dim=1)
    counts = budget_counts(config.top_k, n_valid)
    fallback = fallback_rows(counts, n_valid, config.min_fraction)
    if fallback is not None:
        counts = torch.where(fallback, n_valid, counts)
    everything = bool((counts == n_valid).all())
    scored = None
    if everything:
        scores = keys.new_zeros(n_rows, n_heads, n_keys, dtype=torch.float32)
    else:
        scored = score_keys(keys, config.scoring, valid=valid, streams=streams)
        scores = scored.scores
        if config.selector == "sample":
            scores = race_scores(scores, valid=valid, streams=streams)
    selection = select_top(scores, counts, valid=valid, protected=protect)
    return Chosen(Selection(selection.indices, selection.valid, fallback), everything, scored)
