"""`Routed` where it was not tuned: which windows of which texts are read, and what it is compared with.

What may be used to choose constants and what is reported is fixed here, before anything is measured:

- *Reported* windows are those of `REPORTED`, in every text. Nothing is tuned on them.
- *Tuning* windows are drawn by a seed from what no reported window of the same text touches.

`SEEN` are the windows that records and studies in experiments/ read in two novels and in Python's reference; no
reported window touches one. The inputs of experiments/routed/search come from another model and a novel at a place
that is not recorded, so a reported window of a novel may overlap with them.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from prescore import checks
from prescore.bench.language.documents import SOURCE, TOPICS, Document, load_documents
from prescore.bench.language.model import LanguageModel
from prescore.bench.language.perplexity import Window
from prescore.bench.language.tables import READS, group_by, result
from prescore.bench.methods import EXACT, Method, change, local_only, sliding_window
from prescore.bench.records import Record
from prescore.bench.tables import MISSING, Table, as_text, number, times
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
    """A text as a model reads it.

    Attributes:
        name: Its name in records.
        tokens: `[N]`, all of it.
        bos: The beginning-of-text token, which replaces the first token of every window; None = the tokenizer has
            none. Gemma fails without it.
    """

    name: str
    tokens: Tensor
    bos: int | None = None

    @classmethod
    def of(cls, language_model: LanguageModel, document: Document) -> TokenizedText:
        """Tokenize a document."""
        tokens = language_model.encode(document.text, special=False)
        return cls(document.name, tokens, language_model.tokenizer.bos_token_id)

    def window(self, start: int, length: int, name: str) -> Window:
        """So many tokens, the second half of which counts."""
        tokens = self.tokens[start : start + length].clone()
        if self.bos is not None:
            tokens[0] = self.bos
        return Window(f"{self.name}, {name}", tokens, length // 2)


def held_out_texts(sources: Sequence[str | Path] | None) -> list[Document]:
    """The given texts (of a LongBench file the first record), then Python's reference and source code."""
    given = load_documents(sources) if sources else []
    texts: dict[str, Document] = {}
    for document in (*given, *load_documents([TOPICS, SOURCE])):
        texts.setdefault(document.name.partition("#")[0], document)
    return list(texts.values())


def held_out_windows(text: TokenizedText, length: int, tuning_seed: int | None = None) -> list[Window]:
    """The reported windows of a text, or with a seed one that touches none of them; none where it is too short."""
    total = len(text.tokens)
    if tuning_seed is None:
        starts = _reported_starts(total, length)
        return [text.window(start, length, f"reported window {number + 1}") for number, start in enumerate(starts)]
    lengths = dict.fromkeys((*REPORTED, length))
    reported = [(start, start + other) for other in lengths for start in _reported_starts(total, other)]
    draw = random.Random(f"tuning window {tuning_seed} of {length} tokens")
    for _ in range(_MOST_DRAWS if total >= length else 0):
        start = draw.randint(0, total - length)
        if all(start >= end or start + length <= begin for begin, end in reported):
            return [text.window(start, length, f"tuning window {tuning_seed}")]
    return []


def _reported_starts(total: int, length: int) -> list[int]:
    checks.integer("length", length, minimum=2)
    if total < length:
        return []
    return [round(share * (total - length)) for share in REPORTED.get(length, _OTHER_LENGTHS)]


def held_out_methods(changes: Mapping[str, Any] | None = None) -> list[Method]:
    """Exact attention, the default (its label names changed fields), and the default without its far keys."""
    config = change(Routed(), changes or {})
    label = ", ".join(["default", *(f"{name}={value}" for name, value in (changes or {}).items())])
    local = local_only(config.chunk_size, previous_chunk=True, sinks=config.sinks)
    return [EXACT, Method(label, config), local]


def window_like(default: Record) -> Method:
    """The sliding window with the default's sinks that reads as much as the default did in this record."""
    name, method = "replaced_reads_per_query", default.config["method"]
    reads, sinks = number(default, default.results.get(name), name), method["config"]["sinks"]
    return sliding_window(default.config["n_tokens"], reads, sinks, compared_with=method["label"])


# Tables: what is lost, what is read and how long it takes, text by text.

_COMPARED = ("default", "window", "local")
_HELD_OUT_NOTE = (
    "above: loss over the second half of a window minus exact attention's, nats per token (worst of several "
    "windows); window: a sliding window with sinks that reads as much as the default; local: own and previous "
    "chunk with sinks; s: seconds inside the attention functions; YaRN: positions past the trained length"
)
_Measured = dict[str, Record]
"""A window: the records of `exact` and of what is compared with it."""


def held_out_tables(records: Sequence[Record]) -> list[Table]:
    """One table for every variant of the default and kind of window, reported windows first.

    A line per text, and below the texts of a model and length one over all their windows.
    """
    chosen = [r for r in records if r.config.get("part") == "loss" and r.config.get("experiment") == HELD_OUT]
    methods = [record.config["method"] for record in chosen]
    labels = dict.fromkeys(method["label"] for method in methods if method["config"]["type"] == "Routed")
    # `reported` or `tuning`, from a name such as "novel.txt, reported window 2"
    kinds = group_by(chosen, lambda record: str(record.config["document"]).rpartition(", ")[2].split(" ")[0])
    tables = []
    for kind, label in itertools.product(sorted(kinds), labels):
        windows = [window for window in _windows(kinds[kind], label) if "default" in window]
        if windows:
            tables.append(_held_out_table(windows, f"{label}, {kind} windows"))
    return tables


def _windows(records: Sequence[Record], label: str) -> Iterable[_Measured]:
    """What was measured on each window, for one variant of the default."""
    fields = ("model", "dtype", "layers", "document", "digest", "n_tokens")
    columns = {"Exact": "exact", "Routed": "default", "Baseline": "window", "Local": "local"}
    windows: dict[str, _Measured] = {}
    for record in records:
        method = record.config["method"]
        kind = method["config"]["type"]
        default = {"Routed": method["label"], "Baseline": method["axes"].get("compared_with")}.get(kind, label)
        if default == label:
            name = repr([*(record.config[field] for field in fields), record.seed])
            windows.setdefault(name, {})[columns[kind]] = record
    return windows.values()


def _held_out_table(windows: Sequence[_Measured], title: str) -> Table:
    def where(window: _Measured) -> tuple[str, str]:
        config, results = window["default"].config, window["default"].results
        scaled = "" if results.get("position_scaling") is None else " (YaRN)"
        return str(config["model"]), f"{config['n_tokens']}{scaled}"

    rows = []
    for labels, inside in group_by(windows, where).items():
        texts = group_by(inside, lambda window: str(window["default"].config["document"]).rpartition(", ")[0])
        texts |= {"all": inside} if len(texts) > 1 else {}
        rows += [(*labels, text, *_held_out_cells(of_text)) for text, of_text in texts.items()]
    columns = (
        *("model", "tokens", "text", "windows", "exact loss", *(f"{name} above" for name in _COMPARED)),
        *(READS, "exact s", *(f"{name} s" for name in _COMPARED), "speed-up"),
    )
    return Table(title, columns, tuple(rows), _HELD_OUT_NOTE, left=3)


def _held_out_cells(windows: Sequence[_Measured]) -> tuple[str, ...]:
    def mean(name: str, field: str) -> float | None:
        values = [result(window[name], field) for window in windows if name in window]
        return statistics.fmean(values) if values else None

    def above(name: str) -> str:
        """The mean, and the worst of several; a window that is not measured yet leaves both open."""
        if not all(name in window and "exact" in window for window in windows):
            return MISSING
        losses = [result(window[name], "loss") - result(window["exact"], "loss") for window in windows]
        shown = f"{statistics.fmean(losses):+.4f}"
        return shown if len(losses) == 1 else f"{shown} ({max(losses):+.4f})"

    loss = mean("exact", "loss")
    exact, default, *_ = seconds = [mean(name, "attention_seconds") for name in ("exact", *_COMPARED)]
    return (
        str(len(windows)),
        MISSING if loss is None else f"{loss:.4f}",
        *(above(name) for name in _COMPARED),
        as_text(mean("default", "replaced_reads_per_query"), 4),
        *(MISSING if spent is None else f"{spent:.1f}" for spent in seconds),
        times(exact / default if exact and default else None),
    )
