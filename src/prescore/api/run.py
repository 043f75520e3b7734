"""How a public call runs: check everything, make a `Call`, let the configuration's engine answer it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from prescore import checks
from prescore.api.engines import run_engine, run_or_shortcut
from prescore.api.scoring import Generator
from prescore.call import Call, make_call
from prescore.config import Config, Exact, Routed, Selected, check_config
from prescore.errors import Unsupported
from prescore.ops.backend import Backend, Needs, pick_backend
from prescore.ops.dropout import Dropout
from prescore.parallel.door import PieceRequest, attend_in_group, refuse_in_group
from prescore.rng import Streams, as_streams, check_generator
from prescore.selection.given import check_selection, given_members
from prescore.surroundings import differentiable_once, plain_torch, recorded
from prescore.types import Attended, Outcome, Selection


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
    call, outcome = attend_call(query, key, value, config, options, explain=False)
    return Counted(call.restore(outcome.attended).output, outcome.count_rows, outcome.stats)


def attend_call(
    query: Tensor, key: Tensor, value: Tensor, config: Config | None, options: Options, *, explain: bool
) -> tuple[Call, Outcome]:
    """Check everything, then run it; the result is still in aligned positions."""
    with plain_torch(query, key, value) as (query, key, value):
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
    with plain_torch(query, key, value) as (query, key, value):
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
    if isinstance(config, Routed) and config.tolerance is not None and recorded(query, key, value):
        reason = "which queries read on is not differentiable, and inputs require gradients"
        raise Unsupported("tolerance", [reason])  # at every length: no training ends at its first long text
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


def _backend(query: Tensor, name: str, dropout_p: float, streams: Streams) -> Backend:
    """The operator of a call; raises when none, or not the named one, can run it."""
    dropout = Dropout(dropout_p, streams.child("dropout")) if dropout_p else None
    return pick_backend(Needs.of(query, dropout), name)
