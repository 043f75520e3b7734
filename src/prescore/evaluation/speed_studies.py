"""Two closer looks at speed: what scoring alone costs, and what short inputs lose.

Like the main study, everything of a row is timed in turn and divided by exact attention's time in the same row.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prescore.config import PrescoreConfig
from prescore.evaluation.speed import EXACT, TOLERANCE, seconds
from prescore.pipeline import prescored_attention, score
from prescore.records import Row

SCORERS: dict[str, dict[str, Any]] = {
    "kmeans": {"method": "kmeans"},
    "kmedian": {"method": "kmedian"},
    "minkowski p=1.5": {"method": "minkowski", "p": 1.5},
    "minkowski p=3": {"method": "minkowski", "p": 3.0},
    "gaussian-kmeans": {"method": "gaussian-kmeans"},
    "leverage": {"method": "leverage"},
}
"""Every clustering method with the paper's preset, and leverage beside them."""

FEWEST_SECONDS = 0.2
"""Short calls are repeated until exact attention alone has run this long."""


def scoring_rows(n: int, heads: int, dim: int, repeats: int, seed: int) -> list[Row]:
    """A row that times every scorer against exact full attention."""
    config = {"study": "scoring", "n": n, "heads": heads, "dim": dim, "repeats": repeats}
    return [Row(config, seed, lambda: measure_scoring(n, heads, dim, repeats, seed), 3.0 * n**2 * heads)]


def short_rows(lengths: Sequence[int], heads: int, dim: int, repeats: int, seed: int) -> list[Row]:
    """Rows that time `inner="auto"` and the default against exact attention, full and causal."""
    rows = []
    for causal in (False, True):
        for backward in (False, True):
            for n in lengths:
                config = {
                    "study": "short", "n": n, "causal": causal, "backward": backward, "heads": heads, "dim": dim,
                    "repeats": repeats,
                }  # fmt: skip

                def run(n: int = n, causal: bool = causal, backward: bool = backward) -> dict[str, Any]:
                    return measure_short(n, causal, backward, heads, dim, repeats, seed)

                rows.append(Row(config, seed, run, float(n**2 * heads)))
    return rows


def measure_scoring(n: int, heads: int, dim: int, repeats: int, seed: int) -> dict[str, Any]:
    """Seconds of each scorer, and their share of exact full attention; exact runs twice at most."""
    query, key, value = _inputs(n, heads, dim, seed)
    configs = {name: PrescoreConfig.paper(**fields) for name, fields in SCORERS.items()}
    with torch.no_grad():
        for config in configs.values():
            scores = score(key, config=config)
            if not bool(torch.isfinite(scores).all()):
                raise RuntimeError(f"scores of {config.method} must be finite, got {scores}")
    times: dict[str, list[float]] = {name: [] for name in (EXACT, *configs)}
    for repeat in range(repeats):
        if repeat < 2:
            times[EXACT].append(seconds(lambda: scaled_dot_product_attention(query, key, value)))
        for name, config in configs.items():
            times[name].append(seconds(lambda config=config: score(key, config=config)))  # type: ignore[misc]
    return _against_exact(times)


def measure_short(
    n: int, causal: bool, backward: bool, heads: int, dim: int, repeats: int, seed: int
) -> dict[str, Any]:
    """Seconds of exact attention, of `inner="auto"` and of the default on one short input."""
    inputs = _inputs(n, heads, dim, seed)
    if backward:
        inputs = tuple(tensor.requires_grad_() for tensor in inputs)  # type: ignore[assignment]
    auto = PrescoreConfig.paper("kmeans", inner="auto")
    calls: dict[str, Callable[[], Tensor]] = {
        EXACT: lambda: scaled_dot_product_attention(*inputs, is_causal=causal),
        "auto": lambda: prescored_attention(*inputs, config=auto, is_causal=causal),
        "default": lambda: prescored_attention(*inputs, is_causal=causal),
    }
    with torch.no_grad():
        wanted = calls[EXACT]()
        errors = {name: float((call() - wanted).abs().max()) for name, call in calls.items()}
    if not errors["auto"] <= TOLERANCE:
        raise RuntimeError(f"auto at n = {n} must be exact attention to {TOLERANCE}, got {errors['auto']}")
    once = seconds(calls[EXACT], backward=backward)
    rounds = max(repeats, min(200, int(FEWEST_SECONDS / once)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, backward=backward))
    return {**_against_exact(times), "error": errors}


def _inputs(n: int, heads: int, dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, heads, n, dim, generator=generator) for _ in range(3))
    return query, key, value


def _against_exact(times: dict[str, list[float]]) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "seconds": medians,
        "spread": {name: max(values) - min(values) for name, values in times.items()},
        "of_exact": {name: median / medians[EXACT] for name, median in medians.items()},
        "rounds": {name: len(values) for name, values in times.items()},
    }
