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
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.routed import reference
from prescore.routed.layout import RoutedKeys, View
from prescore.types import Attended

DIMS = (32, 64, 128, 256)
CLUSTER_SIZES = (16, 32, 64, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLUSTERS = 16
"""Clusters whose centroids are compared at once."""
MAX_SPLITS = 32
"""Programs that share the clusters of a KV head in a step."""
VERSION = (3, 7)
"""The oldest Triton that compiles the kernels."""


# --- how kernels are compiled


class Launch(NamedTuple):
    """How the kernels are compiled for an architecture and a head dimension.

    Attributes:
        rows: Queries of a tile.
        keys: Int8 keys compared at once, and far keys read at once.
        local: Local keys read at once.
        warps: Of a program.
    """

    rows: int
    keys: int
    local: int
    warps: int


INTERPRETER = "interpreter"
LAUNCHES = {
    "sm_80": {64: Launch(32, 64, 32, 8), 128: Launch(32, 64, 32, 8), 256: Launch(16, 32, 32, 8)},
    "sm_90": {64: Launch(32, 64, 32, 8), 128: Launch(32, 64, 32, 8), 256: Launch(16, 32, 32, 8)},
    "sm_100": {64: Launch(32, 64, 32, 8), 128: Launch(32, 64, 32, 8), 256: Launch(16, 32, 32, 8)},
    "gfx942": {128: Launch(64, 32, 32, 4)},
    INTERPRETER: {width: Launch(64, 64, 64, 4) for width in (64, 128, 256)},
}
"""By architecture, then by the larger head dimension, rounded up. No autotuner: it would need the device."""


def launch(target: str, dim: int, value_dim: int) -> Launch:
    """How to compile for an architecture of `LAUNCHES`."""
    table = LAUNCHES[target]
    return table[min(width for width in table if width >= max(dim, value_dim))]


def precision(target: str) -> str:
    """How float32 matrices are multiplied: as three products of TF32 where the hardware has it."""
    return "tf32x3" if target.startswith("sm_") else "ieee"


# --- what can run


@cache
def missing() -> str:
    """Why Triton is not there; empty = it is."""
    if importlib.util.find_spec("triton") is None:
        return "triton must be installed (pip install 'prescore[gpu]')"
    version = metadata.version("triton")
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
    if not target_of(query.device):
        reasons.append(
            "it runs on CUDA devices from compute capability 8.0 on, on gfx942, and on CPU tensors under "
            f"TRITON_INTERPRET=1, got {query.device}"
        )
    if query.dtype not in DTYPES:
        reasons.append(f"it knows {', '.join(str(dtype) for dtype in DTYPES)}, got {query.dtype}")
    for name, dim in (("head dimension", query.shape[-1]), ("value dimension", value_dim)):
        if dim not in DIMS:
            reasons.append(f"the {name} must be one of {DIMS}, got {dim}")
        elif (target := target_of(query.device)) and dim > max(LAUNCHES[target]):
            reasons.append(f"the {name} on {target} must be at most {max(LAUNCHES[target])}, got {dim}")
    if cluster_size not in CLUSTER_SIZES:
        reasons.append(f"clusters must have one of {CLUSTER_SIZES} keys, got {cluster_size}")
    return [*reasons, missing()] if missing() else reasons


# --- calls


def constants(size: int) -> dict[str, float]:
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
        "LOG_SIZE": math.log(size),
        "MIN_STD": reference.MIN_STD,
        "MAX_STD": reference.MAX_STD,
    }


def forward(query: Tensor, keys: RoutedKeys, view: View) -> tuple[Attended, Tensor, Tensor]:
    """Result of `query [T, G, n, D]`, each query's threshold, and counts: keys compared, far keys read."""
    from prescore.routed import triton_kernels as kernels

    (n_heads, group, n_query, dim), value_dim, device = query.shape, keys.value.shape[-1], query.device
    n_clusters, size = keys.positions.shape[1:]
    target = target_of(device)
    own = launch(target, dim, value_dim)
    # the interpreter rounds to bfloat16 unlike torch
    dtype = torch.float32 if target == INTERPRETER else query.dtype
    lse = torch.empty((n_heads, group, n_query), dtype=torch.float32, device=device)
    result, threshold = torch.empty((*lse.shape, value_dim), dtype=dtype, device=device), torch.empty_like(lse)
    seen = [t.to(device, non_blocking=True) for t in (view.n_clusters, view.local_start, view.local_stop)]
    units = keys.key_cov.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(reference.MIN_STD**2).sqrt()
    centroid_key, centroid_value, *covs = (t.contiguous() for t in keys[4:8])
    index = [t.contiguous() for t in keys[8:]]
    n_covs, n_sinks, scale = keys.key_cov.shape[1], keys.sink_key.shape[1], view.scale
    strides = (*keys.key.stride()[:2], *keys.value.stride()[:2])
    margins = reference.heavy_margin(view.log_inverse), reference.exact_margin(view.log_inverse)
    numbers = (view.log_inverse, *margins)
    shared = {"GROUP": group, "DV": value_dim, "num_warps": own.warps, "num_stages": 1}
    fixed = {**shared, "D": dim, "PRECISION": precision(target), "INTERPRETED": target == INTERPRETER}
    all_constants = constants(size)
    sums = {name: all_constants[name] for name in ("MIN_STD", "MAX_STD", "LOG_SINK_WEIGHT")}
    search = {name: number for name, number in all_constants.items() if name not in sums}
    search |= {"SIZE": size, "KEYS": min(own.keys, size)}
    is_step = n_query == 1 and bool((view.n_clusters > 0).all())  # on the CPU
    with torch.cuda.device_of(query):
        if not is_step:
            n_tiles = -(-group * n_query // own.rows)
            counts = torch.empty((n_heads, n_tiles, 2), dtype=torch.int32, device=device)
            kernels.prefill[(n_tiles, n_heads)](
                query, *keys[:4], *seen, centroid_key, centroid_value, *covs, units, *index,
                result, lse, threshold, counts, *query.stride()[:3], *strides,
                n_query, n_clusters, n_covs, view.clusters_per_cov, n_sinks, dim, scale, *numbers,
                ROWS=own.rows, LOCAL=own.local, **fixed, **sums, **search,
            )  # fmt: skip
            return Attended(result, lse), threshold, counts.sum((0, 1))
        rows = max(16, 1 << (group - 1).bit_length())
        most = int(view.n_clusters.max())
        per_split = -(-most // (CLUSTERS * MAX_SPLITS)) * CLUSTERS
        splits = -(-most // per_split)
        counts = torch.empty((n_heads, splits, 2), dtype=torch.int32, device=device)
        masses, peaks, totals = torch.empty((3, n_heads, splits + 1, rows), dtype=torch.float32, device=device)
        outputs = torch.empty((n_heads, splits + 1, rows, value_dim), dtype=torch.float32, device=device)
        std = torch.empty((n_heads, rows), dtype=torch.float32, device=device)
        direction = torch.empty((n_heads, rows, value_dim), dtype=torch.float32, device=device)
        kernels.decode_local[(splits + 1, n_heads)](
            query, *keys[:4], *seen, centroid_key, *covs, masses, std, direction, peaks, totals, outputs,
            *query.stride()[:2], *strides,
            n_clusters, n_covs, view.clusters_per_cov, n_sinks, per_split, dim, scale,
            ROWS=rows, LOCAL=own.local, **fixed, **sums,
        )  # fmt: skip
        kernels.decode_far[(splits, n_heads)](
            query, *keys[:2], seen[0], centroid_key, centroid_value, units, *index,
            masses, std, direction, peaks, totals, outputs, threshold, counts, *query.stride()[:2], *strides,
            n_clusters, n_covs, view.clusters_per_cov, per_split, dim, scale, *numbers,
            ROWS=rows, **fixed, **search,
        )  # fmt: skip
        kernels.decode_merge[(n_heads,)](peaks, totals, outputs, result, lse, splits + 1, ROWS=rows, **shared)
    return Attended(result, lse), threshold, counts.sum((0, 1))
