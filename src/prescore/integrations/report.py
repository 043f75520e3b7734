"""What the layers of a model did since their last prompt began, by phase (prefill, then steps), and as a table."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from prescore.config import Config
from prescore.integrations.decode import STEP_AT_MOST
from prescore.types import Reads, Values

PREFILL, STEPS = "prefill", "steps"
READS_ALL = "exact: "
"""Begins the description of a call that read every key, followed by the reason."""

_ERRORS = ("error", "95 % interval", "largest error")
_TEXT_COLUMNS = ("layer", "configuration", "phase", "what ran")
_COLUMNS = (
    *_TEXT_COLUMNS,
    *("keys read", "centroids", "of", "share", "calls", "queries", "seconds"),
    *_ERRORS,
)
_UNKNOWN = "-"
_MERGE_WITHIN = 0.05
"""Layers whose shares of keys read differ by less may share a line."""


_COUNTING = threading.Lock()
"""Held while totals are counted, as threads may share a model."""
Counts: TypeAlias = tuple[Reads | None, float | None]
"""What a query read and what it could see, on average; None = unknown."""


@dataclass(frozen=True)
class Errors:
    """Relative errors of audited queries. The unit is a query position, with the mean over its heads.

    Attributes:
        n: Positions.
        total: Sum of their errors.
        squares: Sum of the squares.
        largest: The largest error of any head.
    """

    n: int = 0
    total: float = 0.0
    squares: float = 0.0
    largest: float = 0.0

    @classmethod
    def of(cls, errors: Tensor) -> Errors:
        """Of `[heads, positions]` errors."""
        means = errors.double().mean(0)
        return cls(len(means), float(means.sum()), float(means.square().sum()), float(errors.max()))

    def __add__(self, other: Errors) -> Errors:
        sums = (self.n + other.n, self.total + other.total, self.squares + other.squares)
        return Errors(*sums, max(self.largest, other.largest))

    @property
    def mean(self) -> float | None:
        """The mean; None = no query was audited."""
        return self.total / self.n if self.n else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean; None with fewer than two positions."""
        if self.n < 2:
            return None
        mean = self.total / self.n
        variance = max(0.0, self.squares / self.n - mean * mean) / (self.n - 1)
        width = 1.96 * (1 + 1.21 / (self.n - 1)) * math.sqrt(variance)  # nearly Student's quantile
        return max(0.0, mean - width), mean + width


@dataclass(eq=False)
class CallTrace:
    """What a layer did in one call.

    Keys are counted on demand. Until then, or until the layer's next call, what the counting needs stays in
    memory: indices and masks, but no keys or values.

    Attributes:
        path: How the call was answered, such as `prescored` or `step over the selection`.
        ran: What ran, as in the report, such as `routed` or `exact: up to exact_until=2048`.
        mask: The kind of mask.
        n_query: Queries.
        n_keys: Keys so far, padding included.
        seconds: Time until the result was there, or on a GPU until its work was queued.
        counter: Counts keys; None = counted, or unknown.
        stats: Numbers that cost nothing, by the names of `prescore.Stats`.
        errors: Of the audited queries; empty without an audit.
    """

    path: str
    ran: str
    mask: str
    n_query: int
    n_keys: int
    seconds: float
    counter: Callable[[], Counts] | None = field(default=None, repr=False)
    stats: Values = field(default_factory=dict)
    errors: Errors = Errors()
    _counts: Counts = field(default=(None, None), init=False, repr=False)

    @property
    def reads(self) -> Reads | None:
        """Keys and centroids that a query read, on average, padding not counted; None = unknown."""
        return self.count()[0]

    @property
    def visible_keys(self) -> float | None:
        """Keys that a query could see, on average, padding not counted; None = unknown."""
        return self.count()[1]

    @property
    def phase(self) -> str:
        """Whether the call read a prompt or made a step."""
        return STEPS if self.n_query < self.n_keys and self.n_query <= STEP_AT_MOST else PREFILL

    def count(self) -> Counts:
        """Count, the first time, and free what the counting needs."""
        if self.counter is not None:
            self._counts, self.counter = self.counter(), None
        return self._counts

    def __getstate__(self) -> Values:
        self.count()
        return vars(self)


@dataclass(frozen=True)
class Phase:
    """The calls of one phase.

    Attributes:
        last: The last call.
        calls: Number of calls.
        queries: Queries of all calls.
        seconds: Time of all calls.
        counts: What ran, and in how many calls.
        errors: Of the audited queries of all calls.
    """

    last: CallTrace
    calls: int = 0
    queries: int = 0
    seconds: float = 0.0
    counts: Mapping[str, int] = field(default_factory=dict)
    errors: Errors = Errors()

    def add(self, call: CallTrace) -> Phase:
        """With one more call."""
        counts = {**self.counts, call.ran: self.counts.get(call.ran, 0) + 1}
        sums = (self.calls + 1, self.queries + call.n_query, self.seconds + call.seconds)
        return Phase(call, *sums, counts, self.errors + call.errors)

    @property
    def ran(self) -> str:
        """What ran, the last first; with the number of calls where that changed."""
        if len(self.counts) == 1:
            return self.last.ran
        ordered = sorted(self.counts, key=lambda ran: ran != self.last.ran)
        return ", ".join(f"{ran} ({self.counts[ran]}x)" for ran in ordered)


class Trace:
    """The calls of one layer since its last prompt began.

    A prompt from its first token, or a further chunk of a prompt after steps, begins anew. Threads may share a
    trace: each call replaces the phases as a whole, and the last one wins.

    Attributes:
        totals: What ran, and in how many calls, of all prompts.
        errors: Of the audited queries of all calls.
    """

    def __init__(self) -> None:
        self._phases: dict[str, Phase] = {}
        self.totals: Counter[str] = Counter()
        self.errors = Errors()

    @property
    def phases(self) -> dict[str, Phase]:
        """By name; the keys that the last call of each phase read are counted."""
        phases = self._phases
        for phase in phases.values():
            phase.last.count()
        return dict(phases)

    def begin(self, n_query: int) -> None:
        """Before a call: free what only counting needs. A prompt is counted when its first step begins."""
        for name, phase in self._phases.items():
            if name == PREFILL and n_query <= STEP_AT_MOST:
                phase.last.count()
            else:
                phase.last.counter = None  # what was not counted stays unknown

    def add(self, call: CallTrace) -> None:
        """After a call."""
        phases = self._phases
        if call.phase == PREFILL and (call.n_query == call.n_keys or STEPS in phases):
            phases = {}
        self._phases = {**phases, call.phase: phases.get(call.phase, Phase(call)).add(call)}
        with _COUNTING:
            self.totals[call.ran] += 1
            self.errors += call.errors


def totals_of(traces: Iterable[Trace], configs: Iterable[Config]) -> Values:
    """Plain numbers for a server's metrics, see `Applied.stats`."""
    ran = Counter({what_ran(config, ""): 0 for config in configs})  # a metric that is 0 must not be missing
    errors = Errors()
    with _COUNTING:
        for trace in traces:
            ran.update(trace.totals)
            errors += trace.errors
    exact = {text.removeprefix(READS_ALL): n for text, n in sorted(ran.items()) if text.startswith(READS_ALL)}
    others = {text: n for text, n in sorted(ran.items()) if not text.startswith(READS_ALL)}
    audit = {"queries": errors.n, "error": errors.mean, "interval": errors.interval, "largest": errors.largest}
    return {"calls": ran.total(), **others, "exact_because": exact, "audit": audit if errors.n else None}


def what_ran(config: Config, why_exact: str) -> str:
    """What a call ran, for the report: the engine of its configuration, or exact attention and why."""
    return f"{READS_ALL}{why_exact}" if why_exact else type(config).__name__.lower()


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes:
        layer: Its number.
        name: Its name in the model.
        config: Its configuration.
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
        """How the last call was answered; None = there was none."""
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
        """What the numbers do not say: that a configuration changed nothing and why, that no native code ran."""
        phases = [phase for entry in self.layers for phase in entry.phases.values()]
        ran = {text for phase in phases for text in phase.counts}
        notes = []
        if ran and all(text.startswith(READS_ALL) for text in ran):
            kinds = " and ".join(dict.fromkeys(type(entry.config).__name__ for entry in self.layers))
            reasons = "; ".join(sorted(text.removeprefix(READS_ALL) for text in ran))
            notes.append(f"{kinds} changed nothing, all attention was exact: {reasons}")
        if any(phase.last.stats.get("backend") == "plain" for phase in phases):
            notes.append("routed by plain torch, which is slower: native code does not support such inputs")
        return notes

    def seconds(self, phase: str) -> float:
        """Time of all layers in a phase, `prefill` or `steps`."""
        return sum(entry.seconds for entry in self._phases(phase))

    def reads(self, phase: str) -> Reads | None:
        """Keys and centroids that a query read in the last call of a phase, mean over layers; None = unknown."""
        return _mean_reads(self._phases(phase))

    def visible_keys(self, phase: str) -> float | None:
        """Keys that a query could see there, mean over layers; None = unknown."""
        return _mean(entry.last.visible_keys for entry in self._phases(phase))

    def table(self, *, merge: bool = True) -> str:
        """The table.

        Args:
            merge: Let neighbouring layers that did the same and read about as much share a line, with the least
                and the most keys, and the sum of their seconds.
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

    def _phases(self, phase: str) -> list[Phase]:
        return [entry.phases[phase] for entry in self.layers if phase in entry.phases]


def describe(config: Config) -> str:
    """A configuration in one line: its type, and what differs from the defaults."""
    return _brief(config, vars(type(config)()))


def _brief(value: object, defaults: Mapping[str, object] | None = None) -> str:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    fields = dataclasses.fields(value)
    usual = {field.name: field.default for field in fields} if defaults is None else defaults
    pairs = [(field.name, getattr(value, field.name)) for field in fields]
    changed = [f"{name}={_brief(setting)}" for name, setting in pairs if setting != usual[name]]
    return f"{type(value).__name__}({', '.join(changed)})"


def _alike(group: Sequence[LayerReport], entry: LayerReport) -> bool:
    """Whether a layer may share the line of those before it."""
    first = group[0]
    if entry.layer != group[-1].layer + 1 or entry.config != first.config:
        return False
    return set(entry.phases) == set(first.phases) and all(
        (phase.ran, phase.calls, phase.queries) == (other.ran, other.calls, other.queries)
        and abs((_share([phase]) or 0.0) - (_share([other]) or 0.0)) < _MERGE_WITHIN
        for phase, other in ((first.phases[name], entry.phases[name]) for name in first.phases)
    )


def _lines(group: Sequence[LayerReport]) -> Iterator[dict[str, str]]:
    """A line per phase of some layers."""
    first, last = group[0], group[-1]
    line = {"layer": str(first.layer) if first is last else f"{first.layer}-{last.layer}"}
    if len({describe(entry.config) for entry in group}) == 1:
        line["configuration"] = describe(first.config)
    if not any(entry.phases for entry in group):
        yield {**line, "what ran": "not called yet"}
    for name in (PREFILL, STEPS):
        phases = [entry.phases[name] for entry in group if name in entry.phases]
        if phases:
            yield {**line, "phase": name, **_cells(phases)}


def _cells(phases: Sequence[Phase]) -> dict[str, str]:
    """One phase of some layers; numbers that differ between layers as the least and the most."""
    ran = list(dict.fromkeys(phase.ran for phase in phases))
    reads = [phase.last.reads for phase in phases]
    share = _share(phases)
    cells = {
        "what ran": ran[0] if len(ran) == 1 else f"{len(ran)} different",
        "keys read": _span(read.keys for read in reads if read is not None),
        "centroids": _span(read.centroids for read in reads if read is not None),
        "of": _span(phase.last.visible_keys for phase in phases),
        "share": _UNKNOWN if share is None else f"{100 * share:.0f} %",
        "calls": _span(phase.calls for phase in phases),
        "queries": _span(phase.queries for phase in phases),
        "seconds": f"{sum(phase.seconds for phase in phases):.4f}",
    }
    errors = sum((phase.errors for phase in phases), Errors())
    if errors.n:
        interval = errors.interval
        cells["error"] = f"{errors.mean:.4f}"
        cells["95 % interval"] = _UNKNOWN if interval is None else f"{interval[0]:.4f}-{interval[1]:.4f}"
        cells["largest error"] = f"{errors.largest:.4f}"
    return cells


def _share(phases: Sequence[Phase]) -> float | None:
    """Keys read as a share of the keys that queries could see."""
    reads, visible = _mean_reads(phases), _mean(phase.last.visible_keys for phase in phases)
    return reads.keys / visible if reads is not None and visible else None


def _mean_reads(phases: Sequence[Phase]) -> Reads | None:
    reads = [phase.last.reads for phase in phases if phase.last.reads is not None]
    return Reads(*(sum(numbers) / len(reads) for numbers in zip(*reads, strict=True))) if reads else None


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of what is known; None = nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _span(values: Iterable[float | None]) -> str:
    """The least and the most of what is known."""
    known = [value for value in values if value is not None]
    if not known:
        return _UNKNOWN
    least, most = f"{min(known):.0f}", f"{max(known):.0f}"
    return least if least == most else f"{least}-{most}"


def _table(lines: Sequence[Mapping[str, str]]) -> str:
    """Lines under a heading, without columns that are empty, or a configuration that all layers have."""
    columns = [name for name in _COLUMNS if name not in _ERRORS or any(name in line for line in lines)]
    if len({line["configuration"] for line in lines if "configuration" in line}) == 1:
        columns.remove("configuration")
    cells = [columns, *([line.get(name, "") for name in columns] for line in lines)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in _TEXT_COLUMNS else cell.rjust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        ).rstrip()
        for row in cells
    )
