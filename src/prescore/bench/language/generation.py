"""Generation measured: prefill and decode apart, attention apart from the rest, cache memory, agreement."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from prescore import checks
from prescore.bench.records import Record
from prescore.bench.tables import MISSING, Table, as_text
from prescore.config import Config, Routed
from prescore.integrations.apply import Layers, apply, find_adapter, pick_layers, replace_attention
from prescore.integrations.attention import Attend, AttentionContext, PrescoredAttention, attend_exactly
from prescore.integrations.decode import keeps_selection
from prescore.types import Values


@dataclass(frozen=True)
class Continuation:
    """How a prompt is continued.

    Attributes:
        config: How the chosen layers attend; None = the model's own attention, exact.
        layers: Which layers, as in `prescore.apply`.
        max_new_tokens: Steps at most; stops at the model's end token.
        evict: Free the unselected keys and values after the prefill.
        refresh_every: Select anew after so many tokens; None = keep the prompt's selection.
        n_beams: Beams of a beam search; 1 = greedy.
        ignore_end: Go on behind the model's end token.
    """

    config: Config | None = None
    layers: Layers = "all"
    max_new_tokens: int = 64
    evict: bool = False
    refresh_every: int | None = None
    n_beams: int = 1
    ignore_end: bool = False

    def __post_init__(self) -> None:
        checks.integer("max_new_tokens", self.max_new_tokens, minimum=1)
        checks.integer("n_beams", self.n_beams, minimum=1)
        if self.ignore_end and self.n_beams > 1:
            raise ValueError(f"ignore_end must come with one beam, got n_beams={self.n_beams}")
        keeps = self.config is not None and keeps_selection(self.config)
        for name, value in {"evict": self.evict, "refresh_every": self.refresh_every}.items():
            if value and not keeps:
                got = "the model's own attention" if self.config is None else type(self.config).__name__
                raise ValueError(f"{name} must come with a Selected that leaves keys out, got {got}")

    def cache(self, model: Any) -> Any:
        """A new cache for a generation."""
        from transformers import DynamicCache

        from prescore.integrations.transformers.cache import PrescoredCache

        text_config = model.config.get_text_config(decoder=True)
        if self.config is None:
            return DynamicCache(config=text_config)
        return PrescoredCache(text_config, evict=self.evict, refresh_every=self.refresh_every)


@dataclass
class Stopwatch:
    """Seconds spent in attention, how often it went which way and ran what, and what its layers say."""

    seconds: float = 0.0
    paths: Counter[str] = field(default_factory=Counter)
    ran: Counter[str] = field(default_factory=Counter)
    layers: dict[int, PrescoredAttention] = field(default_factory=dict)

    def restart(self) -> None:
        """Begin at zero."""
        self.seconds = 0.0
        self.paths.clear()
        self.ran.clear()

    def timed(self, attend: Attend) -> Attend:
        """The same attention, with its time on this watch."""

        def attend_and_stop(query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
            started = time.perf_counter()
            output = attend(query, key, value, context)
            if output.device.type == "cuda":
                torch.cuda.synchronize(output.device)
            self.seconds += time.perf_counter() - started
            if isinstance(attend, PrescoredAttention) and attend.last is not None:
                self.paths[attend.last.path] += 1
                self.ran[attend.last.ran] += 1
            return output

        return attend_and_stop

    def error_bars(self) -> list[Values]:
        """What layers with a tolerance did in the last call of each phase, an entry for every layer and phase."""
        return [
            {
                "layer": number,
                "phase": name,
                "rows": None if phase.last.reads is None else sum(phase.last.reads),
                "visible": phase.last.visible_keys,
                "error": phase.last.stats["error_estimate"],
                "error_limit": phase.last.stats["error_bound_max"],
                "refined": phase.last.stats["refined"],
                "read_all": phase.last.stats["read_all"],
            }
            for number, attention in self.layers.items()
            for name, phase in attention.trace.phases.items()
            if "error_bound_max" in phase.last.stats
        ]


@dataclass(frozen=True, eq=False)
class Generated:
    """What one generation gave.

    Attributes:
        tokens: New tokens.
        logits: `[V]` of the first new token, for comparing methods.
        figures: Plain numbers: seconds, speeds, bytes, rows per layer.
    """

    tokens: list[int]
    logits: Tensor
    figures: Values = field(default_factory=dict)


@torch.no_grad()
def generate_measured(
    model: Any,
    ids: Tensor,
    how: Continuation,
    on_token: Callable[[int], None] | None = None,
    forced: Sequence[int] | None = None,
) -> Generated:
    """Greedy generation after a prompt, or its choices while it is shown a given continuation.

    Args:
        model: A causal model of transformers.
        ids: `[1, N]` prompt.
        how: What is generated, and by which attention.
        on_token: Called with every new token as soon as it is known.
        forced: Tokens that every step sees instead of those chosen before it; as many are chosen.
    """
    from prescore.integrations.transformers.cache import cache_report

    cache, show = how.cache(model), on_token or _ignore
    with timed_attention(model, how.config, how.layers) as watch:
        started = time.perf_counter()
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        if how.config is not None:
            cache.select()
        prefill, prefill_attention, prefill_ran = time.perf_counter() - started, watch.seconds, dict(watch.ran)
        tokens = [int(logits.argmax())]
        ends = set() if how.ignore_end or forced is not None else _end_tokens(model)
        n_tokens, fed = how.max_new_tokens, tokens
        if forced is not None:
            n_tokens, fed = len(forced), list(forced)
        show(tokens[-1])
        started = time.perf_counter()
        watch.restart()
        while len(tokens) < n_tokens and tokens[-1] not in ends:
            last = torch.tensor([[fed[len(tokens) - 1]]], device=ids.device)
            step = model(last, past_key_values=cache, use_cache=True)
            tokens.append(int(step.logits[0, -1].argmax()))
            show(tokens[-1])
        decode = time.perf_counter() - started
    n_steps = len(tokens) - 1
    figures: Values = {
        "prompt_tokens": ids.shape[1],
        "new_tokens": len(tokens),
        "prefill_seconds": prefill,
        "prefill_attention_seconds": prefill_attention,
        "prefill_ran": prefill_ran,
        "prefill_tokens_per_second": ids.shape[1] / prefill,
        "decode_seconds": decode,
        "decode_attention_seconds": watch.seconds,
        "decode_tokens_per_second": n_steps / decode if n_steps else None,
        "decode_paths": dict(watch.paths),
        "cache": cache_report(cache),
    }
    if isinstance(how.config, Routed) and how.config.tolerance is not None:
        figures["error_bars"] = watch.error_bars()
    return Generated(tokens, logits.float(), figures)


@torch.no_grad()
def beams_measured(model: Any, ids: Tensor, how: Continuation) -> Generated:
    """Beam search after a prompt, and what exact attention thinks of its result.

    The figures hold `score`, the summed log-probability of the best beam as the search saw it, and
    `exact_score`, the same tokens' under the model's own attention: their difference is how far the search was
    misled, and `exact_score` against that of an exact search is what it cost.
    """
    replaced = nullcontext() if how.config is None else apply(model, how.config, layers=how.layers)
    started = time.perf_counter()
    with replaced:
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=how.cache(model),
            max_new_tokens=how.max_new_tokens,
            num_beams=how.n_beams,
            do_sample=False,
            length_penalty=0.0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    seconds = time.perf_counter() - started
    tokens = found.sequences[0, ids.shape[1] :]
    logits = model(found.sequences[:, :-1], use_cache=False, logits_to_keep=len(tokens)).logits[0]
    exact = torch.log_softmax(logits.float(), dim=-1).gather(-1, tokens[:, None]).sum()
    figures = {
        "prompt_tokens": ids.shape[1],
        "new_tokens": len(tokens),
        "beams": how.n_beams,
        "seconds": seconds,
        "score": float(found.sequences_scores[0]),
        "exact_score": float(exact),
    }
    return Generated(tokens.tolist(), logits[0].float(), figures)


def agreement(exact: Generated, other: Generated) -> Values:
    """How far a generation is from the exact one: tokens until they part, distance of the first prediction."""
    same = 0
    for first, second in zip(exact.tokens, other.tokens, strict=False):
        if first != second:
            break
        same += 1
    p, q = (torch.log_softmax(generated.logits, dim=-1) for generated in (exact, other))
    divergence = float((p.exp() * (p - q)).sum())
    return {"same_tokens": same, "first_token_kl": divergence}


def forced_agreement(exact: Sequence[int], chosen: Sequence[int]) -> Values:
    """How many of the tokens that exact attention chose are chosen by another, which saw exactly those before.

    The first one is the prompt's, all others are those of single steps.
    """
    same = [first == second for first, second in zip(exact, chosen, strict=True)]
    steps = same[1:]
    return {
        "agreement": sum(same) / len(same),
        "step_agreement": sum(steps) / len(steps) if steps else None,
        "compared": len(same),
    }


@contextmanager
def timed_attention(model: nn.Module, config: Config | None, layers: Layers = "all") -> Iterator[Stopwatch]:
    """Let the chosen layers attend by a configuration inside the block, the others exactly, and time all."""
    watch, n_layers = Stopwatch(), len(find_adapter(model).layers(model))
    chosen = set() if config is None else set(pick_layers(layers, n_layers))
    watch.layers = {number: PrescoredAttention(config) for number in sorted(chosen)}
    functions = {number: watch.timed(watch.layers.get(number, attend_exactly)) for number in range(n_layers)}
    undo = replace_attention(model, functions)
    try:
        yield watch
    finally:
        undo()


def _ignore(token: int) -> None:
    """Nobody looks at the tokens."""


def _end_tokens(model: Any) -> set[int]:
    end = getattr(model.generation_config, "eos_token_id", None)
    return set() if end is None else {end} if isinstance(end, int) else set(end)


# Generations as tables: speed and memory, or what a beam search found.


def generation_table(records: Sequence[Record]) -> Table:
    """Prefill and decode, how much of either is attention, memory, and agreement with exact attention."""
    rows = []
    for record in records:
        figures = record.figures
        speed, same = figures["decode_tokens_per_second"], figures.get("same_tokens")
        rows.append(
            (
                record.config["attention"],
                f"{figures['prefill_seconds']:.2f} s ({figures['prefill_tokens_per_second']:.0f} tok/s)",
                f"{figures['prefill_attention_seconds']:.2f} s",
                MISSING if speed is None else f"{figures['decode_seconds']:.2f} s ({speed:.1f} tok/s)",
                f"{figures['decode_attention_seconds']:.2f} s",
                f"{figures['cache']['bytes'] / 2**20:.1f} MiB",
                MISSING if same is None else f"{same} of {figures['new_tokens']}",
                _agreement(figures),
            )
        )
    columns = (
        *("attention", "prefill", "attention part", "decode", "attention part", "cache"),
        *("tokens as exact", "shown the exact text"),
    )
    title = f"{records[0].config['model']}, {records[0].config['prompt_tokens']} prompt tokens"
    last = records[-1]
    lines = (_speed_line(records), _prompt_line(last), _paths(last), _selection_line(last))
    note = "; ".join(line for line in lines if line)
    return Table(title, columns, tuple(rows), note)


def error_table(record: Record) -> Table | None:
    """What layers with a tolerance read, and how far they may be off; None where none was asked for."""
    bars = record.figures.get("error_bars")
    if bars is None:
        return None
    rows = tuple(
        (
            *(str(bar["layer"]), bar["phase"], as_text(bar["rows"], 4), as_text(bar["visible"], 4)),
            *(f"{bar['error']:.4f}", f"{bar['error_limit']:.4f}"),
            *(f"{100 * bar[name]:.1f} %" for name in ("refined", "read_all")),
        )
        for bar in sorted(bars, key=lambda bar: bar["phase"])
    )
    config = record.config["config"]
    columns = ("layer", "phase", "rows read", "of", "error", "error at most", "read further", "read everything")
    note = "last call of each phase: expected relative error of a query's output, and the limit of the worst query"
    return Table(f"within {config['tolerance']:g} of exact attention", columns, rows, note, left=2)


def _agreement(figures: Values) -> str:
    """How many choices are exact attention's, of one that was shown the exact text."""
    share = figures.get("agreement")
    return MISSING if share is None else f"{100 * share:.1f} % of {figures['compared']}"


def _speed_line(records: Sequence[Record]) -> str:
    """How many times as fast as exact attention; nothing where that did not run."""
    found = {record.config["attention"]: record.figures for record in records}
    if "exact" not in found or "prescored" not in found:
        return ""
    exact, own = found["exact"], found["prescored"]
    words = []
    for part in ("prefill", "decode"):
        speeds = [figures[f"{part}_tokens_per_second"] for figures in (own, exact)]
        attention = [figures[f"{part}_attention_seconds"] for figures in (exact, own)]
        if None not in speeds and min(attention) > 0 and min(speeds) > 0:
            within = attention[0] / attention[1]
            within *= 1 if part == "prefill" else max(1, own["new_tokens"] - 1) / max(1, exact["new_tokens"] - 1)
            words.append(f"{part} {speeds[0] / speeds[1]:.2f}x exact's speed (attention {within:.2f}x)")
    return ", ".join(words)


def _prompt_line(record: Record) -> str:
    """What ran for the prompt, and why it was exact where it was; nothing of a model's own attention."""
    ran = record.figures["prefill_ran"]
    ways = [words if len(ran) == 1 else f"{words} in {count} layers" for words, count in ran.items()]
    return f"the prompt: {', '.join(ways)}" if ways else ""


def _paths(record: Record) -> str:
    """Which way the steps of a generation went."""
    paths = record.figures["decode_paths"]
    return ", ".join(f"{count} times {path}" for path, count in paths.items())


def beam_table(records: Sequence[Record]) -> Table:
    """What a beam search found, and what exact attention thinks of it."""
    rows = []
    for record in records:
        figures = record.figures
        same = figures.get("same_tokens")
        rows.append(
            (
                record.config["attention"],
                f"{figures['seconds']:.2f} s",
                f"{figures['score']:.4f}",
                f"{figures['exact_score']:.4f}",
                MISSING if same is None else f"{same} of {figures['new_tokens']}",
            )
        )
    columns = ("attention", "time", "log-probability", "under exact attention", "tokens as exact")
    config = records[0].config
    title = f"{config['model']}, {config['prompt_tokens']} prompt tokens, {config['beams']} beams"
    return Table(title, columns, tuple(rows), note="summed log-probability of the best beam, in nats")


def _selection_line(record: Record) -> str:
    """Rows a decode step reads for the prompt; neighbouring layers with the same number share an entry."""
    entries = [entry for entry in record.figures["cache"]["layers"] if "selected" in entry]
    if not entries:
        routed = "routed step" in record.figures["decode_paths"]
        return "every key was kept" if routed else "no layer made a selection: every key was kept"
    groups = []
    for rows, group in itertools.groupby(entries, key=_selection_size):
        numbers = [entry["layer"] for entry in group]
        span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        groups.append(f"layers {span}: {rows[0]} of {rows[1]}")
    return f"rows that stand for the prompt: {', '.join(groups)}"


def _selection_size(entry: Values) -> tuple[int, int]:
    return entry["selected"] + entry["centroids"], entry["selected_from"]
