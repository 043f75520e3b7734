"""Where routed attention reads exactly, and how its clusters lie.

The keys behind the sinks are cut into *chunks* of fixed length. A causal query reads the sinks, its own chunk up
to itself and the chunk before exactly; the chunks before that are *pieces* for it. Without a causal mask there
is no local part and every chunk is a piece for every query. `JOINED` consecutive pieces are replaced by one
large piece as soon as all of them are seen: a deeper tree over more keys has tighter leaves of the same size.
A piece consists of a few *single* keys, those least like the rest, which everyone reads exactly, and of equal
leaves of a tree over the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.clustering.tree import tree_levels
from prescore.config import Routed

SINGLES_PER_KEY = 1 / 128
JOINED_LEVELS = 2
JOINED = 1 << JOINED_LEVELS
FAN = 8
"""Neighbouring leaves (nodes) that make a node of the next level."""
WIDTH = 64
"""Stand-ins of each level that a causal query sees, at least; see levels.py."""


@dataclass(frozen=True)
class Layout:
    """The fixed geometry of one call; all lengths in keys.

    Attributes:
        n_query: Queries.
        n_key: Keys.
        causal: Whether queries are the last `n_query` positions and see no later key.
        sinks: First positions, read exactly by everyone.
        chunk: Keys of one chunk, `singles + 2 ** levels * leaf`.
        levels: Bisections of a piece of one chunk.
        leaf: Keys of one cluster, at most the size asked for.
        singles: Keys of each chunk that everyone reads exactly.
        n_pieces: Chunks that some query sees as clusters.
        n_chosen: Leaves a query reads exactly.
        exact_until: Causal: queries before this position read everything exactly, whatever the chunks.
        padded: Not causal, and sequences differ in length: what each of them sees, its counts say.
        width: Causal: stand-ins of each level that a query sees.
        n_levels: Levels of nodes above the leaves.
    """

    n_query: int
    n_key: int
    causal: bool
    sinks: int
    chunk: int
    levels: int
    leaf: int
    singles: int
    n_pieces: int
    n_chosen: int
    exact_until: int = 0
    padded: bool = False
    width: int = WIDTH
    n_levels: int = 0

    @property
    def leaves(self) -> int:
        """Leaves of one chunk."""
        return 1 << self.levels

    @property
    def leaf_room(self) -> int:
        """Keys of a leaf with filler: the operators are markedly faster at multiples of 16."""
        return self.leaf if self.leaf < 16 else -(-self.leaf // 16) * 16

    @property
    def n_joined(self) -> int:
        """Large pieces that some query sees."""
        return self.n_pieces // JOINED

    @property
    def large_leaves(self) -> int:
        """Leaves of one large piece."""
        return self.leaves * JOINED

    @property
    def large_singles(self) -> int:
        """Singles of one large piece."""
        return self.singles * JOINED

    @property
    def kept(self) -> int:
        """Singles of a large piece that are still read by everyone when its leaves are seen as nodes."""
        return self.large_singles // FAN

    @property
    def level_sizes(self) -> list[int]:
        """Stand-ins of each level: leaves of the large pieces and of the chunks, then nodes of large pieces."""
        large = self.n_joined * self.large_leaves
        nodes = [large // FAN**level for level in range(1, self.n_levels + 1)]
        return [large + self.n_pieces * self.leaves, *nodes]

    @property
    def level_offsets(self) -> list[int]:
        """Where each level begins in the table of stand-ins."""
        sizes = self.level_sizes
        return [sum(sizes[:level]) for level in range(len(sizes))]

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
        return max(0, min(self.head - self.first, self.n_query)) if self.n_pieces else self.n_query

    def pieces_seen(self, position: Tensor) -> Tensor:
        """How many pieces a query at this position sees as clusters."""
        if not self.causal:
            return torch.full_like(position, self.n_pieces)
        pieces = ((position - self.sinks) // self.chunk - 1).clamp_min(0)
        return pieces.masked_fill(position < self.exact_until, 0)


def make_layout(
    n_query: int,
    n_key: int,
    *,
    causal: bool,
    config: Routed,
    padded: bool = False,
    with_singles: bool = True,
) -> Layout:
    """Round the configured sizes so that every piece is a full binary tree; depends on no sequence length."""
    sinks = min(config.sinks, n_key)
    levels = tree_levels(config.chunk_size, config.leaf_size)
    chunk = max(1, config.chunk_size >> levels) << levels
    # as many singles as keep the leaves equal
    singles = max(1, round(chunk * SINGLES_PER_KEY / 2**levels)) << levels
    if chunk == 2**levels or not with_singles:
        singles = 0
    leaf = (chunk - singles) >> levels
    behind = n_key - sinks
    n_pieces = max(0, (behind - 1) // chunk - 1) if causal else -(-behind // chunk)
    exact_until = config.exact_until if causal else 0
    if causal and n_key <= exact_until:
        n_pieces = 0
    n_chosen = config.rows // config.leaf_size
    # many times what is read, so that enough rows for every leaf are never spent on nodes
    width = max(WIDTH, FAN * n_chosen)
    nodes = node_cuts(width, JOINED << levels, n_pieces // JOINED * JOINED << levels) if causal else []
    return Layout(
        n_query=n_query,
        n_key=n_key,
        causal=causal,
        sinks=sinks,
        chunk=chunk,
        levels=levels,
        leaf=leaf,
        singles=singles,
        n_pieces=n_pieces,
        n_chosen=min(n_chosen, n_pieces << levels),
        exact_until=exact_until,
        padded=padded and not causal,
        width=width,
        n_levels=max(0, len(nodes) - 1),
    )


def node_cuts(width: int, large_leaves: int, seen: int) -> list[tuple[int, int]]:
    """For each level the run of nodes that is shown of `seen` leaves: the newest leaves, then ever older nodes.

    Cuts fall between large pieces too, because what is single in a piece changes with its level.
    """
    shown: list[tuple[int, int]] = []
    stop = seen
    while stop:
        unit = max(FAN, large_leaves // FAN ** len(shown))
        cut = max(0, stop - width) // unit * unit
        shown.append((cut, stop))
        stop = cut // FAN
    return shown or [(0, 0)]
