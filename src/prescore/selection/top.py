"""The best keys of each head."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.selection.members import selection_of
from prescore.types import Selection


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
