"""Queries with a sampled rest in compiled code."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.routed.compiled.call import WIDTH, Samples, run
from prescore.routed.compiled.far import make_tables
from prescore.routed.draws import AIMS, MOST_OFF, MOST_ROWS, code_units, projection
from prescore.routed.sources import Draws, Sources, Spread, View
from prescore.routed.tables import take_rows
from prescore.types import Attended


def attend_sampled_compiled(
    query: Tensor, sources: Sources, view: View, near: Attended, draws: Draws
) -> tuple[Spread, Tensor]:
    """Queries that are active, with a sampled rest; also keys searched and rows read."""
    tables = make_tables(sources)
    n_lanes, group, length, _ = query.shape
    each = tables.rows.shape[2] // WIDTH
    drawn = (draws.places[:, None] + torch.arange(each) * WIDTH).expand(n_lanes, -1, -1)
    rows = sources.rows.gather(2, drawn).flatten(1).long()
    more = -(-rows.shape[1] // WIDTH) * WIDTH
    keys, values = (
        pad(take_rows(t, rows).to(torch.float32), (0, 0, 0, more - rows.shape[1])).contiguous()
        for t in (sources.key, sources.value)
    )
    columns, value_columns = (t.unflatten(1, (-1, WIDTH)).transpose(2, 3).contiguous() for t in (keys, values))
    norms, place = values.square().sum(-1), draws.places.to(torch.int32)
    output, lse = (t.to(torch.float32).clone() for t in near)
    coarse = code_units(tables.scales).contiguous()
    signs = projection(values.shape[-1], values.device)
    shadows = (values @ signs.t()).unflatten(1, (-1, WIDTH)).transpose(2, 3).contiguous()
    variance, fourth, overlap, limit = (torch.zeros_like(lse) for _ in range(4))
    aim, active = draws.aim.to(torch.float32).contiguous(), draws.active.to(torch.uint8).contiguous()
    further = torch.zeros_like(active)
    counts = torch.zeros(2, dtype=torch.long)
    samples = Samples(
        active=active.data_ptr(),
        aim=aim.data_ptr(),
        place=place.data_ptr(),
        columns=columns.data_ptr(),
        values=values.data_ptr(),
        value_columns=value_columns.data_ptr(),
        norms=norms.data_ptr(),
        coarse=coarse.data_ptr(),
        signs=signs.data_ptr(),
        shadows=shadows.data_ptr(),
        each=each,
        stride=WIDTH,
        aims=AIMS,
        allowed=draws.allowed,
        most_rows=MOST_ROWS,
        most_off=MOST_OFF,
        variance=variance.data_ptr(),
        fourth=fourth.data_ptr(),
        overlap=overlap.data_ptr(),
        further=further.data_ptr(),
    )
    visible = view.visible_to_each(group)
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
    return Spread(output, lse, variance, fourth, overlap, limit, further.bool()), counts
