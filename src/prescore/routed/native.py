"""The far part in compiled code: the one place that calls it, with everything it may touch checked.

Sources become the layouts of ops/native/routed.h: columns (sinks, then nodes) sixteen side by side, codes
likewise.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.ops.native import library
from prescore.routed.sources import Sources, View
from prescore.routed.stand_ins import MOST_KNOWN_GAIN
from prescore.routed.tables import take_rows
from prescore.types import Attended

_WIDTH = 16
_MOST_DIM = 256
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_POINTER, _SIZE, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Rows(ctypes.Structure):
    _fields_ = (("data", _POINTER), ("at", _POINTER), ("step", _SIZE), ("type", _SIZE))


_TABLES = ("columns", "column_values", "rows", "codes", "scales", "spread", "drift")
_SIZES = ("lanes", "n_query", "dim", "value_dim", "leaf", "sinks", "sink_room", "room", "node_room", "pools")


class Spread(NamedTuple):
    """Results of queries that took part, `[T, G, Q]`: output, lse, and the spread of what was sampled."""

    output: Tensor
    lse: Tensor
    variance: Tensor
    fourth: Tensor


class Problem(ctypes.Structure):
    """One call, as ops/native/routed.h has it."""

    _fields_ = (
        ("query", _POINTER),
        ("key", _Rows),
        ("value", _Rows),
        *((name, _POINTER) for name in ("visible", "first", "stop", *_TABLES)),
        *((name, _SIZE) for name in (*_SIZES, "nodes_per_pool", "more")),
        *((name, _REAL) for name in ("scale", "reach", "log_share", "most_gain")),
        *((name, _POINTER) for name in ("output", "lse", "limit", "counts")),
    )


class Gradients(ctypes.Structure):
    """What the backward function reads and adds to, as ops/native/backward.c has it."""

    _fields_ = (
        *((name, _POINTER) for name in ("grad", "product", "column_keys", "value_columns")),
        *((name, _POINTER) for name in ("query", "key", "value", "column_key", "column_value")),
        ("parts", _SIZE),
        ("n_keys", _SIZE),
    )


class Samples(ctypes.Structure):
    """What the sampled function reads and writes besides, as ops/native/sampled.c has it."""

    _fields_ = (
        *((name, _POINTER) for name in ("active", "place", "columns", "values", "value_columns", "norms")),
        ("each", _SIZE),
        ("variance", _POINTER),
        ("fourth", _POINTER),
    )


_PARTS = 4
"""Sums of gradients that are kept apart, for as many threads; a constant, so that results depend on no machine."""


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


def can_run(query: Tensor, sources: Sources, view: View) -> bool:
    """Whether compiled code can run a call: all else is plain torch's."""
    return (
        runs_on(query, sources.value.shape[-1], sources.rows.shape[2])
        and view.backend.name != "plain"
        and view.backend.dropout is None
    )


def runs_on(query: Tensor, value_dim: int, leaf: int) -> bool:
    """Whether it knows such queries, values and nodes, and is there at all."""
    dims = (query.shape[-1], value_dim)
    return (
        query.device.type == "cpu"
        and query.dtype in _TYPES
        and all(dim % _WIDTH == 0 and 0 < dim <= _MOST_DIM for dim in dims)
        and leaf % _WIDTH == 0
        and library.load() is not None
    )


def attend(query: Tensor, sources: Sources, view: View, near: Attended) -> tuple[Attended, Tensor, Tensor]:
    """The far part on top of what lies near, in place; also each query's limit, and counts."""
    tables = make_tables(sources)
    n_lanes, group, length, _ = query.shape
    visible = view.visible.repeat_interleave(view.size, dim=1).repeat(1, group)
    limit = torch.full_like(near.lse, torch.inf)
    counts = torch.zeros(2, dtype=torch.long)
    flat = (n_lanes, group * length)
    run(
        "prescore_routed_forward",
        query.to(torch.float32).reshape(*flat, -1).contiguous(),
        (sources.key, sources.value),
        tables,
        view,
        (visible.contiguous(), None, None),
        (near.output, near.lse, limit, counts),
    )
    return near, limit, counts


def step(
    query: Tensor, rows: tuple[Tensor, Tensor], tables: Tables, view: View, near: int
) -> tuple[Attended, float]:
    """One query `[T, G, 1, D]` over keys and values `[B, Hkv, N, D]`, those from `near` on in any case.

    Returns:
        The result, and the rows found by a query on average.
    """
    n_lanes, group, _, _ = query.shape
    output = torch.zeros(n_lanes, group, rows[1].shape[-1])
    lse = torch.full((n_lanes, group), -torch.inf)
    counts = torch.zeros(2, dtype=torch.long)
    shape, number = (n_lanes, group), torch.int32
    seen = (
        view.visible.expand(shape).contiguous(),
        torch.full(shape, near, dtype=number),
        torch.full(shape, rows[0].shape[2], dtype=number),
    )
    asked = query.to(torch.float32).reshape(n_lanes, group, -1).contiguous()
    run("prescore_routed_forward", asked, rows, tables, view, seen, (output, lse, torch.empty_like(lse), counts))
    found = Attended(output[:, :, None].to(rows[1].dtype), lse[..., None])
    return found, int(counts[1]) / lse.numel()


def attend_backward(
    grad: Tensor, query: Tensor, sources: Sources, view: View, merged: Attended, limit: Tensor, sums: list[Tensor]
) -> None:
    """Add the gradients of the far part to `sums`, of the query and the learned sources."""
    tables = make_tables(sources)
    n_lanes, group, length, dim = query.shape
    flat, n_keys, wide = (n_lanes, group * length), sources.key.shape[1], sources.value.shape[-1]
    room = tables.column_values.shape[1]
    grads = grad.to(torch.float32).contiguous()
    product = (grads * merged.output).sum(-1)
    parts = [torch.zeros(_PARTS, n_lanes, n_rows, size) for n_rows in (n_keys, room) for size in (dim, wide)]
    column_keys = tables.columns.transpose(2, 3).flatten(1, 2).contiguous()
    value_columns = tables.column_values.unflatten(1, (-1, _WIDTH)).transpose(2, 3).contiguous()
    more = Gradients(
        grad=grads.data_ptr(),
        product=product.data_ptr(),
        column_keys=column_keys.data_ptr(),
        value_columns=value_columns.data_ptr(),
        query=sums[0].data_ptr(),
        **{
            name: t.data_ptr()
            for name, t in zip(("key", "value", "column_key", "column_value"), parts, strict=True)
        },
        parts=_PARTS,
        n_keys=n_keys,
    )
    visible = view.visible.repeat_interleave(view.size, dim=1).repeat(1, group).contiguous()
    asked = query.to(torch.float32).reshape(*flat, -1).contiguous()
    counts = torch.zeros(2, dtype=torch.long)
    results = (grads.view(*flat, wide), merged.lse, limit, counts)  # the output is not looked at
    run(
        "prescore_routed_backward",
        asked,
        (sources.key, sources.value),
        tables,
        view,
        (visible, None, None),
        results,
        more,
    )
    key, value, column_key, column_value = (part.sum(0) for part in parts)
    n_sinks, n_nodes = tables.sinks, sources.node_key.shape[1]
    nodes = slice(tables.sink_room, tables.sink_room + n_nodes)
    own = (
        key,
        value,
        column_key[:, :n_sinks],
        column_value[:, :n_sinks],
        column_key[:, nodes],
        column_value[:, nodes],
    )
    for total, part in zip(sums[1:7], own, strict=True):
        total.add_(part)


def attend_sampled(
    query: Tensor, sources: Sources, view: View, near: Attended, places: Tensor, active: Tensor
) -> tuple[Spread, Tensor]:
    """Queries that are `active`, with a sampled rest; also keys searched and rows read."""
    tables = make_tables(sources)
    n_lanes, group, length, _ = query.shape
    each = tables.rows.shape[2] // _WIDTH
    drawn = (places[:, None] + torch.arange(each) * _WIDTH).expand(n_lanes, -1, -1)
    rows = sources.rows.gather(2, drawn).flatten(1)
    more = -(-rows.shape[1] // _WIDTH) * _WIDTH
    keys, values = (
        pad(take_rows(t, rows).to(torch.float32), (0, 0, 0, more - rows.shape[1])).contiguous()
        for t in (sources.key, sources.value)
    )
    columns, value_columns = (t.unflatten(1, (-1, _WIDTH)).transpose(2, 3).contiguous() for t in (keys, values))
    norms, place = values.square().sum(-1), places.to(torch.int32)
    output, lse = (t.to(torch.float32).clone() for t in near)
    variance, fourth, limit = torch.zeros_like(lse), torch.zeros_like(lse), torch.zeros_like(lse)
    taking_part = active.to(torch.uint8).contiguous()
    counts = torch.zeros(2, dtype=torch.long)
    samples = Samples(
        active=taking_part.data_ptr(),
        place=place.data_ptr(),
        columns=columns.data_ptr(),
        values=values.data_ptr(),
        value_columns=value_columns.data_ptr(),
        norms=norms.data_ptr(),
        each=each,
        variance=variance.data_ptr(),
        fourth=fourth.data_ptr(),
    )
    visible = view.visible.repeat_interleave(view.size, dim=1).repeat(1, group).contiguous()
    run(
        "prescore_routed_sampled",
        query.to(torch.float32).reshape(n_lanes, group * length, -1).contiguous(),
        (sources.key, sources.value),
        tables,
        view,
        (visible, None, None),
        (output, lse, limit, counts),
        samples,
        more,
    )
    return Spread(output, lse, variance, fourth), counts


def make_tables(sources: Sources) -> Tables:
    """Columns and codes, sixteen side by side."""
    n_sinks, n_nodes = sources.sink_key.shape[1], sources.node_key.shape[1]
    sink_room = -(-n_sinks // _WIDTH) * _WIDTH
    fill = -n_nodes % _WIDTH

    def columns(sinks: Tensor, nodes: Tensor) -> Tensor:
        return torch.cat((pad(sinks.float(), (0, 0, 0, sink_room - n_sinks)), pad(nodes, (0, 0, 0, fill))), dim=1)

    keys = columns(sources.sink_key.detach(), sources.node_key.detach())
    return Tables(
        columns=keys.unflatten(1, (-1, _WIDTH)).transpose(2, 3).contiguous(),
        column_values=columns(sources.sink_value.detach(), sources.node_value.detach()),
        rows=sources.rows.to(torch.int32),
        codes=side_by_side(sources.packed),
        scales=sources.scales.unflatten(2, (-1, _WIDTH)).transpose(3, 4).contiguous(),
        spread=sources.spread.contiguous(),
        drift=sources.drift.contiguous(),
        sinks=n_sinks,
        sink_room=sink_room,
        row_stop=int(sources.rows.max()) + 1 if sources.rows.numel() else 0,
    )


def side_by_side(packed: Tensor) -> Tensor:
    """Codes `[T, M, L, D / 2]` of keys -> `[T, M, L / 16, D / 8, 16, 4]`."""
    blocks: Tensor = packed.unflatten(2, (-1, _WIDTH)).unflatten(4, (-1, 4)).transpose(3, 4).contiguous()
    return blocks


def run(
    name: str,
    query: Tensor,
    rows: tuple[Tensor, Tensor],
    tables: Tables,
    view: View,
    seen: tuple[Tensor, Tensor | None, Tensor | None],
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    extra: Gradients | Samples | None = None,
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
    starts = [_starts(t) for t in rows]
    problem = Problem(
        query=query.data_ptr(),
        key=_Rows(key.data_ptr(), starts[0].data_ptr(), key.stride(-2), _TYPES[key.dtype]),
        value=_Rows(value.data_ptr(), starts[1].data_ptr(), value.stride(-2), _TYPES[value.dtype]),
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
        output=output.data_ptr(),
        lse=lse.data_ptr(),
        limit=limit.data_ptr(),
        counts=counts.data_ptr(),
    )
    given = (problem,) if extra is None else (problem, extra)
    if getattr(loaded, name)(*(ctypes.byref(part) for part in given)):
        raise MemoryError("compiled attention needs more memory than there is")


def _starts(rows: Tensor) -> Tensor:
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
        ("columns", tables.columns, (n_lanes, room // _WIDTH, dim, _WIDTH), real),
        ("column_values", tables.column_values, (n_lanes, room, wide), real),
        ("rows", tables.rows, (n_lanes, n_nodes, leaf), small),
        ("codes", tables.codes, (n_lanes, n_nodes, leaf // _WIDTH, dim // 8, _WIDTH, 4), torch.uint8),
        ("scales", tables.scales, (n_lanes, n_nodes, leaf // _WIDTH, 2, _WIDTH), real),
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
        if tensor.stride(-1) != 1 or tensor.dtype not in _TYPES or lanes != n_lanes or tensor.shape[-2] != n_keys:
            raise ValueError(f"{name} must be rows of {n_lanes} lanes, got {tuple(tensor.shape)} {tensor.dtype}")
    if dim % _WIDTH or wide % _WIDTH or leaf % _WIDTH or max(dim, wide) > _MOST_DIM or key.shape[-1] != dim:
        raise ValueError(f"sizes must be multiples of {_WIDTH}, got {dim}, {wide} and {leaf}")
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
