"""Exact attention as an engine: what `Exact()` runs, and what every other configuration is measured against."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from prescore.call import Call
from prescore.selection.members import selection_of
from prescore.types import Outcome


def attend_to_all(call: Call, *, explain: bool = False) -> Outcome:
    """Every query reads every key it may see; with `explain` also tell how many that are."""
    begin = time.perf_counter()
    attended, count_rows = call.exactly(), visible_keys(call)
    if not explain:
        return Outcome(attended, count_rows)
    shape = call.key.shape[:3]
    real = call.valid[:, None].expand(shape) if call.valid is not None else torch.ones(shape, dtype=torch.bool)
    stats = {
        "keys_kept": call.mean_keys(),
        "rows_per_query": count_rows(),
        "depth": 0,
        "fallbacks": 0,
        "seen_mass": 1.0,
        "seconds": {"attending": time.perf_counter() - begin},
        "backend": call.backend.name,
    }
    return Outcome(attended, count_rows, [selection_of(real.to(call.key.device))], stats)


def visible_keys(call: Call) -> Callable[[], float]:
    """Counts the real keys that a real query may see, on average; keeps nothing of the call but its padding."""
    n_query, n_keys, is_causal, valid = call.n_query, call.n_keys, call.is_causal, call.valid

    def count() -> float:
        if not n_query or not n_keys:
            return 0.0
        if valid is None:
            return n_keys - ((n_query - 1) / 2 if is_causal else 0.0)
        seen = valid.cumsum(1)
        seen = seen[:, n_keys - n_query :] if is_causal else seen[:, -1:].expand(-1, n_query)
        real = valid if n_query == n_keys else torch.ones_like(seen, dtype=torch.bool)
        return float(seen[real].double().mean()) if bool(real.any()) else 0.0

    return count
