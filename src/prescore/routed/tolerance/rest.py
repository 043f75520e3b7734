"""What a query with samples makes of the keys that it does not read, in plain torch.

Every key of a node that is not read is weighed by its code, and given the mean value of those that are left; that
is known for all of them. Each sample then says how far off this is for the keys that it stands for: its true
weight and value stand in place of what was assumed of it. So the sum is nearly unbiased whatever the keys are like
(a ratio estimate: how many samples are left of a node depends on which were drawn), and its terms are as small as
what was assumed is good.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.routed.codes import Codes, coded_logits
from prescore.routed.far import Scores, Seen
from prescore.routed.tolerance.draws import MARGIN, MOST_ROWS, SHADOWS, STRIDE, projection
from prescore.routed.tolerance.samples import DrawnKeys
from prescore.types import Attended


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
