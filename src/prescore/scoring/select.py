"""Algorithm 1: score the keys and choose which to keep, before any query is seen."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore import checks
from prescore.config import Selected
from prescore.rng import Streams
from prescore.scoring.base import Scored, Scorer
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
    counts = budget_counts(config.budget, n_valid)
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


# From a budget as the user states it to a number of keys per row.


def budget_counts(top_k: int | float, n_valid: Tensor) -> Tensor:
    """Keys to keep per row, `[B]` int64, at most the row's `n_valid [B]`.

    An int is a count, a float a share of the row's own keys, rounded up.
    """
    checks.budget("top_k", top_k)
    if isinstance(top_k, float):
        counts = [budget_count(top_k, n) for n in n_valid.tolist()]
        return torch.tensor(counts, dtype=torch.int64, device=n_valid.device)
    return n_valid.to(torch.int64).clamp(max=top_k)


def budget_count(top_k: int | float, n_valid: int) -> int:
    """The same for one row; `top_k` is a checked budget."""
    # exact on rounding: 0.1 * 30 is 3.0000000000000004 in floats, and 4 would be wrong
    asked = math.ceil(round(top_k * n_valid, 9)) if isinstance(top_k, float) else top_k
    return min(asked, n_valid)


# The delta test of Algorithm 2.


def fallback_rows(counts: Tensor, n_valid: Tensor, min_fraction: float) -> Tensor | None:
    """Rows `[B]` bool where fewer than `min_fraction * n_valid` keys are to be kept; None if the test is off.

    Such a row keeps every real key, and attention over it runs unfiltered.
    """
    checks.number("min_fraction", min_fraction, minimum=0.0)
    if min_fraction == 0:
        return None
    return counts.to(torch.float64) < min_fraction * n_valid.to(torch.float64)


# Random selection without replacement, in proportion to the score.


def race_scores(scores: Tensor, *, valid: Tensor | None, streams: Streams) -> Tensor:
    """Scores whose top s are a sample without replacement in proportion to the given ones.

    An exponential race: with `u_i` uniform, `log(w_i) - log(-log(u_i))` is largest for key i with probability
    `w_i / sum w`, and so on among the rest (Gumbel top-k). Weights are the scores, shifted per head so that the
    lowest is 0 where any is negative; keys of weight 0 come last, in random order. The uniforms are the same for
    every row and head.

    Args:
        scores: `[B, H, N]`.
        valid: `[B, N]` bool or None.
        streams: Randomness.

    Returns:
        `[B, H, N]`, -inf where not valid.
    """
    if scores.numel() == 0:
        return scores
    absent = torch.zeros_like(scores, dtype=torch.bool) if valid is None else ~valid.unsqueeze(1)
    lowest = scores.masked_fill(absent, torch.inf).amin(dim=2, keepdim=True)
    weights = (scores - lowest.clamp(max=0.0)).masked_fill(absent, 0.0)
    uniform = streams.uniform("sample", scores.shape[2], like=scores)
    gumbel = -torch.log(-torch.log(uniform.clamp(min=1e-300, max=1 - 1e-16)))
    # far below any real weight, but finite, so that zero weights are still ordered by their draws
    logs = torch.where(weights > 0, weights.to(torch.float64).log(), -1e6)
    return (logs + gumbel).masked_fill(absent, -torch.inf)


# The best keys of each head.


def select_top(
    scores: Tensor, counts: Tensor, *, valid: Tensor | None = None, protected: Tensor | None = None
) -> Selection:
    """Keep the `counts` best real keys of each row and head.

    Protected positions come first, inside the budget, in order of position when they exceed it; then the highest
    scores. Equal scores go to the lower position.

    Args:
        scores: `[B, H, N]`, higher = kept, no NaN.
        counts: `[B]` int64, at most the row's number of real keys.
        valid: `[B, N]` bool, True = a real key; None = all.
        protected: `[B, N]` bool; only real keys among them count.

    Returns:
        Positions in ascending order; filler repeats the last kept position.
    """
    n_keys = scores.shape[2]
    size = int(counts.max()) if counts.numel() else 0
    if size == 0 or scores.numel() == 0:
        return selection_of(torch.zeros_like(scores, dtype=torch.bool))
    if valid is not None:
        scores = scores.masked_fill(~valid.unsqueeze(1), -torch.inf)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    remaining = counts.reshape(-1, 1, 1)
    if protected is not None:
        safe = protected if valid is None else protected & valid
        safe = safe & (safe.cumsum(dim=1) <= counts.unsqueeze(1))
        kept = kept | safe.unsqueeze(1)
        remaining = remaining - safe.sum(dim=1).reshape(-1, 1, 1)
    eligible = ~kept if valid is None else ~kept & valid.unsqueeze(1)
    # the score of the last kept key, from an unstable topk; who is kept among its equals is decided by position
    candidates = scores.masked_fill(~eligible, -torch.inf)
    ranked = candidates.topk(min(size, n_keys), dim=2).values
    boundary = ranked.gather(2, (remaining - 1).clamp(min=0).expand(-1, scores.shape[1], -1))
    above = eligible & (candidates > boundary)
    level = eligible & (candidates == boundary)
    room = remaining - above.sum(dim=2, keepdim=True)
    chosen = above | (level & (level.cumsum(dim=2) <= room))
    return selection_of(kept | (chosen & (remaining > 0)))


# Selections as sets of positions: membership, its inverse, and positions that are always kept.


def protected_positions(valid: Tensor | None, like: Tensor, sinks: int, recent: int) -> Tensor:
    """`[B, N]`: the first `sinks` and the last `recent` real positions of keys `like [B, H, N, D]`."""
    if valid is None:
        valid = torch.ones(like.shape[0], like.shape[2], dtype=torch.bool, device=like.device)
    rank = valid.cumsum(1)
    return valid & ((rank <= sinks) | (rank > rank[:, -1:] - recent))


def membership(selection: Selection, n_keys: int) -> Tensor:
    """`[B, H, N]` bool: was the key selected."""
    indices = selection.indices
    member = torch.zeros(*indices.shape[:2], n_keys, dtype=torch.int8, device=indices.device)
    # amax, because filler repeats the index of a kept key
    return member.scatter_reduce_(-1, indices, selection.valid.to(torch.int8), "amax").bool()


def selection_of(member: Tensor) -> Selection:
    """Positions of the True entries of `[B, H, N]`, ascending, as many slots as the fullest head needs.

    Heads that keep fewer repeat their last kept position, marked as not valid.
    """
    n_keys = member.shape[2]
    counts = member.sum(dim=2, keepdim=True)
    size = int(counts.max()) if counts.numel() else 0
    valid = torch.arange(size, device=member.device) < counts
    if size == 0:
        return Selection(torch.zeros_like(valid, dtype=torch.int64), valid)
    positions = torch.arange(n_keys, device=member.device).expand_as(member)
    # other positions go to a slot that is cut off
    slot = (member.cumsum(dim=2) - 1).masked_fill_(~member, size)
    indices = torch.zeros(*member.shape[:2], size + 1, dtype=torch.int64, device=member.device)
    indices = indices.scatter_(2, slot, positions)[:, :, :size]
    filler = indices.gather(2, (counts - 1).clamp(min=0))
    return Selection(torch.where(valid, indices, filler), valid)


def bring_forward(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
    """Bring the wanted entries of the last axis to the front, in order, and cut to the longest list.

    Returns:
        The entries, and which of them are wanted; None = all.
    """
    count = wanted.sum(-1)
    most = max(1, int(count.max())) if count.numel() else 1
    order = torch.sort(wanted.to(torch.int8), dim=-1, descending=True, stable=True).indices[..., :most]
    valid = wanted.gather(-1, order)
    return rows.gather(-1, order), None if bool(valid.all()) else valid


# A selection that the caller passed in.


def given_members(selection: Selection, shift: Tensor | None, valid: Tensor | None, n_keys: int) -> Tensor:
    """A caller's selection as `[B, Hkv, N]` bool in aligned positions.

    Args:
        selection: What the caller passed in, checked.
        shift: `[B]` how far alignment moved each row; None = not at all.
        valid: `[B, N]` real keys after alignment; None = all.
        n_keys: `N`.
    """
    indices, chosen = selection.indices, selection.valid
    if shift is not None:
        indices = indices - shift[:, None, None]
        chosen = chosen & (indices >= 0)
    member = membership(Selection(indices.clamp(0, n_keys - 1), chosen), n_keys)
    return member if valid is None else member & valid[:, None, :]


def check_selection(selection: Selection, key: Tensor) -> None:
    """Refuse what is no selection among these keys."""
    if not isinstance(selection, Selection):
        raise TypeError(f"selection must be a prescore.Selection, got {type(selection).__name__}")
    indices, valid = selection.indices, selection.valid
    for name, tensor in (("indices", indices), ("valid", valid)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"selection.{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if indices.ndim != 3 or indices.shape[:2] != key.shape[:2] or valid.shape != indices.shape:
        raise ValueError(
            f"selection must have indices and valid of shape {(*key.shape[:2], 'S')}, "
            f"got {tuple(indices.shape)} and {tuple(valid.shape)}"
        )
    if indices.dtype != torch.int64 or valid.dtype != torch.bool:
        raise TypeError(f"selection must have int64 indices and bool valid, got {indices.dtype} and {valid.dtype}")
    inside = (indices >= 0) & (indices < key.shape[2])
    if not bool((inside | ~valid).all()):
        wrong = int(indices[valid & ~inside][0])
        raise ValueError(f"selection must have indices in 0..{key.shape[2] - 1}, got {wrong}")
