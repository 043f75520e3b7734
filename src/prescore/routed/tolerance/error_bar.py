"""How far a sampled result may be off: a Student interval for the length of its error.

The error of a result whose rest was sampled is, to first order, a sum of independent terms, one for each sample
(`rest.py`), whose mean square length `V` is estimated by the sum of theirs. Each is small, since keys of larger
weight are read by themselves; one that may just have escaped both search and samples adds what it may weigh. So
the error is nearly normal, with the covariance `C` that the terms have, and its squared length is nearly `V`
times a chi-square over its degrees of freedom, which are `tr(C)^2 / tr(C^2)`: the *directions* that errors point
in. An error of one direction exceeds twice its root mean square in one draw of twenty, one of many directions
hardly ever exceeds it by a half. `V` itself is a sum of squares whose variance is at most the sum of the squares
of those: that of a chi-square with `2 V^2` over this sum degrees of freedom (Satterthwaite's). What a Student
variable is to a normal one, an F variable is to the error, so that few terms make a wide bar.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.routed.sources import Estimate

OFTEN, ONE_IN = 4, 4
"""A single bar may be wrong so many times as often as all together, as long as that is at most one in `ONE_IN`."""


def of_single_query(confidence: float) -> float:
    """How often the bar of a single query has to hold, for that share of all queries to be within a tolerance.

    Queries stop with bars anywhere below the tolerance, and errors of those far below hardly ever reach it: few
    queries are over it, even if one of five is among those whose bar is as large as the tolerance itself. How few
    is measured (docs/default.md).
    """
    wrong = 1 - confidence
    return 1 - max(wrong, min(OFTEN * wrong, 1 / ONE_IN))


def estimated_error(spread: Estimate) -> Tensor:
    """Relative error that is expected of an output: a root mean square over draws; inf where nothing is known."""
    length = torch.linalg.vector_norm(spread.output.to(spread.variance.dtype), dim=-1)
    error = spread.variance.sqrt() / length
    return torch.where(spread.variance == 0, 0.0, error).nan_to_num(nan=torch.inf, posinf=torch.inf)


def error_limit(spread: Estimate, confidence: float) -> Tensor:
    """Relative error that an output stays below with that confidence; inf where nothing is known."""
    square = spread.variance.square()
    least = torch.finfo(square.dtype).tiny
    freedom = (2 * square / spread.fourth.clamp_min(least)).clamp_min(1.0)
    directions = (square / torch.maximum(spread.overlap, spread.fourth).clamp_min(least)).clamp_min(1.0)
    limit = longest_error(directions, freedom, confidence) * estimated_error(spread)
    return torch.where(spread.variance == 0, 0.0, limit).nan_to_num(nan=torch.inf, posinf=torch.inf)


def longest_error(directions: Tensor, freedom: Tensor, confidence: float) -> Tensor:
    """The root of what an F variable stays below with that confidence.

    By Paulson's approximation, in which cube roots are normal: within 2 % of it from 5 degrees of freedom on.
    Below it is too large, and no more is taken than a bound at 1, the closed form at 2, and what lies between.
    """
    one = 1 / float(torch.special.ndtri(torch.tensor(1 - confidence / 2, dtype=torch.float64)))
    power = confidence ** (2 / directions)
    two = (2 / directions * power / (1 - power)).sqrt()
    five = _paulson(directions, torch.full_like(freedom, 5.0), confidence)
    few = torch.where(freedom < 2, one * (two / one) ** (freedom - 1), two * (five / two) ** ((freedom - 2) / 3))
    several = _paulson(directions, freedom, confidence)
    return torch.where(freedom < 5, torch.minimum(few, several), several)


def _paulson(directions: Tensor, freedom: Tensor, confidence: float) -> Tensor:
    z = float(torch.special.ndtri(torch.tensor(confidence, dtype=torch.float64)))
    a, b = 2 / (9 * directions), 2 / (9 * freedom)
    first, middle, last = (1 - b).square() - z * z * b, (1 - a) * (1 - b), (1 - a).square() - z * z * a
    root = (middle.square() - first * last).clamp_min(0.0).sqrt()
    # below the middle the smaller root is meant
    cube_root = (middle + (root if z > 0 else -root)) / first
    return torch.where(first > 0, cube_root.clamp_min(0.0) ** 1.5, torch.inf)
