"""A model of the time that the Triton design needs on GPUs, from counts on real heads. Nothing here ran on a GPU.

A program has a tile of queries: the query heads of one KV head at a few consecutive positions, padded to 16, 32,
64 or 128 rows. It multiplies all centroids (float16), the centroids of subclusters of every cluster that ANY row
comes near (int8), the keys of every subcluster that ANY row searches (int8), and reads the union of the rows' hits
as dense float16 tiles. So a row pays for what its neighbours need. How much that is comes from the heads
(`measure_tiles`); the time follows from counted products, vector operations, bytes and launches, and the published
rates of a GPU (`predict`).

    python experiments/gpu/gpu_model.py --heads HEADS --out experiments/gpu --resume
"""

from __future__ import annotations

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
ROWS = (16, 32, 64, 128)
"""Rows of a tile."""
LENGTHS = (16384, 32768, 131072, 1048576)
BANDS = (0.25, 0.5, 0.75, 1.0)
"""Tiles are counted before these shares of the positions."""
TILES = 4
"""Runs of positions counted in each band and KV head; each holds several small tiles."""


class Gpu(NamedTuple):
    """Published dense rates, as data sheets state them, and exact attention's.

    Attributes:
        half: Float16 products on tensor cores, 10^12 operations a second.
        int8: Int8 products; fp8 where the compiler has no fast int8 (B200).
        vector: Float32 operations outside of tensor cores, a fused multiply-add counted as two.
        bandwidth: Memory, 10^12 bytes a second.
        cache: Last-level cache, 10^6 bytes.
        exact: Forward of FlashAttention, causal, head dimension 64, 10^12 operations a second.
        least_rows: Tiles with fewer rows run at half of the tensor rates.
    """

    half: float
    int8: float
    vector: float
    bandwidth: float
    cache: float
    exact: float
    least_rows: int


GPUS = {
    "A100": Gpu(312, 624, 19.5, 2.0, 40, 187, 16),
    "H100": Gpu(989, 1979, 67, 3.35, 50, 430, 64),
    "B200": Gpu(2250, 4500, 75, 8.0, 126, 1000, 64),
    "MI300X": Gpu(1307, 2615, 163, 5.3, 256, 400, 32),
}
EFFICIENCY = {"tensor": 0.5, "vector": 0.5, "memory": 0.7}
"""Shares of the published rates that the kernels are taken to reach."""
CACHE_SPEEDUP = 2.5
"""How much faster than memory the cache is. It serves int8 keys where those of a KV head fit into half of it."""
LISTS = 1
"""Stands for another design in place of the rows of a tile, see `predict`."""
LIST_ROWS = 64
OPERATIONS = {"centroid": 100, "gate": 6, "int8": 4, "read": 16}
"""Vector operations for each logit: a centroid has a corrected mass and value (an exponential counts as 8), a gate
and an int8 logit are scaled, compared and packed, a key read is masked and exponentiated."""
LAUNCH, INDEX_LAUNCHES, INDEX_PASSES = 5e-6, 120, 40
"""Seconds of a launch; torch operations of the key index, and how often they read or write all keys in float32."""


# --- counting


@torch.no_grad()
def measure_tiles(config: Values, query: Tensor, key: Tensor, value: Tensor, scale: float, seed: int) -> Values:
    """Shares and unions of tiles of one causal layer, `[1, Hq, N, D]` and `[1, Hkv, N, D]`, for each band."""
    routed, n, heads_per_kv = Routed(), key.shape[2], query.shape[1] // key.shape[1]
    layout = make_layout(n, n, causal=True, config=routed)
    most = max(1, max(ROWS) // heads_per_kv)
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
                first = begin + draws.randrange(layout.chunk_size - most)
                heads = slice(head * heads_per_kv, (head + 1) * heads_per_kv)
                rows = query[0, heads, first : first + most].float() * scale
                local = slice(begin - layout.chunk_size, first + most)
                counts.append(_count(rows, seen, keys[head, local], first - local.start, routed, heads_per_kv))
        mean = {name: sum(count[name] for count in counts) / len(counts) for name in counts[0]}
        bands.append({"far_keys": (chunk - 1) * layout.chunk_size, **mean})
    return {"bands": bands, "clusters": layout.cluster_size, "group": heads_per_kv}


def _count(
    query: Tensor, seen: KeyIndex, local: Tensor, offset: int, config: Routed, heads_per_kv: int
) -> dict[str, float]:
    """Of queries `[G, P, D]` at consecutive positions: what one reads, and the unions of tiles of each size."""
    n_positions, dim = query.shape[1:]
    rows = query.transpose(0, 1).reshape(-1, dim)  # the heads of a position are neighbours
    position = torch.arange(n_positions, dtype=torch.int64, device="cpu").repeat_interleave(heads_per_kv) + offset
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
    shares = {"near": 1 / near.shape[1], "searched": 1 / searched.shape[1], "hits": 1.0}
    counts = {f"{name}_1": float(flag.sum(1).double().mean()) * shares[name] for name, flag in flags.items()}
    for size in ROWS:
        step = max(1, size // heads_per_kv) * heads_per_kv
        for name, flag in flags.items():
            tiles = flag[: len(flag) // step * step].view(-1, step, flag.shape[1])
            counts[f"{name}_{size}"] = float(tiles.any(1).sum(1).double().mean()) * shares[name]
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


def predict(config: Values, results: Values, gpu: Gpu, n: int, rows: int) -> dict[str, float]:
    """Seconds of each kernel of a causal forward call over `n` tokens of a layer, and FlashAttention's.

    Beyond the counted length the share of clusters in reach and of subclusters searched is that of the last band.
    The union of hits grows with the far keys as it does over the bands.

    `rows=LISTS` is the design with the loops swapped: programs belong to subclusters and gather, 64 at a time, the
    queries that search them. A query pays for what it searches itself, and is read again for every subcluster; its
    hits are read one by one, without tensor cores.
    """
    bands, heads_per_kv, dim, n_heads, n_kv_heads = (
        results["bands"], results["group"], config["dim"], config["query_heads"], config["kv_heads"],
    )  # fmt: skip
    near, searched = (share(bands, f"{name}_{rows}", n / config["n"]) for name in ("near", "searched"))
    power, last = growth(bands, f"hits_{rows}"), bands[-1]
    union = last[f"hits_{rows}"] * (n / last["far_keys"]) ** power / (1 + power)  # mean over positions
    far, swapped = n / 2, rows == LISTS
    rows = LIST_ROWS if swapped else rows
    n_tiles = n_kv_heads * n * heads_per_kv / rows if swapped else n_kv_heads * n / max(1, rows // heads_per_kv)
    columns = {
        "centroid": far / results["clusters"],
        "gate": near * far / reference.SUBCLUSTER,
        "int8": searched * far,
        "read": union,
    }
    tensor = EFFICIENCY["tensor"] * (1.0 if rows >= gpu.least_rows else 0.5) * 1e12
    fits = n * dim * 1.1 <= gpu.cache * 1e6 / 2
    slow = EFFICIENCY["memory"] * gpu.bandwidth * 1e12
    memory = slow * (CACHE_SPEEDUP if fits else 1.0)
    rates = {"centroid": gpu.half, "gate": gpu.int8, "int8": gpu.int8, "read": gpu.half}
    products = {"centroid": 4 * dim, "gate": 2 * dim, "int8": 2 * dim, "read": 4 * dim}
    bytes_ = {"centroid": 4 * dim, "gate": dim + 8, "int8": dim + 4, "read": 4 * dim}
    operations = dict(OPERATIONS)
    if swapped:  # queries are read once for 16 keys; two products of a key read are vector operations, two at once
        bytes_["int8"] += rows * (dim + 8) / reference.SUBCLUSTER
        bytes_["read"] *= rows
        products["read"], operations["read"] = 0, operations["read"] + dim
    seconds = {}
    for name, n_columns in columns.items():
        logits = n_tiles * rows * n_columns
        busy = logits * products[name] / (rates[name] * tensor)
        busy += logits * operations[name] / (gpu.vector / 2 * 1e12 * EFFICIENCY["vector"])
        moving = n_tiles * n_columns * bytes_[name] / memory
        if name == "read" and not swapped:  # lists: int8 logits and positions, written to the cache and read again
            moving += n_tiles * n_columns * (8 * rows + 16) / (slow * CACHE_SPEEDUP)
        seconds[name] = max(busy, moving) + LAUNCH
    local = 4 * dim * n_heads * n * 1.5 * Routed().chunk_size
    return {
        "index": INDEX_LAUNCHES * LAUNCH + INDEX_PASSES * n_kv_heads * n * dim * 4 / slow,
        "local": local / (gpu.exact * 1e12) + LAUNCH,
        "centroids and gates": seconds["centroid"] + seconds["gate"],
        "int8 keys": seconds["int8"],
        "keys read": seconds["read"],
        "FlashAttention": 2 * dim * n_heads * n * n / (gpu.exact * 1e12),
    }


def tile_table(records: Sequence[Record]) -> Table:
    """What a query needs, and the unions of tiles, at the last band of each layer."""
    lines = []
    for record in records:
        last = record.results["bands"][-1]
        for rows in (1, *ROWS):
            shares = (f"{100 * last[f'{name}_{rows}']:.0f} %" for name in ("near", "searched"))
            hits = last[f"hits_{rows}"]
            grown = "" if rows == 1 else f"{growth(record.results['bands'], f'hits_{rows}'):.2f}"
            lines.append((str(record.config["heads"]), str(rows), *shares, f"{hits:.0f}", grown))
    head = ("layer", "rows", "clusters in reach", "subclusters searched", "keys read", "growth of keys read")
    note = "rows = 1: one query; else the union of a tile; growth = exponent of the far keys"
    return Table(
        f"Tiles of queries, {records[0].results['bands'][-1]['far_keys']} far keys", head, tuple(lines), note, 2
    )


def gpu_tables(records: Sequence[Record]) -> list[Table]:
    """One table for each GPU: milliseconds of each kernel, mean over the layers; predictions, nothing measured."""
    made = [tile_table(records)]
    for name, gpu in GPUS.items():
        lines = []
        for n in LENGTHS:
            for rows in (*ROWS, LISTS):
                each = [predict(record.config, record.results, gpu, n, rows) for record in records]
                mean = {part: 1e3 * sum(times[part] for times in each) / len(each) for part in each[0]}
                exact = mean.pop("FlashAttention")
                total = sum(mean.values())
                cells = (f"{ms:.3g}" for ms in (*mean.values(), total, exact))
                lines.append((str(n), "lists" if rows == LISTS else str(rows), *cells, f"{exact / total:.2f}x"))
        head = ("n", "rows", "index", "local", "centroids and gates", "int8 keys", "keys read", "total")
        rates = f"float16 {gpu.half}, int8 {gpu.int8}, vector {gpu.vector}, bytes {gpu.bandwidth}"
        note = f"assumed, 10^12 a second: {rates}; FlashAttention {gpu.exact}"
        made.append(
            Table(f"{name}, predicted ms of a layer", (*head, "FlashAttention", "ratio"), tuple(lines), note, 2)
        )
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
