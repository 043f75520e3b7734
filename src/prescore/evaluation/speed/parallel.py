"""What several ranks send and how long they take, for each way, beside the gathering of all keys.

A row starts as many processes on this machine as it has ranks. Every output is held against the one-process result
before anything is timed.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from prescore.api.attention import prescored_attention
from prescore.config import Config, Exact, Hyper, Routed, Selected
from prescore.parallel.group import Group, as_group
from prescore.records import Row
from prescore.values import Values

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
