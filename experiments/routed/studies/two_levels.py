"""Large leaves opened into small ones: few centroids for most of the past, small leaves where a query looks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from clusters import Clustering, Clusters, make_clusters
from scene import Answer, View, attend
from torch import Tensor

from routed import ROWS, choose, scores


@dataclass(frozen=True)
class TwoLevels:
    """A query opens the `opened` large leaves it likes best and reads small leaves inside them.

    The small leaves of opened ones that it does not read have a centroid each; every other large leaf has one.
    """

    coarse: int
    fine: int
    opened: int


def attend_two_levels(view: View, levels: TwoLevels, rows: int = ROWS) -> Answer:
    """Both levels come from one tree: `coarse / fine` neighbouring leaves make a large one."""
    factor = levels.coarse // levels.fine
    fine = make_clusters(view, Clustering(leaf=levels.fine))
    coarse = _joined(view, fine, factor)
    best = scores(view, coarse).topk(min(levels.opened, coarse.count.shape[1]), dim=-1).indices
    opened = torch.zeros(*best.shape[:-1], coarse.count.shape[1], dtype=torch.bool).scatter(-1, best, True)
    inside = opened.repeat_interleave(factor, dim=-1)
    small = scores(view, fine).masked_fill(~inside, -torch.inf)
    chosen = choose(small, fine, rows // levels.fine * levels.fine) & inside
    bias = torch.zeros(()).where(fine.spread(chosen, True), -torch.inf)
    logits = torch.cat(
        (scores(view, coarse).masked_fill(opened, -torch.inf), small.masked_fill(chosen, -torch.inf)), dim=-1
    )
    return attend(view, bias, logits, torch.cat((coarse.value, fine.value), dim=1))


def _joined(view: View, fine: Clusters, factor: int) -> Clusters:
    def pooled(means: Tensor) -> Tensor:
        sums = (means * fine.count[..., None]).unflatten(1, (-1, factor)).sum(2)
        return sums / count.clamp_min(1)[..., None]

    count = fine.count.unflatten(1, (-1, factor)).sum(2)
    labels = torch.where(fine.labels < 0, fine.labels, fine.labels // factor)
    return replace(
        fine, labels=labels, count=count, key=pooled(fine.key), value=pooled(fine.value),
        run_of=fine.run_of[::factor],
    )  # fmt: skip
