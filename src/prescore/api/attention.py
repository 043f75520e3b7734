"""The public functions of attention: check, make a `Call`, let the configuration's engine run it, put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, overload

from torch import Tensor

from prescore import checks
from prescore.api.engines import run_engine, run_or_shortcut
from prescore.api.scoring import Generator, nothing_selected
from prescore.call import Call, make_call
from prescore.config import Config, Exact, Hyper, Selected, check_config
from prescore.errors import Unsupported
from prescore.ops.backend import Backend, Needs, pick_backend
from prescore.ops.dropout import Dropout
from prescore.parallel.door import PieceRequest, attend_in_group, refuse_in_group
from prescore.rng import Streams, as_streams, check_generator
from prescore.selection.given import check_selection, given_members
from prescore.surroundings import differentiable_once, plain_torch
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
            `1 / (1 - p)`, lse counts all keys as before, and a stand-in is dropped as a whole. Which ones are
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
    options = Options(
        is_causal, key_padding_mask, scale, generator, selection, dropout_p, dropout_generator, backend
    )
    if group is not None:
        outcome = attend_together(query, key, value, config, options, group, explain=return_aux)
        attended = outcome.attended
        return (attended.output, Aux(attended.lse, [], Stats.of(outcome.stats))) if return_aux else attended.output
    if not return_aux:
        return attend_counting(query, key, value, config, options).output
    call, outcome = _attend(query, key, value, config, options, explain=True)
    attended = call.restore(outcome.attended)
    kept = [call.restore_selection(chosen) for chosen in outcome.selections]
    chosen = kept if is_causal else kept[0] if kept else nothing_selected(key)
    return attended.output, Aux(attended.lse, chosen, Stats.of(outcome.stats))


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
    """An output, a function that counts the key and stand-in rows that a query met, and figures at hand."""

    output: Tensor
    count_rows: Callable[[], float]
    figures: Mapping[str, Any] = MappingProxyType({})


def attend_counting(query: Tensor, key: Tensor, value: Tensor, config: Config | None, options: Options) -> Counted:
    """`prescored_attention` without statistics; rows are counted when somebody asks, outside of any timer."""
    call, outcome = _attend(query, key, value, config, options, explain=False)
    return Counted(call.restore(outcome.attended).output, outcome.count_rows, outcome.stats)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, config: Config | None, options: Options, *, explain: bool
) -> tuple[Call, Outcome]:
    """Check everything, then run it; the result is still in aligned positions."""
    with plain_torch(query, key, value) as (query, key, value):
        return _attend_plainly(query, key, value, config, options, explain)


def _attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, config: Config | None, options: Options, explain: bool
) -> tuple[Call, Outcome]:
    config = _check(query, key, value, config, options)
    is_causal, mask, scale, generator, selection, dropout_p, dropout_generator, backend = options
    streams = as_streams(generator)  # last of the checks: a refused call must not advance the generator
    dropping = streams if dropout_generator is None else as_streams(dropout_generator)
    call = make_call(
        *differentiable_once(query, key, value),
        mask,
        is_causal=is_causal,
        scale=scale,
        backend=_backend(query, backend, dropout_p, dropping),
        streams=streams,
        aligned=not isinstance(config, Exact),
    )
    if selection is None:
        return call, run_or_shortcut(call, config, explain)
    return call, run_engine(call, config, given_members(selection, call.shift, call.valid, key.shape[2]), explain)


def _check(query: Tensor, key: Tensor, value: Tensor, config: Config | None, options: Options) -> Config:
    """Refuse what cannot be; gives the configuration that will run."""
    is_causal, mask, scale, _, selection, dropout_p, dropout_generator, backend = options
    if config is None and selection is not None:
        config = Selected(remainder="none")
    config = check_config(config)
    checks.probability("dropout_p", dropout_p)
    check_generator(dropout_generator, "dropout_generator")
    checks.attention_inputs(query, key, value, is_causal=is_causal, key_padding_mask=mask, scale=scale)
    if selection is not None:
        if not isinstance(config, Selected):
            raise ValueError(f"selection must come with a Selected configuration, got {type(config).__name__}")
        check_selection(selection, key)
    _backend(query, backend, dropout_p, Streams())
    return config


def attend_together(
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
            query, key, value = surroundings.enter_context(plain_torch(query, key, value))
        except Unsupported as error:
            refused = refused or error  # the other ranks must hear of it, and wait for nobody

        def check() -> tuple[Config, Backend]:
            if refused is not None:
                raise refused
            refuse_in_group(options.selection is not None, options.dropout_p)
            return _check(query, key, value, config, options), _backend(query, options.backend, 0.0, Streams())

        is_causal, mask, scale, generator, *_ = options
        asked = PieceRequest(query, key, value, is_causal, mask, scale, generator, explain)
        return attend_in_group(group, asked, check, run_or_shortcut)


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
        return attend_together(query, key, value, Exact(), options, group, explain=True).attended
    return _attended(query, key, value, Exact(), options)


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
    return _attended(query, key, value, config, options)


def _attended(query: Tensor, key: Tensor, value: Tensor, config: Config, options: Options) -> Attended:
    """Output and lse of a configuration without dropout or statistics."""
    with plain_torch(query, key, value) as (query, key, value):
        checks.attention_inputs(
            query,
            key,
            value,
            is_causal=options.is_causal,
            key_padding_mask=options.key_padding_mask,
            scale=options.scale,
        )
        backend = pick_backend(Needs.of(query), options.backend)
        call = make_call(
            *differentiable_once(query, key, value),
            options.key_padding_mask,
            is_causal=options.is_causal,
            scale=options.scale,
            backend=backend,
            streams=as_streams(options.generator),
            aligned=not isinstance(config, Exact),
        )
        return call.restore(run_engine(call, config, None, False).attended)


def _backend(query: Tensor, name: str, dropout_p: float, streams: Streams) -> Backend:
    """The operator of a call; raises when none, or not the named one, can run it."""
    dropout = Dropout(dropout_p, streams.child("dropout")) if dropout_p else None
    return pick_backend(Needs.of(query, dropout), name)
