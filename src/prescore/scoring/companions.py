"""Keys that have close companions in direction: the robust score for planted keys.

The planted model of the paper hides d groups of m nearly parallel keys among n keys of random direction. If every
key is normalised, only closeness tells the groups from the noise, and leverage fails. If noise keeps its small
norm, leverage works, and the paper's nearest rule on raw keys picks noise. Directions are the same in both
readings, so a score of directions alone works in both or in none. The score is the cosine to the second closest
companion, because among n random keys some pair is always close by chance.

Companions are searched in the style of HyperAttention's sortLSH: keys are sorted by the Gray rank of random sign
bits and compared within windows of the sorted order, in several independent tables.

`experiments/planted/README.md` has the recall of planted keys. Limits: a planted key without companions (m = 1) is
not found, and parallel noise (Appendix B) looks like a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from prescore import checks
from prescore.registry import register_scorer
from prescore.rng import Streams
from prescore.scoring.base import Scorer
from prescore.scoring.hashing import hash_ranks
from prescore.scoring.kmeans import flat_mask
from prescore.scoring.sampling import gather_rows

_MAX_BITS = 16


@register_scorer("companions")
@dataclass(frozen=True)
class Companions(Scorer):
    """Cosine to the second closest key of the same window, best of `n_tables` hash tables.

    A table costs one sort and `N * window * D` multiplications. Duplicates of a key count as companions. A key
    with fewer than two others in its windows scores -1, a zero key 0.
    """

    n_tables: int = 8
    window: int = 128

    permutation_equivariant: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checks.integer("n_tables", self.n_tables, minimum=1)
        checks.integer("window", self.window, minimum=2)

    def score(self, keys: Tensor, *, valid: Tensor | None, streams: Streams) -> Tensor:
        """Score keys, see `Scorer.score`."""
        if keys.numel() == 0:
            return keys.new_zeros(keys.shape[:3])
        unit = torch.nn.functional.normalize(keys, dim=-1, eps=torch.finfo(keys.dtype).tiny)
        points = unit.flatten(0, 1)
        mask = flat_mask(keys, valid)
        present = points.new_ones(points.shape[:2], dtype=torch.bool) if mask is None else mask
        shifts = self._unused_bits(present)
        best = points.new_full(points.shape[:2], -1.0)
        for table in range(self.n_tables):
            planes = streams.head_normal(f"planes {table}", _MAX_BITS, keys.shape[3], like=keys).flatten(0, 1)
            # the first plane is the highest bit
            ranks = hash_ranks(points, planes.flip(1).mT).to(torch.int64) >> shifts
            best = torch.maximum(best, second_cosine(points, ranks, present, self.window))
        return best.reshape(keys.shape[:3])

    def _unused_bits(self, present: Tensor) -> Tensor:
        # so many bits that a bucket holds about half a window of a problem's keys
        n_present = present.sum(dim=1, keepdim=True).to(torch.float32)
        buckets = (n_present / (self.window / 2)).clamp(min=1.0, max=2.0**_MAX_BITS)
        return _MAX_BITS - buckets.log2().ceil().to(torch.int64)


def second_cosine(points: Tensor, ranks: Tensor, present: Tensor, window: int) -> Tensor:
    """Second largest cosine of each unit point `[P, n, d]` to the others of its window, `[P, n]`."""
    n_problems, n_points, dim = points.shape
    order = torch.argsort(ranks.masked_fill(~present, torch.iinfo(torch.int64).max), dim=1, stable=True)
    missing = -n_points % window
    ordered = torch.nn.functional.pad(gather_rows(points, order), (0, 0, 0, missing))
    absent = torch.nn.functional.pad(~present.gather(1, order), (0, missing), value=True)
    blocks = ordered.reshape(-1, window, dim)
    cosines = torch.bmm(blocks, blocks.transpose(1, 2))
    cosines.masked_fill_(absent.reshape(-1, 1, window), -1.0)
    cosines.diagonal(dim1=1, dim2=2).fill_(-1.0)
    first = cosines.max(dim=2, keepdim=True).indices
    second = cosines.scatter_(2, first, -1.0).amax(dim=2)
    in_order = second.reshape(n_problems, -1)[:, :n_points]
    return torch.empty_like(in_order).scatter_(1, order, in_order)
