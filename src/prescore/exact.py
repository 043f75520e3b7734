"""Exact attention as an engine: what `Exact()` runs, and what every other configuration is measured against."""

from __future__ import annotations

import time

import torch

from prescore.call import Call
from prescore.selection.members import selection_of
from prescore.types import Outcome


def attend_to_all(call: Call, *, explain: bool = False) -> Outcome:
    """Every query reads every key it may see; with `explain` also tell how many that are."""
    begin = time.perf_counter()
    attended = call.exactly()
    if not explain:
        return Outcome(attended, lambda: visible_keys(call))
    shape = call.key.shape[:3]
    real = call.valid[:, None].expand(shape) if call.valid is not None else torch.ones(shape, dtype=torch.bool)
    stats = {
        "keys_kept": float(call.n_keys),
        "rows_per_query": visible_keys(call),
        "depth": 0,
        "fallbacks": 0,
        "captured_mass": 1.0,
        "seconds": {"attending": time.perf_counter() - begin},
        "backend": call.backend.name,
    }
    return Outcome(attended, lambda: visible_keys(call), [selection_of(real.to(call.key.device))], stats)


def visible_keys(call: Call) -> float:
    """Keys that a query may see, on average; padding counts."""
    hidden = (call.n_query - 1) / 2 if call.is_causal and call.n_query else 0.0
    return call.n_keys - hidden
