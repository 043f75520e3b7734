"""Errors of one layer's output when far rows are found by four-bit codes and centroids know their spread.

    python errors.py HEADS [HEADS ...] [--chunk 256] [--leaf 128] [--share 1024] [--reach 3.0]
    python errors.py HEADS --odd 0 --sink-part 1       # what was tried: no outlier keys, sinks counted in full,
    python errors.py HEADS --codes keys                # codes of the keys themselves,
    python errors.py HEADS --codes keys --limits 2     # a second limit from what the first one finds,
    python errors.py HEADS --lift 1                    # coded logits lifted by deviations of their own error

HEADS are safetensors files with `query [1, Hq, N, D]`, `key` and `value [1, Hkv, N, D]` behind RoPE. For 64
positions behind 4200 every far key is behind nodes, everything else is exact. Prints the relative squared error
(mean over heads, worst head), the share of far keys compared, and rows read. Without options it is what `Routed()`
does, whose `share` is twice its `rows`; `prescore.routed.reference` is the library's own definition. README.md says
what the parts are.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import softplus

from prescore.routed.tree import bisection_tree

SINKS = 16
MOST_GAIN, MOST_KNOWN_GAIN = 2.0, 4.0


def log_normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """The log of the normal distribution function, smoothly approximated, and its slope."""
    x = x.clamp(-4, 8)
    y = x * (1.5976 + 0.07056 * x * x)
    return -softplus(-y), torch.sigmoid(-y) * (1.5976 + 0.21168 * x * x)


def four_bits(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Keys as four-bit codes would give them back, and what a unit of each half of the dimensions is worth."""
    halves = keys.unflatten(-1, (2, -1))
    scale = halves.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 7.49
    return ((halves / scale).round().clamp(-8, 7) * scale).flatten(-2), scale.squeeze(-1)


def six_bits(queries: Tensor) -> Tensor:
    """Queries as six-bit codes would give them back."""
    scale = queries.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 31
    return (queries / scale).round() * scale


def coded_logits(q: Tensor, node: Tensor, members: Tensor, mean: Tensor, options: argparse.Namespace) -> Tensor:
    """`[G, P, M * L]`: logits of the nodes' keys by their codes.

    Args:
        q: `[G, P, D]` queries.
        node: `[G, P, M]` logits of the nodes' means.
        members: `[M, L, D]` keys.
        mean: `[M, D]`.
        options: `codes` and `lift`.
    """
    of_keys = options.codes == "keys"
    numbers, unit = four_bits((members if of_keys else members - mean[:, None]).flatten(0, 1))
    logits = six_bits(q) @ numbers.T
    if not of_keys:
        logits = logits + node.repeat_interleave(members.shape[1], -1)
    if options.lift:
        length = torch.linalg.vector_norm(q.unflatten(-1, (2, -1)), dim=-1)
        logits = logits + options.lift / 12**0.5 * (length @ unit.T)
    return logits


def one_head(
    query: Tensor, key: Tensor, value: Tensor, options: argparse.Namespace
) -> tuple[Tensor, Tensor, Tensor]:
    """Errors, shares of keys compared and rows of the query heads `[G, N, D]` of one key head."""
    n_keys, dim = key.shape
    position = torch.linspace(4200, n_keys - 1, 64).long()
    q = query[:, position] * dim**-0.5
    n_chunks = (n_keys - SINKS) // options.chunk
    levels = int(math.log2(options.chunk // options.leaf))
    order = bisection_tree(
        key[SINKS : SINKS + n_chunks * options.chunk].view(n_chunks, options.chunk, dim), levels
    )
    rows = (order + (torch.arange(n_chunks) * options.chunk + SINKS)[:, None]).view(-1, options.leaf)
    first_local = SINKS + ((position - SINKS) // options.chunk - 1) * options.chunk
    far = rows.amax(1)[None] < first_local[:, None]  # [P, M]
    logits = (q @ key.T).masked_fill(torch.arange(n_keys) > position[:, None], -math.inf)
    exact = logits.softmax(-1) @ value
    flat = rows.flatten()
    behind = torch.zeros(len(position), n_keys, dtype=torch.bool)
    behind[:, flat] = far.repeat_interleave(options.leaf, -1)
    near = logits.masked_fill(behind, -math.inf)
    counted = near + math.log(options.sink_part) * (torch.arange(n_keys) < SINKS)

    mean_key, mean_value = key[rows].mean(1), value[rows].mean(1)
    away, beside = key[rows] - mean_key[:, None], value[rows] - mean_value[:, None]
    share = far.to(q) / far.sum(-1, keepdim=True)
    covariance = torch.einsum("pm,mde->pde", share, away.transpose(1, 2) @ away / options.leaf)
    parallel_group = torch.einsum("pm,mde->pde", share, beside.transpose(1, 2) @ away / options.leaf)
    spread = torch.einsum("gpd,pde,gpe->gp", q, covariance, q).sqrt().clamp_min(1e-3)[..., None]
    drift = torch.einsum("pde,gpe->gpd", parallel_group, q)

    node = q @ mean_key.T
    gain = (0.5 * spread**2).clamp_max(options.known_gain)
    mass = (node + math.log(options.leaf) + gain).masked_fill(~far, -math.inf).logsumexp(-1)
    known = torch.logaddexp(counted.logsumexp(-1), mass)
    limit = (known - math.log(options.share))[..., None]
    searched = (node + options.reach * spread >= limit) & far
    odd = torch.zeros(rows.shape, dtype=torch.bool)
    odd.scatter_(1, away.square().sum(-1).topk(options.odd, dim=1).indices, True)
    compared = ((searched[..., None] | odd) & far[..., None]).flatten(-2)
    coded = coded_logits(q, node, key[rows], mean_key, options)
    read = compared & (coded >= limit)
    if options.limits == 2:
        found = coded.masked_fill(~read, -math.inf).logsumexp(-1)
        limit = torch.maximum(limit, (torch.logaddexp(known, found) - math.log(options.share))[..., None])
        read &= coded >= limit
    left = options.leaf - read.unflatten(-1, (-1, options.leaf)).sum(-1)
    beyond, slope = log_normal((limit - node) / spread - spread)
    within, _ = log_normal((limit - node) / spread)
    gain = (0.5 * spread**2 + beyond - within).clamp(-MOST_GAIN, MOST_GAIN)
    move = (1 - slope / spread).clamp(-1, 1)
    centroid = (node + gain + left.clamp_min(1e-9).log()).masked_fill(~far | (left == 0), -math.inf)
    weights = torch.cat((near, logits[..., flat].masked_fill(~read, -math.inf), centroid), -1).softmax(-1)
    local, found, stood = weights.split((n_keys, len(flat), len(rows)), -1)
    output = local @ value + found @ value[flat] + stood @ mean_value + (stood * move).sum(-1)[..., None] * drift
    error = (output - exact).square().sum((-1, -2)) / exact.square().sum((-1, -2))
    n_far = far.sum(-1).float().mean() * options.leaf
    return error, compared.sum(-1).float().mean(-1) / n_far, read.sum(-1).float().mean(-1)


def main() -> None:
    """Measure the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="+", type=Path)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--leaf", type=int, default=128)
    parser.add_argument("--share", type=float, default=1024.0)
    parser.add_argument("--reach", type=float, default=3.0)
    parser.add_argument("--odd", type=int, default=16)
    parser.add_argument("--sink-part", type=float, default=0.1)
    parser.add_argument("--codes", choices=("differences", "keys"), default="differences")
    parser.add_argument("--known-gain", type=float, default=MOST_KNOWN_GAIN)
    parser.add_argument("--limits", type=int, choices=(1, 2), default=1)
    parser.add_argument("--lift", type=float, default=0.0)
    options = parser.parse_args()
    for path in options.heads:
        tensors = {name: tensor.float()[0] for name, tensor in load_file(path).items()}
        groups = tensors["query"].unflatten(0, (tensors["key"].shape[0], -1))
        parts = [one_head(*head, options) for head in zip(groups, tensors["key"], tensors["value"], strict=True)]
        error, compared, rows = (torch.cat(figures) for figures in zip(*parts, strict=True))
        print(  # noqa: T201
            f"{path.stem}: error {error.mean():.5f}, worst head {error.max():.4f}, "
            f"keys compared {compared.mean():.3f}, rows {rows.mean():.0f}"
        )


if __name__ == "__main__":
    main()
