"""How often the error bar of `Routed(tolerance=...)` holds on saved attention inputs, and what it costs.

    python coverage.py HEADS [HEADS ...] --to coverage.json [--tolerances 0.02 0.05] [--seeds 5] [--plot plot.png]

HEADS are safetensors files with `query [1, Hq, N, D]`, `key` and `value [1, Hkv, N, D]` behind RoPE, such as
`prescore speed --save-heads` writes. The last chunks of four prefixes between a quarter of the tokens and all of
them are read as pieces of a prompt, which is what the whole call does there, and compared with exact attention:
1024 positions of every head. One line per file and tolerance, over all positions and seeds: the share of queries
over the tolerance (of all heads, and of the worst one), the estimated and the true error of the head where each is
largest (root mean squares of queries that did not read everything), rows met in all looks, and the shares of
queries that read further and that read everything. The JSON file has the same by head. What is in it already is
not measured again: interrupt at will.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prescore import Routed, prescored_attention
from prescore.routed import error_bound as within

PIECE = Routed().chunk_size
FIRST = Routed().exact_until + 2 * PIECE
N_PREFIXES = 4
FIGURES = ("error_bound_mean", "keys_per_query", "refined", "read_all")
SHOWN = 100
"""Queries of each file in the plot."""


class Watched:
    """The bars of single queries, which `aux.stats` only averages; inside, `attend_within` is looked over."""

    def __enter__(self) -> list[within.Within]:
        found: list[within.Within] = []
        self._inner = inner = within.attend_within

        def watched(*given: object) -> within.Within:
            found.append(inner(*given))
            return found[-1]

        within.attend_within = watched
        return found

    def __exit__(self, *_: object) -> None:
        within.attend_within = self._inner


def pieces_of(tensors: dict[str, Tensor], sinks: int) -> list[tuple[list[Tensor], Tensor]]:
    """The last queries of some prefixes with their keys and values, and their exact outputs `[Hq, PIECE, D]`."""
    n_keys = tensors["key"].shape[2]
    stops = (torch.linspace(max(n_keys // 4, FIRST), n_keys, N_PREFIXES).long() - sinks) // PIECE * PIECE + sinks
    pieces = []
    for stop in stops.tolist():
        queries = tensors["query"][:, :, stop - PIECE : stop]
        piece = [queries, *(tensors[name][:, :, :stop] for name in ("key", "value"))]
        seen = torch.arange(stop) <= torch.arange(stop - PIECE, stop)[:, None]
        pieces.append((piece, scaled_dot_product_attention(*piece, attn_mask=seen, enable_gqa=True)[0]))
    return pieces


def measure(pieces: list[tuple[list[Tensor], Tensor]], config: Routed, seeds: int) -> dict[str, object]:
    """True errors, estimates and limits of all queries, `[Hq, ...]`, and figures averaged over calls."""
    errors, estimates, limits, figures = [], [], [], dict.fromkeys(FIGURES, 0.0)
    for piece, exact in pieces:
        for seed in range(seeds):
            with Watched() as bars:
                output, aux = prescored_attention(*piece, config, is_causal=True, generator=seed, return_aux=True)
            difference = torch.linalg.vector_norm(output[0] - exact, dim=-1)
            errors.append(difference / torch.linalg.vector_norm(exact, dim=-1))
            estimates.append(torch.cat([bar.error for bar in bars]).flatten(0, 1))
            limits.append(torch.cat([bar.limit for bar in bars]).flatten(0, 1))
            for name in FIGURES:
                figures[name] += aux.stats[name] / len(pieces) / seeds
    joined = [torch.cat(parts, dim=1) for parts in (errors, estimates, limits)]
    return {"errors": joined[0], "estimates": joined[1], "limits": joined[2], "figures": figures}


def summary(found: dict[str, object], tolerance: float) -> dict[str, object]:
    """What is kept of a measurement, and what a plot shows of it."""
    errors, estimates, limits = (found[name] for name in ("errors", "estimates", "limits"))
    over = (errors > tolerance).float().mean(1)
    sampled_only = limits <= tolerance
    each = (
        torch.where(sampled_only, errors, 0).square().sum(1),
        torch.where(sampled_only, estimates, 0).square().sum(1),
    )
    some = sampled_only.flatten().nonzero().squeeze(1)
    some = some[:: max(1, len(some) // SHOWN)]
    counts = sampled_only.sum(1).clamp_min(1)
    return {
        "queries": errors.numel(),
        "over": round(float(over.mean()), 5),
        "worst_head": int(over.argmax()),
        "worst_over": round(float(over.max()), 5),
        "over_by_head": [round(share, 5) for share in over.tolist()],
        "true_error_by_head": [round(float(part), 5) for part in (each[0] / counts).sqrt()],
        "estimated_error_by_head": [round(float(part), 5) for part in (each[1] / counts).sqrt()],
        **{name: round(value, 5) for name, value in found["figures"].items()},
        "shown": [
            [float(f"{part.flatten()[some][i]:.3g}") for part in (estimates, errors)] for i in range(len(some))
        ],
    }


def line_of(name: str, tolerance: str, kept: dict[str, object]) -> str:
    """One measurement as a line of a table."""
    true, estimated = (max(kept[f"{kind}_error_by_head"]) for kind in ("true", "estimated"))
    worst = f"{100 * kept['worst_over']:.2f} % ({kept['worst_head']})"
    return (
        f"| {name} | {tolerance} | {100 * kept['over']:.2f} % | {worst} | "
        f"{estimated:.4f} | {true:.4f} | {kept['keys_per_query']:.0f} | {100 * kept['refined']:.0f} % | "
        f"{100 * kept['read_all']:.1f} % |"
    )


def plot(results: dict[str, dict[str, dict[str, object]]], to: Path) -> None:
    """Estimated against true error of single queries, a panel for every tolerance."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    tolerances = sorted({tolerance for kept in results.values() for tolerance in kept}, key=float)
    figure, axes = plt.subplots(1, len(tolerances), figsize=(4.2 * len(tolerances), 4), squeeze=False)
    for axis, tolerance in zip(axes[0], tolerances, strict=True):
        for name, kept in results.items():
            shown = [pair for pair in kept.get(tolerance, {}).get("shown", []) if min(pair) > 0]
            if shown:
                axis.scatter(*zip(*shown, strict=True), s=2, alpha=0.5, linewidths=0, label=name)
        ends = [float(tolerance) / 200, float(tolerance) * 1.5]
        axis.plot(ends, ends, color="black", linewidth=0.8)
        axis.axhline(float(tolerance), color="black", linewidth=0.8, linestyle="--")
        axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=f"tolerance {tolerance}")
        axis.set(xlabel="estimated error", ylabel="true error")
    figure.tight_layout()
    figure.savefig(to, dpi=110)


def main() -> None:
    """Measure the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="*", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--tolerances", type=float, nargs="+", default=[0.02, 0.05, 0.1])
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    results = json.loads(options.to.read_text()) if options.to.exists() else {}
    for path in options.heads:
        name = f"{path.parent.name} {path.stem}"
        kept = results.setdefault(name, {})
        asked = [tolerance for tolerance in options.tolerances if f"{tolerance:g}" not in kept]
        if not asked:
            continue
        tensors = {key: tensor.float() for key, tensor in load_file(path).items()}
        pieces = pieces_of(tensors, Routed().sinks)
        for tolerance in asked:
            found = measure(pieces, Routed(tolerance=tolerance), options.seeds)
            kept[f"{tolerance:g}"] = summary(found, tolerance)
            options.to.write_text(json.dumps(results) + "\n")
    for name, kept in results.items():
        for tolerance, own in kept.items():
            print(line_of(name, tolerance, own), flush=True)  # noqa: T201
    if options.plot is not None:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
