"""`prescore.apply(audit=...)`: sampled errors against exact attention, by layer, without any change of outputs."""

import math

import pytest
import torch
from tiny_models import COARSE, ROUTED, forward, prompts, tiny
from tiny_vision_models import pixels, tiny_huggingface

import prescore
from prescore import Exact, Hyper, KMeans, Lsh, Selected
from prescore.integrations.attention import AttentionContext, PrescoredAttention
from prescore.integrations.report import PREFILL, STEPS, Errors
from prescore.integrations.transformers import PrescoredCache

CONFIGS = {"routed": ROUTED, "selected": COARSE, "hyper": Hyper(Lsh(4, 4), min_seq_len=4), "exact": Exact()}
MASKS = ("none", "causal", "left", "right", "window", "packed")


def tensors(dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 60, 8, generator=draw).to(dtype) for heads in (4, 2, 2)]


def shown_keys(kind, n=60):
    """`[2, 1, n, n]`, True = the query sees the key."""
    causal, position = torch.ones(2, 1, n, n, dtype=torch.bool).tril(), torch.arange(n)
    return {
        "none": torch.ones(2, 1, n, n, dtype=torch.bool),
        "causal": causal,
        "left": causal & (position >= torch.tensor([0, 9])[:, None, None, None]),
        "right": causal & (position < torch.tensor([n, 44])[:, None, None, None]),
        "window": causal & causal.transpose(2, 3).tril(9),
        "packed": causal & (position[:, None] // 25 == position // 25),
    }[kind]


def dense_errors(query, key, value, output, shown):
    """`[heads, positions]` relative errors of the queries that are not padding."""
    query, key, value, output = (t.double() for t in (query, key, value, output))
    key, value = (t.repeat_interleave(2, dim=1) for t in (key, value))
    logits = (query @ key.transpose(-1, -2) * 8**-0.5).masked_fill(~shown, -math.inf)
    exact = logits.softmax(-1) @ value
    errors = (output - exact).norm(dim=-1) / exact.norm(dim=-1)
    real = shown[:, 0].any(1)
    return torch.cat([errors[row][:, real[row]] for row in range(2)], dim=1)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_an_audit_of_all_queries_is_the_error_against_exact_attention(name, kind):
    inputs, shown = tensors(), shown_keys(kind)
    mask = None if kind in ("none", "causal") else shown
    context = AttentionContext(layer=1, mask=mask, is_causal=kind != "none")
    plain, audited = PrescoredAttention(CONFIGS[name]), PrescoredAttention(CONFIGS[name], audit=1.0)
    output = audited(*inputs, context)
    assert torch.equal(output, plain(*inputs, context))
    assert plain.last.errors == Errors()
    wanted = dense_errors(*inputs, output, shown)
    got, means = audited.last.errors, wanted.mean(0)
    assert got.n == len(means)
    close = {"rel": 1e-5, "abs": 1e-6}  # a float32 product
    assert got.mean == pytest.approx(float(means.mean()), **close)
    assert got.largest == pytest.approx(float(wanted.max()), **close)
    half = 1.96 * (1 + 1.21 / (len(means) - 1)) * float(means.std()) / math.sqrt(len(means))
    assert got.interval == pytest.approx((max(0.0, got.mean - half), got.mean + half), **close)
    exact = name == "exact" or kind == "window"
    assert (got.largest < 1e-5) == exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_scales_and_blocks(dtype, monkeypatch):
    inputs, context = tensors(dtype=dtype), AttentionContext(layer=0, is_causal=True, scale=0.7)
    found = []
    for at_once in (2**22, 500):
        monkeypatch.setattr("prescore.integrations.audit._LOGITS_AT_ONCE", at_once)
        attend = PrescoredAttention(Exact(), audit=1.0)
        attend(*inputs, context)
        found.append(attend.last.errors)
    assert found[0].largest < (0.02 if dtype == torch.bfloat16 else 1e-12)
    assert found[0].mean == pytest.approx(found[1].mean)


def test_a_sample_is_drawn_anew_in_each_call_and_estimates_the_mean_within_its_interval():
    inputs, context = tensors(), AttentionContext(layer=2, is_causal=True)
    full, sampled, again = (PrescoredAttention(COARSE, seed=5, audit=share) for share in (1.0, 0.1, 0.1))
    full(*inputs, context)
    calls = []
    for _ in range(30):
        sampled(*inputs, context)
        again(*inputs, context)
        assert sampled.last.errors == again.last.errors
        calls.append(sampled.last.errors)
    assert {errors.n for errors in calls} == {12}
    assert len(set(calls)) == 30
    truth, total = full.last.errors.mean, sum(calls, Errors())
    assert total.interval[0] < truth < total.interval[1]
    assert total.interval[1] - total.interval[0] < 0.4 * (calls[0].interval[1] - calls[0].interval[0])
    assert sum(errors.interval[0] < truth < errors.interval[1] for errors in calls) >= 25
    one = PrescoredAttention(COARSE, audit=1e-6)
    one(*inputs, context)
    assert (one.last.errors.n, one.last.errors.interval) == (1, None)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("evict", [False, True])
def test_a_report_has_errors_by_layer_and_phase_and_outputs_stay(name, evict):
    ids, mask = prompts(length=48, side="left")
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}

    def generate(**audit):
        model, cache = tiny("Llama"), PrescoredCache(evict=evict and name == "selected")
        with prescore.apply(model, CONFIGS[name], **audit) as applied:
            made = model.generate(ids, past_key_values=cache, output_scores=True, **options)
            return torch.stack(made.scores), applied.report()

    (plain, without), (scores, report) = generate(), generate(audit=0.25)
    assert torch.equal(plain, scores)
    assert "error" not in str(without)
    header, *rows = str(report).splitlines()
    assert header.split("  ")[-1].strip() == "largest error"
    for entry in report.layers:
        prompt, steps = (entry.phases[phase].errors for phase in (PREFILL, STEPS))
        assert prompt.n == round(0.25 * int(mask.sum()))
        # after the first step there are no keys left to compare with
        assert steps.n == (1 if evict and name == "selected" else 3)
        assert (max(prompt.largest, steps.largest) < 1e-5) == (name == "exact")
        assert 0 <= prompt.interval[0] <= prompt.mean <= prompt.interval[1]
    together = sum((entry.phases[PREFILL].errors for entry in report.layers), Errors())
    assert any(f"{together.mean:.4f}" in row and f"{together.largest:.4f}" in row for row in rows)


def test_gradients_vision_models_and_calls_that_cannot_be_audited():
    model, (ids, _) = tiny("Llama"), prompts(length=40, side="none")
    with prescore.apply(model, ROUTED, audit=0.5) as applied:
        loss = model(ids, labels=ids).loss
        (audited,) = torch.autograd.grad(loss, model.lm_head.weight)
    assert applied.report()[0].phases[PREFILL].errors.n == ids.numel() // 2
    with prescore.apply(model, ROUTED):
        (plain,) = torch.autograd.grad(model(ids, labels=ids).loss, model.lm_head.weight)
    assert torch.equal(audited, plain)
    vision = tiny_huggingface()
    with prescore.apply(vision, Selected(KMeans(n_clusters=2), top_k=6), audit=1.0) as applied:
        vision(pixels())
    assert applied.report()[0].last.errors.mean > 1e-3
    capped = tiny("Gemma2", sliding_window=200, layer_types=["full_attention"] * 2)
    with prescore.apply(capped, ROUTED, on_unsupported="exact", audit=1.0) as applied:
        with pytest.warns(UserWarning, match="soft"):
            forward(capped, ids)
        assert "error" not in str(applied)
    attend = PrescoredAttention(ROUTED, audit=1.0)
    attend(*tensors(), AttentionContext(layer=0, is_causal=True, dropout=0.5))
    assert attend.last.errors == Errors()


@pytest.mark.parametrize(
    ("audit", "error", "message"),
    [
        (0.0, ValueError, r"audit must be finite and above 0\.0, got 0\.0"),
        (1.5, ValueError, r"audit must be at most 1\.0, got 1\.5"),
        (math.nan, ValueError, r"audit must be finite and above 0\.0, got nan"),
        (True, TypeError, "audit must be a number, got bool True"),
    ],
)
def test_bad_shares_are_refused(audit, error, message):
    with pytest.raises(error, match=message):
        prescore.apply(tiny("Llama"), ROUTED, audit=audit)
