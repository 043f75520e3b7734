"""Rows on their way: near keys, selected keys and values, and sums for stand-ins go to the ranks that need them.

One exchange for all blocks of a call: its backward pass is one exchange too, and in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.config import Selected
from prescore.hyper.stand_ins import cluster_totals
from prescore.ops.backend import accumulation_dtype
from prescore.parallel.blocks import Block, Map, Span
from prescore.parallel.choosing import Kept, cluster_scorer
from prescore.parallel.group import Mail
from prescore.parallel.pieces import OwnPiece

Totals = tuple[Tensor, Tensor, Tensor]
"""Sums of keys and of values, and numbers of members, by cluster; see `cluster_totals`."""


class Arrived(NamedTuple):
    """What a rank has of the others, and of itself.

    Attributes:
        key, value: `[rows, D]` tables: first the near positions `[B, H, near]`, then selected rows of the blocks.
        rows: By block that this rank's queries meet: `[B, H, n_kept]` rows of the tables, in order of position.
        totals: By block: what its stand-ins are made of.
        received: All that came, for `prescore.parallel.group.tied`.
    """

    key: Tensor
    value: Tensor
    rows: dict[Block, Tensor]
    totals: dict[Block, Totals]
    received: tuple[Tensor, ...]


class Travel:
    """The exchange of one call.

    Args:
        piece: What this rank holds.
        config: Whether there are stand-ins.
        places: Who holds and who needs what.
        kept: What this rank keeps of its own columns.
    """

    def __init__(self, piece: OwnPiece, config: Selected, places: Map, kept: Mapping[Block, Kept]) -> None:
        self.piece, self.places, self.kept = piece, places, kept
        self.rank, self.size = piece.group.rank, piece.group.size
        self.lead = piece.key.shape[:2]
        self.n_rows = self.lead.numel()
        scorer = cluster_scorer(config)
        self.stands_in = scorer is not None
        self.n_clusters = 0 if scorer is None else scorer.n_clusters or piece.key.shape[-1] + 1

    def run(self) -> Arrived:
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
            mails.append(Mail(parts, [n * dim for n in n_incoming]))
        if self.stands_in:
            mails.append(self._totals_mail(wide))
        received = piece.group.exchange(mails)
        rows = self._numbered(counts, near, n_incoming)
        totals = self._totals(received[2]) if self.stands_in else {}
        key, value = (
            self._table(parts, near, table.shape[-1])
            for parts, table in zip(received[:2], (piece.key, piece.value), strict=True)
        )
        return Arrived(key, value, rows, totals, tuple(part for parts in received for part in parts))

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

    def _totals_mail(self, wide: torch.dtype) -> Mail:
        own = {block: self._own_totals(block, kept, wide) for block, kept in self.kept.items() if kept.clusters}
        empty = torch.empty(0, dtype=wide, device=self.piece.key.device)
        parts, sizes = [], []
        for other in range(self.size):
            mine = [own[block].reshape(-1) for block in self._to(other) if block in own]
            parts.append(torch.cat(mine) if mine else empty)
            theirs = [block for block in self._to(self.rank, other) if not block.keeps_all]
            sizes.append(len(theirs) * self.n_rows * self.n_clusters * self._width())
        return Mail(parts, sizes)

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
