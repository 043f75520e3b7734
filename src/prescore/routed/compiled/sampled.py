"""Queries with a sampled rest in compiled code."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.routed.compiled.buffers import SampleBuffers
from prescore.routed.compiled.call import FarProblem, run
from prescore.routed.compiled.checked import WIDTH
from prescore.routed.compiled.far import make_tables
from prescore.routed.sources import Draws, Estimate, Sources, View
from prescore.routed.tables import take_rows
from prescore.routed.tolerance.draws import code_units, projection, usual_distance
from prescore.types import Attended


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
