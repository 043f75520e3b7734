"""Markdown tables of docs/vision.md from the records beside this file.

python experiments/vision/tables.py bars experiments/vision/bars
python experiments/vision/tables.py grid experiments/vision/grid-1000
python experiments/vision/tables.py against-leverage experiments/vision/grid-1000
python experiments/vision/tables.py coverage experiments/vision/coverage
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from prescore.bench.records import Record, read_records
from prescore.bench.tables import MISSING, Table

CLUSTERED = ("kmeans", "kmeans-farthest-sample", "kmeans-cluster-share", "kmeans-balanced", "kmedian")


def main(arguments: Sequence[str]) -> None:
    """Print one kind of table from some runs."""
    kind, *folders = arguments
    records = [record for folder in folders for record in read_records(Path(folder) / "records.jsonl")]
    if kind != "coverage":  # exact attention is in every other record
        records = [record for record in records if record.config["method"] != "exact"]
    print(TABLES[kind](records).to_markdown())  # noqa: T201


def bars(records: Sequence[Record]) -> Table:
    """Top-1 of every method and number of rows over seeds, beside exact attention."""
    rows = []
    for (method, n_rows), found in _grouped(records, "method", "rows").items():
        top1 = [record.results["top1"] for record in found]
        exact = found[0].results["top1_exact"]
        spread = f" ± {statistics.stdev(top1):.1f}" if len(top1) > 1 else ""
        mean = statistics.fmean(top1)
        others = [statistics.fmean(record.results[name] for record in found) for name in ("top5", "agreement")]
        worst = exact - min(top1)
        cells = [method, n_rows, f"{mean:.1f}{spread}", f"{exact - mean:.1f}", f"{worst:.1f}"]
        rows.append((*map(str, cells), *(f"{value:.1f}" for value in others), str(len(top1))))
    columns = ("method", "rows", "top-1", "lost", "lost, worst seed", "top-5", "same answer as exact", "seeds")
    return Table("Against exact attention", columns, tuple(rows))


def grid(records: Sequence[Record]) -> Table:
    """Top-1 by method and clusters; for every number of rows, class token protected / free."""
    sizes = sorted({record.config["rows"] for record in records})
    found = {_cell(record): record.results["top1"] for record in records if record.seed == 0}
    names = dict.fromkeys((r.config["method"], r.config["clusters"]) for r in records)
    rows = []
    for method, clusters in sorted(names, key=lambda name: (name[0], name[1] or 0)):
        cells = [method, str(clusters or "")]
        for size in sizes:
            pair = [found.get((method, clusters, size, protect)) for protect in (True, False)]
            cells.append(" / ".join(MISSING if value is None else f"{value:.1f}" for value in pair))
        rows.append(tuple(cells))
    exact = records[0].results["top1_exact"]
    columns = ("method", "clusters", *map(str, sizes))
    return Table(f"Top-1, protected / free; exact {exact:.1f}", columns, tuple(rows))


def against_leverage(records: Sequence[Record]) -> Table:
    """Top-1 of every clustering rule less that of leverage scores at the same rows, protected / free."""
    found = {_cell(record): record.results["top1"] for record in records if record.seed == 0}
    sizes = sorted({record.config["rows"] for record in records})
    clusters = sorted({r.config["clusters"] for r in records if r.config["clusters"]})
    rows = []
    for method in CLUSTERED:
        for count in clusters:
            cells, won, of = [method, str(count)], 0, 0
            for size in sizes:
                pair = []
                for protect in (True, False):
                    own = found.get((method, count, size, protect))
                    other = found.get(("leverage", None, size, protect))
                    known = own is not None and other is not None
                    pair.append(f"{own - other:+.1f}" if known else MISSING)
                    won, of = won + (known and own > other), of + known
                cells.append(" / ".join(pair))
            rows.append((*cells, f"{won} of {of}"))
    return Table("Points ahead of leverage", ("rule", "clusters", *map(str, sizes), "wins"), tuple(rows))


def coverage(records: Sequence[Record]) -> Table:
    """Share of heavy entries kept, mean (median), and of the heaviest columns, beside chance."""
    rows = []
    for record in records:
        config, figures = record.config, record.results
        cells = [config["method"], str(config["clusters"]), str(config["rows"]), f"{figures['chance']:.2f}"]
        for eps in config["thresholds"]:
            cells.append(f"{figures[f'heavy_{eps}_mean']:.2f} ({figures[f'heavy_{eps}_median']:.2f})")
        rows.append((*cells, f"{figures['columns_mean']:.2f} ({figures['columns_median']:.2f})"))
    heavy = tuple(f"> {eps}" for eps in records[0].config["thresholds"])
    return Table("Coverage", ("method", "clusters", "keys", "chance", *heavy, "heaviest columns"), tuple(rows))


def _cell(record: Record) -> tuple[str, int | None, int, bool]:
    config = record.config
    return config["method"], config["clusters"], config["rows"], config["protect"]


def _grouped(records: Iterable[Record], *names: str) -> dict[tuple[object, ...], list[Record]]:
    groups: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[tuple(record.config[name] for name in names)].append(record)
    return groups


TABLES = {"bars": bars, "grid": grid, "against-leverage": against_leverage, "coverage": coverage}

if __name__ == "__main__":
    main(sys.argv[1:])
