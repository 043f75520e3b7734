"""Combine attention over disjoint key sets into attention over their union."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.types import Attended


def merge(*parts: Attended) -> Attended:
    """Merge by log-sum-exp: `lse = log sum exp(lse_i)`, `output = sum exp(lse_i - lse) output_i`.

    Associative and order-free; a part that saw nothing (lse -inf) changes nothing; differentiable in every
    output and lse.
    """
    if not parts:
        raise ValueError("parts must hold at least one Attended, got none")
    for place, part in enumerate(parts):
        if not isinstance(part, Attended):
            raise TypeError(f"parts must be Attended, got {type(part).__name__} at {place}")
        if not (isinstance(part.output, Tensor) and isinstance(part.lse, Tensor)):
            kinds = f"{type(part.output).__name__} and {type(part.lse).__name__}"
            raise TypeError(f"parts must hold an output and an lse, both tensors, got {kinds} at {place}")
        if part.output.device != parts[0].output.device or part.lse.device != part.output.device:
            places = f"{part.output.device} and {part.lse.device}"
            raise ValueError(f"parts must lie on one device, {parts[0].output.device}, got {places} at {place}")
        if part.output.shape != parts[0].output.shape:
            expected, got = tuple(parts[0].output.shape), tuple(part.output.shape)
            raise ValueError(f"parts must have outputs of one shape {expected}, got {got} at {place}")
        if part.lse.shape != part.output.shape[:-1]:
            expected, got = tuple(part.output.shape[:-1]), tuple(part.lse.shape)
            raise ValueError(f"parts must have an lse of shape {expected}, got {got} at {place}")
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([part.lse for part in parts])
    # the maximum only shifts the exponents: no gradient through it, and 0 where nothing was seen
    shift = lses.detach().amax(0)
    shift = shift.masked_fill(torch.isneginf(shift), 0.0)
    weights = torch.exp(lses - shift)
    total = weights.sum(0)
    seen = total > 0
    safe = total.masked_fill(~seen, 1.0)
    wide = torch.stack([part.output for part in parts]).to(lses.dtype)
    output = (wide * (weights / safe)[..., None]).sum(0)
    lse = torch.where(seen, torch.log(safe) + shift, -torch.inf)
    return Attended(output.to(parts[0].output.dtype), lse)
