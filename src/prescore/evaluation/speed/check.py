"""Is a timed output right? No speed is reported without a correct result.

Every row of a method's output is held against the same call on the plain backend, which forms every logit. That
runs in the same precision, because keys are chosen by comparing numbers: in float64 a long clustering takes other
turns, and all that depends on it differs although nothing is wrong. Some rows of routed attention are also held
against its definition in float64, on trees in the given precision. So is exact attention.

Routed queries read a key by itself where its weight exceeds a limit. Sums in another order move a few keys across
it, and such a row is off by what a key at the limit weighs: few rows may be, and by no more than that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.api import prescored_attention
from prescore.config import Config, Routed
from prescore.testing.routed import routed_oracle

TOLERANCE = 2e-4  # float32 sums of up to 131,072 terms; half types get TOLERANCE_HALF
TOLERANCE_HALF = 3e-2
CHECKED_ROWS = 8
MOST_AT_THE_LIMIT = 0.01
"""Share of the rows that may be off by keys at the limit; of a million queries far fewer are."""

Inputs = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""


@torch.no_grad()
def check_method(name: str, inputs: Inputs, config: Config, output: Tensor, is_causal: bool) -> float:
    """The largest error of any row of a call's output; one that is off is refused by name."""
    wanted = plain_output(inputs, config, is_causal)
    if not isinstance(config, Routed):
        return check_output(name, output, wanted)
    at_limit = weight_at_limit(config, inputs[2])
    error = check_output(name, output, wanted, at_limit)
    n = inputs[0].shape[2]
    if config.tolerance is None and output.dtype in (torch.float32, torch.float64):
        # a full call of a few queries would be exact, which the whole call need not be
        same = config if is_causal or n < config.exact_until else config.replace(exact_until=0)
        query, key, value = inputs
        wanted = routed_oracle(query[:, :, -CHECKED_ROWS:], key, value, same, is_causal=is_causal).output
        error = max(error, check_output(name, output[:, :, -CHECKED_ROWS:], wanted, at_limit))
    return error


def weight_at_limit(config: Routed, value: Tensor) -> float:
    """How far off a row may be where two keys at the limit are read by one and not by the other.

    Such a key has about one part in `2 * rows` of the weight, and its value differs from the others' by at most
    twice the largest.
    """
    return 0.0 if config.rows == 0 else 4 * float(value.detach().abs().max()) / (2 * config.rows)


def plain_output(inputs: Inputs, config: Config, is_causal: bool) -> Tensor:
    """The same call on the plain backend."""
    return prescored_attention(*inputs, config, is_causal=is_causal, backend="plain")


def check_output(name: str, output: Tensor, wanted: Tensor, at_limit: float = 0.0) -> float:
    """The largest error of any row; an output that is off is refused by name.

    Args:
        name: Of the method.
        output: What it gave, `[..., Dv]`.
        wanted: What it should.
        at_limit: What a few rows, `MOST_AT_THE_LIMIT` of them and at least one, may be off by besides.
    """
    limit = TOLERANCE if output.dtype in (torch.float32, torch.float64) else TOLERANCE_HALF
    errors = (output.detach().double() - wanted.double()).abs().amax(-1)
    error = float(errors.max())
    n_off = int((~(errors <= limit)).sum())
    few = n_off <= max(1, MOST_AT_THE_LIMIT * errors.numel())
    if n_off and not (few and error <= limit + at_limit):
        raise RuntimeError(f"output of {name} must match its reference to {limit}, got {error} in {n_off} rows")
    return error


def check_exact(name: str, inputs: Inputs, output: Tensor, is_causal: bool) -> float:
    """The same for exact attention, a few rows of it."""
    total = output.shape[:3].numel()
    rows = torch.linspace(0, total - 1, CHECKED_ROWS, dtype=torch.float64).long()
    wanted = softmax_rows(*inputs, rows, is_causal)
    return check_output(name, output.detach().reshape(-1, output.shape[-1]).index_select(0, rows), wanted)


def softmax_rows(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, is_causal: bool) -> Tensor:
    """Outputs of some flat query rows under exact attention, `[r, Dv]` in float64; `Nq = Nk`, equal heads."""
    length, dim = query.shape[2:]
    outputs = []
    for row in rows.tolist():
        head, position = divmod(row, length)
        end = position + 1 if is_causal else length
        keys, values = (t.detach().flatten(0, 1)[head, :end].double() for t in (key, value))
        logits = keys @ query.detach().flatten(0, 1)[head, position].double() * dim**-0.5
        outputs.append(torch.softmax(logits, dim=0) @ values)
    return torch.stack(outputs)
