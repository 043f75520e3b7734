"""What the layers of a model did since their last prompt began, as a table by layer and phase."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prescore.config import Config
from prescore.integrations.reporting.phases import PREFILL, SHORT, STEPS, Did, Phase

_ERRORS = ("error", "error at most", "read further", "read everything")
_CONFIGURATION = "configuration"
_COLUMNS = (
    *("layer", _CONFIGURATION, "phase", "what ran", "rows read", "of", "share"),
    *("calls", "queries", "seconds", *_ERRORS),
)
_LEFT = ("layer", _CONFIGURATION, "phase", "what ran")
_UNKNOWN = "-"
_PLAIN = (
    "routed by plain torch, which is slower: "
    "compiled code is missing (prescore info says why) or does not know such inputs"
)
_MERGED_WITHIN = 0.05
"""Layers whose shares of rows differ by less may share a line."""


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes:
        layer: Its number.
        name: Its name in the model.
        config: How it was asked to attend.
        last: What it did in its last call; None = it was not called yet.
        phases: What it did since its last prompt began, by phase: `prefill`, `steps`.
    """

    layer: int
    name: str
    config: Config
    last: Did | None
    phases: Mapping[str, Phase] = field(default_factory=dict)

    @property
    def path(self) -> str | None:
        """The way the last call went; None = there was none."""
        return None if self.last is None else self.last.path


@dataclass(frozen=True)
class Report:
    """What every replaced layer did since its last prompt began; `str` of it is a table, `report[3]` layer 3."""

    layers: tuple[LayerReport, ...]

    def __getitem__(self, layer: int) -> LayerReport:
        for entry in self.layers:
            if entry.layer == layer:
                return entry
        raise KeyError(f"layer must be one that was replaced, got {layer}")

    @property
    def notes(self) -> list[str]:
        """What to know beside the figures: what changed nothing and why, and that compiled code did not run."""
        phases = [phase for entry in self.layers for phase in entry.phases.values()]
        ways = {words for phase in phases for words in phase.ways}
        notes = []
        if ways and all(words.startswith(SHORT) for words in ways):
            kinds = " and ".join(dict.fromkeys(type(entry.config).__name__ for entry in self.layers))
            reasons = "; ".join(sorted(words.removeprefix(SHORT) for words in ways))
            notes.append(f"{kinds} changed nothing, all attention was exact: {reasons}")
        if any(phase.last.native == "none" for phase in phases):
            notes.append(_PLAIN)
        return notes

    def seconds(self, phase: str) -> float:
        """Time of all layers in a phase, `prefill` or `steps`."""
        return sum(found.seconds for found in self._all(phase))

    def rows(self, phase: str) -> float | None:
        """Rows that a query met in the last call of a phase, mean over layers; None = not known."""
        return _mean(found.last.rows for found in self._all(phase))

    def visible(self, phase: str) -> float | None:
        """Keys that a query might have met there, mean over layers; None = not known."""
        return _mean(found.last.visible for found in self._all(phase))

    def table(self, *, merge: bool = True) -> str:
        """The table.

        Args:
            merge: Let neighbouring layers share a line that did the same and read about as much, with the least
                and the most rows, and their seconds added up.
        """
        if not self.layers:
            return "no layer was replaced: all attention is exact"
        groups: list[list[LayerReport]] = []
        for entry in self.layers:
            if merge and groups and _alike(groups[-1], entry):
                groups[-1].append(entry)
            else:
                groups.append([entry])
        lines = [line for group in groups for line in _lines(group)]
        if len(groups) > 1 and any(entry.phases for entry in self.layers):
            lines += [{**line, "layer": "all"} for line in _lines(self.layers)]
        return _table(lines)

    def __str__(self) -> str:
        return "\n".join([self.table(), *(f"note: {note}" for note in self.notes)])

    def _all(self, phase: str) -> list[Phase]:
        return [entry.phases[phase] for entry in self.layers if phase in entry.phases]


def describe(config: Config) -> str:
    """A configuration in one line: its type, and what differs from the defaults."""
    return _brief(config, dict(vars(type(config)())))


def _brief(value: object, usual: Mapping[str, object] | None = None) -> str:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    fields = dataclasses.fields(value)
    defaults = {field.name: field.default for field in fields} if usual is None else usual
    changed = [
        f"{field.name}={_brief(own)}"
        for field in fields
        if (own := getattr(value, field.name)) != defaults[field.name]
    ]
    return f"{type(value).__name__}({', '.join(changed)})"


def _alike(group: Sequence[LayerReport], entry: LayerReport) -> bool:
    """Whether a layer may share the line of those before it."""
    first, known = group[0], entry.phases
    if entry.layer != group[-1].layer + 1 or entry.config != first.config or set(known) != set(first.phases):
        return False
    return all(
        (known[name].ran, known[name].calls, known[name].queries) == (phase.ran, phase.calls, phase.queries)
        and (known[name].last.error_limit is None) == (phase.last.error_limit is None)
        and abs(_share(known[name]) - _share(phase)) < _MERGED_WITHIN
        for name, phase in first.phases.items()
    )


def _share(phase: Phase) -> float:
    rows, visible = phase.last.rows, phase.last.visible
    return rows / visible if rows is not None and visible else -1.0


def _lines(group: Sequence[LayerReport]) -> Iterator[dict[str, str]]:
    """A line per phase of some layers."""
    first, last = group[0], group[-1]
    layer = str(first.layer) if first is last else f"{first.layer}-{last.layer}"
    about = {"layer": layer}
    if len({describe(entry.config) for entry in group}) == 1:
        about[_CONFIGURATION] = describe(first.config)
    if not any(entry.phases for entry in group):
        yield {**about, "what ran": "not called yet"}
    for name in (PREFILL, STEPS):
        phases = [entry.phases[name] for entry in group if name in entry.phases]
        if phases:
            yield {**about, "phase": name, **_cells(phases)}


def _cells(phases: Sequence[Phase]) -> dict[str, str]:
    """What some layers did in one phase; what differs from layer to layer as least and most, or not at all."""
    ways = list(dict.fromkeys(phase.ran for phase in phases))
    rows, visible = _mean(p.last.rows for p in phases), _mean(p.last.visible for p in phases)
    return {
        "what ran": ways[0] if len(ways) == 1 else f"{len(ways)} ways",
        "rows read": _span([phase.last.rows for phase in phases]),
        "of": _span([phase.last.visible for phase in phases]),
        "share": f"{100 * rows / visible:.0f} %" if rows is not None and visible else _UNKNOWN,
        "calls": _span([phase.calls for phase in phases]),
        "queries": _span([phase.queries for phase in phases]),
        "seconds": f"{sum(phase.seconds for phase in phases):.4f}",
        **_error_cells([phase.last for phase in phases]),
    }


def _error_cells(calls: Sequence[Did]) -> dict[str, str]:
    """What is known about errors: nothing where no tolerance was asked for."""
    limits = [did.error_limit for did in calls if did.error_limit is not None]
    if not limits:
        return {}
    error, further, everything = (
        _mean(getattr(did, name) for did in calls) or 0.0 for name in ("error", "read_further", "read_everything")
    )
    shown = (f"{error:.4f}", f"{max(limits):.4f}", f"{100 * further:.0f} %", f"{100 * everything:.1f} %")
    return dict(zip(_ERRORS, shown, strict=True))


def _span(values: Sequence[float | None]) -> str:
    """The least and the most of what is known."""
    known = [value for value in values if value is not None]
    if not known:
        return _UNKNOWN
    least, most = f"{min(known):.0f}", f"{max(known):.0f}"
    return least if least == most else f"{least}-{most}"


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of what is known; None = nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Lines under a heading; a column that says nothing, or the same for all layers, is left out."""
    asked = any(_ERRORS[0] in row for row in rows)
    columns = [name for name in _COLUMNS if asked or name not in _ERRORS]
    if len({row[_CONFIGURATION] for row in rows if _CONFIGURATION in row}) == 1:
        columns.remove(_CONFIGURATION)
    cells = [columns, *([row.get(name, "") for name in columns] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in _LEFT else cell.rjust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        ).rstrip()
        for line in cells
    )
