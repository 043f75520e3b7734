"""Routed attention from its definition, one query at a time, in float64: the oracle of `prescore.routed`.

It shares the configuration and the bisection tree with the engine and nothing else. The keys behind the sinks are
cut into chunks, and each chunk by its tree into clusters. A causal query reads the sinks, its own and the previous
chunk; earlier chunks are far. With `q` the query times the scale, a query that sees far chunks

1. takes `s`, the root mean square over the far keys of a span, 64 clusters, of their logits' distance from that of
   their centroid; a span that is not all far counts as far as it is;
2. estimates the attention mass: exp(logit) of the keys that it reads in any case, a tenth of it for sinks, and
   `L exp(centroid logit + min(s^2 / 2, 4))` for each cluster of `L` keys, with `L` down to half where all clusters
   have more than 16,384 keys together; `min_weight` of that is its threshold;
3. compares, in clusters within `4.1 s` of the threshold times their radius, the int8 centroids of subclusters
   (runs of 16 keys of a cluster in tree order) with it, and the int8 keys of those within `2.75 x`, with `x` the
   deviation of logits in a subcluster as spread out as this one (in sharp heads up to `4 x`); it reads the keys
   that reach the threshold, with the logits of the int8 keys where they weigh less than 64 times
   `min_weight` and less than 0.05;
4. counts the unread keys of a cluster as its centroid: their logits are taken as normal, cut off at the threshold.

One softmax over all of it follows. Autograd goes through everything but the choices: the tree, int8 keys, and
which keys are read.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from oracles.dense import after_last_key
from torch import Tensor

from prescore.config import Routed
from prescore.routed.tree import bisection_tree
from prescore.types import Attended

N_SUBCLUSTER = 16
LIGHT_WEIGHT = 64
MASS_KEYS = 16384
SPAN = 64


def routed_oracle(query, key, value, config, **options):
    """What `prescored_attention` must give with this configuration, in float64 and differentiable by autograd.

    Trees and int8 keys are made in the precision of the inputs. Causal padding queries after the last real key
    see nothing.
    """
    heads = oracle_reads(query, key, value, config, **options)
    results = [reads.attend() for head in heads.values() for reads in head]
    output, lse = (torch.stack(part) for part in zip(*results, strict=True))
    output, lse = output.view(*query.shape[:3], value.shape[-1]), lse.view(query.shape[:3])
    mask = options.get("key_padding_mask")
    if mask is not None and options["is_causal"]:
        after = after_last_key(mask, query.shape[2])[:, None]
        output, lse = output.masked_fill(after[..., None], 0), lse.masked_fill(after, -torch.inf)
    return Attended(output, lse)


def oracle_reads(query, key, value, config, *, is_causal, key_padding_mask=None, scale=None):
    """What each query reads, by sequence and query head."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    heads_per_kv, n_keys, reads = query.shape[1] // key.shape[1], key.shape[2], {}
    for row in range(query.shape[0]):
        mask = torch.ones(n_keys, dtype=torch.bool) if key_padding_mask is None else key_padding_mask[row]
        sequence = Sequence.of(mask, query.shape[2], is_causal, config)
        for head in range(query.shape[1]):
            behind = (row, head // heads_per_kv, slice(sequence.first, None))
            keys, values = (t[behind].masked_fill(~sequence.real[:, None], 0.0) for t in (key, value))
            reads[row, head] = list(_reads_of_head(sequence, query[row, head], keys, values, scale))
    return reads


@dataclass(frozen=True, eq=False)
class Sequence:
    """Where the queries of one sequence stand. Positions count from its first real key.

    Attributes:
        real: `[n]` which positions hold real keys.
        first: Padding before position 0.
        start: Position of the first query, causal only; negative = before the first real key.
        n_query: Queries.
        n_real_queries: Those that are not padding.
        is_causal: Whether a query sees no later key.
        config: The configuration.
    """

    real: Tensor
    first: int
    start: int
    n_query: int
    n_real_queries: int
    is_causal: bool
    config: Routed

    @classmethod
    def of(cls, mask, n_query, is_causal, config):
        """The sequence with real keys `mask [Nk]`."""
        first = int(mask.nonzero()[0]) if bool(mask.any()) else 0
        # with as many queries as keys, a query is padding where its key is
        n_real_queries = int(mask.sum()) if n_query == len(mask) else n_query
        return cls(mask[first:], first, len(mask) - n_query - first, n_query, n_real_queries, is_causal, config)

    @cached_property
    def levels(self):
        """Bisections of a chunk until no cluster is larger than configured."""
        levels = 0
        while self.config.cluster_size * 2**levels < self.config.chunk_size:
            levels += 1
        return levels

    @property
    def cluster_size(self):
        """Keys of a cluster; what does not divide is left off."""
        return max(1, self.config.chunk_size // 2**self.levels)

    @property
    def chunk_size(self):
        """Keys of a chunk."""
        return self.cluster_size << self.levels

    @cached_property
    def n_real(self):
        """Real keys."""
        return int(self.real.sum())

    @cached_property
    def is_exact(self):
        """Whether every query reads every key that it may see."""
        if not bool(self.real[: self.n_real].all()):
            return True  # padding between real keys
        if self.is_causal:  # padding behind real keys, but before real queries
            return self.n_query != self.first + len(self.real) and self.n_real < len(self.real)
        n_chunk = self.config.sinks + self.chunk_size
        return self.n_real_queries <= self.config.exact_until or self.n_real < n_chunk

    def far_chunks(self, i):
        """How many chunks are far for query `i`."""
        if self.is_exact:
            return 0
        if not self.is_causal:
            return (self.n_real - self.config.sinks) // self.chunk_size
        position, exact_until = self.start + i, self.config.exact_until
        if position < max(self.config.sinks + 2 * self.chunk_size, exact_until) or position >= self.n_real:
            return 0
        return (position - self.config.sinks) // self.chunk_size - 1

    def always_read(self, i):
        """`[n]` sinks and local keys of query `i`."""
        position, sinks = torch.arange(len(self.real)), self.config.sinks
        far = (position >= sinks) & (position < sinks + self.far_chunks(i) * self.chunk_size)
        if not self.is_causal:
            return self.real & ~far
        is_padding = not self.is_exact and self.start + i >= self.n_real
        return self.real & ~far & (position <= self.start + i) & (not is_padding)


class QueryReads(NamedTuple):
    """What one query reads: keys `[n]` by position, and `M` clusters.

    Attributes:
        logits: `[n]` of all keys.
        values: `[n, Dv]`.
        always: `[n]` sinks and local keys.
        hits: `[n]` far keys that it reads.
        n_compared: Int8 keys and subclusters that it compared.
        centroid_logits: `[M]` of the unread keys of each cluster together; -inf = all were read.
        centroid_values: `[M, Dv]`.
    """

    logits: Tensor
    values: Tensor
    always: Tensor
    hits: Tensor
    n_compared: int
    centroid_logits: Tensor
    centroid_values: Tensor

    def attend(self):
        """Output `[Dv]` and lse of one softmax over keys and centroids."""
        hidden = ~(self.always | self.hits)
        logits = torch.cat((self.logits.masked_fill(hidden, -math.inf), self.centroid_logits))
        if bool(torch.isneginf(logits).all()):  # autograd through -inf - -inf would be NaN
            return self.values.sum(0) * 0, logits.new_full((), -math.inf)
        by_key, by_centroid = logits.softmax(0).split((len(self.values), len(self.centroid_values)))
        return by_key @ self.values + by_centroid @ self.centroid_values, logits.logsumexp(0)


def _reads_of_head(sequence, query, key, value, scale):
    """What the queries `[Nq, D]` of one head read of `key [n, D]` and `value [n, Dv]`, all as they were given."""
    clusters = Clusters.of(key, value, sequence)
    counts = [sequence.far_chunks(i) << sequence.levels for i in range(sequence.n_query)]
    prefixes = {count: clusters.first(count) for count in set(counts)}
    scaled, int8 = query.double() * scale, int8_query(_at_least_float32(query.detach()) * scale)
    all_logits, values = scaled @ key.double().T, value.double()
    is_sink = torch.arange(len(key)) < sequence.config.sinks
    for i, (scaled_query, exact) in enumerate(zip(scaled.unbind(), all_logits.unbind(), strict=True)):
        logits = exact
        always, visible = sequence.always_read(i), prefixes[counts[i]]
        hits, n_compared = torch.zeros_like(always), 0
        centroid_logits, centroid_values = logits.new_zeros(0), values.new_zeros(0, values.shape[1])
        if counts[i]:
            known = logits[always] + is_sink[always].double() * math.log(0.1)
            read, estimates, n_compared, centroid_logits, centroid_values = visible.search(
                scaled_query, int8[i], known, sequence.config.min_weight
            )
            hits[visible.positions[read]] = True
            light = read & ~estimates.isnan()
            # autograd takes the int8 logit for the logit
            change = torch.zeros_like(logits).index_put((visible.positions[light],), estimates[light])
            is_light = torch.zeros_like(hits).index_fill(0, visible.positions[light], True)
            logits = logits + (change - logits).masked_fill(~is_light, 0.0).detach()
        yield QueryReads(logits, values, always, hits, n_compared, centroid_logits, centroid_values)


class Clusters(NamedTuple):
    """Clusters of the far chunks of one KV head, in float64: `M` clusters of `L` keys.

    Attributes:
        positions: `[M, L]` of their keys.
        key, value: `[M, D]`, `[M, Dv]` centroids.
        key_offset, value_offset: `[M, L, D]`, `[M, L, Dv]` differences from the centroids.
        int8: `[M, L, D]` the key offsets, quantized, with one scale for each cluster.
        spans: `[M]` which span each cluster is of.
        subclusters: For each run of 16 places: which places, its quantized mean offset `[M, D]`, its spread `[M]`.
    """

    positions: Tensor
    key: Tensor
    value: Tensor
    key_offset: Tensor
    value_offset: Tensor
    int8: Tensor
    spans: Tensor
    subclusters: list[tuple[slice, Tensor, Tensor]]

    @classmethod
    def of(cls, key, value, sequence):
        """Of all chunks that some query sees; trees and int8 keys in the precision of the keys."""
        sinks, size, n_chunks = sequence.config.sinks, sequence.chunk_size, 0
        if sequence.n_query:
            n_chunks = max(sequence.far_chunks(i) for i in range(sequence.n_query))
        chunks = range(sinks, sinks + n_chunks * size, size)
        levels, leaf = sequence.levels, sequence.cluster_size
        while leaf >= 2 * N_SUBCLUSTER and leaf % 2 == 0:
            levels, leaf = levels + 1, leaf // 2
        orders = [begin + bisection_tree(key.detach()[begin : begin + size], levels) for begin in chunks]
        positions = torch.cat([torch.zeros(0, dtype=torch.int64), *orders]).view(-1, sequence.cluster_size)
        keys, values = key[positions].double(), value[positions].double()
        given = _at_least_float32(key.detach()[positions])
        offsets = given - given.mean(1, keepdim=True)
        return cls(
            positions,
            keys.mean(1),
            values.mean(1),
            keys - keys.mean(1, keepdim=True),
            values - values.mean(1, keepdim=True),
            int8_rows(offsets.flatten(1), 63).view(offsets.shape),
            torch.arange(len(positions)) // max(SPAN, 2**sequence.levels),
            list(subclusters(offsets)),
        )

    def first(self, count):
        """The first clusters."""
        runs = [(places, mean[:count], spread[:count]) for places, mean, spread in self.subclusters]
        return Clusters(*(part[:count] for part in self[:7]), runs)

    def search(self, query, int8, known, min_weight):
        """Keys `[M, L]` that a query reads, int8 logits, how many it compared, logits and values of centroids.

        Int8 logits are NaN where a key weighs 64 times `min_weight`, or 0.05: its logit is exact.

        Args:
            query: `[D]`, times the scale.
            int8: `[D]` the same, quantized.
            known: Logits of the keys that it reads in any case, those of sinks less `log(10)`.
            min_weight: Of the configuration.
        """
        size = self.positions.shape[1]
        offsets, logits = self.key_offset @ query, self.key @ query
        spans = [self.spans == span for span in self.spans.unique()]
        by_span = torch.stack([offsets[own].square().mean() for own in spans])
        std = by_span.clamp_min(1e-3**2).sqrt()[self.spans]
        counted = size * sorted((0.25, (MASS_KEYS / self.positions.numel()) ** 1.5, 1.0))[1]
        mass = torch.cat((known, logits + math.log(counted) + (std**2 / 2).clamp_max(4.0))).logsumexp(0)
        threshold = mass + math.log(min_weight) if min_weight < 1 else torch.full_like(mass, math.inf)
        margin = max(0.0, math.log(0.05 / min_weight))
        lowered = threshold - (0.1 * std - margin).clamp_min(0)
        compared, n_compared = torch.zeros(self.positions.shape, dtype=torch.bool), 0
        squares = self.key_offset.square().sum(-1)
        unit = torch.stack([squares[own].mean() for own in spans]).clamp_min(1e-3**2).sqrt()[self.spans]
        radius = torch.stack([squares[:, places].mean(1) for places, _, _ in self.subclusters]).amax(0).sqrt()
        for places, mean, spread in self.subclusters if threshold < math.inf else []:
            x = std * spread / unit
            stds = (4.0 - margin / std).clamp_min(2.75)
            near = logits + 1.5 * stds * std * radius / unit >= lowered
            compared[:, places] = (near & (logits + mean @ int8 + stds * x >= lowered))[:, None]
            n_compared += int(near.sum())
        estimates = logits[:, None] + self.int8 @ int8
        read = compared & (estimates >= lowered[:, None])
        estimates = estimates.masked_fill(estimates >= threshold + min(math.log(LIGHT_WEIGHT), margin), math.nan)
        gain, move = below_threshold(threshold - logits, std)
        unread = (size - read.sum(1)).double()
        directions = [
            offsets[own].flatten() @ self.value_offset[own].flatten(0, 1) / offsets[own].numel() for own in spans
        ]
        direction = torch.stack(directions)[self.spans]
        n_compared += int(compared.sum())
        return read, estimates, n_compared, logits + unread.log() + gain, self.value + move[:, None] * direction


def below_threshold(distance, std):
    """Gain of a centroid's logit and move of its value, for normal logits cut off `distance` above their mean."""
    x = distance.clamp_max(1e30) / std  # an infinite threshold would give autograd 0 * inf
    gain = std**2 / 2 + _log_phi(x - std) - _log_phi(x)
    x = (x - std).clamp(-4, 8)
    slope = torch.sigmoid(-(1.5976 * x + 0.07056 * x**3)) * (1.5976 + 3 * 0.07056 * x**2)
    return gain.clamp(-2, 2), (1 - slope / std).clamp(-1, 1)


def _log_phi(x):
    """The log of the normal distribution function, approximated."""
    x = x.clamp(-4, 8)
    return -torch.log1p(torch.exp(-(1.5976 * x + 0.07056 * x**3)))


def subclusters(offsets):
    """Each run of 16 places of clusters `[M, L, D]`: the places, its quantized mean `[M, D]`, its spread `[M]`."""
    size = offsets.shape[1]
    runs = [slice(begin, min(begin + N_SUBCLUSTER, size)) for begin in range(0, size, N_SUBCLUSTER)]
    means = torch.stack([offsets[:, places].mean(1) for places in runs], 1)
    int8 = int8_rows(means.flatten(1), 63).view(means.shape)
    for number, places in enumerate(runs):
        spread = (offsets[:, places] - means[:, number, None]).double().square().sum(-1).mean(1).sqrt()
        yield places, int8[:, number], spread


def int8_rows(rows, most):
    """Rows `[..., D]` rounded to whole numbers up to `most` times a scale of their own, as float64."""
    scale = rows.abs().amax(-1, keepdim=True) / most
    return (rows / scale.masked_fill(scale == 0, 1.0)).round().clamp(-most, most).double() * scale.double()


def int8_query(query):
    """Queries `[..., D]`, times the scale, rounded to int8."""
    return int8_rows(_at_least_float32(query), 127)


def _at_least_float32(tensor):
    return tensor if tensor.dtype == torch.float64 else tensor.float()
