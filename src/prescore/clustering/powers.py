"""Powers of non-negative numbers, with the cheap exponents done cheaply."""

from __future__ import annotations

import torch
from torch import Tensor


def power(values: Tensor, exponent: float, *, out: Tensor | None = None) -> Tensor:
    """`values ** exponent` for `values >= 0`; may overwrite `values` and `out`."""
    if exponent == 1.0:
        return values
    if exponent == 1.5:
        return torch.sqrt(values, out=out).mul_(values)
    if exponent in (0.5, 2.0, 3.0):
        return values.pow_(exponent)
    # a third of the time of pow, and 0 stays 0
    return values.log2_().mul_(exponent).exp2_()
