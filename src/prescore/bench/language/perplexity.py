"""Loss of a language model on long documents while its attention is replaced."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from prescore import checks
from prescore.bench.language.documents import Document
from prescore.bench.language.methods import LanguageMethod, Meter, counted, exact_rows, measured_attention
from prescore.bench.language.model import LanguageModel
from prescore.bench.memory import forget_peak, held_megabytes, peak_megabytes
from prescore.bench.records import Row
from prescore.config import Exact
from prescore.integrations.apply import Layers, find_adapter, pick_layers, replace_context_parallel
from prescore.integrations.attention import Attend, AttentionContext
from prescore.integrations.parallel import ContextParallel, ContextParallelAttention
from prescore.parallel.comm import Group
from prescore.parallel.entry import OWN_HEADS
from prescore.parallel.ulysses import attend_by_heads
from prescore.types import Result, Values

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


# Loss of a language model whose documents lie on several ranks: the figures of one process, on every rank.


def piece_losses(
    language_model: LanguageModel, tokens: Tensor, first: int, group: Group, *, at_once: int
) -> Tensor:
    """Negative log-likelihood of the positions from `first` on, `[N - first]`, the same on every rank."""
    if len(tokens) % group.size:
        raise ValueError(f"length must be a multiple of the {group.size} ranks, got {len(tokens)}")
    n_own = len(tokens) // group.size
    begin = group.rank * n_own
    hidden = language_model.hidden(tokens[begin : begin + n_own])
    # the last position of the last rank has nothing to predict; its number is cut off below
    targets = torch.cat((tokens, tokens[-1:]))[begin + 1 : begin + 1 + n_own].to(hidden.device)
    own = torch.zeros(n_own, dtype=torch.float64)
    for start in range(max(0, first - 1 - begin), n_own, at_once):
        some = slice(start, min(start + at_once, n_own))
        logits = language_model.logits(hidden[some])
        own[some] = torch.nn.functional.cross_entropy(logits, targets[some], reduction="none").double().cpu()
    return group.gather(own.to(group.device)).cpu().flatten()[first - 1 : -1]


@contextmanager
def measured_pieces(
    language_model: LanguageModel, method: LanguageMethod, group: Group, *, layers: Layers | None, seed: int
) -> Iterator[Callable[[], Values]]:
    """Let a model on several ranks attend by `method` inside the block; yields what tells the figures.

    Rows are means over the heads and positions of all ranks; seconds, bytes and memory those of the rank with most
    of them. Memory is the most that was held inside the block, and what was held before it, the model included.
    """
    model = language_model.model
    n_layers = len(find_adapter(model).layers(model))
    meter = Meter(replaced=frozenset(pick_layers(layers, n_layers)))
    parallel_group = ContextParallel(group)
    functions: dict[int, Attend] = {}
    for number in range(n_layers):
        chosen = method if number in meter.replaced else LanguageMethod("exact", "exact")
        functions[number] = _Timed(meter, group, _attention(chosen, parallel_group, seed))
    undo = replace_context_parallel(model, functions, parallel_group)
    forget_peak()
    sent, held = group.sent, held_megabytes()
    try:
        yield lambda: _figures(meter, group, [(group.sent - sent) / n_layers, peak_megabytes(), held])
    finally:
        undo()


class _Timed:
    """Attention of one layer on its piece, timed, its rows counted."""

    def __init__(self, meter: Meter, group: Group, attend: Callable[..., Result]) -> None:
        self.meter, self.group, self.attend = meter, group, attend

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        meter, layer = self.meter, context.layer
        result = meter.timed(layer, lambda: self.attend(query, key, value, context), key.device)
        if layer in meter.replaced:
            # of all queries, a rank works off its positions, or all positions of its heads
            own_heads = result.stats.get(OWN_HEADS)
            share = 1.0 if own_heads is None else own_heads * self.group.size / query.shape[1]
            meter.rows[layer] = share * sum(result.count_reads())
        else:
            meter.exact_rows[layer] = exact_rows(query.shape[2] * self.group.size)
        return result.output


def _attention(method: LanguageMethod, parallel_group: ContextParallel, seed: int) -> Callable[..., Result]:
    if method.kind in ("exact", "prescored"):
        config = Exact() if method.config is None else method.config
        return partial(_counted, ContextParallelAttention(config, parallel_group, seed=seed))
    return partial(_by_heads, parallel_group.group, method.attention(seed))


def _counted(
    attention: ContextParallelAttention, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext
) -> Result:
    output = attention(query, key, value, context)
    reads = None if attention.last is None else attention.last.reads
    if reads is None:
        raise RuntimeError(f"keys read must be known after a shard of a prompt, got {attention.last}")
    own_heads = attention.query_heads
    return counted(output, lambda: sum(reads), {} if own_heads is None else {OWN_HEADS: own_heads})


def _by_heads(
    group: Group,
    attend: Callable[..., Result],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: AttentionContext,
) -> Result:
    """What knows nothing of ranks, on whole sequences of some heads."""
    rows, n_heads = [0.0], [0]

    def attend_whole(*whole: Tensor) -> Tensor:
        result = attend(*whole, context)
        rows[0], n_heads[0] = sum(result.count_reads()), result.output.shape[1]
        return result.output

    output = attend_by_heads(group, query, key, value, attend_whole)
    return counted(output, lambda: rows[0], {OWN_HEADS: n_heads[0]})


def _figures(meter: Meter, group: Group, costs: list[float]) -> Values:
    """Figures of all ranks; `costs` are this rank's bytes per layer, peak of memory, and memory before."""
    figures = meter.figures()
    seconds = [name for name in figures if name.endswith("_seconds") and figures[name] is not None]
    rows = [name for name in figures if name.endswith("keys_per_query") and figures[name] is not None]
    own = [float(figures[name]) for name in (*seconds, *rows)]
    told = torch.tensor([*own, *costs], dtype=torch.float64, device=group.device)
    everyone = group.gather(told).cpu()
    most, mean = everyone.amax(0).tolist(), everyone.mean(0).tolist()
    for place, name in enumerate((*seconds, *rows)):
        figures[name] = round((most if name in seconds else mean)[place], 4 if name in seconds else 2)
    return {
        **figures,
        "ranks": group.size,
        "bytes_sent_per_layer": round(most[-3]),
        "peak_megabytes": round(most[-2], 1),
        "held_megabytes": round(most[-1], 1),
    }
