"""Markdown tables of docs/reproducing.md and docs/methods.md from the records beside this file."""

from __future__ import annotations

from pathlib import Path

from prescore.bench.records import Record, read_records
from prescore.bench.tables import MISSING, Table

FOLDER = Path(__file__).parent
METHODS = {
    "hyper": "HyperAttention",
    "paper:kmeans": "k-means + Hyper",
    "paper:kmedian": "k-median + Hyper",
    "paper:leverage": "leverage + Hyper",
    "default": "default",
}


def lengths(records: list[Record]) -> Table:
    """Exact time over method time, by mask, pass and length; rows that were run apart are one line."""
    found: dict[tuple[bool, bool, int, int], dict[str, str]] = {}
    for record in records:
        config, methods = record.config, record.results["methods"]
        own = found.setdefault((not config["causal"], config["backward"], config["n"], config["heads"]), {})
        own.setdefault("exact", f"{methods['exact']['seconds']:.2f} s")
        own |= {name: f"{methods[name]['speedup']:.1f}x" for name in config["methods"]}
    rows = []
    for (is_full, backward, n, heads), own in sorted(found.items()):
        kind = f"{'full' if is_full else 'causal'}, {'forward + backward' if backward else 'forward'}"
        rows.append((kind, f"{n:,}", str(heads), own["exact"], *(own.get(name, MISSING) for name in METHODS)))
    columns = ("mask and pass", "tokens", "heads", "exact attention", *METHODS.values())
    return Table("Exact time / method time", columns, tuple(rows))


def scoring(records: list[Record]) -> Table:
    """Milliseconds of scorers alone, and their share of exact attention without a causal mask."""
    (record,) = [record for record in records if record.config["study"] == "scoring"]
    methods = record.results["methods"]
    rows = []
    for name, own in methods.items():
        share = 100 * own["seconds"] / methods["exact"]["seconds"]
        rows.append((name, f"{1000 * own['seconds']:.0f} ms", f"{share:.1f} %"))
    return Table("Scoring alone", ("scorer", "time", "share of exact attention"), tuple(rows))


def settings(records: list[Record], study: str, field: str) -> Table:
    """Milliseconds of the paper's preset against one of its settings."""
    own = [record for record in records if record.config["study"] == study]
    times = [record.results["methods"]["paper:kmeans"]["seconds"] for record in own]
    columns = (study, *(str(record.config[field]) for record in own))
    return Table(study, columns, (("time", *(f"{1000 * spent:.0f} ms" for spent in times)),))


if __name__ == "__main__":
    alone = read_records(FOLDER / "scoring" / "records.jsonl")
    print(lengths(read_records(FOLDER / "long" / "records.jsonl")).to_markdown())  # noqa: T201
    print(scoring(alone).to_markdown())  # noqa: T201
    for table in (settings(alone, "top-k", "top_k"), settings(alone, "clusters", "n_clusters")):
        print(table.to_markdown())  # noqa: T201
