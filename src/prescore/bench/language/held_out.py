"""The default where it was not tuned: which texts and windows are read, and what is measured beside it.

What may be looked at while constants are chosen and what is reported is fixed here, before anything is measured:

- *Reported* windows are those of `REPORTED`, in every text. Nothing is tuned on them.
- *Tuning* windows are drawn by a seed from what no reported window of the same text touches.

`SEEN` are the windows that records and studies in experiments/ read of two novels and of Python's reference; no
reported window touches one. The inputs of experiments/routed/search come from another model and a novel at a place
that is not recorded, so a reported window of a novel may overlap with them.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from prescore import checks
from prescore.bench.language.documents import SOURCE, TOPICS, Document, load_documents
from prescore.bench.language.methods import (
    LanguageMethod,
    Overrides,
    changed,
    exact,
    nearby,
    prescored,
    sliding_window,
)
from prescore.bench.language.model import LanguageModel
from prescore.bench.language.perplexity import Window
from prescore.bench.records import Record
from prescore.bench.tables import MISSING, Table, as_text
from prescore.config import Routed

HELD_OUT = "default"
"""The experiment's name on the command line and in records."""
LENGTHS = (8192, 16384, 32768)
REPORTED = {8192: (0.45, 0.80), 16384: (0.40,), 32768: (0.50,)}
"""Where reported windows begin: 0 = at the text's beginning, 1 = so that they end with it."""
SEEN = {8192: (0.0, 1 / 3, 2 / 3, 1.0), 16384: (0.0,)}
"""Windows read while constants were chosen, by the same shares; of the novels tokens `SEEN_TOKENS` too."""
SEEN_TOKENS = (40_000, 48_192)
_OTHER_LENGTHS = (0.45,)
_MOST_DRAWS = 1000


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """A whole text as a model reads it.

    Attributes:
        name: What records call it.
        tokens: `[N]`, all of it.
        begin: A token that stands before every window; None = the model knows none.
    """

    name: str
    tokens: Tensor
    begin: int | None = None

    def window(self, start: int, length: int, name: str) -> Window:
        """So many tokens, the second half of which counts; where there is a beginning token it is the first."""
        tokens = self.tokens[start : start + length].clone()
        if self.begin is not None:
            tokens[0] = self.begin
        return Window(f"{self.name}, {name}", tokens, length // 2)


def held_out_texts(sources: Sequence[str | Path] | None) -> list[Document]:
    """The given texts, of a file of LongBench records the first, then Python's reference and source code."""
    given = load_documents(sources) if sources else []
    found: dict[str, Document] = {}
    for document in (*given, *load_documents([TOPICS, SOURCE])):
        found.setdefault(document.name.partition("#")[0], document)
    return list(found.values())


def tokenized(language_model: LanguageModel, documents: Sequence[Document]) -> list[TokenizedText]:
    """Every text cut up once.

    A window begins with the beginning-of-text token where the tokenizer has one: Gemma is lost without it.
    """
    begin = language_model.tokenizer.bos_token_id
    return [TokenizedText(d.name, language_model.encode(d.text, special=False), begin) for d in documents]


def reported_windows(text: TokenizedText, length: int) -> list[Window]:
    """The windows of a text that are reported; none where it is too short."""
    starts = _reported_starts(len(text.tokens), length)
    return [
        text.window(start, length, f"reported window {number}") for number, start in enumerate(starts, start=1)
    ]


def tuning_windows(text: TokenizedText, length: int, seed: int) -> list[Window]:
    """One window drawn by a seed, apart from all that are reported; none where there is no room for one."""
    total = len(text.tokens)
    taken = [
        (start, start + other)
        for other in dict.fromkeys((*REPORTED, length))
        for start in _reported_starts(total, other)
    ]
    draw = random.Random(f"tuning window {seed} of {length} tokens")
    for _ in range(_MOST_DRAWS if total >= length else 0):
        start = draw.randint(0, total - length)
        if all(start >= end or start + length <= begin for begin, end in taken):
            return [text.window(start, length, f"tuning window {seed}")]
    return []


def measured_first(overrides: Overrides | None = None) -> list[LanguageMethod]:
    """Exact attention, the default, and the default without its far part.

    Args:
        overrides: Fields of the default to change; its label then says so.
    """
    overrides = overrides or {}
    config = changed(Routed(), overrides)
    words = ["default", *(f"{name}={value}" for name, value in overrides.items())]
    return [exact(), prescored(", ".join(words), config), nearby(config.chunk_size, config.sinks)]


def measured_after(default: Record) -> LanguageMethod:
    """The window that reads as many rows as the default did in this record, with its sinks."""
    figures, method = default.figures, default.config["method"]
    rows = figures.get("replaced_rows_per_query")
    if not isinstance(rows, int | float):
        raise ValueError(f"record {default.key} must have the rows that the default read, got {rows!r}")
    sinks = method["settings"]["sinks"]
    return sliding_window(default.config["n_tokens"], rows, sinks, beside=method["label"])


def _reported_starts(total: int, length: int) -> list[int]:
    checks.integer("length", length, minimum=2)
    if total < length:
        return []
    return [round(share * (total - length)) for share in REPORTED.get(length, _OTHER_LENGTHS)]


# The default on held-out windows as a table: what is lost, what is read and how long it takes, text by text.

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
