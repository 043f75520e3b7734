"""Algorithm 1: score the keys and choose which to keep, before any query is seen."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.config import PrescoreConfig
from prescore.registry import get_scorer
from prescore.rng import Streams
from prescore.scorers.base import Scored, Scorer
from prescore.scorers.clustered import ClusteringScorer
from prescore.scorers.kmeans import KMeans
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
def score_keys(keys: Tensor, *, valid: Tensor | None, config: PrescoreConfig, streams: Streams) -> Scored:
    """Score checked keys.

    Args:
        keys: `[B, H, N, D]`, real keys first, zero where not valid.
        valid: `[B, N]` bool, True = a real key; None = all.
        config: Method, noise, normalisation and the method's own fields.
        streams: Randomness.

    Returns:
        Scores `[B, H, N]` in at least float32, -inf where not valid, and the clusters if the scorer made any.
    """
    scorer: Scorer = get_scorer(config.method).from_config(config)
    prepared, scorer = _prepare(keys, valid, config, scorer, streams)
    result = scorer.score(prepared, valid=valid, streams=streams)
    scored = result if isinstance(result, Scored) else Scored(result)
    if valid is None:
        return scored
    scores = scored.scores.masked_fill(~valid.unsqueeze(1), -torch.inf)
    return Scored(scores, scored.labels, scored.n_clusters)


@torch.no_grad()
def cluster_labels(
    keys: Tensor, *, valid: Tensor | None, config: PrescoreConfig, streams: Streams
) -> tuple[Tensor, int]:
    """k-means labels `[B, H, N]` and the number of clusters, for stand-ins when the scorer made no clusters."""
    scorer: Scorer = KMeans.from_config(config)
    prepared, scorer = _prepare(keys, valid, config.replace(noise=0.0), scorer, streams)
    scored = scorer.score(prepared, valid=valid, streams=streams)
    if not isinstance(scored, Scored) or scored.labels is None:
        raise TypeError(f"kmeans must return labels, got {scored!r}")
    return scored.labels, scored.n_clusters


@torch.no_grad()
def select_keys(
    keys: Tensor,
    *,
    valid: Tensor | None,
    config: PrescoreConfig,
    streams: Streams,
    protect: Tensor | None = None,
    keep_all: Tensor | None = None,
) -> Chosen:
    """Choose the keys to keep; nothing is scored when that is all of them.

    Args:
        keys: `[B, H, N, D]`, real keys first, zero where not valid.
        valid: `[B, N]` bool, True = a real key; None = all.
        config: Budget, selector, delta test and everything about scoring.
        streams: Randomness.
        protect: `[B, N]` bool, positions kept before any score is looked at, inside the budget.
        keep_all: `[B]` bool, rows whose every key is kept whatever the budget.
    """
    n_rows, n_heads, n_keys, _ = keys.shape
    if valid is None:
        n_valid = torch.full((n_rows,), n_keys, dtype=torch.int64, device=keys.device)
    else:
        n_valid = valid.sum(dim=1)
    counts = budget_counts(config.top_k, n_valid)
    if keep_all is not None:
        counts = torch.where(keep_all, n_valid, counts)
    fallback = fallback_rows(counts, n_valid, config.min_fraction)
    if fallback is not None:
        counts = torch.where(fallback, n_valid, counts)
    everything = bool((counts == n_valid).all())
    scored = None
    if everything:
        scores = keys.new_zeros(n_rows, n_heads, n_keys, dtype=torch.float32)
    else:
        scored = score_keys(keys, valid=valid, config=config, streams=streams)
        scores = scored.scores
        if config.selector == "sample":
            scores = race_scores(scores, valid=valid, streams=streams)
    selection = select_top(scores, counts, valid=valid, protected=protect)
    return Chosen(Selection(selection.indices, selection.valid, fallback), everything, scored)


def _prepare(
    keys: Tensor, valid: Tensor | None, config: PrescoreConfig, scorer: Scorer, streams: Streams
) -> tuple[Tensor, Scorer]:
    """Promote, add noise, normalise: for scoring only, attention uses the true keys.

    A clustering scorer normalises on its way through the keys, which spares a copy of them.
    """
    keys = keys.detach().to(torch.promote_types(keys.dtype, torch.float32))
    if config.noise > 0:
        keys = keys + config.noise * streams.normal("noise", *keys.shape[2:], like=keys)
        if valid is not None:
            keys = keys.masked_fill(~valid[:, None, :, None], 0.0)
    if scorer.normalizes if config.normalize is None else config.normalize:
        if isinstance(scorer, ClusteringScorer):
            return keys, dataclasses.replace(scorer, unit=True)
        keys = torch.nn.functional.normalize(keys, dim=-1, eps=torch.finfo(keys.dtype).tiny)
    return keys, scorer
