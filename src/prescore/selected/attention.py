"""The engine of `Selected` and `Hyper`: plan a call, run it, and report numbers about it."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from prescore.call import Call
from prescore.config import Exact, Hyper, Selected
from prescore.ops.parts import Part, attend_parts
from prescore.selected.plan import Plan, make_plan
from prescore.types import Reads, Result, Values


def is_one_leaf(config: Selected | Hyper, n_query: int, n_keys: int, *, is_causal: bool) -> bool:
    """Whether a call without padding or a given selection is one causal leaf, or one block exempt by the flag."""
    if is_causal:
        return n_keys <= max(1, config.min_seq_len)
    return config.leaf_inclusive and n_query <= config.min_seq_len


def why_exact(config: Selected | Hyper, n_query: int, n_keys: int, *, is_causal: bool) -> str:
    """Why every query of a call without a given selection reads every key; empty = it chooses."""
    one_leaf = is_one_leaf(config, n_query, n_keys, is_causal=is_causal)
    if is_causal:
        return f"no longer than min_seq_len={config.min_seq_len}" if one_leaf else ""
    if one_leaf or (isinstance(config, Hyper) and n_query < config.min_seq_len):
        return "shorter than min_seq_len"
    if isinstance(config, Hyper) or not isinstance(config.inner, Exact) or config.top_k is None:
        return ""
    keeps_all = config.top_k == 1.0 if isinstance(config.top_k, float) else config.top_k >= n_keys
    return "top_k keeps every key" if keeps_all else ""


def attend_selected(
    call: Call, config: Selected | Hyper, given: Tensor | None = None, *, explain: bool = False
) -> Result:
    """Run Algorithm 2; `given [B, Hkv, Nk]` is a selection to use instead of making one, in aligned positions."""
    reason = ""
    if given is None:
        reason = why_exact(config, call.n_query, call.n_keys, is_causal=call.is_causal)
    if isinstance(config, Hyper):  # HyperAttention over all keys selects every key
        config = Selected(
            top_k=1.0,
            sinks=config.sinks,
            remainder="none",
            inner=config.lsh,
            min_seq_len=config.min_seq_len,
            leaf_inclusive=config.leaf_inclusive,
        )
    plan = make_plan(call, config, given, explain=explain)
    with plan.timed("attending"):
        attended = attend_parts(
            call.query, *plan.tables.joined(), plan.parts, scale=call.scale, operator=call.operator
        )
    parts, n_queries = plan.parts, call.query.shape[:3].numel()

    def count_reads() -> Reads:  # holds row numbers, but no keys or values
        return reads_per_query(parts, n_queries)

    if not explain:
        return Result(*attended, count_reads, why_exact=reason)
    stats = _stats(plan, attended.lse, count_reads())
    return Result(*attended, count_reads, stats, plan.selections, reason)


def _stats(plan: Plan, lse: Tensor, reads: Reads) -> Values:
    """Fields of `Stats`; the means over block pairs and heads count every pair of every sequence."""
    selections = plan.selections
    n_pairs = sum(selection.valid.shape[:2].numel() for selection in selections)
    n_selected = sum(int(selection.valid.sum()) for selection in selections)
    return {
        "keys_selected": n_selected / n_pairs if n_pairs else 0.0,
        "keys_per_query": reads.keys,
        "centroids_per_query": reads.centroids,
        "depth": plan.depth,
        "fallbacks": sum(int(chosen.fallback.sum()) for chosen in selections if chosen.fallback is not None),
        "mass_read": _mass_read(plan, lse),
        "seconds": dict(plan.seconds),
        "backend": plan.call.operator.name,
    }


@torch.no_grad()
def _mass_read(plan: Plan, lse: Tensor) -> float:
    """Mean of exp(lse without the residual - lse with it) over queries that read a key."""
    non_empty = ~torch.isneginf(lse)
    if not any(part.residual[1] for part in plan.parts) or not bool(non_empty.any()):
        return 1.0
    parts = []
    for part in plan.parts:
        bias = None if part.bias is None else part.bias.clone()
        if bias is not None:
            bias[:, slice(*part.residual)] = -torch.inf
        parts.append(dataclasses.replace(part, bias=bias))
    call = plan.call
    without = attend_parts(call.query, *plan.tables.joined(), parts, scale=call.scale, operator=call.operator).lse
    return float(torch.exp(without[non_empty] - lse[non_empty]).mean())


def reads_per_query(parts: list[Part], n_queries: int) -> Reads:
    """Keys and centroids that a query reads on average; a causal square counts as half, a masked key as none."""
    keys = centroids = 0.0
    for part in parts:
        n_centroids = part.n_centroids
        n_keys = part.shape[2] if part.key_rows is None else part.key_rows.shape[1] - n_centroids
        bias = part.bias4()
        if part.causal or bias is None:
            rows = math.prod(part.shape) if part.query_valid is None else int(part.query_valid.sum())
            keys += rows * ((n_keys + 1) / 2 if part.causal else n_keys)
            centroids += rows * n_centroids
            continue
        visible = ~torch.isneginf(bias)
        counts = [columns.sum(-1).expand(part.shape) for columns in (visible[..., :n_keys], visible[..., n_keys:])]
        if part.query_valid is not None:
            counts = [count * part.query_valid for count in counts]
        keys, centroids = keys + float(counts[0].sum()), centroids + float(counts[1].sum())
    return Reads(keys / n_queries, centroids / n_queries) if n_queries else Reads(0.0)
