"""The `selected` exchange: only the keys that a `Selected` selects are sent.

Which keys matter is known before any query is seen. The ranks that hold keys of a block exchange the statistics
that its scorer needs, score their own keys, and compare their best scores. Then the selected keys go to the
ranks whose queries read the block, and each rank attends from its own queries, as one process would.

A block is all keys without causality, or an off-diagonal block of the causal grid
(`prescore.selected.causal_grid`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.config import Lsh, Selected
from prescore.ops.operators import accumulation_dtype
from prescore.ops.parts import Part, attend_parts
from prescore.parallel.comm import Shapes, Shard, Tensors, done_by_all, tied
from prescore.scoring.base import KeyShard, Scored, Scorer, checked_scores
from prescore.scoring.hashing import hash_ranks, projections
from prescore.scoring.kmeans import ClusteringScorer, centroid_clusters
from prescore.scoring.sampling import arange
from prescore.scoring.select import bring_forward, budget_count
from prescore.selected.attention import reads_per_query, why_exact
from prescore.selected.blocks import BlockPairs, PlacedQueries, exact_part, hyper_part
from prescore.selected.causal_grid import FULL, Queries, leaf_parts, levels
from prescore.selected.centroids import Tables, add_centroids, cluster_totals
from prescore.selected.plan import kept_rows
from prescore.types import Attended, Result, Values

MAX_BLOCKS = 1024
"""Blocks of the causal grid that are worked off one by one."""


def why_not_selected(shard: Shard, config: Selected) -> str:
    """Why a call runs by Ulysses instead; empty = it need not."""
    if shard.mask is not None:
        return "positions of padded sequences begin at different places"
    if config.coupling.mask == "zero":
        return 'coupling.mask="zero" keeps every key'
    if config.coupling.blocks == "all":
        return 'coupling.blocks="all" cuts blocks over every key'
    if shard.streams.rows and isinstance(config.inner, Lsh):
        return "each sequence has a seed of its own, and hashes by it"
    if config.selector != "top":
        return f"the selector {config.selector!r} compares all scores"
    if config.min_score is not None:
        return "min_score keeps another number of keys in every head"
    leaf = max(1, config.min_seq_len)
    n_blocks = -(-shard.n_keys // leaf) if shard.is_causal and shard.n_query else 1
    if n_blocks > MAX_BLOCKS:
        return f"the causal grid has {n_blocks} blocks, more than {MAX_BLOCKS}"
    if 0 in (shard.query.numel(), shard.key.numel()):
        return "there is nothing to select from"
    for scorer in (config.scoring, cluster_scorer(config, shard)):
        if scorer is not None and empty_stats(scorer, shard) is None:
            rule = getattr(scorer, "rule", None)
            return f"the scorer {scorer.name!r}{f' by {rule!r}' if rule else ''} compares all keys"
    return ""


def attend_selected_shards(shard: Shard, config: Selected, *, explain: bool = False) -> Result:
    """This rank's shard of the result."""
    begin = time.perf_counter()
    layout = RankLayout(shard, config)
    members, clusters = _select(shard, config, layout)
    received = _exchange(shard, layout, members, clusters, cluster_scorer(config, shard))
    reader = _Reader(shard, config, layout, received)
    parts = reader.parts()
    attended = attend_parts(
        shard.query, *reader.tables.joined(), parts, scale=shard.scale, operator=shard.operator
    )
    attended = Attended(tied(attended.output, received.anchor), attended.lse)
    n_queries = shard.query.shape[:3].numel()
    reason = why_exact(config, shard.n_query, shard.n_keys, is_causal=shard.is_causal)
    if not explain:
        return Result(*attended, lambda: reads_per_query(parts, n_queries), why_exact=reason)
    reads, blocks = reads_per_query(parts, n_queries), layout.blocks
    stats: Values = {
        "keys_selected": sum(block.n_selected for block in blocks) / max(1, len(blocks)),
        "keys_per_query": reads.keys,
        "centroids_per_query": reads.centroids,
        "depth": len({len(block.keys) for block in blocks}) if shard.is_causal else 0,
        "fallbacks": sum(block.is_fallback for block in blocks) * shard.key.shape[0],
        "seconds": {"attending": time.perf_counter() - begin},
        "backend": shard.operator.name,
    }
    return Result(*attended, lambda: reads, stats, why_exact=reason)


# The layout: which ranks hold the keys of a block, and which ranks have queries that read it.


def overlap(first: range, second: range) -> range:
    """The positions that two ranges share."""
    begin = max(first.start, second.start)
    return range(begin, max(begin, min(first.stop, second.stop)))


def shifted(positions: range, by: int) -> range:
    """The same positions, moved."""
    return range(positions.start + by, positions.stop + by)


@dataclass(frozen=True, eq=False)
class KeyBlock:
    """Keys that are scored and selected together, and the queries that read them.

    Attributes:
        name: Of its random streams.
        keys: Positions of its keys.
        queries: Positions of its queries.
        is_exact: Whether it has so few queries that they read its selection exactly.
        n_selected: Keys to keep, of every sequence and head.
        sinks: Columns of protected keys at its beginning, which are selected and read exactly.
        recent: Columns of protected keys towards its end, likewise.
        is_fallback: Whether the budget is so small that all keys are kept.
    """

    name: str
    keys: range
    queries: range
    is_exact: bool
    n_selected: int
    sinks: range
    recent: range
    is_fallback: bool

    @classmethod
    def of(cls, name: str, keys: range, queries: range, config: Selected, *, is_exact: bool) -> KeyBlock:
        """A block with the budget of a configuration; protected keys beyond the budget are cut off at the end."""
        n_selected = budget_count(config.budget, len(keys))
        keep_all = is_exact and config.leaf_inclusive
        is_fallback = n_selected < config.min_fraction * len(keys) and not keep_all
        n_selected = len(keys) if is_fallback or keep_all else n_selected
        n_sinks = min(len(overlap(range(config.sinks), keys)), n_selected)
        begin = max(n_sinks, len(keys) - config.recent)
        recent = range(begin, min(len(keys), begin + n_selected - n_sinks))
        return cls(name, keys, queries, is_exact, n_selected, range(n_sinks), recent, is_fallback)

    @property
    def n_free(self) -> int:
        """Keys to keep that are not protected."""
        return self.n_selected - len(self.sinks) - len(self.recent)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing need be scored."""
        return self.n_selected == len(self.keys)


class RankLayout:
    """Positions of each rank's keys and queries, and all blocks, in an order that every rank shares.

    It follows from lengths alone, so every rank knows it of all ranks. In causal mode `local` has the positions
    that each rank reads exactly, beginning with a leaf; else it is empty.
    """

    def __init__(self, shard: Shard, config: Selected) -> None:
        ranks, self.leaf = range(shard.group.size), max(1, config.min_seq_len)
        self.keys = [shard.keys_of(rank) for rank in ranks]
        self.queries = [shard.queries_of(rank) for rank in ranks]
        if shard.is_causal:
            self.blocks = _causal_blocks(range(self.queries[0].start, shard.n_keys), config, self.leaf)
            self.local = [range(queries.start // self.leaf * self.leaf, queries.stop) for queries in self.queries]
        else:
            n_query, limit = shard.n_query, config.min_seq_len
            is_exact = n_query <= limit if config.leaf_inclusive else n_query < limit
            self.blocks = [KeyBlock.of(FULL, range(shard.n_keys), range(n_query), config, is_exact=is_exact)]
            self.local = [range(0) for _ in ranks]

    def holders(self, block: KeyBlock) -> list[int]:
        """Ranks with keys of a block, in the order of their positions."""
        return [rank for rank, keys in enumerate(self.keys) if overlap(keys, block.keys)]

    def readers(self, block: KeyBlock) -> list[int]:
        """Ranks with queries that read a block."""
        return [rank for rank, queries in enumerate(self.queries) if overlap(queries, block.queries)]

    def columns(self, block: KeyBlock, rank: int) -> range:
        """The keys of a rank in a block, counted from the block's first."""
        return shifted(overlap(self.keys[rank], block.keys), -block.keys.start)

    def rows(self, block: KeyBlock, rank: int) -> slice:
        """Where the keys of a rank in a block lie in its tables."""
        inside = shifted(overlap(self.keys[rank], block.keys), -self.keys[rank].start)
        return slice(inside.start, inside.stop)

    def sent_blocks(self, holder: int, reader: int) -> list[KeyBlock]:
        """The blocks of which one rank holds keys and another has queries, in the shared order."""
        return [b for b in self.blocks if holder in self.holders(b) and reader in self.readers(b)]


def _causal_blocks(queries: range, config: Selected, leaf: int) -> list[KeyBlock]:
    """The off-diagonal blocks of the causal grid."""
    blocks = []
    for level in levels(leaf, Queries(1, 1, 1, len(queries), queries.start, torch.device("cpu"))):
        is_exact = config.leaf_inclusive and level.width <= config.min_seq_len
        for name, begin in zip(level.names, level.key_positions[:, 0].tolist(), strict=True):
            keys = range(begin, begin + level.width)
            readers = overlap(shifted(keys, level.width), queries)
            blocks.append(KeyBlock.of(name, keys, readers, config, is_exact=is_exact))
    return blocks


# Algorithm 1: the holders of a block score their own keys and compare their best.


def cluster_scorer(config: Selected, shard: Shard) -> ClusteringScorer | None:
    """The scorer whose clusters have centroids; None = there are no centroids."""
    if isinstance(config.remainder, ClusteringScorer):
        return config.remainder
    if config.remainder == "none":
        return None
    if isinstance(config.scoring, ClusteringScorer):
        return config.scoring
    return centroid_clusters(shard.key.shape[-1], is_causal=shard.is_causal)


def empty_stats(
    scorer: Scorer, shard: Shard, block: KeyBlock | None = None, columns: range = range(1)
) -> Tensor | None:
    """Statistics of an empty batch: the dtype and size of those of a rank with these columns of a block.

    None = the scorer has no statistics, whatever the block.
    """
    dtype, wide = shard.key.dtype, torch.promote_types(shard.key.dtype, torch.float32)
    keys = torch.empty(0, shard.key.shape[1], len(columns), shard.key.shape[3], dtype=wide, device="cpu")
    n_keys, streams = (1, shard.streams) if block is None else (len(block.keys), shard.streams.child(block.name))
    return scorer.stats(KeyShard(keys, columns.start, n_keys, dtype, streams))


@torch.no_grad()
def _select(
    shard: Shard, config: Selected, layout: RankLayout
) -> tuple[dict[KeyBlock, Tensor], dict[KeyBlock, Scored]]:
    """By block of which this rank holds keys: which of them are selected `[B, H, w]`, and clusters if needed."""
    held = [block for block in layout.blocks if shard.group.rank in layout.holders(block)]
    scores = _score(shard, layout, held, config.scoring)
    scorer = cluster_scorer(config, shard)
    clusters = {}
    if scorer is not None:
        clusters = scores if scorer is config.scoring else _score(shard, layout, held, scorer)
    members = _best(shard, layout, scores)
    for block in held:
        if block.keeps_all:
            n_own = len(layout.columns(block, shard.group.rank))
            members[block] = shard.key.new_ones(*shard.key.shape[:2], n_own, dtype=torch.bool)
    return members, clusters


def _score(shard: Shard, layout: RankLayout, held: list[KeyBlock], scorer: Scorer) -> dict[KeyBlock, Scored]:
    """Scores of this rank's keys, after the holders of each block exchanged their statistics."""
    group, dtype = shard.group, shard.key.dtype
    keys = shard.key.detach().to(torch.promote_types(dtype, torch.float32))
    shards = {}
    for block in (block for block in held if not block.keeps_all):
        begin, streams = layout.columns(block, group.rank).start, shard.streams.child(block.name)
        part = keys[:, :, layout.rows(block, group.rank)]
        shards[block] = KeyShard(part, begin, len(block.keys), dtype, streams)

    def local_stats() -> dict[KeyBlock, Tensor]:
        return {block: _required(scorer, scorer.stats(part)) for block, part in shards.items()}

    def shape(block: KeyBlock, rank: int) -> tuple[int, ...]:
        empty = empty_stats(scorer, shard, block, layout.columns(block, rank))
        return *keys.shape[:2], _required(scorer, empty).shape[2]

    like = _required(scorer, empty_stats(scorer, shard)).to(keys.device)
    stats = _among(shard, layout.holders, done_by_all(group, local_stats), shape, like)

    def local_scores() -> dict[KeyBlock, Scored]:
        scores = {}
        for block, part in shards.items():
            scores[block] = checked_scores(scorer.score_from(stats[block], part), scorer, part.keys, None)
            if scores[block].labels is not None and not isinstance(scorer, ClusteringScorer):
                raise TypeError(f"scorer must be a ClusteringScorer to return labels of shards, got {scorer!r}")
        return scores

    return done_by_all(group, local_scores)


def _required(scorer: Scorer, stats: Tensor | None) -> Tensor:
    if stats is None:
        raise TypeError(f"stats of {type(scorer).__name__} must be the same kind for every shard, got None")
    return stats


def _among(
    shard: Shard,
    members: Callable[[KeyBlock], list[int]],
    sent: Mapping[KeyBlock, Tensor],
    shape: Callable[[KeyBlock, int], tuple[int, ...]],
    like: Tensor,
) -> dict[KeyBlock, list[Tensor]]:
    """The tensors of all members of each block, in the order of ranks; `sent` has this rank's, in shared order."""
    group = shard.group
    shared = [[b for b in sent if rank in members(b) and rank != group.rank] for rank in range(group.size)]
    received = group.all_to_all(
        [[sent[block] for block in blocks] for blocks in shared],
        [[shape(block, rank) for block in blocks] for rank, blocks in enumerate(shared)],
        like=like,
    )
    by_rank: list[Mapping[KeyBlock, Tensor]] = [
        dict(zip(blocks, tensors, strict=True)) for blocks, tensors in zip(shared, received, strict=True)
    ]
    by_rank[group.rank] = sent
    return {block: [by_rank[rank][block] for rank in members(block)] for block in sent}


def _best(shard: Shard, layout: RankLayout, scored: Mapping[KeyBlock, Scored]) -> dict[KeyBlock, Tensor]:
    """Which of this rank's keys are among the best of each block; equal scores go to the lower position."""
    rank, protected = shard.group.rank, {}
    for block in scored:
        columns = layout.columns(block, rank)
        column = arange(columns.start, columns.stop, like=shard.key)
        is_sink = (column >= block.sinks.start) & (column < block.sinks.stop)
        protected[block] = is_sink | ((column >= block.recent.start) & (column < block.recent.stop))
    free = {b: block_scores.scores.masked_fill(protected[b], -torch.inf) for b, block_scores in scored.items()}
    best = {b: scores.topk(min(b.n_free, scores.shape[2]), dim=2).values for b, scores in free.items()}

    def shape(block: KeyBlock, other: int) -> tuple[int, ...]:
        return *shard.key.shape[:2], min(block.n_free, len(layout.columns(block, other)))

    like = shard.key.new_empty(0, dtype=torch.promote_types(shard.key.dtype, torch.float32))
    candidates = _among(shard, layout.holders, best, shape, like)
    members = {}
    for block, scores in free.items():
        members[block] = protected[block].expand_as(scores)
        if block.n_free:
            everyone = torch.cat(candidates[block], dim=2)
            boundary = everyone.topk(block.n_free, dim=2).values[..., -1:]
            room = block.n_free - (everyone > boundary).sum(dim=2, keepdim=True)
            for part in candidates[block][: layout.holders(block).index(rank)]:  # lower positions come first
                room = room - (part == boundary).sum(dim=2, keepdim=True)
            level = scores == boundary
            chosen = (scores > boundary) | (level & (level.cumsum(dim=2) <= room))
            members[block] = members[block] | chosen
    return members


# The exchange of keys and values. One step of the graph for all blocks: its backward pass is one exchange too,
# and in the same order on every rank.


class Received(NamedTuple):
    """What a rank has of the others, and of itself.

    Attributes:
        key, value: `[rows, D]` tables.
        local: `[B, H, n]` rows of the tables at this rank's local positions.
        rows: By block that this rank's queries read: `[B, H, n_selected]` rows, ascending in position.
        totals: By block with centroids: what `_cluster_sums` gives, over all holders.
        anchor: For `prescore.parallel.comm.tied`.
    """

    key: Tensor
    value: Tensor
    local: Tensor
    rows: dict[KeyBlock, Tensor]
    totals: dict[KeyBlock, Tensor]
    anchor: Tensor


def _exchange(
    shard: Shard,
    layout: RankLayout,
    members: Mapping[KeyBlock, Tensor],
    clusters: Mapping[KeyBlock, Scored],
    scorer: ClusteringScorer | None,
) -> Received:
    """Local keys, selected keys and values, and sums for centroids go to the ranks that read them."""
    group, rank, ranks = shard.group, shard.group.rank, range(shard.group.size)
    (batch, heads), device = shard.key.shape[:2], shard.key.device
    going = [layout.sent_blocks(rank, reader) for reader in ranks]
    coming = [layout.sent_blocks(holder, rank) for holder in ranks]
    counts = group.all_to_all(
        [[members[block].sum(-1, dtype=torch.int32) for block in blocks] for blocks in going],
        [[(batch, heads)] * len(blocks) for blocks in coming],
        like=torch.empty(0, dtype=torch.int32, device=device),
    )
    # by holder: rows of each head at local positions, then of each block
    n_local = [len(overlap(layout.keys[holder], layout.local[rank])) for holder in ranks]
    per_head = [
        [shard.key.new_full((batch, heads), n, dtype=torch.int32), *counts[r]] for r, n in enumerate(n_local)
    ]
    n_rows = [sum(int(count.sum()) for count in counts_of_holder) for counts_of_holder in per_head]
    rows = [_outgoing_rows(shard, layout, members, reader, going[reader]) for reader in ranks]
    like = [shard.key, shard.value]
    messages: list[tuple[Tensors, Shapes]] = []
    for table in like:
        flat = table.reshape(-1, table.shape[-1])
        messages.append(
            ([[flat.index_select(0, picked)] for picked in rows], [[(n, table.shape[-1])] for n in n_rows])
        )
    scored = [[block for block in blocks if not block.keeps_all] for blocks in coming]
    if scorer is not None:
        sums = {b: _cluster_sums(shard, layout, b, members[b], scored_keys) for b, scored_keys in clusters.items()}
        outgoing = [[sums[block] for block in blocks if block in sums] for blocks in going]
        width = shard.key.shape[-1] + shard.value.shape[-1] + 1
        shape = (batch * heads, scorer.n_clusters or shard.key.shape[-1] + 1, width)
        messages.append((outgoing, [[shape] * len(blocks) for blocks in scored]))
        like.append(torch.empty(0, dtype=accumulation_dtype(shard.key.dtype), device=device))
    received, anchor = group.all_to_all_with_grad(*messages, like=like)
    key, value = (torch.cat([table for (table,) in tables_of_holders]) for tables_of_holders in received[:2])
    totals: dict[KeyBlock, Tensor] = {}
    for blocks, parts in zip(scored, received[2], strict=True) if scorer is not None else ():
        for block, part in zip(blocks, parts, strict=True):  # in the order of ranks, so that all get the same bits
            totals[block] = totals[block] + part if block in totals else part
    return Received(key, value, *_numbered(coming, per_head), totals, anchor)


def _outgoing_rows(
    shard: Shard, layout: RankLayout, members: Mapping[KeyBlock, Tensor], reader: int, blocks: list[KeyBlock]
) -> Tensor:
    """Flat rows of this rank's tables that go to a rank: local ones, then the selected ones of each block."""
    held = layout.keys[shard.group.rank]
    local = shifted(overlap(held, layout.local[reader]), -held.start)
    head = arange(shard.key.shape[:2].numel(), like=shard.key)[:, None] * len(held)
    rows = [(head + arange(local.start, local.stop, like=shard.key)).reshape(-1)]
    for block in blocks:
        head, column = members[block].flatten(0, 1).nonzero().unbind(1)
        rows.append(head * len(held) + column + layout.rows(block, shard.group.rank).start)
    return torch.cat(rows)


def _numbered(coming: list[list[KeyBlock]], per_head: list[list[Tensor]]) -> tuple[Tensor, dict[KeyBlock, Tensor]]:
    """Rows `[B, H, n]` of the received tables, ascending in position: at local positions, and by block.

    A holder's rows are sorted by block, then by head, then by position, and holders are sorted by position.
    """
    rows: dict[KeyBlock | None, list[Tensor]] = {None: []}
    heads: dict[KeyBlock | None, list[Tensor]] = {None: []}
    begin, shape = 0, per_head[0][0].shape
    for blocks, counts in zip(coming, per_head, strict=True):
        for block, count in zip((None, *blocks), counts, strict=True):
            head = arange(shape.numel(), like=count).repeat_interleave(count.flatten())
            heads.setdefault(block, []).append(head)
            rows.setdefault(block, []).append(arange(begin, begin + len(head), like=count))
            begin += len(head)
    order = {block: torch.sort(torch.cat(parts), stable=True).indices for block, parts in heads.items()}
    numbered = {block: torch.cat(parts)[order[block]].view(*shape, -1) for block, parts in rows.items()}
    return numbered[None], {block: numbers for block, numbers in numbered.items() if block is not None}


def _cluster_sums(shard: Shard, layout: RankLayout, block: KeyBlock, member: Tensor, scored: Scored) -> Tensor:
    """`[B * H, clusters, D + Dv + 1]`: sums of keys, values and ones over this rank's unselected keys."""
    if scored.labels is None:
        raise TypeError(f"clusters must have labels, got {scored!r}")
    rows, wide = layout.rows(block, shard.group.rank), accumulation_dtype(shard.key.dtype)
    points = [table[:, :, rows].flatten(0, 1).to(wide) for table in (shard.key, shard.value)]
    return torch.cat(cluster_totals(points, scored.labels, ~member, scored.n_clusters), dim=-1)


# Algorithm 2: this rank's queries over what it received.


class _Reader:
    """What this rank's queries read, in rows of the received tables."""

    def __init__(self, shard: Shard, config: Selected, layout: RankLayout, received: Received) -> None:
        self.shard, self.config, self.layout, self.received = shard, config, layout, received
        self.positions = layout.queries[shard.group.rank]
        self.tables = Tables(received.key, received.value)
        (batch, n_heads, n_query), n_kv_heads = shard.query.shape[:3], shard.key.shape[1]
        heads_per_kv, device = n_heads // n_kv_heads, shard.query.device
        self.queries = Queries(batch, n_kv_heads, heads_per_kv, n_query, self.positions.start, device)

    def parts(self) -> list[Part]:
        """Parts, which refer to `tables`."""
        shard, lsh, dtype = self.shard, self.config.inner, self.shard.query.dtype
        parts = self._leaves() if shard.is_causal else []
        hashes, placed = None, {}
        if isinstance(lsh, Lsh):
            directions = projections(lsh.n_projections, shard.key, shard.streams)
            query = shard.query.reshape(-1, shard.query.shape[-1])
            hashes = hash_ranks(query, directions), hash_ranks(self.received.key, directions)
            placed = self._placed(hashes[0], lsh) if lsh.alignment == "rank" else {}
        for block, rows in self.received.rows.items():
            pair = self._block_pair(block, rows)
            if block.is_exact or hashes is None or not isinstance(lsh, Lsh):
                parts.append(exact_part(pair, dtype))
                continue
            streams = shard.streams.child(block.name)
            pair = replace(pair, draws=streams.head_uniform("residual", lsh.sample_size, like=shard.key))
            ranks = hashes[0][pair.query_rows], hashes[1][pair.key_rows]
            parts.append(hyper_part(pair, ranks, lsh, self.config.coupling, dtype, placed.get(block)))
        return parts

    def _leaves(self) -> list[Part]:
        """Exact causal attention inside the leaves, counted from the first one this rank touches."""
        local, rows = self.layout.local[self.shard.group.rank], self.received.local.flatten()
        queries = replace(self.queries, start=self.positions.start - local.start)
        parts = leaf_parts(self.layout.leaf, queries, len(local), None, self.shard.query.dtype)
        return [
            replace(part, key_rows=rows.view(part.shape[0], -1) if part.key_rows is None else rows[part.key_rows])
            for part in parts
        ]

    def _block_pair(self, block: KeyBlock, rows: Tensor) -> BlockPairs:
        positions = overlap(self.positions, block.queries)
        query_rows, _ = self.queries.rows(arange(positions.start, positions.stop, like=rows)[None])
        usable, n_all = None, rows.new_full((rows.shape[0],), len(block.keys))
        shared, total = [], self.received.totals.get(block)
        if block.sinks or block.recent:
            column = arange(block.n_selected, like=rows)
            apart = (column < len(block.sinks)) | (column >= block.n_selected - len(block.recent))
            apart = apart.expand(rows.shape)
            shared.append(kept_rows(rows, apart, self.shard.query.dtype))
            rows, usable = bring_forward(rows, ~apart)
        if total is not None:
            widths = self.shard.key.shape[-1], self.shard.value.shape[-1], 1
            keys, values, counts = total.split(widths, dim=-1)
            totals, shape = (keys, values, counts.detach()), (*rows.shape[:2], total.shape[1])
            shared.append(add_centroids(self.tables, totals, shape, self.shard.query.dtype))
        n_centroids = 0 if total is None else total.shape[1]
        return BlockPairs(query_rows, None, None, rows, usable, shared, n_centroids, n_all)

    def _placed(self, ranks: Tensor, lsh: Lsh) -> dict[KeyBlock, PlacedQueries]:
        """Places of own queries among all queries of a block, for `alignment="rank"`: ranks exchange hashes."""
        rank, layout = self.shard.group.rank, self.layout
        ranks = ranks.view(self.queries.batch, self.queries.heads, self.queries.heads_per_kv, -1)
        ranks = ranks.to(torch.uint8 if lsh.n_projections <= 8 else torch.int32)
        hashes = {}
        for block in layout.blocks:
            readers = layout.readers(block)
            if not block.is_exact and rank in readers and len(readers) > 1:
                inside = shifted(overlap(self.positions, block.queries), -self.positions.start)
                hashes[block] = ranks[..., inside.start : inside.stop]

        def shape(block: KeyBlock, other: int) -> tuple[int, ...]:
            return *ranks.shape[:3], len(overlap(layout.queries[other], block.queries))

        placed = {}
        for block, parts in _among(self.shard, layout.readers, hashes, shape, ranks).items():
            order = torch.sort(torch.cat(parts, dim=-1), dim=-1, stable=True).indices
            numbers = arange(order.shape[-1], like=order).expand_as(order)
            places = torch.empty_like(order).scatter_(-1, order, numbers)
            inside = shifted(overlap(self.positions, block.queries), -block.queries.start)
            placed[block] = PlacedQueries(places[..., inside.start : inside.stop], order.shape[-1])
        return placed
