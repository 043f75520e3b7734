"""Two closer looks at speed: what scoring alone costs, and what short inputs lose.

Like the main study, everything of a row is timed in turn and divided by exact attention's time in the same row.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
from torch.nn.functional import scaled_dot_product_attention

from prescore.attention import prescored_attention, score
from prescore.bench.records import Row
from prescore.bench.speed.timing import EXACT, Inputs, check_exact, check_method, check_output, seconds
from prescore.config import Config, Exact, Hyper, Routed, Selected
from prescore.integrations.decode import SelectionState
from prescore.parallel.comm import Group, as_group
from prescore.scoring.base import Scorer
from prescore.scoring.kmeans import GaussianKMeans, KMeans, KMedian, Minkowski
from prescore.scoring.leverage import Leverage
from prescore.types import Values

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


# How long one decode step takes over a kept selection, against one over the full cache.


@dataclass(frozen=True)
class DecodeSetting:
    """One cache and how many steps over it are timed; every field goes into the record."""

    n: int
    top_k: int
    heads: int
    dim: int
    steps: int = 20


def decode_rows(settings: Sequence[DecodeSetting], seed: int) -> list[Row]:
    """Rows that time steps."""
    return [
        Row({"study": "decode", **asdict(setting)}, seed, partial(measure_decode, setting, seed), float(setting.n))
        for setting in settings
    ]


@torch.no_grad()
def measure_decode(setting: DecodeSetting, seed: int) -> Values:
    """Seconds of one decode step: over the kept rows, and exactly over the whole cache."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, setting.heads, setting.n, setting.dim)
    key, value = (torch.randn(shape, generator=generator) for _ in range(2))
    query = torch.randn(1, setting.heads, 1, setting.dim, generator=generator)
    config = Selected.paper("kmeans", setting.top_k, inner=Exact())
    state = SelectionState.select(key, value, None, config)
    wanted = prescored_attention(query, key, value, config)
    error = check_output(f"a decode step at n = {setting.n}", state.attend(query, None), wanted)
    times: dict[str, list[float]] = {EXACT: [], "selected": []}
    for _ in range(setting.steps):
        times[EXACT].append(seconds(lambda: scaled_dot_product_attention(query, key, value)))
        times["selected"].append(seconds(lambda: state.attend(query, None)))
    medians = {name: statistics.median(measured) for name, measured in times.items()}
    return {
        "seconds": medians,
        "spread": {name: max(measured) - min(measured) for name, measured in times.items()},
        "rows": state.n_entries,
        "speedup": medians[EXACT] / medians["selected"],
        "error": error,
    }


# What several ranks send and how long they take, for each way, beside the gathering of all keys.
#
# A row starts as many processes on this machine as it has ranks. Every output is held against the one-process
# result
# before anything is timed.

RANKS = (2, 4)
GATHERED = "all-gather"
"""Exact attention over gathered keys; passing them around a ring sends as many bytes."""
MOST_FLIPPED = 0.005
"""Share of rows that may differ from one process, where rounding flips a choice."""
_SAME = 1e-3


@dataclass(frozen=True)
class ParallelSetting:
    """One point of the study; every field goes into the record."""

    n: int
    ranks: int
    causal: bool
    backward: bool
    heads: int
    dim: int
    dtype: str
    repeats: int
    top_k: int
    min_seq_len: int

    def configs(self) -> dict[str, Config]:
        """What is compared."""
        return {
            GATHERED: Exact(),
            "selected": Selected(top_k=self.top_k, min_seq_len=self.min_seq_len),
            "paper": Selected.paper("kmeans", self.top_k, min_seq_len=self.min_seq_len),
            "hyper": Hyper.published(min_seq_len=self.min_seq_len),
            "default": Routed(),
        }

    def inputs(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random query, key and value of the whole sequence."""
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, self.dtype)
        made = [torch.randn(1, self.heads, self.n, self.dim, generator=generator).to(dtype) for _ in range(3)]
        return made[0], made[1], made[2]


def parallel_row(setting: ParallelSetting, seed: int) -> Row:
    """A row that counts bytes and takes times on so many ranks."""
    if setting.n % setting.ranks:
        raise ValueError(f"--n must be a multiple of the {setting.ranks} ranks, got {setting.n}")
    cost = float(setting.n**2 * setting.heads)
    return Row({"study": "parallel", **asdict(setting)}, seed, partial(measure_parallel, setting, seed), cost)


def measure_parallel(setting: ParallelSetting, seed: int) -> Values:
    """Bytes and seconds of every way; the figures are those of the rank with most of them."""
    with tempfile.TemporaryDirectory() as folder:
        threads = max(1, torch.get_num_threads() // setting.ranks)
        arguments = (setting, seed, folder, threads)
        start_processes(_serve, args=arguments, nprocs=setting.ranks, start_method="spawn")
        found = [json.loads(_figures_of(folder, rank).read_text()) for rank in range(setting.ranks)]
    ways: Values = {}
    for name in setting.configs():
        own = [figures[name] for figures in found]
        ways[name] = {
            **own[0],
            "bytes": max(figures["bytes"] for figures in own),
            "mean_bytes": statistics.mean(figures["bytes"] for figures in own),
            "seconds": max(figures["seconds"] for figures in own),
        }
    for figures in ways.values():
        figures["of_all_gather"] = figures["bytes"] / ways[GATHERED]["bytes"]
    return {"ways": ways}


def _figures_of(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.json"


def _serve(rank: int, setting: ParallelSetting, seed: int, folder: str, threads: int) -> None:
    """One rank of a row."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=setting.ranks)
    try:
        group = as_group(dist.group.WORLD)
        found = {name: _measure(setting, config, group, seed) for name, config in setting.configs().items()}
        _figures_of(folder, rank).write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _measure(setting: ParallelSetting, config: Config, group: Group, seed: int) -> Values:
    whole = setting.inputs(seed)
    query, key, value = (
        tensor.chunk(group.size, dim=2)[group.rank].clone().requires_grad_(setting.backward) for tensor in whole
    )
    with torch.no_grad():
        output, aux = prescored_attention(
            query, key, value, config, is_causal=setting.causal, group=group, return_aux=True
        )
        pieces = group.gather(output)
        flipped = _check(setting, config, whole, pieces) if group.rank == 0 else 0.0
    before, call = (
        group.sent,
        partial(prescored_attention, query, key, value, config, is_causal=setting.causal, group=group),
    )
    times = [_seconds(call, setting.backward) for _ in range(setting.repeats)]
    return {
        "way": aux.stats["way"],
        "bytes": (group.sent - before) // setting.repeats,
        "seconds": statistics.median(times),
        "flipped_rows": flipped,
    }


def _check(setting: ParallelSetting, config: Config, whole: tuple[Tensor, ...], pieces: Tensor) -> float:
    """The share of rows that one process answers otherwise; too many are refused."""
    query, key, value = whole
    wanted = prescored_attention(query, key, value, config, is_causal=setting.causal)
    found = torch.cat(list(pieces), dim=2)
    limit = _SAME if setting.dtype in ("float32", "float64") else 3e-2
    off = float(((found.double() - wanted.double()).abs().amax(-1) > limit).double().mean())
    if not off <= MOST_FLIPPED:
        raise RuntimeError(
            f"output of {config!r} on {setting.ranks} ranks must differ from one process in at most "
            f"{MOST_FLIPPED:.1%} of the rows, got {off:.1%}"
        )
    return off


def _seconds(call: Callable[[], Tensor], backward: bool) -> float:
    dist.barrier()
    begin = time.perf_counter()
    if backward:
        call().sum().backward()
    else:
        with torch.no_grad():
            call()
    return time.perf_counter() - begin
