"""Routed attention to a tolerance: what is left of a node is sampled instead of modelled, and queries read on.

Every node is searched, and one key of every sixteen of a node, in tree order, stands for those that are not read
by themselves: an unbiased estimate with a measured spread, where a stand-in's bias could not be known. A query
whose error bar is too wide looks again for keys of a quarter of the weight; one that is still too wide at last
reads everything. Which keys are sampled depends on the seed and on their node's number alone: draws are the same
in pieces of a prompt, in single steps, and in any batch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.call import Call
from prescore.config import Routed
from prescore.ops.backend import accumulation_dtype
from prescore.routed.codes import Codes, coded_logits
from prescore.routed.compiled.far import can_run
from prescore.routed.compiled.sampled import attend_sampled_compiled
from prescore.routed.error_bar import error_limit
from prescore.routed.exact_rows import exact_for
from prescore.routed.far import Search, Seen, limit_of, scores_of
from prescore.routed.plain import far_blocks, seen_of
from prescore.routed.softmax import attend_near
from prescore.routed.sources import Sources, Spread, View
from prescore.types import Attended

STRIDE = 16
"""Keys that a sample stands for."""
LEVELS = 4
"""Looks for ever lighter keys, before everything is read."""
MARGIN = 2.0
"""Deviations by which codes may be off before a key is missed."""
WIDER = 4
"""How many times lighter."""


CONFIDENCE = 0.95
"""Where none is asked for."""


class Within(NamedTuple):
    """A result with its error bars; all but the first two are `[T, G, Q]`.

    Attributes:
        output, lse: The result.
        limit: Relative error that each query stays below, with the confidence asked for.
        looks: How often each query looked.
        counts: Keys searched, rows read, by all queries.
    """

    output: Tensor
    lse: Tensor
    limit: Tensor
    looks: Tensor
    counts: Tensor


def attend_to_tolerance(query: Tensor, sources: Sources, view: View, config: Routed, seed: int) -> Within:
    """Queries `[T, G, Q, D]` with their error bars, by the configuration's tolerance and confidence."""
    wide = accumulation_dtype(query.dtype)
    shape = (*query.shape[:3], sources.value.shape[-1])
    near = Attended(query.new_empty(shape, dtype=wide), query.new_empty(shape[:3], dtype=wide))
    attend_near(query, sources, view, near)
    bars = attend_within(query, sources, view, near, config, seed)
    return bars._replace(output=bars.output.to(query.dtype))


def read_on(call: Call, answer: Attended, limit: Tensor, tolerance: float) -> tuple[Attended, Tensor]:
    """Queries whose bar `[B, Hq, Nq]` is still above the tolerance read everything; also which they are."""
    over = ~(limit <= tolerance)
    if call.query_valid is not None:
        over &= call.query_valid[:, None]
    if not bool(over.any()):
        return answer, over
    exact = exact_for(replace(call, backend=call.backend.at("read on")), over)
    output = torch.where(over[..., None], exact.output, answer.output)
    return Attended(output, torch.where(over, exact.lse, answer.lse)), over


def attend_within(
    query: Tensor, sources: Sources, view: View, near: Attended, config: Routed, seed: int
) -> Within:
    """Attend such that every error bar is within the tolerance, as far as looking for lighter keys gets.

    Args:
        query: `[T, G, Q, D]`, whole blocks.
        sources: What they see.
        view: How they see it; its search is the first look.
        near: What they read in any case.
        config: Its tolerance and confidence.
        seed: Of the draws.
    """
    tolerance = config.tolerance or 0.0
    confidence = CONFIDENCE if config.confidence is None else config.confidence
    attend = attend_sampled_compiled if can_run(query, sources, view) else attend_sampled_plain
    places = sample_places(sources.rows.shape[1], sources.rows.shape[2], seed, query.device)
    output, lse = (t.clone() for t in near)
    limit = torch.full_like(lse, torch.inf)
    looks = torch.zeros_like(lse, dtype=torch.long)
    counts = torch.zeros(2, dtype=torch.long, device=query.device)
    share = max(1.0, view.search.share)
    for level in range(LEVELS):
        over = ~(limit <= tolerance)
        if not bool(over.any()):
            break
        looser = Search(share * WIDER**level, math.inf, MARGIN)
        found, more = attend(query, sources, replace(view, search=looser), near, places, over)
        bars = error_limit(found.output, found.variance, found.fourth, confidence)
        output = torch.where(over[..., None], found.output, output)
        lse, limit = torch.where(over, found.lse, lse), torch.where(over, bars, limit)
        looks += over
        counts += more
    return Within(output, lse, limit, looks, counts)


def sample_places(n_nodes: int, leaf: int, seed: int, device: torch.device) -> Tensor:
    """`[M]`: which key of every sixteen is drawn in each node, by a hash of the node's number."""
    mixed = torch.arange(1, n_nodes + 1) * 0x9E3779B1 + (seed % 2**31) * 0x85EBCA6B
    for factor in (0x2C1B3C6D, 0x297A2D39):
        mixed = ((mixed ^ (mixed >> 15)) * factor) % 2**32
    return ((mixed ^ (mixed >> 15)) % min(STRIDE, leaf)).to(device)


def sample_rows(places: Tensor, leaf: int) -> tuple[Tensor, Tensor]:
    """`[M, m]` places of the samples in their nodes, and which of them exist."""
    each = -(-leaf // STRIDE)
    place = places[:, None] + torch.arange(each, device=places.device) * STRIDE
    return place.clamp_max(leaf - 1), place < leaf


def attend_sampled_plain(
    query: Tensor, sources: Sources, view: View, near: Attended, places: Tensor, active: Tensor
) -> tuple[Spread, Tensor]:
    """Queries that are `active`, with a sampled rest, block by block; also keys searched and rows read."""
    output, lse = (t.clone() for t in near)
    variance, fourth = torch.zeros_like(lse), torch.zeros_like(lse)
    counts = torch.zeros(2, dtype=torch.long, device=query.device)
    for lane, head, rows, nodes in far_blocks(query, sources, view):
        some = active[lane, head, rows].nonzero().squeeze(1) + rows.start
        if not nodes or not len(some):
            continue
        own = query[lane, head, some].to(lse.dtype) * view.scale
        before = Attended(near.output[lane, head, some], near.lse[lane, head, some])
        seen = seen_of(sources, view, lane, nodes)
        found, n_rows = sampled_block(own, seen, view.search, before, places[:nodes])
        for whole, part in zip((output, lse, variance, fourth), found, strict=True):
            whole[lane, head, some] = part
        counts += torch.tensor([len(some) * seen.rows.numel(), n_rows], device=query.device)
    return Spread(output, lse, variance, fourth), counts


def sampled_block(query: Tensor, seen: Seen, search: Search, near: Attended, places: Tensor) -> tuple[Spread, int]:
    """Queries `[t, D]`, already scaled, over sinks, rows found and samples, on top of what lies near."""
    leaf, n_sinks = seen.rows.shape[1], seen.sink_key.shape[0]
    scores = scores_of(query, seen)
    nodes, limit = scores.nodes, limit_of(scores, seen, search, near.lse)
    codes = Codes(*(part.flatten(0, 1) for part in seen.codes))
    coded = coded_logits(query, codes, search.margin).unflatten(1, (-1, leaf))
    above = nodes[..., None] + coded >= limit[:, None, None]
    hits = above.sum(-1)
    asked, node, place = above.nonzero(as_tuple=True)
    row = seen.rows[node, place]
    drawn, exists = sample_rows(places, leaf)
    sample_row = seen.rows.gather(1, drawn)
    usable = exists & ~above.gather(2, drawn.expand(len(query), -1, -1))  # [t, M, m]
    left, used = leaf - hits, usable.sum(-1)
    weight = (left.to(query.dtype) / used.clamp_min(1)).log()[..., None]
    wide = query.dtype
    keys, values = (t.index_select(0, sample_row.flatten()).to(wide) for t in (seen.key, seen.value))
    samples = ((query @ keys.t()).view(usable.shape) + weight).masked_fill(~usable, -math.inf).flatten(1)
    stand_ins = nodes + left.clamp_min(1).to(wide).log()
    stand_ins = stand_ins.masked_fill((left == 0) | (used > 0), -math.inf)
    columns = torch.cat((scores.sinks, stand_ins, samples), dim=1)
    row_key, row_value = (t.index_select(0, row).to(wide) for t in (seen.key, seen.value))
    rows = (query.index_select(0, asked) * row_key).sum(-1)
    peak = torch.cat((near.lse[:, None], columns), dim=1).amax(1).scatter_reduce(0, asked, rows, "amax")
    peak = peak.masked_fill(torch.isneginf(peak), 0.0)
    columns, rows = torch.exp(columns - peak[:, None]), torch.exp(rows - peak.index_select(0, asked))
    known = torch.exp(near.lse - peak)
    mass = (columns.sum(1) + known).index_add(0, asked, rows)
    every = torch.cat((seen.sink_value, seen.node_value, values))
    output = (columns @ every + near.output * known[:, None]).index_add(0, asked, rows[:, None] * row_value)
    output = output / mass[:, None]
    estimated = columns[:, n_sinks:] / mass[:, None]
    away = torch.cdist(output, every[n_sinks:]).square()
    lse = peak + mass.log()
    # a key at the limit that no sample shows: what it may weigh, drawn as often as any other
    hidden = STRIDE * torch.exp(2 * (limit - lse)) * away[:, seen.rows.shape[0] :].mean(1)
    terms = torch.cat((estimated.square() * away, hidden[:, None]), dim=1)
    return Spread(output, lse, terms.sum(1), terms.square().sum(1)), len(row)
