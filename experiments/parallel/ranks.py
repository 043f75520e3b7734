"""Bytes and times of context parallel on this machine: a row starts as many processes as it has ranks.

python experiments/parallel/ranks.py -n 16384 -n 32768 --n-heads 1 --out experiments/parallel/bytes --resume
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import typer
from torch.multiprocessing.spawn import start_processes

from prescore.attention import prescored_attention
from prescore.bench.cli.main import script
from prescore.bench.cli.options import Run
from prescore.bench.records import Record, Row, Values
from prescore.bench.speed.studies import make_inputs
from prescore.bench.speed.tables import kind
from prescore.bench.speed.timing import MOST_MISMATCHED, Inputs, check_output, seconds
from prescore.bench.tables import Table
from prescore.config import Config, Exact, Hyper, Routed, Selected
from prescore.parallel.comm import Group, as_group

RANKS = (2, 4)
PASSES = tuple(itertools.product((False, True), repeat=2))
"""Causal or not, with the backward pass or not."""


def measure_parallel(config: Values, seed: int) -> Values:
    """Bytes sent and seconds of every configuration, of the rank with the most of each."""
    ranks = config["ranks"]
    with tempfile.TemporaryDirectory() as folder:
        threads = max(1, torch.get_num_threads() // ranks)
        start_processes(_run_rank, args=(config, seed, folder, threads), nprocs=ranks, start_method="spawn")
        by_rank = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    methods: Values = {}
    for name, entry in by_rank[0].items():
        n_bytes = [results[name]["bytes"] for results in by_rank]
        slowest = max(results[name]["seconds"] for results in by_rank)
        sent = {"bytes": max(n_bytes), "mean_bytes": statistics.mean(n_bytes)}
        methods[name] = {**entry, **sent, "seconds": slowest}
    for entry in methods.values():
        entry["of_all_gather"] = entry["bytes"] / methods["all-gather"]["bytes"]
    return {"methods": methods}


def _run_rank(rank: int, config: Values, seed: int, folder: str, threads: int) -> None:
    """Every configuration on one rank; all-gather is exact attention, and a ring sends as many bytes."""
    torch.set_num_threads(threads)
    sizes = {"min_seq_len": config["min_seq_len"]}
    methods: dict[str, Config] = {
        "all-gather": Exact(),
        "selected": Selected(top_k=config["top_k"], **sizes),
        "paper": Selected.paper("kmeans", config["top_k"], **sizes),
        "hyper": Hyper.published(**sizes),
        "default": Routed(),
    }
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=config["ranks"])
    try:
        group = as_group(dist.group.WORLD)
        inputs, _ = make_inputs(config, seed, None)
        results = {name: _measure_on_ranks(config, method, group, inputs) for name, method in methods.items()}
        (Path(folder) / f"rank{rank}.json").write_text(json.dumps(results))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _measure_on_ranks(config: Values, method: Config, group: Group, inputs: Inputs) -> Values:
    """One configuration on this rank's shard; rank 0 compares the output of all ranks with one process first."""
    causal, backward = config["causal"], config["backward"]
    shard = [t.chunk(group.size, dim=2)[group.rank].clone().requires_grad_(backward) for t in inputs]
    query, key, value = shard
    call = partial(prescored_attention, query, key, value, method, is_causal=causal, group=group)
    with torch.no_grad():
        output, aux = call(return_aux=True)
        full = torch.cat(list(group.gather(output)), dim=2)
        checked = {"mismatched_queries": 0.0}
        if group.rank == 0:
            wanted = prescored_attention(*inputs, method, is_causal=causal)
            name = f"{method!r} on {group.size} ranks"
            checked = check_output(name, full, wanted, most=MOST_MISMATCHED * wanted[..., 0].numel())
    sent, times = group.sent, []
    for _ in range(config["repeats"]):
        dist.barrier()
        times.append(seconds(call, backward=backward))
    return {
        "exchange": aux.stats["exchange"],
        "bytes": (group.sent - sent) // config["repeats"],
        "seconds": statistics.median(times),
        "mismatched_queries": checked["mismatched_queries"],
    }


def plan_rows(lengths: Sequence[int], n_heads: int, dim: int, repeats: int, seed: int) -> list[Row]:
    """Causal and full, on 2 and 4 ranks, forward and with the backward pass."""
    rows = []
    for (causal, backward), n, ranks in itertools.product(PASSES, lengths, RANKS):
        if n % ranks:
            raise ValueError(f"-n must be a multiple of the {ranks} ranks, got {n}")
        config: Values = {
            "study": "parallel",
            "heads": n_heads,
            "dim": dim,
            "dtype": "float32",
            "repeats": repeats,
        }
        config |= {
            "top_k": 2048,
            "min_seq_len": 2048,
            "n": n,
            "ranks": ranks,
            "causal": causal,
            "backward": backward,
        }
        rows.append(Row(config, seed, partial(measure_parallel, config, seed), n**2 / 8192))
    return rows


def ranks_table(records: Sequence[Record]) -> Table:
    """Bytes and times of each configuration."""
    rows = []
    for record in records:
        config = record.config
        for name, entry in record.results["methods"].items():
            sent, share = f"{entry['bytes'] / 2**20:.3f}", f"{entry['of_all_gather']:.3f}"
            where = (kind(config), str(config["n"]), str(config["ranks"]), name, entry["exchange"])
            rows.append((*where, sent, share, f"{1e3 * entry['seconds']:.1f}"))
    columns = ("", "n", "ranks", "method", "exchange", "MB sent", "of all-gather", "ms")
    note = (
        "MB sent by the busiest rank in one call (one layer), counted; a ring sends as much as all-gather; "
        "time of the slowest rank, all ranks on this machine"
    )
    return Table("Context parallel", columns, tuple(rows), note, left=5)


def command(
    options: Run,
    length: list[int] = typer.Option([16384], "--length", "-n", min=16, help="Length; repeatable."),
    n_heads: int = typer.Option(4, min=1, help="Heads."),
    dim: int = typer.Option(64, min=1, help="Head dimension."),
    repeats: int = typer.Option(3, min=1, help="Timed rounds; the median counts."),
) -> None:
    """Count the bytes that each configuration sends, and time it, on processes of this machine."""
    rows = plan_rows(sorted(set(length)), n_heads, dim, repeats, options.seed)
    session = options.open("speed")
    session.show(ranks_table(session.run(rows)).to_rich())


if __name__ == "__main__":
    sys.exit(script(command))
