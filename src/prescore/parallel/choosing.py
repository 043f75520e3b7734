"""Algorithm 1 on several ranks: holders score their own keys, compare candidates, and know which are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.config import Selected
from prescore.hyper.plan import block_scorer
from prescore.parallel.blocks import Block, Map, Span
from prescore.parallel.pieces import OwnPiece
from prescore.parallel.told import Held, Told, telling_of
from prescore.scorers.base import Scored, Scorer
from prescore.scorers.clustered import ClusteringScorer
from prescore.scorers.kmeans import KMeans


@dataclass(frozen=True, eq=False)
class Kept:
    """What a holder knows of its own columns of a block.

    Attributes:
        keep: `[B, H, w]` bool, the keys that are kept.
        clusters: Labels for stand-ins; None where there are none.
    """

    keep: Tensor
    clusters: Scored | None


class Choosing:
    """The choices of one call on this rank, for all its blocks."""

    def __init__(self, piece: OwnPiece, config: Selected, places: Map) -> None:
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
        if self.piece.is_causal:
            scorer = block_scorer(scorer, self._keys.shape[-1])
        telling = telling_of(scorer)
        if telling is None:
            raise TypeError(f"scorer must be one that can be told from pieces, got {scorer!r}")
        held = {block: self._held(block) for block in self.scored if self._holds(block)}
        dtype = telling.wire(self.piece.key.dtype, self.wide)
        own = {block: telling.tell(each).to(dtype) for block, each in held.items()}
        told = self._among_holders(
            own, lambda block, rank: telling.size(held[block], self._span(block, rank)), dtype
        )
        return {
            block: telling.score(each, [Told(self._span(block, rank), part) for rank, part in told[block]])
            for block, each in held.items()
        }

    def _among_holders(
        self, own: dict[Block, Tensor], size: Callable[[Block, int], int], dtype: torch.dtype
    ) -> dict[Block, list[tuple[int, Tensor]]]:
        """`[B, H, n]` of every holder of the blocks that this rank holds, in the order of ranks."""
        group, lead = self.piece.group, self.piece.key.shape[:2]
        together = {block: self.places.holders(block) for block in own}
        parts, sizes, shapes = [], [], []
        for rank in range(group.size):
            shared = [block for block in own if rank in together[block] and rank != group.rank]
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
    """Whose clusters have stand-ins; None = there are none."""
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
