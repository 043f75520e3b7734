"""What a layer did since its last prompt began, by phase: reading the prompt, then its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from prescore.config import Config, Exact, Hyper, Routed, Selected
from prescore.integrations.decode import OVER_ALL, STEP_AT_MOST, routes

PREFILL, STEPS = "prefill", "steps"
SHORT = "exact: "
"""How the words for a call begin that read everything although its configuration need not."""

CountRows: TypeAlias = Callable[[], float | None]


@dataclass(eq=False)
class CallTrace:
    """What a layer did in a call.

    Rows are counted when somebody asks for them. Until then, or until the layer's next call, what counting needs
    stays alive: after a prompt the plan of a `Selected` or `Hyper` (row numbers, and the keys and values that they
    count in), or the query, key and value of a call short enough to be exact; after a step, and whenever every key
    was read, a bias or mask of one entry per key. A `Routed` knows its rows beforehand, and keeps nothing.

    Attributes:
        path: The way it went, in words, such as `prescored` or `step over the selection`.
        mask: The kind of mask it was given.
        n_query: Queries.
        n_keys: Keys so far, padding included.
        seconds: Time until the result was there, or on a GPU until its work was queued.
        ran: What ran, in the words of a report, such as `routed` or `exact: shorter than exact_until=2048`.
        error: Relative error that is expected of a query's output, on average; None = no tolerance was asked for,
            or the call read everything in any case. So for the next three.
        error_limit: Relative error that the output of every query stays below, by its error bar.
        refined: Share of queries that looked for lighter keys than in any case, or read everything.
        read_all: Share of queries that read everything because no search was enough.
        native: Level of compiled code that ran the far part of a `Routed`; `none` where plain torch did; None
            where nothing was far.
    """

    path: str
    mask: str
    n_query: int
    n_keys: int
    seconds: float
    _rows: CountRows | float | None = field(default=None, repr=False)
    _visible: CountRows | float | None = field(default=None, repr=False)
    ran: str = ""
    error: float | None = None
    error_limit: float | None = None
    refined: float | None = None
    read_all: float | None = None
    native: str | None = None

    @property
    def rows(self) -> float | None:
        """Key and centroid rows that a query met, on average, padding not counted; None = not known."""
        if callable(self._rows):
            self._rows = self._rows()
        return self._rows

    @property
    def visible(self) -> float | None:
        """Keys that a query might have met, on average, padding not counted; None = not known."""
        if callable(self._visible):
            self._visible = self._visible()
        return self._visible

    @property
    def phase(self) -> str:
        """Whether it read a prompt, or made a step."""
        return STEPS if self.n_query < self.n_keys and self.n_query <= STEP_AT_MOST else PREFILL

    def counted(self) -> CallTrace:
        """The same, with its rows counted and nothing else kept."""
        if not callable(self._rows) and not callable(self._visible):
            return self
        return replace(self, _rows=self.rows, _visible=self.visible)

    def let_go(self) -> CallTrace:
        """The same, without what counting needs: rows that were not counted are not known any more."""
        if not callable(self._rows) and not callable(self._visible):
            return self
        rows, visible = (None if callable(count) else count for count in (self._rows, self._visible))
        return replace(self, _rows=rows, _visible=visible)

    def __getstate__(self) -> dict[str, object]:
        return vars(self.counted())


@dataclass(frozen=True)
class Phase:
    """The calls of one phase.

    Attributes:
        last: The last call; rows, keys and errors are its.
        calls: Calls.
        queries: Queries of all calls.
        seconds: Time of all calls.
        ways: What ran, and how often.
    """

    last: CallTrace
    calls: int = 0
    queries: int = 0
    seconds: float = 0.0
    ways: dict[str, int] = field(default_factory=dict)

    def and_then(self, did: CallTrace) -> Phase:
        """With one more call."""
        ways = {**self.ways, did.ran: self.ways.get(did.ran, 0) + 1}
        return Phase(did, self.calls + 1, self.queries + did.n_query, self.seconds + did.seconds, ways)

    def counted(self) -> Phase:
        """The same, with the rows of the last call counted and nothing else kept."""
        return replace(self, last=self.last.counted())

    @property
    def ran(self) -> str:
        """What ran, in words, the last first; how often each, where that changed."""
        if len(self.ways) == 1:
            return self.last.ran
        ordered = sorted(self.ways, key=lambda words: words != self.last.ran)
        return ", ".join(f"{words} ({self.ways[words]}x)" for words in ordered)


class Trace:
    """Phases of the newest prompt; a whole new prompt, and more of one after steps, begin anew.

    Threads may share it: what is kept is replaced as a whole, and the last one wins.
    """

    def __init__(self) -> None:
        self._phases: dict[str, Phase] = {}

    @property
    def phases(self) -> dict[str, Phase]:
        """By name; rows of the last call of each are counted."""
        self._phases = counted = {name: phase.counted() for name, phase in self._phases.items()}
        return dict(counted)

    def begin(self, n_query: int) -> None:
        """Before a call: let go of what only counting needs; a prompt is counted when its first step comes."""
        ends = n_query <= STEP_AT_MOST
        self._phases = {
            name: phase.counted() if ends and name == PREFILL else replace(phase, last=phase.last.let_go())
            for name, phase in self._phases.items()
        }

    def add(self, did: CallTrace) -> None:
        """After a call."""
        phases = self._phases
        if did.phase == PREFILL and (did.n_query == did.n_keys or STEPS in phases):
            phases = {}
        before = phases.get(did.phase, Phase(did))
        self._phases = {**phases, did.phase: before.and_then(did)}


def words_for_prompt(config: Config, n_query: int, n_keys: int, *, is_causal: bool) -> str:
    """What a pre-scored call over so many keys runs: an engine, or exact attention and why."""
    if isinstance(config, Routed):
        return _words_for_routed(config, n_query, n_keys, is_causal=is_causal)
    if isinstance(config, Exact):
        return "exact"
    if is_causal and n_keys <= config.min_seq_len:
        return f"{SHORT}no longer than min_seq_len={config.min_seq_len}"
    if isinstance(config, Hyper):
        return "hyper" if is_causal or n_query >= config.min_seq_len else f"{SHORT}shorter than min_seq_len"
    return f"{SHORT}top_k keeps every key" if _keeps_all(config, n_keys) and not is_causal else "selected"


def words_for_step(config: Config, path: str, n_keys: int) -> str:
    """What a decode step runs, from the way it went."""
    if isinstance(config, Routed) and (path != OVER_ALL or n_keys <= config.exact_until):
        return _words_for_routed(config, 1, n_keys, is_causal=True)
    if path != OVER_ALL:
        return "selected"
    if isinstance(config, Selected):
        return f"{SHORT}top_k keeps every key"
    return f"{SHORT}a step reads every key so far"


def _words_for_routed(config: Routed, n_query: int, n_keys: int, *, is_causal: bool) -> str:
    if routes(config, n_query, n_keys, is_causal=is_causal):
        return "routed"
    if n_keys <= config.exact_until if is_causal else n_query < config.exact_until:
        return f"{SHORT}shorter than exact_until={config.exact_until}"
    near = "two chunks" if is_causal else "a chunk"
    return f"{SHORT}no longer than sinks and {near} of {config.chunk_size}"


def _keeps_all(config: Selected, n_keys: int) -> bool:
    whole = config.budget == 1.0 if isinstance(config.budget, float) else config.budget >= n_keys
    return whole and config.min_score is None and isinstance(config.inner, Exact)


# What the layers of a model did since their last prompt began, as a table by layer and phase.

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
    last: CallTrace | None
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


def _error_cells(calls: Sequence[CallTrace]) -> dict[str, str]:
    """What is known about errors: nothing where no tolerance was asked for."""
    limits = [did.error_limit for did in calls if did.error_limit is not None]
    if not limits:
        return {}
    error, further, everything = (
        _mean(getattr(did, name) for did in calls) or 0.0 for name in ("error", "refined", "read_all")
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
