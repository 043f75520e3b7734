"""Algorithm 1: score the keys and choose which to keep, before any query is seen."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prescore import checks
from prescore.config import Selected
from prescore.devices import largest, surely_all
from prescore.rng import Streams
from prescore.scoring.base import Scored, Scorer, checked_scores
from prescore.scoring.sampling import arange
from prescore.types import Selection


@dataclass(frozen=True, eq=False)
class Chosen:
    """The keys to keep; whether that is every real key; scores and clusters, None where nothing was scored."""

    selection: Selection
    everything: bool
    scored: Scored | None


@torch.no_grad()
def score_keys(keys: Tensor, scorer: Scorer, *, valid: Tensor | None, streams: Streams) -> Scored:
    """Checked scores of aligned `keys [B, H, N, D]`, in at least float32, -inf where not `valid [B, N]`."""
    # where two centres are as near, the order of a sum decides; it must not follow the strides of the keys
    keys = keys.detach().to(torch.promote_types(keys.dtype, torch.float32)).contiguous()
    return checked_scores(scorer.score(keys, valid=valid, streams=streams), scorer, keys, valid)


@torch.no_grad()
def select_keys(
    keys: Tensor,
    config: Selected,
    *,
    valid: Tensor | None,
    streams: Streams,
    protect: Tensor | None = None,
    keep_all: Tensor | bool = False,
) -> Chosen:
    """Choose which of `keys [B, H, N, D]` to keep; nothing is scored where the budget keeps all of them.

    `valid [B, N]` marks real keys, which come first. Those in `protect [B, N]` are kept whatever their score,
    inside the budget. Rows of `keep_all [B]` keep every real key, whatever the budget; a bool = all rows or none.
    """
    batch, _, n_keys, _ = keys.shape
    real = torch.ones(batch, n_keys, dtype=torch.bool, device=keys.device) if valid is None else valid
    if keep_all is True:
        return Chosen(selection_of(real.unsqueeze(1).expand(keys.shape[:3]), n_keys), True, None)
    if config.min_score is not None:
        scored, real = score_keys(keys, config.scoring, valid=valid, streams=streams), real.unsqueeze(1)
        member = scored.scores >= config.min_score
        if protect is not None:
            member = member | (protect.unsqueeze(1) & real)
        # heads differ in how many keys they keep, so each one has its own delta test
        fallback = fallback_rows(member.sum(2), real.sum(2), config.min_fraction)
        if fallback is not None:
            member = member | (fallback.unsqueeze(2) & real)
        if isinstance(keep_all, Tensor):
            member = member | (keep_all[:, None, None] & real)
        return Chosen(replace(selection_of(member), fallback=fallback), bool((member == real).all()), scored)
    n_valid = real.sum(dim=1)
    counts = budget_counts(config.budget, n_valid)
    most = budget_count(config.budget, n_keys)
    fallback = fallback_rows(counts, n_valid, config.min_fraction)
    if fallback is not None:
        counts = torch.where(fallback, n_valid, counts)
        most = n_keys if valid is not None or most < config.min_fraction * n_keys else most
    if isinstance(keep_all, Tensor):
        counts, most = torch.where(keep_all, n_valid, counts), n_keys
    if most == n_keys if valid is None else surely_all(counts == n_valid):
        selection = selection_of(real.unsqueeze(1).expand(keys.shape[:3]), n_keys)
        return Chosen(replace(selection, fallback=fallback), True, None)
    scored = score_keys(keys, config.scoring, valid=valid, streams=streams)
    scores = scored.scores
    if config.selector == "sample":
        scores = race_scores(scores, valid=valid, streams=streams)
    selection = select_top(scores, counts, most, valid=valid, protected=protect)
    return Chosen(replace(selection, fallback=fallback), False, scored)


def budget_counts(top_k: int | float, n_valid: Tensor) -> Tensor:
    """Keys to keep of each row `[B]`, at most its `n_valid [B]`."""
    if isinstance(top_k, int):
        return n_valid.clamp(max=top_k)
    return (n_valid.double() * top_k).round(decimals=9).ceil().to(torch.int64).minimum(n_valid)


def budget_count(top_k: int | float, n_valid: int) -> int:
    """Keys to keep of one row: an int is a count, a float a share of the row's own keys, rounded up."""
    # exact on rounding: 0.1 * 30 is 3.0000000000000004 in floats, and 4 would be wrong
    wanted = math.ceil(round(top_k * n_valid, 9)) if isinstance(top_k, float) else top_k
    return min(wanted, n_valid)


def fallback_rows(counts: Tensor, n_valid: Tensor, min_fraction: float) -> Tensor | None:
    """The delta test of Algorithm 2: where fewer than `min_fraction * n_valid` keys are to be kept; None = off.

    There every real key is kept, and attention runs unfiltered.
    """
    return counts.to(torch.float64) < min_fraction * n_valid.to(torch.float64) if min_fraction else None


def race_scores(scores: Tensor, *, valid: Tensor | None, streams: Streams) -> Tensor:
    """Scores `[B, H, N]` whose top s are a sample without replacement in proportion to the given ones.

    An exponential race: with `u_i` uniform, `log(w_i) - log(-log(u_i))` is largest for key i with probability
    `w_i / sum w`, and so on among the others (Gumbel top-k). Weights are the scores, shifted per head so that the
    lowest is 0 where any is negative; keys of weight 0 come last, in random order. Every head has
    uniforms of its own.
    """
    if scores.numel() == 0:
        return scores
    absent = torch.zeros_like(scores, dtype=torch.bool) if valid is None else ~valid.unsqueeze(1)
    lowest = scores.masked_fill(absent, torch.inf).amin(dim=2, keepdim=True)
    weights = (scores - lowest.clamp(max=0.0)).masked_fill(absent, 0.0)
    uniform = streams.head_uniform("sample", scores.shape[2], like=scores)
    gumbel = -torch.log(-torch.log(uniform.clamp(min=1e-300, max=1 - 1e-16)))
    # far below any real weight, but finite, so that zero weights are still ordered by their draws
    logs = torch.where(weights > 0, weights.to(torch.float64).log(), -1e6)
    return (logs + gumbel).masked_fill(absent, -torch.inf)


def select_top(
    scores: Tensor, counts: Tensor, most: int, *, valid: Tensor | None = None, protected: Tensor | None = None
) -> Selection:
    """Keep the `counts [B]`, at most `most`, best real keys of each row and head by their scores `[B, H, N]`.

    Protected positions `[B, N]` come first, inside the budget. Ties go to the lower position.
    """
    size = largest(counts, most)
    if size == 0 or scores.numel() == 0:
        return selection_of(torch.zeros_like(scores, dtype=torch.bool), 0)
    if protected is not None:
        scores = scores.masked_fill(protected.unsqueeze(1), torch.inf)
    if valid is not None:
        scores = scores.masked_fill(~valid.unsqueeze(1), -torch.inf)
    counts = counts.reshape(-1, 1, 1)
    # topk is not stable: it gives the score of the last kept key, and positions decide among equal scores
    best = scores.topk(size, dim=2).values
    boundary = best.gather(2, (counts - 1).clamp(min=0).expand(-1, scores.shape[1], -1))
    above, level = scores > boundary, scores == boundary
    member = above | (level & (level.cumsum(dim=2) <= counts - above.sum(dim=2, keepdim=True)))
    return selection_of(member & (counts > 0), size)


def protected_positions(valid: Tensor | None, like: Tensor, sinks: int, recent: int) -> Tensor:
    """`[B, N]`: the first `sinks` and the last `recent` real positions of keys `like [B, H, N, D]`."""
    if valid is None:
        valid = torch.ones(like.shape[0], like.shape[2], dtype=torch.bool, device=like.device)
    rank = valid.cumsum(1)
    return valid & ((rank <= sinks) | (rank > rank[:, -1:] - recent))


def membership(selection: Selection, n_keys: int) -> Tensor:
    """`[B, H, N]` bool: whether a key is selected."""
    indices = selection.indices
    member = torch.zeros(*indices.shape[:2], n_keys, dtype=torch.int8, device=indices.device)
    # amax, because filler repeats the index of a kept key
    return member.scatter_reduce_(-1, indices, selection.valid.to(torch.int8), "amax").bool()


def selection_of(member: Tensor, most: int | None = None) -> Selection:
    """Positions of the True entries of `[B, H, N]`, ascending, as many slots as the fullest head needs.

    Heads that keep fewer repeat their last kept position, marked as not valid. No head keeps more than `most`;
    None = not known, so the largest number is read.
    """
    n_keys = member.shape[2]
    counts = member.sum(dim=2, keepdim=True)
    size = (int(counts.max()) if counts.numel() else 0) if most is None else largest(counts, min(most, n_keys))
    valid = arange(size, like=member) < counts
    if size == 0:
        return Selection(torch.zeros_like(valid, dtype=torch.int64), valid)
    positions = arange(n_keys, like=member).expand_as(member)
    # other positions go to a slot that is cut off
    slot = (member.cumsum(dim=2) - 1).masked_fill_(~member, size)
    indices = torch.zeros(*member.shape[:2], size + 1, dtype=torch.int64, device=member.device)
    indices = indices.scatter_(2, slot, positions)[:, :, :size]
    filler = indices.gather(2, (counts - 1).clamp(min=0))
    return Selection(torch.where(valid, indices, filler), valid)


def bring_forward(rows: Tensor, wanted: Tensor, most: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Bring the wanted entries of the last axis to the front, in order, and cut to the longest list.

    No list is longer than `most`. Also returns which of the entries are wanted; None = all.
    """
    most = max(1, largest(wanted.sum(-1), rows.shape[-1] if most is None else most))
    order = torch.sort(wanted.to(torch.int8), dim=-1, descending=True, stable=True).indices[..., :most]
    valid = wanted.gather(-1, order)
    return rows.gather(-1, order), None if surely_all(valid) else valid


def given_members(selection: Selection, shift: Tensor | None, valid: Tensor | None, n_keys: int) -> Tensor:
    """A caller's selection as `[B, Hkv, N]` bool, after alignment moved each row by `shift [B]`."""
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
        checks.dense(f"selection.{name}", tensor)
        if tensor.device != key.device:
            raise ValueError(f"selection.{name} must be on the keys' device {key.device}, got {tensor.device}")
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
