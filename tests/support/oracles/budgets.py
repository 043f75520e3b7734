"""How far a low-precision result may lie from the truth, derived from data instead of guessed."""

import torch

FACTOR = 4.0
ROUNDINGS = 8.0


def error_budget(reference, inputs, dtype):
    """Largest error to accept from a computation in `dtype`, whose float64 `reference` has float64 `inputs`.

    `FACTOR * max |reference(rounded inputs) - reference(inputs)| + ROUNDINGS * eps * max |reference|`: a small
    multiple of the error that rounding the inputs alone makes, plus a few roundings of the output itself.
    """
    truth = reference(*inputs)
    rounded = reference(*(tensor.to(dtype).to(torch.float64) for tensor in inputs))
    size = float(truth.abs().max()) if truth.numel() else 0.0
    moved = float((rounded - truth).abs().max()) if truth.numel() else 0.0
    return FACTOR * moved + ROUNDINGS * torch.finfo(dtype).eps * size


def assert_within(actual, truth, budget, what="result"):
    """Raise AssertionError unless every entry of `actual` is within `budget` of `truth`; NaN never is."""
    assert actual.shape == truth.shape, f"{what} must have shape {tuple(truth.shape)}, got {tuple(actual.shape)}"
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
