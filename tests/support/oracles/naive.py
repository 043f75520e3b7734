"""Algorithm 2 in loops, one sequence and one head at a time: what the batched plan must reproduce.

Shares Algorithm 1 (scorers and selection) and the random streams with the library, and nothing else: hashing,
sorting, blocks, sampling, recursion, padding and centroids are written again, by definition.
"""

from typing import NamedTuple

import torch
from oracles.dense import Weights
from torch import Tensor

from prescore.config import Exact, Hyper, Selected
from prescore.rng import Streams, as_streams
from prescore.scoring.base import Scorer
from prescore.scoring.kmeans import KMeans
from prescore.scoring.select import membership, score_keys, select_keys


def naive_weights(query, key, config, *, is_causal=False, key_padding_mask=None, generator=None, selection=None):
    """What every query of a call reads. Padding queries are not specified under `alignment="rank"`."""
    if isinstance(config, Hyper):  # every key is selected
        shared = {name: getattr(config, name) for name in ("sinks", "min_seq_len", "leaf_inclusive")}
        config = Selected(top_k=1.0, remainder="none", inner=config.lsh, **shared)
    streams = as_streams(generator, batch=key.shape[0])
    batch, kv_heads, n_keys = key.shape[:3]
    queries = query.unflatten(1, (kv_heads, -1)).detach()
    valid = torch.ones(batch, n_keys, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    given = None if selection is None else membership(selection, n_keys)
    tables = []
    for row in range(batch):
        for head in range(kv_heads):
            members = None if given is None else given[row, head]
            draws = Streams(streams.rows[row] if streams.rows else streams.seed, first_head=head)
            one = HeadWeights(queries[row, head], key[row, head].detach(), valid[row], config, draws, members)
            one.fill(is_causal)
            tables.append(one)
    most = max((len(one.means) for one in tables), default=0)
    keys, means, centroids = zip(*(one.padded(most) for one in tables), strict=True)
    shape = (batch, query.shape[1])
    return Weights(
        torch.stack(keys).view(*shape, *keys[0].shape[1:]).log(),
        torch.stack(means).view(*shape, most, n_keys),
        torch.stack(centroids).view(*shape, *centroids[0].shape[1:]).log(),
    )


class Column(NamedTuple):
    """A key of an LSH block: its column number in the table, the vector that is hashed, and whether it is read."""

    number: int
    vector: Tensor
    read: bool = True


class HeadWeights:
    """Weights of one sequence and one KV head: `[heads_per_kv, Nq, columns]`, keys first, centroids after."""

    def __init__(self, query, key, valid, config, streams, given):
        self.query, self.valid, self.config, self.streams, self.given = query, valid, config, streams, given
        self.key = torch.where(valid[:, None], key, 0.0)  # padding may hold NaN
        self.table = torch.zeros(*query.shape[:2], key.shape[0], dtype=torch.float64)
        self.means = []
        real = valid.nonzero()[:, 0].tolist()
        self.first, self.end = real[0] if real else 0, real[-1] + 1 if real else 0
        self.sinks = set(real[: config.sinks])
        self.self_attention = query.shape[1] == key.shape[0]

    def fill(self, is_causal):
        """Fill the table: all keys as one block pair, or leaves and the off-diagonal blocks of every level."""
        n_query, n_keys = self.query.shape[1], self.key.shape[0]
        if not is_causal:
            n_real = int(self.valid.sum()) if self.self_attention else n_query
            few = n_real < self.config.min_seq_len + int(self.config.leaf_inclusive)
            self.block_pair("full", range(self.first, self.end), list(range(n_query)), few)
            return
        position = {i: n_keys - n_query + i - self.first for i in range(n_query)}
        position = {i: p for i, p in position.items() if p < self.end - self.first}  # later ones see nothing
        leaf = max(1, self.config.min_seq_len)
        for i, p in position.items():
            for k in range(p // leaf * leaf, p + 1) if p >= 0 else ():
                if self.valid[k + self.first]:
                    self.table[:, i, k + self.first] += 1
        level, width = 0, leaf
        while width <= n_keys:
            few = self.config.leaf_inclusive and width <= self.config.min_seq_len
            for odd in range(1, n_keys // width + 1, 2):
                queries = [i for i, p in position.items() if p >= 0 and p // width == odd]
                begin = (odd - 1) * width + self.first
                if queries:
                    self.block_pair(f"level {level}, block {odd}", range(begin, begin + width), queries, few)
            level, width = level + 1, width * 2

    def block_pair(self, name, candidates, queries, few):
        """Some queries over some keys, of which a selection is made."""
        index = torch.tensor(list(candidates), dtype=torch.int64)
        real = self.valid[index]
        if not bool(real.any()):
            return
        streams, config, coupling = self.streams.child(name), self.config, self.config.coupling
        real_keys = index[real].tolist()
        recent = set(real_keys[max(0, len(real_keys) - config.recent) :])
        protect = torch.tensor([int(i) in self.sinks or int(i) in recent for i in index]) & real
        keys = self.key[index][None, None]
        mask = None if bool(real.all()) else real[None]
        if few and self.config.leaf_inclusive:
            member, everything = real, True
        elif self.given is None:
            chosen = select_keys(keys, config, valid=mask, streams=streams, protect=protect[None])
            member, everything = membership(chosen.selection, len(index))[0, 0], chosen.everything
        else:
            member, everything = self.given[index] & real, False
        if config.remainder != "none" and not everything:
            self.add_centroids(keys, mask, index, real & ~member, queries, streams)
        apart = member & protect if coupling.mask == "exclude" else torch.zeros_like(member)
        self.count(queries, index[apart].tolist(), 1.0)
        n_selected = int((member & ~apart).sum())
        if coupling.mask == "zero":
            zero = self.new_column(torch.zeros(self.key.shape[0], dtype=torch.float64))
            numbers = [int(i) if member[j] else zero for j, i in enumerate(index)]
            pool = [Column(numbers[j], self.key[i] * member[j]) for j, i in enumerate(index) if real[j]]
        else:
            in_blocks = real if coupling.blocks == "all" else member
            places = (in_blocks & ~apart).nonzero()[:, 0].tolist()
            pool = [Column(int(index[j]), self.key[index[j]], bool(member[j])) for j in places]
        if few or isinstance(config.inner, Exact):
            self.count(queries, [column.number for column in pool if column.read], 1.0)
        elif any(column.read for column in pool):
            weight = len(real_keys) if coupling.residual_weight == "all" else n_selected
            self.hyper(config.inner, queries, pool, weight, streams)

    def add_centroids(self, keys, mask, index, unselected, queries, streams):
        """One column per cluster: the average of its keys that were not selected, counted that often."""
        scorer = self.config.remainder if isinstance(self.config.remainder, Scorer) else self.config.scoring
        labels = score_keys(keys, scorer, valid=mask, streams=streams).labels
        if labels is None:
            labels = score_keys(keys, KMeans(), valid=mask, streams=streams).labels
        for cluster in labels[0, 0][unselected].unique().tolist():
            members = index[unselected & (labels[0, 0] == cluster)]
            mean = torch.zeros(self.key.shape[0], dtype=torch.float64)
            mean[members] = 1 / len(members)
            self.count(queries, [self.new_column(mean)], float(len(members)))

    def hyper(self, lsh, queries, pool, size, streams):
        """Each query over its LSH block and over the samples outside it, by definition."""
        directions = self.streams.row_normal("lsh", self.key.shape[1], lsh.n_projections, like=self.key)[0]
        bucket = [gray_position(column.vector @ directions >= 0) for column in pool]
        order = sorted(range(len(pool)), key=lambda j: bucket[j])  # stable
        block_size = lsh.block_size
        n_blocks = -(-len(pool) // block_size) if block_size else 1
        block_of = {j: place // block_size if block_size else -1 for place, j in enumerate(order)}
        uniform = streams.head_uniform("residual", lsh.sample_size, like=self.key[None, None])[0, 0].tolist()
        readable = [j for j, column in enumerate(pool) if column.read]
        samples = [readable[min(int(u * len(readable)), len(readable) - 1)] for u in uniform]
        for head in range(self.query.shape[0]):
            query_bucket = {i: gray_position(self.query[head, i] @ directions >= 0) for i in queries}
            for i, block in self.align(lsh, query_bucket, bucket, n_blocks).items():
                for j in readable:
                    if block_of[j] == block:
                        self.table[head, i, pool[j].number] += 1
                for j in samples:
                    if block_of[j] != block or self.config.coupling.overlap == "count":
                        self.table[head, i, pool[j].number] += size / lsh.sample_size

    def align(self, lsh, queries, bucket, n_blocks):
        """Which block each query reads; `queries` maps a query to its bucket."""
        if lsh.alignment == "rank":
            real = [i for i in queries if not self.self_attention or self.valid[i]]
            order = sorted(real, key=lambda i: queries[i])
            return {i: place * n_blocks // len(order) for place, i in enumerate(order)}
        size = max(1, lsh.block_size)
        twice = {i: sum(b < r for b in bucket) + sum(b <= r for b in bucket) for i, r in queries.items()}
        return {i: min(place // (2 * size), n_blocks - 1) for i, place in twice.items()}

    def count(self, queries, columns, weight):
        """Let all these queries read all these columns."""
        number = torch.tensor(columns, dtype=torch.int64)
        weights = self.table.new_full((self.table.shape[0], len(columns)), weight)
        for i in queries:
            self.table[:, i].index_add_(1, number, weights)

    def new_column(self, mean):
        """Add a centroid; returns its column number."""
        self.means.append(mean)
        self.table = torch.cat((self.table, self.table.new_zeros(*self.table.shape[:2], 1)), dim=2)
        return self.table.shape[2] - 1

    def padded(self, most):
        """Key weights, means and centroid weights, repeated per query head and filled up to `most`."""
        heads_per_kv, n_keys = self.table.shape[0], self.key.shape[0]
        rows = [*self.means, *(self.table.new_zeros(n_keys) for _ in range(most - len(self.means)))]
        means = torch.stack(rows) if rows else self.table.new_zeros(0, n_keys)
        logs = torch.nn.functional.pad(self.table[..., n_keys:], (0, most - len(self.means)))
        return self.table[..., :n_keys], means.expand(heads_per_kv, most, n_keys), logs


def gray_position(signs):
    """Where a bit pattern stands in the reflected Gray sequence, found by walking it."""
    pattern = sum(1 << bit for bit, sign in enumerate(signs.tolist()) if sign)
    for place in range(1 << max(1, signs.numel())):
        if place ^ (place >> 1) == pattern:
            return place
    raise AssertionError(f"pattern must occur in the Gray sequence, got {pattern}")
