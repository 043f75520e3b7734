"""A model of the time that the Triton kernels need on GPUs, from counts on real heads. Nothing here ran on a GPU.

A program has a tile of queries: 64 positions of one head in a prompt, the query heads of a KV head in a step. It
must search what ANY of its rows searches, and read the union of their keys. How much that is comes from the heads
(`measure_tiles`). How many instructions a logit takes comes from the machine code (`compiled.jsonl`, made by
tools/triton_table.py). The time follows from both, from products, bytes and launches, and from the published
rates of a GPU (`predict`, `predict_step`).

    python experiments/gpu/gpu_model.py --heads HEADS --out experiments/gpu --resume
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import typer
from torch import Tensor

from prescore.bench.cli.main import script
from prescore.bench.cli.options import Run
from prescore.bench.records import Record, Row, Values
from prescore.bench.speed.heads import SavedHeads, find_heads, heads_at_lengths
from prescore.bench.tables import Table
from prescore.config import Routed
from prescore.routed import reference
from prescore.routed.index import KeyIndex
from prescore.routed.layout import make_layout

STUDY = "gpu-model"
ROWS = (16, 32, 64)
"""Rows of a tile of a prompt, positions of one head."""
LENGTHS = (16384, 32768, 131072, 1048576)
BATCHES = (1, 8, 32)
BANDS = (0.25, 0.5, 0.75, 1.0)
"""Tiles are counted before these shares of the positions."""
TILES = 4
"""Runs of positions counted in each band and KV head."""


class Gpu(NamedTuple):
    """Published dense rates, as data sheets state them, and exact attention's.

    Attributes:
        target: What the kernels are compiled for.
        half: Float16 products on tensor cores, 10^12 operations a second.
        int8: Int8 products; those of float16 where the compiler has no faster ones (B200).
        issue: Instructions of threads, 10^12 a second: processors times 128 times the clock.
        bandwidth: Memory, 10^12 bytes a second.
        cache: The second-level cache, 10^12 bytes a second.
        exact: Forward of FlashAttention, causal, 10^12 operations a second, by head dimension.
    """

    target: str
    half: float
    int8: float
    issue: float
    bandwidth: float
    cache: float
    exact: dict[int, float]


GPUS = {
    "A100": Gpu("sm_80", 312, 624, 19.5, 2.0, 4.5, {64: 187, 128: 210}),
    "H100": Gpu("sm_90", 989, 1979, 29.6, 3.35, 5.6, {64: 473, 128: 650}),
    "B200": Gpu("sm_100", 2250, 2250, 37.2, 8.0, 12.0, {64: 1000, 128: 1500}),
}
EFFICIENCY = {"tensor": 0.6, "issue": 0.7, "memory": 0.65, "local": 0.5, "exact memory": 0.85}
"""Shares of the published rates that kernels are taken to reach; `local` is of FlashAttention's rate."""
LAUNCH, INDEX_LAUNCHES, INDEX_PASSES = 5e-6, 120, 40
"""Seconds of a launch; torch operations of the key index, and how often they read or write all keys in float32."""
GRAPH, STEP_LAUNCHES, EXACT_STEP = 12e-6, 32, 8e-6
"""Seconds of three dependent kernels in a CUDA graph; launches of a step without one; exact attention's step."""
BOUND_SHARE = 0.5
"""`bound` computes the logits of all centroids too: about half of the instructions that `far` takes for them."""


# --- counting


@torch.no_grad()
def measure_tiles(config: Values, query: Tensor, key: Tensor, value: Tensor, scale: float, seed: int) -> Values:
    """Shares and unions of tiles of one causal layer, `[1, Hq, N, D]` and `[1, Hkv, N, D]`, for each band."""
    routed, n, heads_per_kv = Routed(), key.shape[2], query.shape[1] // key.shape[1]
    layout = make_layout(n, n, causal=True, config=routed)
    draws, bands = random.Random(seed), []
    keys, values = key[0].float(), value[0].float()
    index = reference.build_index(keys, values, layout, layout.sinks, layout.n_chunks)
    index = reference.covariances_of_spans(index, layout)
    for share in BANDS:
        chunk = int((share * n - layout.sinks) // layout.chunk_size) - 1  # the queries of a whole chunk
        if chunk < 2:
            raise ValueError(f"n must be at least {16 * layout.chunk_size}, got {n}")
        begin = layout.sinks + chunk * layout.chunk_size
        counts = []
        for head in range(key.shape[1]):
            seen = index.of_head(head, (chunk - 1) * layout.clusters_per_chunk, chunk - 2)
            for _ in range(config["tiles"]):
                first = begin + draws.randrange(layout.chunk_size - max(ROWS))
                heads = slice(head * heads_per_kv, (head + 1) * heads_per_kv)
                rows = query[0, heads, first : first + max(ROWS)].float() * scale
                local = slice(begin - layout.chunk_size, first + max(ROWS))
                counts.append(_count(rows, seen, keys[head, local], first - local.start, routed))
        mean = {name: sum(count[name] for count in counts) / len(counts) for name in counts[0]}
        bands.append({"far_keys": (chunk - 1) * layout.chunk_size, **mean})
    return {"bands": bands, "clusters": layout.cluster_size, "group": heads_per_kv}


def _count(query: Tensor, seen: KeyIndex, local: Tensor, offset: int, config: Routed) -> dict[str, float]:
    """Of queries `[G, P, D]` at consecutive positions: what one reads, and the unions of tiles of each shape."""
    n_heads, n_positions, dim = query.shape
    rows = query.reshape(-1, dim)
    position = torch.arange(n_positions, dtype=torch.int64, device="cpu").repeat(n_heads) + offset
    visible = torch.arange(len(local), dtype=torch.int64, device="cpu") <= position[:, None]
    local_lse = (rows @ local.t()).masked_fill(~visible, -math.inf).logsumexp(1)
    log_inverse = reference.log_inverse_weight(config.min_weight)
    logits = reference.far_logits(rows, seen)
    threshold = reference.logit_threshold(logits, seen, log_inverse, local_lse)
    search = (rows, logits, threshold, log_inverse)
    # every subcluster of clusters in reach
    everywhere = replace(seen, spread=torch.full_like(seen.spread, math.inf))
    near, searched = (_searched(search, index) for index in (everywhere, seen))
    hits = reference.find_keys(rows, seen, logits, threshold, log_inverse)
    hit = torch.zeros(len(rows), int(seen.positions.max()) + 1, dtype=torch.bool, device="cpu")
    hit[hits.query, hits.position] = True
    flags = {"near": near, "searched": searched, "hits": hit}
    tiles = {"one": (1, 1), "step": (n_heads, 1), **{str(size): (1, size) for size in ROWS}}
    counts = {}
    for shape, (heads, positions) in tiles.items():
        for name, flag in flags.items():
            cut = flag.view(n_heads // heads, heads, n_positions // positions, positions, -1)
            union = cut.any(3).any(1)
            size = 1 if name == "hits" else union.shape[-1]
            counts[f"{name}_{shape}"] = float(union.sum(-1).double().mean()) / size
            if name == "searched":  # the scan takes whole clusters, or halves
                runs = union.unflatten(-1, (-1, seen.spread.shape[1])).any(-1)
                counts[f"scanned_{shape}"] = float(runs.double().mean())
    return counts


def _searched(search: tuple[Tensor, reference.FarLogits, Tensor, float], seen: KeyIndex) -> Tensor:
    """`[t, M * S]`: the subclusters that each query searches."""
    query, logits, threshold, log_inverse = search
    bounds, _ = reference.search_bounds(query, seen, logits, threshold, log_inverse)
    return ~torch.isnan(bounds).flatten(1)


# --- the model


def growth(bands: Sequence[Values], name: str) -> float:
    """Exponent `a` in [0, 1] of `count ~ far keys ** a`, by least squares of logarithms over the bands."""
    points = [(math.log(band["far_keys"]), math.log(max(band[name], 1e-3))) for band in bands]
    middle = [sum(axis) / len(points) for axis in zip(*points, strict=True)]
    above = sum((x - middle[0]) * (y - middle[1]) for x, y in points)
    return float(min(1.0, max(0.0, above / sum((x - middle[0]) ** 2 for x, _ in points))))


def share(bands: Sequence[Values], name: str, longer: float) -> float:
    """Mean over the far keys of all queries of a call that is `longer` times as long as the counted one."""
    counted = sum(b[name] * b["far_keys"] for b in bands) / sum(b["far_keys"] for b in bands)
    return float(bands[-1][name] + (counted - bands[-1][name]) / max(1.0, longer) ** 2)


def instructions(target: str, dim: int, *, is_step: bool) -> Values:
    """The compiled `far` of bfloat16: rows of a tile, and instructions of a thread for each logit of its loops."""
    lines = (Path(__file__).parent / "compiled.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if (row["kernel"], row["dtype"]) == ("far", "bf16")]
    of_mode = "step" if is_step else "prompt"
    return next(row for row in rows if (row["target"], row["dim"], row["mode"]) == (target, dim, of_mode))


def predict(config: Values, results: Values, name: str, n: int, dim: int) -> dict[str, float]:
    """Seconds of the parts of a causal forward call over `n` tokens of a layer, and FlashAttention's.

    Products and other instructions are added: they overlap only as far as programs on the same processor differ.
    Beyond the counted length the shares searched are those of the last band. The union of hits grows with the far
    keys as it does over the bands.
    """
    gpu, bands = GPUS[name], results["bands"]
    n_heads, n_kv_heads = config["query_heads"], config["kv_heads"]
    code = instructions(gpu.target, dim, is_step=False)
    rows, far, last = code["rows"], n / 2, bands[-1]
    scanned = share(bands, f"scanned_{rows}", n / config["n"])
    power = growth(bands, f"hits_{rows}")
    union = last[f"hits_{rows}"] * (n / last["far_keys"]) ** power / (1 + power)  # mean over positions
    # for a query: logits, operations of products at the rate of int8 and of float16, bytes of a tile
    clusters = far / results["clusters"]
    spans = clusters / 64
    work = {
        "centroids": (clusters, 0, clusters * 10 * dim + spans * 12 * dim * dim, clusters * 12 * dim),
        "gate": (far / reference.SUBCLUSTER, far / reference.SUBCLUSTER * 2 * dim, 0, far / 16 * (dim + 4 * rows)),
        "scan": (scanned * far, scanned * far * 2 * dim, 0, scanned * far * dim),
        "read": (union, union * 2 * dim, union * 4 * dim, union * (5 * dim + 4 * rows)),
    }
    per = {"centroids": code["per_centroid"] * (1 + BOUND_SHARE), "gate": code["per_gate"]}
    per |= {"scan": code["per_scan"], "read": code["per_read"]}
    tensor, queries = EFFICIENCY["tensor"] * 1e12, n_heads * n
    seconds = {}
    for part, (logits, int8, half, moved) in work.items():
        busy = int8 / (gpu.int8 * tensor) + half / (gpu.half * tensor)
        busy += logits * per[part] / (gpu.issue * 1e12 * EFFICIENCY["issue"])
        seconds[part] = max(queries * busy, queries / rows * moved / (gpu.cache * 1e12)) + LAUNCH
    exact = gpu.exact[dim] * 1e12
    slow = EFFICIENCY["memory"] * gpu.bandwidth * 1e12
    return {
        "index": INDEX_LAUNCHES * LAUNCH + INDEX_PASSES * n_kv_heads * n * dim * 4 / slow,
        "local": 4 * dim * queries * 1.5 * Routed().chunk_size / (exact * EFFICIENCY["local"]) + LAUNCH,
        **seconds,
        "FlashAttention": 2 * dim * queries * n / exact,
    }


def predict_step(
    config: Values, results: Values, name: str, n: int, dim: int, batch: int, *, in_graph: bool, key_bytes: int = 2
) -> dict[str, float]:
    """Seconds of a step of sequences with `n` keys, of `key_bytes` for each number, and of exact attention's."""
    gpu, last, n_kv_heads = GPUS[name], results["bands"][-1], config["kv_heads"]
    code = instructions(gpu.target, dim, is_step=True)
    power = growth(results["bands"], "hits_step")
    union = last["hits_step"] * (n / last["far_keys"]) ** power
    clusters = n / results["clusters"]
    scanned = last["scanned_step"] * n
    moved = clusters * 12 * dim + clusters / 64 * 8 * dim * dim + n / 16 * (dim + 4) + scanned * dim
    moved += union * (dim + 2 * key_bytes * dim) + 1.5 * Routed().chunk_size * 2 * key_bytes * dim
    work = clusters * code["per_centroid"] * (1 + BOUND_SHARE) + n / reference.SUBCLUSTER * code["per_gate"]
    work += scanned * code["per_scan"] + union * code["per_read"]
    heads = batch * n_kv_heads
    busy = heads * work * code["rows"] / (gpu.issue * 1e12 * EFFICIENCY["issue"])
    memory = gpu.bandwidth * 1e12
    fixed = GRAPH if in_graph else STEP_LAUNCHES * LAUNCH
    return {
        "kernels": max(heads * moved / (memory * EFFICIENCY["memory"]), busy) + fixed,
        "exact": heads * n * 2 * key_bytes * dim / (memory * EFFICIENCY["exact memory"]) + EXACT_STEP,
    }


def ratio(records: Sequence[Record], name: str, n: int, dim: int) -> float:
    """FlashAttention's time over that of the kernels, mean of the layers."""
    each = [predict(record.config, record.results, name, n, dim) for record in records]
    exact = sum(times.pop("FlashAttention") for times in each)
    return exact / sum(sum(times.values()) for times in each)


def step_ratio(
    records: Sequence[Record],
    name: str,
    n: int,
    dim: int,
    batch: int,
    *,
    in_graph: bool = True,
    key_bytes: int = 2,
) -> float:
    """Exact attention's time of a step over that of the kernels; with 128 dimensions there are 8 KV heads."""
    each = []
    for record in records:
        config = {**record.config, "kv_heads": 8} if dim == 128 else record.config
        each.append(
            predict_step(config, record.results, name, n, dim, batch, in_graph=in_graph, key_bytes=key_bytes)
        )
    return sum(times["exact"] for times in each) / sum(times["kernels"] for times in each)


# --- tables


def tile_table(records: Sequence[Record]) -> Table:
    """What a query needs, and the unions of tiles, at the last band of each layer."""
    lines = []
    shapes = {"one": "one query", "step": "a step", **{str(rows): f"{rows} positions" for rows in ROWS}}
    for record in records:
        last = record.results["bands"][-1]
        for shape, label in shapes.items():
            shares = (f"{100 * last[f'{name}_{shape}']:.0f} %" for name in ("near", "searched", "scanned"))
            grown = f"{growth(record.results['bands'], f'hits_{shape}'):.2f}"
            lines.append((str(record.config["heads"]), label, *shares, f"{last[f'hits_{shape}']:.0f}", grown))
    head = (
        "layer",
        "tile",
        "clusters in reach",
        "subclusters searched",
        "clusters scanned",
        "keys read",
        "growth",
    )
    note = "a step: all heads of a KV head; growth = exponent of the far keys"
    far_keys = records[0].results["bands"][-1]["far_keys"]
    return Table(f"Tiles of queries, {far_keys} far keys", head, tuple(lines), note, 2)


def gpu_tables(records: Sequence[Record]) -> list[Table]:
    """Tables for each GPU: milliseconds of a prompt, mean over the layers, and steps; none is measured."""
    made = [tile_table(records)]
    for name, gpu in GPUS.items():
        lines = []
        for dim in gpu.exact:
            for n in LENGTHS:
                each = [predict(record.config, record.results, name, n, dim) for record in records]
                mean = {part: 1e3 * sum(times[part] for times in each) / len(each) for part in each[0]}
                exact = mean.pop("FlashAttention")
                cells = [f"{ms:.3g}" for ms in (*mean.values(), sum(mean.values()), exact)]
                lines.append((str(dim), str(n), *cells, f"{exact / sum(mean.values()):.2f}x"))
        head = (
            "dim",
            "n",
            "index",
            "local",
            "centroids",
            "gate",
            "scan",
            "read",
            "total",
            "FlashAttention",
            "ratio",
        )
        rates = f"float16 {gpu.half}, int8 {gpu.int8}, instructions {gpu.issue}, bytes {gpu.bandwidth}"
        note = f"assumed, 10^12 a second: {rates}; FlashAttention {gpu.exact[64]} and {gpu.exact[128]}"
        made.append(Table(f"{name}, predicted ms of a layer", head, tuple(lines), note, 3))
        lines = []
        for dim in gpu.exact:
            for n in LENGTHS:
                cells = [f"{step_ratio(records, name, n, dim, batch):.2f}x" for batch in BATCHES]
                cells.append(f"{step_ratio(records, name, n, dim, 1, in_graph=False):.2f}x")
                cells.append(f"{step_ratio(records, name, n, dim, 8, key_bytes=1):.2f}x")
                lines.append((str(dim), str(n), *cells))
        columns = (*(f"batch {batch}" for batch in BATCHES), "batch 1, no graph", "batch 8, fp8 cache")
        note = "64 dimensions: 2 KV heads; 128: 8 KV heads, with the counts of the same layers"
        made.append(Table(f"{name}, predicted gain of steps", ("dim", "n", *columns), tuple(lines), note, 2))
    return made


def count_tiles(config: Values, seed: int, saved: SavedHeads) -> Values:
    """The counts of a saved layer."""
    query, key, value = saved.inputs(config["n"])
    scale = config["dim"] ** -0.5 if saved.scale is None else saved.scale
    return measure_tiles(config, query, key, value, scale, seed)


def command(
    options: Run,
    heads: Path = typer.Option(..., file_okay=False, exists=True, help="Attention inputs (prescore save-heads)."),
    length: list[int] | None = typer.Option(None, "--length", "-n", help="Length; repeatable.  [default: all]"),
) -> None:
    """Count what tiles of queries need on saved layers, and predict the time that GPUs would take."""
    rows = []
    for saved, n in heads_at_lengths(find_heads(heads), length):
        config = {
            "study": STUDY,
            "n": n,
            "heads": saved.name,
            "digest": saved.digest,
            "tiles": TILES,
            **saved.sizes,
        }
        rows.append(Row(config, options.seed, partial(count_tiles, config, options.seed, saved)))
    session = options.open("speed")
    session.show(*(table.to_rich() for table in gpu_tables(session.run(rows))))


if __name__ == "__main__":
    sys.exit(script(command))
