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

from prescore.config import Routed
from prescore.routed import reference
from prescore.routed.index import KeyIndex
from prescore.routed.layout import View, make_layout
from prescore.types import Attended

DIMS = (32, 64, 128, 256)
CLUSTER_SIZES = (16, 32, 64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLUSTERS = 16
"""Clusters whose centroids are compared at once."""
STEP_QUERIES, STEP_PROGRAMS = 4, 512
"""Up to so many newest queries are a step, whose local keys and clusters are shared by as many programs."""
LIGHT_WARPS = {"bound": 8, "merge": 4}
"""Warps of a program of the kernels that need few registers."""
PROGRAMS = 2048
"""Programs of a launch over the tiles of a prompt; each has memory for bounds and a list of keys."""
VERSION = (3, 7)
"""The oldest Triton that compiles the kernels."""


# --- how kernels are compiled


class Launch(NamedTuple):
    """How the kernels are compiled for an architecture and a head dimension.

    Attributes:
        rows: Queries of a tile of a prompt.
        keys: Int8 keys of a product of the scan; at most a cluster.
        read: Far keys read at once.
        local: Local keys read at once.
        width: Numbers of the head dimension that are multiplied at once.
        warps: Of a program of `far`.
        stages: Of the loop that loads int8 keys.
    """

    rows: int
    keys: int
    read: int
    local: int
    width: int
    warps: int
    stages: int


INTERPRETER = "interpreter"
LAUNCHES = {
    "sm_80": {(16, 64): Launch(64, 128, 16, 32, 16, 4, 1), (16, 128): Launch(16, 128, 16, 16, 16, 4, 1)},
    "sm_90": {(16, 64): Launch(64, 128, 32, 32, 32, 4, 1), (16, 128): Launch(64, 128, 16, 32, 16, 8, 1)},
    "sm_100": {(16, 64): Launch(32, 64, 16, 16, 16, 8, 1), (16, 128): Launch(32, 128, 16, 32, 16, 4, 1)},
    "sm_120": {},
    "gfx942": {(16, 64): Launch(64, 128, 16, 32, 16, 4, 1), (16, 128): Launch(32, 128, 16, 32, 16, 4, 1)},
    INTERPRETER: {
        (bits, width): Launch(64, 64, 32, 64, 32, 4, 1) for bits in (16, 32) for width in (64, 128, 256)
    },
}
"""Of prompts, by architecture, then by bits of a number and the larger head dimension, rounded up. No autotuner:
it would need the device. Each was compiled and spills nothing (experiments/gpu/compiled.md)."""
STEP_LAUNCH = Launch(16, 128, 16, 32, 16, 4, 1)
"""Of steps, where prompts have one."""

GAINS_FROM: dict[str, tuple[int | None, int | None]] = {
    "sm_80": (None, None),
    "sm_90": (None, None),
    "sm_100": (None, None),
    "sm_120": (None, None),
    "gfx942": (None, None),
}
"""Keys from which `experiments/gpu/gpu_model.py` predicts that prompts, and steps, are at least 1.2 times as fast
as exact attention; None = never. Up to there `auto` is exact. Predicted on five layers (experiments/gpu), not
measured."""


def launch(target: str, dim: int, value_dim: int, dtype: torch.dtype, *, is_step: bool = False) -> Launch | None:
    """How to compile for an architecture of `LAUNCHES`; None = no way is known that spills nothing."""
    known = LAUNCHES[target]
    fitting = [key for key in known if key[0] == 8 * dtype.itemsize and key[1] >= max(dim, value_dim)]
    if not fitting:
        return None
    return STEP_LAUNCH if is_step else known[min(fitting)]


def warps_of(kernel: str, compiled: Launch) -> int:
    """Warps of a program of a kernel."""
    return LIGHT_WARPS.get(kernel, compiled.warps)


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
    return {8: "sm_80", 9: "sm_90", 10: "sm_100", 11: "sm_100", 12: "sm_120"}.get(major, "")


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


class Cache(NamedTuple):
    """Keys and values on a device.

    Attributes:
        key, value: `[B, Hkv, N, D]` with any strides; in pages `[P, PAGE, Hkv, D]`, as vLLM and FlashInfer have
        them. lengths: `[B]` int32, how many keys each sequence has.
        pages: `[B, n]` int32, the pages of each sequence; None = not in pages.
    """

    key: Tensor
    value: Tensor
    lengths: Tensor
    pages: Tensor | None = None


def forward(
    query: Tensor, key: Tensor, value: Tensor, index: KeyIndex, view: View
) -> tuple[Attended, Tensor, Tensor]:
    """As `forward` of `plain.py`."""
    length = int(view.local_stop[0, -1])  # on the CPU
    lengths = torch.full((len(key),), length, dtype=torch.int32, device=query.device)
    cache = Cache(key[:, None], value[:, None], lengths)
    numbers: dict[str, float] = {
        "chunk_size": view.chunk_size,
        "clusters_per_cov": view.clusters_per_cov,
        "exact_until": 0,
    }
    n_chunks = int(view.n_clusters.max()) * index.positions.shape[2] // view.chunk_size
    numbers |= {"n_chunks": n_chunks, "scale": view.scale, "log_inverse": view.log_inverse}
    return _launch(query, cache, index, numbers, view.causal)


def step(query: Tensor, cache: Cache, index: KeyIndex, config: Routed, scale: float) -> tuple[Attended, Tensor]:
    """The newest queries `[B, Hq, n, D]` of sequences of any lengths, and counts of keys compared and read.

    No number is read by the host, and launches depend on shapes alone, so that a CUDA graph of the call serves
    every length. `index` has room for `C` chunks; those are filled that `lengths` make far. Its one entry of
    `key_cov` is that of the last span of each sequence.
    """
    layout = make_layout(1, 1, causal=True, config=config)
    numbers: dict[str, float] = {
        "chunk_size": layout.chunk_size,
        "clusters_per_cov": 2**30,
        "exact_until": config.exact_until,
    }
    numbers |= {"n_chunks": index.positions.shape[1] // layout.clusters_per_chunk, "scale": scale}
    numbers["log_inverse"] = reference.log_inverse_weight(config.min_weight)
    by_head = query.reshape(index.positions.shape[0], -1, *query.shape[2:])
    (output, lse), _, counts = _launch(by_head, cache, index, numbers, is_causal=True)
    return Attended(output.view(*query.shape[:3], -1), lse.view(query.shape[:3])), counts


def _launch(
    query: Tensor, cache: Cache, index: KeyIndex, numbers: dict[str, float], is_causal: bool
) -> tuple[Attended, Tensor, Tensor]:
    """Queries `[T, G, n, D]`: the result, thresholds, counts of keys compared and read."""
    from prescore.routed import triton_kernels as kernels

    values = arguments(query, cache, index, numbers, is_causal, target_of(query.device))
    n_tiles, splits, n_units = (values[name] for name in ("n_tiles", "splits", "n_units"))
    n_works, n_programs = len(values["counts"]), len(values["parts"]) // values["n_parts"]
    grids = [("bound", 0, (n_tiles, splits, n_units)), ("merge", 0, (n_tiles, n_units))]
    waves = range(0, n_works, n_programs)
    grids[1:1] = [("far", first, (min(n_programs, n_works - first),)) for first in waves]
    with torch.cuda.device_of(query):
        for name, first, grid in grids:
            kernel: Any = getattr(kernels, name)
            values["first_work"] = first
            chosen = {key: values[key] for key in kernel.arg_names}
            kernel[grid](**chosen, num_warps=warps_of(name, values["launch"]), num_stages=1)
    return Attended(values["result"], values["lse"]), values["thresholds"], values["counts"].sum(0)


def arguments(
    query: Tensor, cache: Cache, index: KeyIndex, numbers: dict[str, float], is_causal: bool, target: str
) -> dict[str, Any]:
    """All arguments of the kernels by their names, results and memory among them."""
    (n_heads, heads_per_kv, n_query, dim), value_dim, device = query.shape, cache.value.shape[-1], query.device
    n_tables, size = index.positions.shape[1:]
    is_step = n_query <= STEP_QUERIES
    compiled = cast("Launch", launch(target, dim, value_dim, query.dtype, is_step=is_step))
    # the interpreter rounds to bfloat16 unlike torch
    is_interpreted = target == INTERPRETER
    dtype = torch.float32 if is_interpreted else query.dtype
    rows, members, splits = compiled.rows, 1, 1
    if is_step:
        members, splits = heads_per_kv, -(-n_tables // CLUSTERS)
    n_tiles, n_units = -(-members * n_query // rows), n_heads * heads_per_kv // members
    splits = max(1, min(splits, STEP_PROGRAMS // (n_tiles * n_units)))
    n_rows, n_works = n_tiles * rows, n_tiles * splits * n_units
    spans = -(-n_tables // (splits * index.clusters_per_span)) + (2 if splits > 1 else 0)
    keys, memory = min(compiled.keys, size), min(n_works, 3 if is_interpreted else PROGRAMS) * CLUSTERS
    of_splits, of_spans = (n_units, splits, n_rows), (n_units, splits, spans, n_rows)

    def empty(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=of, device=device)

    lse, in_pages = empty(n_heads, heads_per_kv, n_query), cache.pages is not None
    names = ("page", "step", "head") if in_pages else ("batch", "head", "step")
    strides = {"query_head": query.stride(0), "query_member": query.stride(1), "query_step": query.stride(2)}
    for which, tensor in (("key", cache.key), ("value", cache.value)):
        of_tensor = {"batch": 0, "page": 0, **dict(zip(names, tensor.stride(), strict=False))}
        strides |= {f"{which}_{name}": step for name, step in of_tensor.items()}
    return {
        "launch": compiled,
        **index.map(Tensor.contiguous).tensors(), **numbers, **constants(), **strides,
        "query": query, "key": cache.key, "value": cache.value, "lengths": cache.lengths,
        "pages": cache.lengths if cache.pages is None else cache.pages,
        "pages_step": 0 if cache.pages is None else cache.pages.stride(0),
        "result": empty(*lse.shape, value_dim, of=dtype), "lse": lse, "thresholds": torch.empty_like(lse),
        **{name: empty(*of_splits) for name in ("masses", "limits", "peaks", "totals")},
        **{name: empty(*of_spans) for name in ("stds", "reaches", "moves", "move_peaks")},
        "outputs": empty(*of_splits, value_dim), "query_rows": empty(n_units, n_rows, dim, of=query.dtype),
        "query_int8": empty(n_units, n_rows, dim, of=torch.int8), "query_units": empty(n_units, n_rows),
        "visible": empty(n_units, n_rows, of=torch.int32), "counts": empty(n_works, 2, of=torch.int32),
        "bounds": empty(memory * size // reference.SUBCLUSTER, rows), "least": empty(memory, rows),
        "whole_bounds": empty(memory, rows, of=torch.int32), "flags": empty(memory * size, of=torch.int8),
        "parts": empty(memory * size // keys, of=torch.int32), "hits": empty(memory * size, of=torch.int32),
        "kv_heads": cache.key.shape[2 if in_pages else 1], "n_units": n_units, "n_tiles": n_tiles,
        "splits": splits, "n_query": n_query, "n_rows": n_rows, "n_tables": n_tables, "spans": spans,
        "n_covs": index.key_cov.shape[1], "n_spans": index.span_key_cov.shape[1],
        "clusters_per_span": index.clusters_per_span, "clusters_per_chunk": int(numbers["chunk_size"]) // size,
        "n_sinks": index.sink_key.shape[1], "n_dim": dim, "first_work": 0, "n_parts": CLUSTERS * size // keys,
        "margin": reference.heavy_margin(numbers["log_inverse"]),
        "exact_margin": reference.exact_margin(numbers["log_inverse"]),
        "GROUP": heads_per_kv, "MEMBERS": members, "ROWS": rows, "D": dim, "DV": value_dim, "SIZE": size,
        "KEYS": keys, "READ": compiled.read, "LOCAL": compiled.local, "WIDTH": min(dim, compiled.width),
        "STAGES": compiled.stages, "PAGE": cache.key.shape[1] if in_pages else 0, "CAUSAL": is_causal,
        "PRECISION": precision(target), "INTERPRETED": is_interpreted,
    }  # fmt: skip
