"""Generation measured: prefill and decode apart, attention apart from the rest, cache memory, agreement."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from prescore.config import PrescoreConfig
from prescore.integrations.apply import apply
from prescore.integrations.layers import Layers

_NUMBERS = itertools.count()


@dataclass
class Stopwatch:
    """Seconds spent in attention."""

    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Generated:
    """What one greedy generation gave.

    Attributes:
        tokens: New tokens.
        logits: `[V]` of the first new token, for comparing methods.
        figures: Plain numbers: seconds, speeds, bytes, rows per layer.
    """

    tokens: list[int]
    logits: Tensor
    figures: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def generate_measured(
    model: Any,
    ids: Tensor,
    *,
    config: PrescoreConfig | None,
    layers: Layers | None = None,
    max_new_tokens: int = 64,
    evict: bool = False,
    on_token: Callable[[int], None] | None = None,
) -> Generated:
    """Greedy generation after a prompt.

    Args:
        model: A causal model of transformers.
        ids: `[1, N]` prompt.
        config: Pre-scored attention; None = the model's own, exact.
        layers: Which layers are pre-scored.
        max_new_tokens: Steps at most; stops at the model's end token.
        evict: Free the unselected keys and values after the prefill.
        on_token: Called with every new token as soon as it is known.
    """
    from transformers import DynamicCache

    from prescore.integrations.huggingface_cache import PrescoredCache, cache_report

    text_config = model.config.get_text_config(decoder=True)
    cache: Any = DynamicCache(config=text_config) if config is None else PrescoredCache(text_config, evict=evict)
    replaced = nullcontext() if config is None else apply(model, config, layers=layers)
    with replaced, attention_timer(model) as watch:
        started = time.perf_counter()
        step = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if config is not None:
            cache.select()
        prefill, prefill_attention = time.perf_counter() - started, watch.seconds
        logits = step.logits[0, -1]
        tokens = [int(logits.argmax())]
        ends = _end_tokens(model)
        started, watch.seconds = time.perf_counter(), 0.0
        while len(tokens) < max_new_tokens and tokens[-1] not in ends:
            if on_token is not None:
                on_token(tokens[-1])
            last = torch.tensor([[tokens[-1]]], device=ids.device)
            step = model(last, past_key_values=cache, use_cache=True)
            tokens.append(int(step.logits[0, -1].argmax()))
        decode = time.perf_counter() - started
        if on_token is not None:
            on_token(tokens[-1])
    n_steps = len(tokens) - 1
    figures = {
        "prompt_tokens": ids.shape[1],
        "new_tokens": len(tokens),
        "prefill_seconds": prefill,
        "prefill_attention_seconds": prefill_attention,
        "prefill_tokens_per_second": ids.shape[1] / prefill,
        "decode_seconds": decode,
        "decode_attention_seconds": watch.seconds,
        "decode_tokens_per_second": n_steps / decode if n_steps else None,
        "cache": cache_report(cache),
    }
    return Generated(tokens, logits.float(), figures)


@torch.no_grad()
def beams_measured(
    model: Any,
    ids: Tensor,
    *,
    config: PrescoreConfig | None,
    layers: Layers | None = None,
    max_new_tokens: int = 64,
    n_beams: int = 4,
) -> Generated:
    """Beam search after a prompt, and what exact attention thinks of its result.

    The figures hold `score`, the summed log-probability of the best beam as the search saw it, and
    `exact_score`, the same tokens' under the model's own attention: their difference is how far the search was
    misled, and `exact_score` against that of an exact search is what it cost.
    """
    options = {"max_new_tokens": max_new_tokens, "num_beams": n_beams, "do_sample": False, "length_penalty": 0.0}
    replaced = nullcontext() if config is None else apply(model, config, layers=layers)
    started = time.perf_counter()
    with replaced:
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
    seconds = time.perf_counter() - started
    tokens = found.sequences[0, ids.shape[1] :]
    logits = model(found.sequences[:, :-1], use_cache=False, logits_to_keep=len(tokens)).logits[0]
    exact = torch.log_softmax(logits.float(), dim=-1).gather(-1, tokens[:, None]).sum()
    figures = {
        "prompt_tokens": ids.shape[1],
        "new_tokens": len(tokens),
        "beams": n_beams,
        "seconds": seconds,
        "score": float(found.sequences_scores[0]),
        "exact_score": float(exact),
    }
    return Generated(tokens.tolist(), logits[0].float(), figures)


def agreement(exact: Generated, other: Generated) -> dict[str, Any]:
    """How far a generation is from the exact one: tokens until they part, distance of the first prediction."""
    same = 0
    for first, second in zip(exact.tokens, other.tokens, strict=False):
        if first != second:
            break
        same += 1
    p, q = (torch.log_softmax(generated.logits, dim=-1) for generated in (exact, other))
    divergence = float((p.exp() * (p - q)).sum())
    return {"same_tokens": same, "first_token_kl": divergence}


@contextmanager
def attention_timer(model: nn.Module) -> Iterator[Stopwatch]:
    """Time the attention function of a transformers model, whichever it is, inside the block."""
    from transformers import AttentionInterface, AttentionMaskInterface

    config: Any = model.config
    text = config.get_text_config(decoder=True)
    before = text._attn_implementation
    inner: Any = AttentionInterface._global_mapping.get(before)
    watch = Stopwatch()
    if inner is None:  # eager attention lives in the model's own file
        yield watch
        return

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = inner(*args, **kwargs)
        if result[0].device.type == "cuda":
            torch.cuda.synchronize(result[0].device)
        watch.seconds += time.perf_counter() - started
        return result

    name = f"prescore-timed-{next(_NUMBERS)}"
    AttentionInterface._global_mapping[name] = timed
    AttentionMaskInterface._global_mapping[name] = AttentionMaskInterface._global_mapping[before]
    text._attn_implementation_internal = name
    try:
        yield watch
    finally:
        text._attn_implementation_internal = before
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def _end_tokens(model: Any) -> set[int]:
    end = getattr(model.generation_config, "eos_token_id", None)
    return set() if end is None else {end} if isinstance(end, int) else set(end)
