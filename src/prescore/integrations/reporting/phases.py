"""What a layer did since its last prompt began, by phase: reading the prompt, then its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from prescore.config import Config, Exact, Hyper, Routed, Selected
from prescore.decoding.decoder import OVER_ALL, STEP_AT_MOST, routes

PREFILL, STEPS = "prefill", "steps"
SHORT = "exact: "
"""How the words for a call begin that read everything although its configuration need not."""

CountRows: TypeAlias = Callable[[], float | None]


@dataclass(eq=False)
class Did:
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
        read_further: Share of queries that looked for lighter keys than in any case, or read everything.
        read_everything: Share of queries that read everything because no search was enough.
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
    read_further: float | None = None
    read_everything: float | None = None
    native: str | None = None

    @property
    def rows(self) -> float | None:
        """Key and stand-in rows that a query met, on average, padding not counted; None = not known."""
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

    def counted(self) -> Did:
        """The same, with its rows counted and nothing else kept."""
        if not callable(self._rows) and not callable(self._visible):
            return self
        return replace(self, _rows=self.rows, _visible=self.visible)

    def let_go(self) -> Did:
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

    last: Did
    calls: int = 0
    queries: int = 0
    seconds: float = 0.0
    ways: dict[str, int] = field(default_factory=dict)

    def and_then(self, did: Did) -> Phase:
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


class History:
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

    def add(self, did: Did) -> None:
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
    whole = config.top_k == 1.0 if isinstance(config.top_k, float) else config.top_k >= n_keys
    return whole and isinstance(config.inner, Exact)
