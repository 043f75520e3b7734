"""Queries with a sampled rest in plain torch, block by block: the definition that compiled code follows."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.routed.codes import UNIT, Codes, coded_logits
from prescore.routed.far import Scores, Seen, limit_of, scores_of
from prescore.routed.plain import far_blocks, seen_of
from prescore.routed.sources import Draws, Sources, Spread, View
from prescore.routed.tolerance.draws import (
    AIMS,
    MOST_OFF,
    MOST_ROWS,
    SHADOWS,
    STRIDE,
    code_units,
    projection,
    sample_rows,
)
from prescore.types import Attended


def attend_sampled_plain(
    query: Tensor, sources: Sources, view: View, near: Attended, draws: Draws
) -> tuple[Spread, Tensor]:
    """Queries that are active, with a sampled rest; also keys searched and rows read."""
    output, lse = (t.clone() for t in near)
    variance, fourth, overlap, limit = (torch.zeros_like(lse) for _ in range(4))
    whole = Spread(output, lse, variance, fourth, overlap, limit, torch.zeros_like(draws.active))
    counts = torch.zeros(2, dtype=torch.long, device=query.device)
    for lane, head, rows, nodes in far_blocks(query, sources, view):
        some = draws.active[lane, head, rows].nonzero().squeeze(1) + rows.start
        if not nodes or not len(some):
            continue
        own = query[lane, head, some].to(lse.dtype) * view.scale
        before = Attended(near.output[lane, head, some], near.lse[lane, head, some])
        seen = seen_of(sources, view, lane, nodes)
        scores = scores_of(own, seen)
        samples = _samples_of(own, seen, draws.places[:nodes])
        first = limit_of(scores, seen, view.search, before.lse)
        guessed = choose_limit(scores, samples, seen, before, first, draws.allowed)
        guessed = guessed.masked_fill(code_error(own, seen) > MOST_OFF, math.inf)
        aim = draws.aim[lane, head, some].to(first.dtype)
        chosen = torch.where(torch.isinf(aim), guessed, aim)
        spread, more = _weigh(own, seen, scores, samples, before, chosen, view.search.margin)
        for all_of, part in zip(whole, (*spread, chosen, chosen != first), strict=True):
            all_of[lane, head, some] = part
        counts += more
    return whole, counts


class _Samples(NamedTuple):
    """`[M * m]` values, `[t, M, m]` true logits (-inf where there is none), `[M, m]` places in their nodes."""

    value: Tensor
    logits: Tensor
    place: Tensor
    exists: Tensor


def _samples_of(query: Tensor, seen: Seen, places: Tensor) -> _Samples:
    place, exists = sample_rows(places, seen.rows.shape[1])
    row = seen.rows.gather(1, place).flatten()
    keys, values = (t.index_select(0, row).to(query.dtype) for t in (seen.key, seen.value))
    logits = (query @ keys.t()).view(-1, *exists.shape).masked_fill(~exists, -math.inf)
    return _Samples(values, logits, place, exists)


def code_error(query: Tensor, seen: Seen) -> Tensor:
    """`[t]`: by how much coded logits are off, a root mean square over the keys."""
    halves = pad(query, (0, -query.shape[-1] % UNIT)).unflatten(-1, (2, -1))
    units = code_units(seen.codes.scales[None].to(query.dtype))[0, -1]
    lengths: Tensor = torch.linalg.vector_norm(halves, dim=-1)
    return (lengths * units).square().sum(-1).sqrt() / 12**0.5


def choose_limit(
    scores: Scores, samples: _Samples, seen: Seen, near: Attended, first: Tensor, allowed: float
) -> Tensor:
    """`[t]`: the highest limit under which the samples below it spread little enough.

    Infinite where none does, or where so many keys would be read that reading everything is faster. The result is
    guessed from what lies near, the sinks and the samples.
    """
    logits, n_samples = samples.logits.flatten(1), samples.exists.sum()
    stands_for = (seen.rows.shape[1] / samples.exists.sum(1).clamp_min(1)).to(logits.dtype).log()
    weighted = (samples.logits + stands_for[:, None]).flatten(1)
    all_logits = torch.cat((near.lse[:, None], scores.sinks, weighted), dim=1)
    lse = all_logits.logsumexp(1)
    weights = torch.exp(all_logits - lse[:, None])
    output = weights[:, :1] * near.output + weights[:, 1:] @ torch.cat((seen.sink_value, samples.value))
    away = _apart(output, samples.value)
    terms = torch.exp(weighted - lse[:, None]).square() * away
    mean, length = _mean_of_samples(away, samples), output.square().sum(1)
    chosen = torch.full_like(first, math.inf)
    for aim in reversed(range(AIMS)):
        limit = first - aim * math.log(2)
        read = logits >= limit[:, None]
        hidden = STRIDE * torch.exp(2 * (limit - lse)) * mean
        fits = (terms.masked_fill(read, 0.0).sum(1) + hidden) <= allowed * length
        few = read.sum(1) <= MOST_ROWS * n_samples
        # heavier keys come last, and what is too much for them is too much for all
        chosen = torch.where(fits, limit, chosen).masked_fill(~few, math.inf)
    return chosen


class _Read(NamedTuple):
    """What `t` queries read: `[R]` pairs of queries and rows, `[t, M + M * m]` logits of means and samples.

    A mean counts only where no sample of its node is left. `worth [t]`: the others would read too much.
    """

    query: Tensor
    row: Tensor
    columns: Tensor
    worth: Tensor


def _read(query: Tensor, seen: Seen, scores: Scores, samples: _Samples, limit: Tensor, margin: float) -> _Read:
    """The rows from `limit` on, by their codes, and what the samples count that are not among them."""
    n_nodes, leaf = seen.rows.shape
    codes = Codes(*(part.flatten(0, 1) for part in seen.codes))
    coded = coded_logits(query, codes, margin).unflatten(1, (-1, leaf))
    above = scores.nodes[..., None] + coded >= limit[:, None, None]
    worth = ~torch.isinf(limit) & (above.flatten(1).sum(1) <= int(MOST_ROWS * n_nodes * leaf))
    above &= worth[:, None, None]
    asked, node, place = above.nonzero(as_tuple=True)
    usable = samples.exists & ~above.gather(2, samples.place.expand(len(query), -1, -1))  # [t, M, m]
    left, used = leaf - above.sum(-1), usable.sum(-1)
    weight = (left.to(query.dtype) / used.clamp_min(1)).log()[..., None]
    drawn = (samples.logits + weight).masked_fill(~usable, -math.inf).flatten(1)
    means = scores.nodes + left.clamp_min(1).to(query.dtype).log()
    means = means.masked_fill((left == 0) | (used > 0), -math.inf)
    return _Read(asked, seen.rows[node, place], torch.cat((means, drawn), dim=1), worth)


def _weigh(
    query: Tensor, seen: Seen, scores: Scores, samples: _Samples, near: Attended, limit: Tensor, margin: float
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Output, lse, variance, fourth and overlap of queries that read from `limit` on; keys searched, rows read."""
    n_nodes, n_sinks, wide = seen.rows.shape[0], seen.sink_key.shape[0], query.dtype
    asked, row, columns, worth = _read(query, seen, scores, samples, limit, margin)
    columns = torch.cat((scores.sinks, columns), dim=1)
    row_key, row_value = (t.index_select(0, row).to(wide) for t in (seen.key, seen.value))
    rows = (query.index_select(0, asked) * row_key).sum(-1)
    peak = torch.cat((near.lse[:, None], columns), dim=1).amax(1).scatter_reduce(0, asked, rows, "amax")
    peak = peak.masked_fill(torch.isneginf(peak), 0.0)
    columns, rows = torch.exp(columns - peak[:, None]), torch.exp(rows - peak.index_select(0, asked))
    known = torch.exp(near.lse - peak)
    mass = (columns.sum(1) + known).index_add(0, asked, rows)
    every = torch.cat((seen.sink_value, seen.node_value, samples.value))
    output = (columns @ every + near.output * known[:, None]).index_add(0, asked, rows[:, None] * row_value)
    output, lse = output / mass[:, None], peak + mass.log()
    away = _apart(output, every[n_sinks:])
    # a key at the limit that no sample shows: what it may weigh, drawn as often as any other; not estimated, so
    # that it takes no part in how well the spread is known
    hidden = STRIDE * torch.exp(2 * (limit - lse)) * _mean_of_samples(away[:, n_nodes:], samples)
    estimated = columns[:, n_sinks:] / mass[:, None]
    terms = estimated.square() * away
    overlap = _overlap(estimated[:, n_nodes:], samples.value, output)
    overlap = overlap + terms[:, :n_nodes].square().sum(1) + hidden.square()
    moments = (terms.sum(1) + hidden, terms.square().sum(1), overlap)
    result = (
        torch.where(worth[:, None], output, near.output),
        torch.where(worth, lse, near.lse),
        *(moment.masked_fill(~worth, math.inf) for moment in moments),
    )
    n_searched = int((~torch.isinf(limit)).sum()) * seen.rows.numel()
    n_rows = len(row) + len(query) * int(samples.exists.sum())
    return result, torch.tensor([n_searched, n_rows], device=query.device)


def _apart(outputs: Tensor, values: Tensor) -> Tensor:
    """Squares of distances `[t, n]`, not by products: what lies close would drown in their rounding."""
    return torch.cdist(outputs, values, compute_mode="donot_use_mm_for_euclid_dist").square()


def _mean_of_samples(each: Tensor, samples: _Samples) -> Tensor:
    """`[t]`, of `each [t, M * m]`."""
    exists = samples.exists.flatten()
    return (each * exists).sum(1) / exists.sum().clamp_min(1)


def _overlap(weights: Tensor, values: Tensor, output: Tensor) -> Tensor:
    """`[t]`: sum of the squares of all products of two terms `w (v - output)`, by random projections."""
    signs = projection(values.shape[-1], values.device).to(values.dtype)
    terms = weights[..., None] * (values @ signs.t() - (output @ signs.t())[:, None])
    pairs = (terms.transpose(1, 2) @ terms).square()
    return (pairs.sum((1, 2)) - pairs.diagonal(dim1=1, dim2=2).sum(1)) / (SHADOWS * (SHADOWS - 1))
