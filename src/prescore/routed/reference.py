"""Attention beyond the local chunks in plain torch: sinks, rows found by their codes, centroids for the rest.

This is the definition that compiled code follows; it runs on every device and in every precision, and drops
weights. Queries come in blocks of one lane that see the same nodes. All but `find_rows`, which makes discrete
choices, are ordinary functions of torch that autograd goes through: the gradient of a merged softmax is that of
`sum(w v)` and `sum(w)` under the merged log-sum-exp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from prescore.ops.dropout import Dropout
from prescore.routed.index import Codes, coded_logits
from prescore.routed.layout import ODD

REACH = 3.0
"""Deviations above a node's mean at which a key is still looked for."""
SINK_PART = 0.1
"""How much of the sinks' mass counts as known: trained models give them weight, and values near zero."""


class Seen(NamedTuple):
    """What a block of queries sees: `S` sinks and `M` nodes of one lane.

    Attributes:
        key, value: `[N, D]` all rows of the lane.
        sink_key, sink_value: `[S, D]`.
        node_key, node_value: `[M, D]` means.
        rows: `[M, L]` positions of the nodes' keys, the odd ones first.
        codes: Of what `[M, L]` keys differ from their means.
        spread: `[D, D]` covariance of keys within the nodes, pooled.
        drift: `[D, Dv]` that of keys and values.
    """

    key: Tensor
    value: Tensor
    sink_key: Tensor
    sink_value: Tensor
    node_key: Tensor
    node_value: Tensor
    rows: Tensor
    codes: Codes
    spread: Tensor
    drift: Tensor


class Scores(NamedTuple):
    """What `t` queries know before any search.

    Attributes:
        sinks: `[t, S]` logits.
        nodes: `[t, M]` logits of the means.
        spread: `[t, 1]` deviation of the logits within nodes.
    """

    sinks: Tensor
    nodes: Tensor
    spread: Tensor


class Found(NamedTuple):
    """What a block of `t` queries reads.

    Attributes:
        query, row: `[R]` pairs of queries and rows, in ascending order.
        hits: `[t, M]` rows read of each node.
        n_searched: Keys whose codes were compared.
    """

    query: Tensor
    row: Tensor
    hits: Tensor
    n_searched: Tensor


@dataclass(frozen=True)
class Search:
    """How much is looked for.

    Attributes:
        share: A key is read where its weight may exceed one part in so many of what is known.
        reach: Deviations above a node's mean at which a key is still looked for.
    """

    share: float
    reach: float = REACH

    @property
    def log_share(self) -> float:
        """-inf where nothing is to be read."""
        return math.log(self.share) if self.share > 0 else -math.inf


def scores_of(query: Tensor, seen: Seen) -> Scores:
    """Logits and spread of a block of queries `[t, D]`, already scaled."""
    variance = ((query @ seen.spread) * query).sum(-1, keepdim=True)
    # bounded before the root, whose slope is infinite at 0; what is no number (inf - inf) is large
    spread = variance.nan_to_num(nan=MOST_SPREAD**2).clamp(LEAST_SPREAD**2, MOST_SPREAD**2).sqrt()
    return Scores(query @ seen.sink_key.t(), query @ seen.node_key.t(), spread)


def limit_of(scores: Scores, seen: Seen, search: Search, near: Tensor) -> Tensor:
    """`[t]` from which logit on rows are read: a share of all that is known before any search.

    Args:
        scores: Of the queries.
        seen: What they see.
        search: How much is looked for.
        near: `[t]` log-sum-exp of what they read elsewhere.
    """
    return torch.cat((near[:, None], _known(scores, seen)), dim=1).logsumexp(1) - search.log_share


def followed_limit(limit: Tensor, scores: Scores, seen: Seen, search: Search) -> Tensor:
    """A limit that was kept, as a function of the scores: its value is the same, and it has their gradients.

    What was read elsewhere need not be kept for that: a log-sum-exp moves with each of its terms by the term's
    share of it.
    """
    if not search.share:
        return limit  # infinite, whatever is known
    known = (limit + search.log_share).detach()
    shares = torch.exp(_known(scores, seen) - known[:, None]).sum(1)
    return limit + (shares - shares.detach())


def _known(scores: Scores, seen: Seen) -> Tensor:
    """`[t, S + M]` logits that the limit counts: of sinks, and of all keys of each node."""
    gain = (0.5 * scores.spread.square()).clamp_max(MOST_KNOWN_GAIN)
    nodes = scores.nodes + math.log(seen.rows.shape[1]) + gain
    return torch.cat((scores.sinks + math.log(SINK_PART), nodes), dim=1)


def find_rows(query: Tensor, seen: Seen, search: Search, scores: Scores, limit: Tensor) -> Found:
    """Which rows a block of queries `[t, D]`, already scaled, reads; `limit [t]` as `limit_of` has it.

    Every query compares the outlier keys of all nodes, and the other keys of those nodes that may hold one to read.
    """
    (n_nodes, leaf), odd = seen.rows.shape, min(ODD, seen.rows.shape[1])
    searched = scores.nodes + search.reach * scores.spread >= limit[:, None]
    looking = limit < math.inf

    def reaching(nodes: Tensor, keys: slice) -> Tensor:
        codes = Codes(*(part.index_select(0, nodes)[:, keys] for part in seen.codes))
        coded = coded_logits(query, Codes(*(part.flatten(0, 1) for part in codes)))
        apart = limit[:, None] - scores.nodes.index_select(1, nodes)
        above: Tensor = coded.view(len(query), *codes.scales.shape[:2]) >= apart[..., None]
        return above

    some, every = searched.any(0).nonzero().squeeze(1), torch.arange(n_nodes, device=query.device)
    above = torch.zeros(len(query), n_nodes, leaf, dtype=torch.bool, device=query.device)
    above[:, :, :odd] = reaching(every, slice(odd)) & looking[:, None, None]
    above[:, some, odd:] = reaching(some, slice(odd, None)) & searched[:, some, None]
    asked, node, place = above.nonzero(as_tuple=True)
    n_searched = searched.sum() * (leaf - odd) + looking.sum() * n_nodes * odd
    return Found(asked, seen.rows[node, place], above.sum(-1), n_searched)


class Weighed(NamedTuple):
    """What a block counts.

    Attributes:
        columns: `[t, S + M]` logits of sinks and centroids.
        rows: `[R]` logits of the rows it reads.
        move: `[t, M]` how far the centroids' values move along the drift.
        drift: `[t, Dv]`.
    """

    columns: Tensor
    rows: Tensor
    move: Tensor
    drift: Tensor


def weigh(query: Tensor, seen: Seen, scores: Scores, limit: Tensor, found: Found, row_key: Tensor) -> Weighed:
    """Logits under which everything is counted; `row_key [R, D]` are the keys of the rows read."""
    left = seen.rows.shape[1] - found.hits
    gain, move = corrections(limit[:, None] - scores.nodes, scores.spread)
    centroids = scores.nodes + gain + left.clamp_min(1).to(query.dtype).log()
    columns = torch.cat((scores.sinks, centroids.masked_fill(left == 0, -math.inf)), dim=1)
    rows = (query.index_select(0, found.query) * row_key).sum(-1)
    return Weighed(columns, rows, move, query @ seen.drift)


def row_sums(
    weighed: Weighed, shift: Tensor, seen: Seen, found: Found, row_value: Tensor, dropout: Dropout | None
) -> tuple[Tensor, Tensor]:
    """`sum(w v) [t, Dv]` and `sum(w) [t]`, `w = exp(logit - shift)`; dropped weights count in the latter only."""
    n_sinks = seen.sink_key.shape[0]
    columns = torch.exp(weighed.columns - shift[:, None])
    rows = torch.exp(weighed.rows - shift.index_select(0, found.query))
    mass = columns.sum(1).index_add(0, found.query, rows)
    if dropout is not None:
        columns = columns * dropout.at("columns").factors(tuple(columns.shape), columns)
        rows = rows * dropout.at("rows").factors(tuple(rows.shape), rows)
    values = torch.cat((seen.sink_value, seen.node_value))
    moved = (columns[:, n_sinks:] * weighed.move).sum(1, keepdim=True) * weighed.drift
    return (columns @ values + moved).index_add(0, found.query, rows[:, None] * row_value), mass


def highest(weighed: Weighed, found: Found, near: Tensor) -> Tensor:
    """`[t]` the largest logit that a query counts, or what it read elsewhere; 0 where it sees nothing."""
    columns = torch.cat((near[:, None], weighed.columns), dim=1).amax(1)
    peak = columns.scatter_reduce(0, found.query, weighed.rows, "amax")
    return peak.masked_fill(torch.isneginf(peak), 0.0)


# What is left of a node when its heaviest keys are read by themselves.
#
# A centroid counts the other keys of its node as if their logits were normal around that of the mean, with the
# deviation `s` that the pooled covariance gives for this query, cut off at the limit from which on keys are read.
# The mean of `exp` under that cut is `exp(s^2 / 2) Phi(t / s - s) / Phi(t / s)`, `t` the distance to the limit,
# and
# the values behind it lie on average `1 - phi(t / s - s) / (s Phi(t / s - s))` of the drift away from their mean.

MOST_GAIN = 2.0
"""Logits within a node are not quite normal: a centroid's gain is cut off here."""
MOST_KNOWN_GAIN = 4.0
"""The same before any key was read, when the limit is chosen."""
LEAST_SPREAD, MOST_SPREAD = 1e-3, 1e15
FARTHEST = 1e30
"""Where nothing is looked for the limit is infinite; gradients want a number."""


def corrections(distance: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """What a centroid's logit gains, and how far its value moves along the drift.

    Args:
        distance: `[t, M]` from the nodes' logits to the limit.
        spread: `[t, 1]` deviation of the logits within nodes.
    """
    reach = distance.clamp(-FARTHEST, FARTHEST) / spread
    beyond, slope = _log_normal(reach - spread)
    within, _ = _log_normal(reach)
    gain = (0.5 * spread * spread + beyond - within).clamp(-MOST_GAIN, MOST_GAIN)
    return gain, (1 - slope / spread).clamp(-1, 1)


def _log_normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """The log of the normal distribution function, by a logistic approximation, and its slope."""
    x = x.clamp(-4, 8)
    y = x * (1.5976 + 0.07056 * x * x)
    return -softplus(-y), torch.sigmoid(-y) * (1.5976 + 0.21168 * x * x)
