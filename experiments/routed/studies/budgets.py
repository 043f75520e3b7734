"""Rows given to layers and heads by what past queries leave to centroids, the total unchanged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from clusters import Clustering, make_clusters
from scene import CHUNK, SINKS, Answer, Book, Layer, View, even_positions
from torch import Tensor

from routed import ROWS, budget_of, choose, read, scores

N_PAST = 64
"""Queries of the previous chunk that vote on the budgets of a chunk."""


@dataclass(frozen=True)
class Budgets:
    """A rule.

    Attributes:
        scope: Among whom rows are shared out: `head` (the heads of a layer), `layer` (layers, equal heads), `all`.
        rule: `unresolved` (in proportion to the share of the softmax that centroids hold), `root` (to its root),
            `greedy` (leaf by leaf to whoever's next leaf holds the largest share).
    """

    scope: str
    rule: str

    def leaves(self, book: Book, chunk: int, clustering: Clustering, rows: int) -> dict[int, Tensor]:
        """`{id(layer): [Hkv, G]}` leaves a head may read in this chunk."""
        each = rows // clustering.leaf
        layers = list(book.layers.values())
        votes = torch.stack([_votes(layer, chunk, clustering, rows) for layer in layers])  # [L, Hkv, G, 1 + M]
        n_leaves = votes.shape[-1] - 1
        flat = votes.flatten(1, 2)  # [L, H, 1 + M]
        if self.scope == "layer":
            flat = flat.mean(1, keepdim=True)
        pools = flat if self.scope == "head" else flat.flatten(0, 1)[None]
        given = torch.stack([self._share_out(pool, each * len(pool), n_leaves) for pool in pools])
        given = given.reshape(len(layers), -1).expand(-1, votes[0, ..., 0].numel())
        shaped = given.reshape(len(layers), *votes.shape[1:3])
        return {id(layer): own for layer, own in zip(layers, shaped, strict=True)}

    def _share_out(self, pool: Tensor, total: int, n_leaves: int) -> Tensor:
        """`[members, 1 + M]` votes -> `[members]` leaves, at least one each, `total` together."""
        if self.rule == "greedy":
            gains = pool[:, 1:].clone()
            gains[:, 0] = torch.inf  # everyone reads at least one
            best = gains.flatten().topk(total).indices
            return torch.bincount(best // n_leaves, minlength=len(pool))
        weight = pool[:, 0].sqrt() if self.rule == "root" else pool[:, 0]
        given = torch.ones(len(pool), dtype=torch.int64)
        wish = weight / weight.sum() * (total - len(pool))
        given += wish.floor().long()
        rest = total - int(given.sum())
        given[(wish - wish.floor()).topk(rest).indices] += 1
        return given.clamp_max(n_leaves)


def _votes(layer: Layer, chunk: int, clustering: Clustering, rows: int) -> Tensor:
    """`[Hkv, G, 1 + M]`: what centroids hold at equal rows, then the mean share of the k-th best leaf, all k."""
    name = ("votes", chunk, clustering, rows)
    if name not in layer.memory:
        begin = SINKS + (chunk - 1) * CHUNK
        past = View(layer, chunk - 1, even_positions(begin, begin + CHUNK, N_PAST))
        clusters = make_clusters(past, clustering)
        own = scores(past, clusters)
        answer = read(past, clusters, choose(own, clusters, budget_of(clustering, rows)))
        nothing = read(past, clusters, torch.zeros_like(own, dtype=torch.bool))
        ranked = own.softmax(-1).sort(dim=-1, descending=True).values * nothing.stand_in_share[..., None]
        layer.memory[name] = torch.cat((answer.stand_in_share.mean(-1)[..., None], ranked.mean(2)), dim=-1)
    found: Tensor = layer.memory[name]
    return found


def attend_budgets(view: View, budgets: Budgets | None, clustering: Clustering, rows: int = ROWS) -> Answer:
    """Routed attention, every head with rows of its own."""
    clusters = make_clusters(view, clustering)
    allowed: Tensor | float = budget_of(clustering, rows)
    if budgets is not None:
        book = view.layer.book
        if book is None:
            raise ValueError("layer must belong to a book to be given a budget, got one without")
        leaves = budgets.leaves(book, view.chunk, clustering, rows)[id(view.layer)]
        allowed = leaves[..., None] * (allowed / (rows // clustering.leaf))
    return read(view, clusters, choose(scores(view, clusters), clusters, allowed))
