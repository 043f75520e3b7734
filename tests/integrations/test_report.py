"""`applied.report()` and `print(applied)`: a table by layer and phase, and settings that cannot act say so."""

import copy
import warnings

import pytest
import torch
from tiny_models import ROUTED, forward, prompts, tiny
from tiny_vision_models import pixels, tiny_huggingface

import prescore
from prescore import Exact, Hyper, Lsh, Routed, Selected
from prescore.integrations.report import PREFILL, STEPS
from prescore.integrations.transformers import PrescoredCache

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
    assert lines(report.table())[0] == [
        *("layer", "configuration", "phase", "what ran", "keys read", "centroids", "of", "share"),
        *("calls", "queries", "seconds"),
    ]
    for entry in report.layers:
        assert list(entry.phases) == [PREFILL, STEPS]
        prompt, later = entry.phases.values()
        assert (prompt.calls, prompt.queries, later.calls, later.queries) == (1, 32, 2, 2)
        assert (prompt.last.visible_keys, later.last.visible_keys) == (16.5, 34)
        assert 0 < prompt.seconds < 10
        assert prompt.ran == (name if entry.layer == 0 else "exact")
        own = [line for line in lines(str(report)) if line[0] == str(entry.layer)]
        assert all(line[1].startswith(type(entry.config).__name__) for line in own)
        assert [line[2] for line in own] == [PREFILL, STEPS]
    reads = report[0].phases[PREFILL].last.reads
    assert reads.keys < 16.5
    assert (reads.centroids > 0) == (name != "hyper")
    assert report[1].phases[PREFILL].last.reads == (16.5, 0)
    ran, steps = report[0].phases[STEPS].ran, report[0].phases[STEPS].last.reads
    assert ran == (name if name != "hyper" else "exact: a step reads every key so far")
    assert steps == (34, 0) if name == "hyper" else steps.keys < 34
    if name == "selected":
        assert steps.keys == 4 + 1  # the budget, and the token since
        assert steps.centroids > 0
    assert len([line for line in lines(str(report)) if line[0] == "all"]) == 2
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


def test_a_prompt_is_counted_when_its_steps_begin():
    model = tiny("Llama")
    with prescore.apply(model, SELECTED) as applied:
        forward(model, IDS)
        alone = applied.report()[0].phases[PREFILL].last.reads
        trace = applied._functions[0].trace
        forward(model, IDS)
        assert trace._phases[PREFILL].last.count_reads is not None  # not counted yet
        generate(model)
        assert trace._phases[PREFILL].last.count_reads is None
        assert trace._phases[STEPS].last.count_reads is not None
        assert trace.phases[PREFILL].last.reads == alone
        assert copy.deepcopy(trace).phases[STEPS].last.reads == trace.phases[STEPS].last.reads


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Routed(), f"up to exact_until={Routed().exact_until}"),
        (Routed(exact_until=0), f"no longer than sinks and two chunks of {Routed().chunk_size}"),
        (Selected(), "no longer than min_seq_len=4096"),
        (Hyper(min_seq_len=40), "no longer than min_seq_len=40"),
    ],
)
def test_a_prompt_that_is_too_short_gets_a_note(config, reason):
    model = tiny("Llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # texts differ in length, so this is no warning
        with prescore.apply(model, config) as applied:
            forward(model, IDS)
    assert applied.report()[0].phases[PREFILL].ran == f"exact: {reason}"
    note = f"note: {type(config).__name__} changed nothing, all attention was exact: {reason}"
    assert str(applied).splitlines()[-1] == note


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
    config = Routed(exact_until=0, min_weight=1 / 16, cluster_size=4, chunk_size=16, sinks=1)
    with prescore.apply(model, config) as applied, warnings.catch_warnings():
        warnings.simplefilter("error")
        model(images)
    assert applied.report()[0].phases[PREFILL].ran == "routed"


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
