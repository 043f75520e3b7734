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
    """Sources in the layouts of compiled code; columns, a multiple of 16, of which the first are sinks.

    They fit one another: what does not is refused when it is made, and not looked at again.
    """

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

    def __post_init__(self) -> None:
        n_lanes, n_nodes, leaf = self.rows.shape
        (room, wide), (pools, dim) = self.column_values.shape[1:], self.spread.shape[1:3]
        check_tensors(
            [
                Expected("columns", self.columns, (n_lanes, room // WIDTH, dim, WIDTH)),
                Expected("column_values", self.column_values, (n_lanes, room, wide)),
                Expected("rows", self.rows, (n_lanes, n_nodes, leaf), torch.int32),
                Expected("codes", self.codes, (n_lanes, n_nodes, leaf // WIDTH, dim // 8, WIDTH, 4), torch.uint8),
                Expected("scales", self.scales, (n_lanes, n_nodes, leaf // WIDTH, 2, WIDTH)),
                Expected("spread", self.spread, (n_lanes, pools, dim, dim)),
                Expected("drift", self.drift, (n_lanes, pools, dim, wide)),
            ]
        )
        if room % WIDTH or self.sink_room % WIDTH:
            raise ValueError(
                f"columns must be {WIDTH} side by side, got {room}, of which {self.sink_room} for sinks"
            )
        if not 0 <= self.sinks <= self.sink_room or self.sink_room + n_nodes > room or self.row_stop < 0:
            raise ValueError(f"columns must hold {self.sinks} sinks and {n_nodes} nodes, got {room}")

    @property
    def nodes(self) -> int:
        """Nodes of each lane."""
        return self.rows.shape[1]

    @property
    def pools(self) -> int:
        """Covariances of each lane."""
        return self.spread.shape[1]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Lanes, and the numbers of a key and of a value."""
        return self.rows.shape[0], self.spread.shape[2], self.column_values.shape[2]


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
    (visible, first, stop), (output, lse, limit, counts) = seen, results
    where = [rows_struct(t) for t in rows]
    problem = FarCall(
        query=query.data_ptr(),
        key=where[0],
        value=where[1],
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
    (key, value), (visible, first, stop), each = rows, seen, (n_lanes, n_query)
    wide, n_keys = value.shape[-1], key.shape[-2]
    numbered = (("visible", visible), ("first", first), ("stop", stop))
    expected = [
        Expected("query", query, (*each, dim)),
        Expected("output", results[0], (*each, wide)),
        Expected("lse", results[1], each),
        Expected("limit", results[2], each),
        Expected("counts", results[3], (2,), torch.long),
        *(Expected(name, tensor, each, torch.int32) for name, tensor in numbered if tensor is not None),
    ]
    check_tensors(expected)
    check_lanes(key, value, n_lanes, tables.rows.shape[2])
    if tables.sizes != (n_lanes, dim, wide) or key.shape[-1] != dim:
        raise ValueError(f"tables must be of {n_lanes} lanes of {dim} and {wide} numbers, got {tables.sizes}")
    if tables.row_stop > n_keys:
        raise ValueError(f"tables must be of {n_keys} keys, got rows up to {tables.row_stop}")
    least, most = (int(t) for t in torch.aminmax(visible)) if visible.numel() else (0, 0)
    if not 0 <= least <= most <= min(tables.nodes, tables.pools * view.nodes_per_chunk):
        raise ValueError(f"visible nodes must lie between 0 and {tables.nodes}, got {least} to {most}")
    if (first is None) != (stop is None):
        raise ValueError("first and stop must be given together, got one of them")
    if first is not None and stop is not None and (int(first.min()) < 0 or int(stop.max()) > n_keys):
        raise ValueError(f"fixed rows must lie within {n_keys} keys, got up to {int(stop.max())}")
