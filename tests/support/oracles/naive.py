"""Algorithm 2 in loops, one sequence and one head at a time: what the batched plan must reproduce.

Shares with the library Algorithm 1 (scorers and selection), the random streams and nothing else: hashing, sorting,
blocks, sampling, recursion, padding and centroids are written again, by definition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from oracles.dense import Weights
from torch import Tensor

from prescore.config import Exact, Hyper, Lsh, Selected
from prescore.rng import Streams, as_streams
from prescore.scoring.base import Scorer
from prescore.scoring.kmeans import KMeans
from prescore.scoring.select import membership, score_keys, select_keys
from prescore.types import Selection


def naive_weights(
    query: Tensor,
    key: Tensor,
    config: Selected | Hyper,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    generator: torch.Generator | int | None = None,
    selection: Selection | None = None,
) -> Weights:
    """What every query of a call sees.

    Rows of queries that are padding are not specified under `alignment="rank"`.
    """
    if isinstance(config, Hyper):  # every key is selected
        config = Selected(
            top_k=1.0,
            sinks=config.sinks,
            remainder="none",
            inner=config.lsh,
            min_seq_len=config.min_seq_len,
            leaf_inclusive=config.leaf_inclusive,
        )
    streams = as_streams(generator)
    batch, kv_heads, n_keys = key.shape[:3]
    queries = query.unflatten(1, (kv_heads, -1)).detach()
    valid = torch.ones(batch, n_keys, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    given = None if selection is None else membership(selection, n_keys)
    sights = []
    for row in range(batch):
        for head in range(kv_heads):
            chosen = None if given is None else given[row, head]
            sight = Sight(queries[row, head], key[row, head].detach(), valid[row], config, streams, chosen)
            sight.look(is_causal)
            sights.append(sight)
    most = max((len(sight.means) for sight in sights), default=0)
    keys, means, centroids = zip(*(sight.padded(most) for sight in sights), strict=True)
    shape = (batch, query.shape[1])
    return Weights(
        torch.stack(keys).view(*shape, *keys[0].shape[1:]).log(),
        torch.stack(means).view(*shape, most, n_keys),
        torch.stack(centroids).view(*shape, *centroids[0].shape[1:]).log(),
    )


@dataclass(eq=False)
class Column:
    """Something a query can attend to: column number of the table, and the vector that is hashed."""

    number: int
    vector: Tensor


class Sight:
    """Weights of one sequence and one KV head: `[group, Nq, columns]`, keys first, centroids after."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        valid: Tensor,
        config: Selected,
        streams: Streams,
        given: Tensor | None,
    ) -> None:
        self.query, self.valid, self.config, self.streams, self.given = query, valid, config, streams, given
        self.key = torch.where(valid[:, None], key, 0.0)  # padding may hold NaN
        self.table = torch.zeros(*query.shape[:2], key.shape[0], dtype=torch.float64)
        self.means: list[Tensor] = []
        real: list[int] = valid.nonzero()[:, 0].tolist()
        self.first, self.end = real[0] if real else 0, real[-1] + 1 if real else 0
        self.sinks = set(real[: config.sinks])
        self.zeroing = config.coupling.mask == "zero"
        self.self_attention = query.shape[1] == key.shape[0]

    def look(self, is_causal: bool) -> None:
        """Fill the table."""
        n_query, n_keys = self.query.shape[1], self.key.shape[0]
        if not is_causal:
            n_real = int(self.valid.sum()) if self.self_attention else n_query
            few = n_real < self.config.min_seq_len + int(self.config.leaf_inclusive)
            self.problem("full", range(self.first, self.end), list(range(n_query)), few)
            return
        position = {i: n_keys - n_query + i - self.first for i in range(n_query)}
        leaf = max(1, self.config.min_seq_len)
        for i, p in position.items():
            for k in range(p // leaf * leaf, p + 1) if p >= 0 else ():
                if self.valid[k + self.first]:
                    self.table[:, i, k + self.first] += 1
        level, width = 0, leaf
        while width <= n_keys:
            few = self.config.leaf_inclusive and width <= self.config.min_seq_len
            for odd in range(1, n_keys // width + 1, 2):
                asking = [i for i, p in position.items() if p >= 0 and p // width == odd]
                begin = (odd - 1) * width + self.first
                if asking:
                    self.problem(f"level{level}", range(begin, begin + width), asking, few)
            level, width = level + 1, width * 2

    def problem(self, name: str, candidates: range, asking: list[int], few: bool) -> None:
        """Queries `asking` over the keys `candidates`, of which a selection is made."""
        index = torch.tensor(list(candidates), dtype=torch.int64)
        real = self.valid[index]
        if not bool(real.any()):
            return
        streams, config = self.streams.child(name), self.config
        own = index[real].tolist()
        recent = set(own[len(own) - config.recent :])
        protect = torch.tensor([int(i) in self.sinks or int(i) in recent for i in index]) & real
        block = self.key[index][None, None]
        mask = None if bool(real.all()) else real[None]
        if self.given is None:
            chosen = select_keys(block, config, valid=mask, streams=streams, protect=protect[None])
            member, everything = membership(chosen.selection, len(index))[0, 0], chosen.everything
        else:
            member, everything = self.given[index] & real, False
        if config.remainder != "none" and not everything:
            self.stand_for(block, mask, index, real & ~member, asking, streams)
        apart = member & protect if not self.zeroing else torch.zeros_like(member)
        self.count(asking, index[apart].tolist(), 1.0)
        pool = [Column(int(i), self.key[i]) for i in index[member & ~apart]]
        if self.zeroing:
            zero = self.new_column(torch.zeros(self.key.shape[0], dtype=torch.float64))
            pool = [
                Column(int(i) if member[j] else zero, self.key[i] * member[j])
                for j, i in enumerate(index)
                if real[j]
            ]
        if few or isinstance(config.inner, Exact):
            self.count(asking, [column.number for column in pool], 1.0)
        elif pool:
            weight = len(own) if config.coupling.residual_weight == "all" else int((member & ~apart).sum())
            self.hyper(config.inner, asking, pool, weight, streams)

    def stand_for(
        self,
        block: Tensor,
        mask: Tensor | None,
        index: Tensor,
        left_out: Tensor,
        asking: list[int],
        streams: Streams,
    ) -> None:
        """One column per cluster: the average of its keys that were not selected, counted that often."""
        own = self.config.remainder if isinstance(self.config.remainder, Scorer) else self.config.scoring
        labels = score_keys(block, own, valid=mask, streams=streams).labels
        if labels is None:
            labels = score_keys(block, KMeans(), valid=mask, streams=streams).labels
        if labels is None:
            raise TypeError("kmeans must return labels, got None")
        for cluster in labels[0, 0][left_out].unique().tolist():
            behind = index[left_out & (labels[0, 0] == cluster)]
            mean = torch.zeros(self.key.shape[0], dtype=torch.float64)
            mean[behind] = 1 / len(behind)
            self.count(asking, [self.new_column(mean)], float(len(behind)))

    def hyper(self, lsh: Lsh, asking: list[int], pool: list[Column], size: int, streams: Streams) -> None:
        """Each query over its LSH block and over the samples outside it, by definition."""
        directions = self.streams.normal("lsh", self.key.shape[1], lsh.n_projections, like=self.key)
        bucket = [gray_position(column.vector @ directions >= 0) for column in pool]
        order = sorted(range(len(pool)), key=lambda j: bucket[j])  # stable
        block_size = lsh.block_size
        n_blocks = -(-len(pool) // block_size) if block_size else 1
        block_of = {j: place // block_size if block_size else -1 for place, j in enumerate(order)}
        uniform = streams.uniform("residual", lsh.sample_size, like=self.key).tolist()
        drawn = [min(int(u * len(pool)), len(pool) - 1) for u in uniform]
        for head in range(self.query.shape[0]):
            own_bucket = {i: gray_position(self.query[head, i] @ directions >= 0) for i in asking}
            for i, own in self.align(lsh, own_bucket, bucket, n_blocks).items():
                for j, block in block_of.items():
                    if block == own:
                        self.table[head, i, pool[j].number] += 1
                for j in drawn:
                    if block_of[j] != own or self.config.coupling.overlap == "count":
                        self.table[head, i, pool[j].number] += size / lsh.sample_size

    def align(self, lsh: Lsh, asking: dict[int, int], bucket: list[int], n_blocks: int) -> dict[int, int]:
        """Which block each query reads."""
        if lsh.alignment == "rank":
            real = [i for i in asking if not self.self_attention or self.valid[i]]
            order = sorted(real, key=lambda i: asking[i])
            return {i: place * n_blocks // len(order) for place, i in enumerate(order)}
        size = max(1, lsh.block_size)
        below = {i: sum(b < r for b in bucket) + sum(b <= r for b in bucket) for i, r in asking.items()}
        return {i: min(twice // (2 * size), n_blocks - 1) for i, twice in below.items()}

    def count(self, asking: list[int], columns: list[int], weight: float) -> None:
        """Let all these queries see all these columns."""
        number = torch.tensor(columns, dtype=torch.int64)
        weights = self.table.new_full((self.table.shape[0], len(columns)), weight)
        for i in asking:
            self.table[:, i].index_add_(1, number, weights)

    def new_column(self, mean: Tensor) -> int:
        """Add a centroid; returns its column number."""
        self.means.append(mean)
        self.table = torch.cat((self.table, self.table.new_zeros(*self.table.shape[:2], 1)), dim=2)
        return self.table.shape[2] - 1

    def padded(self, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Key weights, means and centroid weights, repeated per query head and filled up to `most`."""
        group, n_keys = self.table.shape[0], self.key.shape[0]
        rows = [*self.means, *(self.table.new_zeros(n_keys) for _ in range(most - len(self.means)))]
        means = torch.stack(rows) if rows else self.table.new_zeros(0, n_keys)
        logs = torch.nn.functional.pad(self.table[..., n_keys:], (0, most - len(self.means)))
        return self.table[..., :n_keys], means.expand(group, most, n_keys), logs


def gray_position(signs: Tensor) -> int:
    """Where a bit pattern stands in the reflected Gray sequence, found by walking it."""
    pattern = sum(1 << bit for bit, sign in enumerate(signs.tolist()) if sign)
    for place in range(1 << math.ceil(max(1, signs.numel()))):
        if place ^ (place >> 1) == pattern:
            return place
    raise AssertionError(f"pattern must occur in the Gray sequence, got {pattern}")
