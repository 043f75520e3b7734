"""Bytes that a rank sends in the forward pass of one layer, from the plan that ranks follow; starts no process.

`python experiments/parallel/planned.py` prints the table of docs/parallel.md: 131,072 tokens on 8 ranks, 32 query
heads and 8 KV heads of 128 dimensions, bfloat16. Selected keys are assumed to lie evenly on the ranks of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from prescore import Config, Exact, Lsh, Routed, Selected
from prescore.ops.backend import Needs, pick_backend
from prescore.parallel.comm import NOTE
from prescore.parallel.selected import cluster_scorer, why_not_selected
from prescore.parallel.shards import Block, Map, Shard
from prescore.parallel.stats import Held, stats_kind_of
from prescore.parallel.ulysses import share_heads
from prescore.rng import Streams
from prescore.scoring.base import Scorer
from prescore.selected.plan import block_scorer

WIDE = 4
"""Bytes of scores, sums, counts, and hashes of more than 8 bits."""


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer, and the ranks that its sequence is sharded over."""

    n: int
    ranks: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    is_causal: bool

    def shard(self, rank: int) -> Shard:
        """The shard of a rank, on the meta device."""
        size = (self.n // self.ranks, self.dim)
        query, key = (
            torch.empty(1, heads, *size, dtype=self.dtype, device="meta") for heads in (self.heads, self.kv_heads)
        )
        group = SimpleNamespace(rank=rank, size=self.ranks)
        backend = pick_backend(Needs.of(torch.empty(1, 1, 1, self.dim)))
        return Shard(group, query, key, key, None, self.is_causal, 1.0, backend, Streams())  # type: ignore[arg-type]

    @property
    def key_bytes(self) -> int:
        """Bytes of a key, or of a value."""
        return self.dim * self.dtype.itemsize


def planned_bytes(layer: Layer, config: Config) -> list[float]:
    """Bytes that each rank sends to others."""
    notes = (layer.ranks - 1) * NOTE
    if isinstance(config, Exact):
        n_keys = layer.n / layer.ranks * layer.kv_heads
        return [notes + (layer.ranks - 1) * n_keys * 2 * layer.key_bytes] * layer.ranks
    if isinstance(config, Selected) and not why_not_selected(layer.shard(0), config):
        return [notes + selected_bytes(layer, config, rank) for rank in range(layer.ranks)]
    return [notes + layer.ranks - 1 + ulysses_bytes(layer, rank) for rank in range(layer.ranks)]


def ulysses_bytes(layer: Layer, rank: int) -> float:
    """Queries, keys and values of other heads, and outputs of other positions."""
    shares = share_heads(layer.heads, layer.kv_heads, layer.ranks)
    inputs = sum(s.n_query_heads + 2 * (s.end_key - s.first_key) for r, s in enumerate(shares) if r != rank)
    outputs = shares[rank].n_query_heads * (layer.ranks - 1)
    return (inputs + outputs) * layer.n / layer.ranks * layer.key_bytes


def selected_bytes(layer: Layer, config: Selected, rank: int) -> float:
    """Score statistics, candidates and selected keys of every block that the rank holds a part of."""
    places = Map(layer.shard(rank), config)
    clusters = cluster_scorer(config)
    scorers = [config.scoring, *([] if clusters in (None, config.scoring) else [clusters])]
    n_centroids = 0 if clusters is None else clusters.n_clusters or layer.dim + 1

    def n_others(ranks: list[int]) -> int:
        return len(set(ranks) - {rank})

    per_head = 0.0
    for block in places.blocks:
        holders, n_own = places.holders(block), places.columns(block, rank).length
        if rank not in holders:
            continue
        sent = block.n_kept * n_own / block.keys.length * 2 * layer.key_bytes + WIDE
        if not block.keeps_all:
            stats = sum(_stats_bytes(layer, places, block, scorer, rank) for scorer in scorers if scorer)
            per_head += (stats + min(block.n_free, n_own) * WIDE) * n_others(holders)
            sent += n_centroids * (2 * layer.dim + 1) * WIDE
        per_head += sent * n_others(places.needers(block))
    # local keys and values of leaves that lie on two ranks
    own = places.keys[rank]
    n_local = sum(own.within(local).length for other, local in enumerate(places.near) if other != rank)
    per_head += n_local * 2 * layer.key_bytes
    n_hashes = 0
    if isinstance(config.inner, Lsh) and config.inner.alignment == "rank":
        for block in places.blocks:
            needers = places.needers(block)
            if not block.is_exact and rank in needers:
                n_hashes += places.queries[rank].within(block.queries).length * n_others(needers)
        n_hashes *= layer.heads * (1 if config.inner.n_projections <= 8 else WIDE)
    return per_head * layer.kv_heads + n_hashes


def _stats_bytes(layer: Layer, places: Map, block: Block, scorer: Scorer, rank: int) -> int:
    """Score statistics of a block, to one rank."""
    span = places.columns(block, rank)
    kind = stats_kind_of(block_scorer(scorer, layer.dim) if layer.is_causal else scorer)
    if kind is None:
        raise TypeError(f"scorer must be one with score statistics, got {scorer!r}")
    held = Held(torch.empty(1, 1, 0, layer.dim), span, block.keys.length, Streams().child(block.name))
    return kind.size(held, span) * kind.wire(layer.dtype, torch.float32).itemsize


def main() -> None:
    """Print the table."""
    lines: list[tuple[str, str, Config]] = [
        ("`Exact()`", "all-gather (a ring sends as much)", Exact()),
        ("`Routed()`, `Hyper()`", "ulysses", Routed()),
        *(
            (f'`Selected("kmeans", top_k={top_k})`', "selected", Selected("kmeans", top_k=top_k))
            for top_k in (8192, 2048, 1024)
        ),
        ("`Selected.paper(top_k=2048)`", "selected", Selected.paper(top_k=2048)),
    ]
    for name, exchange, config in lines:
        full, causal = (
            planned_bytes(Layer(131072, 8, 32, 8, 128, torch.bfloat16, is_causal), config)
            for is_causal in (False, True)
        )
        mega = [round(number / 1e6) for number in (max(full), max(causal), sum(causal) / len(causal))]
        print(f"| {name} | {exchange} | {mega[0]} | {mega[1]} / {mega[2]} |")  # noqa: T201


if __name__ == "__main__":
    main()
