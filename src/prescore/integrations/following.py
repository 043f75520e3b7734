"""Pre-scored attention for models that hand over all keys at every step, but no cache of ours."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from prescore.config import PrescoreConfig
from prescore.decoding.follow import FollowedSelection
from prescore.decoding.states import remembers
from prescore.integrations.masked import attend_exactly, attend_prescored
from prescore.integrations.masks import MaskForm

STEP_AT_MOST = 32
"""Queries of one decode step; more at once are another piece of the prompt."""


def attend_following(
    selection: FollowedSelection,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    form: MaskForm,
    *,
    config: PrescoreConfig,
    scale: float | None,
    stats: dict[str, Any],
    dropout: float = 0.0,
) -> Tensor:
    """Attention of the newest tokens: pre-scored for a prompt, over a followed selection for a step.

    Args:
        selection: Remembers between calls; belongs to the layer.
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`, all keys so far, perhaps with unused room behind them.
        value: `[B, Hkv, Nk, Dv]`.
        form: What each query may see.
        config: How to score, select and attend.
        scale: Factor of the logits.
        stats: Receives what was done.
        dropout: Probability of dropping a weight.
    """
    n_query, n_keys = query.shape[2], _n_used(form, query.shape[2])
    if form.kind not in ("causal", "full") or n_query == n_keys or n_query > STEP_AT_MOST:
        selection.forget()
        stats["path"] = "prescored"
        return attend_prescored(query, key, value, form, config=config, scale=scale, dropout=dropout)
    if not remembers(config):
        stats["path"] = "step over all keys"
        return attend_exactly(query, key, value, form, scale=scale, dropout=dropout)
    valid = None if form.valid is None else form.valid[:, :n_keys]
    state = selection.state_for(key[:, :, :n_keys], value[:, :, :n_keys], valid, n_query, config)
    stats.update(path="step over the selection", rows=state.n_rows, since=state.n_since)
    return state.attend(query, scale, dropout)


def _n_used(form: MaskForm, n_query: int) -> int:
    """Keys up to the newest: a static cache has room behind it, which no sequence has reached."""
    if n_query > 1 or form.valid is None:
        return form.n_keys
    reached = form.valid.any(dim=0).nonzero()
    return int(reached.max()) + 1 if len(reached) else form.n_keys
