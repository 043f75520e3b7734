"""Loss of a language model on long documents while its attention is replaced."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prescore import checks
from prescore.bench.language.documents import Document
from prescore.bench.language.model import LanguageModel
from prescore.bench.methods import Method
from prescore.bench.observed import costs_of_ranks, observed
from prescore.bench.records import Row, Values
from prescore.integrations.apply import Layers
from prescore.parallel.comm import Group
from prescore.rng import Streams

POSITIONS_AT_ONCE = 256
"""Positions whose logits are in memory at the same time."""

# no tokenizer in use makes less than one token of this many characters of real text
_CHARACTERS_PER_TOKEN = 12


@dataclass(frozen=True, eq=False)
class Window:
    """The tokens of a document that are read.

    Attributes:
        document: Its name.
        tokens: `[N]`.
        first: Positions `first..N-1` count in the loss.
    """

    document: str
    tokens: Tensor
    first: int

    @property
    def digest(self) -> str:
        """A hash of the tokens: a changed text is another row."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()[:12]

    def seed(self, seed: int) -> int:
        """Of the draws of this window."""
        return Streams(seed).child(f"window {self.digest}").seed


def make_windows(
    language_model: LanguageModel,
    documents: Sequence[Document],
    length: int,
    *,
    first: int | None = None,
    offset: int = 0,
    per_document: int = 1,
) -> list[Window]:
    """The tokens `offset..offset+length-1` of every document, and further windows evenly spaced after them.

    Args:
        language_model: Whose tokenizer is used.
        documents: Texts.
        length: Tokens of a window.
        first: First position that counts; None = the second half.
        offset: Tokens skipped at the start of a document.
        per_document: Windows in each document; they do not overlap.
    """
    checks.integer("length", length, minimum=2)
    checks.integer("offset", offset, minimum=0)
    first = length // 2 if first is None else first
    if not 1 <= first < length:
        raise ValueError(f"first position must lie between 1 and {length - 1}, got {first}")
    checks.integer("windows", per_document, minimum=1)
    windows, needed = [], offset + per_document * length
    for document in documents:
        # several windows are spread over the whole text, one needs its beginning only
        tokens = _tokens(language_model, document.text, needed if per_document == 1 else None)
        if len(tokens) < needed:
            raise ValueError(f"document {document.name} must have at least {needed} tokens, got {len(tokens)}")
        step = 0 if per_document == 1 else (len(tokens) - offset - length) // (per_document - 1)
        for number in range(per_document):
            name = document.name if per_document == 1 else f"{document.name}, window {number + 1}"
            start = offset + number * step
            windows.append(Window(name, tokens[start : start + length], first))
    return windows


def has_tokens(language_model: LanguageModel, document: Document, needed: int) -> bool:
    """Whether a document has so many tokens."""
    return len(_tokens(language_model, document.text, needed)) >= needed


def _tokens(language_model: LanguageModel, text: str, needed: int | None) -> Tensor:
    """At least `needed` tokens where the text has them, None = all; a novel is not tokenized for one page."""
    beginning = text if needed is None else text[: needed * _CHARACTERS_PER_TOKEN]
    tokens = language_model.encode(beginning)
    enough = len(beginning) == len(text) or (needed is not None and len(tokens) > needed)
    return tokens if enough else language_model.encode(text)


def window_losses(
    language_model: LanguageModel, window: Window, group: Group | None = None, *, at_once: int = POSITIONS_AT_ONCE
) -> Tensor:
    """Negative log-likelihood in nats of every counted position, `[N - first]`, float64 on the CPU.

    The logits of `at_once` positions exist at a time: memory does not grow with length times vocabulary. On
    several ranks every rank reads its shard of the window and gets all losses.
    """
    tokens = window.tokens
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    if len(tokens) % size:
        raise ValueError(f"length must be a multiple of the {size} ranks, got {len(tokens)}")
    n_local = len(tokens) // size
    begin = rank * n_local
    hidden = language_model.hidden(tokens[begin : begin + n_local])
    # the last position has nothing to predict; its loss is cut off below
    targets = torch.cat((tokens, tokens[-1:]))[begin + 1 : begin + 1 + n_local].to(hidden.device)
    losses = torch.zeros(n_local, dtype=torch.float64)
    n_used = n_local - (rank == size - 1)
    for start in range(max(0, window.first - 1 - begin), n_used, at_once):
        some = slice(start, min(start + at_once, n_used))
        logits = language_model.logits(hidden[some])
        losses[some] = torch.nn.functional.cross_entropy(logits, targets[some], reduction="none").double().cpu()
    if group is not None:
        losses = group.gather(losses.to(group.device)).cpu().flatten()
    return losses[window.first - 1 : -1]


def measure_loss(
    language_model: LanguageModel,
    window: Window,
    method: Method,
    *,
    layers: Layers | None = None,
    seed: int = 0,
    group: Group | None = None,
    segments: int = 0,
) -> Values:
    """Loss, perplexity, reads per query and times of one window under one method, on one rank or several.

    Every window has draws of its own under the same seed. With `segments`, also the mean losses of so many
    consecutive parts of the counted positions.
    """
    with (
        language_model.extended(len(window.tokens)) as scaling,
        observed(
            language_model.model, method.config, layers=layers, seed=window.seed(seed), group=group
        ) as observer,
    ):
        cost = observer.results if group is None else costs_of_ranks(observer, group)
        begin = time.perf_counter()
        losses = window_losses(language_model, window, group)
        seconds = time.perf_counter() - begin
        results = cost()
    loss = float(losses.mean())
    perplexity = math.exp(loss) if loss < 700 else math.inf
    results |= {"loss": loss, "perplexity": perplexity, "positions": len(losses)}
    results["forward_seconds"] = round(seconds, 3)
    if segments:
        results["segment_losses"] = [float(part.mean()) for part in losses.tensor_split(segments)]
    if scaling is not None:
        results["position_scaling"] = scaling
    return results


def loss_row(
    language_model: LanguageModel, window: Window, method: Method, *, experiment: str | None = None, **options: Any
) -> Row:
    """One window under one method as a row; options as of `measure_loss`."""
    layers, group = options.get("layers"), options.get("group")
    config = {
        "part": "loss",
        "experiment": experiment,
        **describe_window(language_model, window),
        "first": window.first,
        "layers": "all" if layers is None else layers,
        "method": method.describe(),
    }
    if group is not None:
        config["ranks"] = group.size
    measure = partial(measure_loss, language_model, window, method, **options)
    return Row(config, options.get("seed", 0), measure, cost=float(len(window.tokens)))


def describe_window(language_model: LanguageModel, window: Window) -> Values:
    """The model and the text of a row."""
    return {
        "model": language_model.name,
        "dtype": language_model.dtype,
        "document": window.document,
        "digest": window.digest,
        "n_tokens": len(window.tokens),
    }
