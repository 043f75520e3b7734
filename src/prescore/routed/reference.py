"""The specification of `Routed` in plain torch: key index, threshold, search, centroids, softmax.

Every backend computes what this file says; docs/default.md says it in words. The key index is built once, from
keys and values alone (`build_clusters`). Then each query, with `q` the query times the scale:

1. estimates the standard deviation `s = sqrt(q' V q)` of the logits within clusters (`far_logits`);
2. sets a logit threshold, `min_weight` of the attention mass that it can estimate (`logit_threshold`);
3. compares int4 keys with the threshold: the outliers of every cluster, and all keys of clusters whose centroid
   lies within three deviations of the threshold; keys that reach it are read exactly (`find_keys`);
4. represents the unread keys of each cluster by the centroid, corrected for the covariance
   (`centroid_corrections`);
5. takes one softmax over local keys, sinks, keys read and centroids (`far_terms`, `far_sums`).

All functions but `find_keys`, which makes discrete choices, are differentiable. `reference_attention` puts them
together for one head; the backends run them tile by tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from prescore.config import Routed
from prescore.ops.backend import accumulation_dtype
from prescore.ops.dropout import Dropout
from prescore.routed.layout import Layout, make_layout
from prescore.routed.tree import bisection_tree

OUTLIERS = 16
"""Keys of a cluster that lie farthest from its centroid. They come first in it, and every query compares them."""
SEARCH_STDS = 3.0
"""A cluster is searched where its centroid lies within so many standard deviations of the threshold."""
SINK_WEIGHT = 0.1
"""Share of the sinks' mass that the threshold counts: trained models give sinks weight, but values near zero."""
MAX_GAIN = 2.0
"""Bound on the correction of a centroid's logit: logits within a cluster are not quite normal."""
MAX_MASS_GAIN = 4.0
"""The same bound where the threshold is set, before any key was read."""
MIN_STD, MAX_STD = 1e-3, 1e15
"""Bounds on the standard deviation of logits within clusters."""
MAX_DISTANCE = 1e30
"""Bound on the distance to an infinite threshold, so that gradients are numbers."""

INT4_PADDING = 16
"""Dimensions are padded with zeros to a multiple of this, so that both halves are whole bytes in every layout."""
INT4_MAX = 7.49
"""What the largest number of a half becomes: it rounds to 7 on every machine, where 7.5 would be a tie."""
INT6_MAX = 31
"""Largest number of a quantized query."""


# --- int4 keys
# ------------------------------------------------------------------------------------------------------


class Int4Keys(NamedTuple):
    """Quantized keys: how a key differs from its centroid, as whole numbers from -7 to 7.

    Attributes:
        packed: `[..., D' / 2]` uint8. The number of dimension i plus 8 is in the low half of byte i, that of
            dimension `i + D' / 2` in the high half.
        scales: `[..., 2]` what a unit is worth in each half of the dimensions.
    """

    packed: Tensor
    scales: Tensor


def quantize_keys(keys: Tensor) -> Int4Keys:
    """Int4 keys of `[..., D]`."""
    halves = pad(keys, (0, -keys.shape[-1] % INT4_PADDING)).unflatten(-1, (2, -1))
    scales = halves.abs().amax(-1) / INT4_MAX
    numbers = (halves / scales.clamp_min(torch.finfo(keys.dtype).tiny)[..., None]).round().clamp(-8, 7)
    numbers = numbers.add_(8).to(torch.uint8)
    return Int4Keys(numbers[..., 0, :] | (numbers[..., 1, :] << 4), scales)


def quantize_queries(queries: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -31 to 31, `[..., 2, D' / 2]`, and what a unit is worth, `[..., 1]`."""
    halves = pad(queries, (0, -queries.shape[-1] % INT4_PADDING)).unflatten(-1, (2, -1))
    scale = halves.abs().amax((-1, -2)).clamp_min(1e-30)[..., None] / INT6_MAX
    return (halves / scale[..., None]).round(), scale


def int4_logits(queries: Tensor, int4: Int4Keys) -> Tensor:
    """`[t, D]` queries and `[n]` int4 keys -> estimated logits `[t, n]`; sums of products are exact in float32."""
    numbers, scale = quantize_queries(queries)
    low, high = (int4.packed & 15), (int4.packed >> 4)
    sums = [
        half @ (part.to(queries.dtype) - 8).t() for half, part in zip(numbers.unbind(-2), (low, high), strict=True)
    ]
    first, second = int4.scales.to(queries.dtype).unbind(-1)
    return scale * (first * sums[0] + second * sums[1])


# --- the key index
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Clusters:
    """The key index of consecutive chunks: `T` KV heads, `C` chunks, `M` clusters of `L` keys.

    Gradients of centroids and covariances reach keys and values; positions and int4 keys are discrete choices.

    Attributes:
        positions: `[T, M, L]` where the keys of each cluster are in the sequence, outliers first.
        key: `[T, M, D]` centroids of the keys.
        value: `[T, M, Dv]` centroids of the values.
        int4: `[T, M, L]` quantized differences of keys and centroids.
        key_cov: `[T, C, D, D]` covariance of the keys within clusters, chunk by chunk.
        key_value_cov: `[T, C, D, Dv]` covariance of keys and values within clusters.
    """

    positions: Tensor
    key: Tensor
    value: Tensor
    int4: Int4Keys
    key_cov: Tensor
    key_value_cov: Tensor


def build_clusters(key: Tensor, value: Tensor, layout: Layout, begin: int, n_chunks: int) -> Clusters:
    """The key index of `n_chunks` chunks from position `begin` on, of `key [T, N, D]` and `value [T, N, Dv]`."""
    wide, n_heads, dim = accumulation_dtype(key.dtype), key.shape[0], key.shape[-1]
    shape, stop = (n_heads, n_chunks, layout.chunk_size), begin + n_chunks * layout.chunk_size
    with torch.no_grad():
        points = key[:, begin:stop].reshape(*shape, dim)
        order = torch.arange(layout.chunk_size, dtype=torch.int64, device=key.device).expand(shape)
        if points.numel():
            order = bisection_tree(points, layout.levels)
        start = torch.arange(n_chunks, dtype=torch.int64, device=key.device)[:, None] * layout.chunk_size + begin
        positions = (order + start).view(n_heads, n_chunks * layout.clusters_per_chunk, layout.cluster_size)
        positions = outliers_first(positions, take(key, positions).to(wide))
    keys, values = (take(t, positions).to(wide) for t in (key, value))
    centroid_key, centroid_value = keys.mean(2), values.mean(2)
    key_offset, value_offset = (
        (members - centroids[:, :, None]).view(*shape, members.shape[-1])
        for members, centroids in ((keys, centroid_key), (values, centroid_value))
    )
    return Clusters(
        positions,
        centroid_key,
        centroid_value,
        quantize_keys(key_offset.detach().view(keys.shape)),
        key_offset.transpose(2, 3) @ key_offset / layout.chunk_size,
        key_offset.transpose(2, 3) @ value_offset / layout.chunk_size,
    )


def outliers_first(positions: Tensor, keys: Tensor) -> Tensor:
    """Positions `[T, M, L]` with the outliers of each cluster first; the other keys stay in tree order.

    Squared distances are compared by their leading bits, and of equal ones the earlier key wins. So the choice
    hardly ever depends on rounding.
    """
    square = (keys - keys.mean(2, keepdim=True)).square().sum(-1).to(torch.float32)
    leading = (square.contiguous().view(torch.int32) >> 16 & 0x7FFF).to(torch.int64)
    farthest = (leading * 2**40 - positions).topk(min(OUTLIERS, positions.shape[2]), dim=2).indices
    is_outlier = torch.zeros_like(positions).scatter_(2, farthest, 1)
    return positions.gather(2, is_outlier.argsort(dim=2, descending=True, stable=True))


def mean_of_prefixes(parts: Tensor) -> Tensor:
    """`[T, C, ...]` of chunks -> means over the first 1, 2, ..., C: a causal query sees a prefix of them."""
    count = torch.arange(1, parts.shape[1] + 1, device=parts.device, dtype=parts.dtype)
    return parts.cumsum(1) / count[:, None, None]


def mean_of_first(parts: Tensor, counts: Tensor) -> Tensor:
    """`[T, C, ...]` of chunks -> `[T, 1, ...]` means over the first `counts [T]` of them."""
    inside = torch.arange(parts.shape[1], dtype=torch.int64, device=parts.device) < counts[:, None]
    if not bool(inside.all()):
        parts = parts.masked_fill(~inside[:, :, None, None], 0.0)
    return parts.sum(1, keepdim=True) / counts[:, None, None, None]


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


class FarKeys(NamedTuple):
    """What a block of queries of one KV head sees beyond its local keys: `S` sinks and `M` clusters of `L` keys.

    Attributes:
        key, value: `[N, D]`, `[N, Dv]` all keys and values of the KV head.
        sink_key, sink_value: `[S, D]`, `[S, Dv]`.
        centroid_key, centroid_value: `[M, D]`, `[M, Dv]`.
        positions: `[M, L]` where the keys of each cluster are, outliers first.
        int4: `[M, L]` quantized keys.
        key_cov: `[D, D]` covariance of the keys within the visible clusters.
        key_value_cov: `[D, Dv]` covariance of keys and values.
    """

    key: Tensor
    value: Tensor
    sink_key: Tensor
    sink_value: Tensor
    centroid_key: Tensor
    centroid_value: Tensor
    positions: Tensor
    int4: Int4Keys
    key_cov: Tensor
    key_value_cov: Tensor


class FarLogits(NamedTuple):
    """What `t` queries know before the search.

    Attributes:
        sinks: `[t, S]` logits of the sinks.
        centroids: `[t, M]` logits of the centroids.
        std: `[t, 1]` standard deviation of the logits within clusters.
    """

    sinks: Tensor
    centroids: Tensor
    std: Tensor


class Hits(NamedTuple):
    """The far keys that a block of `t` queries reads.

    Attributes:
        query, position: `[R]` pairs of a query and the position of a key, in ascending order.
        per_cluster: `[t, M]` keys read of each cluster.
        n_compared: Int4 keys that were compared.
    """

    query: Tensor
    position: Tensor
    per_cluster: Tensor
    n_compared: Tensor


def log_inverse_weight(min_weight: float) -> float:
    """`log(1 / min_weight)`; -inf where `min_weight` is 1 and no far key is read."""
    return -math.log(min_weight) if min_weight < 1 else -math.inf


def far_logits(query: Tensor, far: FarKeys) -> FarLogits:
    """Logits of sinks and centroids, and `s = sqrt(q' V q)`, of queries `[t, D]` times the scale."""
    variance = ((query @ far.key_cov) * query).sum(-1, keepdim=True)
    # bounded before the root, whose slope is infinite at 0; NaN (inf - inf) counts as large
    std = variance.nan_to_num(nan=MAX_STD**2).clamp(MIN_STD**2, MAX_STD**2).sqrt()
    return FarLogits(query @ far.sink_key.t(), query @ far.centroid_key.t(), std)


def _mass_logits(logits: FarLogits, far: FarKeys) -> Tensor:
    """`[t, S + M]` log masses that the threshold counts: of sinks, and of all keys of each cluster.

    A sum of `L` exponentials of normal numbers around `x` is about `L exp(x + s^2 / 2)`.
    """
    gain = (0.5 * logits.std.square()).clamp_max(MAX_MASS_GAIN)
    clusters = logits.centroids + math.log(far.positions.shape[1]) + gain
    return torch.cat((logits.sinks + math.log(SINK_WEIGHT), clusters), dim=1)


def logit_threshold(logits: FarLogits, far: FarKeys, log_inverse: float, local_lse: Tensor) -> Tensor:
    """`[t]` the logit above which a far key is read: `min_weight` of the mass estimated before the search.

    Args:
        logits: Of the queries.
        far: What they see.
        log_inverse: `log_inverse_weight(min_weight)`.
        local_lse: `[t]` log-sum-exp of the local keys.
    """
    return torch.cat((local_lse[:, None], _mass_logits(logits, far)), dim=1).logsumexp(1) - log_inverse


def with_gradient(threshold: Tensor, logits: FarLogits, far: FarKeys, log_inverse: float) -> Tensor:
    """Reattach the gradient of a saved threshold with respect to the far logits.

    A log-sum-exp moves with each of its terms by the term's share, so the local keys need not be kept for this.
    """
    if log_inverse == -math.inf:
        return threshold  # infinite, whatever the logits are
    mass = (threshold + log_inverse).detach()
    shares = torch.exp(_mass_logits(logits, far) - mass[:, None]).sum(1)
    return threshold + (shares - shares.detach())


def find_keys(query: Tensor, far: FarKeys, logits: FarLogits, threshold: Tensor) -> Hits:
    """Which far keys a block of queries `[t, D]`, times the scale, reads.

    Every query compares the outliers of all clusters. It compares the other keys only of clusters whose centroid
    lies within `SEARCH_STDS` standard deviations of the threshold.
    """
    (n_clusters, size), n_outliers = far.positions.shape, min(OUTLIERS, far.positions.shape[1])
    searched = logits.centroids + SEARCH_STDS * logits.std >= threshold[:, None]
    searching = threshold < math.inf

    def above(clusters: Tensor, keys: slice) -> Tensor:
        int4 = Int4Keys(*(part.index_select(0, clusters)[:, keys] for part in far.int4))
        offsets = int4_logits(query, Int4Keys(*(part.flatten(0, 1) for part in int4)))
        distance = threshold[:, None] - logits.centroids.index_select(1, clusters)
        reached: Tensor = offsets.view(len(query), *int4.scales.shape[:2]) >= distance[..., None]
        return reached

    some = searched.any(0).nonzero().squeeze(1)
    every = torch.arange(n_clusters, dtype=torch.int64, device=query.device)
    hit = torch.zeros(len(query), n_clusters, size, dtype=torch.bool, device=query.device)
    hit[:, :, :n_outliers] = above(every, slice(n_outliers)) & searching[:, None, None]
    hit[:, some, n_outliers:] = above(some, slice(n_outliers, None)) & searched[:, some, None]
    which, cluster, place = hit.nonzero(as_tuple=True)
    n_compared = searched.sum() * (size - n_outliers) + searching.sum() * n_clusters * n_outliers
    return Hits(which, far.positions[cluster, place], hit.sum(-1), n_compared)


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
        std: `[t, 1]` standard deviation of the logits within clusters.
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
    """The terms of the softmax beyond the local keys.

    Attributes:
        columns: `[t, S + M]` logits of sinks and corrected centroids.
        hits: `[R]` logits of the keys read.
        move: `[t, M]` how far the centroids' values move along `direction`.
        direction: `[t, Dv]`, `C' q`.
    """

    columns: Tensor
    hits: Tensor
    move: Tensor
    direction: Tensor


def far_terms(
    query: Tensor, far: FarKeys, logits: FarLogits, threshold: Tensor, hits: Hits, hit_key: Tensor
) -> FarTerms:
    """All terms of queries `[t, D]` times the scale; `hit_key [R, D]` are the keys read."""
    unread = far.positions.shape[1] - hits.per_cluster
    gain, move = centroid_corrections(threshold[:, None] - logits.centroids, logits.std)
    centroids = logits.centroids + gain + unread.clamp_min(1).to(query.dtype).log()
    columns = torch.cat((logits.sinks, centroids.masked_fill(unread == 0, -math.inf)), dim=1)
    hit_logits = (query.index_select(0, hits.query) * hit_key).sum(-1)
    return FarTerms(columns, hit_logits, move, query @ far.key_value_cov)


def far_sums(
    terms: FarTerms, shift: Tensor, far: FarKeys, hits: Hits, hit_value: Tensor, dropout: Dropout | None = None
) -> tuple[Tensor, Tensor]:
    """`sum(w v) [t, Dv]` and `sum(w) [t]` with `w = exp(logit - shift)`; the latter counts dropped weights too."""
    n_sinks = far.sink_key.shape[0]
    columns = torch.exp(terms.columns - shift[:, None])
    weights = torch.exp(terms.hits - shift.index_select(0, hits.query))
    mass = columns.sum(1).index_add(0, hits.query, weights)
    if dropout is not None:
        columns = columns * dropout.at("columns").factors(tuple(columns.shape), columns)
        weights = weights * dropout.at("rows").factors(tuple(weights.shape), weights)
    values = torch.cat((far.sink_value, far.centroid_value))
    moved = (columns[:, n_sinks:] * terms.move).sum(1, keepdim=True) * terms.direction
    return (columns @ values + moved).index_add(0, hits.query, weights[:, None] * hit_value), mass


def far_peak(terms: FarTerms, hits: Hits, local_lse: Tensor) -> Tensor:
    """`[t]` the largest logit of each query, local keys included; 0 where it sees nothing."""
    columns = torch.cat((local_lse[:, None], terms.columns), dim=1).amax(1)
    peak = columns.scatter_reduce(0, hits.query, terms.hits, "amax")
    return peak.masked_fill(torch.isneginf(peak), 0.0)


# --- one head, as a whole
# -------------------------------------------------------------------------------------------


class Reference(NamedTuple):
    """What the queries of one head read, and their result.

    Attributes:
        output: `[Nq, Dv]`.
        lse: `[Nq]`.
        local: `[Nq, Nk]` keys that are read in any case: local keys and sinks.
        hits: `[Nq, Nk]` far keys that the search finds to weigh at least `min_weight`, and that are read.
        centroid_logits: `[Nq, M]` corrected logits of the centroids; -inf = not visible, or all its keys were
            read.
    """

    output: Tensor
    lse: Tensor
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
    if not is_causal and n_query < config.exact_until:
        n_chunks = torch.zeros_like(n_chunks)
    index = build_clusters(key[None], value[None], layout, layout.sinks, layout.n_chunks)
    places = torch.arange(n_keys, dtype=torch.int64, device=query.device)
    is_sink = places < layout.sinks
    is_far = (places >= layout.sinks) & (places < layout.sinks + n_chunks[:, None] * layout.chunk_size)
    visible = places <= position[:, None] if is_causal else torch.ones_like(is_far)
    local, logits = visible & ~is_far, query @ key.to(wide).t()
    hit = torch.zeros_like(local)
    centroids = query.new_full((n_query, index.key.shape[1]), -math.inf)
    outputs, lses = [], []
    for count in n_chunks.unique().tolist():  # queries that see the same clusters; causal ones are consecutive
        own = (n_chunks == count).nonzero().squeeze(1)
        if not count:
            exact = logits[own].masked_fill(~local[own], -math.inf)
            outputs.append(exact.softmax(1) @ value.to(wide))
            lses.append(exact.logsumexp(1))
            continue
        n_clusters = count * layout.clusters_per_chunk
        far = FarKeys(
            key,
            value,
            key[: layout.sinks].to(wide),
            value[: layout.sinks].to(wide),
            index.key[0, :n_clusters],
            index.value[0, :n_clusters],
            index.positions[0, :n_clusters],
            Int4Keys(*(part[0, :n_clusters] for part in index.int4)),
            index.key_cov[0, :count].mean(0),
            index.key_value_cov[0, :count].mean(0),
        )
        local_logits = logits[own].masked_fill(~(local[own] & ~is_sink), -math.inf)
        before = far_logits(query[own], far)
        threshold = logit_threshold(before, far, log_inverse_weight(config.min_weight), local_logits.logsumexp(1))
        hits = find_keys(query[own], far, before, threshold)
        hit[own[hits.query], hits.position] = True
        hit_key, hit_value = (t.index_select(0, hits.position).to(wide) for t in (key, value))
        terms = far_terms(query[own], far, before, threshold, hits, hit_key)
        centroids[own, :n_clusters] = terms.columns[:, layout.sinks :].detach()
        peak = torch.maximum(far_peak(terms, hits, local_logits.amax(1)), local_logits.amax(1)).detach()
        total, mass = far_sums(terms, peak, far, hits, hit_value)
        weights = torch.exp(local_logits - peak[:, None])
        total, mass = total + weights @ value.to(wide), mass + weights.sum(1)
        outputs.append(total / mass[:, None])
        lses.append(peak + mass.log())
    order = n_chunks.argsort(stable=True).argsort()
    output, lse = (torch.cat(parts).index_select(0, order) for parts in (outputs, lses))
    return Reference(output, lse, local, hit, centroids)
