"""A table as a value: built from records, shown on a terminal or written as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prescore.bench.records import Record

if TYPE_CHECKING:
    import rich.table


MISSING = "-"


@dataclass(frozen=True)
class Table:
    """Cells of text under a title; `note` stands below, `left` counts the columns that are left-aligned."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    left: int = 1

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"rows must have {len(self.columns)} cells, got {len(row)} in {row!r}")

    def to_rich(self) -> rich.table.Table:
        """For a terminal."""
        from rich import box
        from rich.markup import escape
        from rich.table import Table as RichTable

        shown = RichTable(
            title=escape(self.title), caption=escape(self.note) or None, box=box.SIMPLE_HEAD, title_justify="left"
        )
        for number, column in enumerate(self.columns):
            shown.add_column(escape(column), justify="left" if number < self.left else "right", overflow="fold")
        for row in self.rows:
            shown.add_row(*map(escape, row))
        return shown

    def to_markdown(self) -> str:
        """For a document."""
        rule = ["---"] * self.left + ["---:"] * (len(self.columns) - self.left)
        lines = [self.columns, tuple(rule), *self.rows]
        text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        title = f"**{self.title}**\n\n" if self.title else ""
        return f"{title}{text}\n" + (f"\n{self.note}\n" if self.note else "")


def number(record: Record, value: Any, name: str) -> float:
    """A result of a record as a number; anything else is refused with the record's key."""
    if isinstance(value, int | float) or value in ("nan", "inf", "-inf"):
        return float(value)
    raise ValueError(f"record {record.key} must have a number as {name}, got {value!r}")


def percent(value: float | None) -> str:
    """A share in whole per cent, `worse` where it is negative."""
    if value is None or math.isnan(value):
        return MISSING
    shown = round(100 * value)
    return f"{shown} %" if shown >= 0 else f"worse ({shown} %)"


def times(value: float | None) -> str:
    """A speed-up."""
    return MISSING if value is None else f"{value:.2f}x"


def as_text(value: Any, digits: int = 3) -> str:
    """A number with `digits` significant digits; a dash where it is missing."""
    if value is None:
        return MISSING
    value = float(value)
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    return f"{value:.{digits}g}" if not 1e-3 <= abs(value) < 1e5 else _plain(value, digits)


def mean_and_spread(values: Sequence[Any], digits: int = 2) -> str:
    """`mean ± standard deviation` over seeds with fixed decimals; the spread needs two values."""
    known = [float(value) for value in values if value is not None]
    if not known:
        return MISSING
    mean = f"{statistics.fmean(known):.{digits}f}"
    return f"{mean} ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else mean


def span(values: Sequence[Any], digits: int = 3) -> str:
    """The mean, and the lowest and highest value where they differ in the digits shown."""
    known = [float(value) for value in values if value is not None]
    if not known:
        return MISSING
    low, high = as_text(min(known), digits), as_text(max(known), digits)
    mean = as_text(statistics.fmean(known) if all(map(math.isfinite, known)) else max(known), digits)
    return mean if low == high else f"{mean} ({low} to {high})"


def _plain(value: float, digits: int) -> str:
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
