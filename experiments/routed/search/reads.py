"""What one query of a smooth head and one of a searching head read, as a picture.

    python reads.py HEADS_FOLDER --to reads.png [--position 12000] [--min-weight 0.000244140625] [--chunk-size 256]

HEADS_FOLDER holds `smooth.safetensors` and `retrieval.safetensors`: `query [1, Hq, N, D]`, `key` and `value
[1, Hkv, N, D]` after RoPE. Of the first file the query head with the median number of far keys read is drawn, of
the second the one with most. The reads are those of `prescore.routed.reference`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from prescore import Routed
from prescore.bench.plots import COLOURS, figure
from prescore.routed.layout import make_layout
from prescore.routed.reference import Reference, reference_attention

LEAST = 1e-8  # weights below are drawn there
PANELS = (("smooth", "A smooth head"), ("retrieval", "A searching head"))


def pick_head(
    path: Path, position: int, config: Routed, *, most: bool
) -> tuple[int, Reference, torch.Tensor, float]:
    """A query head, what its query at `position` reads, the exact weights, and its relative error."""
    tensors = {name: tensor.float()[0] for name, tensor in load_file(path).items()}
    group, heads = len(tensors["query"]) // len(tensors["key"]), []
    for number, query in enumerate(tensors["query"]):
        key, value = (tensors[name][number // group, : position + 1] for name in ("key", "value"))
        one = query[position : position + 1]
        reads = reference_attention(one, key, value, config, is_causal=True)
        exact = (one @ key.T * key.shape[-1] ** -0.5).softmax(1)
        error = float((reads.output - exact @ value).norm() / (exact @ value).norm())
        heads.append((number, reads, exact[0], error))
    heads.sort(key=lambda head: int(head[1].hits.sum()))
    return heads[-1 if most else len(heads) // 2]


def draw(axes: Any, reads: Reference, weights: torch.Tensor, config: Routed, title: str) -> None:
    """Weights by position: keys that are read are coloured, the others are grey."""
    layout = make_layout(1, len(weights), causal=True, config=config)
    position = torch.arange(len(weights))
    sinks = position < layout.sinks
    kinds = (
        ("not read", ~(reads.local[0] | reads.hits[0]), "#BBBBBB", 2),
        ("own and previous chunk", reads.local[0] & ~sinks, COLOURS[5], 3),
        ("sinks", sinks, COLOURS[3], 5),
        ("far keys read", reads.hits[0], COLOURS[0], 5),
    )
    for name, some, colour, size in kinds:
        label = f"{name} ({int(some.sum())} keys, {float(weights[some].sum()):.1%} of the weight)"
        drawn = weights[some].clamp_min(LEAST)
        axes.plot(position[some], drawn, ".", color=colour, markersize=size, label=label, rasterized=True)
    centroids = torch.exp(reads.centroid_logits[0] - reads.lse[0])
    start = torch.arange(len(centroids)) // layout.clusters_per_chunk * layout.chunk_size + layout.sinks
    label = (
        f"centroids ({len(centroids)}, {float(centroids.sum()):.1%}): height is the weight per key of a cluster"
    )
    height = (centroids / layout.cluster_size).clamp_min(LEAST)
    axes.hlines(height, start, start + layout.chunk_size, color=COLOURS[7], lw=1, label=label)
    axes.axhline(config.min_weight, color=COLOURS[1], lw=1, ls="--", label="min_weight")
    axes.set(title=title, yscale="log", ylim=(LEAST / 2, 1.5), ylabel="weight of a key")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def main() -> None:
    """Draw both queries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", type=Path)
    parser.add_argument("--to", type=Path, default=Path("reads.png"))
    parser.add_argument("--position", type=int, default=12000)
    parser.add_argument("--min-weight", type=float, default=Routed().min_weight)
    parser.add_argument("--chunk-size", type=int, default=Routed().chunk_size)
    options = parser.parse_args()
    config = Routed(min_weight=options.min_weight, chunk_size=options.chunk_size)
    with figure(options.to, (11.0, 6.0), nrows=2, sharex=True) as (_, panels):
        for axes, (name, title) in zip(panels, PANELS, strict=True):
            path, most = options.heads / f"{name}.safetensors", name == "retrieval"
            number, reads, weights, error = pick_head(path, options.position, config, most=most)
            draw(axes, reads, weights, config, f"{title} (file {name}, head {number}): output off by {error:.1%}")
            print(f"{name}: head {number}, {int(reads.hits.sum())} far keys read, error {error:.4f}")
        panels[-1].set(xlabel=f"position of the key; the query is at {options.position}")


if __name__ == "__main__":
    main()
