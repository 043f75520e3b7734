"""Routed attention from its definition, in loops over sequences, heads and queries, with dense masks in float64.

The oracle of `prescore.routed`, which shares the configuration with it and nothing else. `routed_weights` writes
down which keys and which stand-ins every query counts, and how often; one dense softmax does the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.config import Routed
from prescore.testing.dense import Weights, dense_attention
from prescore.testing.routed_pieces import Behind, Cluster, Pieces
from prescore.testing.routed_sequence import Sequence
from prescore.types import Attended


def routed_oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Routed,
    *,
    is_causal: bool,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
) -> Attended:
    """What `prescored_attention` must give with this configuration, in float64 and differentiable by autograd.

    Causal queries that are padding themselves are not specified behind the last real key.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if key_padding_mask is not None:  # padding may hold anything, and 0 * NaN is NaN
        key, value = (t.masked_fill(~key_padding_mask[:, None, :, None], 0.0) for t in (key, value))
    weights = routed_weights(
        query, key, value, config, is_causal=is_causal, key_padding_mask=key_padding_mask, scale=scale
    )
    return dense_attention(query, key, value, weights, scale=scale)


def routed_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Routed,
    *,
    is_causal: bool,
    key_padding_mask: Tensor | None,
    scale: float,
) -> Weights:
    """Which keys and stand-ins each query counts; padded keys and values are finite."""
    if config.tolerance is not None:
        raise ValueError(f"tolerance must be None for the oracle, which bounds nothing, got {config.tolerance}")
    query, key, value = (t.detach().to(torch.float64) for t in (query, key, value))
    batch, n_kv_heads, n_keys = key.shape[:3]
    tables = []
    for row in range(batch):
        real = torch.ones(n_keys, dtype=torch.bool) if key_padding_mask is None else key_padding_mask[row]
        queries = query[row].unflatten(0, (n_kv_heads, -1))
        sequence = Sequence(queries, key[row], value[row], real, is_causal, config, scale)
        tables += [HeadTable(sequence, head).fill() for head in range(n_kv_heads)]
    return _stacked(tables, query, n_keys)


class HeadTable:
    """How often the queries of one key head count each key and each cluster's stand-in.

    Attributes:
        keys: `[G, Nq, Nk]`.
        clusters: All that were seen.
        stand_ins: For a query head and a query, numbers of clusters and how often each counts.
    """

    def __init__(self, sequence: Sequence, head: int) -> None:
        self.sequence, self.sizes = sequence, sequence.sizes_of(head)
        self.query, self.key = sequence.query[head], sequence.key[head]
        self.keys = torch.zeros(*self.query.shape[:2], sequence.n_keys, dtype=torch.float64)
        self.clusters: list[Cluster] = []
        self.stand_ins: dict[tuple[int, int], tuple[list[int], list[float]]] = {}

    def fill(self) -> HeadTable:
        """Let every query look."""
        sequence = self.sequence
        if sequence.reads_all():
            for i in range(sequence.n_query):
                seen = sequence.start + i + 1 if sequence.is_causal else len(sequence.real)
                self._read(slice(None), i, range(seen))
        elif sequence.is_causal:
            self._look_back()
        else:
            self._look_everywhere()
        return self

    def _look_everywhere(self) -> None:
        """No causal mask: nothing is local, every query sees all pieces."""
        sequence, sizes = self.sequence, self.sizes
        n_pieces = -(-max(0, len(sequence.real) - sizes.sinks) // sizes.chunk)
        behind = Pieces(self.key, sequence.real, sizes, n_pieces).everything()
        for i in range(sequence.n_query):
            self._read(slice(None), i, range(sizes.sinks))
            self._route(i, behind)

    def _look_back(self) -> None:
        """Each query reads the sinks, its chunk up to itself and the one before; the others are pieces."""
        sequence, sizes = self.sequence, self.sizes
        positions = {i: sequence.start + i for i in range(sequence.n_query)}
        positions = {i: position for i, position in positions.items() if 0 <= position < sequence.n_real}
        n_pieces = {i: self._pieces_before(position) for i, position in positions.items()}
        pieces = Pieces(self.key, sequence.real, sizes, max(n_pieces.values(), default=0))
        behind = {n_seen: pieces.behind(n_seen) for n_seen in set(n_pieces.values())}
        for i, position in positions.items():
            local = sizes.sinks + n_pieces[i] * sizes.chunk if n_pieces[i] else 0
            self._read(slice(None), i, range(local, position + 1))
            if n_pieces[i]:
                self._read(slice(None), i, range(sizes.sinks))
                self._route(i, behind[n_pieces[i]])

    def _pieces_before(self, position: int) -> int:
        if position < self.sequence.config.exact_until:
            return 0
        return max(0, (position - self.sizes.sinks) // self.sizes.chunk - 1)

    def _read(self, group: slice | int, i: int, places: range | list[int]) -> None:
        """Count some keys once more, where they are real."""
        real, shift = self.sequence.is_real, self.sequence.shift
        there = [shift + place for place in places if place < len(real) and real[place]]
        self.keys[group, i, torch.tensor(there, dtype=torch.int64)] += 1

    def _route(self, i: int, behind: Behind) -> None:
        """Single keys; the leaves below the best stand-ins; the stand-ins, less what is read of them."""
        self._read(slice(None), i, behind.singles)
        if not behind.clusters:
            return
        numbers = self._numbers(behind.clusters)
        means = torch.stack([cluster.mean for cluster in behind.clusters])
        counts = torch.tensor([len(cluster.keys) for cluster in behind.clusters], dtype=torch.float64)
        for group, query in enumerate(self.query[:, i]):
            scores = self.sequence.scale * means @ query + counts.log()
            left: list[float] = counts.tolist()
            read: list[int] = []
            for place in scores.topk(min(self.sizes.n_chosen, len(scores))).indices.tolist():
                leaf = _best_leaf(behind.clusters[place], query)
                read += leaf.keys
                left[place] -= len(leaf.keys)
            self._read(group, i, read)
            self.stand_ins[group, i] = (numbers, left)

    def _numbers(self, clusters: list[Cluster]) -> list[int]:
        known = {id(cluster): number for number, cluster in enumerate(self.clusters)}
        for cluster in clusters:
            if id(cluster) not in known:
                known[id(cluster)] = len(self.clusters)
                self.clusters.append(cluster)
        return [known[id(cluster)] for cluster in clusters]


def _best_leaf(cluster: Cluster, query: Tensor) -> Cluster:
    """Down to the child of best mean, which stands for as many keys as the others, until there is none."""
    while cluster.children:
        scores = [float(child.mean @ query) for child in cluster.children]
        cluster = cluster.children[scores.index(max(scores))]
    return cluster


def _stacked(tables: list[HeadTable], query: Tensor, n_keys: int) -> Weights:
    """The tables of all sequences and key heads as one, clusters filled up to the largest number."""
    batch, n_heads, n_query = query.shape[:3]
    most = max((len(table.clusters) for table in tables), default=0)
    group = n_heads * batch // max(1, len(tables))
    keys = torch.zeros(len(tables), group, n_query, n_keys, dtype=torch.float64)
    means = torch.zeros(len(tables), group, most, n_keys, dtype=torch.float64)
    stand_ins = torch.zeros(len(tables), group, n_query, most, dtype=torch.float64)
    for number, table in enumerate(tables):
        keys[number] = table.keys
        for place, cluster in enumerate(table.clusters):
            own = [table.sequence.shift + key for key in cluster.keys]
            means[number, :, place, own] = 1 / len(own)
        for (head, i), (places, counts) in table.stand_ins.items():
            stand_ins[number, head, i, places] = torch.tensor(counts, dtype=torch.float64)
    shapes = ((batch, n_heads, n_query, n_keys), (batch, n_heads, most, n_keys), (batch, n_heads, n_query, most))
    keys, means, stand_ins = (t.view(shape) for t, shape in zip((keys, means, stand_ins), shapes, strict=True))
    return Weights(keys.log(), means, stand_ins.log())
