"""Loss of a language model on long documents while its attention is replaced."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore import checks
from prescore.evaluation.language.documents import Document
from prescore.evaluation.language.measured import measured_attention
from prescore.evaluation.language.methods import LanguageMethod
from prescore.evaluation.language.model import LanguageModel
from prescore.evaluation.language.pieces import measured_pieces, piece_losses
from prescore.integrations.layers import Layers
from prescore.parallel.group import Group
from prescore.records import Row
from prescore.values import Values

POSITIONS_AT_ONCE = 256
"""Positions whose logits exist at the same time."""

# no tokenizer in use makes less than one token of this many characters of real text
_CHARACTERS_PER_TOKEN = 12


@dataclass(frozen=True, eq=False)
class Window:
    """The tokens of a document that are read, and from which position on they are predicted.

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
        """A short name of the tokens themselves: a changed text is another row."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()[:12]


def make_windows(
    language_model: LanguageModel,
    documents: Sequence[Document],
    length: int,
    *,
    first: int | None = None,
    offset: int = 0,
    per_document: int = 1,
    skip_short: bool = False,
) -> list[Window]:
    """The tokens `offset..offset+length-1` of every document, and further windows evenly spaced behind them.

    Args:
        language_model: Whose tokenizer cuts the text.
        documents: Texts.
        length: Tokens read.
        first: First position that counts; None = the second half.
        offset: Tokens passed over at the start of a document.
        per_document: Windows in each document, none overlapping another.
        skip_short: Leave out documents that are too short instead of refusing them.
    """
    checks.integer("length", length, minimum=2)
    checks.integer("offset", offset, minimum=0)
    first = length // 2 if first is None else first
    if not 1 <= first < length:
        raise ValueError(f"first position must lie between 1 and {length - 1}, got {first}")
    checks.integer("windows", per_document, minimum=1)
    windows, wanted = [], offset + per_document * length
    for document in documents:
        # several windows are spread over the whole text, one needs its beginning only
        tokens = _tokens(language_model, document.text, wanted if per_document == 1 else None)
        if len(tokens) >= wanted:
            step = 0 if per_document == 1 else (len(tokens) - offset - length) // (per_document - 1)
            for number in range(per_document):
                name = document.name if per_document == 1 else f"{document.name}, window {number + 1}"
                start = offset + number * step
                windows.append(Window(name, tokens[start : start + length], first))
        elif not skip_short:
            raise ValueError(f"document {document.name} must have at least {wanted} tokens, got {len(tokens)}")
    if not windows:
        raise ValueError(f"documents must have one of at least {wanted} tokens, got {len(documents)} shorter")
    return windows


def has_tokens(language_model: LanguageModel, document: Document, wanted: int) -> bool:
    """Whether a document has so many tokens."""
    return len(_tokens(language_model, document.text, wanted)) >= wanted


def streamed_loss(language_model: LanguageModel, window: Window, *, at_once: int = POSITIONS_AT_ONCE) -> Tensor:
    """Negative log-likelihood in nats of every counted position, `[N - first]`, float64 on the CPU.

    The logits of `at_once` positions exist at a time: memory does not grow with length times vocabulary.
    """
    hidden = language_model.hidden(window.tokens)
    targets = window.tokens.to(hidden.device)
    losses = []
    for begin in range(window.first, len(targets), at_once):
        end = min(begin + at_once, len(targets))
        logits = language_model.logits(hidden[begin - 1 : end - 1])
        losses.append(torch.nn.functional.cross_entropy(logits, targets[begin:end], reduction="none"))
    return torch.cat(losses).double().cpu()


def measure_loss(
    language_model: LanguageModel,
    window: Window,
    method: LanguageMethod,
    *,
    layers: Layers | None = None,
    seed: int = 0,
    group: Group | None = None,
    stretches: int = 0,
) -> Values:
    """Loss, perplexity, rows per query and times of one document under one method, on one rank or several.

    With `stretches`, also the mean losses of so many parts of the counted positions, one behind the other.
    """
    with language_model.extended(len(window.tokens)) as scaling:
        if group is None:
            with measured_attention(language_model.model, method, layers=layers, seed=seed) as meter:
                begin = time.perf_counter()
                losses = streamed_loss(language_model, window)
                seconds = time.perf_counter() - begin
                figures = meter.figures()
        else:
            with measured_pieces(language_model, method, group, layers=layers, seed=seed) as told:
                begin = time.perf_counter()
                losses = piece_losses(
                    language_model, window.tokens, window.first, group, at_once=POSITIONS_AT_ONCE
                )
                seconds = time.perf_counter() - begin
                figures = told()
    loss = float(losses.mean())
    return {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "positions": len(losses),
        "forward_seconds": round(seconds, 3),
        **figures,
        **(
            {"stretch_losses": [float(part.mean()) for part in losses.tensor_split(stretches)]}
            if stretches
            else {}
        ),
        **({} if scaling is None else {"position_scaling": scaling}),
    }


def described(language_model: LanguageModel, window: Window) -> Values:
    """The model and the text that a row is about."""
    return {
        "model": language_model.name,
        "dtype": language_model.dtype,
        "document": window.document,
        "digest": window.digest,
        "n_tokens": len(window.tokens),
    }


def loss_row(
    language_model: LanguageModel,
    window: Window,
    method: LanguageMethod,
    *,
    experiment: str | None = None,
    layers: Layers | None = None,
    seed: int = 0,
    group: Group | None = None,
    stretches: int = 0,
) -> Row:
    """One document under one method as a row to be measured and resumed; arguments as of `measure_loss`."""
    return Row(
        config={
            "part": "loss",
            "experiment": experiment,
            **described(language_model, window),
            "first": window.first,
            "layers": "all" if layers is None else layers,
            "method": method.describe(),
            **({} if group is None else {"ranks": group.size}),
        },
        seed=seed,
        measure=lambda: measure_loss(
            language_model, window, method, layers=layers, seed=seed, group=group, stretches=stretches
        ),
        cost=float(len(window.tokens)),
    )


def _tokens(language_model: LanguageModel, text: str, wanted: int | None) -> Tensor:
    """At least `wanted` tokens where the text has them, None = all; a novel is not cut up for its first page."""
    beginning = text if wanted is None else text[: wanted * _CHARACTERS_PER_TOKEN]
    tokens = language_model.encode(beginning)
    enough = len(beginning) == len(text) or (wanted is not None and len(tokens) > wanted)
    return tokens if enough else language_model.encode(text)
