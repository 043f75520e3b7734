"""`Selected` where rows travel: which keys matter is known before any query is seen, so only those are sent.

Every rank scores and selects among its own keys (`choosing`), the selected rows go to the ranks whose queries meet
them (`travel`), and each rank attends from its own queries to what arrived, as one process would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.config import Exact, Lsh, Selected
from prescore.ops.backend import accumulation_dtype
from prescore.ops.parts import Centroids, Part, attend_parts
from prescore.parallel.comm import Message, tied
from prescore.parallel.shards import Block, Map, Shard, Span, count_blocks
from prescore.parallel.stats import Held, ScoreStats, stats_kind_of
from prescore.scoring.base import Scored, Scorer
from prescore.scoring.hashing import hash_ranks, projections
from prescore.scoring.kmeans import ClusteringScorer, KMeans
from prescore.scoring.select import bring_forward
from prescore.selected.attention import reads_per_query
from prescore.selected.blocks import BlockPair, KeyRows, PlacedQueries, exact_part, hyper_part
from prescore.selected.causal_grid import Queries, leaf_parts
from prescore.selected.centroids import centroids_of, cluster_totals
from prescore.selected.plan import kept_rows
from prescore.types import Attended, Reads, Result, Values

MOST_BLOCKS = 1024
"""Blocks of the causal grid that are worked off one by one."""


def why_not_selected(piece: Shard, config: Selected) -> str:
    """Why a call goes by heads instead; empty = it need not."""
    if piece.mask is not None:
        return "positions of padded sequences begin at different places"
    if config.coupling.mask == "zero":
        return 'coupling.mask="zero" keeps every key'
    if config.coupling.blocks == "all":
        return 'coupling.blocks="all" cuts blocks over every key'
    if config.selector != "top":
        return f"the selector {config.selector!r} compares all scores"
    if stats_kind_of(config.scoring) is None:
        rule = getattr(config.scoring, "rule", None)
        return f"the scorer {config.scoring.name!r}{f' by {rule!r}' if rule else ''} compares all keys"
    n_blocks = count_blocks(piece.n_keys, piece.n_query, max(1, config.min_seq_len)) if piece.is_causal else 1
    if n_blocks > MOST_BLOCKS:
        return f"the causal grid has {n_blocks} blocks, more than {MOST_BLOCKS}"
    if 0 in (piece.query.numel(), piece.key.numel()):
        return "there is nothing to select from"
    return ""


def attend_by_rows(piece: Shard, config: Selected, *, explain: bool = False) -> Result:
    """This rank's piece of the result."""
    begin = time.perf_counter()
    places = Map(piece, config)
    kept = Choosing(piece, config, places).choose()
    arrived = Exchange(piece, config, places, kept).run()
    parts, centroids = _Parts(piece, config, places, arrived).build()
    attended = attend_parts(
        piece.query,
        arrived.key,
        arrived.value,
        parts,
        scale=piece.scale,
        backend=piece.backend,
        centroids=centroids,
    )
    attended = Attended(tied(attended.output, *arrived.received), attended.lse)
    n_queries = piece.query.shape[:3].numel()

    def count_reads() -> Reads:
        return reads_per_query(parts, n_queries)

    if not explain:
        return Result(*attended, count_reads)
    reads = count_reads()
    stats: Values = {
        "keys_selected": sum(block.n_kept for block in places.blocks) / max(1, len(places.blocks)),
        "keys_per_query": reads.keys,
        "centroids_per_query": reads.centroids,
        "depth": len({block.name for block in places.blocks}) if piece.is_causal else 0,
        "fallbacks": sum(block.fell_back for block in places.blocks) * piece.key.shape[0],
        "seconds": {"attending": time.perf_counter() - begin},
        "backend": piece.backend.name,
    }
    return Result(*attended, count_reads, stats)


class _Parts:
    """What this rank's queries meet, in rows of what arrived."""

    def __init__(self, piece: Shard, config: Selected, places: Map, arrived: Received) -> None:
        self.piece, self.config, self.places, self.arrived = piece, config, places, arrived
        batch, heads = piece.key.shape[:2]
        group = piece.query.shape[1] // heads
        self.own = places.queries[piece.group.rank]
        device = piece.query.device
        self.queries = Queries(batch, heads, group, piece.query.shape[2], self.own.begin, device)
        self.centroids: list[Centroids] = []
        self.n_stand_ins = 0

    def build(self) -> tuple[list[Part], Centroids | None]:
        """Parts, and the centroids that they refer to."""
        parts = self._leaves()
        ranks = self._hashes(self.config.inner) if isinstance(self.config.inner, Lsh) else None
        placed = self._placed(ranks[0]) if ranks is not None else {}
        for block, rows in self.arrived.rows.items():
            pair = self._block_pair(block, rows)
            if ranks is None or block.is_exact or isinstance(self.config.inner, Exact):
                parts.append(exact_part(pair, self.piece.query.dtype))
                continue
            streams = self.piece.streams.child(block.name)
            draws = streams.uniform("residual", self.config.inner.sample_size, like=self.piece.key)
            hashed = ranks[0][pair.query_rows], ranks[1][pair.key_rows]
            dtype, coupling = self.piece.query.dtype, self.config.coupling
            parts.append(hyper_part(pair, *hashed, draws, self.config.inner, coupling, dtype, placed.get(block)))
        if not self.centroids:
            return parts, None
        keys, values = (torch.cat([getattr(own, name) for own in self.centroids]) for name in ("key", "value"))
        return parts, Centroids(keys, values)

    def _leaves(self) -> list[Part]:
        """Exact causal attention inside the leaves, counted from the first one this rank touches."""
        if not self.piece.is_causal:
            return []
        near = self.places.near[self.piece.group.rank]
        queries = Queries(
            self.queries.batch, self.queries.heads, self.queries.group, self.queries.length,
            self.own.begin - near.begin, self.queries.device,
        )  # fmt: skip
        found = leaf_parts(self.places.leaf, queries, near.length, None, self.piece.query.dtype)
        whole = torch.arange(self.queries.batch * self.queries.heads * near.length, device=self.queries.device)
        return [
            part if part.key_rows is not None else replace(part, key_rows=whole.view(part.shape[0], -1))
            for part in found
        ]

    def _block_pair(self, block: Block, rows: Tensor) -> BlockPair:
        positions = self.own.within(block.queries)
        query_rows, _ = self.queries.rows(
            torch.arange(positions.begin, positions.end, device=self.queries.device)[None]
        )
        kept, usable, dtype = None, None, self.piece.query.dtype
        if block.first.length + block.last.length:
            column = torch.arange(block.n_kept, device=rows.device)
            apart = (column < block.first.length) | (column >= block.n_kept - block.last.length)
            apart = apart.expand(rows.shape)
            kept = kept_rows(rows, apart, dtype)
            rows, usable = bring_forward(rows, ~apart)
        return BlockPair(
            query_rows=query_rows,
            query_valid=None,
            query_real=None,
            key_rows=rows,
            key_valid=usable,
            kept=kept,
            extra=self._extra(block),
            n_all=torch.full((rows.shape[0],), block.keys.length, device=rows.device),
        )

    def _extra(self, block: Block) -> KeyRows | None:
        totals = self.arrived.totals.get(block)
        if totals is None:
            return None
        batch, heads = self.piece.key.shape[:2]
        made, rows = centroids_of(totals, (batch, heads, totals[0].shape[1]), self.piece.query.dtype)
        moved = KeyRows(rows.rows + self.n_stand_ins, rows.bias)
        self.centroids.append(made)
        self.n_stand_ins += made.key.shape[0]
        return moved

    def _hashes(self, lsh: Lsh) -> tuple[Tensor, Tensor]:
        """Gray ranks of this rank's queries and of the rows that arrived."""
        directions = projections(lsh.n_projections, self.piece.key, self.piece.streams)
        query = self.piece.query.reshape(-1, self.piece.query.shape[-1])
        return hash_ranks(query, directions), hash_ranks(self.arrived.key, directions)

    def _placed(self, ranks: Tensor) -> dict[Block, PlacedQueries]:
        """Where own queries stand among all of a block, for `alignment="rank"`: the others are asked."""
        lsh = self.config.inner
        if not isinstance(lsh, Lsh) or lsh.alignment != "rank":
            return {}
        group, places, small = self.piece.group, self.places, lsh.n_projections <= 8
        shared = [block for block in places.blocks if not block.is_exact and len(places.needers(block)) > 1]
        own = ranks.view(self.queries.batch, self.queries.heads, self.queries.group, -1)
        own = own.to(torch.uint8 if small else torch.int32)
        lead = own.shape[:3]
        mine = {
            block: own[..., span.begin : span.end]
            for block in shared
            if (span := self.own.within(block.queries).behind(self.own.begin)).length
        }
        spans = [
            [(b, q.within(b.queries).length) for b in mine if q.within(b.queries).length] for q in places.queries
        ]
        parts = [
            torch.cat([own.new_empty(0), *(mine[block].reshape(-1) for block, _ in spans[other])])
            for other in range(group.size)
        ]
        received = group.swap(parts, [lead.numel() * sum(n for _, n in told) for told in spans])
        heard: dict[Block, list[Tensor]] = {block: [] for block in mine}
        for other in range(group.size):
            for (block, n), part in zip(
                spans[other], received[other].split([lead.numel() * n for _, n in spans[other]]), strict=True
            ):
                heard[block].append(part.view(*lead, n))
        return {block: self._place(block, torch.cat(told, dim=-1)) for block, told in heard.items()}

    def _place(self, block: Block, ranks: Tensor) -> PlacedQueries:
        order = torch.sort(ranks, dim=-1, stable=True).indices
        places = torch.empty_like(order).scatter_(
            -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
        )
        own = self.own.within(block.queries).behind(block.queries.begin)
        return PlacedQueries(places[..., own.begin : own.end], order.shape[-1])


# Algorithm 1 on several ranks: holders score their own keys, compare candidates, and know which are kept.


@dataclass(frozen=True, eq=False)
class Kept:
    """What a holder knows of its own columns of a block.

    Attributes:
        keep: `[B, H, w]` bool, the keys that are kept.
        clusters: Labels for centroids; None where there are none.
    """

    keep: Tensor
    clusters: Scored | None


class Choosing:
    """The choices of one call on this rank, for all its blocks."""

    def __init__(self, piece: Shard, config: Selected, places: Map) -> None:
        self.piece, self.config, self.places = piece, config, places
        wide = torch.promote_types(piece.key.dtype, torch.float32)
        self.wide = wide
        self._keys = piece.key.detach().to(wide)
        self.scored = [block for block in places.blocks if not block.keeps_all]

    @torch.no_grad()
    def choose(self) -> dict[Block, Kept]:
        """By block, for those of which this rank holds keys."""
        scores = self._scores(self.config.scoring)
        scorer = cluster_scorer(self.config)
        clusters: dict[Block, Scored] = {}
        if scorer is not None:
            clusters = scores if scorer is self.config.scoring else self._scores(scorer)
        keeps = self._kept(scores)
        for block in self.places.blocks:
            if block.keeps_all and self._holds(block):
                shape = (*self.piece.key.shape[:2], self._span(block).length)
                keeps[block] = torch.ones(shape, dtype=torch.bool, device=self._keys.device)
        return {block: Kept(keep, clusters.get(block)) for block, keep in keeps.items()}

    def _holds(self, block: Block) -> bool:
        return self.piece.group.rank in self.places.holders(block)

    def _span(self, block: Block, rank: int | None = None) -> Span:
        return self.places.columns(block, self.piece.group.rank if rank is None else rank)

    def _held(self, block: Block) -> Held:
        """This rank's keys of a block."""
        own = self.places.keys[self.piece.group.rank]
        inside = own.within(block.keys).behind(own.begin)
        streams = self.piece.streams.child(block.name)
        return Held(self._keys[:, :, inside.begin : inside.end], self._span(block), block.keys.length, streams)

    def _scores(self, scorer: Scorer) -> dict[Block, Scored]:
        """Scores of own keys by block, after the holders of each block told one another what they must."""
        telling = stats_kind_of(scorer)
        if telling is None:
            raise TypeError(f"scorer must be one that can be told from pieces, got {scorer!r}")
        held = {block: self._held(block) for block in self.scored if self._holds(block)}
        dtype = telling.wire(self.piece.key.dtype, self.wide)
        own = {block: telling.tell(each).to(dtype) for block, each in held.items()}
        told = self._among_holders(
            own, lambda block, rank: telling.size(held[block], self._span(block, rank)), dtype
        )
        return {
            block: telling.score(each, [ScoreStats(self._span(block, rank), part) for rank, part in told[block]])
            for block, each in held.items()
        }

    def _among_holders(
        self, own: dict[Block, Tensor], size: Callable[[Block, int], int], dtype: torch.dtype
    ) -> dict[Block, list[tuple[int, Tensor]]]:
        """`[B, H, n]` of every holder of the blocks that this rank holds, in the order of ranks."""
        group, lead = self.piece.group, self.piece.key.shape[:2]
        parallel_group = {block: self.places.holders(block) for block in own}
        parts, sizes, shapes = [], [], []
        for rank in range(group.size):
            shared = [block for block in own if rank in parallel_group[block] and rank != group.rank]
            parts.append(_flat([own[block] for block in shared], dtype, self._keys.device))
            shapes.append([(block, size(block, rank)) for block in shared])
            sizes.append(sum(n for _, n in shapes[-1]) * lead.numel())
        received = group.swap(parts, sizes)
        heard: dict[Block, list[tuple[int, Tensor]]] = {block: [] for block in own}
        for rank in range(group.size):
            begin = 0
            for block, n in shapes[rank]:
                end = begin + n * lead.numel()
                heard[block].append((rank, received[rank][begin:end].view(*lead, n)))
                begin = end
            if rank == group.rank:
                for block, numbers in own.items():
                    heard[block].append((rank, numbers))
        return heard

    def _kept(self, scores: dict[Block, Scored]) -> dict[Block, Tensor]:
        """Which own keys are among the best of each block; equal scores go to the lower position."""
        protected = {block: self._protected(block) for block in scores}
        free = {block: scored.scores.masked_fill(protected[block], -torch.inf) for block, scored in scores.items()}
        best = {
            block: values.topk(min(block.n_free, values.shape[2]), dim=2).values for block, values in free.items()
        }
        candidates = self._among_holders(
            best, lambda block, rank: min(block.n_free, self._span(block, rank).length), self.wide
        )
        return {
            block: protected[block] | self._chosen(values, candidates[block], block.n_free)
            for block, values in free.items()
        }

    def _protected(self, block: Block) -> Tensor:
        """`[w]`: own columns that are kept whatever their score."""
        span = self._span(block)
        columns = torch.arange(span.begin, span.end, device=self._keys.device)
        ends = [(columns >= kept.begin) & (columns < kept.end) for kept in (block.first, block.last)]
        return ends[0] | ends[1]

    def _chosen(self, values: Tensor, candidates: Sequence[tuple[int, Tensor]], n_free: int) -> Tensor:
        if not n_free:
            return torch.zeros_like(values, dtype=torch.bool)
        everyone = torch.cat([part for _, part in candidates], dim=2)
        boundary = everyone.topk(n_free, dim=2).values[..., -1:]
        room = n_free - (everyone > boundary).sum(dim=2, keepdim=True)
        before = [part == boundary for rank, part in candidates if rank < self.piece.group.rank]
        if before:
            room = room - torch.cat(before, dim=2).sum(dim=2, keepdim=True)
        level = values == boundary
        return (values > boundary) | (level & (level.cumsum(dim=2) <= room))


def cluster_scorer(config: Selected) -> ClusteringScorer | None:
    """Whose clusters have centroids; None = there are none."""
    if isinstance(config.remainder, ClusteringScorer):
        return config.remainder
    if config.remainder == "none":
        return None
    return config.scoring if isinstance(config.scoring, ClusteringScorer) else KMeans()


def _flat(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Tensors of one dtype behind one another, as numbers."""
    if not tensors:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


# Rows on their way: near keys, selected keys and values, and sums for centroids go to the ranks that need them.
#
# One exchange for all blocks of a call: its backward pass is one exchange too, and in the same order on every
# rank.

Totals = tuple[Tensor, Tensor, Tensor]
"""Sums of keys and of values, and numbers of members, by cluster; see `cluster_totals`."""


class Received(NamedTuple):
    """What a rank has of the others, and of itself.

    Attributes:
        key, value: `[rows, D]` tables: first the near positions `[B, H, near]`, then selected rows of the blocks.
        rows: By block that this rank's queries meet: `[B, H, n_kept]` rows of the tables, in order of position.
        totals: By block: what its centroids are made of.
        received: All that came, for `prescore.parallel.comm.tied`.
    """

    key: Tensor
    value: Tensor
    rows: dict[Block, Tensor]
    totals: dict[Block, Totals]
    received: tuple[Tensor, ...]


class Exchange:
    """The exchange of one call.

    Args:
        piece: What this rank holds.
        config: Whether there are centroids.
        places: Who holds and who needs what.
        kept: What this rank keeps of its own columns.
    """

    def __init__(self, piece: Shard, config: Selected, places: Map, kept: Mapping[Block, Kept]) -> None:
        self.piece, self.places, self.kept = piece, places, kept
        self.rank, self.size = piece.group.rank, piece.group.size
        self.lead = piece.key.shape[:2]
        self.n_rows = self.lead.numel()
        scorer = cluster_scorer(config)
        self.stands_in = scorer is not None
        self.n_clusters = 0 if scorer is None else scorer.n_clusters or piece.key.shape[-1] + 1

    def run(self) -> Received:
        """Send and receive."""
        piece, wide = self.piece, accumulation_dtype(self.piece.key.dtype)
        counts = self._counts()
        near = [self._near(sender, self.rank).length * self.n_rows for sender in range(self.size)]
        n_incoming = [
            near[sender] + sum(int(count.sum()) for count in counts[sender].values())
            for sender in range(self.size)
        ]
        leaving = [self._leaving(needer) for needer in range(self.size)]
        mails = []
        for table in (piece.key, piece.value):
            flat, dim = table.reshape(-1, table.shape[-1]), table.shape[-1]
            parts = [flat.index_select(0, rows).reshape(-1) for rows in leaving]
            mails.append(Message(parts, [n * dim for n in n_incoming]))
        if self.stands_in:
            mails.append(self._totals_mail(wide))
        received = piece.group.exchange(mails)
        rows = self._numbered(counts, near, n_incoming)
        totals = self._totals(received[2]) if self.stands_in else {}
        key, value = (
            self._table(parts, near, table.shape[-1])
            for parts, table in zip(received[:2], (piece.key, piece.value), strict=True)
        )
        return Received(key, value, rows, totals, tuple(part for parts in received for part in parts))

    def _to(self, needer: int, sender: int | None = None) -> list[Block]:
        """Blocks of which a sender (this rank) has keys that a rank needs, in the shared order."""
        sender = self.rank if sender is None else sender
        return [
            block
            for block in self.places.blocks
            if sender in self.places.holders(block) and needer in self.places.needers(block)
        ]

    def _near(self, sender: int, needer: int) -> Span:
        """Positions of a sender's keys that a rank reads exactly."""
        return self.places.keys[sender].within(self.places.near[needer])

    def _leaving(self, needer: int) -> Tensor:
        """Flat rows of this rank's tables that go to a rank: near ones, then the selected ones of each block."""
        n_own, device = self.piece.key.shape[2], self.piece.key.device
        head = torch.arange(self.n_rows, device=device)[:, None] * n_own
        first = self.places.keys[self.rank].begin
        near = self._near(self.rank, needer).behind(first)
        found = [(head + torch.arange(near.begin, near.end, device=device)).reshape(-1)]
        for block in self._to(needer):
            begin = self.places.keys[self.rank].within(block.keys).begin - first
            row, column = self.kept[block].keep.flatten(0, 1).nonzero().unbind(1)
            found.append(row * n_own + column + begin)
        return torch.cat(found)

    def _counts(self) -> list[dict[Block, Tensor]]:
        """By sender and block: `[B, H]` selected keys that will come from there."""
        device = self.piece.key.device
        parts, sizes = [], []
        for other in range(self.size):
            mine = [self.kept[block].keep.sum(-1, dtype=torch.int32).reshape(-1) for block in self._to(other)]
            parts.append(torch.cat(mine) if mine else torch.empty(0, dtype=torch.int32, device=device))
            sizes.append(len(self._to(self.rank, other)) * self.n_rows)
        received = self.piece.group.swap(parts, sizes)
        return [
            {
                block: count.long()
                for block, count in zip(
                    self._to(self.rank, sender), received[sender].view(-1, *self.lead), strict=True
                )
            }
            for sender in range(self.size)
        ]

    def _numbered(
        self, counts: list[dict[Block, Tensor]], near: list[int], n_incoming: list[int]
    ) -> dict[Block, Tensor]:
        """Rows of the tables by block; those of earlier ranks come first, so that they ascend in position."""
        start, device = sum(near), self.piece.key.device
        found: dict[Block, Tensor] = {}
        filled: dict[Block, Tensor] = {}
        for sender in range(self.size):
            at = start
            for block, count in counts[sender].items():
                if block not in found:
                    shape = (*self.lead, block.n_kept)
                    found[block] = torch.zeros(shape, dtype=torch.int64, device=device)
                    filled[block] = torch.zeros(self.lead, dtype=torch.int64, device=device)
                before = (count.flatten().cumsum(0) - count.flatten()).view(self.lead)
                slot = torch.arange(block.n_kept, device=device) - filled[block][..., None]
                own = (slot >= 0) & (slot < count[..., None])
                found[block] = torch.where(own, at + before[..., None] + slot, found[block])
                filled[block] = filled[block] + count
                at += int(count.sum())
            start += n_incoming[sender] - near[sender]
        return found

    def _table(self, received: list[Tensor], near: list[int], dim: int) -> Tensor:
        """Near rows of all senders as `[B, H, near]`, then everything else in the order of senders."""
        begun = [part.split([n * dim, part.numel() - n * dim]) for part, n in zip(received, near, strict=True)]
        first = torch.cat([part.view(self.n_rows, -1, dim) for part, _ in begun], dim=1)
        return torch.cat([first.reshape(-1, dim), *(rest.view(-1, dim) for _, rest in begun)])

    def _totals_mail(self, wide: torch.dtype) -> Message:
        own = {block: self._own_totals(block, kept, wide) for block, kept in self.kept.items() if kept.clusters}
        empty = torch.empty(0, dtype=wide, device=self.piece.key.device)
        parts, sizes = [], []
        for other in range(self.size):
            mine = [own[block].reshape(-1) for block in self._to(other) if block in own]
            parts.append(torch.cat(mine) if mine else empty)
            theirs = [block for block in self._to(self.rank, other) if not block.keeps_all]
            sizes.append(len(theirs) * self.n_rows * self.n_clusters * self._width())
        return Message(parts, sizes)

    def _own_totals(self, block: Block, kept: Kept, wide: torch.dtype) -> Tensor:
        """`[B * H, clusters, D + Dv + 1]`: sums over this rank's unselected keys of a block."""
        clusters = kept.clusters
        if clusters is None or clusters.labels is None:
            raise TypeError(f"clusters must have labels, got {clusters!r}")
        own = self.places.keys[self.rank]
        inside = own.within(block.keys).behind(own.begin)
        points = [
            table[:, :, inside.begin : inside.end].flatten(0, 1).to(wide)
            for table in (self.piece.key, self.piece.value)
        ]
        return torch.cat(cluster_totals(points, clusters.labels, ~kept.keep, clusters.n_clusters), dim=-1)

    def _totals(self, received: list[Tensor]) -> dict[Block, Totals]:
        """Sums over all holders, in the order of ranks."""
        found: dict[Block, Tensor] = {}
        for sender in range(self.size):
            blocks = [block for block in self._to(self.rank, sender) if not block.keeps_all]
            parts = received[sender].view(len(blocks), self.n_rows, self.n_clusters, self._width())
            for block, part in zip(blocks, parts, strict=True):
                found[block] = part if block not in found else found[block] + part
        widths = [self.piece.key.shape[-1], self.piece.value.shape[-1], 1]
        split = {block: total.split(widths, dim=-1) for block, total in found.items()}
        return {block: (parts[0], parts[1], parts[2].detach()) for block, parts in split.items()}

    def _width(self) -> int:
        return self.piece.key.shape[-1] + self.piece.value.shape[-1] + 1
