"""Bytes that a rank sends in the forward pass of one layer, from the layout that ranks follow; runs no ranks.

Selected keys are taken to lie evenly on the holders of a block. `make figures` writes a table of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from prescore import Config, Exact, KMeans, Lsh, Routed, Selected
from prescore.ops.operators import pick_operator
from prescore.parallel.comm import NOTE, Shard
from prescore.parallel.selected import KeyBlock, RankLayout, cluster_scorer, empty_stats, overlap, why_not_selected
from prescore.parallel.ulysses import share_heads
from prescore.rng import Streams
from prescore.scoring.base import Scorer

WIDE = 4
"""Bytes of scores, sums and hashes of many bits."""


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer, and the ranks that its sequence lies on."""

    n: int
    ranks: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    is_causal: bool

    def shard(self, rank: int) -> Shard:
        """What a rank holds, without any numbers."""
        own = (self.n // self.ranks, self.dim)
        query, key = (
            torch.empty(1, heads, *own, dtype=self.dtype, device="meta") for heads in (self.heads, self.kv_heads)
        )
        group = SimpleNamespace(rank=rank, size=self.ranks)
        operator = pick_operator(torch.empty(1, 1, 1, self.dim))
        return Shard(group, query, key, key, None, self.is_causal, 1.0, operator, Streams())  # type: ignore[arg-type]

    @property
    def row(self) -> int:
        """Bytes of a key, or of a value."""
        return self.dim * self.dtype.itemsize


def planned_bytes(layer: Layer, config: Config) -> list[float]:
    """Bytes that each rank sends to others."""
    others = layer.ranks - 1
    if isinstance(config, Exact):
        return [others * (NOTE + layer.n / layer.ranks * layer.kv_heads * 2 * layer.row)] * layer.ranks
    if isinstance(config, Selected) and not why_not_selected(layer.shard(0), config):
        return [others * NOTE + _SelectedExchange(layer, config, rank).sent() for rank in range(layer.ranks)]
    return [others * (NOTE + 1) + _by_ulysses(layer, rank) for rank in range(layer.ranks)]


def _by_ulysses(layer: Layer, rank: int) -> float:
    """Queries, keys and values there, outputs back."""
    shares = share_heads(layer.heads, layer.kv_heads, layer.ranks)
    there = sum(len(s.heads) + 2 * len(s.kv_heads) for r, s in enumerate(shares) if r != rank)
    back = len(shares[rank].heads) * (layer.ranks - 1)
    return (there + back) * layer.n / layer.ranks * layer.row


class _SelectedExchange:
    """The selected exchange, seen from one rank."""

    def __init__(self, layer: Layer, config: Selected, rank: int) -> None:
        self.layer, self.config, self.rank, self.shard = layer, config, rank, layer.shard(rank)
        self.layout = RankLayout(self.shard, config)
        self.clusters = cluster_scorer(config, self.shard)

    def sent(self) -> float:
        """Bytes to all other ranks."""
        blocks = [block for block in self.layout.blocks if self.rank in self.layout.holders(block)]
        scored = [block for block in blocks if not block.keeps_all]
        scorers = [self.config.scoring]
        if self.clusters is not None and self.clusters is not self.config.scoring:
            scorers.append(self.clusters)
        each = sum(self._stats(block, scorer) for block in scored for scorer in scorers)
        each += sum(self._candidates(block) for block in scored)
        each += sum(self._selected(block) for block in blocks)
        flags = 2 * len(scorers) * (self.layer.ranks - 1)
        return flags + each * self.layer.kv_heads + self._local() + self._hashes()

    def _others(self, ranks: list[int]) -> int:
        return len([rank for rank in ranks if rank != self.rank])

    def _stats(self, block: KeyBlock, scorer: Scorer) -> float:
        """Score statistics, to the other holders."""
        stats = empty_stats(scorer, self.shard, block, self.layout.columns(block, self.rank))
        if stats is None:
            raise TypeError(f"scorer must have statistics, got {scorer!r}")
        return stats.shape[2] * stats.itemsize * self._others(self.layout.holders(block))

    def _candidates(self, block: KeyBlock) -> float:
        best = min(block.n_free, len(self.layout.columns(block, self.rank)))
        return best * WIDE * self._others(self.layout.holders(block))

    def _selected(self, block: KeyBlock) -> float:
        """Selected keys and values, their number, sums for centroids, to ranks whose queries read the block."""
        layer, share = self.layer, len(self.layout.columns(block, self.rank)) / len(block.keys)
        n_clusters = 0
        if self.clusters is not None and not block.keeps_all:
            n_clusters = self.clusters.n_clusters or layer.dim + 1
        sums = n_clusters * (2 * layer.dim + 1) * WIDE
        return (block.n_selected * share * 2 * layer.row + WIDE + sums) * self._others(self.layout.readers(block))

    def _local(self) -> float:
        """Keys and values of a leaf that lies on two ranks."""
        own = self.layout.keys[self.rank]
        shared = [len(overlap(own, local)) for rank, local in enumerate(self.layout.local) if rank != self.rank]
        return sum(shared) * self.layer.kv_heads * 2 * self.layer.row

    def _hashes(self) -> float:
        """Of queries, for blocks cut by rank."""
        lsh, layout = self.config.inner, self.layout
        if not isinstance(lsh, Lsh) or lsh.alignment != "rank":
            return 0.0
        sent = 0
        for block in layout.blocks:
            readers = layout.readers(block)
            if not block.is_exact and self.rank in readers:
                sent += len(overlap(layout.queries[self.rank], block.queries)) * self._others(readers)
        return sent * self.layer.heads * (1 if lsh.n_projections <= 8 else WIDE)


def layer(is_causal: bool) -> Layer:
    """131,072 tokens on 8 ranks, 32 query heads and 8 KV heads of 128 numbers, bfloat16."""
    return Layer(131072, 8, 32, 8, 128, torch.bfloat16, is_causal)


SAMPLED = KMeans(fit_size=4096)
CONFIGURATIONS = (
    ("`Exact()`", "all-gather (a ring sends as much)", Exact()),
    ("`Routed()`, `Hyper()`", "ulysses", Routed()),
    *(
        (f"`Selected(KMeans(fit_size=4096), top_k={top_k})`", "selected", Selected(SAMPLED, top_k=top_k))
        for top_k in (8192, 2048, 1024)
    ),
    ("`Selected.paper(KMeans(fit_size=4096))`", "selected", Selected.paper(SAMPLED)),
    ("`Selected.paper()`, clusters fitted on all keys", "selected", Selected.paper()),
)
"""What docs/parallel.md compares: a name, the exchange, and the configuration."""
