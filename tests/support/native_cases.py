"""Calls of the routed far part that compiled code can run, and how far it may lie from plain torch."""

import os
from contextlib import contextmanager

import pytest
from attention_checks import call_of

from prescore.errors import Unsupported
from prescore.ops.native import library
from prescore.routed import softmax
from prescore.routed.attention import attend_lanes

LEVELS = ("baseline", "avx2", "avx512")


def use_level(level, monkeypatch):
    """Run compiled code of one level, or skip the test where it cannot run."""
    monkeypatch.setenv(library.VARIABLE, level)
    try:
        assert library.load() is not None
    except Unsupported as refusal:
        pytest.skip(str(refusal))


def levels_here():
    """Levels that are built and run on this processor."""
    found = []
    for level in LEVELS:
        try:
            with setting(level):
                library.load()
        except Unsupported:
            continue
        found.append(level)
    return found


@contextmanager
def setting(value):
    """`PRESCORE_NATIVE` is this."""
    before = os.environ.get(library.VARIABLE)
    os.environ[library.VARIABLE] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[library.VARIABLE]
        else:
            os.environ[library.VARIABLE] = before


@contextmanager
def counted_calls():
    """How often compiled code ran."""
    calls, original = [], softmax.attend_compiled

    def counting(*arguments):
        calls.append(arguments[0].shape)
        return original(*arguments)

    softmax.attend_compiled = counting
    try:
        yield calls
    finally:
        softmax.attend_compiled = original


def answers(tensors, config, *, is_causal, valid=None):
    """Routed attention by compiled code, and by plain torch."""
    compiled = compiled_answer(tensors, config, is_causal=is_causal, valid=valid)
    return compiled, plain_answer(tensors, config, is_causal=is_causal, valid=valid)


def compiled_answer(tensors, config, *, is_causal, valid=None):
    """Routed attention by compiled code of the level that is set."""
    with counted_calls() as calls:
        answer = attend_lanes(call_of(*tensors, valid, is_causal=is_causal), config)
    assert calls, "compiled code must run, or nothing is compared"
    return answer


def plain_answer(tensors, config, *, is_causal, valid=None):
    """The same by plain torch."""
    with setting("0"):
        return attend_lanes(call_of(*tensors, valid, is_causal=is_causal), config)


def rows_apart(compiled, plain, budget):
    """`[B, Hq, Nq]` queries that differ by more than `budget`; NaN and equal infinities agree with themselves."""
    output = (compiled.output.double() - plain.output.double()).abs()
    output = output.masked_fill(compiled.output.isnan() & plain.output.isnan(), 0.0)
    lse = (compiled.lse - plain.lse).abs().masked_fill(compiled.lse == plain.lse, 0.0)
    lse = lse.masked_fill(compiled.lse.isnan() & plain.lse.isnan(), 0.0)
    return ~(output.amax(-1) <= budget) | ~(lse <= budget)
