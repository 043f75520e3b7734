"""The public functions of attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from prescore import checks
from prescore.autograd import differentiable_once, records_gradients, without_autocast
from prescore.call import Call, align_keys, make_call, shifted_back
from prescore.config import Config, Exact, Hyper, Routed, Selected, check_config
from prescore.errors import Unsupported
from prescore.ops.backend import Backend, Needs, pick_backend
from prescore.ops.dropout import Dropout
from prescore.ops.parts import exact_output
from prescore.parallel.entry import ShardRequest, attend_in_group, refuse_in_group
from prescore.rng import Streams, as_streams, check_generator
from prescore.routed import attention as routed
from prescore.scoring.base import Scorer, as_scorer
from prescore.scoring.select import (
    check_selection,
    given_members,
    protected_positions,
    score_keys,
    select_keys,
    selection_of,
)
from prescore.selected import attention as selected
from prescore.selected.causal_grid import FULL
from prescore.types import Attended, Aux, Outcome, Selection, Stats


@overload
def prescored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Config | None = None,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    generator: Generator = None,
    selection: Selection | None = None,
    dropout_p: float = 0.0,
    dropout_generator: Generator = None,
    group: object = None,
    backend: str = "auto",
    return_aux: Literal[False] = False,
) -> Tensor: ...


@overload
def prescored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Config | None = None,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    generator: Generator = None,
    selection: Selection | None = None,
    dropout_p: float = 0.0,
    dropout_generator: Generator = None,
    group: object = None,
    backend: str = "auto",
    return_aux: Literal[True],
) -> tuple[Tensor, Aux]: ...


@overload
def prescored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Config | None = None,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    generator: Generator = None,
    selection: Selection | None = None,
    dropout_p: float = 0.0,
    dropout_generator: Generator = None,
    group: object = None,
    backend: str = "auto",
    return_aux: bool,
) -> Tensor | tuple[Tensor, Aux]: ...


def prescored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Config | None = None,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    generator: Generator = None,
    selection: Selection | None = None,
    dropout_p: float = 0.0,
    dropout_generator: Generator = None,
    group: object = None,
    backend: str = "auto",
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, Aux]:
    """Attention over the keys that matter.

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`, `Hq` a multiple of `Hkv`; finite where it is not padding.
        value: `[B, Hkv, Nk, Dv]`, likewise.
        config: How to attend: a `Routed`, `Selected`, `Hyper` or `Exact`; None = `Routed()`.
        is_causal: Queries are the last `Nq` positions and see no later key.
        key_padding_mask: `[B, Nk]`, True = a real key. Queries of padded keys see the real keys before them; in
            causal mode one that is no number is read as zeros.
        scale: Factor of the logits, any finite number; `D ** -0.5` by default.
        generator: Seed, generator or None.
        selection: With a `Selected`: use this selection instead of making one. Without a configuration: as
            `Selected(remainder="none")` would, exactly over these keys (in causal mode beside its exact leaves).
        dropout_p: Probability of dropping an attention weight, for training: the kept ones are scaled by
            `1 / (1 - p)`, lse counts all keys as before, and a centroid is dropped as a whole. Which ones are
            dropped is drawn apart for each sequence and head, and drawn again in the backward pass rather than
            stored. The fused operators cannot do this: the plain backend runs, which is slower.
        dropout_generator: Seed or generator of the dropout alone, so that it may change from step to step
            while the selection does not; None = from `generator` too.
        group: A `torch.distributed` process group or one-dimensional `DeviceMesh` whose ranks hold equal,
            consecutive pieces of the sequence: every rank passes its piece of query, key, value and mask, gets its
            piece of the result, and must take part in the backward pass. No `selection` and no dropout there, and
            `Aux.selection` is empty: what was selected stays with the ranks that hold it. See docs/parallel.md.
        backend: Operator backend: `auto`, `cpu-flash`, `cuda-efficient` or `plain`.
        return_aux: Also return lse, the selection and statistics.

    Returns:
        The output `[B, Hq, Nq, Dv]`, or `(output, Aux)`.
    """
    checks.boolean("return_aux", return_aux)
    options = Options(
        is_causal, key_padding_mask, scale, generator, selection, dropout_p, dropout_generator, backend
    )
    if group is not None:
        outcome = attend_context_parallel(query, key, value, config, options, group, explain=return_aux)
        attended = outcome.attended
        return (attended.output, Aux(attended.lse, [], Stats.of(outcome.stats))) if return_aux else attended.output
    if not return_aux:
        return attend_counting(query, key, value, config, options).output
    call, outcome = attend_call(query, key, value, config, options, explain=True)
    attended = call.restore(outcome.attended)
    kept = [call.restore_selection(chosen) for chosen in outcome.selections]
    chosen = kept if is_causal else kept[0] if kept else nothing_selected(key)
    return attended.output, Aux(attended.lse, chosen, Stats.of(outcome.stats))


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    group: object = None,
    backend: str = "auto",
) -> Attended:
    """Softmax attention over all real keys.

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`, `Hq` a multiple of `Hkv`; keys are not repeated.
        value: `[B, Hkv, Nk, Dv]`.
        is_causal: Queries are the last `Nq` positions and see no later key.
        key_padding_mask: `[B, Nk]`, True = a real key.
        scale: Factor of the logits, `D ** -0.5` by default.
        group: Ranks that hold pieces of the sequence, as in `prescored_attention`.
        backend: `auto`, `cpu-flash`, `cuda-efficient` or `plain`.

    Returns:
        Output and lse; a query that sees nothing has output 0 and lse -inf.
    """
    options = Options(is_causal, key_padding_mask, scale, backend=backend)
    if group is not None:
        return attend_context_parallel(query, key, value, Exact(), options, group, explain=True).attended
    return attend_with_lse(query, key, value, Exact(), options)


def hyper_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Hyper | None = None,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    generator: Generator = None,
    backend: str = "auto",
) -> Attended:
    """HyperAttention over all keys: LSH blocks plus a sampled residual; `config=None` is `Hyper.published()`."""
    config = Hyper.published() if config is None else config
    checks.instance("config", config, (Hyper,))
    options = Options(is_causal, key_padding_mask, scale, generator, backend=backend)
    return attend_with_lse(query, key, value, config, options)


# How a public call runs: check everything, make a `Call`, let the configuration's engine answer it.


class Options(NamedTuple):
    """What `prescored_attention` is told beside its tensors and its configuration; the defaults are its own."""

    is_causal: bool = False
    key_padding_mask: Tensor | None = None
    scale: float | None = None
    generator: Generator = None
    selection: Selection | None = None
    dropout_p: float = 0.0
    dropout_generator: Generator = None
    backend: str = "auto"


class Counted(NamedTuple):
    """An output, a function that counts the key and centroid rows that a query met, and figures at hand."""

    output: Tensor
    count_keys: Callable[[], float]
    figures: Mapping[str, Any] = MappingProxyType({})


def attend_counting(query: Tensor, key: Tensor, value: Tensor, config: Config | None, options: Options) -> Counted:
    """`prescored_attention` without statistics; rows are counted when somebody asks, outside of any timer."""
    call, outcome = attend_call(query, key, value, config, options, explain=False)
    return Counted(call.restore(outcome.attended).output, outcome.count_keys, outcome.stats)


def attend_call(
    query: Tensor, key: Tensor, value: Tensor, config: Config | None, options: Options, *, explain: bool
) -> tuple[Call, Outcome]:
    """Check everything, then run it; the result is still in aligned positions."""
    with without_autocast(query, key, value) as (query, key, value):
        return _attend_plainly(query, key, value, config, options, explain)


def _attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, config: Config | None, options: Options, explain: bool
) -> tuple[Call, Outcome]:
    config = _check(query, key, value, config, options)
    call = _made(query, key, value, config, options)
    if options.selection is None:
        return call, run_or_shortcut(call, config, explain)
    given = given_members(options.selection, call.shift, call.valid, key.shape[2])
    return call, run_engine(call, config, given, explain)


def attend_with_lse(query: Tensor, key: Tensor, value: Tensor, config: Config, options: Options) -> Attended:
    """Output and lse, without statistics."""
    with without_autocast(query, key, value) as (query, key, value):
        _check(query, key, value, config, options)
        call = _made(query, key, value, config, options)
        return call.restore(run_engine(call, config, None, False).attended)


def _made(query: Tensor, key: Tensor, value: Tensor, config: Config, options: Options) -> Call:
    """The call, after all checks: one that is refused must not advance a generator."""
    streams = as_streams(options.generator)
    dropping = streams if options.dropout_generator is None else as_streams(options.dropout_generator)
    return make_call(
        *differentiable_once(query, key, value),
        options.key_padding_mask,
        is_causal=options.is_causal,
        scale=options.scale,
        backend=_backend(query, options.backend, options.dropout_p, dropping),
        streams=streams,
        aligned=not isinstance(config, Exact),
    )


def _check(query: Tensor, key: Tensor, value: Tensor, config: Config | None, options: Options) -> Config:
    """Refuse what cannot be; gives the configuration that will run."""
    is_causal, mask, scale, _, selection, dropout_p, dropout_generator, backend = options
    if config is None and selection is not None:
        config = Selected(remainder="none")
    config = check_config(config)
    checks.probability("dropout_p", dropout_p)
    check_generator(dropout_generator, "dropout_generator")
    checks.attention_inputs(query, key, value, is_causal=is_causal, key_padding_mask=mask, scale=scale)
    if isinstance(config, Routed) and config.tolerance is not None and records_gradients(query, key, value):
        reason = "which queries read on is not differentiable, and inputs require gradients"
        raise Unsupported("tolerance", [reason])  # at every length: no training ends at its first long text
    if selection is not None:
        if not isinstance(config, Selected):
            raise ValueError(f"selection must come with a Selected configuration, got {type(config).__name__}")
        check_selection(selection, key)
    _backend(query, backend, dropout_p, Streams())
    return config


def attend_context_parallel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Config | None,
    options: Options,
    group: object,
    *,
    explain: bool = False,
    refused: ValueError | None = None,
) -> Outcome:
    """`prescored_attention` of this rank's piece; with `explain` also lse and figures.

    `refused` is what this rank alone has to say against the call: every rank raises it.
    """
    with ExitStack() as surroundings:
        try:
            query, key, value = surroundings.enter_context(without_autocast(query, key, value))
        except Unsupported as error:
            refused = refused or error  # the other ranks must hear of it, and wait for nobody

        def check() -> tuple[Config, Backend]:
            if refused is not None:
                raise refused
            refuse_in_group(options.selection is not None, options.dropout_p)
            return _check(query, key, value, config, options), _backend(query, options.backend, 0.0, Streams())

        is_causal, mask, scale, generator, *_ = options
        asked = ShardRequest(query, key, value, is_causal, mask, scale, generator, explain)
        return attend_in_group(group, asked, check, run_or_shortcut)


def _backend(query: Tensor, name: str, dropout_p: float, streams: Streams) -> Backend:
    """The operator of a call; raises when none, or not the named one, can run it."""
    dropout = Dropout(dropout_p, streams.child("dropout")) if dropout_p else None
    return pick_backend(Needs.of(query, dropout), name)


# The one place where a configuration's type becomes an engine.


def run_engine(call: Call, config: Config, given: Tensor | None, explain: bool) -> Outcome:
    """The one place where a configuration's type becomes an engine."""
    if not call.query.shape[1]:
        return attend_exact(call, explain=explain)  # no heads: there is nothing to choose for
    if isinstance(config, Routed):
        return _route(call, config, explain)
    if isinstance(config, Selected | Hyper):
        return selected.attend_selected(call, config, given, explain=explain)
    checks.instance("config", config, (Exact,))
    return attend_exact(call, explain=explain)


def _route(call: Call, config: Routed, explain: bool) -> Outcome:
    """Routed attention; queries behind a sequence's end are no positions of its geometry, and run apart."""
    outcome = routed.attend_routed(call, config, explain=explain)
    padded = call.behind_the_end()
    if padded is None:
        return outcome
    own = routed.attend_routed(padded.call, config)
    return replace(outcome, attended=padded.put_into(outcome.attended, own.attended))


def _is_exact(call: Call, config: Config) -> bool:
    """Whether a call is exact attention as it stands, straight from the operator: short inputs feel every copy."""
    if call.padded or call.backend.dropout is not None:
        return False
    if isinstance(config, Routed):
        return routed.routes_nothing(call, config)
    if isinstance(config, Selected | Hyper):
        return selected.selects_nothing(call, config)
    return isinstance(config, Exact)


def _operator_alone(call: Call) -> Tensor:
    return exact_output(
        call.query, call.key, call.value, is_causal=call.is_causal, scale=call.scale, backend=call.backend
    )


def run_or_shortcut(call: Call, config: Config, explain: bool) -> Outcome:
    """Exact attention as it stands, where that is all a call asks for; else its engine."""
    if not explain and _is_exact(call, config):
        return Outcome(Attended(_operator_alone(call), call.query.new_empty(0)), visible_keys(call))
    return run_engine(call, config, None, explain)


# Exact attention as an engine: what `Exact()` runs, and what every other configuration is measured against.


def attend_exact(call: Call, *, explain: bool = False) -> Outcome:
    """Every query reads every key it may see; with `explain` also tell how many that are."""
    begin = time.perf_counter()
    attended, count_keys = call.exactly(), visible_keys(call)
    if not explain:
        return Outcome(attended, count_keys)
    shape = call.key.shape[:3]
    real = call.valid[:, None].expand(shape) if call.valid is not None else torch.ones(shape, dtype=torch.bool)
    stats = {
        "keys_selected": call.mean_keys(),
        "keys_per_query": count_keys(),
        "depth": 0,
        "fallbacks": 0,
        "mass_read": 1.0,
        "seconds": {"attending": time.perf_counter() - begin},
        "backend": call.backend.name,
    }
    return Outcome(attended, count_keys, [selection_of(real.to(call.key.device))], stats)


def visible_keys(call: Call) -> Callable[[], float]:
    """Counts the real keys that a real query may see, on average; keeps nothing of the call but its padding."""
    n_query, n_keys, is_causal, valid = call.n_query, call.n_keys, call.is_causal, call.valid

    def count() -> float:
        if not n_query or not n_keys:
            return 0.0
        if valid is None:
            return n_keys - ((n_query - 1) / 2 if is_causal else 0.0)
        seen = valid.cumsum(1)
        seen = seen[:, n_keys - n_query :] if is_causal else seen[:, -1:].expand(-1, n_query)
        real = valid if n_query == n_keys else torch.ones_like(seen, dtype=torch.bool)
        return float(seen[real].double().mean()) if bool(real.any()) else 0.0

    return count


# The public functions on keys alone: scores, and the keys that are kept (Algorithm 1).

Generator = torch.Generator | int | None


def score(
    key: Tensor,
    scorer: str | Scorer = "kmeans",
    *,
    key_padding_mask: Tensor | None = None,
    generator: Generator = None,
) -> Tensor:
    """Score keys (Algorithm 1 without the budget).

    Args:
        key: `[B, Hkv, N, D]`.
        scorer: A name of `list_scorers()`, or a scorer object.
        key_padding_mask: `[B, N]`, True = a real key.
        generator: Seed, generator or None.

    Returns:
        `[B, Hkv, N]` in at least float32; higher = kept, padded keys -inf, sinks not raised.
    """
    chosen = as_scorer(scorer)
    with without_autocast(key):
        return _score(key, chosen, key_padding_mask, generator)


def _score(key: Tensor, scorer: Scorer, key_padding_mask: Tensor | None, generator: Generator) -> Tensor:
    checks.keys(key, key_padding_mask)
    streams = as_streams(generator)
    if 0 in key.shape[:3]:
        return key.new_zeros(key.shape[:3], dtype=torch.promote_types(key.dtype, torch.float32))
    aligned, valid, shift = align_keys(key, key_padding_mask)
    scores = score_keys(aligned, scorer, valid=valid, streams=streams.child(FULL)).scores
    if shift is None:
        return scores
    index = torch.arange(key.shape[2], device=key.device) - shift[:, None]
    moved = scores.gather(-1, index.clamp_min(0)[:, None, :].expand_as(scores))
    return moved.masked_fill((index < 0)[:, None, :], -torch.inf)


def select(
    key: Tensor,
    scorer: str | Scorer = "kmeans",
    *,
    top_k: int | float,
    sinks: int = 4,
    recent: int = 0,
    selector: str = "top",
    min_fraction: float = 0.0,
    key_padding_mask: Tensor | None = None,
    generator: Generator = None,
) -> Selection:
    """Choose the keys to keep (Algorithm 1); the fields mean what they mean in `Selected`.

    Example:
        >>> kept = select(key, "kmeans", top_k=256, sinks=4)
        >>> kept.indices.shape
        torch.Size([1, 8, 256])
    """
    config = Selected(scorer, top_k, selector=selector, sinks=sinks, recent=recent, min_fraction=min_fraction)
    with without_autocast(key):
        return select_by(key, config, key_padding_mask=key_padding_mask, generator=generator)


def select_by(
    key: Tensor, config: Selected, *, key_padding_mask: Tensor | None = None, generator: Generator = None
) -> Selection:
    """The keys that a configuration keeps of all of them, whatever it does with them afterwards."""
    checks.keys(key, key_padding_mask)
    streams = as_streams(generator)
    if 0 in key.shape[:3]:
        return nothing_selected(key)
    aligned, valid, shift = align_keys(key, key_padding_mask)
    protect = None
    if config.sinks or config.recent:
        protect = protected_positions(valid, aligned, config.sinks, config.recent)
    chosen = select_keys(aligned, config, valid=valid, streams=streams.child(FULL), protect=protect)
    return shifted_back(chosen.selection, shift, key.shape[2])


def nothing_selected(key: Tensor) -> Selection:
    """A selection without keys."""
    empty = torch.zeros(*key.shape[:2], 0, dtype=torch.int64, device=key.device)
    return Selection(empty, empty.bool())
