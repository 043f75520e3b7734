r"""Measure the studies: output errors on captured layers, one record per variant, resumed where it stopped.

    python experiments/routed/studies/run.py --cache DIR --out DIR                  # all of them
    python experiments/routed/studies/run.py --cache DIR --out DIR grid singles     # some

`capture.py` fills the cache first. `report.py` makes tables and pictures of the records.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

import torch
from scene import Book
from variant import Variant, study_row

from prescore.bench.records import RecordFile
from prescore.bench.records import measure, row_key

COMMAND = "routed-study"
STUDIES = (
    "clustering", "ways", "budgets", "selection", "hyper", "grid", "centroids", "points", "singles", "shared",
)  # fmt: skip


def study_variants(study: str) -> list[Variant]:
    """The variants of `study_<name>.py`."""
    made: list[Variant] = importlib.import_module(f"study_{study}").variants()
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not in the record file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", help=f"among {', '.join(STUDIES)}; none = all")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    for name in options.studies:
        if name not in STUDIES:
            parser.error(f"studies must be among {', '.join(STUDIES)}, got {name!r}")
    torch.set_num_threads(1)
    books = [Book.load(path) for path in sorted(options.cache.glob("*.pt"))]
    if not books:
        parser.error(f"--cache must hold files of capture.py, got none in {options.cache}")
    for study in options.studies or STUDIES:
        records = RecordFile(options.out / f"{study}.jsonl", resume=True)
        for variant in study_variants(study):
            row = study_row(variant, books)
            if row_key(COMMAND, row.config, row.seed) in records:
                continue
            record = measure(COMMAND, row, threads=1)
            records.append(record)
            figures = record.results
            print(  # noqa: T201
                f"{study}: {variant.label}: {figures['error']:.5f}, {figures['far_keys_read']} far rows, "
                f"{figures['centroids']} centroids, {figures['cpu_seconds']} s", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
