"""The one call of compiled code, with everything it may touch checked: nothing is checked again behind it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.routed.compiled.buffers import CallSizes, GradientBuffers, SampleBuffers
from prescore.routed.compiled.checked import (
    POINTER,
    REAL,
    SIZE,
    WIDTH,
    Expected,
    RowsStruct,
    call_library,
    check_lanes,
    check_tensors,
    rows_struct,
    starts_of,
)
from prescore.routed.sources import View
from prescore.routed.stand_ins import MOST_KNOWN_GAIN

_TABLES = ("columns", "column_values", "rows", "codes", "scales", "spread", "drift")
COUNTS = ("lanes", "n_query", "dim", "value_dim", "leaf", "sinks", "sink_room", "room", "node_room", "pools")
SHARED = ("lanes", "n_query", "dim", "value_dim", "leaf", "room", "node_room", "pools")
"""Counts that `CallSizes` has."""


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
    extra: GradientBuffers | SampleBuffers | None = None,
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
    _check(query, rows, tables, view, seen, results)
    sizes = CallSizes(
        lanes=query.shape[0],
        n_query=query.shape[1],
        dim=query.shape[2],
        value_dim=rows[1].shape[-1],
        leaf=tables.rows.shape[2],
        room=tables.column_values.shape[1],
        node_room=tables.rows.shape[1],
        pools=tables.spread.shape[1],
        n_keys=rows[0].shape[-2],
        more=more,
    )
    given: tuple[ctypes.Structure, ...] = () if extra is None else (extra.checked(sizes),)
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
        **{name: getattr(sizes, name) for name in SHARED},
        sinks=tables.sinks,
        sink_room=tables.sink_room,
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
    call_library(name, problem, *given)


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
    small = torch.int32
    expected = [
        Expected("query", query, (n_lanes, n_query, dim)),
        Expected("columns", tables.columns, (n_lanes, room // WIDTH, dim, WIDTH)),
        Expected("column_values", tables.column_values, (n_lanes, room, wide)),
        Expected("rows", tables.rows, (n_lanes, n_nodes, leaf), small),
        Expected("codes", tables.codes, (n_lanes, n_nodes, leaf // WIDTH, dim // 8, WIDTH, 4), torch.uint8),
        Expected("scales", tables.scales, (n_lanes, n_nodes, leaf // WIDTH, 2, WIDTH)),
        Expected("spread", tables.spread, (n_lanes, pools, dim, dim)),
        Expected("drift", tables.drift, (n_lanes, pools, dim, wide)),
        Expected("visible", visible, each, small),
        *(Expected("fixed rows", t, each, small) for t in fixed if t is not None),
        Expected("output", results[0], (*each, wide)),
        Expected("lse", results[1], each),
        Expected("limit", results[2], each),
        Expected("counts", results[3], (2,), torch.long),
    ]
    check_tensors(expected)
    check_lanes(key, value, n_lanes, leaf)
    if key.shape[-1] != dim or room % WIDTH or tables.sink_room % WIDTH:
        raise ValueError(f"columns must be {WIDTH} side by side of {dim} numbers, got {room} of {key.shape[-1]}")
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
