"""Markdown tables of docs/planted.md from the records beside this file, one for each claim: `python tables.py`."""

from __future__ import annotations

import sys
from pathlib import Path

from prescore.bench.planted.tables import claim_table, recall_settings, recall_table
from prescore.bench.records import read_records
from prescore.bench.tables import Table

CLAIMS = {
    "Lemmas 1 and 2, Theorem 1": ("Lemma 1", "Lemma 2", "Theorem 1", "(P1)", "(P2)"),
    "Theorem 2": ("Theorem 2",),
    "Appendix C": ("Appendix C",),
    "Corollary 1": ("Corollary 1",),
    "Claim 1": ("Claim 1",),
    "Appendix B": ("Appendix B",),
    "Appendix D": ("Appendix D",),
    "Universal set": ("rho", "universal set"),
}


def main(folder: Path) -> None:
    """Print a table for each claim, and the recall of every scorer."""
    records = read_records(folder / "records.jsonl")
    table = claim_table(records)
    for title, beginnings in CLAIMS.items():
        rows = tuple(row for row in table.rows if row[0].startswith(beginnings))
        columns = [column for column in range(len(table.columns)) if any(row[column] for row in rows)]
        names = tuple(table.columns[column] for column in columns)
        cells = tuple(tuple(row[column] for column in columns) for row in rows)
        print(Table(title, names, cells, left=4).to_markdown())  # noqa: T201
    for setting in recall_settings(records):
        print(recall_table(records, setting).to_markdown())  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
