r"""(b) Processor time of choosing leaves and attending inside them, each causal way in the form that suits it.

    python experiments/routed/studies/ways_time.py --cache DIR --out DIR

One chunk of 512 queries at the end of each captured layer, all heads, one thread, plain torch; the scores of the
queries themselves are not counted: every way needs them for its centroids. Results are checked against dense masks
before they are timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from clusters import Clustering, Clusters, make_clusters
from scene import CHUNK, SINKS, Book, Layer, View
from torch import Tensor

from prescore.routed.tree import bisection_tree, tree_levels
from prescore.bench.records import RecordFile
from prescore.bench.records import Row, measure, row_key
from routed import ROWS, scores

COMMAND = "routed-ways-time"
TILE = 64
GROUP = 32
REPEATS = 7


@dataclass(frozen=True, eq=False)
class Leaves:
    """Members side by side: `key [Hkv * M, L, D]`, `value`, and how many leaves a query reads."""

    key: Tensor
    value: Tensor
    per_head: int
    n_chosen: int


def gather_leaves(view: View, clusters: Clusters, n_chosen: int) -> Leaves:
    """Equal leaves only: runs of whole powers of two chunks."""
    size = int(clusters.count.max())
    if not bool((clusters.count == size).all()):
        raise ValueError(f"leaves must be equal to be timed, got sizes {clusters.count.unique().tolist()}")
    order = clusters.labels.argsort(dim=-1, stable=True)[:, -size * clusters.count.shape[1] :, None]
    key, value = (
        points[:, view.far].gather(1, order.expand(-1, -1, points.shape[-1])).reshape(-1, size, points.shape[-1])
        for points in (view.layer.key, view.layer.value)
    )
    return Leaves(key, value, clusters.count.shape[1], n_chosen)


def dispatch(units: Tensor, chosen: Tensor, leaves: Leaves) -> Tensor:
    """Units `[U, g, D]` of queries that share their leaves `[U, k]`: pairs sorted by leaf fill tiles."""
    n_units, shared, dim = units.shape
    tile = max(1, TILE // shared)
    leaf, order = chosen.flatten().sort(stable=True)
    count = torch.bincount(leaf, minlength=len(leaves.key))
    tiles = -(-count // tile)
    first = count.cumsum(0) - count
    owner = torch.repeat_interleave(torch.arange(len(count)), tiles)
    number = torch.arange(len(owner)) - (tiles.cumsum(0) - tiles)[owner]
    slot = number[:, None] * tile + torch.arange(tile)
    filled = slot < count[owner][:, None]
    pair = order[(first[owner][:, None] + slot).clamp_max(len(order) - 1)]
    query = units[pair // chosen.shape[1]].view(len(owner), tile * shared, dim)
    logits = query @ leaves.key[owner].transpose(1, 2)
    peak = logits.amax(-1, keepdim=True)
    weights = (logits - peak).exp_()
    total = weights.sum(-1, keepdim=True)
    found = torch.cat((weights @ leaves.value[owner] / total, total.log_() + peak), dim=-1)
    found = found.view(len(owner), tile, shared, dim + 1)
    back = found.new_empty(n_units * chosen.shape[1], shared, dim + 1)
    back[pair[filled]] = found[filled]
    back = back.view(n_units, chosen.shape[1], shared, dim + 1)
    return (back[..., :dim] * back[..., dim:].softmax(1)).sum(1)


def own(view: View, clusters: Clusters, liking: Tensor, leaves: Leaves) -> Tensor:
    """Every query for itself: pairs of one query and one leaf."""
    chosen = liking.topk(leaves.n_chosen, dim=-1).indices + _first_leaf(liking, leaves)
    return dispatch(view.query.reshape(-1, 1, view.query.shape[-1]), chosen.flatten(0, 2), leaves)


def heads(view: View, clusters: Clusters, liking: Tensor, leaves: Leaves) -> Tensor:
    """Query heads of a KV head: pairs of one position with all its heads and one leaf."""
    wanted = liking.softmax(-1).sum(1)
    chosen = wanted.topk(leaves.n_chosen, dim=-1).indices + _first_leaf(liking, leaves)[:, 0]
    units = view.query.transpose(1, 2).flatten(0, 1)  # [Hkv * P, G, D]
    found = dispatch(units, chosen.flatten(0, 1), leaves)
    return found.view(len(view.query), -1, *found.shape[1:]).transpose(1, 2)


def groups(view: View, clusters: Clusters, liking: Tensor, leaves: Leaves) -> Tensor:
    """Groups of past queries: each group's leaves gathered once per tile of its new queries, dense inside."""
    begin = SINKS + (view.chunk - 1) * CHUNK
    past = view.layer.query[:, :, begin : begin + CHUNK].contiguous()
    levels = tree_levels(CHUNK, GROUP)
    past = past.gather(2, bisection_tree(past, levels)[..., None].expand_as(past))
    shares = (past @ clusters.key[:, None].transpose(-1, -2) + clusters.count.log()[:, None, None]).softmax(-1)
    wanted = shares.unflatten(2, (1 << levels, -1)).sum(3)
    chosen = (wanted.topk(leaves.n_chosen, dim=-1).indices + _first_leaf(liking, leaves)).flatten(0, 2)
    means = past.unflatten(2, (1 << levels, -1)).mean(3)
    nearest = torch.cdist(view.query, means).argmin(-1).flatten(0, 1)  # [heads, P]
    nearest = nearest + torch.arange(len(nearest))[:, None] * (1 << levels)
    group, order = nearest.flatten().sort(stable=True)
    count = torch.bincount(group, minlength=len(chosen))
    tiles = -(-count // GROUP)
    owner = torch.repeat_interleave(torch.arange(len(count)), tiles)
    number = torch.arange(len(owner)) - (tiles.cumsum(0) - tiles)[owner]
    slot = number[:, None] * GROUP + torch.arange(GROUP)
    filled = slot < count[owner][:, None]
    place = order[((count.cumsum(0) - count)[owner][:, None] + slot).clamp_max(len(order) - 1)]
    dim = view.query.shape[-1]
    query = view.query.reshape(-1, dim)
    key, value = (points[chosen[owner]].flatten(1, 2) for points in (leaves.key, leaves.value))
    found = (query[place] @ key.transpose(1, 2)).softmax(-1) @ value
    back = torch.empty_like(query)
    back[place[filled]] = found[filled]
    return back


WAYS: dict[str, Callable[[View, Clusters, Tensor, Leaves], Tensor]] = {
    "every query for itself": own,
    "query heads of a KV head": heads,
    "groups of 32 past queries, each head": groups,
}


def _first_leaf(liking: Tensor, leaves: Leaves) -> Tensor:
    return (torch.arange(len(liking)) * leaves.per_head)[:, None, None, None]


def _checked(way: str, view: View, clusters: Clusters, found: Tensor, leaf: int) -> None:
    """Compare with a dense softmax over the far members of the leaves that `ways.py` chooses."""
    from ways import Way

    from routed import choose

    kinds = dict(zip(WAYS, (Way(), Way("heads"), Way("groups", GROUP)), strict=True))
    chosen = choose(kinds[way].liking(view, clusters), clusters, ROWS // leaf * (leaf - 1))
    logits = view.logits[..., view.far].masked_fill(~clusters.spread(chosen, False), -torch.inf)
    dense = logits.softmax(-1) @ view.layer.value[:, None, view.far]
    off = float((found.reshape(dense.shape) - dense).abs().max())
    if off > 1e-3:  # float32 sums in another order
        raise ValueError(f"{way} must agree with dense masks before it is timed, got a difference of {off}")


@torch.no_grad()
def seconds(layer: Layer, chunk: int, way: str, leaf: int) -> dict[str, Any]:
    """Least processor time of some repeats, in milliseconds for a chunk."""
    view = View(layer, chunk, torch.arange(CHUNK) + SINKS + chunk * CHUNK)
    clusters = make_clusters(view, Clustering(leaf=leaf, singles=1 / leaf))  # as many as keep leaves equal
    leaves = gather_leaves(view, clusters, ROWS // leaf)
    liking = scores(view, clusters)
    _checked(way, view, clusters, WAYS[way](view, clusters, liking, leaves), leaf)
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        WAYS[way](view, clusters, liking, leaves)
        times.append(time.process_time() - begin)
    return {"milliseconds": round(min(times) * 1e3, 2)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Time every way on every layer of the first captured book."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    book = Book.load(sorted(options.cache.glob("*.pt"))[0])
    records = RecordFile(options.out / "ways-time.jsonl", resume=True)
    for number, layer in book.layers.items():
        chunk = (layer.key.shape[1] - SINKS) // CHUNK - 1
        for leaf in (128, 64):
            if leaf == 64 and number != next(iter(book.layers)):
                continue  # sizes decide, not the layer
            for way in WAYS:
                config = {"way": way, "leaf": leaf, "layer": number, "chunk": chunk, "book": book.name}
                row = Row(config, None, lambda w=way, y=layer, c=chunk, f=leaf: seconds(y, c, w, f))
                if row_key(COMMAND, row.config, row.seed) not in records:
                    record = measure(COMMAND, row, threads=1)
                    records.append(record)
                    print(config, record.results, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
