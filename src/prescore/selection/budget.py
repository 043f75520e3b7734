"""From a budget as the user states it to a number of keys per row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prescore import checks


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
