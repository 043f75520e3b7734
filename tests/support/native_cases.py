"""Calls of the routed far part that compiled code can run, and how far it may lie from plain torch."""

import os
from contextlib import contextmanager

import pytest
import torch
from attention_checks import call_of

from prescore.errors import Unsupported
from prescore.ops.native import library
from prescore.routed import native, softmax
from prescore.routed.lanes import attend_lanes

LEVELS = ("baseline", "avx2", "avx512")


def use_level(level, monkeypatch):
    """Run compiled code of one level, or skip the test where it cannot run."""
    monkeypatch.setenv(library.VARIABLE, level)
    try:
        assert library.load() is not None
    except Unsupported as refusal:
        pytest.skip(str(refusal))


@contextmanager
def counted_calls():
    """How often compiled code ran."""
    calls, original = [], native.attend

    def counting(*arguments):
        calls.append(arguments[0].shape)
        return original(*arguments)

    softmax.native.attend = counting
    try:
        yield calls
    finally:
        softmax.native.attend = original


def answers(tensors, config, *, is_causal, valid=None):
    """Routed attention by compiled code, and by plain torch."""
    call = call_of(*tensors, valid, is_causal=is_causal)
    with counted_calls() as calls:
        compiled = attend_lanes(call, config)
    assert calls, "compiled code must run, or nothing is compared"
    before = os.environ[library.VARIABLE] if library.VARIABLE in os.environ else None
    os.environ[library.VARIABLE] = "0"
    try:
        plain = attend_lanes(call, config)
    finally:
        if before is None:
            del os.environ[library.VARIABLE]
        else:
            os.environ[library.VARIABLE] = before
    return compiled, plain


def rows_apart(compiled, plain, budget):
    """`[B, Hq, Nq]` queries that differ by more than `budget`; NaN and equal infinities agree with themselves."""
    output = (compiled.output.double() - plain.output.double()).abs()
    output = output.masked_fill(compiled.output.isnan() & plain.output.isnan(), 0.0)
    lse = (compiled.lse - plain.lse).abs().masked_fill(compiled.lse == plain.lse, 0.0)
    lse = lse.masked_fill(compiled.lse.isnan() & plain.lse.isnan(), 0.0)
    return ~(output.amax(-1) <= budget) | ~(lse <= budget)
