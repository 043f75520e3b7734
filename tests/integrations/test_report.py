"""`applied.report()` and `print(applied)`: a table by layer and phase, and settings that cannot act say so."""

import copy
import warnings

import pytest
import torch
from tiny_models import prompts, tiny
from tiny_vision_models import pixels, tiny_huggingface

import prescore
from prescore import Exact, Hyper, Lsh, Routed, Selected
from prescore.integrations.report import PREFILL, STEPS
from prescore.integrations.transformers import PrescoredCache

ROUTED = Routed(min_weight=1 / 8, cluster_size=4, chunk_size=8, sinks=2, exact_until=8)
SELECTED = Selected(top_k=4, sinks=1, remainder="none", min_seq_len=4)
HYPER = Hyper(Lsh(4, 4), min_seq_len=4)
CONFIGS = {"routed": ROUTED, "selected": SELECTED, "hyper": HYPER}


def generate(model, length=32, new=3, **options):
    ids, mask = prompts(length=length, side="none")
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)


def forward(model, length=32):
    with torch.no_grad():
        return model(prompts(length=length, side="none")[0])


def cells(text, first):
    """The cells of the lines whose first cell is this one."""
    return [line.split() for line in text.splitlines() if line.split()[:1] == [first]]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_line_per_layer_and_phase(name):
    model = tiny("Llama")
    with prescore.apply(model, {0: CONFIGS[name], 1: Exact()}) as applied:
        assert str(applied.report()).count("not called yet") == 2
        generate(model)
        report = applied.report()
    heading = report.table().splitlines()[0].split("  ")
    heading = [word.strip() for word in heading if word.strip()]
    assert heading == [
        *("layer", "configuration", "phase", "what ran", "rows read", "of", "share"),
        *("calls", "queries", "seconds"),
    ]
    for layer, config in ((0, CONFIGS[name]), (1, Exact())):
        entry = report[layer]
        assert list(entry.phases) == [PREFILL, STEPS]
        prompt, steps = entry.phases.values()
        assert (prompt.calls, prompt.queries, steps.calls, steps.queries) == (1, 32, 2, 2)
        assert (prompt.last.visible_keys, steps.last.visible_keys) == (16.5, 34)
        assert 0 < prompt.seconds < 10
        assert prompt.ran == (name if layer == 0 else "exact")
        lines = cells(str(report), str(layer))
        assert all(type(config).__name__ in line[1] for line in lines)
        assert [phase for line in lines for phase in line if phase in (PREFILL, STEPS)] == [PREFILL, STEPS]
    assert report[0].phases[PREFILL].last.reads.keys < 16.5 == report[1].phases[PREFILL].last.reads.keys
    ran, rows = report[0].phases[STEPS].ran, report[0].phases[STEPS].last.reads.keys
    everything = "exact: a step reads every key so far"
    assert ran in {"routed": ("routed", everything), "selected": ("selected",), "hyper": (everything,)}[name]
    assert rows == 34 if ran == everything else rows < 34
    assert len(cells(str(report), "all")) == 2
    assert report.rows(PREFILL) == (report[0].phases[PREFILL].last.reads.keys + 16.5) / 2
    assert report.visible(STEPS) == 34
    assert report.seconds(STEPS) == sum(report[n].phases[STEPS].seconds for n in (0, 1))
    # nodes of four keys are nothing for compiled code
    assert [note.partition(",")[0] for note in report.notes] == ["routed by plain torch"] * (name == "routed")
    with pytest.raises(KeyError, match="got 7"):
        report[7]


def test_layers_that_did_the_same_share_a_line():
    model = tiny("Llama", num_hidden_layers=4)
    with prescore.apply(model, {"all": SELECTED, 1: SELECTED.replace(top_k=12)}) as applied:
        forward(model)
    table = applied.report().table()
    assert [line.split()[0] for line in table.splitlines()[2:]] == ["0", "1", "2-3", "all"]
    alone = applied.report().table(merge=False)
    assert [line.split()[0] for line in alone.splitlines()[2:]] == ["0", "1", "2", "3", "all"]
    with prescore.apply(model, SELECTED) as applied:
        forward(model)
    line = applied.report().table().splitlines()[2].split()
    assert line[:3] == ["0-3", "prefill", "selected"]
    assert "configuration" not in applied.report().table()  # one for all is said above the table
    assert str(applied).splitlines()[0] == (
        "LlamaForCausalLM (transformers.language): undone; it was "
        "Selected(top_k=4, sinks=1, remainder='none', min_seq_len=4) in 4 of 4 layers"
    )
    with prescore.apply(model, None, layers=[]) as applied:
        assert str(applied.report()) == "no layer was replaced: all attention is exact"


def test_a_new_prompt_begins_anew_and_more_of_one_adds_up():
    model = tiny("Llama")
    with prescore.apply(model, SELECTED) as applied:
        generate(model)
        forward(model, 48)
        phases = applied.report()[0].phases
        assert list(phases) == [PREFILL]
        assert phases[PREFILL].queries == 48
        cache = PrescoredCache(model.config)
        ids, _ = prompts(batch=1, length=100, side="none")
        for piece in ids.split(50, dim=1):
            with torch.no_grad():
                model(piece, past_key_values=cache)
        phases = applied.report()[0].phases
        assert (phases[PREFILL].calls, phases[PREFILL].queries) == (2, 100)
        assert (phases[PREFILL].last.n_query, phases[PREFILL].last.n_keys) == (50, 100)


def test_a_prompt_is_counted_when_its_steps_begin_and_nothing_of_it_is_kept():
    model = tiny("Llama")
    with prescore.apply(model, SELECTED) as applied:
        forward(model)
        alone = applied.report()[0].phases[PREFILL].last.reads.keys
        history = applied._functions[0].trace
        forward(model)
        assert callable(history._phases[PREFILL].last._rows)  # nobody asked yet
        generate(model)
        assert history._phases[PREFILL].last._rows == alone
        assert callable(history._phases[STEPS].last._rows)
        twin = copy.deepcopy(history)
        assert twin.phases[STEPS].last.reads.keys == history.phases[STEPS].last.reads.keys


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Routed(), f"exact: shorter than exact_until={Routed().exact_until}"),
        (Selected(), "exact: no longer than min_seq_len=4096"),
        (Hyper(min_seq_len=40), "exact: no longer than min_seq_len=40"),
    ],
)
def test_a_prompt_that_is_too_short_says_so(config, said):
    model = tiny("Llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # texts differ in length: this is worth a note, not a warning
        with prescore.apply(model, config) as applied:
            forward(model)
            assert applied.report()[0].phases[PREFILL].ran == said
            note = f"note: {type(config).__name__} changed nothing, all attention was exact: {said[7:]}"
            assert str(applied).splitlines()[-1] == note


def test_what_is_unsupported_is_named_in_the_table():
    model = tiny("Gemma2", sliding_window=200, layer_types=["full_attention"] * 2)
    with (
        prescore.apply(model, SELECTED, on_unsupported="exact") as applied,
        pytest.warns(UserWarning, match="soft"),
    ):
        forward(model)
    assert "exact: unsupported because its logits are soft-capped" in str(applied)


def test_with_a_tolerance_error_limits_and_further_reading_are_columns():
    model = tiny("Llama")
    with prescore.apply(model, ROUTED.replace(tolerance=0.25)) as applied:
        generate(model, length=48)
    report = applied.report()
    heading, _, *lines = report.table().splitlines()
    assert heading.endswith("error  error at most  read further  read everything")
    for name in (PREFILL, STEPS):
        for entry in report.layers:
            last = entry.phases[name].last
            assert 0 <= last.error <= last.error_limit <= 0.25
            assert 0 <= last.read_all <= last.refined <= 1
        worst = max(entry.phases[name].last.error_limit for entry in report.layers)
        shown = [line.split() for line in lines if name in line.split()]
        assert f"{worst:.4f}" in {cells[-5] for cells in shown}
        assert all(cells[-1] == "%" for cells in shown)
    with prescore.apply(model, ROUTED) as applied:
        forward(model)
    assert "error" not in str(applied)


def test_a_vision_model_too_small_to_route_says_so_once():
    model = tiny_huggingface()
    images = pixels()
    with prescore.apply(model) as applied:
        with pytest.warns(UserWarning, match="Routed changes nothing at .* tokens: exact: shorter than") as told:
            model(images)
        assert len(told) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(images)  # said once
        assert "exact: shorter than exact_until=" in str(applied)
    with (
        prescore.apply(
            model, Routed(exact_until=0, min_weight=1 / 16, cluster_size=4, chunk_size=16, sinks=1)
        ) as applied,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        model(images)
    assert applied.report()[0].phases[PREFILL].ran == "routed"


@pytest.mark.parametrize(("option", "value"), [("evict", True), ("refresh_every", 4)])
def test_eviction_under_an_engine_that_keeps_every_key_says_so_once(option, value):
    model = tiny("Llama")
    with prescore.apply(model, ROUTED):
        cache = PrescoredCache(model.config, **{option: value})
        with pytest.warns(UserWarning, match=f"{option}={value} of the cache does nothing under Routed") as told:
            generate(model, past_key_values=cache)
        assert len(told) == 1  # two layers, three calls
    with prescore.apply(model, SELECTED), warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, past_key_values=PrescoredCache(model.config, **{option: value}))
