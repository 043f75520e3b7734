"""Markdown tables of docs/vision.md from the records beside this file: all of them, or those of some folders.

python experiments/vision/tables.py
python experiments/vision/tables.py bars experiments/vision/bars
python experiments/vision/tables.py grid experiments/vision/grid-1000
python experiments/vision/tables.py against-leverage experiments/vision/grid-1000
python experiments/vision/tables.py coverage experiments/vision/coverage
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from prescore.bench.records import Record, read_records
from prescore.bench.tables import MISSING, Table
from prescore.bench.vision.tables import PUBLISHED_COVERAGE

CLUSTERED = ("kmeans", "published", "kmeans-farthest-sample", "kmeans-cluster-share", "kmeans-balanced", "kmedian")

Cell = tuple[str, int | None, int, bool]
"""Method, clusters, budget, and whether the class token is protected."""


def main(arguments: Sequence[str]) -> int:
    """Print one kind of table from some runs, or all of the page; returns the exit code."""
    if not arguments:
        return max(main([kind, str(Path(__file__).parent / folder)]) for kind, folder in PAGE)
    kind, *folders = arguments
    if not folders or kind not in TABLES:
        print(f"usage: tables.py [{'|'.join(TABLES)} FOLDER...], got {' '.join(arguments)}", file=sys.stderr)  # noqa: T201
        return 2
    records = [record for folder in folders for record in read_records(Path(folder) / "records.jsonl")]
    # every other record holds the accuracy of exact attention
    records = [record for record in records if record.config["method"] != "exact"]
    print(TABLES[kind](records).to_markdown())  # noqa: T201
    return 0


def bars(records: Sequence[Record]) -> Table:
    """Top-1 of every method and budget over seeds, beside exact attention."""
    groups: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in records:
        groups[record.config["method"], record.config["budget"]].append(record)
    rows = []
    for (method, budget), group in groups.items():
        top1 = [record.results["top1"] for record in group]
        exact, mean = group[0].results["top1_exact"], statistics.fmean(top1)
        spread = f" ± {statistics.stdev(top1):.1f}" if len(top1) > 1 else ""
        others = [statistics.fmean(record.results[name] for record in group) for name in ("top5", "agreement")]
        numbers = (exact - mean, exact - min(top1), *others)
        rows.append((method, str(budget), f"{mean:.1f}{spread}", *(f"{n:.1f}" for n in numbers), str(len(top1))))
    columns = ("method", "budget", "top-1", "lost", "lost, worst seed", "top-5", "same answer as exact", "seeds")
    return Table("Against exact attention", columns, tuple(rows))


def grid(records: Sequence[Record]) -> Table:
    """Top-1 by method and clusters; for every budget, class token protected / free."""
    top1, budgets = _top1(records)
    rows = []
    for method, clusters in sorted({cell[:2] for cell in top1}, key=lambda name: (name[0], name[1] or 0)):
        found = [[top1.get((method, clusters, budget, keep)) for keep in (True, False)] for budget in budgets]
        rows.append((method, str(clusters or ""), *(_both(pair, ".1f") for pair in found)))
    exact = records[0].results["top1_exact"]
    columns = ("method", "clusters", *map(str, budgets))
    return Table(f"Top-1, protected / free; exact {exact:.1f}", columns, tuple(rows))


def against_leverage(records: Sequence[Record]) -> Table:
    """Top-1 of every clustering rule minus that of leverage scores at the same budget, protected / free."""
    top1, budgets = _top1(records)
    rows = []
    for method in CLUSTERED:
        for clusters in sorted({cell[1] for cell in top1 if cell[1]}):
            gains: dict[tuple[int, bool], float] = {}
            for budget in budgets:
                for keep in (True, False):
                    ours, theirs = (method, clusters, budget, keep), ("leverage", None, budget, keep)
                    if ours in top1 and theirs in top1:
                        gains[budget, keep] = top1[ours] - top1[theirs]
            if not gains:
                continue
            cells = [_both([gains.get((budget, keep)) for keep in (True, False)], "+.1f") for budget in budgets]
            wins = sum(gain > 0 for gain in gains.values())
            rows.append((method, str(clusters), *cells, f"{wins} of {len(gains)}"))
    return Table("Points ahead of leverage", ("rule", "clusters", *map(str, budgets), "wins"), tuple(rows))


def coverage(records: Sequence[Record]) -> Table:
    """Share of heavy entries on selected keys, mean (median), and of the heaviest columns, beside chance."""
    thresholds = records[0].config["thresholds"]
    names = [f"heavy_{eps}" for eps in thresholds]
    rows = []
    for record in records:
        config, results = record.config, record.results
        shares = [f"{results[f'{name}_mean']:.2f} ({results[f'{name}_median']:.2f})" for name in names]
        shares.append(" / ".join(f"{results[f'columns_{eps}_mean']:.2f}" for eps in thresholds))
        cells = (config["method"], str(config["n_clusters"] or ""), str(config["budget"]))
        rows.append((*cells, f"{results['chance']:.2f}", *shares))
        printed = PUBLISHED_COVERAGE.get((config["method"], config["budget"]))
        if printed:
            name = f"paper: {config['method']}, ViT-B/16"
            rows.append(
                (
                    name,
                    "",
                    cells[2],
                    "",
                    *(f"({float(share) / 100:.2f})" for share in printed[:3]),
                    f"{float(printed[3]) / 100:.2f}",
                )
            )
    heavy = tuple(f"> {eps}" for eps in thresholds)
    return Table("Coverage", ("method", "clusters", "keys", "chance", *heavy, "heaviest columns"), tuple(rows))


def _top1(records: Sequence[Record]) -> tuple[dict[Cell, float], list[int]]:
    """Top-1 of the first seed by cell, and the budgets."""
    top1 = {}
    for record in records:
        config = record.config
        if record.seed == 0:
            cell = config["method"], config["n_clusters"], config["budget"], config["keep_prefix"]
            top1[cell] = record.results["top1"]
    return top1, sorted({record.config["budget"] for record in records})


def _both(values: Sequence[float | None], form: str) -> str:
    """Class token protected / free, those that were measured."""
    return " / ".join(format(value, form) for value in values if value is not None) or MISSING


TABLES = {"bars": bars, "grid": grid, "against-leverage": against_leverage, "coverage": coverage}
PAGE = [
    ("bars", "bars"),
    *((kind, folder) for kind in ("grid", "against-leverage") for folder in ("grid-1000", "grid-500-free")),
    ("grid", "tokens-577"),
    ("coverage", "coverage"),
]
"""The tables of docs/vision.md."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
