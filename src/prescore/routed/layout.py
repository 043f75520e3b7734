"""Which keys a routed query reads exactly, and which it sees as clusters.

The keys after the sinks are cut into *chunks* of fixed length, and each chunk into *clusters* of equal size. A
causal query reads the sinks, its own chunk up to itself and the previous chunk exactly; earlier chunks are *far*:
it sees them as clusters. Without a causal mask every full chunk is far for every query, and the keys after the
last full chunk are read exactly. What a query sees depends on its position alone, so chunked prefill and decode
steps see what the whole call sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from prescore.config import Routed
from prescore.ops.operators import Operator
from prescore.routed.tree import tree_levels

SPAN_CLUSTERS = 64
"""Clusters of a span, which has a covariance of its own: it costs a query as much as the centroids of the span."""


@dataclass(frozen=True)
class Layout:
    """The fixed geometry of one call; all lengths in keys.

    Attributes:
        n_query: Queries.
        n_keys: Keys.
        causal: Whether queries are the last `n_query` positions and see no later key.
        sinks: First positions, read exactly by every query.
        chunk_size: Keys of one chunk, `2 ** levels * cluster_size`.
        levels: Bisections of a chunk.
        cluster_size: Keys of one cluster, at most the configured size.
        n_chunks: Chunks that are far for some query.
        exact_until: Causal: queries before this position read every key.
    """

    n_query: int
    n_keys: int
    causal: bool
    sinks: int
    chunk_size: int
    levels: int
    cluster_size: int
    n_chunks: int
    exact_until: int

    @property
    def clusters_per_chunk(self) -> int:
        """Clusters of one chunk."""
        return 1 << self.levels

    @property
    def chunks_per_span(self) -> int:
        """Chunks of a span."""
        return max(1, SPAN_CLUSTERS >> self.levels)

    @property
    def first(self) -> int:
        """Position of the first query."""
        return self.n_keys - self.n_query if self.causal else 0

    @property
    def n_exact(self) -> int:
        """Number of leading queries that read every key."""
        if not self.n_chunks:
            return self.n_query
        end = max(self.sinks + 2 * self.chunk_size, self.exact_until) if self.causal else 0
        return max(0, min(end - self.first, self.n_query))

    @property
    def far_end(self) -> int:
        """Causal: where the local keys of the last query begin."""
        return self.sinks + self.n_chunks * self.chunk_size if self.n_chunks else 0

    @property
    def fewest_chunks(self) -> int:
        """Causal: how many chunks the first query sees that sees any."""
        return (self.first + self.n_exact - self.sinks) // self.chunk_size - 1

    def far_chunks(self, position: Tensor) -> Tensor:
        """How many chunks are far for a query at this position."""
        if not self.causal:
            return torch.full_like(position, self.n_chunks)
        chunks = ((position - self.sinks) // self.chunk_size - 1).clamp_min(0)
        return chunks.masked_fill(position < self.exact_until, 0)


@lru_cache(maxsize=64)
def make_layout(n_query: int, n_keys: int, *, causal: bool, config: Routed) -> Layout:
    """Round the configured sizes so that every chunk is a full binary tree.

    Chunk and cluster sizes depend on the configuration only; `sinks` and `n_chunks` also on the length.
    """
    sinks = min(config.sinks, n_keys)
    levels = tree_levels(config.chunk_size, config.cluster_size)
    cluster_size = max(1, config.chunk_size >> levels)
    chunk_size = cluster_size << levels
    rest = n_keys - sinks
    n_chunks = max(0, (rest - 1) // chunk_size - 1) if causal else rest // chunk_size
    if causal and n_keys <= config.exact_until:
        n_chunks = 0
    return Layout(
        n_query, n_keys, causal, sinks, chunk_size, levels, cluster_size, max(0, n_chunks), config.exact_until
    )


def why_exact(config: Routed, n_query: int, n_keys: int, *, is_causal: bool) -> str:
    """Why every query of a call without padding reads every key; empty = some query sees far keys as clusters."""
    few_queries = not is_causal and n_query <= config.exact_until
    if not few_queries and make_layout(n_query, n_keys, causal=is_causal, config=config).n_chunks:
        return ""
    if few_queries or (is_causal and n_keys <= config.exact_until):
        return f"up to exact_until={config.exact_until}"
    return f"no longer than sinks and {'two chunks' if is_causal else 'a chunk'} of {config.chunk_size}"


@dataclass(frozen=True, eq=False)
class View:
    """What each query of some KV heads sees; the query heads of a KV head share their positions.

    Attributes:
        n_clusters: `[T, n]` int32 on the CPU: how many clusters a query sees, the first ones of its KV head.
        local_start, local_stop: `[T, n]` likewise: the local keys. Causal: the previous chunk, and its own up to
            the query; else the keys after the last full chunk. Every key where the query sees no cluster.
        causal: Whether the mask is causal.
        chunk_size: Keys of a chunk.
        clusters_per_cov: Covariance i is that of queries which see up to (i + 1) x this many clusters.
        clusters_per_span: Clusters of a span.
        log_inverse: `reference.log_inverse_weight(min_weight)`.
        scale: Factor of the logits.
        operator: The operator for local keys, where the backend leaves them to it.
        backend: What runs the far keys: `native`, `triton` or `plain`.
    """

    n_clusters: Tensor
    local_start: Tensor
    local_stop: Tensor
    causal: bool
    chunk_size: int
    clusters_per_cov: int
    clusters_per_span: int
    log_inverse: float
    scale: float
    operator: Operator
    backend: str

    def runs(self) -> Iterator[tuple[int, slice, int]]:
        """Consecutive queries that see the same clusters: KV head, queries, number of clusters."""
        for head, counts in enumerate(self.n_clusters):
            runs, last = torch.unique_consecutive(counts, return_counts=True), 0
            for n_clusters, length in zip(*(t.tolist() for t in runs), strict=True):
                first, last = last, last + length
                yield head, slice(first, last), n_clusters

    def covariance(self, n_clusters: int) -> int:
        """Which covariance of the last span belongs to so many visible clusters."""
        return (n_clusters - 1) // self.clusters_per_cov


def make_view(
    layout: Layout,
    n_heads: int,
    n_query: int,
    log_inverse: float,
    scale: float,
    operator: Operator,
    backend: str,
) -> View:
    """What the last `n_query` queries of a causal call see, or the queries of a full one; without padding."""
    if layout.causal:
        position = torch.arange(layout.n_keys - n_query, layout.n_keys, dtype=torch.int64, device="cpu")
        stop = position + 1
    else:
        position = torch.arange(n_query, dtype=torch.int64, device="cpu")
        stop = torch.full_like(position, layout.n_keys)
    chunks = layout.far_chunks(position)
    start = (layout.sinks + chunks * layout.chunk_size).masked_fill(chunks == 0, 0)
    n_clusters, start, stop = (
        t.to(torch.int32).expand(n_heads, n_query).contiguous()
        for t in (chunks * layout.clusters_per_chunk, start, stop)
    )
    clusters_per_cov = layout.clusters_per_chunk * (1 if layout.causal else layout.n_chunks)
    clusters_per_span = layout.clusters_per_chunk * layout.chunks_per_span
    sizes = (layout.chunk_size, clusters_per_cov, clusters_per_span)
    return View(n_clusters, start, stop, layout.causal, *sizes, log_inverse, scale, operator, backend)
