"""The Triton backend of routed attention: CUDA and ROCm devices, or CPU tensors under Triton's interpreter.

The key index is that of the reference, built by torch on the device. Kernels are in `triton_kernels.py`, which is
imported when the first call runs, and Triton with it. The backward pass is the plain backend's, on the device.
"""

from __future__ import annotations

import importlib.util
import math
import os
from functools import cache
from importlib import metadata
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from prescore.routed import reference
from prescore.routed.index import KeyIndex
from prescore.routed.layout import View
from prescore.types import Attended

DIMS = (32, 64, 128, 256)
CLUSTER_SIZES = (16, 32, 64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLUSTERS = 16
"""Clusters whose centroids are compared at once."""
MAX_SPLITS = 32
"""Programs that share the clusters of a KV head in a step."""
STEP_ROWS = 16
"""Rows of a tile in a step: query heads of a KV head."""
LIGHT_WARPS = {"local_part": 4, "merge": 2}
"""Warps of a program of the kernels that need few registers."""
PROGRAMS = 1024
"""Programs that share the tiles of a prompt; each has memory for a list of keys."""
VERSION = (3, 7)
"""The oldest Triton that compiles the kernels."""


# --- how kernels are compiled


class Launch(NamedTuple):
    """How the kernels are compiled for an architecture and a head dimension.

    Attributes:
        rows: Queries of a tile.
        keys: Int8 keys compared at once, and far keys read at once.
        local: Local keys read at once.
        width: Numbers of the head dimension that are multiplied at once.
        warps: Of a program of far_part.
    """

    rows: int
    keys: int
    local: int
    width: int
    warps: int


INTERPRETER = "interpreter"
LAUNCHES = {
    "sm_80": {
        (16, 64): Launch(16, 64, 32, 16, 8),
        (16, 128): Launch(16, 64, 32, 64, 8),
        (32, 64): Launch(32, 32, 32, 16, 8),
        (32, 128): Launch(16, 16, 16, 32, 8),
    },
    "sm_90": {
        (16, 128): Launch(32, 64, 32, 32, 8),
        (16, 256): Launch(16, 64, 32, 64, 8),
        (32, 64): Launch(16, 32, 32, 16, 8),
        (32, 256): Launch(16, 16, 32, 16, 8),
    },
    "sm_100": {
        (16, 64): Launch(64, 64, 32, 64, 8),
        (16, 128): Launch(32, 64, 32, 32, 8),
        (16, 256): Launch(16, 64, 32, 64, 8),
        (32, 256): Launch(16, 16, 32, 16, 8),
    },
    "gfx942": {
        (16, 128): Launch(64, 64, 32, 64, 8),
        (16, 256): Launch(16, 64, 32, 64, 8),
        (32, 256): Launch(16, 32, 32, 16, 8),
    },
    INTERPRETER: {(bits, width): Launch(64, 64, 64, 32, 4) for bits in (16, 32) for width in (64, 128, 256)},
}
"""By architecture, then by bits of a number and the larger head dimension, rounded up. No autotuner: it would need
the device. Each was compiled and spills nothing (experiments/gpu/compiled.md)."""


GAINS_FROM: dict[str, int | None] = {"sm_80": None, "sm_90": None, "sm_100": None, "gfx942": 32768}
"""Keys from which `experiments/gpu/gpu_model.py` predicts that prompts are faster than exact attention; None =
never. Up to there `auto` is exact. Predicted on five layers (experiments/gpu), not measured."""


def launch(target: str, dim: int, value_dim: int, dtype: torch.dtype) -> Launch | None:
    """How to compile for an architecture of `LAUNCHES`; None = no way is known that spills nothing."""
    fitting = [
        (bits, width)
        for bits, width in LAUNCHES[target]
        if bits == 8 * dtype.itemsize and width >= max(dim, value_dim)
    ]
    return LAUNCHES[target][min(fitting)] if fitting else None


def precision(target: str) -> str:
    """How float32 matrices are multiplied: as three products of TF32 where the hardware has it."""
    return "tf32x3" if target.startswith("sm_") else "ieee"


# --- what can run


@cache
def missing() -> str:
    """Why Triton is not there; empty = it is."""
    if importlib.util.find_spec("triton") is None:
        return 'triton must be installed (pip install ".[gpu]" in a clone of prescore)'
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "triton must be installed with its metadata, got a copy without"
    if tuple(int(part) for part in version.split(".")[:2]) < VERSION:
        return f"triton must be {VERSION[0]}.{VERSION[1]} or later, got {version}"
    return ""


def target_of(device: torch.device) -> str:
    """The architecture of `LAUNCHES` that serves a device; empty = none does."""
    if device.type == "cpu":
        return INTERPRETER if os.environ.get("TRITON_INTERPRET") == "1" else ""
    if device.type != "cuda":
        return ""
    if torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        return name if name in LAUNCHES else ""
    major = torch.cuda.get_device_capability(device)[0]
    return {8: "sm_80", 9: "sm_90"}.get(major, "sm_100" if major >= 10 else "")


def unsupported(query: Tensor, value_dim: int, cluster_size: int) -> list[str]:
    """Reasons why the kernels cannot run a call with such queries (or keys); empty means they can."""
    reasons = []
    target = target_of(query.device)
    if not target:
        reasons.append(
            "it runs on CUDA devices from compute capability 8.0 on, on gfx942, and on CPU tensors under "
            f"TRITON_INTERPRET=1, got {query.device}"
        )
    if query.dtype not in DTYPES:
        reasons.append(f"it knows {', '.join(str(dtype) for dtype in DTYPES)}, got {query.dtype}")
    for name, dim in (("head dimension", query.shape[-1]), ("value dimension", value_dim)):
        if dim not in DIMS:
            reasons.append(f"the {name} must be one of {DIMS}, got {dim}")
    if not reasons and launch(target, query.shape[-1], value_dim, query.dtype) is None:
        most = max(query.shape[-1], value_dim)
        reasons.append(
            f"{target} has no configuration for {query.dtype} and {most} dimensions that spills nothing"
        )
    if cluster_size not in CLUSTER_SIZES:
        reasons.append(f"clusters must have one of {CLUSTER_SIZES} keys, got {cluster_size}")
    return [*reasons, missing()] if missing() else reasons


# --- calls


def constants() -> dict[str, float]:
    """The constants of the reference, by their names in the kernels."""
    return {
        "SEARCH_STDS": reference.SEARCH_STDS,
        "HEAVY_STDS": reference.HEAVY_STDS,
        "HEAVY_INT8_ERROR": reference.HEAVY_INT8_ERROR,
        "QUERY_MAX": reference.QUERY_MAX,
        "MAX_GAIN": reference.MAX_GAIN,
        "MAX_DISTANCE": reference.MAX_DISTANCE,
        "MAX_MASS_GAIN": reference.MAX_MASS_GAIN,
        "LOG_SINK_WEIGHT": math.log(reference.SINK_WEIGHT),
        "MASS_KEYS": float(reference.MASS_KEYS),
        "MASS_SHARE": reference.MASS_SHARE,
        "MIN_STD": reference.MIN_STD,
        "MAX_STD": reference.MAX_STD,
    }


def forward(
    query: Tensor, key: Tensor, value: Tensor, index: KeyIndex, view: View
) -> tuple[Attended, Tensor, Tensor]:
    """As `forward` of `plain.py`."""
    from prescore.routed import triton_kernels as kernels

    (n_heads, heads_per_kv, n_query, dim), value_dim, device = query.shape, value.shape[-1], query.device
    n_clusters, size = index.positions.shape[1:]
    target = target_of(device)
    compiled = cast("Launch", launch(target, dim, value_dim, query.dtype))
    # the interpreter rounds to bfloat16 unlike torch
    is_interpreted = target == INTERPRETER
    dtype = torch.float32 if is_interpreted else query.dtype
    rows, splits, per_split = compiled.rows, 1, n_clusters
    if n_query == 1:  # a step: programs share the clusters
        rows = STEP_ROWS
        most = max(1, int(view.n_clusters.max()))  # on the CPU
        per_split = -(-most // (CLUSTERS * MAX_SPLITS)) * CLUSTERS
        splits = -(-most // per_split)
    n_tiles = -(-heads_per_kv * n_query // rows)
    n_rows, n_works = n_tiles * rows, n_tiles * splits * n_heads
    n_programs = min(n_works, 3 if is_interpreted else PROGRAMS)

    def empty(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=of, device=device)

    result, lse = empty(n_heads, heads_per_kv, n_query, value_dim, of=dtype), empty(n_heads, heads_per_kv, n_query)
    threshold, counts = torch.empty_like(lse), empty(n_works, 2, of=torch.int32)
    masses, query_units = empty(n_heads, splits + 1, n_rows), empty(n_heads, n_rows)
    query_int8 = empty(n_heads, n_rows, dim, of=torch.int8)
    peaks, totals = (empty(n_heads, splits, n_rows) for _ in range(2))
    size_of_span = index.clusters_per_span
    spans, spans_per_split = -(-n_clusters // size_of_span), per_split // size_of_span + 2
    moves, move_peaks = (empty(n_heads, splits, spans_per_split, n_rows) for _ in range(2))
    outputs = empty(n_heads, splits, n_rows, value_dim)
    estimates = empty(n_programs, CLUSTERS * size, rows)
    hits = empty(n_programs, CLUSTERS * size, of=torch.int64)
    seen = [t.to(device, non_blocking=True) for t in (view.n_clusters, view.local_start, view.local_stop)]
    stds = empty(n_heads, spans, n_rows)
    key_cov = torch.cat((index.span_key_cov, index.key_cov), dim=1)
    key_value_cov = torch.cat((index.span_key_value_cov, index.key_value_cov), dim=1)
    units = key_cov.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(reference.MIN_STD**2).sqrt()
    index = index.map(Tensor.contiguous)
    scales, sub_scales = (  # of every key and subcluster
        numbers.repeat_interleave(n, 1)
        for numbers, n in ((index.scales, index.positions.shape[2]), (index.sub_scales, index.spread.shape[2]))
    )
    keys = (index.positions, index.int8, scales)
    subclusters = (index.sub_int8, sub_scales, index.spread, index.radius)
    margins = reference.heavy_margin(view.log_inverse), reference.exact_margin(view.log_inverse)
    steps = query.stride()[:3], (*key.stride()[:2], *value.stride()[:2])
    n_covs, n_spans = key_cov.shape[1], index.span_key_cov.shape[1]
    covs = size_of_span, view.clusters_per_cov, per_split
    fixed = {
        "GROUP": heads_per_kv, "ROWS": rows, "D": dim, "DV": value_dim, "LOCAL": compiled.local, "SIZE": size,
        "KEYS": min(compiled.keys, size), "WIDTH": min(dim, compiled.width), "PRECISION": precision(target),
        "INTERPRETED": is_interpreted, **constants(),
    }  # fmt: skip

    def start(kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        names = kernel.arg_names
        constants_of_kernel = {name: value for name, value in fixed.items() if name in names}
        warps = LIGHT_WARPS.get(kernel.__name__, compiled.warps)
        kernel[grid](*arguments, **constants_of_kernel, num_warps=warps, num_stages=1)

    with torch.cuda.device_of(query):
        start(
            kernels.local_part, (n_tiles, splits + 1, n_heads),
            query, key, value, key, value, *seen, index.centroid_key, key_cov,  # sinks are the first keys
            masses, stds, query_int8, query_units, peaks, totals, outputs, *steps[0], *steps[1],
            n_query, n_rows, n_clusters, n_covs, n_spans, spans, *covs, index.sink_key.shape[1], dim, view.scale,
        )  # fmt: skip
        start(
            kernels.far_part, (n_programs,),
            query, key, value, seen[0], index.centroid_key, index.centroid_value, units, *keys, *subclusters,
            masses, stds, query_int8, query_units, peaks, totals, moves, move_peaks, outputs, estimates, hits,
            threshold, counts, *steps[0], *steps[1],
            n_heads, n_tiles, splits, n_query, n_rows, n_clusters, n_covs, n_spans, spans, spans_per_split,
            *covs, dim, view.scale, view.log_inverse, *margins,
        )  # fmt: skip
        start(
            kernels.merge, (n_tiles, n_heads),
            query, seen[0], key_value_cov, peaks, totals, moves, move_peaks, outputs, result, lse, *steps[0],
            n_query, n_rows, splits, n_covs, n_spans, spans_per_split, *covs, dim, view.scale,
        )  # fmt: skip
    return Attended(result, lse), threshold, counts.sum(0)
