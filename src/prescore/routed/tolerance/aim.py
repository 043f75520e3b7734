"""How light the keys must be that a query with samples looks for, before it looks."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.routed.codes import UNIT
from prescore.routed.far import Scores, Seen
from prescore.routed.tolerance.draws import AIMS, BELOW, MOST_ROWS, STEP, STRIDE, code_units
from prescore.routed.tolerance.samples import DrawnKeys
from prescore.types import Attended


def code_error(query: Tensor, seen: Seen) -> Tensor:
    """`[t]`: by how much coded logits are off, a root mean square over the keys."""
    halves = pad(query, (0, -query.shape[-1] % UNIT)).unflatten(-1, (2, -1))
    units = code_units(seen.codes.scales[None].to(query.dtype))[0, -1]
    lengths: Tensor = torch.linalg.vector_norm(halves, dim=-1)
    return (lengths * units).square().sum(-1).sqrt() / 12**0.5


def choose_limit(
    scores: Scores, samples: DrawnKeys, seen: Seen, near: Attended, first: Tensor, allowed: float
) -> Tensor:
    """`[t]`: the highest limit under which the samples below it spread little enough.

    Infinite where none does, or where so many keys would be read that reading everything is faster. The result is
    guessed from what lies near, the sinks and the samples. A term of the error is as large as a weight differs
    from the mean of its node: of weights `exp(x)` with normal `x` of deviation `s` that is a part `1 - exp(-s^2)`
    of their mean square, and less of those below a limit.
    """
    stands_for = (seen.rows.shape[1] / samples.exists.sum(1)).to(first.dtype).log()
    weighted = samples.logits + stands_for[:, None]
    lse = torch.cat((near.lse[:, None], scores.sinks, weighted.flatten(1)), dim=1).logsumexp(1)
    weights = torch.exp(weighted - lse[:, None, None])
    output = torch.exp(near.lse - lse)[:, None] * near.output
    output = output + torch.exp(scores.sinks - lse[:, None]) @ seen.sink_value
    output = output + weights.flatten(1) @ samples.value.flatten(0, 1)
    uneven = BELOW * (1 - torch.exp(-scores.spread.square()))
    terms = uneven * (weights.square() * samples.apart).flatten(1)
    length, logits, n_samples = output.square().sum(1), samples.logits.flatten(1), samples.exists.sum()
    chosen = torch.full_like(first, math.inf)
    for aim in reversed(range(AIMS)):
        limit = first - aim * STEP
        read = logits >= limit[:, None]
        hidden = STRIDE * torch.exp(2 * (limit - lse)) * samples.usual
        fits = (terms.masked_fill(read, 0.0).sum(1) + hidden) <= allowed * length
        few = read.sum(1) <= MOST_ROWS * n_samples
        # heavier keys come last, and what is too much for them is too much for all
        chosen = torch.where(fits, limit, chosen).masked_fill(~few, math.inf)
    return chosen
