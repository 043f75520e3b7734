"""`prescore records`: finished records of several runs, merged into one file or written as a table."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from prescore.bench.records import Record, RecordFileError, find_records, flat_rows, replacing

Paths = Annotated[list[Path], typer.Argument(exists=True, help="Record files, or directories with records.jsonl.")]


def command(
    paths: Paths,
    merged: Annotated[
        Path | None,
        typer.Option("--out", dir_okay=False, help="Write all into one new file, for --resume."),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option("--csv", dir_okay=False, help="Write a table, a line per method; - = print."),
    ] = None,
) -> None:
    """Count finished records, merge those of several runs, or write them as CSV.

    A row that is in several files counts once; the first file named has it.

    Example: prescore records runs/perplexity --out all.jsonl --csv all.csv

    Example: prescore records experiments/speed --csv -
    """
    records = find_records(paths)
    if merged is not None:
        if merged.exists():
            raise RecordFileError(f"--out must name a new file, got {merged}")
        with replacing(merged) as working:
            working.write_text("".join(f"{record.to_json()}\n" for record in records), encoding="utf-8")
    if table is not None:
        _write_csv(records, table)
    counts = Counter(record.command for record in records)
    words = ", ".join(f"{number} of {name}" for name, number in sorted(counts.items()))
    print(f"{len(records)} records: {words}", file=sys.stderr)


def _write_csv(records: Iterable[Record], path: Path) -> None:
    rows = [row for record in records for row in flat_rows(record)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if str(path) == "-":
        csv.DictWriter(sys.stdout, columns).writeheader()
        csv.DictWriter(sys.stdout, columns).writerows(rows)
        return
    with replacing(path) as working, working.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
