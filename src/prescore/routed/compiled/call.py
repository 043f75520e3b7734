"""The one call of compiled code, with everything it may touch checked: nothing is checked again behind it."""

from __future__ import annotations

import ctypes
import math
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
    check_row_tensor,
    check_tensors,
    rows_struct,
)
from prescore.routed.far import SINK_PART
from prescore.routed.sources import View
from prescore.routed.stand_ins import MOST_KNOWN_GAIN

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

    Codes and scales of each node's odd keys, its first sixteen, are there twice: every query compares them, and
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
