"""The samples of a block of queries: which keys they are, and what is known about them before any search."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.config import Routed
from prescore.ops.backend import Tile
from prescore.routed.draws import (
    AIMS,
    BELOW,
    MARGIN,
    MOST_OFF,
    MOST_ROWS,
    SHADOWS,
    STEP,
    STRIDE,
    code_units,
    projection,
    sample_places,
    sample_rows,
)
from prescore.routed.index import UNIT, Codes, coded_logits
from prescore.routed.local import attend_near
from prescore.routed.native import attend_near_compiled, attend_sampled_compiled, can_run
from prescore.routed.plain import far_blocks, seen_of
from prescore.routed.reference import Scores, Search, Seen, limit_of, scores_of
from prescore.routed.sources import Draws, Estimate, Sources, View
from prescore.types import Attended


class DrawnKeys(NamedTuple):
    """What `t` queries know of the `m` samples of each of `M` nodes.

    Attributes:
        value: `[M, m, Dv]`.
        logits: `[t, M, m]` true ones; -inf where there is none.
        place: `[M, m]` in their nodes.
        exists: `[M, m]`.
        apart: `[M, m]` squares of the values' distances from their node's mean; 0 where there is none.
    """

    value: Tensor
    logits: Tensor
    place: Tensor
    exists: Tensor
    apart: Tensor

    @property
    def usual(self) -> Tensor:
        """The mean of all distances."""
        return self.apart.sum() / self.exists.sum()


def samples_of(query: Tensor, seen: Seen, places: Tensor) -> DrawnKeys:
    """The samples of the nodes that queries `[t, D]`, already scaled, see."""
    place, exists = sample_rows(places, seen.rows.shape[1])
    row = seen.rows.gather(1, place).flatten()
    keys, values = (t.index_select(0, row).to(query.dtype) for t in (seen.key, seen.value))
    logits = (query @ keys.t()).view(-1, *exists.shape).masked_fill(~exists, -math.inf)
    values = values.view(*exists.shape, -1)
    apart = (values - seen.node_value.to(query.dtype)[:, None]).square().sum(-1).masked_fill(~exists, 0.0)
    return DrawnKeys(values, logits, place, exists, apart)


# How far a sampled result may be off: a Student interval for the length of its error.
#
# The error of a result whose rest was sampled is, to first order, a sum of independent terms, one for each sample
# (`rest.py`), whose mean square length `V` is estimated by the sum of theirs. Each is small, since keys of larger
# weight are read by themselves; one that may just have escaped both search and samples adds what it may weigh. So
# the error is nearly normal, with the covariance `C` that the terms have, and its squared length is nearly `V`
# times a chi-square over its degrees of freedom, which are `tr(C)^2 / tr(C^2)`: the *directions* that errors point
# in. An error of one direction exceeds twice its root mean square in one draw of twenty, one of many directions
# hardly ever exceeds it by a half. `V` itself is a sum of squares whose variance is at most the sum of the squares
# of those: that of a chi-square with `2 V^2` over this sum degrees of freedom (Satterthwaite's). What a Student
# variable is to a normal one, an F variable is to the error, so that few terms make a wide bar.

OFTEN, ONE_IN = 4, 4
"""A single bar may be wrong so many times as often as all together, as long as that is at most one in `ONE_IN`."""


def of_single_query(confidence: float) -> float:
    """How often the bar of a single query has to hold, for that share of all queries to be within a tolerance.

    Queries stop with bars anywhere below the tolerance, and errors of those far below hardly ever reach it: few
    queries are over it, even if one of five is among those whose bar is as large as the tolerance itself. How few
    is measured (docs/default.md).
    """
    wrong = 1 - confidence
    return 1 - max(wrong, min(OFTEN * wrong, 1 / ONE_IN))


def estimated_error(spread: Estimate) -> Tensor:
    """Relative error that is expected of an output: a root mean square over draws; inf where nothing is known."""
    length = torch.linalg.vector_norm(spread.output.to(spread.variance.dtype), dim=-1)
    error = spread.variance.sqrt() / length
    return torch.where(spread.variance == 0, 0.0, error).nan_to_num(nan=torch.inf, posinf=torch.inf)


def error_limit(spread: Estimate, confidence: float) -> Tensor:
    """Relative error that an output stays below with that confidence; inf where nothing is known."""
    square = spread.variance.square()
    least = torch.finfo(square.dtype).tiny
    freedom = (2 * square / spread.fourth.clamp_min(least)).clamp_min(1.0)
    directions = (square / torch.maximum(spread.overlap, spread.fourth).clamp_min(least)).clamp_min(1.0)
    limit = longest_error(directions, freedom, confidence) * estimated_error(spread)
    return torch.where(spread.variance == 0, 0.0, limit).nan_to_num(nan=torch.inf, posinf=torch.inf)


def longest_error(directions: Tensor, freedom: Tensor, confidence: float) -> Tensor:
    """The root of what an F variable stays below with that confidence.

    By Paulson's approximation, in which cube roots are normal: within 2 % of it from 5 degrees of freedom on.
    Below it is too large, and no more is taken than a bound at 1, the closed form at 2, and what lies between.
    """
    one = 1 / float(torch.special.ndtri(torch.tensor(1 - confidence / 2, dtype=torch.float64)))
    power = confidence ** (2 / directions)
    two = (2 / directions * power / (1 - power)).sqrt()
    five = _paulson(directions, torch.full_like(freedom, 5.0), confidence)
    few = torch.where(freedom < 2, one * (two / one) ** (freedom - 1), two * (five / two) ** ((freedom - 2) / 3))
    several = _paulson(directions, freedom, confidence)
    return torch.where(freedom < 5, torch.minimum(few, several), several)


def _paulson(directions: Tensor, freedom: Tensor, confidence: float) -> Tensor:
    z = float(torch.special.ndtri(torch.tensor(confidence, dtype=torch.float64)))
    a, b = 2 / (9 * directions), 2 / (9 * freedom)
    first, middle, last = (1 - b).square() - z * z * b, (1 - a) * (1 - b), (1 - a).square() - z * z * a
    root = (middle.square() - first * last).clamp_min(0.0).sqrt()
    # below the middle the smaller root is meant
    cube_root = (middle + (root if z > 0 else -root)) / first
    return torch.where(first > 0, cube_root.clamp_min(0.0) ** 1.5, torch.inf)


# How light the keys must be that a query with samples looks for, before it looks.


def code_error(query: Tensor, seen: Seen) -> Tensor:
    """`[t]`: by how much coded logits are off, a root mean square over the keys."""
    halves = pad(query, (0, -query.shape[-1] % UNIT)).unflatten(-1, (2, -1))
    units = code_units(seen.codes.scales[None].to(query.dtype))[0, -1]
    lengths: Tensor = torch.linalg.vector_norm(halves, dim=-1)
    return (lengths * units).square().sum(-1).sqrt() / 12**0.5


def choose_limit(
    scores: Scores, samples: DrawnKeys, seen: Seen, near: Attended, first: Tensor, allowed: float
) -> Tensor:
    """`[t]`: the highest limit under which the samples below it spread little enough.

    Infinite where none does, or where so many keys would be read that reading everything is faster. The result is
    guessed from what lies near, the sinks and the samples. A term of the error is as large as a weight differs
    from the mean of its node: of weights `exp(x)` with normal `x` of deviation `s` that is a part `1 - exp(-s^2)`
    of their mean square, and less of those below a limit.
    """
    stands_for = (seen.rows.shape[1] / samples.exists.sum(1)).to(first.dtype).log()
    weighted = samples.logits + stands_for[:, None]
    lse = torch.cat((near.lse[:, None], scores.sinks, weighted.flatten(1)), dim=1).logsumexp(1)
    weights = torch.exp(weighted - lse[:, None, None])
    output = torch.exp(near.lse - lse)[:, None] * near.output
    output = output + torch.exp(scores.sinks - lse[:, None]) @ seen.sink_value
    output = output + weights.flatten(1) @ samples.value.flatten(0, 1)
    uneven = BELOW * (1 - torch.exp(-scores.spread.square()))
    terms = uneven * (weights.square() * samples.apart).flatten(1)
    length, logits, n_samples = output.square().sum(1), samples.logits.flatten(1), samples.exists.sum()
    chosen = torch.full_like(first, math.inf)
    for aim in reversed(range(AIMS)):
        limit = first - aim * STEP
        read = logits >= limit[:, None]
        hidden = STRIDE * torch.exp(2 * (limit - lse)) * samples.usual
        fits = (terms.masked_fill(read, 0.0).sum(1) + hidden) <= allowed * length
        few = read.sum(1) <= MOST_ROWS * n_samples
        # heavier keys come last, and what is too much for them is too much for all
        chosen = torch.where(fits, limit, chosen).masked_fill(~few, math.inf)
    return chosen


# What a query with samples makes of the keys that it does not read, in plain torch.
#
# Every key of a node that is not read is weighed by its code, and given the mean value of those that are left;
# that
# is known for all of them. Each sample then says how far off this is for the keys that it stands for: its true
# weight and value stand in place of what was assumed of it. So the sum is nearly unbiased whatever the keys are
# like
# (a ratio estimate: how many samples are left of a node depends on which were drawn), and its terms are as
# small as
# what was assumed is good.


class Read(NamedTuple):
    """What `t` queries read by themselves, and what they know about all other keys of their nodes.

    Attributes:
        query, node, row: `[R]`, each row that is read.
        above: `[t, M, L]` which keys those are.
        light: `[t, M, L]` weights of the others by their codes, in units of that of the limit; 0 for those read.
        worth: `[t]` the others would read too much.
    """

    query: Tensor
    node: Tensor
    row: Tensor
    above: Tensor
    light: Tensor
    worth: Tensor


def read_rows(query: Tensor, seen: Seen, scores: Scores, limit: Tensor) -> Read:
    """The rows from `limit` on, by codes that are lifted by `MARGIN` deviations of their own error."""
    n_nodes, leaf = seen.rows.shape
    codes = Codes(*(part.flatten(0, 1) for part in seen.codes))
    lifted, coded = (
        scores.nodes[..., None] + coded_logits(query, codes, lift).unflatten(1, (-1, leaf))
        for lift in (MARGIN, 0.0)
    )
    above = lifted >= limit[:, None, None]
    worth = ~torch.isinf(limit) & (above.flatten(1).sum(1) <= int(MOST_ROWS * n_nodes * leaf))
    above &= worth[:, None, None]
    asked, node, place = above.nonzero(as_tuple=True)
    light = straight_exp(coded - limit[:, None, None]).masked_fill(above, 0.0)
    return Read(asked, node, seen.rows[node, place], above, light, worth)


def straight_exp(logits: Tensor) -> Tensor:
    """Nearly `exp(logits)`: powers of two, in straight lines between whole ones.

    Off by 6 % at most, which samples make good, and a few instructions where this is compiled.
    """
    power = logits / math.log(2)
    whole = power.floor()
    return torch.where(whole < -126, 0.0, torch.exp2(whole) * (1 + (power - whole)))


class Rest(NamedTuple):
    """Weights of what is left, `exp(logit - peak)`.

    Attributes:
        share: `[t, M]` of the mean of a node's keys that are left, for each of them.
        unread: `[t, M]` of all keys of a node that are left, by their codes.
        within: `[t, M, m]` of the samples' values: what their weights differ from the mean of the node.
        off: `[t, M, m]` what their weights differ from those by their codes.
        alone: `[t, M]` nodes with keys that are left, of which none is a sample.
    """

    share: Tensor
    unread: Tensor
    within: Tensor
    off: Tensor
    alone: Tensor


def rest_of(read: Read, samples: DrawnKeys, limit: Tensor, peak: Tensor) -> Rest:
    """What is left of each node; all samples' weights count for the keys that they stand for."""
    light = read.light * torch.exp(limit - peak).masked_fill(~read.worth, 0.0)[:, None, None]
    place = samples.place.expand(len(peak), -1, -1)
    usable = samples.exists & ~read.above.gather(2, place)
    left, used = (~read.above).sum(-1), usable.sum(-1)
    unread = light.sum(-1)
    mean = unread / left.clamp_min(1)
    stands_for = (left / used.clamp_min(1))[..., None] * usable
    true = torch.exp(samples.logits - peak[:, None, None]).masked_fill(~usable, 0.0)
    coded = light.gather(2, place).masked_fill(~usable, 0.0)
    share = torch.where(used > 0, 2 * mean - coded.sum(-1) / used.clamp_min(1), mean)
    within, off = stands_for * (true - mean[..., None]), stands_for * (true - coded)
    return Rest(share, unread, within, off, (used == 0) & (left > 0))


def weigh_rest(
    query: Tensor, seen: Seen, scores: Scores, samples: DrawnKeys, near: Attended, limit: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Output, lse, variance, fourth and overlap of queries that read from `limit` on; keys searched, rows read."""
    read = read_rows(query, seen, scores, limit)
    row_key, row_value = (t.index_select(0, read.row).to(query.dtype) for t in (seen.key, seen.value))
    rows = (query.index_select(0, read.query) * row_key).sum(-1)
    highest = torch.cat((near.lse[:, None], scores.sinks, samples.logits.flatten(1)), dim=1).amax(1)
    highest = torch.maximum(highest, limit.masked_fill(torch.isinf(limit), -math.inf))
    peak = highest.scatter_reduce(0, read.query, rows, "amax")
    peak = peak.masked_fill(torch.isneginf(peak), 0.0)
    rows = torch.exp(rows - peak.index_select(0, read.query))
    sinks, known = torch.exp(scores.sinks - peak[:, None]), torch.exp(near.lse - peak)
    rest = rest_of(read, samples, limit, peak)
    mass = (known + sinks.sum(1) + rest.unread.sum(1) + rest.off.sum((1, 2))).index_add(0, read.query, rows)
    output = known[:, None] * near.output + sinks @ seen.sink_value
    output = output + seen.rows.shape[1] * rest.share @ seen.node_value
    output = output + rest.within.flatten(1) @ samples.value.flatten(0, 1)
    # rows that are read by themselves are not among those that a mean is of
    rows = rows - rest.share[read.query, read.node]
    output = output.index_add(0, read.query, rows[:, None] * row_value)
    worth = read.worth & (mass > 0)
    mass = mass.masked_fill(~worth, 1.0)
    output, lse = output / mass[:, None], peak + mass.log()
    moments = _moments(rest, samples, seen, output, mass, torch.exp(limit - lse))
    result = (
        torch.where(worth[:, None], output, near.output),
        torch.where(worth, lse, near.lse),
        *(moment.masked_fill(~worth, math.inf) for moment in moments),
    )
    n_searched = int((~torch.isinf(limit)).sum()) * seen.rows.numel()
    n_rows = len(read.row) + len(query) * int(samples.exists.sum())
    return result, torch.tensor([n_searched, n_rows], device=query.device)


def _moments(
    rest: Rest, samples: DrawnKeys, seen: Seen, output: Tensor, mass: Tensor, unseen: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Variance, fourth and overlap; `unseen [t]` is the weight of a key at the limit.

    The error of a sample is `within (v - mean) + off (mean - output)`: two vectors that have nothing to do with
    one another, so that their squares add up.
    """
    within, off = rest.within / mass[:, None, None], rest.off / mass[:, None, None]
    away = _apart(output, seen.node_value.to(output.dtype))
    terms = within.square() * samples.apart + off.square() * away[..., None]
    # keys that no sample stands for: as if they were off together
    usual = samples.apart.sum(1) / samples.exists.sum(1)
    alone = (rest.unread / mass[:, None]).square().masked_fill(~rest.alone, 0.0) * usual
    # a key at the limit that no sample shows: what it may weigh, drawn as often as any other; not estimated, so
    # that it takes no part in how well the spread is known
    hidden = STRIDE * unseen.square() * samples.usual
    overlap = _overlap(within, off, samples.value, seen.node_value.to(output.dtype), output)
    overlap = overlap + alone.square().sum(1) + hidden.square()
    fourth = terms.square().sum((1, 2)) + alone.square().sum(1)
    return terms.sum((1, 2)) + alone.sum(1) + hidden, fourth, overlap


def _apart(outputs: Tensor, values: Tensor) -> Tensor:
    """Squares of distances `[t, n]`, not by products: what lies close would drown in their rounding."""
    return torch.cdist(outputs, values, compute_mode="donot_use_mm_for_euclid_dist").square()


def _overlap(within: Tensor, off: Tensor, values: Tensor, means: Tensor, output: Tensor) -> Tensor:
    """`[t]`: sum of the squares of all products of two terms, by random projections."""
    signs = projection(values.shape[-1], values.device).to(values.dtype).t()
    means = means @ signs
    terms = within[..., None] * (values @ signs - means[:, None])
    terms = terms + off[..., None] * (means - (output @ signs)[:, None])[:, :, None]
    terms = terms.flatten(1, 2)
    pairs = (terms.transpose(1, 2) @ terms).square()
    return (pairs.sum((1, 2)) - pairs.diagonal(dim1=1, dim2=2).sum(1)) / (SHADOWS * (SHADOWS - 1))


# Queries with a sampled rest in plain torch, block by block: the definition that compiled code follows.


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


# Everything that some queries see, on top of what they have read near them: those that an error bar asks for.


def read_all(
    query: Tensor, sources: Sources, view: View, near: Attended, wanted: Tensor, into: Attended, start: int = 0
) -> None:
    """Exact attention of the `wanted [T, G, Q]` queries, who have read `near`, written to `into`.

    Queries of a block see the same keys beyond it, from `start` on, and none of these is hidden from any: no mask
    is needed, and heads that share keys go together.
    """
    leaf, n_sinks = sources.rows.shape[2], sources.sink_key.shape[1]
    backend = view.backend.at("read on")
    for lane, rows, n_nodes in view.blocks():
        head, place = wanted[lane, :, rows].nonzero(as_tuple=True)
        if not len(head):
            continue
        own = (lane, head, place + rows.start)
        beyond = slice(start, start + n_sinks + n_nodes * leaf)
        key, value = (t[lane, beyond][None, None] for t in (sources.key, sources.value))
        tile = Tile(query[own][None, None], key, value, view.scale)
        found = backend.at(f"block {lane} {rows.start}").forward(tile)
        far = Attended(found.output[0, 0], found.lse[0, 0])
        lse = torch.logaddexp(near.lse[own], far.lse)
        anchor = lse.masked_fill(torch.isneginf(lse), 0.0)
        before, behind = (torch.exp(part - anchor)[:, None] for part in (near.lse[own], far.lse))
        into.output[own] = near.output[own] * before + far.output * behind
        into.lse[own] = lse


# Routed attention to a tolerance: what is left of a node is sampled instead of modelled, and queries read on.
#
# Every node is searched, and one key of every sixteen of a node (its outlier keys, then the others in tree order)
# stands
# for those that are not read by themselves: a nearly unbiased estimate with a measured spread, where the bias of a
# centroid could not be known. The samples come first, and say how light the keys must be that a query looks
# for; one
# whose error bar is too wide all the same looks again for lighter ones. A query that no search serves, or that is
# over the tolerance at last, reads everything. Which keys are sampled depends on the seed and on their node's
# number
# alone: draws are the same in pieces of a prompt, in single steps, and in any batch.

LOOKS = 2
"""Searches of a query, before everything is read."""
AIMED_AT = 0.9
"""Part of the tolerance that a search aims at, where a guess says how light its keys must be."""
DIRECTIONS, FREEDOM = 6.0, 40.0
"""What the guess believes about errors: in how many directions they point, and how well their spread is known."""
MOST_LIGHTER = 32.0
"""How many times lighter the keys of another look may be."""

CONFIDENCE = 0.95
"""Where none is asked for."""


class Within(NamedTuple):
    """A result with its error bars; all but the first two and the last are `[T, G, Q]`.

    Attributes:
        output, lse: The result.
        limit: Relative error that each query stays below, as often as `of_single_query` has it.
        error: The error that is expected of it, a root mean square over draws.
        further: Whether it looked for lighter keys than in any case.
        counts: Keys searched, rows read, by all queries.
    """

    output: Tensor
    lse: Tensor
    limit: Tensor
    error: Tensor
    further: Tensor
    counts: Tensor


def attend_to_tolerance(query: Tensor, sources: Sources, view: View, config: Routed, seed: int) -> Within:
    """Queries `[T, G, Q, D]` with their error bars, by the configuration's tolerance and confidence.

    Those whose bar is still above the tolerance have read everything.
    """
    attend = attend_near_compiled if can_run(query, sources, view) else attend_near
    near = attend(query, sources, view)
    bars = attend_within(query, sources, view, near, config, seed)
    read_all(query, sources, view, near, is_over(bars.limit, config), Attended(bars.output, bars.lse))
    return bars._replace(output=bars.output.to(query.dtype))


def is_over(limit: Tensor, config: Routed) -> Tensor:
    """Which error bars are above the tolerance."""
    return ~(limit <= (config.tolerance or 0.0))


def attend_within(
    query: Tensor, sources: Sources, view: View, near: Attended, config: Routed, seed: int
) -> Within:
    """Attend such that every error bar is within the tolerance, as far as looking for lighter keys gets.

    Args:
        query: `[T, G, Q, D]`.
        sources: What they see.
        view: How they see it; its search is what is looked for in any case.
        near: What they read in any case.
        config: Its tolerance and confidence.
        seed: Of the draws.
    """
    tolerance = config.tolerance or 0.0
    confidence = of_single_query(CONFIDENCE if config.confidence is None else config.confidence)
    attend = attend_sampled_compiled if can_run(query, sources, view) else attend_sampled_plain
    view = replace(view, search=Search(max(1.0, view.search.share)))
    places = sample_places(sources.rows.shape[1], sources.rows.shape[2], seed, query.device)
    directions, freedom = torch.tensor((DIRECTIONS, FREEDOM), dtype=torch.float32)
    guessed = longest_error(directions, freedom, confidence)
    allowed = float(AIMED_AT * tolerance / guessed) ** 2
    aim, again = torch.full_like(near.lse, torch.inf), torch.ones_like(near.lse, dtype=torch.bool)
    whole, counts = attend(query, sources, view, near, Draws(places, again, aim, allowed))
    limit, error = error_limit(whole, confidence), estimated_error(whole)
    for _ in range(LOOKS - 1):
        # the variance falls as fast as the weight from which on keys are read
        lighter = (limit / (AIMED_AT * tolerance)).square() if tolerance else torch.full_like(limit, torch.inf)
        again = (limit > tolerance) & (lighter <= MOST_LIGHTER)
        if not bool(again.any()):
            break
        aim = whole.limit - lighter.clamp(2.0, MOST_LIGHTER).log()
        found, more = attend(query, sources, view, near, Draws(places, again, aim, allowed))
        counts += more
        bars = error_limit(found, confidence), estimated_error(found)
        for kept, part in zip((*whole, limit, error), (*found, *bars), strict=True):
            kept[again] = part[again]
    return Within(whole.output, whole.lse, limit, error, whole.further, counts)
