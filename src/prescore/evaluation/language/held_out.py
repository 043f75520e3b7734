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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from prescore import checks
from prescore.config import Routed
from prescore.evaluation.language.documents import SOURCE, TOPICS, Document, load_documents
from prescore.evaluation.language.methods import LanguageMethod, exact, nearby, prescored, sliding_window
from prescore.evaluation.language.model import LanguageModel
from prescore.evaluation.language.overrides import Overrides, changed
from prescore.evaluation.language.perplexity import Window
from prescore.records import Record

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
