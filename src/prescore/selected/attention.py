"""Attention over keys that were selected before any query was seen, as one call: plan, run, tell."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from prescore.call import Call
from prescore.config import Hyper, Selected
from prescore.ops.parts import Part
from prescore.selected.plan import Plan, make_plan
from prescore.types import Attended, Reads, Result, Values


def reads_every_key(call: Call, config: Selected | Hyper) -> bool:
    """Whether every query of a call without padding or a given selection reads every key it may see."""
    return call.is_causal and call.n_keys <= max(1, config.min_seq_len)


def attend_selected(
    call: Call, config: Selected | Hyper, given: Tensor | None = None, *, explain: bool = False
) -> Result:
    """Run Algorithm 2.

    Args:
        call: The aligned inputs.
        config: How keys are selected and attended to.
        given: `[B, Hkv, Nk]` bool, a selection to use instead of making one, in aligned positions.
        explain: Also tell what was selected and figures about it.
    """
    plan = make_plan(call, selecting(config), given)
    attended = plan.timed("attending", lambda: plan.run(call))
    parts, n_queries = plan.parts, call.query.shape[:3].numel()

    def count_reads() -> Reads:  # holds indices, but no keys or values
        return reads_per_query(parts, n_queries)

    if not explain:
        return Result(*attended, count_reads)
    return Result(*attended, count_reads, statistics(call, plan, attended), plan.selections)


def selecting(config: Selected | Hyper) -> Selected:
    """HyperAttention over all keys is a selection that keeps every key."""
    if isinstance(config, Selected):
        return config
    return Selected(
        top_k=1.0,
        sinks=config.sinks,
        remainder="none",
        inner=config.lsh,
        min_seq_len=config.min_seq_len,
        leaf_inclusive=config.leaf_inclusive,
    )


# Plain numbers about one call: what was kept, what the residual carried, where the time went.


def statistics(call: Call, plan: Plan, attended: Attended) -> Values:
    """Statistics of a plan whose result is `attended`, in aligned positions.

    Returns:
        `keys_selected` (mean per problem and head), `keys_per_query` (key and centroid columns a query met, on
        average), `depth` of the causal recursion, `fallbacks` taken, `mass_read` (mean share of the estimated
        attention mass that was seen exactly rather than estimated by the residual), and `seconds`
        per stage.
    """
    reads = reads_per_query(plan.parts, call.query.shape[:3].numel())
    problems = sum(kept.valid.shape[:2].numel() for kept in plan.selections)
    n_kept = sum(int(kept.valid.sum()) for kept in plan.selections)
    return {
        "keys_selected": n_kept / problems if problems else 0.0,
        "keys_per_query": reads.keys,
        "centroids_per_query": reads.centroids,
        "depth": plan.depth,
        "fallbacks": sum(int(kept.fallback.sum()) for kept in plan.selections if kept.fallback is not None),
        "mass_read": mass_read(call, plan, attended),
        "seconds": dict(plan.seconds),
        "backend": call.backend.name,
    }


@torch.no_grad()
def mass_read(call: Call, plan: Plan, attended: Attended) -> float:
    """Mean of exp(lse without the residual - lse with it) over queries that saw anything."""
    if not any(part.residual[1] for part in plan.parts):
        return 1.0
    whole = attended.lse
    seen = plan.run(call, [_without_residual(part) for part in plan.parts]).lse
    anywhere = ~torch.isneginf(whole)
    if not bool(anywhere.any()):
        return 1.0
    return float(torch.exp(seen[anywhere] - whole[anywhere]).mean())


def reads_per_query(parts: list[Part], n_queries: int) -> Reads:
    """Keys and centroids read per query; a causal square counts as half, a masked key not at all."""
    if not n_queries:
        return Reads(0.0)
    pairs = [_pairs(part) for part in parts]
    return Reads(*(sum(counts) / n_queries for counts in zip(*pairs, strict=True))) if pairs else Reads(0.0)


def _pairs(part: Part) -> tuple[float, float]:
    """How many pairs of a query and a key, and of a query and a centroid, a part has."""
    n_keys = part.shape[2] if part.key_rows is None else part.key_rows.shape[1]
    n_centroids = 0 if part.extra_rows is None else part.extra_rows.shape[1]
    n_queries = math.prod(part.shape) if part.query_valid is None else int(part.query_valid.sum())
    bias = part.bias4()
    if part.causal or bias is None:
        return n_queries * ((n_keys + 1) / 2 if part.causal else n_keys), float(n_queries * n_centroids)
    visible = ~torch.isneginf(bias)
    read = (visible[..., :n_keys].sum(-1), visible[..., n_keys:].sum(-1))
    counts = (count.expand(part.shape) for count in read)
    keys, centroids = (n if part.query_valid is None else n * part.query_valid for n in counts)
    return float(keys.sum()), float(centroids.sum())


def _without_residual(part: Part) -> Part:
    begin, end = part.residual
    if part.bias is None or end == 0:
        return part
    bias = part.bias.clone()
    bias[:, begin:end] = -torch.inf
    return dataclasses.replace(part, bias=bias)
