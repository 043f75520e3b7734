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

    starts: ctypes.Array[ctypes.c_int64]
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
        *((name, POINTER) for name in ("active", "place", "columns", "values", "value_columns", "norms")),
        ("each", SIZE),
        ("stride", SIZE),
        ("variance", POINTER),
        ("fourth", POINTER),
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
        real = torch.float32
        expected = {
            "columns": ((n_lanes, room // WIDTH, dim, WIDTH), real),
            "column_values": ((n_lanes, room, wide), real),
            "rows": ((n_lanes, n_nodes, leaf), torch.int32),
            "codes": ((n_lanes, n_nodes, leaf // WIDTH, dim // 8, WIDTH, 4), torch.uint8),
            "scales": ((n_lanes, n_nodes, leaf // WIDTH, 2, WIDTH), real),
            "spread": ((n_lanes, pools, dim, dim), real),
            "drift": ((n_lanes, pools, dim, wide), real),
        }
        for name, (shape, dtype) in expected.items():
            tensor = getattr(self, name)
            fits = tensor.shape == shape and tensor.is_contiguous() and tensor.device.type == "cpu"
            if not fits or tensor.dtype != dtype:
                got = f"{tuple(tensor.shape)} {tensor.dtype}"
                raise ValueError(f"{name} must be {shape} contiguous {dtype}, got {got}")
        if room % WIDTH or dim % WIDTH or wide % WIDTH or leaf % WIDTH or max(dim, wide) > MOST_DIM:
            raise ValueError(f"sizes must be multiples of {WIDTH}, got {room}, {dim}, {wide} and {leaf}")
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
    (_, value), (visible, first, stop), (output, lse, limit, counts) = rows, seen, results
    where = [rows_struct(t) for t in rows]
    problem = FarCall(
        query=query.data_ptr(),
        key=where[0],
        value=where[1],
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


def rows_struct(rows: Tensor) -> RowsStruct:
    """Where rows lie, with the number of numbers before the first row of each lane."""
    begins = [lane * rows.stride(0) for lane in range(rows.shape[0])]
    if rows.ndim == 4:
        begins = [begin + head * rows.stride(1) for begin in begins for head in range(rows.shape[1])]
    starts = (SIZE * len(begins))(*begins)
    found = RowsStruct(rows.data_ptr(), ctypes.addressof(starts), rows.stride(-2), TYPES[rows.dtype])
    found.starts = starts  # lives as long as what points to it
    return found


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
    _expect("query", query, each, dim, torch.float32)
    _expect("output", results[0], each, wide, torch.float32)
    for name, result in zip(("lse", "limit"), results[1:3], strict=True):
        _expect(name, result, each, 1, torch.float32)
    _expect("counts", results[3], (1, 1), 2, torch.long)
    for name, tensor in (("visible", visible), ("first", first), ("stop", stop)):
        if tensor is not None:
            _expect(name, tensor, each, 1, torch.int32)
    for name, tensor in zip(("key", "value"), rows, strict=True):
        lanes = tensor.shape[:-2].numel()
        if tensor.stride(-1) != 1 or tensor.dtype not in TYPES or lanes != n_lanes or tensor.shape[-2] != n_keys:
            raise ValueError(f"{name} must be rows of {n_lanes} lanes, got {tuple(tensor.shape)} {tensor.dtype}")
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


def _expect(name: str, tensor: Tensor, each: tuple[int, int], size: int, dtype: torch.dtype) -> None:
    """Refuse a tensor of another size or kind; it may have more dimensions than compiled code sees."""
    fits = tensor.numel() == each[0] * each[1] * size and tensor.is_contiguous() and tensor.device.type == "cpu"
    if not fits or tensor.dtype != dtype:
        wanted = f"{each[0]} x {each[1]} x {size} contiguous {dtype}"
        raise ValueError(f"{name} must be {wanted}, got {tuple(tensor.shape)} {tensor.dtype}")
