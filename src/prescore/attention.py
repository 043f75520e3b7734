"""The public functions on tensors: check, make a `Call`, run the engine of the configuration, put results back."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from prescore import checks
from prescore.autograd import differentiable_once, outside_graphs, refuse_tracing, without_autocast
from prescore.call import Generator, align_keys, make_call, shifted_back, with_positive_scale
from prescore.call import Options as Options
from prescore.config import Config, Exact, Hyper, Routed, Selected, check_config
from prescore.engines import run_engine
from prescore.errors import Unsupported
from prescore.ops.dropout import Dropout
from prescore.ops.key_lists import check_key_lists, list_parts, without_duplicates
from prescore.ops.operators import BACKENDS, Operator, pick_operator
from prescore.ops.parts import attend_parts
from prescore.parallel.entry import attend_in_group
from prescore.rng import Streams, as_streams, check_generator
from prescore.routed import native
from prescore.routed.backends import auto_config, unsupported
from prescore.scoring.base import Scorer, as_scorer
from prescore.scoring.sampling import arange
from prescore.scoring.select import check_selection, given_members, protected_positions, score_keys, select_keys
from prescore.selected.causal_grid import FULL
from prescore.types import Attended, Aux, Result, Selection, Stats

_LOGGER = logging.getLogger("prescore")


class _Arguments(TypedDict, total=False):
    """The keyword arguments of `prescored_attention` that do not change the type of its result."""

    is_causal: bool
    key_padding_mask: Tensor | None
    scale: float | None
    generator: Generator
    selection: Selection | None
    dropout_p: float
    dropout_generator: Generator
    group: object
    backend: str


@overload
def prescored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Config | None = None,
    *,
    return_aux: Literal[False] = False,
    **options: Unpack[_Arguments],
) -> Tensor: ...


@overload
def prescored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Config | None = None,
    *,
    return_aux: Literal[True],
    **options: Unpack[_Arguments],
) -> tuple[Tensor, Aux]: ...


@overload
def prescored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Config | None = None,
    *,
    return_aux: bool,
    **options: Unpack[_Arguments],
) -> Tensor | tuple[Tensor, Aux]: ...


@outside_graphs
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
    **others: Any,
) -> Tensor | tuple[Tensor, Aux]:
    """Attention by the given configuration; `Routed()` if none.

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`, `Hq` a multiple of `Hkv`; finite where it is not padding.
        value: `[B, Hkv, Nk, Dv]`, likewise.
        config: How to attend: a `Routed`, `Selected`, `Hyper` or `Exact`; None = `Routed()`.
        is_causal: Queries are the last `Nq` positions and see no later key. Later queries, keys and values change
            no earlier output (except with `Lsh(alignment="rank")`). With `Routed` earlier outputs stay equal to
            the bit, with `Selected` and `Hyper` up to rounding: any lse above 1024 makes the call run in float64.
        key_padding_mask: `[B, Nk]`, True = a real key. A causal query before the first or after the last real key
            sees nothing: output 0, lse -inf. A causal query at padding between real keys sees the real keys
            before the query; NaN and infinity in such a query count as 0.
        scale: Factor of the logits, any finite number; `D ** -0.5` by default.
        generator: A seed, a generator or None: all sequences share the draws. Or a list with one seed for each
            sequence.
        selection: With a `Selected`: use this selection instead of making one. Without a configuration, the call
            runs as `Selected(remainder="none")`: exactly over the selected keys, and in causal mode also over the
            leaf of each query.
        dropout_p: Probability of dropping an attention weight, for training. Weights that are kept are scaled by
            `1 / (1 - p)`; lse counts all keys, dropped ones too; a centroid is dropped as a whole. Every sequence
            and head draws other numbers. The backward pass draws the same numbers again, so none are stored. The
            fused operators cannot drop weights, so the plain backend runs, which is slower.
        dropout_generator: Seed or generator of the dropout alone, so that it may change from step to step
            while the selection does not; None = from `generator` too.
        group: Context parallel: a `torch.distributed` process group or one-dimensional `DeviceMesh` whose ranks
            hold equal, consecutive shards of the sequence. Every rank passes its shard of query, key, value and
            mask, gets its shard of the result, and must take part in the backward pass. With a group, `selection`
            and dropout are refused, and `Aux.selection` is empty: selections stay with the ranks that hold the
            keys. See docs/parallel.md.
        backend: `auto`, `native` (C on CPUs, for `Routed`), `triton` (kernels on GPUs, for `Routed`), `plain`
            (plain torch), or one of torch's fused operators, `cpu-flash` or `cuda-efficient`. A named backend runs
            or raises with its reasons. Without native code or kernels `auto` runs a `Routed` exactly, unless
            `exact_until` is below its default.
        return_aux: Also return lse, the selection and stats.
        **others: Only `attn_mask=None` and `enable_gqa`, as callers of `scaled_dot_product_attention` write them.
            Neither changes anything: grouped heads always work.

    Returns:
        The output `[B, Hq, Nq, Dv]`, or `(output, Aux)`.
    """
    checks.sdpa_arguments(prescored_attention, others)
    checks.boolean("return_aux", return_aux)
    options = Options(
        is_causal, key_padding_mask, scale, generator, selection, dropout_p, dropout_generator, backend, group
    )
    result = attend(query, key, value, config, options, explain=return_aux)
    if not return_aux:
        return result.output
    selections: Selection | list[Selection] = result.selections
    if not is_causal and group is None:
        selections = result.selections[0] if result.selections else empty_selection(key)
    stats = Stats.of({**result.stats, "exact_reason": result.why_exact or None})
    return result.output, Aux(result.lse, selections, stats)


@outside_graphs
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
    **others: Any,
) -> Attended:
    """Softmax attention over all real keys.

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`, `Hq` a multiple of `Hkv`; keys are not repeated.
        value: `[B, Hkv, Nk, Dv]`.
        is_causal: Queries are the last `Nq` positions and see no later key.
        key_padding_mask: `[B, Nk]`, True = a real key.
        scale: Factor of the logits, `D ** -0.5` by default.
        group: Ranks that hold shards of the sequence, as in `prescored_attention`.
        backend: `auto`, `cpu-flash`, `cuda-efficient` or `plain`.
        **others: As in `prescored_attention`.

    Returns:
        Output and lse; a query that sees nothing has output 0 and lse -inf.
    """
    checks.sdpa_arguments(exact_attention, others)
    options = Options(is_causal, key_padding_mask, scale, backend=backend, group=group)
    return attend(query, key, value, Exact(), options, need_lse=True).attended


@outside_graphs
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
    return attend(query, key, value, config, options, need_lse=True).attended


@outside_graphs
def attend_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> Attended:
    """Exact softmax attention in which the caller says which keys each query reads.

    Nothing else is read: causality, sinks and recent keys are the caller's to list. `merge` joins the result with
    attention over other keys.

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`, `Hq` a multiple of `Hkv`.
        value: `[B, Hkv, Nk, Dv]`.
        indices: `[B, Hq or Hkv, n, S]` int64 or int32: lists of key positions, -1 = none. With `Hkv` heads, the
            query heads of a KV head share its lists. With `n = Nq` every query has a list; otherwise the queries
            are cut into `n` blocks of `ceil(Nq / n)`, the last one maybe shorter, and a block shares a list. A key
            that a list names several times counts once.
        scale: Factor of the logits, `D ** -0.5` by default.
        backend: `auto`, `native` (C on CPUs, which `auto` takes where it can), `cpu-flash`, `cuda-efficient` or
            `plain`.

    Returns:
        Output and lse over the listed keys; a query whose list is empty has output 0 and lse -inf. Gradients reach
        the queries and the listed keys and values.

    Example:
        >>> indices = (query[:, :, -1:] @ key.transpose(-1, -2)).topk(64).indices  # one KV head per query head
        >>> output, lse = attend_keys(query[:, :, -1:], key, value, indices)
    """
    with without_autocast(query, key, value) as (query, key, value):
        checks.attention_inputs(query, key, value, is_causal=False, key_padding_mask=None, scale=scale)
        check_key_lists(indices, query, key)
        operator = pick_operator(query, backend)
        if backend == "triton":
            raise Unsupported(f"backend {backend!r}", ["it runs Routed only"])
        refuse_tracing()
        scaled, factor = with_positive_scale(query, scale)
        if backend in ("auto", "native"):
            reasons = native.unsupported_lists(scaled, key, value)
            if not reasons:
                return native.attend_lists(scaled, key, value, indices, factor)
            if backend == "native":
                raise Unsupported(f"backend {backend!r}", reasons)
        tensors = differentiable_once(scaled, key, value)
        parts = list_parts(without_duplicates(indices), query, key)
        return attend_parts(*tensors, parts, scale=factor, operator=operator)


# How a public call runs: check everything, make a `Call`, let the configuration's engine answer it.


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Config | None,
    options: Options,
    *,
    explain: bool = False,
    need_lse: bool = False,
    refusal: Exception | None = None,
) -> Result:
    """What all public functions run: check everything, then compute; outputs are in the caller's positions.

    `explain` also returns lse, selections and all stats, `need_lse` only lse. Context parallel: `refusal` is why
    this rank alone cannot run the call; every rank raises it.
    """
    if options.group is not None:
        explain = explain or need_lse
        return _attend_in_group((query, key, value), config, options, explain=explain, refusal=refusal)
    with without_autocast(query, key, value) as (query, key, value):
        config, operator = _checked(query, key, value, config, options, is_parallel=False)
        reason = ""
        if isinstance(config, Routed) and options.backend == "auto" and not options.dropout_p:
            config, reason = auto_config(query, key, value, config, is_causal=options.is_causal)
            if reason:
                _log_once(reason)
        # only now: a call that is refused must not advance a generator
        streams = as_streams(options.generator, batch=query.shape[0])
        if options.dropout_p:
            drawn = streams if options.dropout_generator is None else as_streams(options.dropout_generator)
            operator = pick_operator(query, options.backend, Dropout(options.dropout_p, drawn.child("dropout")))
        tensors, is_aligned = differentiable_once(query, key, value), not isinstance(config, Exact)
        call = make_call(*tensors, options, operator=operator, streams=streams, aligned=is_aligned)
        members = None
        if options.selection is not None:
            members = given_members(options.selection, call.shift, call.valid, key.shape[2])
        result = run_engine(call, config, members=members, explain=explain, need_lse=need_lse)
        if options.backend == "native" and result.stats.get("backend") == "plain":
            largest = float(result.lse.detach().nan_to_num(neginf=0.0).abs().amax())
            reason = f"gradients need float64 where abs(lse) is so large, got {largest:.4g}"
            raise Unsupported("backend 'native'", [reason])
        if reason:
            result = replace(result, why_exact=reason)
        if call.shift is None and call.blind is None:
            return result
        output, lse = call.restore(result.attended)
        selections = [shifted_back(kept, call.shift, call.n_keys) for kept in result.selections]
        return replace(result, output=output, lse=lse, selections=selections)


@cache
def _log_once(reason: str) -> None:
    """Say once in a process why long calls of a `Routed` gain nothing."""
    _LOGGER.warning("a long call of Routed runs exactly, without a gain: %s", reason)


def _attend_in_group(
    tensors: tuple[Tensor, Tensor, Tensor],
    config: Config | None,
    options: Options,
    *,
    explain: bool,
    refusal: Exception | None,
) -> Result:
    """What `attend` does where the ranks of a group hold shards of the sequence."""
    with ExitStack() as guards:
        try:
            query, key, value = guards.enter_context(without_autocast(*tensors))
            tensors = query, key, value
            config, _ = _checked(*tensors, config, options, is_parallel=True)
        except (ValueError, TypeError) as error:
            refusal = refusal or error  # the other ranks must hear of it instead of waiting
        return attend_in_group(tensors, config, options, explain=explain, refusal=refusal)


def _checked(
    query: Tensor, key: Tensor, value: Tensor, config: Config | None, options: Options, *, is_parallel: bool
) -> tuple[Config, Operator]:
    """Refuse a call that cannot run; else the configuration that will run, and the operator without dropout."""
    if config is None and options.selection is not None:
        config = Selected(remainder="none")
    config = check_config(config)
    if not isinstance(config, Exact):
        refuse_tracing()
    checks.probability("dropout_p", options.dropout_p)
    check_generator(options.dropout_generator, "dropout_generator")
    is_causal, mask, scale = options.is_causal, options.key_padding_mask, options.scale
    checks.attention_inputs(query, key, value, is_causal=is_causal, key_padding_mask=mask, scale=scale)
    check_generator(options.generator, batch=query.shape[0])
    if options.selection is not None:
        if not isinstance(config, Selected):
            raise ValueError(f"selection must come with a Selected configuration, got {type(config).__name__}")
        check_selection(options.selection, key)
    reasons = []
    if is_parallel and options.selection is not None:
        reasons.append("a selection cannot be given for a sequence that lies on several ranks")
    if is_parallel and options.dropout_p:
        reasons.append(f"dropout_p must be 0, as the ranks would drop other weights, got {options.dropout_p}")
    if reasons:
        raise Unsupported("group", reasons)
    checks.one_of("backend", options.backend, BACKENDS)
    if options.backend in ("native", "triton"):
        reasons = ["it runs Routed only"]
        if isinstance(config, Routed):
            reasons = unsupported(options.backend, query, value.shape[-1], config)
        if options.dropout_p:
            reasons.append("it cannot drop attention weights")
        if reasons:
            raise Unsupported(f"backend {options.backend!r}", reasons)
    dropout = Dropout(options.dropout_p, Streams()) if options.dropout_p else None
    return config, pick_operator(query, options.backend, dropout)


@outside_graphs
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
        generator: A seed, a generator or None: all sequences share the draws. Or a list with one seed for each
            sequence.

    Returns:
        `[B, Hkv, N]` in at least float32; higher = kept, padded keys -inf. Sinks have the score that they earn.
    """
    chosen = as_scorer(scorer)
    with without_autocast(key):
        checks.keys(key, key_padding_mask)
        streams = as_streams(generator, batch=key.shape[0])
        if 0 in key.shape[:3]:
            return key.new_zeros(key.shape[:3], dtype=torch.promote_types(key.dtype, torch.float32))
        aligned, valid, shift = align_keys(key, key_padding_mask)
        scores = score_keys(aligned, chosen, valid=valid, streams=streams.child(FULL)).scores
        if shift is None:
            return scores
        index = arange(key.shape[2], like=key) - shift[:, None]
        moved = scores.gather(-1, index.clamp_min(0)[:, None, :].expand_as(scores))
        return moved.masked_fill((index < 0)[:, None, :], -torch.inf)


@outside_graphs
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
    checks.budget("top_k", top_k)
    config = Selected(scorer, top_k, selector=selector, sinks=sinks, recent=recent, min_fraction=min_fraction)
    with without_autocast(key):
        return select_by(key, config, key_padding_mask=key_padding_mask, generator=generator)


def select_by(
    key: Tensor, config: Selected, *, key_padding_mask: Tensor | None = None, generator: Generator = None
) -> Selection:
    """The keys that Algorithm 1 keeps under a configuration; settings of attention play no part."""
    checks.keys(key, key_padding_mask)
    streams = as_streams(generator, batch=key.shape[0])
    if 0 in key.shape[:3]:
        return empty_selection(key)
    aligned, valid, shift = align_keys(key, key_padding_mask)
    protect = None
    if config.sinks or config.recent:
        protect = protected_positions(valid, aligned, config.sinks, config.recent)
    chosen = select_keys(aligned, config, valid=valid, streams=streams.child(FULL), protect=protect)
    return shifted_back(chosen.selection, shift, key.shape[2])


def empty_selection(key: Tensor) -> Selection:
    """A selection without keys."""
    empty = torch.zeros(*key.shape[:2], 0, dtype=torch.int64, device=key.device)
    return Selection(empty, empty.bool())
