"""Figures about a routed call: what its queries met, and how far off they may be."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from prescore.call import Call
from prescore.config import Routed
from prescore.routed.layout import Layout
from prescore.values import Values

ERROR_FIGURES = ("error_estimate", "error_limit_mean", "error_limit_max", "read_further", "read_everything")
"""What a call with a tolerance tells; all zero where everything is read."""


def real_queries(call: Call) -> Tensor:
    """`[B, Nq]`: the queries that figures are about."""
    if call.query_valid is not None:
        return call.query_valid
    return torch.ones((call.query.shape[0], call.n_query), dtype=torch.bool, device=call.query.device)


def keys_seen(call: Call) -> Tensor:
    """`[B, Nq]` in float64: real keys that each query may see; causal queries are the last positions."""
    shape = (call.query.shape[0], call.n_keys)
    valid = call.valid
    if valid is None:
        valid = torch.ones(shape, dtype=torch.bool, device=call.query.device)
    if call.is_causal:
        return valid.cumsum(1)[:, call.n_keys - call.n_query :].double()
    return valid.sum(1, keepdim=True).expand(-1, call.n_query).double()


def geometry(call: Call, layout: Layout, n_exact: int, config: Routed) -> Values:
    """What is known before anything was read, as if all queries read everything."""
    rows = _mean(keys_seen(call), real_queries(call))
    nothing = dict.fromkeys(("searched_keys", "far_rows", "stand_in_rows"), 0.0)
    bars = dict.fromkeys(ERROR_FIGURES if config.tolerance is not None else (), 0.0)
    return {**asdict(layout), "exact_queries": n_exact, **nothing, "rows_per_query": rows, **bars}


def met(call: Call, layout: Layout, n_exact: int, counts: Tensor) -> Values:
    """What queries met on average; `counts` are the keys that all of them searched, and the rows they found.

    Those of padding look for nothing in a causal call. Without a causal mask they are answered as others are, and
    what they find counts.
    """
    real = real_queries(call)
    if layout.causal:
        position = torch.arange(layout.n_query, device=real.device) + layout.first
        chunks = layout.chunks_seen(position).expand(real.shape)
    else:
        chunks = layout.full_chunks(call.valid, real.shape[0]).to(real.device)[:, None].expand(real.shape)
    routed = real[:, n_exact:]
    n_looking = int(routed.sum()) if layout.causal else routed.numel()
    searched, found = (counts / (call.query.shape[1] * max(1, n_looking))).tolist()
    # of a chunk that is seen as nodes none but those are met
    rows = keys_seen(call) - chunks * (layout.chunk - layout.nodes_per_chunk)
    share = int(routed.sum()) / max(1, int(real.sum()))
    return {
        "searched_keys": searched,
        "far_rows": found,
        "stand_in_rows": _mean(chunks[:, n_exact:].double(), routed) * layout.nodes_per_chunk,
        "rows_per_query": _mean(rows, real) + found * share,
    }


def _mean(numbers: Tensor, of: Tensor) -> float:
    """Of some of them; 0 where there are none."""
    some = numbers[of]
    return float(some.mean()) if some.numel() else 0.0


def error_figures(limit: Tensor, error: Tensor, further: Tensor, over: Tensor) -> Values:
    """Figures about the error bars of some queries, of which those `over` the tolerance read everything."""
    if not limit.numel():
        return dict.fromkeys(ERROR_FIGURES, 0.0)
    bars = limit.masked_fill(over, 0.0)
    return {
        "error_estimate": float(error.masked_fill(over, 0.0).mean()),
        "error_limit_mean": float(bars.mean()),
        "error_limit_max": float(bars.max()),
        "read_further": float((further | over).double().mean()),
        "read_everything": float(over.double().mean()),
    }
