"""Keys kept before any query is seen: every query reads the same ones, as the paper does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from clusters import cluster_sums
from scene import Answer, View, attend
from torch import Tensor
from torch.nn.functional import normalize

from prescore import KMeans, Scorer, score, select
from prescore.scoring.lloyd import fit
from prescore.scoring.metrics import metric_for
from prescore.scoring.sampling import draw_sample
from prescore.rng import Streams
from prescore.scoring.base import as_scorer
from routed import ROWS

N_STAND_INS = 64
LEAVES_PER_CHUNK = 4
SINGLES_PER_CHUNK = 4


@dataclass(frozen=True)
class Kept:
    """A selection at the total rows of routed attention with leaves of 128.

    Attributes:
        method: A scorer of the library, or `oracle`: the largest true shares summed over the studied queries.
        rule: For clustering scorers.
        draw: `top`, or `sampled`: every key with a probability in proportion to its score (1 at most), weighted by
            its inverse.
        centroids: One centroid for the unselected keys of each of 64 clusters, inside the same rows.
    """

    method: str
    rule: str = "nearest"
    draw: str = "top"
    centroids: bool = False

    def scorer(self) -> Scorer:
        """For `prescore.score` and `prescore.select`."""
        return KMeans(rule=self.rule) if self.method == "kmeans" else as_scorer(self.method)


def total_rows(view: View) -> int:
    """Rows that routed attention reads: chosen leaves, singles and centroids."""
    return ROWS + view.n_pieces * (LEAVES_PER_CHUNK + SINGLES_PER_CHUNK) - ROWS // 128 - ROWS // 128


def attend_selection(view: View, kept: Kept, seed: int) -> Answer:
    """Exact over the kept keys, the same for every query of the chunk."""
    rows = total_rows(view) - (N_STAND_INS if kept.centroids else 0)
    bias = _bias(view, kept, rows, seed)[:, None, None]  # [Hkv, 1, 1, F]
    if not kept.centroids:
        return attend(view, bias)
    key, value = view.layer.key[:, view.far], view.layer.value[:, view.far]
    labels = far_labels(view).masked_fill(torch.isfinite(bias[:, 0, 0]), -1)
    count = cluster_sums(torch.ones_like(key[..., 0]), labels, N_STAND_INS)
    means = [cluster_sums(points, labels, N_STAND_INS) / count.clamp_min(1)[..., None] for points in (key, value)]
    logits = view.query @ means[0][:, None].transpose(-1, -2) + count.log()[:, None, None]
    return attend(view, bias, logits, means[1])


def far_labels(view: View, n_clusters: int = N_STAND_INS) -> Tensor:
    """`[Hkv, F]`: k-means on unit keys, as the library's centroids have it."""
    name = ("k-means", view.chunk, n_clusters)
    if name not in view.layer.memory:
        points = normalize(view.layer.key[:, view.far], dim=-1)
        sample = draw_sample(points, None, 32 * max(n_clusters, 64), Streams(0), "fit sample")
        clustering = fit(points, sample, n_clusters=n_clusters, metric=metric_for(2.0), streams=Streams(0))
        view.layer.memory[name] = clustering.labels
    found: Tensor = view.layer.memory[name]
    return found


def _bias(view: View, kept: Kept, rows: int, seed: int) -> Tensor:
    """`[Hkv, F]`: 0 or a log weight for kept keys, -inf for others."""
    key = view.layer.key[None, :, view.far]
    absent = torch.full(key.shape[1:3], -torch.inf)
    if kept.method == "oracle":
        shares = view.logits.softmax(-1)[..., view.far].sum((1, 2))
        return absent.scatter(-1, shares.topk(rows, dim=-1).indices, 0.0)
    if kept.draw == "top":
        # sinks are read apart
        chosen = select(key, kept.scorer(), top_k=rows, sinks=0, generator=seed)
        return absent.scatter(-1, chosen.indices[0], 0.0)
    chance = inclusion(positive_scores(key, kept, seed), rows)
    drawn = Streams(seed).uniform(f"draw {view.chunk}", *chance.shape, like=chance) < chance
    return torch.where(drawn, -chance.log(), absent)


def positive_scores(key: Tensor, kept: Kept, seed: int) -> Tensor:
    """`[Hkv, F]`, what keys are drawn in proportion to."""
    if kept.method == "uniform":
        return torch.ones(key.shape[1:3])
    scores = score(key, kept.scorer(), generator=seed)[0]
    # minus a cosine lies between -1 and 1
    return scores + 1 if kept.method == "key-diff" else scores.clamp_min(1e-12)


def inclusion(scores: Tensor, rows: int) -> Tensor:
    """Chances in proportion to the scores, at most 1, that sum to `rows`."""
    factor = rows / scores.sum(-1, keepdim=True)
    for _ in range(20):
        chance = (scores * factor).clamp_max(1.0)
        free = chance < 1
        left = rows - (~free).sum(-1, keepdim=True)
        factor = left / (scores * free).sum(-1, keepdim=True)
    return (scores * factor).clamp_max(1.0)
