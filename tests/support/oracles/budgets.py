"""How far a low-precision result may lie from the truth, derived from data instead of guessed.

The yardstick is the error that rounding alone makes: the inputs rounded to the dtype, everything else in float64.
A result may be a small multiple of that away from the float64 answer, plus a few roundings of the output itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FACTOR = 4.0
ROUNDINGS = 8.0


def error_budget(reference: Callable[..., Tensor], inputs: tuple[Tensor, ...], dtype: torch.dtype) -> float:
    """Largest error to accept from a computation in `dtype`.

    `FACTOR * max |reference(rounded inputs) - reference(inputs)| + ROUNDINGS * eps * max |reference|`.

    Args:
        reference: The computation in float64.
        inputs: Its float64 inputs.
        dtype: What the tested computation runs in.
    """
    truth = reference(*inputs)
    rounded = reference(*(tensor.to(dtype).to(torch.float64) for tensor in inputs))
    size = float(truth.abs().max()) if truth.numel() else 0.0
    drift = float((rounded - truth).abs().max()) if truth.numel() else 0.0
    return FACTOR * drift + ROUNDINGS * torch.finfo(dtype).eps * size


def assert_within(actual: Tensor, truth: Tensor, budget: float, what: str = "result") -> None:
    """Raise AssertionError unless every entry of `actual` is within `budget` of `truth`; NaN never is."""
    if actual.shape != truth.shape:
        raise AssertionError(f"{what} must have shape {tuple(truth.shape)}, got {tuple(actual.shape)}")
    if actual.numel() == 0:
        return
    left, right = actual.detach().to(torch.float64), truth.detach().to(torch.float64)
    # equal infinities count as equal: an lse of -inf is a value like any other
    error = torch.where(left == right, 0.0, (left - right).abs())
    wrong = ~(error <= budget)
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what} must be within {budget:.3g} of the truth, got {float(left[place])} instead of "
            f"{float(right[place])} at {place}; {int(wrong.sum())} of {wrong.numel()} entries are off, "
            f"at most by {float(error.max()):.3g}"
        )
