"""Generation measured: prefill and decode apart, attention apart from the model, cache memory, agreement."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prescore.bench.methods import Baseline, Local
from prescore.bench.observed import observed
from prescore.bench.records import Record, Values
from prescore.bench.tables import MISSING, Table, as_text
from prescore.config import Config, Hyper, Routed, Selected
from prescore.integrations.apply import Layers, apply


class Generated(NamedTuple):
    """New tokens, the logits `[V]` of the first one, and JSON values for a record."""

    tokens: list[int]
    logits: Tensor
    results: Values


@torch.no_grad()
def generate_measured(
    model: Any,
    ids: Tensor,
    cache: Any,
    config: Config | Local | Baseline | None = None,
    *,
    layers: Layers = "all",
    max_new_tokens: int = 64,
    ignore_end: bool = False,
    on_token: Callable[[int], None] | None = None,
    forced: Sequence[int] | None = None,
    prefill_chunk_size: int | None = None,
) -> Generated:
    """Greedy generation after a prompt, or the choices after each token of a given continuation.

    Args:
        model: A causal model of transformers.
        ids: `[1, N]` prompt.
        cache: A new cache: a `PrescoredCache` for a configuration of the library, any other for the rest.
        config: How the chosen layers attend; None = the model's own attention, exact.
        layers: Which layers, as in `prescore.apply`.
        max_new_tokens: Steps at most.
        ignore_end: Continue after the model's end token.
        on_token: Called with every new token as soon as it is known.
        forced: Tokens that every step sees instead of its own choices; as many are chosen.
        prefill_chunk_size: Tokens of the prompt per forward; None = all.
    """
    from prescore.integrations.transformers.cache import cache_report

    show = on_token or (lambda token: None)
    with observed(model, config, layers=layers) as observer:
        started = time.perf_counter()
        logits = prefill(model, ids, cache, chunk_size=prefill_chunk_size)
        if isinstance(config, Routed | Selected | Hyper):
            cache.select()
        spent, prefill_attention, prefill_ran = time.perf_counter() - started, observer.sum(), dict(observer.ran)
        counts = not isinstance(config, Local | Baseline | None)
        reads = observer.results()["replaced_reads_per_query"] if counts else None
        tokens = [int(logits.argmax())]
        end = None if ignore_end or forced is not None else model.generation_config.eos_token_id
        ends = end if isinstance(end, list) else [end]
        n_tokens, inputs = (max_new_tokens, tokens) if forced is None else (len(forced), list(forced))
        show(tokens[-1])
        started = time.perf_counter()
        observer.restart()
        while len(tokens) < n_tokens and tokens[-1] not in ends:
            tokens.append(_next_token(model, inputs[len(tokens) - 1], cache, ids.device))
            show(tokens[-1])
        decode = time.perf_counter() - started
    n_steps = len(tokens) - 1
    results: Values = {
        "prompt_tokens": ids.shape[1],
        "new_tokens": len(tokens),
        "prefill_seconds": spent,
        "prefill_attention_seconds": prefill_attention,
        "prefill_ran": prefill_ran,
        "prompt_reads_per_query": reads,
        "prefill_tokens_per_second": ids.shape[1] / spent,
        "decode_seconds": decode,
        "decode_attention_seconds": observer.sum(),
        "decode_tokens_per_second": n_steps / decode if n_steps else None,
        "decode_paths": dict(observer.paths),
        "cache": cache_report(cache),
    }
    return Generated(tokens, logits.float(), results)


def _next_token(model: Any, token: int, cache: Any, device: torch.device) -> int:
    last = torch.tensor([[token]], dtype=torch.int64, device=device)
    return int(model(last, past_key_values=cache, use_cache=True).logits[0, -1].argmax())


@torch.no_grad()
def prefill(model: Any, ids: Tensor, cache: Any, *, chunk_size: int | None = None) -> Tensor:
    """Read a prompt `[1, N]` into a cache, `chunk_size` tokens per forward (None = all); logits `[V]` after it.

    The chunks before the last one go through the decoder alone: they need no logits.
    """
    *chunks, last = ids.split(chunk_size or ids.shape[1], dim=1)
    for chunk in chunks:
        model.base_model(input_ids=chunk, past_key_values=cache, use_cache=True)
    logits: Tensor = model(input_ids=last, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
    return logits


@torch.no_grad()
def beams_measured(
    model: Any,
    ids: Tensor,
    cache: Any,
    config: Config | None = None,
    *,
    layers: Layers = "all",
    max_new_tokens: int,
    n_beams: int,
) -> Generated:
    """Beam search after a prompt, and the probability of its result under exact attention.

    The results hold `score`, the summed log-probability of the best beam in the search, and `exact_score`, that of
    the same tokens under the model's own attention. Their difference is the error of the search; `exact_score`
    against that of an exact search is its cost.
    """
    started = time.perf_counter()
    with nullcontext() if config is None else apply(model, config, layers=layers):
        best = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            num_beams=n_beams,
            do_sample=False,
            length_penalty=0.0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    seconds = time.perf_counter() - started
    tokens = best.sequences[0, ids.shape[1] :]
    logits = model(best.sequences[:, :-1], use_cache=False, logits_to_keep=len(tokens)).logits[0]
    exact = torch.log_softmax(logits.float(), dim=-1).gather(-1, tokens[:, None]).sum()
    results = {
        "prompt_tokens": ids.shape[1],
        "new_tokens": len(tokens),
        "beams": n_beams,
        "seconds": seconds,
        "score": float(best.sequences_scores[0]),
        "exact_score": float(exact),
    }
    return Generated(tokens.tolist(), logits[0].float(), results)


def first_token_kl(exact: Tensor, other: Tensor) -> float:
    """KL divergence of the first prediction from that of exact attention, from logits `[V]`."""
    p, q = (torch.log_softmax(logits, dim=-1) for logits in (exact, other))
    return float((p.exp() * (p - q)).sum())


def agreement(exact: Sequence[int], chosen: Sequence[int]) -> Values:
    """Share of the tokens of exact attention that another attention chooses after exactly the same tokens.

    The first choice belongs to the prefill, all others to decode steps.
    """
    same = [first == second for first, second in zip(exact, chosen, strict=True)]
    steps = fmean(same[1:]) if len(same) > 1 else None
    return {"agreement": fmean(same), "step_agreement": steps, "compared": len(same)}


def generation_table(records: Sequence[Record]) -> Table:
    """Prefill and decode, how much of either is attention, memory, and agreement with exact attention.

    Of a beam search, the best beam and its probability under exact attention.
    """
    config, last = records[0].config, records[-1].results
    results = {record.config["attention"]: record.results for record in records}
    title = f"{config['model']}, {config['prompt_tokens']} prompt tokens"
    if config["beams"] > 1:
        columns = ("attention", "time", "log-probability", "under exact attention", "tokens as exact")
        rows = [
            (name, f"{r['seconds']:.2f} s", f"{r['score']:.4f}", f"{r['exact_score']:.4f}", _same_tokens(r))
            for name, r in results.items()
        ]
        note = "summed log-probability of the best beam, in nats"
        return Table(f"{title}, {config['beams']} beams", columns, tuple(rows), note)
    phases = ("prefill", "attention part", "decode", "attention part")
    names = ("attention", *phases, "cache", "tokens as exact", "after the exact text")
    lines = []
    for name, r in results.items():
        agreement = f"{100 * r['agreement']:.1f} % of {r['compared']}" if "agreement" in r else MISSING
        cells = (*_phase(r, "prefill"), *_phase(r, "decode"))
        lines.append((name, *cells, f"{r['cache']['bytes'] / 2**20:.1f} MiB", _same_tokens(r), agreement))
    ran = last["prefill_ran"]
    prompt = ", ".join(name if len(ran) == 1 else f"{name} in {n} layers" for name, n in ran.items())
    notes = (
        _speed_note(results),
        f"prefill: {prompt}" if prompt else "",
        ", ".join(f"{count} times {path}" for path, count in last["decode_paths"].items()),
        _selection_note(last),
    )
    return Table(title, names, tuple(lines), "; ".join(note for note in notes if note))


def _phase(results: Values, phase: str) -> tuple[str, str]:
    """Time and speed of a phase, and its time in attention."""
    seconds, attention = results[f"{phase}_seconds"], results[f"{phase}_attention_seconds"]
    speed = results[f"{phase}_tokens_per_second"]
    shown = MISSING if speed is None else f"{seconds:.2f} s ({as_text(speed)} tok/s)"
    return shown, f"{attention:.2f} s"


def _same_tokens(results: Values) -> str:
    return f"{results['same_tokens']} of {results['new_tokens']}" if "same_tokens" in results else MISSING


def _speed_note(results: dict[str, Values]) -> str:
    """How many times as fast as exact attention; nothing where that did not run."""
    others = [r for name, r in results.items() if name != "exact"]
    if "exact" not in results or not others:
        return ""
    exact, ours = results["exact"], others[0]
    words = []
    for phase in ("prefill", "decode"):
        speeds = [r[f"{phase}_tokens_per_second"] for r in (ours, exact)]
        attention = [r[f"{phase}_attention_seconds"] for r in (exact, ours)]
        if None not in speeds and min(attention) > 0 and min(speeds) > 0:
            ratio = attention[0] / attention[1]
            ratio *= 1 if phase == "prefill" else max(1, ours["new_tokens"] - 1) / max(1, exact["new_tokens"] - 1)
            words.append(f"{phase} {speeds[0] / speeds[1]:.2f}x exact's speed (attention {ratio:.2f}x)")
    return ", ".join(words)


def _selection_note(results: Values) -> str:
    """Keys of the prompt that a decode step reads; neighbouring layers with the same number share an entry."""
    entries = [entry for entry in results["cache"]["layers"] if "selected" in entry]
    if not entries:
        routed = "routed step" in results["decode_paths"]
        return "every key is in the cache" if routed else "no layer made a selection: every key is read"
    groups = []
    for size, group in itertools.groupby(
        entries, key=lambda entry: f"{entry['selected'] + entry['centroids']} of {entry['selected_from']}"
    ):
        numbers = [entry["layer"] for entry in group]
        groups.append(f"layers {'-'.join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))}: {size}")
    return f"keys and centroids of the prompt: {', '.join(groups)}"
