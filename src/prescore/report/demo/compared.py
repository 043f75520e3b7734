"""Methods beside exact attention on the same stretches of text, with intervals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from prescore.records import Record
from prescore.report.language_summary import Summary, confidence_half_width, summarise


@dataclass(frozen=True)
class Line:
    """One method.

    Attributes:
        summary: Its figures over all windows that it read.
        name: What it is called.
        n_windows: How many those are.
        n_stretches: Stretches of text that its loss was compared in, stretch by stretch.
        above: Loss above exact attention's on the same tokens, nats per token; None = that was not measured.
        half_width: Half of the 95 % interval of that, over the stretches.
    """

    summary: Summary
    name: str
    n_windows: int
    n_stretches: int
    above: float | None
    half_width: float | None

    @property
    def is_default(self) -> bool:
        """Whether it is what the page is about."""
        return self.name == "default"


def compare(records: Sequence[Record], comparison: str) -> list[Line]:
    """The lines of one comparison, in the order of their records."""
    own = [r for r in records if r.config["part"] == "loss" and _axes(r).get("comparison") == comparison]
    exact = {_window(record): record for record in own if record.config["method"]["kind"] == "exact"}
    lines = []
    for summary in summarise(own):
        mine = [record for record in own if record.config["method"]["label"] == summary.label]
        pairs = [(record, exact[_window(record)]) for record in mine if _window(record) in exact]
        apart = [gap for one, other in pairs for gap in _gaps(one, other)]
        lines.append(
            Line(
                summary,
                str(summary.axes["series"]),
                len({_window(record) for record in mine}),
                len(apart),
                statistics.fmean(apart) if apart else None,
                None if summary.kind == "exact" else confidence_half_width(apart),
            )
        )
    return lines


def find_line(lines: Sequence[Line], name: str) -> Line | None:
    """The line of that name."""
    return next((line for line in lines if line.name == name), None)


def _gaps(one: Record, other: Record) -> list[float]:
    """What the first lost more than the second, stretch by stretch."""
    losses = [record.figures.get("stretch_losses") for record in (one, other)]
    if not all(isinstance(parts, list) and parts for parts in losses):
        raise ValueError(f"record {one.key} must have losses by stretches of its text, got {losses[0]!r}")
    return [float(a) - float(b) for a, b in zip(*losses, strict=True)]


def _window(record: Record) -> str:
    return f"{record.config['document']}@{record.config['digest']}"


def _axes(record: Record) -> dict[str, object]:
    return dict(record.config["method"]["axes"])
