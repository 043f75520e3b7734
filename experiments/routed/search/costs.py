"""What `Routed(tolerance=...)` costs on saved attention inputs: rows, and time over that of exact attention.

    python costs.py HEADS [HEADS ...] --to costs.json [--tolerances 0.02 0.05 0.1] [--repeats 5]

HEADS are safetensors files such as `prescore speed --save-heads` writes; whole calls, causal, float32, one thread.
Exact attention and every tolerance take turns in one process, and each ratio is the median over the turns, of
processor time: other work on the machine counts little. What is in the JSON file already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from prescore import Routed, exact_attention, prescored_attention


def timed(work: Callable[[], object]) -> tuple[float, object]:
    """Processor seconds, and the result."""
    begin = time.process_time()
    result = work()
    return time.process_time() - begin, result


def measure(tensors: list[Tensor], tolerances: list[float], repeats: int) -> dict[str, dict[str, float]]:
    """Ratios, rows and shares by tolerance; the first turn is not counted."""
    ratios: dict[float, list[float]] = {tolerance: [] for tolerance in tolerances}
    kept: dict[str, dict[str, float]] = {}
    for turn in range(repeats + 1):
        exact, _ = timed(lambda: exact_attention(*tensors, is_causal=True))
        for tolerance in tolerances:
            config = Routed(tolerance=tolerance)
            own, result = timed(
                lambda config=config: prescored_attention(*tensors, config, is_causal=True, return_aux=True)
            )
            stats = result[1].stats
            kept[f"{tolerance:g}"] = {
                "rows": round(stats["keys_per_query"], 1),
                "exact_rows": (tensors[1].shape[2] + 1) / 2,
                "read_all": round(stats["read_all"], 4),
            }
            if turn:
                ratios[tolerance].append(own / exact)
    for tolerance, own in ratios.items():
        kept[f"{tolerance:g}"] |= {
            "ratio": round(statistics.median(own), 3),
            "ratios": [round(ratio, 3) for ratio in own],
        }
    return kept


def line_of(name: str, kept: dict[str, dict[str, float]]) -> str:
    """One file as a line of a table."""
    some = [kept[tolerance] for tolerance in sorted(kept, key=float)]
    cells = (
        " / ".join(f"{own['ratio']:.2f}" for own in some),
        " / ".join(f"{own['rows']:.0f}" for own in some),
        " / ".join(f"{100 * own['read_all']:.0f}" for own in some) + " %",
    )
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Measure the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="*", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--tolerances", type=float, nargs="+", default=[0.02, 0.05, 0.1])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(options.to.read_text()) if options.to.exists() else {}
    for path in options.heads:
        name = f"{path.parent.name} {path.stem}"
        if name not in results:
            loaded = load_file(path)
            tensors = [loaded[part].float() for part in ("query", "key", "value")]
            results[name] = measure(tensors, options.tolerances, options.repeats)
            options.to.write_text(json.dumps(results) + "\n")
    for name, kept in results.items():
        print(line_of(name, kept), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
