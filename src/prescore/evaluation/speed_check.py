"""Is a timed output right? Evaluate a few of its rows in float64, straight from the plan."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.attention.parts import Part
from prescore.layout import Aligned
from prescore.plan import Plan


def planned_rows(call: Aligned, plan: Plan, rows: Tensor, scale: float) -> Tensor:
    """Outputs of some flat query rows `[r]` as the plan defines them: `[r, Dv]` in float64.

    One softmax over all columns the row meets in any part, written out: no fused operator, no merging.
    """
    query = call.query.detach().reshape(-1, call.query.shape[-1]).double()
    key, value = (t.detach().reshape(-1, t.shape[-1]) for t in (plan.key, plan.value))
    outputs = []
    for row in rows.tolist():
        logits, values = [], []
        for part in plan.parts:
            met = _columns_of(part, row, key.shape[0])
            if met is None:
                continue
            columns, extra, bias = met
            keys, vals = key.index_select(0, columns), value.index_select(0, columns)
            if extra is not None and plan.stand_ins is not None:
                keys = torch.cat((keys, plan.stand_ins.key.detach().index_select(0, extra)))
                vals = torch.cat((vals, plan.stand_ins.value.detach().index_select(0, extra)))
            logits.append(keys.double() @ query[row] * scale + bias)
            values.append(vals.double())
        weights = torch.softmax(torch.cat(logits), dim=0)
        outputs.append(weights @ torch.cat(values))
    return torch.stack(outputs)


def exact_rows(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, is_causal: bool) -> Tensor:
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


def _columns_of(part: Part, row: int, n_keys: int) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """Key rows, stand-in rows and bias that a query row meets in a part; None = it has no place there."""
    tiles, heads, width = part.shape
    if part.query_rows is None:
        tile, _, slot = _unravel(row, heads, width)
    else:
        here = part.query_rows.reshape(-1) == row
        if part.query_valid is not None:
            here = here & part.query_valid.reshape(-1)
        places = here.nonzero()
        if len(places) == 0:
            return None
        tile, _, slot = _unravel(int(places[0]), heads, width)
    if part.key_rows is None:
        size = n_keys // tiles
        columns = torch.arange(tile * size, (tile + 1) * size)
    else:
        columns = part.key_rows[tile]
    extra = None if part.extra_rows is None else part.extra_rows[tile]
    n_columns = columns.numel() + (0 if extra is None else extra.numel())
    bias = torch.zeros(n_columns, dtype=torch.float64) if part.bias is None else part.bias[tile].double()
    if part.causal:
        columns, bias = columns[: slot + 1], bias[: slot + 1]
    return columns, extra, bias


def _unravel(place: int, heads: int, width: int) -> tuple[int, int, int]:
    tile, rest = divmod(place, heads * width)
    return tile, *divmod(rest, width)
