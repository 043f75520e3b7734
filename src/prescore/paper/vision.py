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
    budgets = sorted({record.config["budget"] for record in records if record.config["method"] != "exact"})
    rows = [
        (f"paper: {name}", *(theirs.get(budget, MISSING) for budget in budgets), MISSING, MISSING)
        for name, theirs in printed.TOP_1.items()
    ]
    note = (
        f"{table.note}; the paper, of {printed.IMAGE_TOKENS} tokens, does not say whether its k-means keys are the"
    )
    return replace(table, rows=(*table.rows, *rows), note=f"{note} nearest ones or a sample")
