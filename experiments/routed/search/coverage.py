"""How often the error bar of `Routed(tolerance=...)` holds on saved attention inputs, and what it costs.

    python coverage.py HEADS [HEADS ...] [--tolerances 0.02 0.05 0.1] [--confidence 0.95] [--seeds 5]

HEADS are safetensors files with `query [1, Hq, N, D]`, `key` and `value [1, Hkv, N, D]` behind RoPE. The last
chunks of four prefixes between 4200 tokens and all of them are read as pieces of a prompt, which is what the
whole call does there, and compared with exact attention. One line per file and tolerance, over all queries and
seeds: the share over the tolerance (of all heads, and of the worst one), the median and the 95 % quantile of the
relative error, the mean error bar, rows met in all looks, and the shares of queries that looked again and that
read everything.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prescore import Routed, prescored_attention

PIECE = Routed().chunk_size
N_PREFIXES = 4
FIGURES = ("error_limit_mean", "rows_per_query", "read_further", "read_everything")


def piece_of(tensors: dict[str, Tensor], stop: int) -> list[Tensor]:
    """The last queries of a prefix, and its keys and values."""
    return [
        tensors["query"][:, :, stop - PIECE : stop],
        *(tensors[name][:, :, :stop] for name in ("key", "value")),
    ]


def errors_of(output: Tensor, piece: list[Tensor]) -> Tensor:
    """`[Hq, PIECE]`: relative errors against exact attention."""
    stop = piece[1].shape[2]
    seen = torch.arange(stop) <= torch.arange(stop - PIECE, stop)[:, None]
    exact = scaled_dot_product_attention(*piece, attn_mask=seen, enable_gqa=True)
    return (torch.linalg.vector_norm(output - exact, dim=-1) / torch.linalg.vector_norm(exact, dim=-1))[0]


def measure(tensors: dict[str, Tensor], config: Routed, seeds: int) -> tuple[Tensor, dict[str, float]]:
    """Errors `[Hq, ...]` of all queries looked at, and figures averaged over calls."""
    sinks = config.sinks
    stops = (torch.linspace(4200, tensors["key"].shape[2], N_PREFIXES).long() - sinks) // PIECE * PIECE + sinks
    errors, figures = [], dict.fromkeys(FIGURES, 0.0)
    for stop in stops.tolist():
        piece = piece_of(tensors, stop)
        for seed in range(seeds):
            output, aux = prescored_attention(*piece, config, is_causal=True, generator=seed, return_aux=True)
            errors.append(errors_of(output, piece))
            for name in FIGURES:
                figures[name] += aux.stats[name] / len(stops) / seeds
    return torch.cat(errors, dim=1), figures


def main() -> None:
    """Measure the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="+", type=Path)
    parser.add_argument("--tolerances", type=float, nargs="+", default=[0.02, 0.05, 0.1])
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=512)
    options = parser.parse_args()
    for path in options.heads:
        tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
        for tolerance in options.tolerances:
            config = Routed(rows=options.rows, tolerance=tolerance, confidence=options.confidence)
            errors, figures = measure(tensors, config, options.seeds)
            over = (errors > tolerance).float().mean(1)
            middle, most = torch.quantile(errors.flatten(), torch.tensor([0.5, 0.95])).tolist()
            shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
            print(  # noqa: T201
                f"{path.stem}, tolerance {tolerance}: over {over.mean():.2%}, worst head {int(over.argmax())} "
                f"{over.max():.2%}, error median {middle:.4f}, 95 % {most:.4f}, {shown}",
                flush=True,
            )


if __name__ == "__main__":
    main()
