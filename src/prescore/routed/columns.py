"""The dense half of routed attention: every query meets single keys and stand-ins, and chooses leaves.

One block of queries at a time, so that the scores of a block stay in the cache: the same scores pick the leaves,
lose the picked ones, and weigh the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.ops.backend import Gradients, accumulation_dtype
from prescore.ops.dropout import Dropout
from prescore.types import Attended


@dataclass(frozen=True, eq=False)
class Columns:
    """Keys that a block of queries meets: stand-ins of leaves first, then single keys.

    Attributes:
        key: `[T, W, D]`.
        value: `[T, W, Dv]`.
        bias: `[T, 1, W]` added to the logits.
        n_leaves: How many of the `W` columns are stand-ins.
        gains: `[n_leaves]` what a chosen stand-in's logit gains: -inf for a leaf, which is read whole, the log of
            the share left for a node; None = all are leaves.
    """

    key: Tensor
    value: Tensor
    bias: Tensor
    n_leaves: int
    gains: Tensor | None = None


class ColumnsRead(NamedTuple):
    """Output `[T, t, Dv]`, lse `[T, t]` (-inf where nothing is left), the chosen columns `[T, t, n_chosen]`."""

    output: Tensor
    lse: Tensor
    chosen: Tensor


def attend_columns(
    query: Tensor, columns: Columns, n_chosen: int, scale: float, dropout: Dropout | None = None
) -> ColumnsRead:
    """Choose stand-ins, then attend to all columns but what the chosen ones stand for no longer.

    Args:
        query: `[T, t, D]`.
        columns: What the queries see.
        n_chosen: Leaves to choose, at most `columns.n_leaves`.
        scale: Factor of the logits.
        dropout: Which weights are dropped.
    """
    logits = _logits(query, columns, scale)
    chosen = best_columns(logits[..., : columns.n_leaves], n_chosen)
    _take_away(logits, columns, chosen)
    peak = logits.amax(-1, keepdim=True)
    peak.masked_fill_(torch.isneginf(peak), 0.0)
    weights = logits.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    if dropout is not None:
        weights.mul_(dropout.factors(tuple(weights.shape), weights))
    output = (weights @ columns.value.to(weights.dtype)).div_(total.clamp_min(1e-30))
    return ColumnsRead(output, (total.log() + peak).squeeze(-1), chosen)


def attend_columns_backward(
    grad: Tensor,
    query: Tensor,
    columns: Columns,
    chosen: Tensor,
    merged: Attended,
    scale: float,
    dropout: Dropout | None = None,
) -> Gradients:
    """Gradients of query, column keys and column values under the merged result.

    Args:
        grad: `[T, t, Dv]`.
        query: `[T, t, D]`.
        columns: As in the forward pass.
        chosen: As returned there.
        merged: As `output` the product `grad . output` per row `[T, t]`, less the gradient of lse; lse `[T, t]`.
        scale: Factor of the logits.
        dropout: As in the forward pass.
    """
    wide = accumulation_dtype(query.dtype)
    weights = _logits(query, columns, scale)
    _take_away(weights, columns, chosen)
    weights.sub_(merged.lse[..., None]).exp_()
    grad = grad.to(wide)
    grad_weights = grad @ columns.value.to(wide).transpose(1, 2)
    kept = weights
    if dropout is not None:
        factors = dropout.factors(tuple(weights.shape), weights)
        grad_weights.mul_(factors)
        kept = factors.mul_(weights)
    grad_value = kept.transpose(1, 2) @ grad
    grad_logits = grad_weights.sub_(merged.output[..., None]).mul_(weights)
    grad_query = (grad_logits @ columns.key.to(wide)).mul_(scale)
    grad_key = (grad_logits.transpose(1, 2) @ query.to(wide)).mul_(scale)
    return Gradients(grad_query, grad_key, grad_value)


def best_columns(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last dimension, in no order."""
    n_columns = scores.shape[-1]
    # the CPU selects by partial sorting from 64 columns per result on, and several times slower below
    fast = 64 * count
    if scores.device.type == "cpu" and 24 * count < n_columns < fast:
        # above -inf, so that a leaf without members still comes before the filler
        scores = pad(scores.clamp_min(torch.finfo(scores.dtype).min), (0, fast - n_columns), value=-torch.inf)
    return scores.topk(count, dim=-1, sorted=False).indices


def _take_away(logits: Tensor, columns: Columns, chosen: Tensor) -> None:
    """Lower the logits of the chosen stand-ins, in place."""
    if columns.gains is None:
        logits.scatter_(2, chosen, -torch.inf)
    else:
        gains = columns.gains.index_select(0, chosen.reshape(-1)).view(chosen.shape)
        logits.scatter_(2, chosen, logits.gather(2, chosen) + gains)


def _logits(query: Tensor, columns: Columns, scale: float) -> Tensor:
    wide = accumulation_dtype(query.dtype)
    return torch.baddbmm(columns.bias, query.to(wide), columns.key.to(wide).transpose(1, 2), alpha=scale)
