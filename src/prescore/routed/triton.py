"""The Triton backend of routed attention: CUDA and ROCm devices, or CPU tensors under Triton's interpreter.

The key index is that of the reference, built by torch on the device. Kernels are in `triton_kernels.py`, which is
imported when the first call runs, and Triton with it. The backward pass is the plain backend's, on the device.
"""

from __future__ import annotations

import importlib.util
import math
import os
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prescore.config import Routed
from prescore.routed import reference
from prescore.routed.layout import RoutedKeys, View, make_layout
from prescore.types import Attended

DIMS = (32, 64, 128, 256)
SIZES = (16, 32, 64, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Launch(NamedTuple):
    """How a kernel is compiled.

    Attributes:
        rows: Queries of a tile.
        keys: Int8 keys compared at once, and keys read at once.
        local: Local keys read at once.
        warps, stages: Of Triton.
    """

    rows: int
    keys: int
    local: int
    warps: int
    stages: int = 1


def launch(target: str, width: int, dtype: torch.dtype) -> Launch:
    return Launch(64, 64, 64, 4)


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

    n_heads, group, n_query, dim = query.shape
    value_dim, device = keys.value.shape[-1], query.device
    n_clusters, size = keys.positions.shape[1:]
    interpreted = device.type == "cpu"
    own = launch("", max(dim, value_dim), query.dtype)
    n_tiles = -(-group * n_query // own.rows)
    result = torch.empty((n_heads, group, n_query, value_dim), dtype=torch.float32 if interpreted else query.dtype, device=device)
    lse = torch.empty((n_heads, group, n_query), dtype=torch.float32, device=device)
    threshold = torch.empty_like(lse)
    counts = torch.empty((n_heads, n_tiles, 2), dtype=torch.int32, device=device)
    seen = [t.to(device, non_blocking=True) for t in (view.n_clusters, view.local_start, view.local_stop)]
    units = keys.key_cov.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(reference.MIN_STD**2).sqrt()
    tables = [t.detach().contiguous() for t in keys[4:8]]
    others = [t.contiguous() for t in keys[8:]]
    margins = reference.heavy_margin(view.log_inverse), reference.exact_margin(view.log_inverse)
    kernels.prefill[(n_tiles, n_heads)](
        query, keys.key, keys.value, keys.sink_key, keys.sink_value, *seen,
        *tables, units, *others, result, lse, threshold, counts,
        *query.stride()[:3], *keys.key.stride()[:2], *keys.value.stride()[:2],
        n_query, n_clusters, keys.key_cov.shape[1], view.clusters_per_cov, keys.sink_key.shape[1],
        view.scale, view.log_inverse, *margins,
        GROUP=group, ROWS=own.rows, D=dim, DV=value_dim, SIZE=size, LOCAL=own.local, KEYS=min(own.keys, size),
        PRECISION="ieee", INTERPRETED=interpreted, **constants(size), num_warps=own.warps, num_stages=own.stages,
    )  # fmt: skip
    return Attended(result, lse), threshold, counts.sum((0, 1))
