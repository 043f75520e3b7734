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

from prescore.attention import prescored_attention
from prescore.bench.memory import SYSTEM
from prescore.bench.records import Row
from prescore.bench.routed_oracle import routed_oracle
from prescore.config import Config, Hyper, Routed, Selected
from prescore.registry import get_scorer
from prescore.scoring.kmeans import ClusteringScorer
from prescore.types import Values

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
        limit = columns / max(found["keys_per_query"], 1.0)
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
    return {"keys_per_query": stats.keys_per_query, "stage_seconds": stages, "shares": shares}


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


# Is a timed output right? No speed is reported without a correct result.
#
# Every row of a method's output is held against the same call on the plain backend, which forms every logit; of
# long
# routed calls, which would take it an hour, two pieces, in the middle and at the end. That runs in the same
# precision, because keys are chosen by comparing numbers: in float64 a long clustering takes other turns, and all
# that depends on it differs although nothing is wrong. Up to `ORACLE_LENGTH`, where it does not, some rows of
# routed
# attention are also held against its definition in float64. So is exact attention, at all lengths.
#
# Routed queries read a key by itself where its weight exceeds a limit. Sums in another order move a few keys
# across
# it, and such a row is off by what a key at the limit weighs: few rows may be, and by no more than that.

TOLERANCE = 2e-4  # float32 sums of up to 131,072 terms; half types get TOLERANCE_HALF
TOLERANCE_HALF = 3e-2
MOST_FLIPPED = 0.005
CHECKED_ROWS = 8
MOST_AT_THE_LIMIT = 0.01
"""Share of the rows that may be off by keys at the limit; of a million queries far fewer are."""
ORACLE_LENGTH = 8192
PIECE = 512
"""Queries of a piece of a routed call that is longer than `ORACLE_LENGTH`."""

Inputs = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""


@torch.no_grad()
def check_method(name: str, inputs: Inputs, config: Config, output: Tensor, is_causal: bool) -> float:
    """The largest error of any row of a call's output; one that is off is refused by name."""
    if not isinstance(config, Routed):
        return check_output(name, output, plain_output(inputs, config, is_causal))
    n, at_limit = inputs[0].shape[2], weight_at_limit(config, inputs[2])
    if n > ORACLE_LENGTH:
        pieces = ((rows, plain_piece(inputs, config, rows, is_causal)) for rows in middle_and_end(n))
        return max(check_output(name, output[:, :, rows], wanted, at_limit) for rows, wanted in pieces)
    error = check_output(name, output, plain_output(inputs, config, is_causal), at_limit)
    if config.tolerance is None and output.dtype in (torch.float32, torch.float64):
        # a full call of a few queries would be exact, which the whole call need not be
        same = config if is_causal or n < config.exact_until else config.replace(exact_until=0)
        query, key, value = inputs
        wanted = routed_oracle(query[:, :, -CHECKED_ROWS:], key, value, same, is_causal=is_causal).output
        error = max(error, check_output(name, output[:, :, -CHECKED_ROWS:], wanted, at_limit))
    return error


def weight_at_limit(config: Routed, value: Tensor) -> float:
    """How far off a row may be where two keys at the limit are read by one and not by the other.

    Such a key has about `min_weight` of the weight, and its value differs from the others' by at most
    twice the largest.
    """
    return 0.0 if config.min_weight == 1 else 4 * float(value.detach().abs().max()) * config.min_weight


def plain_output(inputs: Inputs, config: Config, is_causal: bool) -> Tensor:
    """The same call on the plain backend."""
    return prescored_attention(*inputs, config, is_causal=is_causal, backend="plain")


def middle_and_end(n: int) -> list[slice]:
    """Two pieces of `n` queries; all of them where they are few."""
    if n <= 2 * PIECE:
        return [slice(0, n)]
    return [slice(n // 2 - PIECE // 2, n // 2 + PIECE // 2), slice(n - PIECE, n)]


def plain_piece(
    inputs: Inputs, config: Routed, rows: slice, is_causal: bool, scale: float | None = None
) -> Tensor:
    """Some queries of a routed call on the plain backend: a piece is what it is in the whole call."""
    query, key, value = inputs
    stop = rows.stop if is_causal else key.shape[2]
    # a full call of a few queries would be exact, which the whole call need not be
    same = config if is_causal or query.shape[2] < config.exact_until else config.replace(exact_until=0)
    piece = (query[:, :, rows], key[:, :, :stop], value[:, :, :stop])
    return prescored_attention(*piece, same, is_causal=is_causal, scale=scale, backend="plain")


def check_output(name: str, output: Tensor, wanted: Tensor, at_limit: float = 0.0) -> float:
    """The largest error of any row; an output that is off is refused by name.

    Args:
        name: Of the method.
        output: What it gave, `[..., Dv]`.
        wanted: What it should.
        at_limit: What a few rows, `MOST_AT_THE_LIMIT` of them and at least one, may be off by besides.
    """
    limit = TOLERANCE if output.dtype in (torch.float32, torch.float64) else TOLERANCE_HALF
    errors = (output.detach().double() - wanted.double()).abs().amax(-1)
    error = float(errors.max())
    n_off = int((~(errors <= limit)).sum())
    few = n_off <= max(1, MOST_AT_THE_LIMIT * errors.numel())
    if n_off and not (few and error <= limit + at_limit):
        raise RuntimeError(f"output of {name} must match its reference to {limit}, got {error} in {n_off} rows")
    return error


def check_rows(name: str, output: Tensor, wanted: Tensor) -> float:
    """The share of rows that differ; more than rounding may flip are refused by name.

    Keys are chosen by comparing numbers, and real heads have keys at every limit: where rounding decides, a row
    is read by one of two right results and not by the other. The contract allows that of one row in 200.
    """
    limit = TOLERANCE if output.dtype in (torch.float32, torch.float64) else TOLERANCE_HALF
    away = (output.detach().double() - wanted.double()).abs().amax(-1)
    off = ~(away <= limit * wanted.double().abs().amax((-1, -2), keepdim=True).squeeze(-1))
    share = float(off.double().mean())
    if not share <= MOST_FLIPPED:
        raise RuntimeError(
            f"output of {name} must match its reference in all rows but {MOST_FLIPPED}, got {share}"
        )
    return share


def check_exact(name: str, inputs: Inputs, output: Tensor, is_causal: bool) -> float:
    """The same for exact attention, a few rows of it."""
    total = output.shape[:3].numel()
    rows = torch.linspace(0, total - 1, CHECKED_ROWS, dtype=torch.float64).long()
    wanted = softmax_rows(*inputs, rows, is_causal)
    return check_output(name, output.detach().reshape(-1, output.shape[-1]).index_select(0, rows), wanted)


def softmax_rows(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, is_causal: bool) -> Tensor:
    """Outputs of some flat query rows under exact attention, `[r, Dv]` in float64; `Nq = Nk`, equal heads."""
    length, dim = query.shape[2:]
    outputs = []
    for row in rows.tolist():
        head, position = divmod(row, length)
        end = position + 1 if is_causal else length
        keys, values = (t.detach().flatten(0, 1)[head, :end].double() for t in (key, value))
        logits = keys @ query.detach().flatten(0, 1)[head, position].double() * dim**-0.5
        outputs.append(torch.softmax(logits, dim=0) @ values)
    return torch.stack(outputs)
