"""`Routed` where it was not tuned: which windows of which texts are read, and what it is compared with.

What may be used to choose constants and what is reported is fixed here, before anything is measured:

- *Reported* windows are those of `REPORTED`, in every text. Nothing is tuned on them.
- *Tuning* windows are drawn by a seed from what no reported window of the same text touches.

`SEEN` are the windows that records and studies in experiments/ read in two novels and in Python's reference; no
reported window touches one. The inputs of experiments/routed/search come from another model and a novel at a place
that is not recorded, so a reported window of a novel may overlap with them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from prescore import checks
from prescore.bench.language.documents import SOURCE, TOPICS, Document, load_documents
from prescore.bench.language.model import LanguageModel
from prescore.bench.language.perplexity import Window
from prescore.bench.methods import EXACT, Method, change, local_only, sliding_window
from prescore.bench.records import Record
from prescore.bench.tables import number
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
        return [text.window(start, length, f"reported window {place + 1}") for place, start in enumerate(starts)]
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
