"""Deliberate breaks that the fuzzer catches: each changes one line of meaning, and an oracle refutes some call."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from fuzz_cases import random_case

from fuzz import refute
from prescore import Routed, call, checks
from prescore import attention as engines
from prescore import attention as running
from prescore.integrations import decode
from prescore.ops import cpu, plain
from prescore.ops import parts as exact
from prescore.ops.native.library import NO_LEVEL, loaded_level
from prescore.rng import Streams
from prescore.routed import attention as lanes
from prescore.routed import native as far
from prescore.routed import softmax
from prescore.types import Attended, Outcome

TRIES = 600


def _changed(monkeypatch, change):
    """`change(call, output)` replaces the output of every call."""
    original = engines.run_engine

    def run(made, config, given, explain):
        outcome = original(made, config, given, explain)
        attended = Attended(change(made, outcome.attended.output), outcome.attended.lse)
        return Outcome(attended, outcome.count_keys, outcome.selections, outcome.stats)

    for module in (engines, running):
        monkeypatch.setattr(module, "run_engine", run)
    monkeypatch.setattr(engines, "_is_exact", lambda made, config: False)


def _strides_are_not_looked_at(monkeypatch):
    for module in (cpu, exact, lanes):
        monkeypatch.setattr(module, "readable", lambda rows: rows)


def _padding_is_not_hidden(monkeypatch):
    original = exact.padding_bias
    for module in (exact,):
        monkeypatch.setattr(module, "padding_bias", lambda valid, *rest: original(torch.ones_like(valid), *rest))


def _padded_queries_count_positions(monkeypatch):
    monkeypatch.setattr(call.Call, "behind_the_end", lambda self: None)


def _sign_of_the_scale_is_lost(monkeypatch):
    def positive(query, scale):
        return query, abs(query.shape[-1] ** -0.5 if scale is None else scale) or 1.0

    monkeypatch.setattr(call, "with_positive_scale", positive)


def _outputs_stay_shifted(monkeypatch):
    monkeypatch.setattr(call.Call, "restore", lambda self, attended: attended)


def _global_randomness(monkeypatch):
    monkeypatch.setattr(Streams, "uniform", lambda self, name, *size, like: torch.rand(*size, dtype=torch.float64))


def _another_seed_every_time(monkeypatch):
    count = itertools.count()
    monkeypatch.setattr(running, "as_streams", lambda generator: Streams(next(count)))


def _inputs_are_changed(monkeypatch):
    original = running.make_call

    def make(query, key, value, *rest, **options):
        value.data.mul_(1.5)
        return original(query, key, value, *rest, **options)

    monkeypatch.setattr(running, "make_call", make)


def _value_gradient_is_too_large(monkeypatch):
    original = cpu.CpuFlash.backward

    def backward(self, tile, grad, merged):
        grads = original(self, tile, grad, merged)
        return grads._replace(value=grads.value * 1.001)

    monkeypatch.setattr(cpu.CpuFlash, "backward", backward)


def _key_gradient_is_lost(monkeypatch):
    original = cpu.CpuFlash.backward

    def backward(self, tile, grad, merged):
        grads = original(self, tile, grad, merged)
        return grads._replace(key=grads.key * 0)

    monkeypatch.setattr(cpu.CpuFlash, "backward", backward)


def _plain_rounds(monkeypatch):
    original = plain._logits
    monkeypatch.setattr(plain, "_logits", lambda *arguments: original(*arguments) * (1 + 1e-6))


def _the_future_leaks(monkeypatch):
    _changed(monkeypatch, lambda made, output: output + 1e-6 * made.value.mean())


def _the_batch_leaks(monkeypatch):
    def leak(made, output):
        return output + 1e-6 * made.query.shape[0]

    _changed(monkeypatch, leak)


def _blind_queries_see(monkeypatch):
    _changed(monkeypatch, lambda made, output: torch.where(output == 0, 1e-3, output))


def _values_may_be_anything(monkeypatch):
    monkeypatch.setattr(checks, "_finite", lambda name, tensor, mask: None)


def _tensors_are_not_checked(monkeypatch):
    monkeypatch.setattr(checks, "tensor4", lambda name, value: None)


def _a_given_key_is_lost(monkeypatch):
    original = running.given_members

    def lose(*arguments):
        member = original(*arguments)
        member[..., 0] = False  # a sink, which every selection keeps
        return member

    monkeypatch.setattr(running, "given_members", lose)


def _a_step_has_no_sinks(monkeypatch):
    original = decode.make_plan
    monkeypatch.setattr(
        decode, "make_plan", lambda made, config: original(made, config.replace(sinks=0, recent=0))
    )


def _pieces_have_other_positions(monkeypatch):
    original = running.make_call

    def make(query, *rest, **options):
        made = original(query, *rest, **options)
        moved = made.n_query < made.n_keys and made.is_causal and isinstance(made.query_start, int)
        return replace(made, key=made.key.roll(1, 2)) if moved else made

    monkeypatch.setattr(running, "make_call", make)


def _padded_queries_may_spoil_gradients(monkeypatch):
    monkeypatch.setattr(call, "_readable", lambda query, real: query)


def _limits_do_not_move(monkeypatch):
    monkeypatch.setattr(softmax, "_through_the_limit", lambda grad, merged, known, grad_limit: (grad, merged))


def _covariances_do_not_move(monkeypatch):
    original = lanes.pooled
    monkeypatch.setattr(lanes, "pooled", lambda parts: original(parts.detach()))


def _compiled_values_drift_further(monkeypatch):
    original = far.make_tables

    def make(sources):
        tables = original(sources)
        return replace(tables, drift=tables.drift * 1.01)

    monkeypatch.setattr(far, "make_tables", make)


def _compiled_gradients_lose_the_spread(monkeypatch):
    original = far._learned

    def lose(parts, *rest):
        *others, spread, drift = parts
        return original((*others, spread * 0, drift), *rest)

    monkeypatch.setattr(far, "_learned", lose)


BREAKS = {
    _strides_are_not_looked_at: "dense",
    _padding_is_not_hidden: "dense",
    _padded_queries_count_positions: "padded_queries",
    _sign_of_the_scale_is_lost: "dense",
    _outputs_stay_shifted: "batch_and_padding",
    _global_randomness: "basics",
    _another_seed_every_time: "basics",
    _inputs_are_changed: "basics",
    _value_gradient_is_too_large: "gradients",
    _key_gradient_is_lost: "dense",
    _padded_queries_may_spoil_gradients: "gradients",
    _limits_do_not_move: "slopes",
    _covariances_do_not_move: "slopes",
    _plain_rounds: "backends_agree",
    _compiled_values_drift_further: "compiled_agrees",
    _compiled_gradients_lose_the_spread: "compiled_agrees",
    _the_future_leaks: "causality",
    _the_batch_leaks: "batch_and_padding",
    _blind_queries_see: "basics",
    _values_may_be_anything: "bad_input",
    _tensors_are_not_checked: "bad_input",
    _a_given_key_is_lost: "chosen_keys",
    _a_step_has_no_sinks: "decode_step",
    _pieces_have_other_positions: "pieces",
}


OF_ROUTED = (
    _limits_do_not_move,
    _covariances_do_not_move,
    _compiled_values_drift_further,
    _compiled_gradients_lose_the_spread,
    _padded_queries_count_positions,
)
"""Breaks that no other configuration can feel."""


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.__name__.strip("_"))
def test_a_break_is_caught(broken, monkeypatch):
    oracle = BREAKS[broken]
    if oracle == "compiled_agrees" and loaded_level() == NO_LEVEL:
        pytest.skip("there is no compiled code here")
    cases = (random_case(random.Random(f"break/{number}")) for number in range(TRIES))
    if broken in OF_ROUTED:
        cases = (case for case in cases if isinstance(case.config, Routed))
    with monkeypatch.context() as patched:
        broken(patched)
        failure = next((found for case in cases if (found := refute(oracle, case)) is not None), None)
    assert failure is not None, f"{oracle} must refute some call"
    assert refute(oracle, failure.case) is None, "without the break the same call holds"
