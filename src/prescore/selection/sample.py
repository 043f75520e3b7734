"""Random selection without replacement, in proportion to the score."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.rng import Streams


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
