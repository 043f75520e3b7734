"""Is a timed output right? No speed is reported without a correct result.

Every row of a method's output is held against the same call on the plain backend, which forms every logit; of long
routed calls, which would take it an hour, two pieces, in the middle and at the end. That runs in the same
precision, because keys are chosen by comparing numbers: in float64 a long clustering takes other turns, and all
that depends on it differs although nothing is wrong. Up to `ORACLE_LENGTH`, where it does not, some rows of routed
attention are also held against its definition in float64. So is exact attention, at all lengths.

Routed queries read a key by itself where its weight exceeds a limit. Sums in another order move a few keys across
it, and such a row is off by what a key at the limit weighs: few rows may be, and by no more than that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.api.attention import prescored_attention
from prescore.config import Config, Routed
from prescore.testing.routed import routed_oracle

TOLERANCE = 2e-4  # float32 sums of up to 131,072 terms; half types get TOLERANCE_HALF
TOLERANCE_HALF = 3e-2
MOST_FLIPPED = 0.005
CHECKED_ROWS = 8
MOST_AT_THE_LIMIT = 0.01
"""Share of the rows that may be off by keys at the limit; of a million queries far fewer are."""
ORACLE_LENGTH = 8192
PIECE = 512
"""Queries of a piece of a routed call that is longer than `ORACLE_LENGTH`."""

Inputs = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""


@torch.no_grad()
def check_method(name: str, inputs: Inputs, config: Config, output: Tensor, is_causal: bool) -> float:
    """The largest error of any row of a call's output; one that is off is refused by name."""
    if not isinstance(config, Routed):
        return check_output(name, output, plain_output(inputs, config, is_causal))
    n, at_limit = inputs[0].shape[2], weight_at_limit(config, inputs[2])
    if n > ORACLE_LENGTH:
        pieces = ((rows, plain_piece(inputs, config, rows, is_causal)) for rows in middle_and_end(n))
        return max(check_output(name, output[:, :, rows], wanted, at_limit) for rows, wanted in pieces)
    error = check_output(name, output, plain_output(inputs, config, is_causal), at_limit)
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


def middle_and_end(n: int) -> list[slice]:
    """Two pieces of `n` queries; all of them where they are few."""
    if n <= 2 * PIECE:
        return [slice(0, n)]
    return [slice(n // 2 - PIECE // 2, n // 2 + PIECE // 2), slice(n - PIECE, n)]


def plain_piece(
    inputs: Inputs, config: Routed, rows: slice, is_causal: bool, scale: float | None = None
) -> Tensor:
    """Some queries of a routed call on the plain backend: a piece is what it is in the whole call."""
    query, key, value = inputs
    stop = rows.stop if is_causal else key.shape[2]
    # a full call of a few queries would be exact, which the whole call need not be
    same = config if is_causal or query.shape[2] < config.exact_until else config.replace(exact_until=0)
    piece = (query[:, :, rows], key[:, :, :stop], value[:, :, :stop])
    return prescored_attention(*piece, same, is_causal=is_causal, scale=scale, backend="plain")


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


def check_rows(name: str, output: Tensor, wanted: Tensor) -> float:
    """The share of rows that differ; more than rounding may flip are refused by name.

    Keys are chosen by comparing numbers, and real heads have keys at every limit: where rounding decides, a row
    is read by one of two right results and not by the other. The contract allows that of one row in 200.
    """
    limit = TOLERANCE if output.dtype in (torch.float32, torch.float64) else TOLERANCE_HALF
    away = (output.detach().double() - wanted.double()).abs().amax(-1)
    off = ~(away <= limit * wanted.double().abs().amax((-1, -2), keepdim=True).squeeze(-1))
    share = float(off.double().mean())
    if not share <= MOST_FLIPPED:
        raise RuntimeError(
            f"output of {name} must match its reference in all rows but {MOST_FLIPPED}, got {share}"
        )
    return share


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
