"""The public functions: check, align, plan, run, restore."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch
from torch import Tensor

from prescore import checks
from prescore.attention.dropout import Dropout
from prescore.attention.exact import exact_output, resolve_scale
from prescore.attention.kernels import Backend, Call, pick_backend
from prescore.attention.parts import attend_parts
from prescore.attention.routed_layout import make_layout
from prescore.blocks import FULL
from prescore.config import PrescoreConfig
from prescore.errors import Unsupported
from prescore.layout import Aligned, align, align_keys
from prescore.plan import Plan, Planner, exact_everywhere
from prescore.rng import DEFAULT_SEED, Streams, as_streams, check_generator
from prescore.route import route, routed_selection, routes, rows_with_gaps
from prescore.scoring import score_keys, select_keys
from prescore.selection.given import given_members
from prescore.selection.members import protected_positions
from prescore.statistics import routed_statistics, statistics
from prescore.types import Attended, Aux, Selection

Generator = torch.Generator | int | None


def score(
    key: Tensor,
    *,
    config: PrescoreConfig | None = None,
    key_padding_mask: Tensor | None = None,
    generator: Generator = None,
) -> Tensor:
    """Score keys (Algorithm 1 without the budget).

    Args:
        key: `[B, Hkv, N, D]`.
        config: Which method, rule and so on; the default is `PrescoreConfig()`.
        key_padding_mask: `[B, N]`, True = a real key.
        generator: Seed, generator or None.

    Returns:
        `[B, Hkv, N]` in at least float32; higher = kept, padded keys -inf, sinks not raised.
    """
    config = _config(config)
    checks.keys(key, key_padding_mask)
    streams = as_streams(generator)
    if 0 in key.shape[:3]:
        return key.new_zeros(key.shape[:3], dtype=torch.promote_types(key.dtype, torch.float32))
    aligned, valid, shift = align_keys(key, key_padding_mask)
    streams = streams.child(FULL)
    scores = score_keys(aligned, valid=valid, config=config, streams=streams).scores
    if shift is None:
        return scores
    index = torch.arange(key.shape[2], device=key.device) - shift[:, None]
    moved = scores.gather(-1, index.clamp_min(0)[:, None, :].expand_as(scores))
    return moved.masked_fill((index < 0)[:, None, :], -torch.inf)


def select(
    key: Tensor,
    *,
    config: PrescoreConfig | None = None,
    key_padding_mask: Tensor | None = None,
    generator: Generator = None,
) -> Selection:
    """Choose the keys to keep (Algorithm 1): budget, sinks, recent positions, delta test.

    Example:
        >>> kept = select(key, config=PrescoreConfig(method="kmeans", top_k=256, sinks=4))
        >>> kept.indices.shape
        torch.Size([1, 8, 256])
    """
    config = _config(config)
    checks.keys(key, key_padding_mask)
    streams = as_streams(generator)
    if 0 in key.shape[:3]:
        return _only([], key)
    aligned, valid, shift = align_keys(key, key_padding_mask)
    protect = None
    if config.sinks or config.recent:
        protect = protected_positions(valid, aligned, config.sinks, config.recent)
    streams = streams.child(FULL)
    chosen = select_keys(aligned, valid=valid, config=config, streams=streams, protect=protect).selection
    return _in_place(chosen, shift, key.shape[2])


def prescored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    config: PrescoreConfig | None = None,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    generator: Generator = None,
    selection: Selection | None = None,
    return_aux: bool = False,
    backend: str = "auto",
    dropout_p: float = 0.0,
    dropout_generator: Generator = None,
) -> Any:
    """Attention over the keys that matter (Algorithm 2).

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`, `Hq` a multiple of `Hkv`.
        value: `[B, Hkv, Nk, Dv]`.
        config: The default is `PrescoreConfig()`.
        is_causal: Queries are the last `Nq` positions; every off-diagonal block of the recursion scores its
            own past keys only.
        key_padding_mask: `[B, Nk]`, True = a real key.
        scale: Factor of the logits, `D ** -0.5` by default.
        generator: Seed, generator or None.
        selection: Use this selection instead of making one; `inner="routed"` then attends exactly to it.
        return_aux: Also return lse, the selection and statistics.
        backend: Operator backend, see `exact_attention`.
        dropout_p: Probability of dropping an attention weight, for training: the kept ones are scaled by
            `1 / (1 - p)`, lse counts all keys as before, and a stand-in is dropped as a whole. Which ones are
            dropped is drawn apart for each sequence and head, and drawn again in the backward pass rather than
            stored. The fused operators cannot do this: the plain backend runs, which is slower.
        dropout_generator: Seed or generator of the dropout alone, so that it may change from step to step
            while the selection does not; None = from `generator` too.

    Returns:
        The output `[B, Hq, Nq, Dv]`, or `(output, Aux)`.
    """
    config = _config(config)
    checks.probability("dropout_p", dropout_p)
    check_generator(dropout_generator, "dropout_generator")
    checks.attention_inputs(query, key, value, is_causal=is_causal, key_padding_mask=key_padding_mask, scale=scale)
    plain = selection is None and key_padding_mask is None and not dropout_p and not return_aux
    if plain and _is_exact(config, query.shape[2], key.shape[2], is_causal):
        chosen = pick_backend(Call(query.device.type, query.dtype, query.shape[-1]), backend)
        as_streams(generator)  # nothing is drawn, but a generator that is passed in advances
        scale = resolve_scale(scale, query)
        return exact_output(query, key, value, is_causal=is_causal, scale=scale, backend=chosen)
    if selection is None and routes(config, key.shape[2], is_causal):
        call = align(query, key, value, key_padding_mask, is_causal=is_causal)
        scale = resolve_scale(scale, query)
        dropping = (dropout_p, dropout_generator)
        return _routed(call, config, is_causal, scale, generator, return_aux, backend, dropping)
    attended, plan, call = _attend_checked(
        query, key, value, config, is_causal, key_padding_mask, scale, generator, selection, backend,
        (dropout_p, dropout_generator),
    )  # fmt: skip
    if not return_aux:
        return attended.output
    stats = statistics(call, plan, config, resolve_scale(scale, query), backend)
    kept = [_in_place(chosen, call.shift, key.shape[2]) for chosen in plan.selections]
    return attended.output, Aux(attended.lse, kept if is_causal else _only(kept, key), stats)


def _routed(
    call: Aligned,
    config: PrescoreConfig,
    is_causal: bool,
    scale: float,
    generator: Generator,
    return_aux: bool,
    backend: str,
    dropping: tuple[float, Generator],
) -> Any:
    begin = time.perf_counter()
    attended, stats = _route_call(call, config, is_causal, scale, generator, return_aux, backend, dropping)
    if not return_aux:
        return attended.output
    found = routed_statistics(stats, time.perf_counter() - begin)
    n_keys = call.key.shape[2]
    kept = [_in_place(chunk, call.shift, n_keys) for chunk in routed_selection(call, is_causal, config)]
    return attended.output, Aux(attended.lse, kept if is_causal else _only(kept, call.key), found)


def _route_call(
    call: Aligned,
    config: PrescoreConfig,
    is_causal: bool,
    scale: float,
    generator: Generator,
    error_bar: bool,
    backend: str,
    dropping: tuple[float, Generator],
) -> tuple[Attended, dict[str, Any]]:
    """The result in the caller's positions, and figures about what was read."""
    _check_backend(call.query, backend, dropping)
    streams = as_streams(generator)  # routing draws nothing else, but a generator that is passed in advances
    chosen = _backend(call.query, backend, dropping, streams)
    gaps = rows_with_gaps(call, is_causal)
    attended, stats = route(
        call, config, is_causal=is_causal, scale=scale, backend=chosen, error_bar=error_bar, elsewhere=gaps
    )
    if gaps is not None:
        everything = config.replace(inner="exact", top_k=None, remainder="none")
        plan = Planner(call, everything, streams, None, is_causal).build()
        exact = attend_parts(call.query, plan.key, plan.value, plan.parts, scale=scale, backend=chosen.at("gaps"))
        output = torch.where(gaps[:, None, None, None], exact.output, attended.output)
        attended = Attended(output, torch.where(gaps[:, None, None], exact.lse, attended.lse))
        stats["exact_sequences"] = int(gaps.sum())
    return call.restore(attended), stats


def attend_counting(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: PrescoreConfig,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    generator: Generator = None,
) -> tuple[Tensor, float | None]:
    """`prescored_attention`, and the rows per query of a call that routes; None where its plan tells instead.

    Without the error bars of `return_aux`, so that the call may be timed.
    """
    checks.attention_inputs(query, key, value, is_causal=is_causal, key_padding_mask=None, scale=scale)
    sizes = query.shape[2], key.shape[2]
    if not routes(config, sizes[1], is_causal) or _is_exact(config, *sizes, is_causal):
        output = prescored_attention(
            query, key, value, config=config, is_causal=is_causal, scale=scale, generator=generator
        )
        return output, None
    call = align(query, key, value, None, is_causal=is_causal)
    scale = resolve_scale(scale, query)
    attended, figures = _route_call(call, config, is_causal, scale, generator, False, "auto", (0.0, None))
    return attended.output, figures["rows_per_query"]


def hyper_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    config: PrescoreConfig | None = None,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    generator: Generator = None,
    backend: str = "auto",
) -> Attended:
    """Unfiltered HyperAttention: LSH blocks plus a sampled residual over all keys.

    `config` defaults to `PrescoreConfig.hyper()`; its `method`, `top_k`, `inner` and `remainder` are ignored.
    """
    config = PrescoreConfig.hyper() if config is None else _config(config)
    config = config.replace(top_k=None, inner="hyper", remainder="none", tolerance=None)
    return attend_with_plan(
        query, key, value, config, is_causal, key_padding_mask, scale, generator, None, backend
    )[0]


def attend_with_plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: PrescoreConfig,
    is_causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
    generator: Generator = None,
    selection: Selection | None = None,
    backend: str = "auto",
    dropping: tuple[float, Generator] = (0.0, None),
) -> tuple[Attended, Plan, Aligned]:
    """`prescored_attention` together with the plan it ran, for those who check or time the parts."""
    checks.attention_inputs(query, key, value, is_causal=is_causal, key_padding_mask=mask, scale=scale)
    return _attend_checked(
        query, key, value, config, is_causal, mask, scale, generator, selection, backend, dropping
    )


def _attend_checked(
    query: Tensor, key: Tensor, value: Tensor, config: PrescoreConfig, is_causal: bool, mask: Tensor | None,
    scale: float | None, generator: Generator, selection: Selection | None, backend: str,
    dropping: tuple[float, Generator],
) -> tuple[Attended, Plan, Aligned]:  # fmt: skip
    _check_backend(query, backend, dropping)
    call = align(query, key, value, mask, is_causal=is_causal)
    given = None if selection is None else given_members(selection, key, call)
    if config.tolerance is not None:
        given_too = ", a selection" if selection is not None else ""
        got = f"inner={config.inner!r}, top_k={config.top_k!r}{given_too}"
        raise Unsupported("tolerance", [f"it is certified for routed attention over all keys only, got {got}"])
    if config.inner == "routed":
        config = config.replace(inner="exact")
    streams = as_streams(generator)  # last of the checks: a refused call must not advance the generator
    plan = Planner(call, config, streams, given, is_causal).build()
    attended = plan.timed(
        "attending",
        lambda: attend_parts(
            call.query,
            plan.key,
            plan.value,
            plan.parts,
            scale=resolve_scale(scale, query),
            stand_ins=plan.stand_ins,
            backend=_backend(query, backend, dropping, streams),
        ),
    )
    return call.restore(attended), plan, call


def _check_backend(query: Tensor, name: str, dropping: tuple[float, Generator]) -> None:
    """Raise when no operator, or not the named one, can run the call, before a generator is touched."""
    _backend(query, name, (dropping[0], None), Streams(DEFAULT_SEED))


def _backend(query: Tensor, name: str, dropping: tuple[float, Generator], streams: Streams) -> Backend:
    p, generator = dropping
    dropout = None
    if p:
        own = streams if generator is None else as_streams(generator)
        dropout = Dropout(p, own.child("dropout"))
    return pick_backend(Call(query.device.type, query.dtype, query.shape[-1], dropout), name)


def _is_exact(config: PrescoreConfig, n_query: int, n_keys: int, is_causal: bool) -> bool:
    """Whether a call without padding and without a selection is exact attention, whatever the keys are."""
    if config.tolerance is not None:
        return False
    if not routes(config, n_keys, is_causal):
        zeroing = config.coupling.mask == "zero" and bool(config.top_k)
        return not zeroing and exact_everywhere(config, n_keys, is_causal)
    if is_causal:
        return make_layout(n_query, n_keys, causal=True, config=config).n_pieces == 0
    return n_query <= config.min_seq_len if config.leaf_inclusive else n_query < config.min_seq_len


@cache
def _default_config() -> PrescoreConfig:
    """Frozen, so it is made and checked once."""
    return PrescoreConfig()


def _config(config: PrescoreConfig | None) -> PrescoreConfig:
    if config is None:
        return _default_config()
    if not isinstance(config, PrescoreConfig):
        raise TypeError(f"config must be a prescore.PrescoreConfig or None, got {type(config).__name__}")
    return config


def _only(kept: list[Selection], key: Tensor) -> Selection:
    if kept:
        return kept[0]
    empty = torch.zeros(*key.shape[:2], 0, dtype=torch.int64, device=key.device)  # nothing to select from
    return Selection(empty, empty.bool())


def _in_place(selection: Selection, shift: Tensor | None, n_keys: int) -> Selection:
    """From aligned positions to positions of the tensors the caller gave."""
    if shift is None:
        return selection
    # filler of a block beyond a short sequence would point past the end, and break a caller's gather
    indices = (selection.indices + shift[:, None, None]).clamp_max(n_keys - 1)
    return Selection(indices, selection.valid, selection.fallback)
