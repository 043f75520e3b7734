"""Loss of a language model whose documents lie on several ranks: the figures of one process, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from prescore.api.run import Counted
from prescore.config import Exact
from prescore.evaluation.language.cost import Meter, exact_rows
from prescore.evaluation.language.methods import LanguageMethod
from prescore.evaluation.language.model import LanguageModel
from prescore.evaluation.peak_memory import forget_peak, held_megabytes, peak_megabytes
from prescore.integrations.apply import find_adapter, replace_together
from prescore.integrations.attend import Attend, Situation
from prescore.integrations.layers import Layers, pick_layers
from prescore.integrations.together import Together, TogetherAttention
from prescore.parallel.engine import OWN_HEADS
from prescore.parallel.group import Group
from prescore.parallel.heads import attend_by_heads
from prescore.values import Values


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
    together = Together(group)
    functions: dict[int, Attend] = {}
    for number in range(n_layers):
        chosen = method if number in meter.replaced else LanguageMethod("exact", "exact")
        functions[number] = _Timed(meter, group, _attention(chosen, together, seed))
    undo = replace_together(model, functions, together)
    forget_peak()
    sent, held = group.sent, held_megabytes()
    try:
        yield lambda: _figures(meter, group, [(group.sent - sent) / n_layers, peak_megabytes(), held])
    finally:
        undo()


class _Timed:
    """Attention of one layer on its piece, timed, its rows counted."""

    def __init__(self, meter: Meter, group: Group, attend: Callable[..., Counted]) -> None:
        self.meter, self.group, self.attend = meter, group, attend

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, situation: Situation) -> Tensor:
        meter, layer = self.meter, situation.layer
        output, count_rows, figures = meter.timed(
            layer, lambda: self.attend(query, key, value, situation), key.device
        )
        if layer in meter.replaced:
            # of all queries, a rank works off its positions, or all positions of its heads
            own_heads = figures.get(OWN_HEADS)
            share = 1.0 if own_heads is None else own_heads * self.group.size / query.shape[1]
            meter.rows[layer] = share * count_rows()
        else:
            meter.exact_rows[layer] = exact_rows(query.shape[2] * self.group.size)
        return output


def _attention(method: LanguageMethod, together: Together, seed: int) -> Callable[..., Counted]:
    if method.kind in ("exact", "prescored"):
        config = Exact() if method.config is None else method.config
        return partial(_counted, TogetherAttention(config, together, seed=seed))
    return partial(_by_heads, together.group, method.attention(seed))


def _counted(
    attention: TogetherAttention, query: Tensor, key: Tensor, value: Tensor, situation: Situation
) -> Counted:
    output = attention(query, key, value, situation)
    did = attention.last
    rows = None if did is None else did.rows
    if rows is None:
        raise RuntimeError(f"rows must be known after a piece of a prompt, got {did}")
    own_heads = attention.own_heads
    return Counted(output, lambda: rows, {} if own_heads is None else {OWN_HEADS: own_heads})


def _by_heads(
    group: Group, attend: Callable[..., Counted], query: Tensor, key: Tensor, value: Tensor, situation: Situation
) -> Counted:
    """What knows nothing of ranks, on whole sequences of some heads."""
    rows, n_heads = [0.0], [0]

    def attend_whole(*whole: Tensor) -> Tensor:
        output, count_rows, _ = attend(*whole, situation)
        rows[0], n_heads[0] = count_rows(), output.shape[1]
        return output

    output = attend_by_heads(group, query, key, value, attend_whole)
    return Counted(output, lambda: rows[0], {OWN_HEADS: n_heads[0]})


def _figures(meter: Meter, group: Group, costs: list[float]) -> Values:
    """Figures of all ranks; `costs` are this rank's bytes per layer, peak of memory, and memory before."""
    figures = meter.figures()
    seconds = [name for name in figures if name.endswith("_seconds") and figures[name] is not None]
    rows = [name for name in figures if name.endswith("rows_per_query") and figures[name] is not None]
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
