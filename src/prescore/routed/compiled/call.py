"""The one call of compiled code, with everything it may touch checked: nothing is checked again behind it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.ops.native import library
from prescore.routed.sources import View
from prescore.routed.stand_ins import MOST_KNOWN_GAIN

WIDTH = 16
"""Columns and keys that lie side by side."""
MOST_DIM = 256
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
POINTER, SIZE, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class RowsStruct(ctypes.Structure):
    """Rows of keys or values where they lie."""

    _fields_ = (("data", POINTER), ("at", POINTER), ("step", SIZE), ("type", SIZE))


_TABLES = ("columns", "column_values", "rows", "codes", "scales", "spread", "drift")
COUNTS = ("lanes", "n_query", "dim", "value_dim", "leaf", "sinks", "sink_room", "room", "node_room", "pools")


class FarCall(ctypes.Structure):
    """One call, as ops/native/routed.h has it."""

    _fields_ = (
        ("query", POINTER),
        ("key", RowsStruct),
        ("value", RowsStruct),
        *((name, POINTER) for name in ("visible", "first", "stop", *_TABLES)),
        *((name, SIZE) for name in (*COUNTS, "nodes_per_pool", "more")),
        *((name, REAL) for name in ("scale", "reach", "log_share", "most_gain", "margin")),
        *((name, POINTER) for name in ("output", "lse", "limit", "counts")),
    )


LEARNED = ("key", "value", "column_key", "column_value", "spread", "drift")
"""What the backward function keeps several sums of."""


class FarGradients(ctypes.Structure):
    """What the backward function reads and adds to, as ops/native/backward.c has it."""

    _fields_ = (
        *((name, POINTER) for name in ("grad", "product", "column_keys", "value_columns", "turned_drift")),
        *((name, POINTER) for name in ("query", "limit", *LEARNED)),
        ("parts", SIZE),
        ("n_keys", SIZE),
    )


class Samples(ctypes.Structure):
    """What the sampled function reads and writes besides, as ops/native/sampled.c has it."""

    _fields_ = (
        *((name, POINTER) for name in ("active", "aim", "place", "columns", "values", "value_columns", "norms")),
        *((name, POINTER) for name in ("coarse", "signs", "shadows")),
        *((name, SIZE) for name in ("each", "stride", "aims")),
        *((name, REAL) for name in ("allowed", "most_rows", "most_off")),
        *((name, POINTER) for name in ("variance", "fourth", "overlap", "further")),
    )


@dataclass(frozen=True, eq=False)
class Tables:
    """Sources in the layouts of compiled code; `room` columns, a multiple of 16, of which the first are sinks."""

    columns: Tensor
    column_values: Tensor
    rows: Tensor
    codes: Tensor
    scales: Tensor
    spread: Tensor
    drift: Tensor
    sinks: int
    sink_room: int
    row_stop: int


def run(
    name: str,
    query: Tensor,
    rows: tuple[Tensor, Tensor],
    tables: Tables,
    view: View,
    seen: tuple[Tensor, Tensor | None, Tensor | None],
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    extra: FarGradients | Samples | None = None,
    more: int = 0,
) -> None:
    """Call the library.

    Args:
        name: The function.
        query: `[T, n, D]`.
        rows: Keys and values, `[T, N, D]` or `[B, Hkv, N, D]`, numbers of a row side by side.
        tables: What was made of them.
        view: Its `search`, `scale` and `nodes_per_chunk`.
        seen: `[T, n]` int32: nodes that a query sees, first row and end of those it reads in any case.
        results: Output `[T, n, Dv]`, lse and limit `[T, n]`, and two counts, all written by the forward function.
        extra: For the backward and the sampled function.
        more: Columns that the latter needs behind those of the tables.
    """
    loaded = library.load()
    if loaded is None:
        raise RuntimeError("compiled code must be there to run, got none")
    _check(query, rows, tables, view, seen, results)
    (key, value), (visible, first, stop), (output, lse, limit, counts) = rows, seen, results
    starts = [starts_of(t) for t in rows]
    problem = FarCall(
        query=query.data_ptr(),
        key=rows_struct(key, starts[0]),
        value=rows_struct(value, starts[1]),
        visible=visible.data_ptr(),
        first=None if first is None else first.data_ptr(),
        stop=None if stop is None else stop.data_ptr(),
        **{name: getattr(tables, name).data_ptr() for name in _TABLES},
        lanes=query.shape[0],
        n_query=query.shape[1],
        dim=query.shape[2],
        value_dim=value.shape[-1],
        leaf=tables.rows.shape[2],
        sinks=tables.sinks,
        sink_room=tables.sink_room,
        room=tables.column_values.shape[1],
        node_room=tables.rows.shape[1],
        pools=tables.spread.shape[1],
        nodes_per_pool=view.nodes_per_chunk,
        more=more,
        scale=view.scale,
        reach=view.search.reach,
        log_share=view.search.log_share,
        most_gain=MOST_KNOWN_GAIN,
        margin=view.search.margin,
        output=output.data_ptr(),
        lse=lse.data_ptr(),
        limit=limit.data_ptr(),
        counts=counts.data_ptr(),
    )
    given = (problem,) if extra is None else (problem, extra)
    if getattr(loaded, name)(*(ctypes.byref(part) for part in given)):
        raise MemoryError("compiled attention needs more memory than there is")


def rows_struct(rows: Tensor, starts: Tensor) -> RowsStruct:
    """Where rows lie; `starts` must live as long as the result."""
    return RowsStruct(rows.data_ptr(), starts.data_ptr(), rows.stride(-2), TYPES[rows.dtype])


def starts_of(rows: Tensor) -> Tensor:
    """How many numbers lie before the first row of each lane."""
    starts = torch.arange(rows.shape[0]) * rows.stride(0)
    if rows.ndim == 4:
        starts = (starts[:, None] + torch.arange(rows.shape[1]) * rows.stride(1)).flatten()
    return starts


def _check(
    query: Tensor,
    rows: tuple[Tensor, Tensor],
    tables: Tables,
    view: View,
    seen: tuple[Tensor, Tensor | None, Tensor | None],
    results: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Refuse whatever compiled code could read or write outside of: it checks nothing itself."""
    n_lanes, n_query, dim = query.shape
    (key, value), (visible, *fixed), each = rows, seen, (n_lanes, n_query)
    wide, n_keys, (_, n_nodes, leaf) = value.shape[-1], key.shape[-2], tables.rows.shape
    room, pools = tables.column_values.shape[1], tables.spread.shape[1]
    real, small = torch.float32, torch.int32
    expected = [
        ("query", query, (n_lanes, n_query, dim), real),
        ("columns", tables.columns, (n_lanes, room // WIDTH, dim, WIDTH), real),
        ("column_values", tables.column_values, (n_lanes, room, wide), real),
        ("rows", tables.rows, (n_lanes, n_nodes, leaf), small),
        ("codes", tables.codes, (n_lanes, n_nodes, leaf // WIDTH, dim // 8, WIDTH, 4), torch.uint8),
        ("scales", tables.scales, (n_lanes, n_nodes, leaf // WIDTH, 2, WIDTH), real),
        ("spread", tables.spread, (n_lanes, pools, dim, dim), real),
        ("drift", tables.drift, (n_lanes, pools, dim, wide), real),
        ("visible", visible, each, small),
        *(("fixed rows", t, each, small) for t in fixed if t is not None),
        *zip(("output", "lse", "limit"), results, ((*each, wide), each, each), (real,) * 3, strict=False),
        ("counts", results[3], (2,), torch.long),
    ]
    for name, tensor, shape, dtype in expected:
        # a result may have more dimensions than compiled code sees
        fits = (
            tensor.numel() == torch.Size(shape).numel() and tensor.is_contiguous() and tensor.device.type == "cpu"
        )
        if not fits or tensor.dtype != dtype:
            raise ValueError(
                f"{name} must be {shape} contiguous {dtype}, got {tuple(tensor.shape)} {tensor.dtype}"
            )
    for name, tensor in zip(("key", "value"), rows, strict=True):
        lanes = tensor.shape[:-2].numel()
        if tensor.stride(-1) != 1 or tensor.dtype not in TYPES or lanes != n_lanes or tensor.shape[-2] != n_keys:
            raise ValueError(f"{name} must be rows of {n_lanes} lanes, got {tuple(tensor.shape)} {tensor.dtype}")
    if dim % WIDTH or wide % WIDTH or leaf % WIDTH or max(dim, wide) > MOST_DIM or key.shape[-1] != dim:
        raise ValueError(f"sizes must be multiples of {WIDTH}, got {dim}, {wide} and {leaf}")
    if not 0 <= tables.row_stop <= n_keys or tables.sink_room + n_nodes > room or tables.sinks > tables.sink_room:
        raise ValueError(f"tables must be of {n_keys} keys, got rows up to {tables.row_stop}")
    most = int(visible.max()) if visible.numel() else 0
    if not 0 <= int(visible.min() if visible.numel() else 0) <= most <= min(n_nodes, pools * view.nodes_per_chunk):
        raise ValueError(f"visible nodes must lie between 0 and {n_nodes}, got up to {most}")
    first, stop = fixed
    if (first is None) != (stop is None):
        raise ValueError("first and stop must be given together, got one of them")
    if first is not None and stop is not None and (int(first.min()) < 0 or int(stop.max()) > n_keys):
        raise ValueError(f"fixed rows must lie within {n_keys} keys, got up to {int(stop.max())}")
