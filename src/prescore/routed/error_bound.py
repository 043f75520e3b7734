"""Routed attention within a tolerance: unread keys are sampled instead of modelled, so that the error has a bound.

Every cluster is searched, and one key of every sixteen of a cluster is a sample for the unread ones. That gives a
nearly unbiased estimate with a measured variance, where the bias of a centroid could not be known. The samples
come first and choose how light the keys must be that a query reads. A query whose error bound is too wide searches
again for lighter keys; one that no search serves reads every key. Which keys are sampled depends on the seed and
on the number of their cluster alone, so the samples are the same in chunked prefill, in decode steps and in any
batch.

The error of a sampled result is, to first order, a sum of independent terms, one per sample, whose mean square
length `V` is estimated by the sum of theirs. Each is small, since heavier keys are read. So the error is nearly
normal with the covariance `C` of the terms, and its squared length is nearly `V` times a chi-square over its
degrees of freedom, `tr(C)^2 / tr(C^2)`: the number of *directions* of the error. `V` is itself a sum of squares,
with `2 V^2` over the sum of their squares degrees of freedom (Satterthwaite). The ratio of both is an F variable,
and the bound is its quantile.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.config import Routed
from prescore.ops.backend import Tile
from prescore.routed import native, plain
from prescore.routed.layout import RoutedKeys, View
from prescore.routed.native import WIDTH, Expected
from prescore.routed.reference import (
    INT4_PADDING,
    FarKeys,
    FarLogits,
    Int4Keys,
    far_logits,
    int4_logits,
    logit_threshold,
    take,
)
from prescore.types import Attended, Values

STRIDE = 16
"""Keys that a sample represents."""
N_THRESHOLDS = 16
"""Thresholds that the samples choose from."""
STEP = math.log(2) / 2
"""From one threshold to the next: two steps for keys of half the weight."""
MAX_HIT_SHARE = 1 / 3
"""Share of the far keys from which on reading every key is faster than reading single ones."""
MAX_INT4_ERROR = 2.0
"""Standard deviation of int4 logits up to which a search is trusted.

Int4 logits are raised by `MARGIN` deviations. The chance that a key is missed all the same falls faster with its
weight than its part of the error grows, but only up to here.
"""
MARGIN = 2.0
"""Standard deviations by which int4 logits are raised."""
BELOW = 0.6
"""Empirical factor on the variance of weights below the threshold, used for the first guess."""
PROJECTIONS = 8
"""Random projections of values that estimate the number of directions of errors."""
SEARCHES = 2
"""Searches of a query, before every key is read."""
AIMED_AT = 0.9
"""Part of the tolerance that a search aims at."""
DIRECTIONS, FREEDOM = 6.0, 40.0
"""What the guess assumes about errors: number of directions, and degrees of freedom of their variance."""
MAX_LIGHTER = 32.0
"""How many times lighter the keys of the second search may be."""
CONFIDENCE = 0.95
"""Where none is configured."""
OFTEN, ONE_IN = 4, 4
"""The bound of one query may fail `OFTEN` times as often as 1 - confidence, at most 1 in `ONE_IN`."""


class Bounded(NamedTuple):
    """A result with its error bounds; all but `output` and `counts` are `[T, G, n]`.

    Attributes:
        output, lse: The result.
        bound: Relative error that each query stays below, with the confidence of `single_query_confidence`.
        error: Expected relative error, a root mean square over samples.
        refined: Whether the query read lighter keys than `min_weight`.
        counts: Int4 keys compared, far keys read, of all queries.
    """

    output: Tensor
    lse: Tensor
    bound: Tensor
    error: Tensor
    refined: Tensor
    counts: Tensor


def attend_within_tolerance(query: Tensor, keys: RoutedKeys, view: View, config: Routed, seed: int) -> Bounded:
    """Queries `[T, G, n, D]` by the configured tolerance; those still above it have read every key."""
    local = (native if view.native else plain).attend_local(query, keys, view)
    bounded = refine(query, keys, view, local, config, seed)
    read_all(query, keys, view, local, above_tolerance(bounded.bound, config), Attended(*bounded[:2]))
    return bounded._replace(output=bounded.output.to(query.dtype))


def above_tolerance(bound: Tensor, config: Routed) -> Tensor:
    """Which error bounds exceed the tolerance."""
    return ~(bound <= (config.tolerance or 0.0))


def refine(query: Tensor, keys: RoutedKeys, view: View, local: Attended, config: Routed, seed: int) -> Bounded:
    """Search for keys light enough that every bound is within the tolerance, as far as two searches get.

    Args:
        query: `[T, G, n, D]`.
        keys: What they can read.
        view: What each query sees; its threshold is the first one tried.
        local: Result of their local keys.
        config: Tolerance and confidence.
        seed: Of the samples.
    """
    tolerance = config.tolerance or 0.0
    confidence = single_query_confidence(CONFIDENCE if config.confidence is None else config.confidence)
    sample = _sampled_native if view.native else _sampled_plain
    view = replace(view, log_inverse=max(0.0, view.log_inverse))
    places = sample_places(keys.positions.shape[1], keys.positions.shape[2], seed, query.device)
    directions, freedom = torch.tensor((DIRECTIONS, FREEDOM), dtype=torch.float32, device="cpu")
    allowed = float(AIMED_AT * tolerance / error_quantile(directions, freedom, confidence)) ** 2
    target, again = torch.full_like(local.lse, torch.inf), torch.ones_like(local.lse, dtype=torch.bool)
    result, counts = sample(query, keys, view, local, Request(places, again, target, allowed))
    bound, error = error_bound(result, confidence), expected_error(result)
    for _ in range(SEARCHES - 1):
        # the variance falls as fast as the weight of the lightest key read
        lighter = (bound / (AIMED_AT * tolerance)).square() if tolerance else torch.full_like(bound, torch.inf)
        again = (bound > tolerance) & (lighter <= MAX_LIGHTER)
        if not bool(again.any()):
            break
        target = result.threshold - lighter.clamp(2.0, MAX_LIGHTER).log()
        better, more = sample(query, keys, view, local, Request(places, again, target, allowed))
        counts += more
        new = (*better, error_bound(better, confidence), expected_error(better))
        for old, part in zip((*result, bound, error), new, strict=True):
            old[again] = part[again]
    return Bounded(result.output, result.lse, bound, error, result.refined, counts)


def read_all(
    query: Tensor, keys: RoutedKeys, view: View, local: Attended, wanted: Tensor, into: Attended, start: int = 0
) -> None:
    """Exact attention of the `wanted [T, G, n]` queries, merged with `local` and written to `into`.

    The queries of a run see the same far keys, from `start` on, and none is hidden from any: no mask is needed,
    and the query heads of a KV head go into one tile.
    """
    size, n_sinks = keys.positions.shape[2], keys.sink_key.shape[1]
    backend = view.backend.at("read on")
    for kv_head, queries, n_clusters in view.runs():
        head, place = wanted[kv_head, :, queries].nonzero(as_tuple=True)
        if not len(head):
            continue
        own = (kv_head, head, place + queries.start)
        beyond = slice(start, start + n_sinks + n_clusters * size)
        key, value = (t[kv_head, beyond][None, None] for t in (keys.key, keys.value))
        tile = Tile(query[own][None, None], key, value, view.scale)
        result = backend.at(f"block {kv_head} {queries.start}").forward(tile)
        far = Attended(result.output[0, 0], result.lse[0, 0])
        lse = torch.logaddexp(local.lse[own], far.lse)
        anchor = lse.masked_fill(torch.isneginf(lse), 0.0)
        near, beyond_weight = (torch.exp(part - anchor)[:, None] for part in (local.lse[own], far.lse))
        into.output[own] = local.output[own] * near + far.output * beyond_weight
        into.lse[own] = lse


def error_stats(bounds: tuple[Tensor, ...], real: Tensor, visible: Tensor, config: Routed) -> tuple[float, Values]:
    """Keys that queries above the tolerance read in addition, per real query; and the error fields of `Stats`.

    Args:
        bounds: Bound, expected error and `refined`, `[B, Hq, Nq]` each.
        real: `[B, Hq, Nq]` queries that count.
        visible: `[B, Nq]` keys that each query may see.
        config: Its tolerance.
    """
    above = above_tolerance(bounds[0], config) & real
    more = float((above * visible[:, None]).sum() / real.sum().clamp_min(1))
    return more, summarise(*(part[real] for part in (*bounds, above)))


def summarise(bound: Tensor, error: Tensor, refined: Tensor, above: Tensor) -> Values:
    """The error fields of `Stats`, of queries of which those `above` the tolerance read every key."""
    if not bound.numel():
        return dict.fromkeys(("error_estimate", "error_bound_mean", "error_bound_max", "refined", "read_all"), 0.0)
    bound = bound.masked_fill(above, 0.0)
    return {
        "error_estimate": float(error.masked_fill(above, 0.0).mean()),
        "error_bound_mean": float(bound.mean()),
        "error_bound_max": float(bound.max()),
        "refined": float((refined | above).double().mean()),
        "read_all": float(above.double().mean()),
    }


# --- the bound
# ------------------------------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """Sampled results of queries, `[T, G, n]` all but the first.

    Attributes:
        output, lse: Of all that was read and sampled.
        variance: Sum of the squared lengths of the error terms; inf where reading every key is faster.
        fourth: Sum of the squares of those.
        overlap: Sum of the squares of the products of all pairs of terms, estimated.
        threshold: The logit from which on keys were read.
        refined: Whether that is below the threshold of `min_weight`.
    """

    output: Tensor
    lse: Tensor
    variance: Tensor
    fourth: Tensor
    overlap: Tensor
    threshold: Tensor
    refined: Tensor


def single_query_confidence(confidence: float) -> float:
    """How often the bound of a single query must hold, for that share of all queries to be within the tolerance.

    Queries stop with bounds anywhere below the tolerance, and errors of those far below hardly ever reach it. So
    few queries exceed it even if one in five of those at the tolerance does (measured in docs/default.md).
    """
    wrong = 1 - confidence
    return 1 - max(wrong, min(OFTEN * wrong, 1 / ONE_IN))


def expected_error(estimate: Estimate) -> Tensor:
    """Expected relative error of an output, a root mean square over samples; inf where it is unknown."""
    length = torch.linalg.vector_norm(estimate.output.to(estimate.variance.dtype), dim=-1)
    error = estimate.variance.sqrt() / length
    return torch.where(estimate.variance == 0, 0.0, error).nan_to_num(nan=torch.inf, posinf=torch.inf)


def error_bound(estimate: Estimate, confidence: float) -> Tensor:
    """Relative error that an output stays below with that confidence; inf where it is unknown."""
    square = estimate.variance.square()
    least = torch.finfo(square.dtype).tiny
    freedom = (2 * square / estimate.fourth.clamp_min(least)).clamp_min(1.0)
    directions = (square / torch.maximum(estimate.overlap, estimate.fourth).clamp_min(least)).clamp_min(1.0)
    bound = error_quantile(directions, freedom, confidence) * expected_error(estimate)
    return torch.where(estimate.variance == 0, 0.0, bound).nan_to_num(nan=torch.inf, posinf=torch.inf)


def error_quantile(directions: Tensor, freedom: Tensor, confidence: float) -> Tensor:
    """The root of the quantile of an F variable.

    By Paulson's approximation, in which cube roots are normal: within 2 % from 5 degrees of freedom on. Below it
    is too large; there a bound at 1, the closed form at 2, and an interpolation are used.
    """
    one = 1 / float(torch.special.ndtri(torch.tensor(1 - confidence / 2, dtype=torch.float64, device="cpu")))
    power = confidence ** (2 / directions)
    two = (2 / directions * power / (1 - power)).sqrt()
    five = _paulson(directions, torch.full_like(freedom, 5.0), confidence)
    few = torch.where(freedom < 2, one * (two / one) ** (freedom - 1), two * (five / two) ** ((freedom - 2) / 3))
    several = _paulson(directions, freedom, confidence)
    return torch.where(freedom < 5, torch.minimum(few, several), several)


def _paulson(directions: Tensor, freedom: Tensor, confidence: float) -> Tensor:
    z = float(torch.special.ndtri(torch.tensor(confidence, dtype=torch.float64, device="cpu")))
    a, b = 2 / (9 * directions), 2 / (9 * freedom)
    first, middle, last = (1 - b).square() - z * z * b, (1 - a) * (1 - b), (1 - a).square() - z * z * a
    root = (middle.square() - first * last).clamp_min(0.0).sqrt()
    cube_root = (middle + (root if z > 0 else -root)) / first  # below the median the smaller root is the right one
    return torch.where(first > 0, cube_root.clamp_min(0.0) ** 1.5, torch.inf)


# --- samples
# --------------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """What queries with samples are asked for.

    Attributes:
        places: `[M]` which key of every sixteen is sampled in each cluster.
        active: `[T, G, n]` queries that take part.
        target: `[T, G, n]` the threshold; inf = the samples choose it.
        allowed: Square of the relative error that they aim at.
    """

    places: Tensor
    active: Tensor
    target: Tensor
    allowed: float


class Samples(NamedTuple):
    """What `t` queries know of the `m` samples of each of `M` clusters.

    Attributes:
        value: `[M, m, Dv]`.
        logits: `[t, M, m]`; -inf where there is none.
        place: `[M, m]` in their clusters.
        exists: `[M, m]`.
        distance2: `[M, m]` squared distances of the values from their centroid; 0 where there is none.
    """

    value: Tensor
    logits: Tensor
    place: Tensor
    exists: Tensor
    distance2: Tensor

    @property
    def mean_distance2(self) -> Tensor:
        """The mean over all samples."""
        return self.distance2.sum() / self.exists.sum().to(self.distance2.dtype)


def sample_places(n_clusters: int, cluster_size: int, seed: int, device: torch.device) -> Tensor:
    """`[M]`: which key of every sixteen is sampled in each cluster, by a hash of its number."""
    numbers = torch.arange(1, n_clusters + 1, dtype=torch.int64, device="cpu")
    mixed = numbers * 0x9E3779B1 + (seed % 2**31) * 0x85EBCA6B
    for factor in (0x2C1B3C6D, 0x297A2D39):
        mixed = ((mixed ^ (mixed >> 15)) * factor) % 2**32
    return ((mixed ^ (mixed >> 15)) % min(STRIDE, cluster_size)).to(device)


def projections(value_dim: int, device: torch.device) -> Tensor:
    """`[PROJECTIONS, Dv]` of random signs, the same in every call."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    drawn = torch.randint(2, (PROJECTIONS, value_dim), generator=generator, device="cpu", dtype=torch.int64)
    return (2 * drawn - 1).to(device, torch.float32)


def int4_units(scales: Tensor) -> Tensor:
    """`[T, M, 2]` what a unit of int4 keys up to each cluster is worth; `scales [T, M, L, 2]`, or in blocks."""
    flat = scales if scales.ndim == 4 else scales.transpose(3, 4).flatten(2, 3)
    squares = flat.square().mean(2).cumsum(1)
    counts = torch.arange(1, squares.shape[1] + 1, dtype=torch.int64, device=squares.device)[:, None]
    return (squares / counts).sqrt()


def _sample_positions(places: Tensor, cluster_size: int) -> tuple[Tensor, Tensor]:
    """`[M, m]` places of the samples in their clusters, and which of them exist."""
    each = -(-cluster_size // STRIDE)
    place = places[:, None] + torch.arange(each, dtype=torch.int64, device=places.device) * STRIDE
    return place.clamp_max(cluster_size - 1), place < cluster_size


def _samples(query: Tensor, far: FarKeys, places: Tensor) -> Samples:
    """The samples of the clusters that queries `[t, D]`, times the scale, see."""
    place, exists = _sample_positions(places, far.positions.shape[1])
    position = far.positions.gather(1, place).flatten()
    keys, values = (t.index_select(0, position).to(query.dtype) for t in (far.key, far.value))
    logits = (query @ keys.t()).view(-1, *exists.shape).masked_fill(~exists, -math.inf)
    values = values.view(*exists.shape, -1)
    distance2 = (values - far.centroid_value.to(query.dtype)[:, None]).square().sum(-1).masked_fill(~exists, 0.0)
    return Samples(values, logits, place, exists, distance2)


def _int4_error(query: Tensor, far: FarKeys) -> Tensor:
    """`[t]` standard deviation of the error of int4 logits, a root mean square over the keys."""
    halves = pad(query, (0, -query.shape[-1] % INT4_PADDING)).unflatten(-1, (2, -1))
    units = int4_units(far.int4.scales[None].to(query.dtype))[0, -1]
    lengths: Tensor = torch.linalg.vector_norm(halves, dim=-1)
    return (lengths * units).square().sum(-1).sqrt() / 12**0.5


def _choose_threshold(
    logits: FarLogits, samples: Samples, far: FarKeys, local: Attended, first: Tensor, allowed: float
) -> Tensor:
    """`[t]` the highest threshold below which the samples vary little enough.

    Infinite where there is none, or where so many keys would be read that reading every key is faster. The result
    is guessed from local keys, sinks and samples. A term of the error is as large as a weight differs from the
    mean of its cluster: of weights `exp(x)` with normal `x` of deviation `s` that is a part `1 - exp(-s^2)` of
    their mean square, and less of those below a threshold.
    """
    represents = (far.positions.shape[1] / samples.exists.sum(1).to(first.dtype)).log()
    weighted = samples.logits + represents[:, None]
    lse = torch.cat((local.lse[:, None], logits.sinks, weighted.flatten(1)), dim=1).logsumexp(1)
    weights = torch.exp(weighted - lse[:, None, None])
    output = torch.exp(local.lse - lse)[:, None] * local.output
    output = output + torch.exp(logits.sinks - lse[:, None]) @ far.sink_value
    output = output + weights.flatten(1) @ samples.value.flatten(0, 1)
    uneven = BELOW * (1 - torch.exp(-logits.std.square()))
    terms = uneven * (weights.square() * samples.distance2).flatten(1)
    length, flat, n_samples = output.square().sum(1), samples.logits.flatten(1), samples.exists.sum()
    chosen = torch.full_like(first, math.inf)
    for step in reversed(range(N_THRESHOLDS)):
        threshold = first - step * STEP
        read = flat >= threshold[:, None]
        hidden = STRIDE * torch.exp(2 * (threshold - lse)) * samples.mean_distance2
        fits = (terms.masked_fill(read, 0.0).sum(1) + hidden) <= allowed * length
        few = read.sum(1) <= MAX_HIT_SHARE * n_samples
        # higher thresholds come last, and what is too much for them is too much for all
        chosen = torch.where(fits, threshold, chosen).masked_fill(~few, math.inf)
    return chosen


# --- in plain torch
# -------------------------------------------------------------------------------------------------


def _sampled_plain(
    query: Tensor, keys: RoutedKeys, view: View, local: Attended, request: Request
) -> tuple[Estimate, Tensor]:
    """Estimates of the active queries; also keys compared and keys read."""
    output, lse = (t.clone() for t in local)
    variance, fourth, overlap, threshold = (torch.zeros_like(lse) for _ in range(4))
    result = Estimate(output, lse, variance, fourth, overlap, threshold, torch.zeros_like(request.active))
    counts = torch.zeros(2, dtype=torch.int64, device=query.device)
    for block in plain.far_blocks(query, keys, view):
        kv_head, head, queries, n_clusters = block
        some = request.active[kv_head, head, queries].nonzero().squeeze(1) + queries.start
        if not len(some):
            continue
        own = (kv_head, head, some)
        scaled, before = query[own].to(lse.dtype) * view.scale, Attended(local.output[own], local.lse[own])
        far = plain.far_keys(keys, view, block)
        logits, samples = far_logits(scaled, far), _samples(scaled, far, request.places[:n_clusters])
        first = logit_threshold(logits, far, view.log_inverse, before.lse)
        guess = _choose_threshold(logits, samples, far, before, first, request.allowed)
        guess = guess.masked_fill(_int4_error(scaled, far) > MAX_INT4_ERROR, math.inf)
        target = request.target[own].to(first.dtype)
        chosen = torch.where(torch.isinf(target), guess, target)
        parts, more = _estimate(scaled, far, logits, samples, before, chosen)
        for full, part in zip(result, (*parts, chosen, chosen != first), strict=True):
            full[own] = part
        counts += more
    return result, counts


def straight_exp(logits: Tensor) -> Tensor:
    """Nearly `exp(logits)`: powers of two, linear between whole ones. At most 6 % off, and cheap in C."""
    power = logits / math.log(2)
    floor = power.floor()
    return torch.where(floor < -126, 0.0, torch.exp2(floor) * (1 + (power - floor)))


def _estimate(
    query: Tensor, far: FarKeys, logits: FarLogits, samples: Samples, local: Attended, threshold: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Output, lse, variance, fourth and overlap of queries that read from `threshold` on; keys compared and read.

    Every unread key is weighed by its int4 logit and given the mean value of the unread keys of its cluster. Each
    sample then corrects this for the keys that it represents: its true weight and value replace what was assumed.
    So the sum is nearly unbiased, whatever the keys are like.
    """
    n_clusters, size = far.positions.shape
    int4 = Int4Keys(*(part.flatten(0, 1) for part in far.int4))
    raised, centred = (
        logits.centroids[..., None] + int4_logits(query, int4, margin).unflatten(1, (-1, size))
        for margin in (MARGIN, 0.0)
    )
    read = raised >= threshold[:, None, None]
    worth = ~torch.isinf(threshold) & (read.flatten(1).sum(1) <= int(MAX_HIT_SHARE * n_clusters * size))
    read &= worth[:, None, None]
    which, cluster, place = read.nonzero(as_tuple=True)
    position = far.positions[cluster, place]
    hit_key, hit_value = (t.index_select(0, position).to(query.dtype) for t in (far.key, far.value))
    hits = (query.index_select(0, which) * hit_key).sum(-1)
    highest = torch.cat((local.lse[:, None], logits.sinks, samples.logits.flatten(1)), dim=1).amax(1)
    highest = torch.maximum(highest, threshold.masked_fill(torch.isinf(threshold), -math.inf))
    peak = highest.scatter_reduce(0, which, hits, "amax")
    peak = peak.masked_fill(torch.isneginf(peak), 0.0)
    hits = torch.exp(hits - peak.index_select(0, which))
    sinks, local_mass = torch.exp(logits.sinks - peak[:, None]), torch.exp(local.lse - peak)
    light = straight_exp(centred - threshold[:, None, None]).masked_fill(read, 0.0)
    light = light * torch.exp(threshold - peak).masked_fill(~worth, 0.0)[:, None, None]
    unread = _unread(read, light, samples, peak)
    mass = (local_mass + sinks.sum(1) + unread.mass.sum(1) + unread.off.sum((1, 2))).index_add(0, which, hits)
    output = local_mass[:, None] * local.output + sinks @ far.sink_value
    output = output + size * unread.share @ far.centroid_value
    output = output + unread.within.flatten(1) @ samples.value.flatten(0, 1)
    # keys that are read do not belong to the mean of the unread ones
    output = output.index_add(0, which, (hits - unread.share[which, cluster])[:, None] * hit_value)
    worth = worth & (mass > 0)
    mass = mass.masked_fill(~worth, 1.0)
    output, lse = output / mass[:, None], peak + mass.log()
    moments = _moments(unread, samples, far, output, mass, torch.exp(threshold - lse))
    result = (
        torch.where(worth[:, None], output, local.output),
        torch.where(worth, lse, local.lse),
        *(moment.masked_fill(~worth, math.inf) for moment in moments),
    )
    n_compared = int((~torch.isinf(threshold)).sum()) * far.positions.numel()
    n_read = len(position) + len(query) * int(samples.exists.sum())
    return result, torch.tensor([n_compared, n_read], dtype=torch.int64, device=query.device)


class _Unread(NamedTuple):
    """Weights of the unread keys, `exp(logit - peak)`.

    Attributes:
        share: `[t, M]` weight put on the cluster's mean value, per key.
        mass: `[t, M]` of all unread keys of a cluster, by their int4 logits.
        within: `[t, M, m]` of the samples' values: what their weights differ from the mean of the cluster.
        off: `[t, M, m]` true weight minus int4 weight, times keys represented.
        alone: `[t, M]` clusters with unread keys but without an unread sample.
    """

    share: Tensor
    mass: Tensor
    within: Tensor
    off: Tensor
    alone: Tensor


def _unread(read: Tensor, light: Tensor, samples: Samples, peak: Tensor) -> _Unread:
    """What is known of the unread keys; `light [t, M, L]` are their int4 weights, 0 for those read."""
    place = samples.place.expand(len(peak), -1, -1)
    usable = samples.exists & ~read.gather(2, place)
    left, used = (~read).sum(-1), usable.sum(-1)
    mass = light.sum(-1)
    mean = mass / left.clamp_min(1)
    represents = (left.to(mass.dtype) / used.clamp_min(1))[..., None] * usable
    true = torch.exp(samples.logits - peak[:, None, None]).masked_fill(~usable, 0.0)
    by_int4 = light.gather(2, place).masked_fill(~usable, 0.0)
    share = torch.where(used > 0, 2 * mean - by_int4.sum(-1) / used.clamp_min(1), mean)
    within, off = represents * (true - mean[..., None]), represents * (true - by_int4)
    return _Unread(share, mass, within, off, (used == 0) & (left > 0))


def _moments(
    unread: _Unread, samples: Samples, far: FarKeys, output: Tensor, mass: Tensor, at_threshold: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Variance, fourth and overlap; `at_threshold [t]` is the weight of a key at the threshold.

    The error of a sample is `within (v - centroid) + off (centroid - output)`: two independent vectors, whose
    squares add.
    """
    within, off = unread.within / mass[:, None, None], unread.off / mass[:, None, None]
    centroids = far.centroid_value.to(output.dtype)
    # not by products: small distances would be lost in their rounding
    distance2 = torch.cdist(output, centroids, compute_mode="donot_use_mm_for_euclid_dist").square()
    terms = within.square() * samples.distance2 + off.square() * distance2[..., None]
    # keys that no sample represents: as if they were off together
    typical = samples.distance2.sum(1) / samples.exists.sum(1).to(samples.distance2.dtype)
    alone = (unread.mass / mass[:, None]).square().masked_fill(~unread.alone, 0.0) * typical
    # a key at the threshold that no sample shows; it is not estimated, so it adds nothing to the degrees of
    # freedom
    hidden = STRIDE * at_threshold.square() * samples.mean_distance2
    overlap = _overlap(within, off, samples.value, centroids, output)
    overlap = overlap + alone.square().sum(1) + hidden.square()
    fourth = terms.square().sum((1, 2)) + alone.square().sum(1)
    return terms.sum((1, 2)) + alone.sum(1) + hidden, fourth, overlap


def _overlap(within: Tensor, off: Tensor, values: Tensor, centroids: Tensor, output: Tensor) -> Tensor:
    """`[t]`: sum of the squares of all products of two terms, by random projections."""
    signs = projections(values.shape[-1], values.device).to(values.dtype).t()
    centroids = centroids @ signs
    terms = within[..., None] * (values @ signs - centroids[:, None])
    terms = terms + off[..., None] * (centroids - (output @ signs)[:, None])[:, :, None]
    terms = terms.flatten(1, 2)
    pairs = (terms.transpose(1, 2) @ terms).square()
    return (pairs.sum((1, 2)) - pairs.diagonal(dim1=1, dim2=2).sum(1)) / (PROJECTIONS * (PROJECTIONS - 1))


# --- in native code
# -------------------------------------------------------------------------------------------------

_READ = (
    *("active", "target", "place", "columns", "values", "distance2", "mean_distance2", "int4_unit"),
    *("signs", "projected"),
)
_WRITTEN = ("variance", "fourth", "overlap", "refined")


class NativeSamples(ctypes.Structure):
    """What the sampled function reads and writes in addition, as `Samples` in sampled.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _READ),
        *((name, ctypes.c_int64) for name in ("each", "stride", "n_thresholds")),
        *(
            (name, ctypes.c_float)
            for name in ("step", "allowed", "max_hit_share", "max_int4_error", "margin", "below")
        ),
        *((name, ctypes.c_void_p) for name in _WRITTEN),
    )


def _sampled_native(
    query: Tensor, keys: RoutedKeys, view: View, local: Attended, request: Request
) -> tuple[Estimate, Tensor]:
    """As `_sampled_plain`."""
    tables = native.Tables.of(keys)
    n_heads, n_clusters, size = tables.positions.shape
    each = size // WIDTH
    drawn = request.places[:, None] + torch.arange(each, dtype=torch.int64, device="cpu") * WIDTH
    positions = keys.positions.gather(2, drawn.expand(n_heads, -1, -1)).flatten(1).long()
    fill = -positions.shape[1] % WIDTH
    key, value = (
        pad(take(t, positions).to(torch.float32), (0, 0, 0, fill)).contiguous() for t in (keys.key, keys.value)
    )
    centroids = pad(keys.centroid_value.to(torch.float32).repeat_interleave(each, dim=1), (0, 0, 0, fill))
    distance2 = (value - centroids).square().sum(-1)
    by_cluster = distance2[:, : positions.shape[1]].unflatten(1, (-1, each)).mean(2).cumsum(1)
    counts = torch.arange(1, n_clusters + 1, dtype=torch.int64, device="cpu")
    signs = projections(value.shape[-1], value.device)
    projected = torch.cat(((value - centroids) @ signs.t(), centroids @ signs.t()), dim=-1)
    output, lse = (t.to(torch.float32).clone() for t in local)
    buffers = {
        "active": request.active.to(torch.uint8).contiguous(),
        "target": request.target.to(torch.float32).contiguous(),
        "place": request.places.to(torch.int32),
        "columns": key.unflatten(1, (-1, WIDTH)).transpose(2, 3).contiguous(),
        "values": value,
        "distance2": distance2,
        "mean_distance2": (by_cluster / counts).contiguous(),
        "int4_unit": int4_units(tables.scales).contiguous(),
        "signs": signs,
        "projected": projected.unflatten(1, (-1, WIDTH)).transpose(2, 3).contiguous(),
        **{name: torch.zeros_like(lse) for name in ("variance", "fourth", "overlap")},
        "refined": torch.zeros_like(lse, dtype=torch.uint8),
    }
    results = {"output": output, "lse": lse, "threshold": torch.zeros_like(lse)}
    results["counts"] = native.empty(2, dtype=torch.int64).zero_()
    extra = _native_samples(buffers, tables, query, request.allowed)
    n_extra = value.shape[1]
    run = ("prescore_routed_sampled", query, keys, view, tables, results)
    native.run(*run, reads_local=False, extra=extra, extra_columns=n_extra)
    variance, fourth, overlap = (buffers[name] for name in ("variance", "fourth", "overlap"))
    refined = buffers["refined"].bool()
    return Estimate(output, lse, variance, fourth, overlap, results["threshold"], refined), results["counts"]


def _native_samples(
    buffers: dict[str, Tensor], tables: native.Tables, query: Tensor, allowed: float
) -> NativeSamples:
    """The second argument of the sampled function, checked."""
    n_heads, n_clusters, size = tables.positions.shape
    dim, value_dim, n_extra, each = (
        query.shape[-1],
        buffers["values"].shape[-1],
        buffers["values"].shape[1],
        size // WIDTH,
    )
    queries, blocks = tuple(query.shape[:3]), (n_heads, n_extra // WIDTH)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "active": (queries, torch.uint8),
        "target": (queries, torch.float32),
        "place": ((n_clusters,), torch.int32),
        "columns": ((*blocks, dim, WIDTH), torch.float32),
        "values": ((n_heads, n_extra, value_dim), torch.float32),
        "distance2": ((n_heads, n_extra), torch.float32),
        "mean_distance2": ((n_heads, n_clusters), torch.float32),
        "int4_unit": ((n_heads, n_clusters, 2), torch.float32),
        "signs": ((PROJECTIONS, value_dim), torch.float32),
        "projected": ((*blocks, 2 * PROJECTIONS, WIDTH), torch.float32),
        **dict.fromkeys(("variance", "fourth", "overlap"), (queries, torch.float32)),
        "refined": (queries, torch.uint8),
    }
    native.check_tensors([Expected(name, buffers[name], *expected) for name, expected in shapes.items()])
    place = buffers["place"]
    if n_extra % WIDTH or n_extra < n_clusters * each:
        raise ValueError(f"samples must have {n_clusters} times {each} columns, got {n_extra}")
    if place.numel() and not 0 <= int(place.min()) <= int(place.max()) < WIDTH:
        raise ValueError(f"place must lie between 0 and {WIDTH - 1}, got up to {int(place.max())}")
    return NativeSamples(
        **{name: tensor.data_ptr() for name, tensor in buffers.items()},
        each=each,
        stride=WIDTH,
        n_thresholds=N_THRESHOLDS,
        step=STEP,
        allowed=allowed,
        max_hit_share=MAX_HIT_SHARE,
        max_int4_error=MAX_INT4_ERROR,
        margin=MARGIN,
        below=BELOW,
    )
