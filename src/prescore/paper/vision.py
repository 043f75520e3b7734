"""Table 2 and Appendix E: the paper's top-1 beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prescore.bench.records import Record
from prescore.bench.tables import MISSING, Table
from prescore.bench.vision.tables import accuracy_table
from prescore.paper import printed

METHODS = {
    "table2": (
        *("exact", "kmeans", "published", "kmeans-farthest-sample", "kmeans-cluster-share", "kmeans-balanced"),
        *("kmedian", "kmedian-farthest-sample", "random", "key-diff", "key-diff+centroids", "centroids"),
    ),
    "appendix-e": ("exact", "leverage", "key-norm", "random"),
}
"""What each item measures: the paper's grid and ours, and the two scores of Appendix E."""
QUICK_METHODS = {
    "table2": ("exact", "kmeans", "kmeans-farthest-sample", "published", "random"),
    "appendix-e": METHODS["appendix-e"],
}


def beside_published(records: Sequence[Record]) -> Table:
    """Top-1 by budget with the paper's rows below; budgets of another number of tokens cannot be compared."""
    table = accuracy_table(records)
    known = {budget for theirs in printed.TOP_1.values() for budget in theirs}
    budgets = sorted({*known, *map(int, table.columns[1:-2])})
    columns = (table.columns[0], *map(str, budgets), *table.columns[-2:])
    by_column = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    rows = [tuple(row.get(column, MISSING) for column in columns) for row in by_column]
    for name, theirs in printed.TOP_1.items():
        cells = (theirs.get(budget, MISSING) for budget in budgets)
        rows.append((f"paper: {name}", *cells, MISSING, MISSING))
    note = f"{table.note}; the paper ({printed.IMAGE_TOKENS} tokens) does not say whether its k-means keys are"
    return replace(table, columns=columns, rows=tuple(rows), note=f"{note} the nearest ones or a sample")
