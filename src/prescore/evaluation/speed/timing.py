"""How long attention takes, as ratios to exact attention within one run.

The methods of a row are timed in turn, repeat by repeat, so that whatever else the machine does hits all of
them; a time is kept only after the same call's output was checked.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prescore.api.attention import prescored_attention
from prescore.config import Config, Hyper, Routed, Selected
from prescore.evaluation.speed.check import Inputs, check_exact, check_method
from prescore.evaluation.speed.freed_memory import SYSTEM
from prescore.records import Row
from prescore.registry import get_scorer
from prescore.scorers.clustered import ClusteringScorer
from prescore.values import Values

EXACT = "exact"
METHODS = ("hyper", "kmeans", "kmedian", "leverage", "default")
LONG = 32768
"""Above this length exact attention is timed once: one run is long and steady."""


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

    @property
    def exact_repeats(self) -> int:
        """Timed repeats of exact attention."""
        return self.repeats if self.n <= LONG else 1

    @property
    def cost(self) -> float:
        """Expected work, for the time left."""
        exact = self.n**2 * self.exact_heads * (0.5 if self.causal else 1.0)
        exact *= (3.5 if self.backward else 1.0) * self.exact_repeats
        return exact + 4e3 * self.n * self.heads

    def config(self, method: str) -> Config:
        """The configuration a method name stands for: the paper's preset, or the library's default."""
        if method == "default":
            return Routed()
        if method == "hyper":
            return Hyper.published(min_seq_len=self.min_seq_len)
        scorer = get_scorer(method)
        clusters = {"n_clusters": self.n_clusters} if issubclass(scorer, ClusteringScorer) else {}
        return Selected.paper(scorer(**clusters), self.top_k, min_seq_len=self.min_seq_len)

    def inputs(self, heads: int, seed: int) -> Inputs:
        """Random query, key and value."""
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, self.dtype)
        made = [torch.randn(1, heads, self.n, self.dim, generator=generator).to(dtype) for _ in range(3)]
        if self.backward:
            made = [tensor.requires_grad_() for tensor in made]
        return made[0], made[1], made[2]


def length_rows(settings: Sequence[Setting], seed: int, study: str = "lengths") -> list[Row]:
    """Rows that time every method of each setting."""
    return [
        Row(
            {"study": study, **asdict(setting), "methods": list(setting.methods)},
            seed,
            partial(measure_setting, setting, seed),
            setting.cost,
        )
        for setting in settings
    ]


def measure_setting(setting: Setting, seed: int) -> Values:
    """Time exact attention and every method of a setting; figures are seconds, ratios and shares."""
    inputs = setting.inputs(setting.heads, seed)
    few = setting.exact_heads < setting.heads
    exact_inputs = setting.inputs(setting.exact_heads, seed) if few else inputs
    calls = {EXACT: _exact_call(setting, exact_inputs)}
    calls |= {method: _method_call(setting, method, inputs) for method in setting.methods}
    with torch.no_grad():
        errors = {EXACT: check_exact(_at(EXACT, setting), exact_inputs, calls[EXACT](), setting.causal)}
        for method in setting.methods:  # the very calls that are timed
            config, output = setting.config(method), calls[method]()
            errors[method] = check_method(_at(method, setting), inputs, config, output, setting.causal)
    details = {method: _details(setting, method, inputs) for method in setting.methods}
    times = _interleave(setting, calls)
    scale = setting.heads / setting.exact_heads if few else 1.0
    times[EXACT] = [scale * spent for spent in times[EXACT]]
    exact = statistics.median(times[EXACT])
    methods = {
        name: {
            "seconds": statistics.median(spent),
            "spread": max(spent) - min(spent),
            "error": errors[name],
            "speedup": exact / statistics.median(spent),
        }
        for name, spent in times.items()
    }
    for name, found in details.items():
        columns = (setting.n + 1) / 2 if setting.causal else setting.n
        limit = columns / max(found["rows_per_query"], 1.0)
        share = methods[name]["speedup"] / limit
        scoring = found["stage_seconds"].get("scoring", 0.0) / exact
        methods[name] |= {**found, "limit": limit, "limit_share": share, "scoring_of_exact": scoring}
    return {"exact_scaled": few, "methods": methods}


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


def _at(name: str, setting: Setting) -> str:
    return f"{name} at n = {setting.n}"


def _exact_call(setting: Setting, inputs: Inputs) -> Callable[[], Tensor]:
    return lambda: scaled_dot_product_attention(*inputs, is_causal=setting.causal)


def _method_call(setting: Setting, method: str, inputs: Inputs) -> Callable[[], Tensor]:
    config = setting.config(method)
    return lambda: prescored_attention(*inputs, config, is_causal=setting.causal)


def _details(setting: Setting, method: str, inputs: Inputs) -> Values:
    """Rows per query, seconds per stage and their shares; the checks before have paid for the memory."""
    config = setting.config(method)
    with torch.no_grad():
        stats = prescored_attention(*inputs, config, is_causal=setting.causal, return_aux=True)[1].stats
    stages: dict[str, float] = dict(stats.seconds)
    attending = stages.pop("attending")
    if isinstance(config, Routed):
        stages["routing"] = attending
    else:
        stages["operator"] = min(_operator_seconds(setting, method, inputs), attending)
        stages["gathering"] = attending - stages["operator"]
    total = sum(stages.values())
    shares = {stage: spent / total for stage, spent in stages.items()}
    return {"rows_per_query": stats.rows_per_query, "stage_seconds": stages, "shares": shares}


def _operator_seconds(setting: Setting, method: str, inputs: Inputs) -> float:
    """Seconds inside the fused operator, from one profiled call."""
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _method_call(setting, method, inputs)()
    events = [event for event in profile.key_averages() if "scaled_dot_product" in event.key]
    return sum(float(event.self_cpu_time_total) for event in events) / 1e6


def _interleave(setting: Setting, calls: dict[str, Callable[[], Tensor]]) -> dict[str, list[float]]:
    """Every method once per repeat; exact attention less often where one run is long.

    A first round is not counted: the memory that it takes from the system is there for the others.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        if name != EXACT or setting.exact_repeats > 1:
            seconds(call, backward=setting.backward)
    for repeat in range(setting.repeats):
        for name, call in calls.items():
            if name == EXACT and repeat >= setting.exact_repeats:
                continue
            times[name].append(seconds(call, backward=setting.backward))
    return times
