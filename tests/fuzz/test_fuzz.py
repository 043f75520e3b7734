"""500 random calls with a fixed seed (`make fuzz` draws a fresh one), and deliberate breaks of all but
tests/routed.

A break changes one line of code, and an oracle or a check notices. A row whose text is gone fails.
"""

import random

import pytest
import torch
from attention_checks import check_centroids_of_equal_keys as check_equal_keys
from attention_checks import check_gray_neighbours, check_merge_of_split, check_unbiased
from breaks import Break
from fuzz_cases import Case, random_case
from fuzz_oracles import ORACLES

import prescore
from fuzz import refute, run_case, shrink
from prescore import Coupling, Exact, Hyper, KMeans, Lsh, Routed, Selected
from prescore.routed.native.library import NO_LEVEL, loaded_level

SEED, CALLS, PARTS = 1, 500, 10
TRIES = 600
SEEDS = 400
LSH = Lsh(block_size=4, sample_size=3, n_projections=3, alignment="rank")
PAPER = Selected.paper("key-norm", 12, min_seq_len=0, inner=LSH)
CHECKS = {
    "unbiased over selected keys": lambda: check_unbiased(PAPER, seeds=SEEDS, selected=True),
    "unbiased over all keys": lambda: check_unbiased(PAPER, seeds=SEEDS, selected=False),
    "equal keys": check_equal_keys,
    "gray neighbours": lambda: check_gray_neighbours(4),
    "merge of a split": check_merge_of_split,
}
"""Checks that are no oracle of the fuzzer."""
OUTPUT = "output, lse = call.restore(result.attended)"
BREAKS = {
    "strides are ignored": ("dense", "ops.operators",
        "plain if plain.stride(-1) == 1 else plain.contiguous()", "rows"),
    "padding is not hidden": ("dense", "ops.parts", ".masked_fill_(~visible, -torch.inf)", ""),
    "the sign of the scale is lost": ("dense", "call", "else (-query, -factor)", "else (query, -factor)"),
    "the key gradient is lost": ("dense", "ops.cpu", "grads[1][..., :dim],", "grads[1][..., :dim] * 0,"),
    "outputs stay shifted": ("batch_and_padding", "call",
        "if self.shift is not None and self.queries_moved:", "if False:"),
    # Algorithm 2
    "residual weighted by all keys": ("unbiased over selected keys", "selected.blocks",
        'if coupling.residual_weight == "all":', "if True:"),
    "query's block in the residual": ("unbiased over all keys", "selected.blocks",
        'if keys.block_size and coupling.overlap == "exclude":', "if False:"),
    "last key never sampled": ("definition", "selected.blocks",
        "(draws * count[..., None]).floor()", "(draws * (count[..., None] - 1)).floor()"),
    "first key of a given selection lost": ("definition", "attention",
        "call.valid, key.shape[2])", "call.valid, key.shape[2]); members[..., 0] = False"),
    "centroid without log count": ("equal keys", "selected.centroids",
        "torch.log(count).view(shape)", "torch.log(count).clamp_max(0.0).view(shape)"),
    "block reads one key too far": ("definition", "selected.causal_grid",
        "- 1) * width + step", "- 1) * width + step + 1"),
    "leaf reads one key ahead": ("causality", "selected.causal_grid",
        "(head + positions.clamp_max(", "(head + (positions + 1).clamp_max("),
    "Gray code used as the rank": ("gray neighbours", "scoring.hashing",
        "        shift *= 2\n", "        shift = n_bits\n"),
    "parts folded with a wrong weight": ("definition", "ops.parts",
        "torch.stack((old.lse, lse))", "torch.stack((old.lse, lse + 0.1))"),
    "merge by plain average": ("merge of a split", "ops.parts",
        "(outputs * weights[..., None]).sum(0)", "outputs.mean(0)"),
    "gradient under the part's own lse": ("definition", "ops.cpu",
        "wide, output = _same_width(tile), merged.output",
        "merged = self.forward(tile); wide, output = _same_width(tile), merged.output"),
    "filler of the last block gets mass": ("definition", "selected.blocks",
        "slot < keys.count[..., None]", "slot >= 0 * keys.count[..., None]"),
    "wrong block of a query": ("definition", "selected.blocks",
        "flat = ranks.flatten(2)", "flat = ranks.flatten(2) + 1"),
    # any call
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
    "the value gradient is too large": ("gradients", "ops.cpu",
        "grads[2][..., :value_dim])", "grads[2][..., :value_dim] * 1.001)"),
    "padded queries spoil gradients": ("gradients", "call",
        "broken = ~real[:, None] &", "broken = ~real[:, None] & False &"),
    "plain rounds": ("backends_agree", "ops.plain", "* tile.scale  # [b,", "* tile.scale * (1 + 1e-6)  # [b,"),
    "values may be anything": ("bad_input", "checks", "if all_finite([", "if True or all_finite(["),
    "tensors are not checked": ("bad_input", "checks",
        "if not isinstance(value, Tensor):\n        raise TypeError(f\"{name} must be {rule}, got",
        "return value\n    if True:\n        raise TypeError(f\"{name} must be {rule}, got"),
    "a tensor has the default dtype": ("defaults", "rng",
        "generator=self.generator(name), dtype=torch.float64", "generator=self.generator(name)"),
    "a step has no sinks": ("decode_step", "integrations.decode", "make_plan(call, _with_exact_inner(config))",
        "make_plan(call, _with_exact_inner(config).replace(sinks=0, recent=0))"),
    "the last queries have other positions": ("last_queries", "call",
        "query, factor = with_positive_scale(query, options.scale)",
        "query, factor = with_positive_scale(query, options.scale); key = key.roll(int(n_query < n_keys), 2)"),
    "padding queries after the last key see": ("basics", "call", " | (n_real == n_real[:, -1:])", ""),
    "the threshold passes no gradient": ("slopes", "routed.attention",
        "merged, threshold + view.log_inverse, grad_threshold", "merged, threshold, 0 * threshold"),
    "covariances pass no gradient": ("slopes", "routed.reference",
        "totals / count.to", "totals.detach() / count.to"),
    "native values are corrected too far": ("native_agrees", "routed.native",
        "index.span_key_value_cov, index.key_value_cov)", "index.span_key_value_cov, index.key_value_cov * 1.01)"),
    "native gradients lose the key covariance": ("native_agrees", "routed.native",
        "sums[name].add_(total)", "sums[name].add_(0 * total if name == 'key_cov' else total)"),
}  # fmt: skip
"""Name -> oracle or check, module, text and its replacement (see `breaks.Break`)."""
ROUTED_ONLY = ("slopes", "native_agrees")
"""Oracles whose breaks no other configuration can show."""


@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls_hold(part):
    for number in range(part * CALLS // PARTS, (part + 1) * CALLS // PARTS):
        failure = run_case(SEED, number)
        assert failure is None, f"make fuzz SEED={SEED} FIRST={number} CALLS=1: {shrink(failure)}"


def test_a_case_is_its_seed_and_its_text():
    names = {name: getattr(prescore, name) for name in prescore.__all__}
    for number in range(50):
        case = random_case(random.Random(f"0/{number}"))
        assert case == random_case(random.Random(f"0/{number}"))
        assert eval(repr(case), {**names, "Case": Case, "torch": torch}) == case


def test_every_oracle_and_every_field_has_its_turn():
    cases = [random_case(random.Random(f"1/{number}")) for number in range(1500)]
    for kind in (Routed, Selected, Hyper, Exact):
        configs = [case.config for case in cases if type(case.config) is kind]
        assert configs
        for name in vars(kind()):
            assert len({repr(getattr(config, name)) for config in configs}) > 1, name
    assert {case.mask for case in cases} >= {"left", "right", "both", "holes"}
    assert {case.dtype for case in cases} >= {torch.float16, torch.bfloat16}
    assert any(case.given for case in cases)


def test_a_failure_is_made_small(monkeypatch):
    def wrong(case):
        assert not (isinstance(case.config, Selected) and case.n_keys > 20 and case.mask == "left"), "too long"

    monkeypatch.setitem(ORACLES, "dense", wrong)
    config = Selected(KMeans(n_clusters=3), 0.4, inner=Lsh(8, 4, 3, "rank"), min_seq_len=4)
    sizes = {"n_keys": 100, "n_query": 40, "batch": 3, "heads_per_kv": 3}
    large = Case(config, **sizes, mask="left", dropout_p=0.3, scale=2.0, seed=5)
    small = shrink(refute("dense", large)).case
    assert (small.n_keys, small.batch, small.heads_per_kv, small.mask) == (21, 1, 1, "left")
    assert (small.scale, small.dropout_p) == (None, 0.0)


@pytest.mark.parametrize("name", [name for name, (check, *_) in BREAKS.items() if check in CHECKS])
def test_a_check_notices_a_break(name, monkeypatch):
    check, *row = BREAKS[name]
    CHECKS[check]()
    Break(*row).apply(monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[check]()


@pytest.mark.parametrize("artefact", [Coupling(residual_weight="all"), Coupling(overlap="count")], ids=str)
def test_switches_of_coupling_are_biased(artefact):
    with pytest.raises(AssertionError, match="standard errors away"):
        check_unbiased(PAPER.replace(coupling=artefact), seeds=SEEDS, selected=True)


@pytest.mark.parametrize("name", [name for name, (check, *_) in BREAKS.items() if check not in CHECKS])
def test_an_oracle_notices_a_break(name, monkeypatch):
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
