"""Two closer looks at speed: what scoring alone costs, and what short inputs lose.

Like the main study, everything of a row is timed in turn and divided by exact attention's time in the same row.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prescore.api.attention import prescored_attention
from prescore.api.scoring import score
from prescore.config import Config, Exact, Routed
from prescore.evaluation.speed.check import Inputs, check_exact, check_method
from prescore.evaluation.speed.timing import EXACT, seconds
from prescore.records import Row
from prescore.scorers.base import Scorer
from prescore.scorers.gaussian_kmeans import GaussianKMeans
from prescore.scorers.kmeans import KMeans
from prescore.scorers.kmedian import KMedian
from prescore.scorers.leverage import Leverage
from prescore.scorers.minkowski import Minkowski
from prescore.values import Values

SCORERS: dict[str, Scorer] = {
    "kmeans": KMeans(),
    "kmedian": KMedian(),
    "minkowski p=1.5": Minkowski(p=1.5),
    "minkowski p=3": Minkowski(p=3.0),
    "gaussian-kmeans": GaussianKMeans(),
    "leverage": Leverage(),
}
"""Every clustering method with the paper's settings, and leverage beside them."""

SHORT_CALLS: dict[str, Config] = {"Exact()": Exact(), "default": Routed()}
"""Exact attention by way of `prescored_attention`, which shows what its checks cost, and the default."""

FEWEST_SECONDS = 0.2
"""Short calls are repeated until exact attention alone has run this long."""


@dataclass(frozen=True)
class ScoringSetting:
    """Keys to score; every field goes into the record."""

    n: int
    heads: int
    dim: int
    repeats: int


@dataclass(frozen=True)
class ShortSetting:
    """A short input; every field goes into the record."""

    n: int
    causal: bool
    backward: bool
    heads: int
    dim: int
    repeats: int


def scoring_row(setting: ScoringSetting, seed: int) -> Row:
    """A row that times every scorer against exact full attention."""
    cost = 3.0 * setting.n**2 * setting.heads
    return Row({"study": "scoring", **asdict(setting)}, seed, partial(measure_scoring, setting, seed), cost)


def short_rows(settings: Sequence[ShortSetting], seed: int) -> list[Row]:
    """Rows that time `SHORT_CALLS` against exact attention."""
    return [
        Row(
            {"study": "short", **asdict(setting)},
            seed,
            partial(measure_short, setting, seed),
            float(setting.n**2 * setting.heads),
        )
        for setting in settings
    ]


def measure_scoring(setting: ScoringSetting, seed: int) -> Values:
    """Seconds of each scorer, and their share of exact full attention; exact runs twice at most."""
    query, key, value = _inputs(setting.n, setting.heads, setting.dim, seed)
    calls: dict[str, Callable[[], Tensor]] = {EXACT: partial(scaled_dot_product_attention, query, key, value)}
    calls |= {name: partial(score, key, scorer) for name, scorer in SCORERS.items()}
    with torch.no_grad():
        for name in SCORERS:
            scores = calls[name]()
            if not bool(torch.isfinite(scores).all()):
                raise RuntimeError(f"scores of {name} must be finite, got {scores}")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(setting.repeats):
        for name, call in calls.items():
            if name != EXACT or repeat < 2:
                times[name].append(seconds(call))
    return _against_exact(times)


def measure_short(setting: ShortSetting, seed: int) -> Values:
    """Seconds of exact attention and of `SHORT_CALLS` on one short input, each output checked first."""
    causal, backward = setting.causal, setting.backward
    inputs = _inputs(setting.n, setting.heads, setting.dim, seed)
    if backward:
        inputs = (inputs[0].requires_grad_(), inputs[1].requires_grad_(), inputs[2].requires_grad_())
    calls: dict[str, Callable[[], Tensor]] = {
        EXACT: partial(scaled_dot_product_attention, *inputs, is_causal=causal)
    }
    for name, config in SHORT_CALLS.items():
        calls[name] = partial(prescored_attention, *inputs, config, is_causal=causal)
    with torch.no_grad():
        errors = {EXACT: check_exact(f"{EXACT} at n = {setting.n}", inputs, calls[EXACT](), causal)}
        for name, config in SHORT_CALLS.items():
            called = f"{name} at n = {setting.n}"
            errors[name] = check_method(called, inputs, config, calls[name](), causal)
    rounds = max(setting.repeats, min(200, int(FEWEST_SECONDS / seconds(calls[EXACT], backward=backward))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, backward=backward))
    return {**_against_exact(times), "error": errors}


def _inputs(n: int, heads: int, dim: int, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, heads, n, dim, generator=generator) for _ in range(3))
    return query, key, value


def _against_exact(times: dict[str, list[float]]) -> Values:
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "seconds": medians,
        "spread": {name: max(values) - min(values) for name, values in times.items()},
        "of_exact": {name: median / medians[EXACT] for name, median in medians.items()},
        "rounds": {name: len(values) for name, values in times.items()},
    }
