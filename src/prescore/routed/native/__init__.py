"""The native backend of routed attention: C on CPUs, called through ctypes.

Queries, keys and values are read where they lie. Arrays of the key index interleave sixteen keys for vector loads
(`index_call`). C checks nothing: every tensor that reaches it is checked here first.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.autograd import records_gradients
from prescore.config import Routed
from prescore.ops.operators import readable
from prescore.routed.index import KeyIndex
from prescore.routed.int8_rows import row_size
from prescore.routed.layout import Layout, View, make_layout
from prescore.routed.native import library
from prescore.routed.native.library import Expected, call_library, check_tensors, empty
from prescore.routed.reference import (
    CLUSTER_REACH,
    HEAVY_INT8_ERROR,
    HEAVY_STDS,
    MASS_KEYS,
    MASS_SHARE,
    MAX_MASS_GAIN,
    MIN_STD,
    SEARCH_STDS,
    SINK_WEIGHT,
    exact_margin,
    heavy_margin,
    subcluster_levels,
)
from prescore.routed.tree import FIT_SIZE
from prescore.types import Attended

WIDTH = 16
"""Columns and keys that lie side by side."""
MAX_DIM = 256
STEP_QUERIES = 16
"""Queries of a KV head that a step has at most."""
KEY_ZERO = 64
"""What 0 is stored as: native code has keys without sign."""
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ROW_TYPES = {**TYPES, torch.uint8: 3}
_POINTER, _SIZE, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_PARTS = 4
"""Sums of gradients that are kept apart, for as many threads; a constant, so that results depend on no machine."""


# --- what native code can run
# ---------------------------------------------------------------------------------------


def unsupported(query: Tensor, value_dim: int, config: Routed) -> list[str]:
    """Reasons why native code cannot run a call; empty means it can."""
    size = make_layout(1, 1, causal=True, config=config).cluster_size
    reasons = _unsupported(query, value_dim, size)
    if library.loaded_level() == library.NO_LEVEL:
        reasons.append(library.describe_native())
    return reasons


def can_run(query: Tensor, value_dim: int, cluster_size: int) -> bool:
    """Whether native code can run a call with such queries (or keys)."""
    return not _unsupported(query, value_dim, cluster_size) and library.loaded_level() != library.NO_LEVEL


def _unsupported(query: Tensor, value_dim: int, cluster_size: int) -> list[str]:
    reasons = []
    if query.device.type != "cpu":
        reasons.append(f"it runs on CPU tensors, got {query.device}")
    if query.dtype not in TYPES:
        reasons.append(f"it knows {', '.join(str(dtype) for dtype in TYPES)}, got {query.dtype}")
    for name, dim in (("head dimension", query.shape[-1]), ("value dimension", value_dim)):
        if dim % WIDTH or not 0 < dim <= MAX_DIM:
            reasons.append(f"the {name} must be a multiple of {WIDTH} up to {MAX_DIM}, got {dim}")
    if cluster_size % WIDTH:
        reasons.append(f"clusters must have a multiple of {WIDTH} keys, got {cluster_size}")
    return reasons


# --- the structures of C, and checks
# --------------------------------------------------------------------------------


class Rows(ctypes.Structure):
    """Queries, keys or values where they lie, as `Rows` in routed.h."""

    starts: ctypes.Array[ctypes.c_int64]
    _fields_ = (("data", _POINTER), ("at", _POINTER), ("step", _SIZE), ("type", _SIZE), ("dim", _SIZE))


_ARRAYS = (
    *("columns", "column_values", "positions", "int8", "scales", "sub_int8", "sub_scales", "spread", "radius"),
    *("key_cov", "key_value_cov", "units"),
)
_SIZES = (
    "kv_heads",
    "n_query",
    "length",
    "dim",
    "value_dim",
    "cluster_size",
    "sinks",
    "sink_columns",
    "n_columns",
)
_NUMBERS = (
    *("scale", "search_stds", "heavy_stds", "heavy_int8_error", "margin", "exact_margin"),
    *("log_inverse", "max_mass_gain", "mass_keys", "mass_share", "log_sink_weight"),
)
_RESULTS = ("output", "lse", "threshold", "counts")


class RoutedCall(ctypes.Structure):
    """One call, as `RoutedCall` in routed.h; `arrays` are of the key index, and `last_position` is in it.

    `arrays` and `rows` live as long as the call, which points to them.
    """

    arrays: dict[str, Tensor]
    last_position: int
    rows: list[Rows]
    _fields_ = (
        *((name, Rows) for name in ("query", "key", "value", "far_key", "far_value")),
        *((name, _POINTER) for name in ("visible", "local_start", "local_stop", *_ARRAYS)),
        *((name, _SIZE) for name in (*_SIZES, "n_clusters", "n_covs")),
        *((name, _SIZE) for name in ("n_spans", "clusters_per_span", "clusters_per_cov")),
        *((name, _REAL) for name in _NUMBERS),
        *((name, _POINTER) for name in _RESULTS),
    )


_GIVEN = ("grad", "product", "column_keys", "value_columns", "key_value_cov_t", "query", "threshold")
_SUMMED = ("key", "value", "column_key", "column_value", "key_cov", "key_value_cov")


class RoutedGradients(ctypes.Structure):
    """What the backward function reads and adds to, as `Gradients` in backward.c."""

    _fields_ = (*((name, _POINTER) for name in (*_GIVEN, *_SUMMED)), ("parts", _SIZE), ("n_keys", _SIZE))


_INDEX = (
    *("positions", "centroid_key", "centroid_value", "int8", "scales", "sub_int8", "sub_scales", "spread"),
    *("radius", "key_cov", "key_value_cov"),
)


class IndexCall(ctypes.Structure):
    """What is read and made, as `IndexCall` in index.c."""

    _fields_ = (
        ("key", Rows),
        ("value", Rows),
        *((name, _SIZE) for name in ("kv_heads", "begin", "chunks", "chunk_size", "levels", "cluster_size")),
        *((name, _SIZE) for name in ("dim", "value_dim", "fit_size")),
        ("cluster_reach", ctypes.c_double),
        *((name, _POINTER) for name in _INDEX),
    )


def check_rows(name: str, rows: Tensor, n_heads: int) -> None:
    """Refuse queries, keys or values that C cannot read."""
    known = rows.dtype in TYPES and rows.device.type == "cpu" and not (rows.is_neg() or rows._is_zerotensor())
    if rows.stride(-1) != 1 or not known or rows.shape[:-2].numel() != n_heads:
        raise ValueError(
            f"{name} must be rows of {n_heads} heads with stride 1, "
            f"got {tuple(rows.shape)} {rows.dtype} with strides {rows.stride()}"
        )


def _check_keys(key: Tensor, value: Tensor, n_heads: int, cluster_size: int) -> None:
    check_rows("key", key, n_heads)
    check_rows("value", value, n_heads)
    dim, value_dim = key.shape[-1], value.shape[-1]
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"value must have as many rows as key, {key.shape[-2]}, got {value.shape[-2]}")
    if dim % WIDTH or value_dim % WIDTH or cluster_size % WIDTH or not min(dim, value_dim) > 0:
        raise ValueError(f"sizes must be multiples of {WIDTH}, got {dim}, {value_dim} and {cluster_size}")
    if max(dim, value_dim) > MAX_DIM:
        raise ValueError(f"head dimensions must be at most {MAX_DIM}, got {dim} and {value_dim}")


def rows_of(tensor: Tensor) -> Rows:
    """Where the rows of each head of `[T, N, D]` or `[B, H, N, D]` lie."""
    shape, strides = tensor.shape, tensor.stride()
    starts = [head * strides[0] for head in range(shape[0])]
    if len(shape) == 4:
        starts = [start + head * strides[1] for start in starts for head in range(shape[1])]
    array = (_SIZE * len(starts))(*starts)
    rows = Rows(tensor.data_ptr(), ctypes.addressof(array), strides[-2], _ROW_TYPES[tensor.dtype], shape[-1])
    rows.starts = array  # lives as long as what points to it
    return rows


# --- the key index
# --------------------------------------------------------------------------------------------------


def can_build(key: Tensor, value: Tensor, layout: Layout) -> bool:
    """Whether C can build this key index: supported sizes, no gradient recorded."""
    recorded = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
    return not recorded and can_run(key, value.shape[-1], layout.cluster_size)


def build_index(key: Tensor, value: Tensor, layout: Layout, begin: int, n_chunks: int) -> KeyIndex:
    """As `reference.build_index`, with int8 keys in the layout of C; keys `[T, N, D]` or `[B, Hkv, N, D]`."""
    n_heads, n_keys, dim, value_dim = key.shape[:-2].numel(), key.shape[-2], key.shape[-1], value.shape[-1]
    n_clusters, size = n_chunks * layout.clusters_per_chunk, layout.cluster_size
    _check_keys(key, value, n_heads, size)
    if begin < 0 or begin + n_chunks * layout.chunk_size > n_keys or layout.chunk_size != size << layout.levels:
        raise ValueError(f"chunks must lie within {n_keys} keys, got {n_chunks} from {begin} on")
    made = {
        "positions": empty(n_heads, n_clusters, size, dtype=torch.int32),
        "centroid_key": empty(n_heads, n_clusters, dim),
        "centroid_value": empty(n_heads, n_clusters, value_dim),
        "int8": empty(n_heads, n_clusters, size // WIDTH, dim // 4, WIDTH, 4, dtype=torch.uint8),
        "scales": empty(n_heads, n_clusters),
        "sub_int8": empty(n_heads, n_clusters, size // WIDTH, dim, dtype=torch.uint8),
        "sub_scales": empty(n_heads, n_clusters),
        "spread": empty(n_heads, n_clusters, size // WIDTH),
        "radius": empty(n_heads, n_clusters),
        "key_cov": empty(n_heads, n_chunks, dim, dim),
        "key_value_cov": empty(n_heads, n_chunks, dim, value_dim),
    }
    rows = [rows_of(t) for t in (key, value)]  # must live until the call returns
    call = IndexCall(
        key=rows[0],
        value=rows[1],
        kv_heads=n_heads,
        begin=begin,
        chunks=n_chunks,
        chunk_size=layout.chunk_size,
        levels=layout.levels + subcluster_levels(size),
        cluster_size=size,
        dim=dim,
        value_dim=value_dim,
        fit_size=FIT_SIZE,
        cluster_reach=CLUSTER_REACH,
        **{name: tensor.data_ptr() for name, tensor in made.items()},
    )
    call_library("prescore_build_index", call)
    sinks = slice(layout.sinks)
    sink_key, sink_value = (t[..., sinks, :].flatten(0, -3) for t in (key, value))
    made |= {f"span_{name}": made[name][:, :0] for name in ("key_cov", "key_value_cov")}
    clusters_per_span = layout.clusters_per_chunk * layout.chunks_per_span
    return KeyIndex(clusters_per_span, sink_key=sink_key, sink_value=sink_value, **made)


def index_call(index: KeyIndex, log_inverse: float, scale: float, clusters_per_cov: int) -> RoutedCall:
    """A call over a key index of reference or native code, without queries, keys, values and results.

    Columns are sinks, then centroids, each rounded up to a multiple of 16. The centroids of subclusters lie
    sixteen side by side, as keys do; the last block is filled up. Covariances of complete spans come first.
    """
    arrays, sink_columns = _arrays(index)
    (n_heads, n_clusters, size), n_sinks = index.positions.shape, index.sink_key.shape[1]
    n_covs, dim, value_dim = arrays["key_cov"].shape[1], index.centroid_key.shape[2], index.centroid_value.shape[2]
    n_columns = sink_columns + -(-n_clusters // WIDTH) * WIDTH
    if index.clusters_per_span < WIDTH or index.clusters_per_span % WIDTH:
        raise ValueError(f"clusters of a span must be a multiple of {WIDTH}, got {index.clusters_per_span}")
    blocks, sub_blocks = (n_heads, n_clusters, size // WIDTH), -(-n_clusters * (size // WIDTH) // WIDTH)
    shapes = {
        "columns": (n_heads, n_columns // WIDTH, dim, WIDTH),
        "column_values": (n_heads, n_columns, value_dim),
        "positions": (n_heads, n_clusters, size),
        "int8": (*blocks, dim // 4, WIDTH, 4),
        "sub_int8": (n_heads, sub_blocks, dim // 4, WIDTH, 4),
        **dict.fromkeys(("scales", "sub_scales", "spread"), (n_heads, sub_blocks, WIDTH)),
        "radius": (n_heads, n_columns - sink_columns),
        "key_cov": (n_heads, n_covs, dim, dim),
        "key_value_cov": (n_heads, n_covs, dim, value_dim),
        "units": (n_heads, n_covs),
    }
    dtypes = {"positions": torch.int32, "int8": torch.uint8, "sub_int8": torch.uint8}
    check_tensors(
        [Expected(name, arrays[name], shape, dtypes.get(name, torch.float32)) for name, shape in shapes.items()]
    )
    call = RoutedCall(
        **{name: array.data_ptr() for name, array in arrays.items()},
        kv_heads=n_heads,
        dim=dim,
        value_dim=value_dim,
        cluster_size=size,
        sinks=n_sinks,
        sink_columns=sink_columns,
        n_columns=n_columns,
        n_clusters=n_clusters,
        n_covs=n_covs,
        n_spans=index.span_key_cov.shape[1],
        clusters_per_span=index.clusters_per_span,
        clusters_per_cov=clusters_per_cov,
        scale=scale,
        search_stds=SEARCH_STDS,
        heavy_stds=HEAVY_STDS,
        heavy_int8_error=HEAVY_INT8_ERROR,
        margin=heavy_margin(log_inverse),
        exact_margin=exact_margin(log_inverse),
        log_inverse=log_inverse,
        max_mass_gain=MAX_MASS_GAIN,
        mass_keys=MASS_KEYS,
        mass_share=MASS_SHARE,
        log_sink_weight=math.log(SINK_WEIGHT),
    )
    call.arrays, call.last_position = arrays, int(index.positions.max()) if index.positions.numel() else -1
    return call


def _arrays(index: KeyIndex) -> tuple[dict[str, Tensor], int]:
    """The key index in the order of C, by the names of `RoutedCall`; and how many columns are for sinks."""
    n_sinks, n_clusters = index.sink_key.shape[1], index.positions.shape[1]
    sink_columns, fill = -(-n_sinks // WIDTH) * WIDTH, -n_clusters % WIDTH

    def columns(sinks: Tensor, centroids: Tensor) -> Tensor:
        room = pad(sinks.detach().float(), (0, 0, 0, sink_columns - n_sinks))
        return torch.cat((room, pad(centroids.detach(), (0, 0, 0, fill))), dim=1)

    def stored(numbers: Tensor) -> Tensor:
        return (numbers.to(torch.int16) + KEY_ZERO).to(torch.uint8) if numbers.dtype == torch.int8 else numbers

    def side_by_side(parts: Tensor) -> Tensor:  # [T, M, B, x] -> [T, blocks, 16, x]
        flat = parts.flatten(1, 2)
        blocks: Tensor = pad(flat, (0, 0, 0, -flat.shape[1] % WIDTH)).unflatten(1, (-1, WIDTH))
        return blocks

    def of_subclusters(scales: Tensor) -> Tensor:  # [T, M] -> [T, blocks, 16]
        return side_by_side(scales[..., None, None].expand_as(index.spread[..., None])).contiguous()

    int8 = index.int8
    if int8.dtype == torch.int8:  # [T, M, L, D] of the reference
        int8 = stored(int8).unflatten(2, (-1, WIDTH)).unflatten(4, (-1, 4)).transpose(3, 4).contiguous()
    keys_of_columns = columns(index.sink_key, index.centroid_key)
    positions = index.positions
    arrays = {
        "columns": keys_of_columns.unflatten(1, (-1, WIDTH)).transpose(2, 3).contiguous(),
        "column_values": columns(index.sink_value, index.centroid_value),
        "positions": positions.to(torch.int32) if positions.dtype == torch.int64 else positions,
        "int8": int8,
        "sub_int8": side_by_side(stored(index.sub_int8)).unflatten(3, (-1, 4)).transpose(2, 3).contiguous(),
        "spread": side_by_side(index.spread[..., None]).contiguous(),
        **{name: of_subclusters(getattr(index, name)) for name in ("scales", "sub_scales")},
        "radius": pad(index.radius, (0, fill)).contiguous(),
        "key_cov": torch.cat((index.span_key_cov, index.key_cov), 1),
        "key_value_cov": torch.cat((index.span_key_value_cov, index.key_value_cov), 1),
    }
    trace = arrays["key_cov"].diagonal(dim1=-2, dim2=-1).sum(-1)
    arrays["units"] = trace.clamp_min(MIN_STD**2).sqrt()
    return arrays, sink_columns


def _check_call(
    call: RoutedCall, query: Tensor, key: Tensor, value: Tensor, most_clusters: int, n_before: int = 0
) -> None:
    """Refuse queries `[T, G, n, D]`, keys and values, behind `n_before` others, that do not fit a key index."""
    n_heads, heads_per_kv, _, dim = query.shape
    check_rows("query", query, n_heads * heads_per_kv)
    _check_keys(key, value, n_heads, call.cluster_size)
    sizes = (call.kv_heads, call.dim, call.dim, call.value_dim)
    if sizes != (n_heads, dim, key.shape[-1], value.shape[-1]):
        wanted = (n_heads, dim, key.shape[-1], value.shape[-1])
        raise ValueError(f"the key index must fit queries, keys and values of sizes {wanted}, got {sizes}")
    n_keys = n_before + key.shape[-2]
    if call.last_position >= n_keys:
        raise ValueError(f"the key index must be of {n_keys} keys, got position {call.last_position}")
    most = min(call.n_clusters, (call.n_spans + 1) * call.clusters_per_span)
    if most_clusters > most:
        raise ValueError(f"visible clusters must be at most {most}, got {most_clusters}")


# --- whole calls
# ----------------------------------------------------------------------------------------------------


def routed_call(
    inputs: tuple[Tensor, Tensor, Tensor],
    index: KeyIndex,
    view: View,
    results: dict[str, Tensor],
    *,
    reads_local: bool,
) -> RoutedCall:
    """The argument of a function of the library, checked; its tensors must live until the function returns.

    Args:
        inputs: Queries `[T, G, n, D]`, keys and values.
        index: The key index of these keys.
        view: What each query sees.
        results: `output`, `lse`, `threshold` and `counts`: written, except by the backward function, which reads
            `output` (= gradient), `lse` and `threshold`.
        reads_local: Whether local keys are read here.
    """
    query, key, value = inputs
    n_heads, heads_per_kv, length, _ = query.shape
    by_query, n_keys = (n_heads, heads_per_kv, length), key.shape[-2]
    local = {"local_start": view.local_start, "local_stop": view.local_stop} if reads_local else {}
    seen = {"visible": view.n_clusters, **local}
    check_tensors(
        [
            Expected("output", results["output"], (*by_query, value.shape[-1])),
            Expected("lse", results["lse"], by_query),
            Expected("threshold", results["threshold"], by_query),
            Expected("counts", results["counts"], (2,), torch.int64),
            *(Expected(name, tensor, (n_heads, length), torch.int32) for name, tensor in seen.items()),
        ]
    )
    call = index_call(index, view.log_inverse, view.scale, view.clusters_per_cov)
    least, most = _range(view.n_clusters)
    _check_call(call, query, key, value, most)
    if least < 0 or most > (call.n_covs - call.n_spans) * view.clusters_per_cov:
        raise ValueError(f"visible clusters must lie between 0 and {call.n_clusters}, got {least} to {most}")
    if reads_local and (_range(view.local_start)[0] < 0 or _range(view.local_stop)[1] > n_keys):
        begin, end = _range(view.local_start)[0], _range(view.local_stop)[1]
        raise ValueError(f"local keys must lie within {n_keys} keys, got {begin} to {end}")
    call.rows = [rows_of(t) for t in inputs]
    call.query, call.key, call.value = call.rows
    call.far_key, call.far_value = call.key, call.value
    for field, tensor in (*seen.items(), *results.items()):
        setattr(call, field, tensor.data_ptr())
    call.n_query, call.length = heads_per_kv * length, length
    return call


def _range(numbers: Tensor) -> tuple[int, int]:
    """Smallest and largest; 0 where there are none."""
    if not numbers.numel():
        return 0, 0
    least, most = torch.aminmax(numbers)
    return int(least), int(most)


def forward(
    query: Tensor, key: Tensor, value: Tensor, index: KeyIndex, view: View
) -> tuple[Attended, Tensor, Tensor]:
    """As `forward` of `plain.py`."""
    shape = query.shape[:3]
    results = {
        "output": empty(*shape, value.shape[-1]),
        "lse": empty(*shape),
        "threshold": empty(*shape).fill_(torch.inf),  # infinite where nothing is far
        "counts": empty(2, dtype=torch.int64).zero_(),
    }
    call = routed_call((query, key, value), index, view, results, reads_local=True)
    call_library("prescore_routed_forward", call)
    return Attended(results["output"], results["lse"]), results["threshold"], results["counts"]


class StepCall(ctypes.Structure):
    """What is read and made, as `StepCall` in step.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "output")),
        *((name, ctypes.c_int64 * 3) for name in ("key_step", "value_step")),
        *(
            (name, ctypes.c_int64)
            for name in ("batch", "kv_heads", "n_query", "n_keys", "dim", "value_dim", "type")
        ),
        ("scale", ctypes.c_float),
    )


def can_attend_step(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attend_step` can run: a few queries `[B, Hkv, n, D]` over keys `[B, Hkv, N, D]`, N at least 1."""
    same_type = query.dtype == key.dtype == value.dtype and key.device == value.device == query.device
    some = 0 < query.shape[2] <= STEP_QUERIES and key.shape[2] > 0 and query.shape[0] > 0
    return same_type and some and can_run(query, value.shape[-1], WIDTH)


def attend_step(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Exact attention of a decode step: every query `[B, Hkv, n, D]` sees all keys `[B, Hkv, N, D]`."""
    (batch, heads, n_query, dim), n_keys, value_dim = query.shape, key.shape[2], value.shape[-1]
    query, key, value = query.contiguous(), *(t if t.stride(-1) == 1 else t.contiguous() for t in (key, value))
    wanted = {"key": (key, dim), "value": (value, value_dim)}
    for name, (tensor, width) in wanted.items():
        if tensor.shape != (batch, heads, n_keys, width) or tensor.dtype != query.dtype:
            got = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise ValueError(f"{name} must be {(batch, heads, n_keys, width)} {query.dtype}, got {got}")
    if not can_attend_step(query, key, value):
        raise ValueError(
            f"a step must be at most {STEP_QUERIES} queries over some keys, got {query.shape}, {key.shape}"
        )
    output = empty(batch, heads, n_query, value_dim)
    pointers = (query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr())
    steps = ((ctypes.c_int64 * 3)(*tensor.stride()[:3]) for tensor in (key, value))
    sizes = (batch, heads, n_query, n_keys, dim, value_dim, TYPES[query.dtype])
    call_library("prescore_exact_step", StepCall(*pointers, *steps, *sizes, scale))
    return output.to(query.dtype)


class ListCall(ctypes.Structure):
    """What is read and made, as `ListCall` in lists.c."""

    _fields_ = (
        *((name, Rows) for name in ("query", "key", "value")),
        *((name, _POINTER) for name in ("indices", "output", "lse")),
        *((name, _SIZE) for name in ("list_heads", "heads_per_list", "list_heads_per_kv", "n_lists", "n_listed")),
        *((name, _SIZE) for name in ("bits", "n_query", "n_keys", "dim", "value_dim")),
        ("scale", _REAL),
    )


def unsupported_lists(query: Tensor, key: Tensor, value: Tensor) -> list[str]:
    """Reasons why `attend_lists` cannot run a call; empty means it can."""
    reasons = _unsupported(query, value.shape[-1], WIDTH)
    if records_gradients(query, key, value):
        reasons.append("it computes no gradients of key lists")
    if library.loaded_level() == library.NO_LEVEL:
        reasons.append(library.describe_native())
    return reasons


def attend_lists(query: Tensor, key: Tensor, value: Tensor, indices: Tensor, scale: float) -> Attended:
    """Exact attention of `query [B, Hq, n, D]` over listed keys, as `prescore.attend_keys`.

    Positions that no key has are skipped.
    """
    query, key, value, indices = (readable(t) for t in (query, key, value, indices.contiguous()))
    (batch, heads, length, dim), n_heads, n_keys = query.shape, key.shape[:2].numel(), key.shape[2]
    list_heads, (n_lists, n_listed) = indices.shape[:2].numel(), indices.shape[2:]
    check_rows("query", query, batch * heads)
    _check_keys(key, value, n_heads, WIDTH)
    fits = key.shape[0] == value.shape[0] == indices.shape[0] == batch and dim == key.shape[-1]
    in_order = list_heads and batch * heads % list_heads == list_heads % n_heads == 0 and 0 < n_lists <= length
    if not (fits and in_order and indices.dtype in (torch.int32, torch.int64) and indices.device.type == "cpu"):
        got = f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(indices.shape)} {indices.dtype}"
        raise ValueError(f"lists must belong to queries and keys, got {got}")
    output, lse = empty(batch, heads, length, value.shape[-1]), empty(batch, heads, length)
    rows = [rows_of(t) for t in (query, key, value)]  # must live until the call returns
    call = ListCall(
        *rows,
        *(tensor.data_ptr() for tensor in (indices, output, lse)),
        list_heads=list_heads,
        heads_per_list=batch * heads // list_heads,
        list_heads_per_kv=list_heads // n_heads,
        n_lists=n_lists,
        n_listed=n_listed,
        bits=8 * indices.element_size(),
        n_query=length,
        n_keys=n_keys,
        dim=dim,
        value_dim=value.shape[-1],
        scale=scale,
    )
    call_library("prescore_attend_lists", call)
    return Attended(output.to(query.dtype), lse)


def attend_ranges(
    query: Tensor, key: Tensor, value: Tensor, start: Tensor, stop: Tensor, scale: float
) -> Attended:
    """Exact attention of `query [B, Hq, n, D]`: a query reads the keys from its `start` to its `stop`.

    These are `[B or 1, n]` int32. A query that reads none has output 0 and lse -inf.
    """
    (batch, heads, length, dim), n_heads, n_keys = query.shape, key.shape[:2].numel(), key.shape[2]
    heads_per_kv = batch * heads // n_heads
    output, lse = empty(n_heads, heads_per_kv, length, value.shape[-1]), empty(n_heads, heads_per_kv, length)
    counts, visible = empty(2, dtype=torch.int64), empty(n_heads, length, dtype=torch.int32).zero_()
    begin, end = (bound.expand(batch, -1).repeat_interleave(key.shape[1], 0) for bound in (start, stop))
    check_rows("query", query, n_heads * heads_per_kv)
    _check_keys(key, value, n_heads, WIDTH)
    ranges = (("start", begin), ("stop", end))
    check_tensors([Expected(name, tensor, (n_heads, length), torch.int32) for name, tensor in ranges])
    bounds = _range(begin)[0], _range(end)[1]
    if dim != key.shape[-1] or bounds[0] < 0 or bounds[1] > n_keys:
        raise ValueError(f"queries must read {n_keys} keys of {dim} dimensions, got {key.shape} from {bounds}")
    call = RoutedCall(
        **{"kv_heads": n_heads, "n_query": heads_per_kv * length, "length": length, "dim": dim, "scale": scale},
        **{"value_dim": value.shape[-1], "cluster_size": WIDTH, "clusters_per_cov": 1, "clusters_per_span": 1},
        **{"visible": visible.data_ptr(), "local_start": begin.data_ptr(), "local_stop": end.data_ptr()},
        **{"output": output.data_ptr(), "lse": lse.data_ptr(), "counts": counts.data_ptr()},
    )
    rows = [rows_of(t) for t in (query, key, value)]  # must live until the call returns
    call.query, call.key, call.value = rows
    call_library("prescore_routed_forward", call)
    by_query = output.view(batch, heads, length, -1).transpose(1, 2)  # as models go on with it, so one copy
    output = by_query.to(query.dtype, memory_format=torch.contiguous_format).transpose(1, 2)
    return Attended(output, lse.view(batch, heads, length))


def add_far_gradients(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    index: KeyIndex,
    view: View,
    merged: Attended,
    threshold: Tensor,
    sums: dict[str, Tensor],
) -> Tensor:
    """As `add_far_gradients` of `plain.py`."""
    _, key, value = inputs
    grads = grad.to(torch.float32).contiguous()
    results = {"output": grads, "lse": merged.lse, "threshold": threshold}  # read, not written
    results["counts"] = empty(2, dtype=torch.int64).zero_()
    call = routed_call(inputs, index, view, results, reads_local=False)
    columns, values = call.arrays["columns"], call.arrays["column_values"]
    given = {
        "grad": grads,
        "product": (grads * merged.output).sum(-1),
        "column_keys": columns.transpose(2, 3).flatten(1, 2).contiguous(),
        "value_columns": values.unflatten(1, (-1, WIDTH)).transpose(2, 3).contiguous(),
        "key_value_cov_t": call.arrays["key_value_cov"].transpose(2, 3).contiguous(),
        "query": sums["query"],
        "threshold": torch.zeros_like(threshold),
    }
    like = (key, value, given["column_keys"], values, call.arrays["key_cov"], call.arrays["key_value_cov"])
    parts = {name: empty(_PARTS, *t.shape).zero_() for name, t in zip(_SUMMED, like, strict=True)}
    call_library("prescore_routed_backward", call, _gradients(given, parts, call, key.shape[-2]))
    totals = {name: part.sum(0) for name, part in parts.items()}
    sinks, centroids = slice(call.sinks), slice(call.sink_columns, call.sink_columns + call.n_clusters)
    for name in ("key_cov", "key_value_cov"):
        totals[f"span_{name}"], totals[name] = totals[name].tensor_split((call.n_spans,), dim=1)
    for name in ("key", "value"):
        column = totals.pop(f"column_{name}")
        totals |= {f"sink_{name}": column[:, sinks], f"centroid_{name}": column[:, centroids]}
    for name, total in totals.items():
        sums[name].add_(total)
    grad_threshold: Tensor = given["threshold"]
    return grad_threshold


def _gradients(
    given: dict[str, Tensor], parts: dict[str, Tensor], call: RoutedCall, n_keys: int
) -> RoutedGradients:
    """The second argument of the backward function, checked."""
    n_heads, n_columns, n_covs = call.kv_heads, call.n_columns, call.n_covs
    dim, value_dim, by_query = call.dim, call.value_dim, (call.kv_heads, call.n_query)
    shapes = {
        "grad": (*by_query, value_dim),
        "product": by_query,
        "column_keys": (n_heads, n_columns, dim),
        "value_columns": (n_heads, n_columns // WIDTH, value_dim, WIDTH),
        "key_value_cov_t": (n_heads, n_covs, value_dim, dim),
        "query": (*by_query, dim),
        "threshold": by_query,
    }
    summed = {
        "key": (n_keys, dim),
        "value": (n_keys, value_dim),
        "column_key": (n_columns, dim),
        "column_value": (n_columns, value_dim),
        "key_cov": (n_covs, dim, dim),
        "key_value_cov": (n_covs, dim, value_dim),
    }
    check_tensors(
        [
            *(Expected(name, given[name], shape) for name, shape in shapes.items()),
            *(Expected(f"sums of {name}", parts[name], (_PARTS, n_heads, *summed[name])) for name in _SUMMED),
        ]
    )
    pointers = {name: tensor.data_ptr() for name, tensor in (*given.items(), *parts.items())}
    return RoutedGradients(**pointers, parts=_PARTS, n_keys=n_keys)


# --- decode steps
# ---------------------------------------------------------------------------------------------------


class PreparedStep:
    """Decode steps over a key index that stays; queries, keys and values come with each step.

    A step takes a fraction of a millisecond, which laying out the key index again would double.
    """

    def __init__(self, index: KeyIndex, log_inverse: float, scale: float) -> None:
        self._made_of = (index, log_inverse, scale)
        self._call = index_call(index, log_inverse, scale, max(1, index.positions.shape[1]))
        n_heads = self._call.kv_heads
        self._visible, self._start, self._stop = ((ctypes.c_int32 * n_heads)() for _ in range(3))
        self._counts = (ctypes.c_int64 * 2)()
        self._call.length = 1
        for field, array in (("visible", self._visible), ("local_start", self._start), ("local_stop", self._stop)):
            setattr(self._call, field, ctypes.addressof(array))
        self._call.counts = ctypes.addressof(self._counts)
        self._rows: dict[str, tuple[tuple[object, ...], Rows]] = {}

    def __reduce__(self) -> tuple[type[PreparedStep], tuple[KeyIndex, float, float]]:
        """A copy is laid out anew: pointers of this one must not outlive its tensors."""
        return PreparedStep, self._made_of

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        n_clusters: int,
        local_start: int,
        far: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Attended, float]:
        """One query `[T, G, 1, D]` over keys and values `[B, Hkv, N, D]`, the newest being its own.

        Args:
            query: The query.
            key: All keys, or the local ones where there are `far` rows.
            value: The values of these keys.
            n_clusters: Clusters that are visible.
            local_start: Where the local keys begin.
            far: The keys and values before `local_start` as int8 rows (see `prescore.routed.int8_rows`).

        Returns:
            The result, and the far keys read by a query on average.
        """
        n_heads, heads_per_kv, length, _ = query.shape
        n_far = 0 if far is None else far[0].shape[2]
        _check_call(self._call, query, key, value, n_clusters, n_far)
        n_keys, value_dim = n_far + key.shape[2], value.shape[-1]
        n_covs = self._call.n_covs - self._call.n_spans
        if length != 1 or n_clusters < 1 or n_covs != 1 or not n_far <= local_start <= n_keys:
            raise ValueError(
                "a step must be one query that sees some clusters under one covariance, "
                f"got {length} queries, {n_clusters} clusters and local keys from {local_start} of {n_keys}"
            )
        for name, rows, local in zip(("key", "value"), far or (), (key, value), strict=False):
            wanted = (*local.shape[:2], n_far, row_size(local.shape[-1]))
            if rows.shape != wanted or rows.dtype != torch.uint8 or rows.stride(-1) != 1:
                raise ValueError(f"far {name} must be uint8 {wanted}, got {rows.dtype} {tuple(rows.shape)}")
            if rows.device.type != "cpu" or self._call.last_position >= n_far:
                raise ValueError(f"far {name} must hold position {self._call.last_position}, got {n_far} rows")
        output, lse, threshold = (
            empty(n_heads, heads_per_kv, 1, value_dim),
            empty(n_heads, heads_per_kv, 1),
            empty(n_heads, heads_per_kv, 1),
        )
        bounds = ((self._visible, n_clusters), (self._start, local_start - n_far), (self._stop, n_keys - n_far))
        for array, number in bounds:
            array[:] = [number] * n_heads
        self._counts[:] = [0, 0]
        call, self._call.n_query = self._call, heads_per_kv
        far = (key, value) if far is None else far
        rows_by_name = {"query": query, "key": key, "value": value, "far_key": far[0], "far_value": far[1]}
        for name, tensor in rows_by_name.items():
            made_for = (tensor.shape[:-2], tensor.stride(), tensor.dtype)
            known = self._rows.get(name)
            if known is None or known[0] != made_for:
                known = self._rows[name] = (made_for, rows_of(tensor))
            known[1].data = tensor.data_ptr()
            if name.startswith("far"):
                known[1].dim = call.dim if name == "far_key" else value_dim
            setattr(call, name, known[1])
        call.output, call.lse, call.threshold = output.data_ptr(), lse.data_ptr(), threshold.data_ptr()
        call_library("prescore_routed_forward", call)
        return Attended(output.to(value.dtype), lse), self._counts[1] / (n_heads * heads_per_kv)
