"""What one query of a smooth head and one of a searching head read, as a picture.

    python reads.py HEADS_FOLDER --to reads.png [--position 12000] [--rows 512] [--chunk 256]

HEADS_FOLDER holds `smooth.safetensors` and `retrieval.safetensors`: `query [1, Hq, N, D]`, `key` and `value [1,
Hkv, N, D]` behind RoPE. Of the first the query head with the median number of rows read is drawn, of the second
the one with most. What is read comes from the library itself (`prescore.routed`), and the query's output is
compared with that of `prescored_attention`, so that the picture cannot show anything else than the default does.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from prescore import Routed, prescored_attention
from prescore.bench.plots import COLOURS, figure
from prescore.routed.reference import Seen, find_rows, limit_of, row_sums, scores_of, weigh
from prescore.routed.attention import search_of
from prescore.routed.layout import make_layout
from prescore.routed.index import build_nodes

LEAST = 1e-8  # weights below are drawn there
PANELS = (("smooth", "A smooth head"), ("retrieval", "A searching head"))


class Reads(NamedTuple):
    """One query of one head.

    Attributes:
        weights: `[N]` of exact attention.
        near: Positions of the own and the previous chunk.
        sinks: How many first positions are read.
        found: `[R]` positions read because of their codes.
        nodes: `[M]` first positions of the chunks that nodes belong to.
        stood: `[M]` weight of each centroid, for one of the keys it carries.
        carried: Weight of all centroids together.
        limit: The weight from which on a key is read.
        compared: Share of the far keys whose codes were compared.
        error: Relative error of the output.
    """

    weights: Tensor
    near: slice
    sinks: int
    found: Tensor
    nodes: Tensor
    stood: Tensor
    carried: float
    limit: float
    compared: float
    error: float


def read_by(query: Tensor, key: Tensor, value: Tensor, config: Routed) -> Reads:
    """What the last position reads; `query [D]`, keys and values `[N, D]` up to and with it."""
    n_keys, scale = len(key), key.shape[-1] ** -0.5
    layout = make_layout(1, n_keys, causal=True, config=config)
    nodes = build_nodes(key[None], value[None], layout, layout.sinks, layout.n_chunks)
    near = slice(layout.sinks + layout.n_chunks * layout.chunk, n_keys)
    asked = (query * scale)[None]
    logits = (asked @ key.T)[0]
    elsewhere = logits[near].logsumexp(0)[None]
    seen = Seen(
        key,
        value,
        key[: layout.sinks],
        value[: layout.sinks],
        nodes.key[0],
        nodes.value[0],
        nodes.rows[0],
        type(nodes.codes)(*(part[0] for part in nodes.codes)),
        nodes.spread[0].mean(0),
        nodes.drift[0].mean(0),
    )
    search, scores = search_of(config), scores_of(asked, seen)
    limit = limit_of(scores, seen, search, elsewhere)
    found = find_rows(asked, seen, search, scores, limit)
    weighed = weigh(asked, seen, scores, limit, found, key[found.row])
    lse = torch.cat((elsewhere, weighed.columns[0], weighed.rows)).logsumexp(0)
    total, _ = row_sums(weighed, lse[None], seen, found, value[found.row], None)
    output = total[0] + torch.exp(logits[near] - lse) @ value[near]
    whole = prescored_attention(*(t[None, None] for t in (query[None], key, value)), config, is_causal=True)
    torch.testing.assert_close(output, whole[0, 0, 0], rtol=1e-3, atol=1e-4)
    exact = logits.softmax(0)
    error = torch.linalg.vector_norm(output - exact @ value) / torch.linalg.vector_norm(exact @ value)
    left = (layout.leaf - found.hits[0]).clamp_min(1)
    stood = torch.exp(weighed.columns[0, layout.sinks :] - lse)
    return Reads(
        weights=exact,
        near=near,
        sinks=layout.sinks,
        found=found.row,
        nodes=nodes.rows[0].amin(1).sub(layout.sinks) // layout.chunk * layout.chunk + layout.sinks,
        stood=stood / left,
        carried=float(stood.sum()),
        limit=float(torch.exp(limit[0] - lse)),
        compared=float(found.n_searched) / nodes.rows.numel(),
        error=float(error),
    )


def head_of(path: Path, position: int, config: Routed, *, most: bool) -> tuple[int, Reads]:
    """The query head with most rows read at a position, or with the median number of them."""
    tensors = {name: tensor.float()[0] for name, tensor in load_file(path).items()}
    group = len(tensors["query"]) // len(tensors["key"])
    heads = []
    for number, query in enumerate(tensors["query"]):
        key, value = (tensors[name][number // group, : position + 1] for name in ("key", "value"))
        heads.append((number, read_by(query[position], key, value, config)))
    heads.sort(key=lambda head: len(head[1].found))
    return heads[-1 if most else len(heads) // 2]


def draw(axes: Any, reads: Reads, title: str, chunk: int) -> None:
    """Weights by position: what is read is coloured, what is not is grey."""
    weights, position = reads.weights.clamp_min(LEAST), torch.arange(len(reads.weights))
    read = torch.zeros(len(weights), dtype=torch.bool)
    read[: reads.sinks] = read[reads.near] = read[reads.found] = True
    unread = f"not read ({int((~read).sum())} keys, {float(reads.weights[~read].sum()):.1%} of the weight)"
    axes.plot(position[~read], weights[~read], ".", color="#BBBBBB", markersize=2, label=unread, rasterized=True)
    kinds = (
        ("own and previous chunk", position[reads.near], COLOURS[5], 3),
        ("first positions", position[: reads.sinks], COLOURS[3], 5),
        ("found by their codes", reads.found, COLOURS[0], 5),
    )
    for name, some, colour, size in kinds:
        label = f"{name} ({len(some)} keys, {float(reads.weights[some].sum()):.1%})"
        axes.plot(some, weights[some], ".", color=colour, markersize=size, label=label, rasterized=True)
    label = f"centroids ({len(reads.stood)}, claim {reads.carried:.1%}): height is one key's share"
    axes.hlines(
        reads.stood.clamp_min(LEAST), reads.nodes, reads.nodes + chunk, color=COLOURS[7], lw=1, label=label
    )
    axes.axhline(reads.limit, color=COLOURS[1], lw=1, ls="--", label="limit from which on keys are read")
    about = f"{reads.compared:.0%} of the far keys compared, output off by {reads.error:.1%}"
    axes.set(title=f"{title}: {about}", yscale="log", ylim=(LEAST / 2, 1.5), ylabel="weight of a key")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def main() -> None:
    """Draw both queries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", type=Path)
    parser.add_argument("--to", type=Path, default=Path("reads.png"))
    parser.add_argument("--position", type=int, default=12000)
    parser.add_argument("--rows", type=int, default=Routed().rows)
    parser.add_argument("--chunk", type=int, default=Routed().chunk_size)
    options = parser.parse_args()
    config = Routed(min_weight=1 / (2 * options).rows, chunk_size=options.chunk)
    with figure(options.to, (11.0, 6.0), nrows=2, sharex=True) as (_, panels):
        for axes, (name, title) in zip(panels, PANELS, strict=True):
            number, reads = head_of(
                options.heads / f"{name}.safetensors", options.position, config, most=name == "retrieval"
            )
            draw(axes, reads, f"{title} (file {name}, head {number})", config.chunk_size)
            print(f"{name}: head {number}, {len(reads.found)} rows found, error {reads.error:.4f}")  # noqa: T201
        panels[-1].set(xlabel=f"position of the key; the query is at {options.position}")


if __name__ == "__main__":
    main()
