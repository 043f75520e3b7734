"""Many needles as a table: what every method found at each depth, beside exact attention, needle by needle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prescore.records import Record
from prescore.report.tables import MISSING, Table

PART = "many-needles"
"""What such records call themselves."""
_EXACT = "exact"
_NOTE = (
    "share of needles whose every token is the likeliest one; points: above exact attention on the same texts; "
    "lost: exact attention alone found them, gained: the method alone; where exact attention fails, the model "
    "cannot do the task"
)
_Text = tuple[Any, ...]
_Depth = float | None


@dataclass(frozen=True)
class _Method:
    """What one method found in texts of one length: by text, and there by depth, needles in a fixed order."""

    texts: dict[_Text, dict[float, list[int]]]

    def found(self, depth: _Depth, among: Sequence[_Text] | None = None) -> list[int]:
        """1 and 0 of every needle at a depth, or of all needles."""
        texts = self.texts if among is None else among
        return [
            one
            for text in texts
            for place, found in self.texts[text].items()
            if depth in (None, place)
            for one in found
        ]


def needles_table(records: Sequence[Record]) -> Table:
    """A line for every length and depth, and one over all depths of a length.

    Methods are compared with exact attention on texts that both have read.
    """
    own = [record for record in records if record.config.get("part") == PART]
    labels = list(dict.fromkeys(record.config["method"]["label"] for record in own))
    labels.sort(key=lambda label: label != _EXACT)
    rows = []
    for length in dict.fromkeys(record.config["n_tokens"] for record in own):
        inside = [record for record in own if record.config["n_tokens"] == length]
        methods = {label: _gathered(inside, label) for label in labels}
        depths = sorted({float(depth) for record in inside for depth in record.config["depths"]})
        rows += [_line(str(length), depth, methods) for depth in (*depths, None)]
    columns = ["tokens", "depth", "needles"]
    for label in labels:
        columns += [label] if label == _EXACT else [label, "points", "lost", "gained"]
    scaled = any(record.figures.get("position_scaling") for record in own)
    return Table(
        title="Many needles" + ("; positions past the trained length by RoPE scaling (YaRN)" if scaled else ""),
        columns=tuple(columns),
        rows=tuple(rows),
        note=_NOTE,
        left=2,
    )


def _line(length: str, depth: _Depth, methods: dict[str, _Method]) -> tuple[str, ...]:
    exact = methods.get(_EXACT)
    asked = max(len(method.found(depth)) for method in methods.values())
    cells = [length, "all" if depth is None else f"{100 * depth:.0f} %", str(asked)]
    for label, method in methods.items():
        cells.append(_share(method.found(depth)))
        if label != _EXACT:
            cells += _beside(exact, method, depth)
    return tuple(cells)


def _beside(exact: _Method | None, method: _Method, depth: _Depth) -> tuple[str, str, str]:
    """Points above exact attention, needles lost and needles gained."""
    both = [] if exact is None else [text for text in method.texts if text in exact.texts]
    if exact is None or not method.found(depth, both):
        return MISSING, MISSING, MISSING
    pairs = list(zip(exact.found(depth, both), method.found(depth, both), strict=True))
    lost, gained = pairs.count((1, 0)), pairs.count((0, 1))
    return f"{100 * (gained - lost) / len(pairs):+.1f}", str(lost), str(gained)


def _gathered(records: Sequence[Record], label: str) -> _Method:
    return _Method(
        {
            _text(record): {float(one["depth"]): _needles(record, one) for one in record.figures["by_depth"]}
            for record in records
            if record.config["method"]["label"] == label
        }
    )


def _needles(record: Record, at_depth: dict[str, Any]) -> list[int]:
    found = at_depth.get("found")
    if not isinstance(found, list) or len(found) != at_depth.get("asked"):
        raise ValueError(f"record {record.key} must have a 0 or 1 for every needle asked, got {found!r}")
    return found


def _text(record: Record) -> _Text:
    """What names a text among those of one length, whatever the method."""
    config = record.config
    names = ("model", "dtype", "document", "digest", "needle", "per_depth", "sample")
    return (*(config[name] for name in names), tuple(config["depths"]), str(config["layers"]), record.seed)


def _share(found: Sequence[int]) -> str:
    return f"{100 * sum(found) / len(found):.1f} %" if found else MISSING
