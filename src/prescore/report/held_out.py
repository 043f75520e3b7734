"""The default on held-out windows as a table: what is lost, what is read and how long it takes, text by text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from prescore.records import Record
from prescore.report.tables import MISSING, Table, as_text

_RIVALS = {"default": "prescored", "window": "baseline", "local": "local"}
"""Columns and the kinds of method that stand in them."""
_NOTE = (
    "above: loss over the second half of a window minus exact attention's, nats per token (worst of several "
    "windows); window: a sliding window with sinks that reads as many rows as the default; local: own and previous"
    " chunk with sinks; s: seconds inside the attention functions; YaRN: positions past the trained length"
)


@dataclass(frozen=True)
class _Place:
    """Where a window was read; `kind` is `reported` or `tuning`."""

    model: str
    n_tokens: int
    scaled: bool
    text: str
    kind: str


@dataclass(frozen=True)
class _Cell:
    """One window under all methods, each None where it is still to be measured."""

    exact: Record | None
    rivals: dict[str, Record | None]

    def above(self, name: str) -> float | None:
        rival = self.rivals[name]
        return None if self.exact is None or rival is None else _loss(rival) - _loss(self.exact)


def held_out_tables(records: Sequence[Record]) -> list[Table]:
    """One table for every variant of the default and kind of window, those reported first.

    A line per text, and below the texts of a model and length one over all their windows.
    """
    found = [r for r in records if r.config.get("part") == "loss" and r.config.get("experiment") == "default"]
    labels = dict.fromkeys(r.config["method"]["label"] for r in found if r.config["method"]["kind"] == "prescored")
    kinds = sorted({_place(record).kind for record in found})
    tables = []
    for kind in kinds:
        inside = [record for record in found if _place(record).kind == kind]
        tables += [_table(inside, label, kind) for label in labels]
    return [table for table in tables if table.rows]


def _table(records: Sequence[Record], label: str, kind: str) -> Table:
    cells: dict[_Place, list[_Cell]] = {}
    for windows in _by_window(records).values():
        cell = _Cell(
            next((r for r in windows if r.config["method"]["kind"] == "exact"), None),
            {name: _rival(windows, method, label) for name, method in _RIVALS.items()},
        )
        if cell.rivals["default"] is not None:
            cells.setdefault(_place(cell.rivals["default"]), []).append(cell)
    rows = []
    for group in dict.fromkeys((place.model, place.n_tokens, place.scaled) for place in cells):
        own = {p: found for p, found in cells.items() if (p.model, p.n_tokens, p.scaled) == group}
        where = (group[0], f"{group[1]}{' (YaRN)' if group[2] else ''}")
        rows += [(*where, place.text, *_figures(found)) for place, found in own.items()]
        if len(own) > 1:
            rows.append((*where, "all", *_figures([cell for found in own.values() for cell in found])))
    return Table(
        title=f"{label}, {kind} windows",
        columns=(
            *("model", "tokens", "text", "windows", "exact loss"),
            *(f"{name} above" for name in _RIVALS),
            *("rows", "exact s", *(f"{name} s" for name in _RIVALS), "speed-up"),
        ),
        rows=tuple(rows),
        note=_NOTE,
        left=3,
    )


def _figures(cells: Sequence[_Cell]) -> tuple[str, ...]:
    exact = [cell.exact for cell in cells if cell.exact is not None]
    seconds = {"exact": _seconds(exact)}
    for name in _RIVALS:
        seconds[name] = _seconds([rival for cell in cells if (rival := cell.rivals[name]) is not None])
    default = [rival for cell in cells if (rival := cell.rivals["default"]) is not None]
    rows = [float(record.figures["replaced_rows_per_query"]) for record in default]
    whole, own = seconds["exact"], seconds["default"]
    return (
        str(len(cells)),
        f"{statistics.fmean(map(_loss, exact)):.4f}" if exact else MISSING,
        *(_above([cell.above(name) for cell in cells]) for name in _RIVALS),
        as_text(statistics.fmean(rows), 4),
        *(MISSING if value is None else f"{value:.1f}" for value in seconds.values()),
        f"{whole / own:.2f}x" if whole and own else MISSING,
    )


def _above(losses: Sequence[float | None]) -> str:
    """The mean, and the worst of several; a window not measured yet leaves both open."""
    known = [loss for loss in losses if loss is not None]
    if len(known) < len(losses):
        return MISSING
    mean = f"{statistics.fmean(known):+.4f}"
    return mean if len(known) == 1 else f"{mean} ({max(known):+.4f})"


def _by_window(records: Sequence[Record]) -> dict[tuple[object, ...], list[Record]]:
    windows: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        config = record.config
        name = (config["model"], config["dtype"], str(config["layers"]), config["document"], config["digest"])
        windows.setdefault((*name, config["n_tokens"], record.seed), []).append(record)
    return windows


def _rival(windows: Sequence[Record], kind: str, label: str) -> Record | None:
    for record in windows:
        method = record.config["method"]
        beside = {"prescored": method["label"], "baseline": method["axes"].get("beside")}.get(kind, label)
        if method["kind"] == kind and beside == label:
            return record
    return None


def _place(record: Record) -> _Place:
    config = record.config
    # such as "novel.txt, reported window 2"
    text, _, window = str(config["document"]).rpartition(", ")
    scaled = record.figures.get("position_scaling") is not None
    return _Place(str(config["model"]), int(config["n_tokens"]), scaled, text, window.split(" ")[0])


def _loss(record: Record) -> float:
    loss = record.figures.get("loss")
    if not isinstance(loss, int | float):
        raise ValueError(f"record {record.key} must have a number as loss, got {loss!r}")
    return float(loss)


def _seconds(records: Sequence[Record]) -> float | None:
    return statistics.fmean(float(r.figures["attention_seconds"]) for r in records) if records else None
