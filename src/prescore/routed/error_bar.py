"""How far a sampled result may be off: a Student interval for the length of its error.

A result whose rest was sampled is `out = sum(w_i v_i)`; its error is, to first order, a sum of independent terms
`w_i (v_i - out)` over the samples, whose mean square length is estimated by the sum of theirs. Each is small,
since keys of larger weight are read by themselves; one that may just have escaped both search and
samples counts as one more term. The error's length exceeds `t` times its root mean square with
at most the probability that a Student variable exceeds `t` in size: a vector of several dimensions is less
scattered in length than a number. `t` has as many degrees of freedom as there are terms that matter, so that few
terms make a wide bar.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def estimated_error(output: Tensor, variance: Tensor) -> Tensor:
    """Relative error that is expected of an output `[..., Dv]`: a root mean square over draws."""
    length = torch.linalg.vector_norm(output.to(variance.dtype), dim=-1)
    error = torch.where(variance == 0, torch.zeros_like(variance), variance.sqrt() / length)
    return error.nan_to_num(nan=torch.inf, posinf=torch.inf)


def error_limit(output: Tensor, variance: Tensor, fourth: Tensor, confidence: float) -> Tensor:
    """Relative error that an output `[..., Dv]` stays below with that confidence; inf where nothing is known.

    Args:
        output: The result.
        variance: `[...]` sum of the squares of the terms' lengths.
        fourth: `[...]` sum of the squares of those.
        confidence: Between 0 and 1.
    """
    freedom = variance * variance / fourth.clamp_min(torch.finfo(fourth.dtype).tiny)
    limit = student(freedom, confidence) * estimated_error(output, variance)
    limit = torch.where(variance == 0, torch.zeros_like(limit), limit)
    return limit.nan_to_num(nan=torch.inf, posinf=torch.inf)


def student(freedom: Tensor, confidence: float) -> Tensor:
    """What a Student variable of so many degrees of freedom exceeds in size with probability `1 - confidence`.

    Exact at 1 and 2, where closed forms exist, Fisher's expansion from 3 on, and above the truth in between.
    """
    one = math.tan(math.pi * confidence / 2)
    two = confidence * math.sqrt(2 / (1 - confidence**2))
    three = float(_expansion(torch.tensor(3.0, dtype=torch.float64), confidence))
    f = freedom.clamp_min(1.0)
    low, high = one * (two / one) ** (f - 1), two * (three / two) ** (f - 2)
    few = torch.where(f < 2, low, high)
    return torch.where(f < 3, few, _expansion(f, confidence))


def _expansion(f: Tensor, confidence: float) -> Tensor:
    z = float(torch.special.ndtri(torch.tensor(0.5 + confidence / 2, dtype=torch.float64)))
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / f + second / f**2 + third / f**3
