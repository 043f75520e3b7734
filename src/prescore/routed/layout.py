"""Where routed attention reads exactly, and how its nodes lie.

The keys behind the sinks are cut into *chunks* of fixed length, and each chunk into *nodes* of equal size. A
causal query reads the sinks, its own chunk up to itself and the chunk before exactly; the chunks before that are
nodes for it. Without a causal mask every full chunk is nodes for every query, and the keys behind the last full
one are read exactly. What a query sees depends on its position alone: pieces of a prompt and single steps read as
the whole call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.config import Routed
from prescore.routed.tree import tree_levels

ODD = 16
"""Keys of a node that lie farthest from its mean, its first ones: every query compares them."""


@dataclass(frozen=True)
class Layout:
    """The fixed geometry of one call; all lengths in keys.

    Attributes:
        n_query: Queries.
        n_key: Keys.
        causal: Whether queries are the last `n_query` positions and see no later key.
        sinks: First positions, read exactly by everyone.
        chunk: Keys of one chunk, `2 ** levels * leaf`.
        levels: Bisections of a chunk.
        leaf: Keys of one node, at most the size asked for.
        n_chunks: Chunks that some query sees as nodes.
        exact_until: Causal: queries before this position read everything exactly, whatever the chunks.
    """

    n_query: int
    n_key: int
    causal: bool
    sinks: int
    chunk: int
    levels: int
    leaf: int
    n_chunks: int
    exact_until: int

    @property
    def nodes_per_chunk(self) -> int:
        """Nodes of one chunk."""
        return 1 << self.levels

    @property
    def first(self) -> int:
        """Position of the first query."""
        return self.n_key - self.n_query if self.causal else 0

    @property
    def head(self) -> int:
        """Causal: queries before this position read everything exactly."""
        return max(self.sinks + 2 * self.chunk, self.exact_until) if self.causal else 0

    @property
    def n_exact(self) -> int:
        """First queries of the call, which read everything exactly."""
        return max(0, min(self.head - self.first, self.n_query)) if self.n_chunks else self.n_query

    def chunks_seen(self, position: Tensor) -> Tensor:
        """How many chunks a query at this position sees as nodes."""
        if not self.causal:
            return torch.full_like(position, self.n_chunks)
        chunks = ((position - self.sinks) // self.chunk - 1).clamp_min(0)
        return chunks.masked_fill(position < self.exact_until, 0)

    def rows_in_any_case(self) -> Tensor:
        """`[Nq]` in float64: keys and centroids that each query meets, whatever it looks for."""
        position = torch.arange(self.n_query) + self.first
        chunks = self.chunks_seen(position)
        visible = position + 1 if self.causal else torch.full_like(position, self.n_key)
        return (visible - chunks * (self.chunk - self.nodes_per_chunk)).double()

    @property
    def last_rows_in_any_case(self) -> int:
        """The same of the last query alone."""
        return self.n_key - self.n_chunks * (self.chunk - self.nodes_per_chunk)

    def full_chunks(self, valid: Tensor | None, n_rows: int) -> Tensor:
        """`[n_rows]` chunks of sequences with keys `valid [n_rows, Nk]`, without a causal mask."""
        if valid is None:
            return torch.full((n_rows,), self.n_chunks)
        return (valid.sum(1) - self.sinks) // self.chunk


def make_layout(n_query: int, n_key: int, *, causal: bool, config: Routed) -> Layout:
    """Round the configured sizes so that every chunk is a full binary tree; depends on no sequence length."""
    sinks = min(config.sinks, n_key)
    levels = tree_levels(config.chunk_size, config.cluster_size)
    leaf = max(1, config.chunk_size >> levels)
    chunk = leaf << levels
    behind = n_key - sinks
    n_chunks = max(0, (behind - 1) // chunk - 1) if causal else behind // chunk
    if causal and n_key <= config.exact_until:
        n_chunks = 0
    return Layout(n_query, n_key, causal, sinks, chunk, levels, leaf, max(0, n_chunks), config.exact_until)
