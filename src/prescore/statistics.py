"""Plain numbers about one call: what was kept, what the residual carried, where the time went."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from prescore.attention.parts import Part, attend_parts
from prescore.config import PrescoreConfig
from prescore.layout import Aligned
from prescore.plan import Plan


def statistics(call: Aligned, plan: Plan, config: PrescoreConfig, scale: float, backend: str) -> dict[str, Any]:
    """Statistics of a plan that has been run.

    Returns:
        `keys_kept` (mean per problem and head), `rows_per_query` (key and stand-in columns a query met, on
        average), `depth` of the causal recursion, `fallbacks` taken, `captured_mass` (mean share of the
        estimated attention mass that was seen exactly rather than estimated by the residual), and `seconds`
        per stage.
    """
    counts = plan.counts
    problems = counts.get("problems", 0)
    return {
        "keys_kept": counts.get("kept", 0) / problems if problems else 0.0,
        "rows_per_query": rows_per_query(plan.parts, call.query.shape[:3].numel()),
        "depth": counts.get("depth", 0),
        "fallbacks": counts.get("fallbacks", 0),
        "captured_mass": captured_mass(call, plan, scale, backend),
        "seconds": dict(plan.seconds),
        "inner": config.inner,
    }


def routed_statistics(figures: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Statistics of a routed call, in the same names; `figures` has `rows_per_query` and the rows of each kind."""
    return {
        **figures,
        "keys_kept": float(figures["n_key"]),
        "depth": 0,
        "fallbacks": 0,
        "captured_mass": 1.0 - figures.get("lost_bound_mean", 0.0),
        "seconds": {"attending": seconds},
        "inner": "routed",
    }


@torch.no_grad()
def captured_mass(call: Aligned, plan: Plan, scale: float, backend: str) -> float:
    """Mean of exp(lse without the residual - lse with it) over queries that saw anything."""
    if not any(part.residual[1] for part in plan.parts):
        return 1.0

    def lse(parts: list[Part]) -> Tensor:
        return attend_parts(
            call.query,
            plan.key,
            plan.value,
            parts,
            scale=scale,
            stand_ins=plan.stand_ins,
            backend=backend,
        ).lse

    whole, seen = lse(plan.parts), lse([_without_residual(part) for part in plan.parts])
    anywhere = ~torch.isneginf(whole)
    if not bool(anywhere.any()):
        return 1.0
    return float(torch.exp(seen[anywhere] - whole[anywhere]).mean())


def rows_per_query(parts: list[Part], n_queries: int) -> float:
    """Columns met per query, counting a causal square as half; what a bias hides from a query it does not meet."""
    return sum(_pairs(part) for part in parts) / n_queries if n_queries else 0.0


def _pairs(part: Part) -> float:
    """How many pairs of a query and a column a part has."""
    columns = part.shape[2] if part.key_rows is None else part.key_rows.shape[1]
    columns += 0 if part.extra_rows is None else part.extra_rows.shape[1]
    n_queries = math.prod(part.shape) if part.query_valid is None else int(part.query_valid.sum())
    bias = part.bias4()
    if part.causal or bias is None:
        return n_queries * ((columns + 1) / 2 if part.causal else columns)
    met = (~torch.isneginf(bias)).sum(-1).expand(part.shape)
    return float(met.sum() if part.query_valid is None else (met * part.query_valid).sum())


def _without_residual(part: Part) -> Part:
    begin, end = part.residual
    if part.bias is None or end == 0:
        return part
    bias = part.bias.clone()
    bias[:, begin:end] = -torch.inf
    return dataclasses.replace(part, bias=bias)
