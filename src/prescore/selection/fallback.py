"""The delta test of Algorithm 2."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore import checks


def fallback_rows(counts: Tensor, n_valid: Tensor, min_fraction: float) -> Tensor | None:
    """Rows `[B]` bool where fewer than `min_fraction * n_valid` keys are to be kept; None if the test is off.

    Such a row keeps every real key, and attention over it runs unfiltered.
    """
    checks.number("min_fraction", min_fraction, minimum=0.0)
    if min_fraction == 0:
        return None
    return counts.to(torch.float64) < min_fraction * n_valid.to(torch.float64)
