"""Deliberate breaks that the fuzzer catches: each changes one line of code, and an oracle refutes some call."""

import random

import pytest
from breaks import Break, stale
from fuzz_cases import random_case

from fuzz import refute
from prescore import Routed
from prescore.ops.native.library import NO_LEVEL, loaded_level

TRIES = 600
OUTPUT = "output, lse = call.restore(result.attended)"
BREAKS = {
    "strides are ignored": ("dense", "ops.backend",
        "plain if plain.stride(-1) == 1 else plain.contiguous()", "rows"),
    "padding is not hidden": ("dense", "ops.parts", ".masked_fill_(~visible, -torch.inf)", ""),
    "the sign of the scale is lost": ("dense", "call", "(-query, -factor) if", "(query, -factor) if"),
    "the key gradient is lost": ("dense", "ops.cpu", "grads[1][..., :dim],", "grads[1][..., :dim] * 0,"),
    "outputs stay shifted": ("batch_and_padding", "call",
        "if self.shift is None or not self.queries_moved:", "if True:"),
    "positions count from the first slot": ("batch_and_padding", "call",
        "mask.to(torch.uint8).argmax(dim=1)", "mask.to(torch.uint8).argmax(dim=1) * 0"),
    "the batch leaks": ("batch_and_padding", "attention",
        OUTPUT, OUTPUT + "; output = output + 1e-6 * query.shape[0]"),
    "global randomness": ("basics", "rng",
        "generator=self.generator(name), dtype=torch.float64", "dtype=torch.float64"),
    "another seed every time": ("basics", "rng",
        "return Streams(generator)", "return Streams(__import__('time').perf_counter_ns())"),
    "inputs are changed": ("basics", "call", "n_query, n_keys = query.shape[2], key.shape[2]",
        "value.data.mul_(1.5); n_query, n_keys = query.shape[2], key.shape[2]"),
    "queries without keys see": ("basics", "attention",
        OUTPUT, OUTPUT + "; output = torch.where(output == 0, 1e-3, output)"),
    "the future leaks": ("causality", "attention",
        OUTPUT, OUTPUT + "; output = output + 1e-6 * call.value.mean()"),
    "leaf reads one key ahead": ("causality", "selected.causal_grid",
        "(head + positions.clamp_max(", "(head + (positions + 1).clamp_max("),
    "the value gradient is too large": ("gradients", "ops.cpu",
        "grads[2][..., :value_dim])", "grads[2][..., :value_dim] * 1.001)"),
    "padded queries spoil gradients": ("gradients", "call",
        "broken = ~real[:, None] &", "broken = ~real[:, None] & False &"),
    "plain rounds": ("backends_agree", "ops.plain", "* tile.scale  # [b,", "* tile.scale * (1 + 1e-6)  # [b,"),
    "values may be anything": ("bad_input", "checks", "if tensor.numel() == 0:", "if True:"),
    "tensors are not checked": ("bad_input", "checks",
        "if not isinstance(value, Tensor):\n        raise TypeError(f\"{name} must be a torch.Tensor, got",
        "return\n    if True:\n        raise TypeError(f\"{name} must be a torch.Tensor, got"),
    "a step has no sinks": ("decode_step", "integrations.decode", "make_plan(call, _with_exact_inner(config))",
        "make_plan(call, _with_exact_inner(config).replace(sinks=0, recent=0))"),
    "the last queries have other positions": ("last_queries", "call",
        "query, factor = with_positive_scale(query, scale)",
        "query, factor = with_positive_scale(query, scale); key = key.roll(int(n_query < n_keys), 2)"),
    "padded queries count positions": ("padded_queries", "call", "rows = (ends < lasts)", "rows = (ends < ends)"),
    "the threshold passes no gradient": ("slopes", "routed.attention",
        "merged, threshold + view.log_inverse, grad_threshold", "merged, threshold, 0 * threshold"),
    "covariances pass no gradient": ("slopes", "routed.reference",
        "parts.cumsum(1) / count", "parts.detach().cumsum(1) / count"),
    "native values are corrected too far": ("native_agrees", "routed.native",
        "key_value_cov=keys.key_value_cov.contiguous(),", "key_value_cov=keys.key_value_cov * 1.01,"),
    "native gradients lose the key covariance": ("native_agrees", "routed.native",
        "(key, value, *split, *covs)", "(key, value, *split, 0 * covs[0], covs[1])"),
}  # fmt: skip
"""Name -> oracle, module, text and its replacement (see `breaks.Break`)."""
ROUTED_ONLY = ("padded_queries", "slopes", "native_agrees")
"""Oracles whose breaks no other configuration can show."""


def test_every_text_is_there():
    assert stale({name: Break(*row) for name, (_, *row) in BREAKS.items()}) == {}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_caught(name, monkeypatch):
    oracle, *row = BREAKS[name]
    if oracle == "native_agrees" and loaded_level() == NO_LEVEL:
        pytest.skip("there is no native code here")
    cases = (random_case(random.Random(f"break/{number}")) for number in range(TRIES))
    if oracle in ROUTED_ONLY:
        cases = (case for case in cases if isinstance(case.config, Routed))
    with monkeypatch.context() as patched:
        Break(*row).apply(patched)
        failure = next((found for case in cases if (found := refute(oracle, case)) is not None), None)
    assert failure is not None, f"{oracle} must refute some call"
    assert refute(oracle, failure.case) is None, "without the break the same call holds"
