"""`Selected` where rows travel: which keys matter is known before any query is seen, so only those are sent.

Every rank scores and selects among its own keys (`choosing`), the selected rows go to the ranks whose queries meet
them (`travel`), and each rank attends from its own queries to what arrived, as one process would.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from prescore.clustering.hashing import hash_ranks
from prescore.config import Exact, Lsh, Selected
from prescore.hyper.blocks import KeyRows, Meeting, exact_part, hyper_part
from prescore.hyper.grid import Queries, leaf_parts
from prescore.hyper.lsh import projections
from prescore.hyper.plan import kept_rows
from prescore.hyper.stand_ins import stand_ins_of
from prescore.hyper.statistics import rows_per_query
from prescore.hyper.tiles import PlacedQueries
from prescore.ops.parts import Part, StandIns, attend_parts
from prescore.parallel.blocks import Block, Map, count_blocks
from prescore.parallel.choosing import Choosing
from prescore.parallel.group import tied
from prescore.parallel.pieces import OwnPiece
from prescore.parallel.told import telling_of
from prescore.parallel.travel import Arrived, Travel
from prescore.selection.members import bring_forward
from prescore.types import Attended, Outcome
from prescore.values import Values

MOST_BLOCKS = 1024
"""Blocks of the causal grid that are worked off one by one."""


def why_not_rows(piece: OwnPiece, config: Selected) -> str:
    """Why a call goes by heads instead; empty = it need not."""
    if piece.mask is not None:
        return "positions of padded sequences begin at different places"
    if config.coupling.mask == "zero":
        return 'coupling.mask="zero" keeps every key'
    if config.selector != "top":
        return f"the selector {config.selector!r} compares all scores"
    if telling_of(config.scoring) is None:
        rule = getattr(config.scoring, "rule", None)
        return f"the scorer {config.scoring.name!r}{f' by {rule!r}' if rule else ''} compares all keys"
    n_blocks = count_blocks(piece.n_keys, piece.n_query, max(1, config.min_seq_len)) if piece.is_causal else 1
    if n_blocks > MOST_BLOCKS:
        return f"the causal grid has {n_blocks} blocks, more than {MOST_BLOCKS}"
    if 0 in (piece.query.numel(), piece.key.numel()):
        return "there is nothing to select from"
    return ""


def attend_by_rows(piece: OwnPiece, config: Selected, *, explain: bool = False) -> Outcome:
    """This rank's piece of the result."""
    begin = time.perf_counter()
    places = Map(piece, config)
    kept = Choosing(piece, config, places).choose()
    arrived = Travel(piece, config, places, kept).run()
    parts, stand_ins = _Parts(piece, config, places, arrived).build()
    attended = attend_parts(
        piece.query,
        arrived.key,
        arrived.value,
        parts,
        scale=piece.scale,
        backend=piece.backend,
        stand_ins=stand_ins,
    )
    attended = Attended(tied(attended.output, *arrived.received), attended.lse)
    n_queries = piece.query.shape[:3].numel()

    def count_rows() -> float:
        return rows_per_query(parts, n_queries)

    if not explain:
        return Outcome(attended, count_rows)
    stats: Values = {
        "keys_kept": sum(block.n_kept for block in places.blocks) / max(1, len(places.blocks)),
        "rows_per_query": count_rows(),
        "depth": len({block.name for block in places.blocks}) if piece.is_causal else 0,
        "fallbacks": sum(block.fell_back for block in places.blocks) * piece.key.shape[0],
        "seconds": {"attending": time.perf_counter() - begin},
        "backend": piece.backend.name,
    }
    return Outcome(attended, count_rows, [], stats)


class _Parts:
    """What this rank's queries meet, in rows of what arrived."""

    def __init__(self, piece: OwnPiece, config: Selected, places: Map, arrived: Arrived) -> None:
        self.piece, self.config, self.places, self.arrived = piece, config, places, arrived
        batch, heads = piece.key.shape[:2]
        group = piece.query.shape[1] // heads
        self.own = places.queries[piece.group.rank]
        device = piece.query.device
        self.queries = Queries(batch, heads, group, piece.query.shape[2], self.own.begin, device)
        self.stand_ins: list[StandIns] = []
        self.n_stand_ins = 0

    def build(self) -> tuple[list[Part], StandIns | None]:
        """Parts, and the stand-ins that they refer to."""
        parts = self._leaves()
        ranks = self._hashes(self.config.inner) if isinstance(self.config.inner, Lsh) else None
        placed = self._placed(ranks[0]) if ranks is not None else {}
        for block, rows in self.arrived.rows.items():
            meeting = self._meeting(block, rows)
            if ranks is None or block.is_exact or isinstance(self.config.inner, Exact):
                parts.append(exact_part(meeting, self.piece.query.dtype))
                continue
            streams = self.piece.streams.child(block.name)
            draws = streams.uniform("residual", self.config.inner.sample_size, like=self.piece.key)
            hashed = ranks[0][meeting.query_rows], ranks[1][meeting.key_rows]
            dtype, coupling = self.piece.query.dtype, self.config.coupling
            parts.append(
                hyper_part(meeting, *hashed, draws, self.config.inner, coupling, dtype, placed.get(block))
            )
        if not self.stand_ins:
            return parts, None
        keys, values = (torch.cat([getattr(own, name) for own in self.stand_ins]) for name in ("key", "value"))
        return parts, StandIns(keys, values)

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

    def _meeting(self, block: Block, rows: Tensor) -> Meeting:
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
        return Meeting(
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
        made, rows = stand_ins_of(totals, (batch, heads, totals[0].shape[1]), self.piece.query.dtype)
        moved = KeyRows(rows.rows + self.n_stand_ins, rows.bias)
        self.stand_ins.append(made)
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
