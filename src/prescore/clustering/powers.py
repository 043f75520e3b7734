"""Powers of non-negative numbers, with the cheap exponents done cheaply."""

from __future__ import annotations

from torch import Tensor


def power(values: Tensor, exponent: float) -> Tensor:
    """`values ** exponent` for `values >= 0`; may overwrite `values`."""
    if exponent == 1.0:
        return values
    if exponent == 1.5:
        return values.sqrt().mul_(values)
    return values.pow_(exponent)
