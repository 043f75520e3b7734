"""Bytes that a rank sends in the forward pass of one layer, from the plan that ranks follow; no process is needed.

`python experiments/parallel/planned.py` prints the table of docs/parallel.md: 131,072 tokens on 8 ranks, 32 query
heads and 8 key heads of 128 numbers, bfloat16. Kept keys are taken to lie evenly on the ranks that hold a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from prescore import Config, Exact, Lsh, Routed, Selected
from prescore.ops.backend import Needs, pick_backend
from prescore.parallel.shards import Block, Map
from prescore.parallel.selected import cluster_scorer
from prescore.parallel.comm import NOTE
from prescore.parallel.ulysses import share_heads
from prescore.parallel.shards import Shard
from prescore.parallel.selected import why_not_selected
from prescore.parallel.stats import Held, stats_kind_of
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

    def piece(self, rank: int) -> Shard:
        """What a rank holds, without any numbers."""
        own = (self.n // self.ranks, self.dim)
        query, key = (torch.empty(1, heads, *own, dtype=self.dtype, device="meta") for heads in self._both)
        group = SimpleNamespace(rank=rank, size=self.ranks)
        backend = pick_backend(Needs.of(torch.empty(1, 1, 1, self.dim)))
        return Shard(group, query, key, key, None, self.is_causal, 1.0, backend, Streams())  # type: ignore[arg-type]

    @property
    def _both(self) -> tuple[int, int]:
        return self.heads, self.kv_heads

    @property
    def row(self) -> int:
        """Bytes of a key, or of a value."""
        return self.dim * self.dtype.itemsize


def planned_bytes(layer: Layer, config: Config) -> list[float]:
    """Bytes that each rank sends to others."""
    notes = (layer.ranks - 1) * NOTE
    if isinstance(config, Exact):
        return [notes + (layer.ranks - 1) * layer.n / layer.ranks * layer.kv_heads * 2 * layer.row] * layer.ranks
    if isinstance(config, Selected) and not why_not_selected(layer.piece(0), config):
        return [notes + _Rows(layer, config, rank).sent() for rank in range(layer.ranks)]
    return [notes + layer.ranks - 1 + _by_heads(layer, rank) for rank in range(layer.ranks)]


def _by_heads(layer: Layer, rank: int) -> float:
    """Queries, keys and values there, outputs back; each rank sends a piece of positions."""
    shares = share_heads(layer.heads, layer.kv_heads, layer.ranks)
    there = sum(s.n_query_heads + 2 * (s.end_key - s.first_key) for r, s in enumerate(shares) if r != rank)
    back = shares[rank].n_query_heads * (layer.ranks - 1)
    return (there + back) * layer.n / layer.ranks * layer.row


class _Rows:
    """A `Selected` whose rows travel, seen from one rank."""

    def __init__(self, layer: Layer, config: Selected, rank: int) -> None:
        self.layer, self.config, self.rank = layer, config, rank
        self.places = Map(layer.piece(rank), config)

    def sent(self) -> float:
        """Bytes to all other ranks."""
        blocks = [block for block in self.places.blocks if self.rank in self.places.holders(block)]
        scored = [block for block in blocks if not block.keeps_all]
        clusters = cluster_scorer(self.config)
        scorers = [self.config.scoring, *([] if clusters in (None, self.config.scoring) else [clusters])]
        each = sum(self._told(block, scorer) for block in scored for scorer in scorers if scorer)
        each += sum(self._candidates(block) for block in scored)
        each += sum(self._rows(block, clusters is not None and not block.keeps_all) for block in blocks)
        return each * self.layer.kv_heads + self._near() + self._hashes()

    def _others(self, ranks: list[int]) -> int:
        return len([rank for rank in ranks if rank != self.rank])

    def _told(self, block: Block, scorer: Scorer) -> float:
        """What scores need, to the other holders."""
        layer, span = self.layer, self.places.columns(block, self.rank)
        telling = stats_kind_of(scorer)
        if telling is None:
            raise TypeError(f"scorer must be one that can be told from pieces, got {scorer!r}")
        held = Held(torch.empty(1, 1, 0, layer.dim), span, block.keys.length, Streams().child(block.name))
        size = telling.size(held, span) * telling.wire(layer.dtype, torch.float32).itemsize
        return size * self._others(self.places.holders(block))

    def _candidates(self, block: Block) -> float:
        best = min(block.n_free, self.places.columns(block, self.rank).length)
        return best * WIDE * self._others(self.places.holders(block))

    def _rows(self, block: Block, stands_in: bool) -> float:
        """Kept keys and values, their number, sums for centroids, to ranks whose queries meet the block."""
        layer, config = self.layer, self.config
        kept = block.n_kept * self.places.columns(block, self.rank).length / block.keys.length * 2 * layer.row
        clusters = cluster_scorer(config) if stands_in else None
        n_clusters = 0 if clusters is None else clusters.n_clusters or layer.dim + 1
        sums = n_clusters * (2 * layer.dim + 1) * WIDE
        return (kept + WIDE + sums) * self._others(self.places.needers(block))

    def _near(self) -> float:
        """Keys and values of a leaf that lies on two ranks."""
        own = self.places.keys[self.rank]
        spans = [own.within(near).length for rank, near in enumerate(self.places.near) if rank != self.rank]
        return sum(spans) * self.layer.kv_heads * 2 * self.layer.row

    def _hashes(self) -> float:
        """Of queries, for blocks cut by rank."""
        lsh, places = self.config.inner, self.places
        if not isinstance(lsh, Lsh) or lsh.alignment != "rank":
            return 0.0
        sent = 0
        for block in places.blocks:
            needers = places.needers(block)
            if not block.is_exact and self.rank in needers:
                sent += places.queries[self.rank].within(block.queries).length * self._others(needers)
        return sent * self.layer.heads * (1 if lsh.n_projections <= 8 else WIDE)


def main() -> None:
    """Print the table."""
    lines = [
        ("`Exact()`", "gather (a ring sends as much)", Exact()),
        ("`Routed()`, `Hyper()`", "heads", Routed()),
        *(
            (f'`Selected("kmeans", top_k={top_k})`', "rows", Selected("kmeans", top_k=top_k))
            for top_k in (8192, 2048, 1024)
        ),
        ("`Selected.paper(top_k=2048)`", "rows", Selected.paper(top_k=2048)),
    ]
    for name, way, config in lines:
        full, causal = (
            planned_bytes(Layer(131072, 8, 32, 8, 128, torch.bfloat16, is_causal), config)
            for is_causal in (False, True)
        )
        mega = [round(number / 1e6) for number in (max(full), max(causal), sum(causal) / len(causal))]
        print(f"| {name} | {way} | {mega[0]} | {mega[1]} / {mega[2]} |")


if __name__ == "__main__":
    main()
