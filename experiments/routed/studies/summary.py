"""Means, standard errors and paired comparisons of a study's records."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from prescore.bench.records import Record, read_records

TINY = 1e-9
"""Below this an error is rounding."""


@dataclass(frozen=True)
class Line:
    """One variant; errors and their spreads in thousandths.

    `error` is the mean over (layer, head), `spread` its standard error. Heads differ far more than variants do, so
    `ratio` compares head by head: the geometric mean of error over the reference's error, `ratio_spread` its
    standard error; `better` is the share of heads with less error than the reference.
    """

    label: str
    settings: dict[str, Any]
    error: float
    spread: float
    ratio: float
    ratio_spread: float
    better: float
    far_keys_read: float
    centroids: float
    cpu_seconds: float


def _leaf(label: str) -> str:
    found = re.search(r"leaf (\d+)", label)
    return found.group(1) if found else "128"


REFERENCES: dict[str, Callable[[str], str]] = {
    "clustering": lambda label: label.replace("k-means on unit keys", "tree").replace("k-means", "tree"),
    "ways": lambda label: label.rsplit(", ", 1)[0].split(" rows")[0] + " rows, every query for itself",
    "budgets": lambda label: f"leaf {_leaf(label)}, equal rows",
    "selection": lambda _: "routed, leaf 128",
    "hyper": lambda _: "block 256 + 256 samples",
    "grid": lambda _: "leaf 128, 512 rows",
    "centroids": lambda label: label.split(":")[0] + ": plain",
    "points": lambda label: f"keys, leaf {_leaf(label)}",
    "singles": lambda label: f"leaf {_leaf(label)}, 1 single per 128 keys, trees over 2048",
    "shared": lambda label: f"leaf {_leaf(label)}, 1 single per 128 keys by cosine, 512 rows",
}


def summarise(study: str, out: Path) -> list[Line]:
    """The lines of a study in the order they were measured."""
    path = out / f"{study}.jsonl"
    records = read_records(path) if path.exists() else []
    cells = {record.config["label"]: _cells(record) for record in records}
    lines = []
    for record in records:
        label = record.config["label"]
        own, reference = cells[label], cells.get(REFERENCES[study](label))
        if reference is None:
            raise ValueError(f"{path} must hold the reference of {label!r}, got none: finish the study first")
        ratios = [log(max(a, TINY) / max(b, TINY)) for a, b in zip(own, reference, strict=True)]
        ratio = exp(fmean(ratios))
        lines.append(
            Line(
                label,
                record.config["settings"],
                1e3 * fmean(own),
                1e3 * standard_error(own),
                ratio,
                ratio * standard_error(ratios),
                fmean(a < b for a, b in zip(own, reference, strict=True)),
                *(record.results[name] for name in ("far_keys_read", "centroids", "cpu_seconds")),
            )
        )
    return lines


def standard_error(values: Sequence[float]) -> float:
    """Of the mean, over (layer, head)."""
    return stdev(values) / len(values) ** 0.5


def _cells(record: Record) -> list[float]:
    """Error of every (layer, head), averaged over books: books share their heads' habits."""
    table, n_layers = record.results["heads"], len(record.config["layers"])
    books = [table[begin : begin + n_layers] for begin in range(0, len(table), n_layers)]
    return [fmean(values) for layers in zip(*books, strict=True) for values in zip(*layers, strict=True)]


def markdown(lines: Sequence[Line]) -> str:
    """A table for a page."""
    rows = ["| variant | error, thousandths | ratio to reference | heads better | far rows + centroids |"]
    rows.append("|---|---|---|---|---|")
    for line in lines:
        same = line.ratio == 1 and line.ratio_spread == 0
        compared = "reference" if same else f"{line.ratio:.2f} ± {line.ratio_spread:.2f}"
        better = "" if same else f"{100 * line.better:.0f} %"
        rows.append(
            f"| {line.label} | {line.error:.2f} ± {line.spread:.2f} | {compared} | {better} "
            f"| {line.far_keys_read:.0f} + {line.centroids:.0f} |"
        )
    return "\n".join(rows) + "\n"
