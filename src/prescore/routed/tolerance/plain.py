"""Queries with a sampled rest in plain torch, block by block: the definition that compiled code follows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prescore.routed.far import limit_of, scores_of
from prescore.routed.plain import far_blocks, seen_of
from prescore.routed.sources import Draws, Estimate, Sources, View
from prescore.routed.tolerance.aim import choose_limit, code_error
from prescore.routed.tolerance.draws import MOST_OFF
from prescore.routed.tolerance.rest import weigh_rest
from prescore.routed.tolerance.samples import samples_of
from prescore.types import Attended


def attend_sampled_plain(
    query: Tensor, sources: Sources, view: View, near: Attended, draws: Draws
) -> tuple[Estimate, Tensor]:
    """Queries that are active, with a sampled rest; also keys searched and rows read."""
    output, lse = (t.clone() for t in near)
    variance, fourth, overlap, limit = (torch.zeros_like(lse) for _ in range(4))
    whole = Estimate(output, lse, variance, fourth, overlap, limit, torch.zeros_like(draws.active))
    counts = torch.zeros(2, dtype=torch.long, device=query.device)
    for lane, head, rows, nodes in far_blocks(query, sources, view):
        some = draws.active[lane, head, rows].nonzero().squeeze(1) + rows.start
        if not nodes or not len(some):
            continue
        own = query[lane, head, some].to(lse.dtype) * view.scale
        before = Attended(near.output[lane, head, some], near.lse[lane, head, some])
        seen = seen_of(sources, view, lane, nodes)
        scores = scores_of(own, seen)
        samples = samples_of(own, seen, draws.places[:nodes])
        first = limit_of(scores, seen, view.search, before.lse)
        guessed = choose_limit(scores, samples, seen, before, first, draws.allowed)
        guessed = guessed.masked_fill(code_error(own, seen) > MOST_OFF, math.inf)
        aim = draws.aim[lane, head, some].to(first.dtype)
        chosen = torch.where(torch.isinf(aim), guessed, aim)
        spread, more = weigh_rest(own, seen, scores, samples, before, chosen)
        for all_of, part in zip(whole, (*spread, chosen, chosen != first), strict=True):
            all_of[lane, head, some] = part
        counts += more
    return whole, counts
