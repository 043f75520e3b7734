"""How long attention takes, as ratios to exact attention within one run.

The methods of a row are timed in turn, repeat by repeat, so that whatever else the machine does hits all of
them; a time is kept only after the same call's output was checked against a float64 evaluation of its plan.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prescore.attention.routed_reference import routed_reference
from prescore.config import PrescoreConfig
from prescore.decoding.state import SelectionState
from prescore.evaluation.freed_memory import SYSTEM
from prescore.evaluation.speed_check import exact_rows, planned_rows
from prescore.pipeline import attend_with_plan, prescored_attention
from prescore.records import Row
from prescore.route import build_tree
from prescore.statistics import rows_per_query

EXACT = "exact"
METHODS = ("hyper", "kmeans", "kmedian", "leverage", "default")
CHECKED_ROWS = 8
TOLERANCE = 2e-4  # float32 sums of up to 131,072 terms against float64; half types get TOLERANCE_HALF
TOLERANCE_HALF = 3e-2


@dataclass(frozen=True)
class Setting:
    """One point of the study; every field goes into the record. `memory`: see `freed_memory.py`."""

    n: int
    causal: bool
    backward: bool
    heads: int = 4
    dim: int = 64
    dtype: str = "float32"
    exact_heads: int = 4
    repeats: int = 3
    top_k: int = 2048
    n_clusters: int | None = None
    min_seq_len: int = 2048
    methods: tuple[str, ...] = METHODS
    memory: str = SYSTEM

    def config(self, method: str) -> PrescoreConfig:
        """The configuration a method name stands for: the paper's preset, or the library's default."""
        if method == "default":
            return PrescoreConfig()
        if method == "hyper":
            return PrescoreConfig.hyper(min_seq_len=self.min_seq_len)
        return PrescoreConfig.paper(method, self.top_k, min_seq_len=self.min_seq_len, n_clusters=self.n_clusters)


def length_rows(settings: Sequence[Setting], seed: int, study: str = "lengths") -> list[Row]:
    """Rows that time every method of each setting."""
    rows = []
    for setting in settings:
        config = {"study": study, **_plain(setting)}
        cost = setting.n**2 * setting.exact_heads * (0.5 if setting.causal else 1.0)
        cost *= (3.5 if setting.backward else 1.0) * _exact_repeats(setting)
        rows.append(Row(config, seed, _measurement(setting, seed), cost + 4e3 * setting.n * setting.heads))
    return rows


def decode_rows(lengths: Sequence[int], top_k: int, heads: int, dim: int, steps: int, seed: int) -> list[Row]:
    """Rows that time one decode step over a kept selection against one over the full cache."""
    rows = []
    for n in lengths:
        config = {"study": "decode", "n": n, "top_k": top_k, "heads": heads, "dim": dim, "steps": steps}

        def run(n: int = n) -> dict[str, Any]:
            return measure_decode(n, top_k, heads, dim, steps, seed)

        rows.append(Row(config, seed, run, float(n)))
    return rows


def measure(setting: Setting, seed: int) -> dict[str, Any]:
    """Time exact attention and every method of a setting; figures are seconds, ratios and shares."""
    inputs = _inputs(setting, setting.heads, seed)
    few = setting.exact_heads < setting.heads
    exact_inputs = _inputs(setting, setting.exact_heads, seed) if few else inputs
    calls: dict[str, Callable[[], Tensor]] = {EXACT: _exact_call(setting, exact_inputs)}
    errors = {EXACT: _check_exact(setting, exact_inputs)}
    details: dict[str, Any] = {}
    for method in setting.methods:
        calls[method] = _method_call(setting, method, inputs)
        errors[method], details[method] = _check_method(setting, method, inputs)
    times = _interleave(setting, calls)
    scale = setting.heads / setting.exact_heads if few else 1.0
    figures: dict[str, Any] = {"exact_scaled": few, "methods": {}}
    exact = statistics.median(times[EXACT]) * scale
    for name, measured in times.items():
        median = statistics.median(measured) * (scale if name == EXACT else 1.0)
        spread = (max(measured) - min(measured)) * (scale if name == EXACT else 1.0)
        found = {"seconds": median, "spread": spread, "error": errors[name], "speedup": exact / median}
        figures["methods"][name] = {**found, **details.get(name, {})}
    for name in setting.methods:
        entry = figures["methods"][name]
        columns = (setting.n + 1) / 2 if setting.causal else setting.n
        entry["limit"] = columns / max(entry["rows_per_query"], 1.0)
        entry["limit_share"] = entry["speedup"] / entry["limit"]
        entry["scoring_of_exact"] = entry["stage_seconds"].get("scoring", 0.0) / exact
    return figures


def measure_decode(n: int, top_k: int, heads: int, dim: int, steps: int, seed: int) -> dict[str, Any]:
    """Seconds of one decode step: over the kept rows, and exactly over the whole cache."""
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(1, heads, n, dim, generator=generator) for _ in range(2))
    query = torch.randn(1, heads, 1, dim, generator=generator)
    state = SelectionState.select(key, value, None, PrescoreConfig.paper("kmeans", top_k))
    config = PrescoreConfig.paper("kmeans", top_k, inner="exact")
    reference = prescored_attention(query, key, value, config=config)
    got = state.attend(query, None)
    error = float((got - reference).abs().max())
    if error > TOLERANCE:
        raise RuntimeError(f"decode step must match prescored_attention to {TOLERANCE}, got {error}")
    times: dict[str, list[float]] = {EXACT: [], "selected": []}
    with torch.no_grad():
        for _ in range(steps):
            times[EXACT].append(seconds(lambda: scaled_dot_product_attention(query, key, value)))
            times["selected"].append(seconds(lambda: state.attend(query, None)))
    medians = {name: statistics.median(measured) for name, measured in times.items()}
    return {
        "seconds": medians,
        "spread": {name: max(measured) - min(measured) for name, measured in times.items()},
        "rows": state.n_rows,
        "speedup": medians[EXACT] / medians["selected"],
        "error": error,
    }


def _measurement(setting: Setting, seed: int) -> Callable[[], dict[str, Any]]:
    return lambda: measure(setting, seed)


def _plain(setting: Setting) -> dict[str, Any]:
    values = {name: getattr(setting, name) for name in setting.__dataclass_fields__}
    values["methods"] = list(setting.methods)
    return values


def _inputs(setting: Setting, heads: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, setting.dtype)
    shape = (1, heads, setting.n, setting.dim)
    made = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
    if setting.backward:
        made = [tensor.requires_grad_() for tensor in made]
    return made[0], made[1], made[2]


def _exact_call(setting: Setting, inputs: tuple[Tensor, Tensor, Tensor]) -> Callable[[], Tensor]:
    query, key, value = inputs
    return lambda: scaled_dot_product_attention(query, key, value, is_causal=setting.causal)


def _method_call(setting: Setting, method: str, inputs: tuple[Tensor, Tensor, Tensor]) -> Callable[[], Tensor]:
    config = setting.config(method)
    return lambda: prescored_attention(*inputs, config=config, is_causal=setting.causal)


def _check_exact(setting: Setting, inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    rows = _some_rows(inputs[0])
    with torch.no_grad():
        output = scaled_dot_product_attention(*inputs, is_causal=setting.causal)
    wanted = exact_rows(*inputs, rows, setting.causal)
    return _agree(EXACT, setting, output, rows, wanted)


def _check_method(
    setting: Setting, method: str, inputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[float, dict[str, Any]]:
    """The error of the checked rows, and what the plan says: columns per query and seconds per stage."""
    if setting.config(method).inner == "routed":
        return _check_routed(setting, method, inputs)
    rows = _some_rows(inputs[0])
    with torch.no_grad():
        _, plan, call = attend_with_plan(*inputs, setting.config(method), setting.causal)
        output = _method_call(setting, method, inputs)()  # the call that is timed, not the one that was planned
    wanted = planned_rows(call, plan, rows, setting.dim**-0.5)
    error = _agree(method, setting, output, rows, wanted)
    columns = rows_per_query(plan.parts, inputs[0].shape[:3].numel())
    with torch.no_grad():  # once more for the stages: the first call pays for memory that later ones reuse
        plan = attend_with_plan(*inputs, setting.config(method), setting.causal)[1]
    total = sum(plan.seconds.values())
    operator = _operator_seconds(setting, method, inputs)
    stages = dict(plan.seconds)
    attending = stages.pop("attending", 0.0)
    stages["operator"] = min(operator, attending)
    stages["gathering"] = attending - stages["operator"]
    shares = {stage: share / total for stage, share in stages.items()}
    return error, {"rows_per_query": columns, "stage_seconds": stages, "shares": shares}


def _check_routed(
    setting: Setting, method: str, inputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[float, dict[str, Any]]:
    """Routed attention against its plain reference, for the last queries: each chooses for itself."""
    config, scale = setting.config(method), setting.dim**-0.5
    query, key, value = (tensor.detach() for tensor in inputs)
    output = prescored_attention(query, key, value, config=config, is_causal=setting.causal)
    _, stats = prescored_attention(query, key, value, config=config, is_causal=setting.causal, return_aux=True)
    wanted = routed_reference(
        query[:, :, -CHECKED_ROWS:].double(), key.double(), value.double(), is_causal=setting.causal,
        config=config, scale=scale, tree_builder=lambda points, levels, valid: build_tree(
            points.to(query.dtype), levels, valid
        ),
    ).output  # fmt: skip
    got = output[:, :, -CHECKED_ROWS:].double()
    # a query may choose another leaf of equal score where rounding decides: few rows, checked by their share
    errors = (got - wanted).abs().amax(-1).flatten()
    error = float(errors.quantile(0.9))
    limit = TOLERANCE if setting.dtype in ("float32", "float64") else TOLERANCE_HALF
    if not error <= limit:
        raise RuntimeError(
            f"output of {method} at n = {setting.n} must match its reference to {limit}, got {error}"
        )
    stages, columns = dict(stats.stats["seconds"]), stats.stats["rows_per_query"]
    return error, {"rows_per_query": columns, "stage_seconds": stages, "shares": {"routing": 1.0}}


def _operator_seconds(setting: Setting, method: str, inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    """Seconds inside the fused operator, from one profiled call."""
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _method_call(setting, method, inputs)()
    events = [event for event in profile.key_averages() if "scaled_dot_product" in event.key]
    return sum(float(event.self_cpu_time_total) for event in events) / 1e6


def _agree(name: str, setting: Setting, output: Tensor, rows: Tensor, wanted: Tensor) -> float:
    got = output.detach().reshape(-1, output.shape[-1]).index_select(0, rows).double()
    error = float((got - wanted).abs().max())
    limit = TOLERANCE if setting.dtype in ("float32", "float64") else TOLERANCE_HALF
    if not error <= limit:
        raise RuntimeError(f"output of {name} at n = {setting.n} must match its plan to {limit}, got {error}")
    return error


def _some_rows(query: Tensor) -> Tensor:
    total = query.shape[:3].numel()
    return torch.linspace(0, total - 1, CHECKED_ROWS, dtype=torch.float64).long()


def _exact_repeats(setting: Setting) -> int:
    return setting.repeats if setting.n <= 32768 else 1


def _interleave(setting: Setting, calls: dict[str, Callable[[], Tensor]]) -> dict[str, list[float]]:
    """Every method once per repeat; exact attention less often where one run is long and steady.

    A first round is not counted: the memory that it takes from the system is there for the others.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        if name != EXACT or _exact_repeats(setting) > 1:
            seconds(call, backward=setting.backward)
    for repeat in range(setting.repeats):
        for name, call in calls.items():
            if name == EXACT and repeat >= _exact_repeats(setting):
                continue
            times[name].append(seconds(call, backward=setting.backward))
    return times


def seconds(call: Callable[[], Tensor], *, backward: bool = False) -> float:
    """Wall time of one call, with its backward pass if asked."""
    begin = time.perf_counter()
    if backward:
        output = call()
        output.backward(torch.ones_like(output))
    else:
        with torch.no_grad():
            call()
    return time.perf_counter() - begin
