"""What is left of a node when its heaviest keys are read by themselves.

A stand-in counts the other keys of its node as if their logits were normal around that of the mean, with the
deviation `s` that the pooled covariance gives for this query, cut off at the limit from which on keys are read.
The mean of `exp` under that cut is `exp(s^2 / 2) Phi(t / s - s) / Phi(t / s)`, `t` the distance to the limit, and
the values behind it lie on average `1 - phi(t / s - s) / (s Phi(t / s - s))` of the drift away from their mean.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

MOST_GAIN = 2.0
"""Logits within a node are not quite normal: a stand-in's gain is cut off here."""
MOST_KNOWN_GAIN = 4.0
"""The same before any key was read, when the limit is chosen."""
LEAST_SPREAD, MOST_SPREAD = 1e-3, 1e15
FARTHEST = 1e30
"""Where nothing is looked for the limit is infinite; gradients want a number."""


def corrections(distance: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """What a stand-in's logit gains, and how far its value moves along the drift.

    Args:
        distance: `[t, M]` from the nodes' logits to the limit.
        spread: `[t, 1]` deviation of the logits within nodes.
    """
    reach = distance.clamp(-FARTHEST, FARTHEST) / spread
    beyond, slope = _log_normal(reach - spread)
    within, _ = _log_normal(reach)
    gain = (0.5 * spread * spread + beyond - within).clamp(-MOST_GAIN, MOST_GAIN)
    return gain, (1 - slope / spread).clamp(-1, 1)


def _log_normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """The log of the normal distribution function, by a logistic approximation, and its slope."""
    x = x.clamp(-4, 8)
    y = x * (1.5976 + 0.07056 * x * x)
    return -softplus(-y), torch.sigmoid(-y) * (1.5976 + 0.21168 * x * x)
