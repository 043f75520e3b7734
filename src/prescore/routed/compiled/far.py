"""Routed attention of some lanes in compiled code, forward and backward.

Sources become the layouts of ops/native/routed.h: columns (sinks, then nodes) sixteen side by side, codes
likewise. Queries, keys and values are read where they lie.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.ops.backend import Backend
from prescore.ops.native import library
from prescore.routed.compiled.buffers import GradientBuffers
from prescore.routed.compiled.call import FarProblem, Tables, run
from prescore.routed.compiled.checked import MOST_DIM, TYPES, WIDTH, real_numbers
from prescore.routed.sources import Sources, View
from prescore.types import Attended

_PARTS = 4
"""Sums of gradients that are kept apart, for as many threads; a constant, so that results depend on no machine."""


def can_run(query: Tensor, sources: Sources, view: View) -> bool:
    """Whether compiled code can run a call: all else is plain torch's."""
    level = level_for(query, sources.value.shape[-1], sources.rows.shape[2], view.backend)
    return level != library.NO_LEVEL


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
