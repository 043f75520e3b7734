"""The specification of `Routed` in plain torch: key index, threshold, search, centroids, softmax.

Every backend computes what this file says; docs/default.md has the same in words. The key index is built once,
from keys and values alone (`build_index`). Then each query does five things; `q` is the query times the scale. It

1. estimates the standard deviation `s = sqrt(q' V q)` of the logits within clusters (`far_logits`);
2. sets a logit threshold, `min_weight` of the attention mass that it can estimate (`logit_threshold`);
3. searches clusters and subclusters whose centroids lie within some deviations of the threshold; int8 keys that
   reach it are read, with the logit of the int8 key where they weigh little (`find_keys`);
4. represents the unread keys of each cluster by the centroid, corrected for the covariance
   (`centroid_corrections`);
5. takes one softmax over local keys, sinks, keys read and centroids (`far_terms`, `far_sums`, `hit_logits`).

The tree, int8 keys, subclusters and the search (`search_bounds`, `find_keys`) are discrete. All other functions
are differentiable. `reference_attention` puts the functions together for one head; the backends work tile by tile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from prescore.config import Routed
from prescore.ops.dropout import Dropout
from prescore.ops.operators import accumulation_dtype
from prescore.routed.index import KeyIndex, sums_in_spans
from prescore.routed.layout import Layout, make_layout
from prescore.routed.tree import bisection_tree

SUBCLUSTER = 16
"""Keys of a subcluster: the unit of the search."""
SEARCH_STDS = 2.75
"""A subcluster is searched where its centroid lies within so many standard deviations of the threshold."""
HEAVY_WEIGHT = 0.05
"""A heavy key has this weight; the search reaches further for it (`HEAVY_STDS`, `HEAVY_INT8_ERROR`)."""
HEAVY_STDS = 4.0
"""How many standard deviations a heavy key may lie above the centroid of its subcluster."""
CLUSTER_REACH = 1.5
"""The reach of clusters over that of subclusters: comparing subclusters costs less than comparing keys."""
HEAVY_INT8_ERROR = 0.1
"""How much too low the int8 logit of a heavy key may be, in standard deviations of the logits within clusters."""
LIGHT_WEIGHT = 64
"""Keys read have int8 logits if they weigh less than 64 times `min_weight`, and less than `HEAVY_WEIGHT`."""
SINK_WEIGHT = 0.1
"""Share of the sinks' mass that the threshold counts: trained models give sinks weight, but values near zero."""
MAX_GAIN = 2.0
"""Bound on the correction of a centroid's logit: logits within a cluster are not quite normal."""
MAX_MASS_GAIN = 4.0
"""The same bound where the threshold is set, before any key was read."""
MASS_KEYS = 16384
"""Up to so many far keys the threshold counts all; of `n` it counts the share `(MASS_KEYS / n) ** 1.5`.

The more keys, the less each weighs, and the more mass is unread."""
MASS_SHARE = 0.25
"""Share of the far keys that the threshold counts at least, so that queries of even weights read few keys."""
MIN_STD, MAX_STD = 1e-3, 1e15
"""Bounds on the standard deviation of logits within clusters."""
MAX_DISTANCE = 1e30
"""Bound on the distance to an infinite threshold, so that gradients are numbers."""

KEY_MAX, QUERY_MAX = 63, 127
"""Largest whole numbers of int8 keys and queries: two products fit into 16 bits."""


# --- int8 keys
# ------------------------------------------------------------------------------------------------------


def quantize(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Rows `[..., D]` as whole numbers up to `most`, and what a unit is worth, `[..., 1]`."""
    scales = rows.abs().amax(-1, keepdim=True) / most
    numbers = (rows / scales.clamp_min(torch.finfo(torch.float32).tiny)).round().clamp(-most, most)
    return numbers, scales


def quantize_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 keys of clusters `[..., L, D]`, and what a unit is worth in each cluster, `[...]`."""
    numbers, scales = quantize(keys.flatten(-2), KEY_MAX)
    return numbers.to(torch.int8).view(keys.shape), scales[..., 0]


def int8_logits(queries: Tensor, int8: Tensor, key_scales: Tensor) -> Tensor:
    """Queries `[t, D]`, int8 keys `[M, L, D]`, units `[M]` -> logits `[t, M, L]`. Sums are exact in float32."""
    numbers, scales = quantize(queries, QUERY_MAX)
    products: Tensor = (numbers @ int8.flatten(0, 1).to(queries.dtype).t()).unflatten(1, int8.shape[:2])
    return products * key_scales.to(queries.dtype)[:, None] * scales[..., None]


# --- the key index
# --------------------------------------------------------------------------------------------------


def build_index(key: Tensor, value: Tensor, layout: Layout, begin: int, n_chunks: int) -> KeyIndex:
    """The key index of `n_chunks` chunks from position `begin` on, of `key [T, N, D]` and `value [T, N, Dv]`.

    Gradients of sinks, centroids and covariances reach keys and values; positions and int8 keys are discrete.
    """
    wide, n_heads, dim = accumulation_dtype(key.dtype), key.shape[0], key.shape[-1]
    shape, stop = (n_heads, n_chunks, layout.chunk_size), begin + n_chunks * layout.chunk_size
    with torch.no_grad():
        points = key[:, begin:stop].reshape(*shape, dim)
        order = torch.arange(layout.chunk_size, dtype=torch.int64, device=key.device).expand(shape)
        if points.numel():
            order = bisection_tree(points, layout.levels + subcluster_levels(layout.cluster_size))
        start = torch.arange(n_chunks, dtype=torch.int64, device=key.device)[:, None] * layout.chunk_size + begin
        positions = (order + start).view(n_heads, n_chunks * layout.clusters_per_chunk, layout.cluster_size)
    keys, values = (take(t, positions).to(wide) for t in (key, value))
    centroid_key, centroid_value = keys.mean(2), values.mean(2)
    key_offset, value_offset = (
        (members - centroids[:, :, None])
        for members, centroids in ((keys, centroid_key), (values, centroid_value))
    )
    sub_offset, spread, radius = subclusters(key_offset.detach())
    by_chunk, values_by_chunk = (offset.view(*shape, offset.shape[-1]) for offset in (key_offset, value_offset))
    int8, scales = quantize_keys(key_offset.detach())
    sub_int8, sub_scales = quantize_keys(sub_offset)
    key_cov = by_chunk.transpose(2, 3) @ by_chunk / layout.chunk_size
    key_value_cov = by_chunk.transpose(2, 3) @ values_by_chunk / layout.chunk_size
    return KeyIndex(
        clusters_per_span=layout.clusters_per_chunk * layout.chunks_per_span,
        sink_key=key[:, : layout.sinks],
        sink_value=value[:, : layout.sinks],
        centroid_key=centroid_key,
        centroid_value=centroid_value,
        key_cov=key_cov,
        key_value_cov=key_value_cov,
        span_key_cov=key_cov[:, :0],
        span_key_value_cov=key_value_cov[:, :0],
        positions=positions,
        int8=int8,
        scales=scales,
        sub_int8=sub_int8,
        sub_scales=sub_scales,
        spread=spread,
        radius=radius,
    )


def subcluster_levels(cluster_size: int) -> int:
    """Bisections of a cluster: as long as the halves are whole and no smaller than a subcluster."""
    levels = 0
    while cluster_size % 2 == 0 and cluster_size >= 2 * SUBCLUSTER:
        cluster_size, levels = cluster_size // 2, levels + 1
    return levels


def subclusters(offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets `[T, M, L, D]` in tree order -> of every 16 keys the mean `[T, M, S, D]` and spread `[T, M, S]`.

    The spread is the root-mean-square distance of the 16 keys from their mean. The third result, `[T, M]`, is the
    radius: `CLUSTER_REACH` times the root-mean-square distance of 16 keys from the centroid of the cluster, for
    the subcluster where this distance is largest.
    """
    member = torch.arange(offset.shape[2], dtype=torch.int64, device=offset.device) // SUBCLUSTER
    shares = (member == member[::SUBCLUSTER, None]).to(offset.dtype)
    shares = shares / shares.sum(1, keepdim=True)
    mean = shares @ offset
    squares = (offset - mean.index_select(2, member)).square().sum(-1)
    radius = CLUSTER_REACH * (offset.square().sum(-1) @ shares.t()).sqrt().amax(-1)
    return mean, (squares @ shares.t()).sqrt(), radius


def covariances_of_spans(index: KeyIndex, layout: Layout) -> KeyIndex:
    """Replace the covariance of each chunk by the mean that queries read: over its span, up to this chunk.

    Without a causal mask every query sees all chunks, and only the mean at the last chunk is kept.
    """
    size = layout.chunks_per_span
    means: dict[str, Tensor] = {}
    for name in ("key_cov", "key_value_cov"):
        totals, count = sums_in_spans(getattr(index, name), size, 0, None)
        mean = totals / count.to(totals.dtype)
        means |= {name: mean if layout.causal else mean[:, -1:], f"span_{name}": mean[:, size - 1 :: size]}
    return index.having(**means)


def take(tensor: Tensor, positions: Tensor) -> Tensor:
    """`[T, N, D]` and positions `[T, ...]` -> `[T, ..., D]`, as one flat gather."""
    if tensor.shape[0] == 1:
        return tensor[0].index_select(0, positions.reshape(-1)).view(*positions.shape, tensor.shape[-1])
    n_heads, length, dim = tensor.shape
    start = torch.arange(0, n_heads * length, length, dtype=torch.int64, device=positions.device)
    flat = positions + start.view(-1, *[1] * (positions.ndim - 1))
    return tensor.reshape(-1, dim).index_select(0, flat.reshape(-1)).view(*positions.shape, dim)


# --- threshold and search
# -------------------------------------------------------------------------------------------


class FarLogits(NamedTuple):
    """What `t` queries know before the search.

    Attributes:
        sinks: `[t, S]` logits of the sinks.
        centroids: `[t, M]` logits of the centroids.
        std: `[t, M]` standard deviation of the logits within clusters: that of the span of each cluster.
    """

    sinks: Tensor
    centroids: Tensor
    std: Tensor


class Hits(NamedTuple):
    """The far keys that a block of `t` queries reads.

    Attributes:
        query, position: `[R]` pairs of a query and the position of a key, in ascending order.
        logits: `[R]` by int8 keys.
        exact: `[R]` whether a key is heavy, and its logit is computed from the key itself.
        per_cluster: `[t, M]` keys read of each cluster.
        n_compared: Int8 keys and centroids of subclusters that were compared.
    """

    query: Tensor
    position: Tensor
    logits: Tensor
    exact: Tensor
    per_cluster: Tensor
    n_compared: Tensor


def log_inverse_weight(min_weight: float) -> float:
    """`log(1 / min_weight)`; -inf where `min_weight` is 1 and no far key is read."""
    return -math.log(min_weight) if min_weight < 1 else -math.inf


def far_logits(query: Tensor, index: KeyIndex) -> FarLogits:
    """Logits of sinks and centroids, and `s = sqrt(q' V q)` for each span, of queries `[t, D]` times the scale."""
    variance = ((query @ index.key_cov) * query).sum(-1).t()
    # bounded before the root, whose slope is infinite at 0; NaN (inf - inf) counts as large
    std = variance.nan_to_num(nan=MAX_STD**2).clamp(MIN_STD**2, MAX_STD**2).sqrt()
    return FarLogits(query @ index.sink_key.t(), query @ index.centroid_key.t(), by_cluster(std, index))


def by_cluster(spans: Tensor, index: KeyIndex) -> Tensor:
    """`[..., P]` of spans -> `[..., M]` of their clusters."""
    return spans.repeat_interleave(index.clusters_per_span, dim=-1)[..., : index.positions.shape[0]]


def _mass_logits(logits: FarLogits, index: KeyIndex) -> Tensor:
    """`[t, S + M]` log masses that the threshold counts: of sinks, and of all keys of each cluster.

    A sum of `L` exponentials of normal numbers around `x` is about `L exp(x + s^2 / 2)`. Behind more than
    `MASS_KEYS` far keys a share of them counts, at least `MASS_SHARE`.
    """
    gain = (0.5 * logits.std.square()).clamp_max(MAX_MASS_GAIN)
    n_clusters, size = index.positions.shape
    share = min(1.0, max(MASS_SHARE, (MASS_KEYS / (n_clusters * size)) ** 1.5))
    clusters = logits.centroids + math.log(share * size) + gain
    return torch.cat((logits.sinks + math.log(SINK_WEIGHT), clusters), dim=1)


def logit_threshold(logits: FarLogits, index: KeyIndex, log_inverse: float, local_lse: Tensor) -> Tensor:
    """`[t]` the logit above which a far key is read: `min_weight` of the mass estimated before the search.

    Args:
        logits: Far logits of the queries.
        index: The key index, as far as the queries see it.
        log_inverse: `log_inverse_weight(min_weight)`.
        local_lse: `[t]` log-sum-exp of the local keys.
    """
    return torch.cat((local_lse[:, None], _mass_logits(logits, index)), dim=1).logsumexp(1) - log_inverse


def with_gradient(threshold: Tensor, logits: FarLogits, index: KeyIndex, log_inverse: float) -> Tensor:
    """Reattach the gradient of a saved threshold with respect to the far logits.

    A log-sum-exp moves with each of its terms by the term's share, so the local keys need not be kept for this.
    """
    if log_inverse == -math.inf:
        return threshold  # infinite, whatever the logits are
    mass = (threshold + log_inverse).detach()
    shares = torch.exp(_mass_logits(logits, index) - mass[:, None]).sum(1)
    return threshold + (shares - shares.detach())


def heavy_margin(log_inverse: float) -> float:
    """How far the logit of a key of `HEAVY_WEIGHT` lies above the threshold."""
    return max(0.0, log_inverse + math.log(HEAVY_WEIGHT))


def exact_margin(log_inverse: float) -> float:
    """How far above the threshold logits of keys read are computed from the keys themselves."""
    return min(math.log(LIGHT_WEIGHT), heavy_margin(log_inverse))


def search_bounds(
    query: Tensor, index: KeyIndex, logits: FarLogits, threshold: Tensor, log_inverse: float
) -> tuple[Tensor, Tensor]:
    """`[t, M, S]` how far above the centroid an int8 logit must lie for a key to be read; NaN = not searched.

    A query compares the subclusters of clusters whose centroid lies within reach of the threshold, and the keys of
    subclusters whose centroid lies within reach. The reach is `SEARCH_STDS` standard deviations of the logits
    within clusters, times the radius of the cluster or the spread of the subcluster, over the same distance of all
    keys of the span. An isolated key makes radius and spread large. A key of `HEAVY_WEIGHT` lies `margin` above
    the threshold. In sharp heads the reach finds such a key up to `HEAVY_STDS` deviations above the centroid, and
    the threshold is lowered where the int8 logit of such a key may lie below the threshold. The second result
    counts the int8 keys and centroids of subclusters that are compared.
    """
    size, n_subclusters = index.positions.shape[1], index.spread.shape[1]
    margin = heavy_margin(log_inverse)
    reach = (HEAVY_STDS - margin / logits.std).clamp_min(SEARCH_STDS) * logits.std
    unit = index.key_cov.diagonal(dim1=1, dim2=2).sum(-1).clamp_min(MIN_STD**2).sqrt()
    reach = reach / by_cluster(unit, index)
    lowered = threshold[:, None] - (HEAVY_INT8_ERROR * logits.std - margin).clamp_min(0.0)
    distance = lowered - logits.centroids
    near = (reach * index.radius >= distance) & (threshold < math.inf)[:, None]
    highest = int8_logits(query, index.sub_int8, index.sub_scales) + reach[..., None] * index.spread
    searched = (highest >= distance[..., None]) & near[..., None]
    sizes = torch.full((n_subclusters,), SUBCLUSTER, dtype=torch.int64, device=query.device)
    sizes[-1] += size - SUBCLUSTER * n_subclusters
    n_compared = (searched.flatten(0, 1).sum(0) * sizes).sum() + near.sum() * n_subclusters
    return distance[..., None].masked_fill(~searched, math.nan), n_compared


def find_keys(query: Tensor, index: KeyIndex, logits: FarLogits, threshold: Tensor, log_inverse: float) -> Hits:
    """Which far keys queries `[t, D]`, times the scale, read: those whose int8 logits reach the bounds."""
    size = index.positions.shape[1]
    bounds, n_compared = search_bounds(query, index, logits, threshold, log_inverse)
    offsets = int8_logits(query, index.int8, index.scales)
    hit = offsets >= bounds.repeat_interleave(SUBCLUSTER, dim=2)[..., :size]
    which, cluster, member = hit.nonzero(as_tuple=True)
    estimates = offsets[hit] + logits.centroids[which, cluster]
    exact = estimates >= threshold.index_select(0, which) + exact_margin(log_inverse)
    return Hits(which, index.positions[cluster, member], estimates, exact, hit.sum(-1), n_compared)


# --- centroids and softmax
# ------------------------------------------------------------------------------------------


def centroid_corrections(distance: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """What a centroid's logit gains, and the factor `m` by which its value moves along `C'q`.

    `C'q` is the covariance of keys and values times the query.

    The logits of the unread keys are taken as normal around that of the centroid with standard deviation `s`, cut
    off at the threshold, `d` above it. With `x = d / s`, the mean of `exp` under that cut is
    `exp(s^2 / 2) Phi(x - s) / Phi(x)`, and with `nu` the mean value of the cluster, the mean value is
    `nu + m C'q`, with `m = 1 - phi(x - s) / (s Phi(x - s))`.

    Args:
        distance: `[t, M]` from the centroids' logits to the threshold.
        std: `[t, M]` standard deviation of the logits within clusters.
    """
    x = distance.clamp(-MAX_DISTANCE, MAX_DISTANCE) / std
    shifted, slope = _log_normal_cdf(x - std)
    unshifted, _ = _log_normal_cdf(x)
    gain = (0.5 * std * std + shifted - unshifted).clamp(-MAX_GAIN, MAX_GAIN)
    return gain, (1 - slope / std).clamp(-1, 1)


def _log_normal_cdf(x: Tensor) -> tuple[Tensor, Tensor]:
    """`log Phi(x)` by a logistic approximation, and its slope `phi(x) / Phi(x)`."""
    x = x.clamp(-4, 8)
    y = x * (1.5976 + 0.07056 * x * x)
    return -softplus(-y), torch.sigmoid(-y) * (1.5976 + 0.21168 * x * x)


class FarTerms(NamedTuple):
    """The terms of the softmax beyond local keys and keys read.

    Attributes:
        columns: `[t, S + M]` logits of sinks and corrected centroids.
        move: `[t, M]` how far the centroids' values move along `direction`.
        direction: `[P, t, Dv]`, `C' q` of each span.
    """

    columns: Tensor
    move: Tensor
    direction: Tensor


def far_terms(
    query: Tensor, index: KeyIndex, logits: FarLogits, threshold: Tensor, per_cluster: Tensor
) -> FarTerms:
    """Sinks and centroids of queries `[t, D]` times the scale; `per_cluster [t, M]` keys of each were read."""
    unread = index.positions.shape[1] - per_cluster
    gain, move = centroid_corrections(threshold[:, None] - logits.centroids, logits.std)
    centroids = logits.centroids + gain + unread.clamp_min(1).to(query.dtype).log()
    columns = torch.cat((logits.sinks, centroids.masked_fill(unread == 0, -math.inf)), dim=1)
    return FarTerms(columns, move, query @ index.key_value_cov)


def far_sums(
    terms: FarTerms, shift: Tensor, index: KeyIndex, dropout: Dropout | None = None
) -> tuple[Tensor, Tensor]:
    """`sum(w v) [t, Dv]` and `sum(w) [t]` with `w = exp(logit - shift)`; the latter counts dropped weights too."""
    n_sinks = index.sink_key.shape[0]
    columns = torch.exp(terms.columns - shift[:, None])
    mass = columns.sum(1)
    if dropout is not None:
        columns = columns * dropout.at("columns").factors(tuple(columns.shape), columns)
    values = torch.cat((index.sink_value, index.centroid_value))
    moves = columns[:, n_sinks:] * terms.move
    by_span = (
        pad(moves, (0, -moves.shape[1] % index.clusters_per_span)).unflatten(1, (len(terms.direction), -1)).sum(2)
    )
    return columns @ values + (by_span.t()[..., None] * terms.direction).sum(0), mass


def hit_logits(query: Tensor, hits: Hits, hit_key: Tensor) -> Tensor:
    """`[R]` logits of the keys read, `hit_key [R, D]`. The gradient is always that of the exact logit."""
    exact = (query.index_select(0, hits.query) * hit_key).sum(-1)
    return exact + (hits.logits - exact).masked_fill(hits.exact, 0.0).detach()


def far_peak(terms: FarTerms, hits: Hits, logits: Tensor, local_lse: Tensor) -> Tensor:
    """`[t]` the largest logit of each query, local keys and keys read, `logits [R]`, included.

    It is 0 where a query sees nothing.
    """
    columns = torch.cat((local_lse[:, None], terms.columns), dim=1).amax(1)
    peak = columns.scatter_reduce(0, hits.query, logits, "amax")
    return peak.masked_fill(torch.isneginf(peak), 0.0)


# --- one head, as a whole
# -------------------------------------------------------------------------------------------


class Reference(NamedTuple):
    """What the queries of one head read, and their result.

    Attributes:
        output: `[Nq, Dv]`.
        lse: `[Nq]`.
        logits: `[Nq, Nk]` of the keys, as they enter the softmax where a key is read; without gradients.
        local: `[Nq, Nk]` keys that are read in any case: local keys and sinks.
        hits: `[Nq, Nk]` far keys that the search finds to weigh at least `min_weight`, and that are read.
        centroid_logits: `[Nq, M]` corrected logits of the centroids; -inf = not visible, or all its keys were
            read.
    """

    output: Tensor
    lse: Tensor
    logits: Tensor
    local: Tensor
    hits: Tensor
    centroid_logits: Tensor


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, config: Routed, *, is_causal: bool, scale: float | None = None
) -> Reference:
    """Routed attention of one head without padding, `query [Nq, D]`, `key [Nk, D]`, `value [Nk, Dv]`.

    Everything is computed densely, for reading and checking. Causal queries are the last `Nq` positions.
    """
    n_query, n_keys, wide = len(query), len(key), accumulation_dtype(query.dtype)
    layout = make_layout(n_query, n_keys, causal=is_causal, config=config)
    query = query.to(wide) * (query.shape[-1] ** -0.5 if scale is None else scale)
    position = torch.arange(n_query, dtype=torch.int64, device=query.device) + layout.first
    n_chunks = layout.far_chunks(position)
    if not is_causal and n_query <= config.exact_until:
        n_chunks = torch.zeros_like(n_chunks)
    index = build_index(key[None], value[None], layout, layout.sinks, layout.n_chunks)
    positions = torch.arange(n_keys, dtype=torch.int64, device=query.device)
    is_sink = positions < layout.sinks
    is_far = (positions >= layout.sinks) & (positions < layout.sinks + n_chunks[:, None] * layout.chunk_size)
    visible = positions <= position[:, None] if is_causal else torch.ones_like(is_far)
    local, logits = visible & ~is_far, query @ key.to(wide).t()
    hit, logits_read = torch.zeros_like(local), logits.detach().clone()
    centroids = query.new_full((n_query, index.centroid_key.shape[1]), -math.inf)
    outputs, lses = [], []
    for count in n_chunks.unique().tolist():  # queries that see the same clusters; causal ones are consecutive
        rows = (n_chunks == count).nonzero().squeeze(1)
        if not count:
            exact = logits[rows].masked_fill(~local[rows], -math.inf)
            outputs.append(exact.softmax(1) @ value.to(wide))
            lses.append(exact.logsumexp(1))
            continue
        n_clusters = count * layout.clusters_per_chunk
        size = layout.chunks_per_span
        spans = [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]
        seen = index.of_head(0, n_clusters, 0).having(
            key_cov=torch.stack([index.key_cov[0, span].mean(0) for span in spans]),
            key_value_cov=torch.stack([index.key_value_cov[0, span].mean(0) for span in spans]),
        )
        local_logits = logits[rows].masked_fill(~(local[rows] & ~is_sink), -math.inf)
        before = far_logits(query[rows], seen)
        log_inverse = log_inverse_weight(config.min_weight)
        threshold = logit_threshold(before, seen, log_inverse, local_logits.logsumexp(1))
        hits = find_keys(query[rows], seen, before, threshold, log_inverse)
        hit[rows[hits.query], hits.position] = True
        hit_key, hit_value = (t.index_select(0, hits.position).to(wide) for t in (key, value))
        terms = far_terms(query[rows], seen, before, threshold, hits.per_cluster)
        read = hit_logits(query[rows], hits, hit_key)
        centroids[rows, :n_clusters] = terms.columns[:, layout.sinks :].detach()
        logits_read[rows[hits.query], hits.position] = read.detach()
        peak = torch.maximum(far_peak(terms, hits, read, local_logits.amax(1)), local_logits.amax(1)).detach()
        total, mass = far_sums(terms, peak, seen)
        weights = torch.exp(local_logits - peak[:, None])
        total, mass = total + weights @ value.to(wide), mass + weights.sum(1)
        weights = torch.exp(read - peak.index_select(0, hits.query))
        total = total.index_add(0, hits.query, weights[:, None] * hit_value)
        mass = mass.index_add(0, hits.query, weights)
        outputs.append(total / mass[:, None])
        lses.append(peak + mass.log())
    order = n_chunks.argsort(stable=True).argsort()
    output, lse = (torch.cat(parts).index_select(0, order) for parts in (outputs, lses))
    return Reference(output, lse, logits_read, local, hit, centroids)
