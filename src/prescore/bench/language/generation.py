"""Generation measured: prefill and decode apart, attention apart from the model, cache memory, agreement."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prescore.bench.methods import Baseline, Local
from prescore.bench.observed import observed
from prescore.bench.records import Values
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
        reads = (
            None if isinstance(config, Local | Baseline | None) else observer.results()["replaced_reads_per_query"]
        )
        tokens = [int(logits.argmax())]
        end = None if ignore_end or forced is not None else model.generation_config.eos_token_id
        ends = end if isinstance(end, list) else [end]
        n_tokens, inputs = (max_new_tokens, tokens) if forced is None else (len(forced), list(forced))
        show(tokens[-1])
        started = time.perf_counter()
        observer.restart()
        while len(tokens) < n_tokens and tokens[-1] not in ends:
            last = torch.tensor([[inputs[len(tokens) - 1]]], device=ids.device)
            step = model(last, past_key_values=cache, use_cache=True)
            tokens.append(int(step.logits[0, -1].argmax()))
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
