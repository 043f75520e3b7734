"""What each block of queries sees in routed attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.ops.backend import Backend
from prescore.routed.layout import Layout
from prescore.routed.levels import Descent, columns_in, shares_of


@dataclass(frozen=True)
class View:
    """What the blocks see.

    Attributes:
        layout: The geometry.
        leaves: For each block of queries, the ranges of stand-ins it sees, nodes before leaves.
        singles: Likewise of single keys.
        n_chosen: Leaves a query reads, fewer where a block sees fewer.
        scale: Factor of the logits.
        backend: The operator.
        blocks_per_dispatch: Blocks whose pairs are sorted together.
    """

    layout: Layout
    leaves: tuple[tuple[slice, ...], ...]
    singles: tuple[tuple[slice, ...], ...]
    n_chosen: int
    scale: float
    backend: Backend
    blocks_per_dispatch: int = 64

    def gains(self, block: int, like: Tensor) -> Tensor | None:
        """What the logit of a chosen stand-in gains, see `Columns`."""
        return shares_of(self.layout, self.leaves[block], like)

    def n_seen(self, block: int) -> int:
        """Stand-ins the block sees."""
        return columns_in(self.leaves[block])

    def leaf_numbers(self, chosen: Tensor, block: int, query: Tensor, descent: Descent) -> Tensor:
        """The leaves that chosen columns of a block lead to, numbered among all leaves."""
        ranges = self.leaves[block]
        table = torch.cat([torch.arange(part.start, part.stop, device=chosen.device) for part in ranges])
        numbers = table.index_select(0, chosen.reshape(-1)).view(chosen.shape)
        coarsest = sum(ranges[0].start >= offset for offset in self.layout.level_offsets) - 1
        if not coarsest:
            return numbers
        return descent.to_leaves(query, numbers, ranges[0] if coarsest == 1 else None)

    def chosen(self, block: int) -> int:
        """Leaves each query of the block reads."""
        return min(self.n_chosen, self.n_seen(block))

    def groups(self) -> list[range]:
        """Runs of blocks that are dispatched together: equally many leaves per query in each."""
        runs: list[range] = []
        for block in range(len(self.leaves)):
            last = runs[-1] if runs else None
            if last and len(last) < self.blocks_per_dispatch and self.chosen(last[0]) == self.chosen(block):
                runs[-1] = range(last.start, block + 1)
            else:
                runs.append(range(block, block + 1))
        return runs
