"""What every call of compiled code goes through: tensors are what it takes them for, or the call is refused."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.config import Routed
from prescore.ops.backend import Backend
from prescore.ops.native import library
from prescore.ops.native.library import NO_LEVEL
from prescore.routed.draws import (
    AIMS,
    BELOW,
    MARGIN,
    MOST_OFF,
    MOST_ROWS,
    SHADOWS,
    STEP,
    code_units,
    projection,
    usual_distance,
)
from prescore.routed.index import Codes, Nodes, take_rows
from prescore.routed.layout import Layout, make_layout
from prescore.routed.reference import MOST_KNOWN_GAIN, SINK_PART, Search
from prescore.routed.sources import Draws, Estimate, Sources, View
from prescore.routed.tree import FIT_SIZE
from prescore.types import Attended

WIDTH = 16
"""Columns and keys that lie side by side."""
MOST_DIM = 256
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
POINTER, SIZE, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class RowsStruct(ctypes.Structure):
    """Rows of queries, keys or values where they lie."""

    starts: ctypes.Array[ctypes.c_int64]
    _fields_ = (("data", POINTER), ("at", POINTER), ("step", SIZE), ("type", SIZE))


class Expected(NamedTuple):
    """A tensor that compiled code reads or writes as so many numbers of a type, one after the other."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


def real_numbers(*shape: int) -> Tensor:
    """Room for what compiled code writes; torch's default dtype and device have no say in it."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def check_tensors(expected: Sequence[Expected]) -> None:
    """Refuse a tensor that compiled code could read or write outside of."""
    for name, tensor, shape, dtype in expected:
        # a result may have more dimensions than compiled code sees
        fits = (
            tensor.numel() == torch.Size(shape).numel() and tensor.is_contiguous() and tensor.device.type == "cpu"
        )
        if not fits or tensor.dtype != dtype:
            raise ValueError(
                f"{name} must be {shape} contiguous {dtype}, got {tuple(tensor.shape)} {tensor.dtype}"
            )


def check_lanes(key: Tensor, value: Tensor, n_lanes: int, leaf: int) -> None:
    """Refuse keys and values that compiled code does not know, or not side by side."""
    dim, wide = key.shape[-1], value.shape[-1]
    check_row_tensor("key", key, n_lanes)
    check_row_tensor("value", value, n_lanes)
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"value must have as many rows as key, {key.shape[-2]}, got {value.shape[-2]}")
    if dim % WIDTH or wide % WIDTH or leaf % WIDTH or not 0 < min(dim, wide) <= max(dim, wide) <= MOST_DIM:
        raise ValueError(f"sizes must be multiples of {WIDTH}, got {dim}, {wide} and {leaf}")


def check_row_tensor(name: str, rows: Tensor, n_lanes: int) -> None:
    """Refuse rows of numbers that compiled code does not know, or not side by side."""
    known = rows.dtype in TYPES and rows.device.type == "cpu" and not rows.is_neg()
    if rows.stride(-1) != 1 or not known or rows.shape[:-2].numel() != n_lanes:
        raise ValueError(
            f"{name} must be rows of {n_lanes} lanes, their numbers side by side, "
            f"got {tuple(rows.shape)} {rows.dtype} with strides {rows.stride()}"
        )


def call_library(name: str, *structures: ctypes.Structure) -> None:
    """Call a function whose arguments were checked; their tensors must live until it returns."""
    loaded = library.load()
    if loaded is None:
        raise RuntimeError("compiled code must be there to run, got none")
    if getattr(loaded, name)(*(ctypes.byref(structure) for structure in structures)):
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


# What the backward and the sampled function read and write besides a call's own, and what it must look like.


class CallSizes(NamedTuple):
    """Of one call."""

    lanes: int
    n_query: int
    dim: int
    value_dim: int
    leaf: int
    room: int
    node_room: int
    pools: int
    n_keys: int
    more: int


_LEARNED = ("key", "value", "column_key", "column_value", "spread", "drift")
_GIVEN = ("grad", "product", "column_keys", "value_columns", "turned_drift", "query", "limit")


class FarGradients(ctypes.Structure):
    """What the backward function reads and adds to, as ops/native/backward.c has it."""

    _fields_ = (
        *((name, POINTER) for name in (*_GIVEN, *_LEARNED)),
        ("parts", SIZE),
        ("n_keys", SIZE),
    )


class Samples(ctypes.Structure):
    """What the sampled function reads and writes besides, as ops/native/sampled.h has it."""

    _fields_ = (
        *((name, POINTER) for name in ("active", "aim", "place", "columns", "values", "apart", "usual")),
        *((name, POINTER) for name in ("coarse", "signs", "shadows")),
        *((name, SIZE) for name in ("each", "stride", "aims")),
        *((name, REAL) for name in ("step", "allowed", "most_rows", "most_off", "margin", "below")),
        *((name, POINTER) for name in ("variance", "fourth", "overlap", "further")),
    )


@dataclass(frozen=True, eq=False)
class GradientBuffers:
    """Tensors of the backward function; `learned` are sums that are kept apart, the first dimension counts them.

    Attributes:
        grad, product: Of the output, and its product with the output.
        column_keys, value_columns, turned_drift: Tables, the other way round.
        query, limit: Gradients, added to and written.
        learned: Gradients of keys, values, columns' keys and values, spread and drift, added to.
    """

    grad: Tensor
    product: Tensor
    column_keys: Tensor
    value_columns: Tensor
    turned_drift: Tensor
    query: Tensor
    limit: Tensor
    learned: tuple[Tensor, ...]

    def checked(self, sizes: CallSizes) -> FarGradients:
        """As compiled code takes it; refused where it could read or write outside."""
        lanes, n_query, dim, wide, _, room, _, pools, n_keys, _ = sizes
        each, n_parts = (lanes, n_query), self.learned[0].shape[0]
        shapes = (
            (*each, wide),
            each,
            (lanes, room, dim),
            (lanes, room // WIDTH, wide, WIDTH),
            (lanes, pools, wide, dim),
            (*each, dim),
            each,
        )
        sums = ((n_keys, dim), (n_keys, wide), (room, dim), (room, wide), (pools, dim, dim), (pools, dim, wide))
        expected = [
            *(Expected(name, getattr(self, name), shape) for name, shape in zip(_GIVEN, shapes, strict=True)),
            *(
                Expected(f"sums of {name}", tensor, (n_parts, lanes, *shape))
                for name, tensor, shape in zip(_LEARNED, self.learned, sums, strict=True)
            ),
        ]
        check_tensors(expected)
        pointers = {name: own.tensor.data_ptr() for name, own in zip((*_GIVEN, *_LEARNED), expected, strict=True)}
        return FarGradients(**pointers, parts=n_parts, n_keys=n_keys)


@dataclass(frozen=True, eq=False)
class SampleBuffers:
    """Tensors of the sampled function: who takes part, which keys are drawn, and the spread of their terms.

    Attributes:
        active, aim: Queries that take part, and the limits they search with.
        place, columns, values: Which keys are drawn, and those in the layouts of tables.
        apart, usual: Squares of their values' distances from their node's mean, and the mean up to each node.
        coarse: What a unit of the codes is worth.
        signs, shadows: Random projections, and what values differ from their node's mean, and the mean, in them.
        variance, fourth, overlap, further: Written.
        allowed: Square of the relative error that is aimed at.
    """

    active: Tensor
    aim: Tensor
    place: Tensor
    columns: Tensor
    values: Tensor
    apart: Tensor
    usual: Tensor
    coarse: Tensor
    signs: Tensor
    shadows: Tensor
    variance: Tensor
    fourth: Tensor
    overlap: Tensor
    further: Tensor
    allowed: float

    @property
    def more(self) -> int:
        """Columns behind those of the tables."""
        return self.values.shape[1]

    def checked(self, sizes: CallSizes) -> Samples:
        """As compiled code takes it; refused where it could read or write outside."""
        lanes, more, each = sizes.lanes, sizes.more, sizes.leaf // WIDTH
        rows, blocks = (lanes, sizes.n_query), (lanes, more // WIDTH)
        expected = [
            Expected("active", self.active, rows, torch.uint8),
            Expected("aim", self.aim, rows),
            Expected("place", self.place, (sizes.node_room,), torch.int32),
            Expected("columns", self.columns, (*blocks, sizes.dim, WIDTH)),
            Expected("values", self.values, (lanes, more, sizes.value_dim)),
            Expected("apart", self.apart, (lanes, more)),
            Expected("usual", self.usual, (lanes, sizes.node_room)),
            Expected("coarse", self.coarse, (lanes, sizes.node_room, 2)),
            Expected("signs", self.signs, (SHADOWS, sizes.value_dim)),
            Expected("shadows", self.shadows, (*blocks, 2 * SHADOWS, WIDTH)),
            *(Expected(name, getattr(self, name), rows) for name in ("variance", "fourth", "overlap")),
            Expected("further", self.further, rows, torch.uint8),
        ]
        check_tensors(expected)
        if more % WIDTH or more < sizes.node_room * each:
            raise ValueError(f"samples must have {sizes.node_room} times {each} columns, got {more}")
        if self.place.numel() and not 0 <= int(self.place.min()) <= int(self.place.max()) < WIDTH:
            raise ValueError(f"place must lie between 0 and {WIDTH - 1}, got up to {int(self.place.max())}")
        pointers = {own.name: own.tensor.data_ptr() for own in expected}
        chosen = {"aims": AIMS, "step": STEP, "most_rows": MOST_ROWS, "most_off": MOST_OFF, "below": BELOW}
        return Samples(**pointers, each=each, stride=WIDTH, allowed=self.allowed, margin=MARGIN, **chosen)


# The one call of compiled code, with everything it may touch checked: nothing is checked again behind it.

_TABLES = ("columns", "column_values", "rows", "codes", "scales", "odd_codes", "odd_scales", "spread", "drift")
_RESULTS = ("output", "lse", "limit", "counts")
_SIZES = (
    "lanes",
    "n_query",
    "length",
    "dim",
    "value_dim",
    "leaf",
    "sinks",
    "sink_room",
    "room",
    "node_room",
    "pools",
)
_OF_TABLES = ("lanes", "dim", "value_dim", "leaf", "room", "node_room", "pools")
"""Sizes that `CallSizes` has of them."""


class FarCall(ctypes.Structure):
    """One call, as ops/native/routed.h has it."""

    _fields_ = (
        *((name, RowsStruct) for name in ("query", "key", "value")),
        *((name, POINTER) for name in ("visible", "first", "stop", *_TABLES)),
        *((name, SIZE) for name in (*_SIZES, "nodes_per_pool", "more")),
        *((name, REAL) for name in ("scale", "reach", "log_share", "most_known_gain", "log_sink_part")),
        *((name, POINTER) for name in _RESULTS),
    )


@dataclass(frozen=True, eq=False)
class Tables:
    """Sources in the layouts of compiled code; columns, a multiple of 16, of which the first are sinks.

    Codes and scales of each node's outlier keys, its first sixteen, are there twice: every query compares them, and
    side by side they stay in cache.

    They fit one another: what does not is refused when it is made, and not looked at again.
    """

    columns: Tensor
    column_values: Tensor
    rows: Tensor
    codes: Tensor
    scales: Tensor
    odd_codes: Tensor
    odd_scales: Tensor
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
                Expected("odd_codes", self.odd_codes, (n_lanes, n_nodes, dim // 8, WIDTH, 4), torch.uint8),
                Expected("odd_scales", self.odd_scales, (n_lanes, n_nodes, 2, WIDTH)),
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
    def pointers(self) -> dict[str, int]:
        """Where its tensors lie, by the names of `FarCall`."""
        return {name: getattr(self, name).data_ptr() for name in _TABLES}

    @property
    def counts(self) -> dict[str, int]:
        """What there is of everything, likewise."""
        lanes, dim, wide = self.sizes
        return {
            "lanes": lanes,
            "dim": dim,
            "value_dim": wide,
            "leaf": self.rows.shape[2],
            "sinks": self.sinks,
            "sink_room": self.sink_room,
            "room": self.column_values.shape[1],
            "node_room": self.nodes,
            "pools": self.pools,
        }

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


@dataclass(frozen=True, eq=False)
class FarProblem:
    """One call of compiled code.

    Attributes:
        query: `[T, G, n, D]`, numbers of a row side by side.
        key, value: `[T, N, D]` or `[B, Hkv, N, D]`, likewise.
        tables: What was made of them.
        view: What each query sees and looks for.
        output, lse, limit: `[T, G, n, Dv]` and `[T, G, n]`, written by the forward function.
        counts: Keys searched, rows read, added to.
        reads_near: Whether what the view reads in any case is read here; else output and lse hold it.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    tables: Tables
    view: View
    output: Tensor
    lse: Tensor
    limit: Tensor
    counts: Tensor
    reads_near: bool = False

    def check(self) -> None:
        """Refuse whatever compiled code could read or write outside of: it checks nothing itself."""
        n_lanes, group, length, dim = self.query.shape
        tables, view, wide, n_keys = self.tables, self.view, self.value.shape[-1], self.key.shape[-2]
        each, places = (n_lanes, group, length), (n_lanes, length)
        seen = {"visible": view.visible, **({"first": view.first, "stop": view.stop} if self.reads_near else {})}
        check_tensors(
            [
                Expected("output", self.output, (*each, wide)),
                Expected("lse", self.lse, each),
                Expected("limit", self.limit, each),
                Expected("counts", self.counts, (2,), torch.long),
                *(Expected(name, tensor, places, torch.int32) for name, tensor in seen.items()),
            ]
        )
        check_row_tensor("query", self.query, n_lanes * group)
        check_lanes(self.key, self.value, n_lanes, tables.rows.shape[2])
        if tables.sizes != (n_lanes, dim, wide) or self.key.shape[-1] != dim:
            raise ValueError(f"tables must be of {n_lanes} lanes of {dim} and {wide} numbers, got {tables.sizes}")
        if tables.row_stop > n_keys:
            raise ValueError(f"tables must be of {n_keys} keys, got rows up to {tables.row_stop}")
        least, most = _range(view.visible)
        if not 0 <= least <= most <= min(tables.nodes, tables.pools * view.nodes_per_pool):
            raise ValueError(f"visible nodes must lie between 0 and {tables.nodes}, got {least} to {most}")
        if self.reads_near and (_range(view.first)[0] < 0 or _range(view.stop)[1] > n_keys):
            begin, end = _range(view.first)[0], _range(view.stop)[1]
            raise ValueError(f"near rows must lie within {n_keys} keys, got {begin} to {end}")

    def sizes(self, more: int) -> CallSizes:
        """What there is of everything; `more` columns behind those of the tables."""
        counts = self.tables.counts
        return CallSizes(
            n_query=self.query.shape[1] * self.query.shape[2],
            n_keys=self.key.shape[-2],
            more=more,
            **{name: counts[name] for name in _OF_TABLES},
        )


def _range(numbers: Tensor) -> tuple[int, int]:
    """Least and most; 0 where there are none."""
    if not numbers.numel():
        return 0, 0
    least, most = torch.aminmax(numbers)
    return int(least), int(most)


def run(name: str, problem: FarProblem, extra: GradientBuffers | SampleBuffers | None = None) -> None:
    """Call a function of the library; `extra` is for the backward and the sampled one."""
    problem.check()
    sizes = problem.sizes(extra.more if isinstance(extra, SampleBuffers) else 0)
    given: tuple[ctypes.Structure, ...] = () if extra is None else (extra.checked(sizes),)
    view, tables = problem.view, problem.tables
    near = (view.first.data_ptr(), view.stop.data_ptr()) if problem.reads_near else (None, None)
    where = [rows_struct(t) for t in (problem.query, problem.key, problem.value)]
    call = FarCall(
        query=where[0],
        key=where[1],
        value=where[2],
        visible=view.visible.data_ptr(),
        first=near[0],
        stop=near[1],
        **tables.pointers,
        **{name: getattr(problem, name).data_ptr() for name in _RESULTS},
        **tables.counts,
        n_query=sizes.n_query,
        length=problem.query.shape[2],
        more=sizes.more,
        nodes_per_pool=view.nodes_per_pool,
        scale=view.scale,
        reach=view.search.reach,
        log_share=view.search.log_share,
        most_known_gain=MOST_KNOWN_GAIN,
        log_sink_part=math.log(SINK_PART),
    )
    call_library(name, call, *given)


# Routed attention of some lanes in compiled code, forward and backward.
#
# Sources become the layouts of ops/native/routed.h: columns (sinks, then nodes) sixteen side by side, codes
# likewise. Queries, keys and values are read where they lie.

_PARTS = 4
"""Sums of gradients that are kept apart, for as many threads; a constant, so that results depend on no machine."""


def can_run(query: Tensor, sources: Sources, view: View) -> bool:
    """Whether compiled code can run a call: all else is plain torch's."""
    level = level_for(query, sources.value.shape[-1], sources.rows.shape[2], view.backend)
    return level != library.NO_LEVEL


def unsupported(query: Tensor, value_dim: int, config: Routed) -> list[str]:
    """Reasons why native code cannot run a call; empty means it can."""
    reasons = []
    if query.device.type != "cpu":
        reasons.append(f"it runs on CPU tensors, got {query.device}")
    if query.dtype not in TYPES:
        reasons.append(f"it knows {', '.join(str(dtype) for dtype in TYPES)}, got {query.dtype}")
    for name, dim in (("head dimension", query.shape[-1]), ("value dimension", value_dim)):
        if dim % WIDTH or not 0 < dim <= MOST_DIM:
            reasons.append(f"the {name} must be a multiple of {WIDTH} up to {MOST_DIM}, got {dim}")
    size = make_layout(1, 1, causal=True, config=config).leaf
    if size % WIDTH:
        reasons.append(f"clusters must have a multiple of {WIDTH} keys, got {size}")
    if library.loaded_level() == library.NO_LEVEL:
        reasons.append(library.describe_native())
    return reasons


def level_for(rows: Tensor, value_dim: int, leaf: int, backend: Backend) -> str:
    """The level of compiled code that runs calls of such queries or keys; `none` = plain torch does."""
    known = (
        backend.name != "plain"
        and backend.dropout is None
        and rows.device.type == "cpu"
        and rows.dtype in TYPES
        and all(dim % WIDTH == 0 and 0 < dim <= MOST_DIM for dim in (rows.shape[-1], value_dim))
        and leaf % WIDTH == 0
    )
    return library.loaded_level() if known else library.NO_LEVEL


def attend_compiled(query: Tensor, sources: Sources, view: View) -> tuple[Attended, Tensor, Tensor]:
    """All that queries `[T, G, n, D]` read; also each query's limit, and counts."""
    whole, limit, counts = _results(query, sources)
    tables = make_tables(sources)
    problem = FarProblem(query, sources.key, sources.value, tables, view, *whole, limit, counts, reads_near=True)
    run("prescore_routed_forward", problem)
    return whole, limit, counts


def attend_near_compiled(query: Tensor, sources: Sources, view: View) -> Attended:
    """What queries `[T, G, n, D]` read in any case, beside the sinks."""
    near, limit, counts = _results(query, sources)
    tables = make_tables(sources)
    problem = FarProblem(query, sources.key, sources.value, tables, view, *near, limit, counts, reads_near=True)
    run("prescore_routed_near", problem)
    return near


def _results(query: Tensor, sources: Sources) -> tuple[Attended, Tensor, Tensor]:
    """Room for outputs and lse, for limits (infinite where nothing is far), and for counts."""
    shape = query.shape[:3]
    whole = Attended(real_numbers(*shape, sources.value.shape[-1]), real_numbers(*shape))
    return whole, real_numbers(*shape).fill_(torch.inf), torch.zeros(2, dtype=torch.long, device="cpu")


def attend_compiled_backward(
    grad: Tensor, query: Tensor, sources: Sources, view: View, merged: Attended, limit: Tensor, sums: list[Tensor]
) -> Tensor:
    """Add the gradients of the far part to `sums`, of the query and the learned sources.

    Returns:
        `[T, G, Q]`, the gradient of each query's limit, which the near part has a share in.
    """
    tables = make_tables(sources)
    counts = torch.zeros(2, dtype=torch.long, device="cpu")
    grads = grad.to(torch.float32).contiguous()
    product = (grads * merged.output).sum(-1)
    column_keys = tables.columns.transpose(2, 3).flatten(1, 2).contiguous()
    value_columns = tables.column_values.unflatten(1, (-1, WIDTH)).transpose(2, 3).contiguous()
    turned_drift = tables.drift.transpose(2, 3).contiguous()
    grad_limit = torch.zeros_like(limit)
    like = (sources.key, sources.value, column_keys, tables.column_values, tables.spread, tables.drift)
    parts = tuple(real_numbers(_PARTS, *t.shape).zero_() for t in like)
    more = GradientBuffers(grads, product, column_keys, value_columns, turned_drift, sums[0], grad_limit, parts)
    # the output is not looked at
    problem = FarProblem(query, sources.key, sources.value, tables, view, grads, merged.lse, limit, counts)
    run("prescore_routed_backward", problem, more)
    for total, part in zip(sums[1:9], _learned(parts, tables, sources), strict=True):
        total.add_(part)
    return grad_limit


def _learned(parts: tuple[Tensor, ...], tables: Tables, sources: Sources) -> tuple[Tensor, ...]:
    """Gradients of the learned sources, from the sums that were kept apart."""
    key, value, column_key, column_value, spread, drift = (part.sum(0) for part in parts)
    sinks = slice(0, tables.sinks)
    nodes = slice(tables.sink_room, tables.sink_room + sources.node_key.shape[1])
    columns = (part[:, own] for own in (sinks, nodes) for part in (column_key, column_value))
    return key, value, *columns, spread, drift


def make_tables(sources: Sources) -> Tables:
    """Columns and codes, sixteen side by side."""
    n_sinks, n_nodes = sources.sink_key.shape[1], sources.node_key.shape[1]
    sink_room = -(-n_sinks // WIDTH) * WIDTH
    fill = -n_nodes % WIDTH

    def columns(sinks: Tensor, nodes: Tensor) -> Tensor:
        return torch.cat((pad(sinks.float(), (0, 0, 0, sink_room - n_sinks)), pad(nodes, (0, 0, 0, fill))), dim=1)

    keys = columns(sources.sink_key.detach(), sources.node_key.detach())
    codes = sources.packed if sources.packed.ndim == 6 else side_by_side(sources.packed)
    scales = _scales_side_by_side(sources.scales)
    return Tables(
        columns=keys.unflatten(1, (-1, WIDTH)).transpose(2, 3).contiguous(),
        column_values=columns(sources.sink_value.detach(), sources.node_value.detach()),
        rows=sources.rows.to(torch.int32),
        codes=codes,
        scales=scales,
        odd_codes=codes[:, :, 0].contiguous(),
        odd_scales=scales[:, :, 0].contiguous(),
        spread=sources.spread.contiguous(),
        drift=sources.drift.contiguous(),
        sinks=n_sinks,
        sink_room=sink_room,
        row_stop=int(sources.rows.max()) + 1 if sources.rows.numel() else 0,
    )


def _scales_side_by_side(scales: Tensor) -> Tensor:
    """Scales `[T, M, L, 2]` -> `[T, M, L / 16, 2, 16]`; those of compiled nodes are so already."""
    if scales.ndim == 5:
        return scales
    blocks: Tensor = scales.unflatten(2, (-1, WIDTH)).transpose(3, 4).contiguous()
    return blocks


def side_by_side(packed: Tensor) -> Tensor:
    """Codes `[T, M, L, D / 2]` of keys -> `[T, M, L / 16, D / 8, 16, 4]`."""
    blocks: Tensor = packed.unflatten(2, (-1, WIDTH)).unflatten(4, (-1, 4)).transpose(3, 4).contiguous()
    return blocks


# Nodes of chunks in compiled code, their codes already in its layout.


class NodeCall(ctypes.Structure):
    """What is read and made, as ops/native/nodes.c has it."""

    _fields_ = (
        ("key", RowsStruct),
        ("value", RowsStruct),
        *((name, SIZE) for name in ("lanes", "begin", "chunks", "chunk", "levels", "leaf", "dim", "value_dim")),
        ("fit_size", SIZE),
        *((name, POINTER) for name in ("rows", "node_key", "node_value", "codes", "scales", "spread", "drift")),
    )


def can_build(key: Tensor, value: Tensor, layout: Layout, backend: Backend) -> bool:
    """Whether compiled code makes the same nodes, and no gradient is to reach them."""
    learned = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
    # the tree takes another way for a few points of many dimensions
    few = layout.levels > 0 and 2 * (layout.chunk >> (layout.levels - 1)) <= key.shape[-1]
    return not learned and not few and level_for(key, value.shape[-1], layout.leaf, backend) != NO_LEVEL


def build_nodes_compiled(key: Tensor, value: Tensor, layout: Layout, begin: int, n_chunks: int) -> Nodes:
    """Nodes of `n_chunks` chunks from `begin` on, as `build_nodes`; keys `[T, N, D]` or `[B, Hkv, N, D]`."""
    n_lanes, n_keys, dim, wide = key.shape[:-2].numel(), key.shape[-2], key.shape[-1], value.shape[-1]
    n_nodes, leaf = n_chunks * layout.nodes_per_chunk, layout.leaf
    check_lanes(key, value, n_lanes, leaf)
    if begin < 0 or begin + n_chunks * layout.chunk > n_keys or layout.chunk != leaf << layout.levels:
        raise ValueError(f"chunks must lie within {n_keys} keys, got {n_chunks} from {begin} on")
    rows = torch.empty(n_lanes, n_nodes, leaf, dtype=torch.int32, device="cpu")
    means = [real_numbers(n_lanes, n_nodes, size) for size in (dim, wide)]
    codes = torch.empty(n_lanes, n_nodes, leaf // WIDTH, dim // 8, WIDTH, 4, dtype=torch.uint8, device="cpu")
    scales = real_numbers(n_lanes, n_nodes, leaf // WIDTH, 2, WIDTH)
    spread, drift = (real_numbers(n_lanes, n_chunks, dim, size) for size in (dim, wide))
    where = [rows_struct(t) for t in (key, value)]
    made = (rows, *means, codes, scales, spread, drift)
    names = ("rows", "node_key", "node_value", "codes", "scales", "spread", "drift")
    call = NodeCall(
        key=where[0],
        value=where[1],
        lanes=n_lanes,
        begin=begin,
        chunks=n_chunks,
        chunk=layout.chunk,
        levels=layout.levels,
        leaf=leaf,
        dim=dim,
        value_dim=wide,
        fit_size=FIT_SIZE,
        **{name: t.data_ptr() for name, t in zip(names, made, strict=True)},
    )
    call_library("prescore_build_nodes", call)
    return Nodes(rows, means[0], means[1], Codes(codes, scales), spread, drift)


# Single decode steps in compiled code: a call whose tables are checked once, and stay where they are.
#
# A step takes a fraction of a millisecond, which looking at everything again would double.


class PreparedStep:
    """Steps over nodes that stay: queries, keys and values come with each of them.

    Args:
        tables: The nodes, with one covariance for all of them.
        search: What is looked for.
        scale: Factor of the logits.
    """

    def __init__(self, tables: Tables, search: Search, scale: float) -> None:
        self._tables, n_lanes = tables, tables.rows.shape[0]
        self._visible, self._first, self._stop = ((ctypes.c_int32 * n_lanes)() for _ in range(3))
        self._counts = (ctypes.c_int64 * 2)()
        self._call = FarCall(
            visible=ctypes.addressof(self._visible),
            first=ctypes.addressof(self._first),
            stop=ctypes.addressof(self._stop),
            counts=ctypes.addressof(self._counts),
            **tables.pointers,
            **tables.counts,
            length=1,
            nodes_per_pool=max(1, tables.nodes),
            scale=scale,
            reach=search.reach,
            log_share=search.log_share,
            most_known_gain=MOST_KNOWN_GAIN,
            log_sink_part=math.log(SINK_PART),
        )

    def attend(
        self, query: Tensor, rows: tuple[Tensor, Tensor], n_nodes: int, first: int
    ) -> tuple[Attended, float]:
        """One query `[T, G, 1, D]` over keys and values `[B, Hkv, N, D]`, the newest being its own.

        Args:
            query: Of every head.
            rows: Keys and values.
            n_nodes: Nodes that it sees.
            first: From which row on it reads everything.

        Returns:
            The result, and the rows found by a query on average.
        """
        (key, value), (n_lanes, group) = rows, query.shape[:2]
        self._check(query, key, value, n_nodes, first)
        output, lse, limit = (real_numbers(n_lanes, group, 1, *more) for more in ((value.shape[-1],), (), ()))
        for numbers, number in ((self._visible, n_nodes), (self._first, first), (self._stop, key.shape[2])):
            numbers[:] = [number] * n_lanes
        self._counts[:] = [0, 0]
        call, where = self._call, [rows_struct(t) for t in (query, key, value)]
        call.query, call.key, call.value = where
        call.n_query = group
        call.output, call.lse, call.limit = output.data_ptr(), lse.data_ptr(), limit.data_ptr()
        call_library("prescore_routed_forward", call)
        return Attended(output.to(value.dtype), lse), self._counts[1] / (n_lanes * group)

    def _check(self, query: Tensor, key: Tensor, value: Tensor, n_nodes: int, first: int) -> None:
        """Refuse whatever compiled code could read outside of: it checks nothing itself."""
        tables, n_keys = self._tables, key.shape[-2]
        n_lanes, dim, wide = tables.sizes
        check_row_tensor("query", query, n_lanes * query.shape[1])
        check_lanes(key, value, n_lanes, tables.rows.shape[2])
        sizes = (query.shape[0], query.shape[2], query.shape[-1], key.shape[-1], value.shape[-1])
        if sizes != (n_lanes, 1, dim, dim, wide):
            raise ValueError(f"a step must be of {n_lanes} lanes of {dim} and {wide} numbers, got {sizes}")
        if tables.row_stop > n_keys:
            raise ValueError(f"tables must be of {n_keys} keys, got rows up to {tables.row_stop}")
        if not 0 < n_nodes <= tables.nodes or tables.pools != 1:
            raise ValueError(f"visible nodes must lie between 1 and {tables.nodes}, got {n_nodes}")
        if not 0 <= first <= n_keys:
            raise ValueError(f"near rows must lie within {n_keys} keys, got {first} to {n_keys}")


# Queries with a sampled rest in compiled code.


def attend_sampled_compiled(
    query: Tensor, sources: Sources, view: View, near: Attended, draws: Draws
) -> tuple[Estimate, Tensor]:
    """Queries that are active, with a sampled rest; also keys searched and rows read."""
    tables = make_tables(sources)
    n_lanes = query.shape[0]
    each = tables.rows.shape[2] // WIDTH
    drawn = (draws.places[:, None] + torch.arange(each, device="cpu") * WIDTH).expand(n_lanes, -1, -1)
    rows = sources.rows.gather(2, drawn).flatten(1).long()
    more = -(-rows.shape[1] // WIDTH) * WIDTH
    keys, values = (
        pad(take_rows(t, rows).to(torch.float32), (0, 0, 0, more - rows.shape[1])).contiguous()
        for t in (sources.key, sources.value)
    )
    columns = keys.unflatten(1, (-1, WIDTH)).transpose(2, 3).contiguous()
    means = pad(
        sources.node_value.to(torch.float32).repeat_interleave(each, dim=1), (0, 0, 0, more - rows.shape[1])
    )
    apart, place = (values - means).square().sum(-1), draws.places.to(torch.int32)
    output, lse = (t.to(torch.float32).clone() for t in near)
    coarse = code_units(tables.scales).contiguous()
    usual = usual_distance(apart[:, : rows.shape[1]].unflatten(1, (-1, each)))
    signs = projection(values.shape[-1], values.device)
    shadows = torch.cat(((values - means) @ signs.t(), means @ signs.t()), dim=-1)
    shadows = shadows.unflatten(1, (-1, WIDTH)).transpose(2, 3).contiguous()
    variance, fourth, overlap, limit = (torch.zeros_like(lse) for _ in range(4))
    aim, active = draws.aim.to(torch.float32).contiguous(), draws.active.to(torch.uint8).contiguous()
    further = torch.zeros_like(active)
    counts = torch.zeros(2, dtype=torch.long, device="cpu")
    given = active, aim, place, columns, values, apart, usual, coarse, signs, shadows
    samples = SampleBuffers(*given, variance, fourth, overlap, further, draws.allowed)
    problem = FarProblem(query, sources.key, sources.value, tables, view, output, lse, limit, counts)
    run("prescore_routed_sampled", problem, samples)
    return Estimate(output, lse, variance, fourth, overlap, limit, further.bool()), counts
