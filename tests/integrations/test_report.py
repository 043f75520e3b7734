"""`applied.report()` and `print(applied)`: a table by layer and phase, and settings that cannot act say so."""

import json
import math
import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
from tiny_models import COARSE, ROUNDING, ROUTED, forward, prompts, tiny
from tiny_vision_models import pixels, tiny_huggingface
from transformers import StaticCache

import prescore
from prescore import Exact, Hyper, KMeans, Lsh, Routed, Selected
from prescore.integrations.attention import AttentionContext, PrescoredAttention
from prescore.integrations.report import PREFILL, STEPS, Errors
from prescore.integrations.transformers import PrescoredCache
from prescore.routed.native import library

SELECTED = Selected(top_k=4, sinks=1, remainder="none", min_seq_len=4)
CENTROIDS = Selected("kmeans", top_k=4, sinks=1, min_seq_len=4)
CONFIGS = {"routed": ROUTED, "selected": CENTROIDS, "hyper": Hyper(Lsh(4, 4), min_seq_len=4)}
IDS, MASK = prompts(length=32, side="none")


def generate(model, ids=IDS, new=3, **options):
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)


def lines(text):
    """The cells of each line of a table."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_line_per_layer_and_phase(name):
    model = tiny("Llama")
    with prescore.apply(model, {0: CONFIGS[name], 1: Exact()}) as applied:
        assert str(applied.report()).count("not called yet") == 2
        generate(model)
        report = applied.report()
    header, _, *table = lines(report.table())
    assert header == [
        *("layer", "configuration", "phase", "what ran", "keys read", "centroids", "of", "share"),
        *("calls", "queries", "seconds"),
    ]
    wanted = [(layer, phase) for layer in ("0", "1") for phase in (PREFILL, STEPS)]
    assert [(line[0], line[2]) for line in table if line[0] != "all"] == wanted
    assert len([line for line in table if line[0] == "all"]) == 2
    for entry in report.layers:
        prompt, later = entry.phases.values()
        assert (prompt.calls, prompt.queries, later.calls, later.queries) == (1, 32, 2, 2)
        assert (prompt.last.visible_keys, later.last.visible_keys) == (16.5, 34)
        assert 0 < prompt.seconds < 10
        assert prompt.ran == (name if entry.layer == 0 else "exact")
    reads, steps = (report[0].phases[phase].last.reads for phase in (PREFILL, STEPS))
    assert reads.keys < 16.5
    assert (reads.centroids > 0) == (name != "hyper")
    assert report[1].phases[PREFILL].last.reads == (16.5, 0)
    assert report[0].phases[STEPS].ran == (name if name != "hyper" else "exact: a step reads every key so far")
    assert steps == (34, 0) if name == "hyper" else steps.keys < 34
    if name == "selected":
        assert steps.keys == 4 + 1  # the budget, and the token since
        assert steps.centroids > 0
    assert report.reads(PREFILL) == ((reads.keys + 16.5) / 2, reads.centroids / 2)
    assert report.visible_keys(STEPS) == 34
    assert report.seconds(STEPS) == sum(entry.phases[STEPS].seconds for entry in report.layers)
    # native code does not support clusters of four keys
    assert [note.partition(",")[0] for note in report.notes] == ["routed by plain torch"] * (name == "routed")
    with pytest.raises(KeyError, match="got 7"):
        report[7]


def test_layers_that_did_the_same_share_a_line():
    model = tiny("Llama", num_hidden_layers=4)
    with prescore.apply(model, {"all": SELECTED, 1: SELECTED.replace(top_k=12)}) as applied:
        forward(model, IDS)
    assert [line[0] for line in lines(applied.report().table())[2:]] == ["0", "1", "2-3", "all"]
    alone = lines(applied.report().table(merge=False))
    assert [line[0] for line in alone[2:]] == ["0", "1", "2", "3", "all"]
    with prescore.apply(model, SELECTED) as applied:
        forward(model, IDS)
    table = lines(applied.report().table())
    assert table[2][:4] == ["0-3", "prefill", "selected", table[2][3]]
    assert "configuration" not in table[0]  # one for all layers is in the line above the table
    with prescore.apply(model, None, layers=[]) as applied:
        assert str(applied.report()) == "no layer was replaced: all attention is exact"


def test_a_new_prompt_begins_anew_and_chunks_of_one_add_up():
    model = tiny("Llama")
    ids, _ = prompts(batch=1, length=100, side="none")
    with prescore.apply(model, SELECTED) as applied:
        generate(model)
        forward(model, ids[:, :48])
        phases = applied.report()[0].phases
        assert {name: phase.queries for name, phase in phases.items()} == {PREFILL: 48}
        cache = PrescoredCache(model.config)
        for chunk in ids.split(50, dim=1):
            forward(model, chunk, past_key_values=cache)
        prefill = applied.report()[0].phases[PREFILL]
        assert (prefill.calls, prefill.queries, prefill.last.n_query, prefill.last.n_keys) == (2, 100, 50, 100)


def test_a_prompt_that_is_too_short_gets_a_note():
    model = tiny("Llama")
    for config, reason in {
        Routed(): f"up to exact_until={Routed().exact_until}",
        Routed(exact_until=0): f"no longer than sinks and two chunks of {Routed().chunk_size}",
        Selected(): "no longer than min_seq_len=4096",
        Hyper(min_seq_len=40): "no longer than min_seq_len=40",
    }.items():
        with warnings.catch_warnings(), prescore.apply(model, config) as applied:
            warnings.simplefilter("error")  # texts differ in length, so this is no warning
            forward(model, IDS[:, :1])
            forward(model, IDS)
        assert applied.report()[0].phases[PREFILL].ran == f"exact: {reason}"
        note = f"note: {type(config).__name__} changed nothing, all attention was exact: {reason}"
        assert str(applied).splitlines()[-1] == note


def test_a_step_without_a_key_index_says_which_cache_is_the_reason():
    """MLA expands its keys from what the cache holds."""
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    mla = tiny("DeepseekV3", num_key_value_heads=4, head_dim=4, first_k_dense_replace=2, **ranks, **experts)
    by_name = tiny("Llama", attn_implementation="prescored", max_position_embeddings=4096)
    for model, options, reason in (
        (tiny("Llama"), {"cache_implementation": "static"}, "StaticCache keeps none"),
        (mla, {}, "the model computes its keys or values from what its cache holds, as MLA does"),
    ):
        with prescore.apply(model, ROUTED) as applied:
            generate(model, **options)
        ran = applied.report()[1].phases[STEPS].ran
        assert ran == f"exact: a step without a key index: {reason}"
    attend = by_name.model.layers[0].self_attn
    generate(by_name, prompts(batch=1, length=2100, side="none")[0])
    assert attend._prescore_default_patch.attend.last.ran.endswith("DynamicCache keeps none")
    with prescore.apply(tiny("Llama"), ROUTED) as applied:
        torch._dynamo.reset()
        fast, cache = torch.compile(applied.model, backend="eager"), StaticCache(applied.model.config, 40)
        for ids in (IDS, IDS[:, :1]):
            forward(fast, ids, past_key_values=cache)
    assert applied.report()[0].last.ran.endswith("a compiled graph keeps none")
    model = tiny("Llama").train()
    with prescore.apply(model, ROUTED) as applied:
        cache = PrescoredCache(model.config)
        for ids in (IDS, IDS[:, :1]):
            model(ids, past_key_values=cache)
    assert applied.report()[0].last.ran.endswith("the key index has neither dropout nor gradients")


def documented_reasons():
    """What the table *Why was it exact?* of docs/report.md names, as patterns."""
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    rows = re.findall(r"^\| `(exact: [^`]+)` \|", page, re.MULTILINE)
    return {row: re.compile(re.escape(row).replace(r"\.\.\.", ".+")) for row in rows}


@pytest.mark.filterwarnings("ignore:pre-scored attention in attention runs exactly")
def test_the_page_of_the_report_names_every_reason_and_no_other(monkeypatch):
    """Every row but that of GPUs is made to happen."""
    n_keys = 2100
    long = [torch.randn(1, 1, n_keys, 8, generator=torch.Generator().manual_seed(0)) for _ in range(3)]
    short = [tensor[:, :, :60] for tensor in long]
    step = [short[0][:, :, -1:], *short[1:]]
    hidden, holes = torch.ones(60, 60, dtype=torch.bool).tril().triu(-9)[None, None], torch.ones(1, 60).bool()
    holes[:, 20:30] = False
    obstacle = AttentionContext(layer=0, is_causal=True, obstacles=("it caps its logits",))
    causal, full = (AttentionContext(layer=0, is_causal=is_causal) for is_causal in (True, False))
    lsh = Hyper(Lsh(4, 4), min_seq_len=100)
    ran = []
    for config, tensors, context in (
        (Routed(), short, causal),
        (Routed(exact_until=0), short, causal),
        (Selected(), short, causal),
        (lsh, short, full),
        (Selected(top_k=60, min_seq_len=4), short, full),
        (lsh, step, causal),
        (ROUTED, step, causal),
        (ROUTED, short, AttentionContext(layer=0, is_causal=True, mask=holes)),
        (ROUTED, short, AttentionContext(layer=0, is_causal=True, mask=hidden)),
        (ROUTED, short, obstacle),
        (Routed(), long, causal),
    ):
        if tensors is long:
            monkeypatch.setenv(library.VARIABLE, "0")
        attend = PrescoredAttention(config, "exact")
        attend(*tensors, context)
        ran.append(attend.last.ran)
    rows = documented_reasons()
    matches = [[row for row, pattern in rows.items() if pattern.fullmatch(text)] for text in ran]
    assert [len(match) for match in matches] == [1] * len(ran), ran
    assert {row for match in matches for row in match} == set(rows) - {"exact: triton: ..."}


def test_a_vision_model_too_small_to_route_warns_once():
    model, images = tiny_huggingface(), pixels()
    with prescore.apply(model) as applied:
        with pytest.warns(UserWarning, match="Routed changes nothing at .* tokens: exact: up to") as said:
            model(images)
        assert len(said) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(images)  # once
        assert "exact: up to exact_until=" in str(applied)


@pytest.mark.parametrize(("option", "value"), [("evict", True), ("refresh_every", 4)])
def test_cache_settings_without_effect_warn_once(option, value):
    model = tiny("Llama")
    with prescore.apply(model, ROUTED):
        cache = PrescoredCache(model.config, **{option: value})
        with pytest.warns(UserWarning, match=f"{option}={value} of the cache does nothing under Routed") as said:
            generate(model, past_key_values=cache)
        assert len(said) == 1  # two layers, three calls
    with prescore.apply(model, SELECTED), warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, past_key_values=PrescoredCache(model.config, **{option: value}))


AUDITED = {"routed": ROUTED, "selected": COARSE, "hyper": Hyper(Lsh(4, 4), min_seq_len=4), "exact": Exact()}
SHOWN = ("none", "causal", "left", "right", "window", "packed")


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
    logits = (query @ key.transpose(-1, -2) * 0.7).masked_fill(~shown, -math.inf)
    exact = logits.softmax(-1) @ value
    errors = (output - exact).norm(dim=-1) / exact.norm(dim=-1)
    real = shown[:, 0].any(1)
    return torch.cat([errors[row][:, real[row]] for row in range(2)], dim=1)


@pytest.mark.parametrize("kind", SHOWN)
@pytest.mark.parametrize("name", AUDITED)
def test_an_audit_of_all_queries_is_the_error_against_exact_attention(name, kind, monkeypatch):
    monkeypatch.setattr("prescore.integrations.audit._LOGITS_AT_ONCE", 5000)  # several blocks of queries
    inputs, shown = tensors(), shown_keys(kind)
    mask = None if kind in ("none", "causal") else shown
    context = AttentionContext(layer=1, mask=mask, is_causal=kind != "none", scale=0.7)
    plain, audited = PrescoredAttention(AUDITED[name]), PrescoredAttention(AUDITED[name], audit=1.0)
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


@pytest.mark.parametrize(("dtype", "largest"), [(torch.bfloat16, 0.02), (torch.float64, 1e-12)])
def test_an_audit_in_other_dtypes(dtype, largest):
    attend = PrescoredAttention(Exact(), audit=1.0)
    attend(*tensors(dtype=dtype), AttentionContext(layer=0, is_causal=True))
    assert attend.last.errors.largest < largest


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


@pytest.mark.parametrize("name", AUDITED)
@pytest.mark.parametrize("evict", [False, True])
def test_a_report_has_errors_by_layer_and_phase_and_outputs_stay(name, evict):
    ids, mask = prompts(length=48, side="left")
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}

    def generate(**audit):
        model, cache = tiny("Llama"), PrescoredCache(evict=evict and name == "selected")
        with prescore.apply(model, AUDITED[name], **audit) as applied:
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


def test_without_native_code_the_default_is_exact_and_the_report_says_why(monkeypatch):
    monkeypatch.setenv(library.VARIABLE, "0")
    model = tiny("Llama", max_position_embeddings=4096)
    ids, _ = prompts(batch=1, length=2100, side="none")
    cache = PrescoredCache(model.config)
    with prescore.apply(model) as applied:
        got = forward(model, ids, past_key_values=cache, logits_to_keep=1)
        forward(model, ids[:, :1], past_key_values=cache)
    phases = applied.report()[0].phases
    assert phases[PREFILL].ran == "exact: native code: none (PRESCORE_NATIVE=0)"
    assert phases[STEPS].ran == "exact: a step without a key index: native code: none (PRESCORE_NATIVE=0)"
    torch.testing.assert_close(got, forward(model, ids, logits_to_keep=1), rtol=0, atol=ROUNDING)


def test_counts_for_a_server_go_on_over_prompts_and_threads():
    model = tiny("Llama")
    with prescore.apply(model, {0: ROUTED, 1: Exact()}, audit=0.5) as applied:
        assert applied.stats() == {"calls": 0, "exact": 0, "routed": 0, "exact_because": {}, "audit": None}
        generate(model)
        threads = [threading.Thread(target=generate, args=(model, IDS[:, :6])) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = applied.stats()
    # a prompt and two steps of each generation, in each of two layers; short prompts are exact
    assert stats["calls"] == 4 * 3 * 2
    assert (stats["exact"], stats["routed"]) == (12, 3)
    assert stats["exact_because"] == {"up to exact_until=8": 9}
    assert json.loads(json.dumps(stats))["audit"]["queries"] >= 24
    assert 0 <= stats["audit"]["interval"][0] <= stats["audit"]["error"] <= stats["audit"]["largest"]
