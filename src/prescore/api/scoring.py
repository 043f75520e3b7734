"""The public functions on keys alone: scores, and the keys that are kept (Algorithm 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore import checks
from prescore.call import align_keys, shifted_back
from prescore.config import Selected
from prescore.hyper.problems import FULL
from prescore.prescoring import score_keys, select_keys
from prescore.rng import as_streams
from prescore.scorers.base import Scorer, as_scorer
from prescore.selection.members import protected_positions
from prescore.surroundings import plain_torch
from prescore.types import Selection

Generator = torch.Generator | int | None


def score(
    key: Tensor,
    scorer: str | Scorer = "kmeans",
    *,
    key_padding_mask: Tensor | None = None,
    generator: Generator = None,
) -> Tensor:
    """Score keys (Algorithm 1 without the budget).

    Args:
        key: `[B, Hkv, N, D]`.
        scorer: A name of `list_scorers()`, or a scorer object.
        key_padding_mask: `[B, N]`, True = a real key.
        generator: Seed, generator or None.

    Returns:
        `[B, Hkv, N]` in at least float32; higher = kept, padded keys -inf, sinks not raised.
    """
    chosen = as_scorer(scorer)
    with plain_torch(key):
        return _score(key, chosen, key_padding_mask, generator)


def _score(key: Tensor, scorer: Scorer, key_padding_mask: Tensor | None, generator: Generator) -> Tensor:
    checks.keys(key, key_padding_mask)
    streams = as_streams(generator)
    if 0 in key.shape[:3]:
        return key.new_zeros(key.shape[:3], dtype=torch.promote_types(key.dtype, torch.float32))
    aligned, valid, shift = align_keys(key, key_padding_mask)
    scores = score_keys(aligned, scorer, valid=valid, streams=streams.child(FULL)).scores
    if shift is None:
        return scores
    index = torch.arange(key.shape[2], device=key.device) - shift[:, None]
    moved = scores.gather(-1, index.clamp_min(0)[:, None, :].expand_as(scores))
    return moved.masked_fill((index < 0)[:, None, :], -torch.inf)


def select(
    key: Tensor,
    scorer: str | Scorer = "kmeans",
    *,
    top_k: int | float,
    sinks: int = 4,
    recent: int = 0,
    selector: str = "top",
    min_fraction: float = 0.0,
    key_padding_mask: Tensor | None = None,
    generator: Generator = None,
) -> Selection:
    """Choose the keys to keep (Algorithm 1); the fields mean what they mean in `Selected`.

    Example:
        >>> kept = select(key, "kmeans", top_k=256, sinks=4)
        >>> kept.indices.shape
        torch.Size([1, 8, 256])
    """
    config = Selected(scorer, top_k, selector=selector, sinks=sinks, recent=recent, min_fraction=min_fraction)
    with plain_torch(key):
        return select_by(key, config, key_padding_mask=key_padding_mask, generator=generator)


def select_by(
    key: Tensor, config: Selected, *, key_padding_mask: Tensor | None = None, generator: Generator = None
) -> Selection:
    """The keys that a configuration keeps of all of them, whatever it does with them afterwards."""
    checks.keys(key, key_padding_mask)
    streams = as_streams(generator)
    if 0 in key.shape[:3]:
        return nothing_selected(key)
    aligned, valid, shift = align_keys(key, key_padding_mask)
    protect = None
    if config.sinks or config.recent:
        protect = protected_positions(valid, aligned, config.sinks, config.recent)
    chosen = select_keys(aligned, config, valid=valid, streams=streams.child(FULL), protect=protect)
    return shifted_back(chosen.selection, shift, key.shape[2])


def nothing_selected(key: Tensor) -> Selection:
    """A selection without keys."""
    empty = torch.zeros(*key.shape[:2], 0, dtype=torch.int64, device=key.device)
    return Selection(empty, empty.bool())
