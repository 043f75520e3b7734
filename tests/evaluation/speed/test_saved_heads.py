"""Attention inputs of a model as files, and the speed table, parts and steps on them. No timing is asserted."""

import dataclasses
import json

import pytest
import torch
from oracles.inputs import attention_tensors
from oracles.tiny_language_model import save_tiny_language_model
from safetensors.torch import load_file, save_file

from prescore import Exact, Routed, apply
from prescore.bench.cli.main import main
from prescore.bench.records import read_records
from prescore.bench.speed import heads as speed_heads
from prescore.bench.speed import timing as speed_check
from prescore.bench.speed.heads import (
    HeadsSetting,
    find_heads,
    heads_row,
    layer_inputs,
    layer_rows,
    lengths_of,
    measure_heads,
    measure_steps,
    relative_error,
    save_heads,
    saved_setting,
)
from prescore.bench.speed.plan import SpeedPlan
from prescore.bench.speed.timing import Setting
from prescore.errors import Unsupported

LENGTH = 2700
"""More than `exact_until` of the default: some queries are routed."""
IDS = torch.arange(LENGTH)[None] % 251
"""As in conftest.py."""


def setting_of(heads, **changes):
    own = {"n": LENGTH, "methods": ("default",), "repeats": 1, **changes}
    return HeadsSetting(heads.name, heads.digest, **own)


def test_what_is_saved_is_what_reaches_attention(model, tmp_path):
    (path,) = save_heads(model, IDS[:, :40], tmp_path, layers=[1], dtype=torch.float32)
    found = load_file(path)
    assert {name: tuple(t.shape) for name, t in found.items()} == {
        "query": (1, 4, 40, 8), "key": (1, 2, 40, 8), "value": (1, 2, 40, 8),
    }  # fmt: skip
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(found[name] for name in ("query", "key", "value")), is_causal=True, enable_gqa=True
    )
    seen = []
    hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        model(IDS[:, :40])
    hook.remove()
    torch.testing.assert_close(exact.transpose(1, 2).flatten(2), seen[0])


def test_the_model_is_as_before_and_runs_as_always(model, tmp_path):
    with torch.no_grad():
        before = model(IDS[:, :30]).logits
        save_heads(model, IDS[:, :30], tmp_path, layers="first:1")
        assert torch.equal(model(IDS[:, :30]).logits, before)
    with apply(model, Exact()) as applied:  # nothing was left behind
        assert len(applied.layers) == 2


def test_another_scale_is_saved_and_used(model, tmp_path):
    model.model.layers[0].self_attn.scaling, own = 0.25, model.model.layers[0].self_attn.scaling
    try:
        save_heads(model, IDS[:, :20], tmp_path)
    finally:
        model.model.layers[0].self_attn.scaling = own
    assert [heads.scale for heads in find_heads(tmp_path)] == [0.25, None]
    heads = find_heads(tmp_path)[0]
    assert (
        layer_inputs(saved_setting(heads, 20, dtype="float32", repeats=1, memory="kept"), heads, 0).scale == 0.25
    )


def test_several_sequences_are_refused(model, tmp_path):
    with pytest.raises(ValueError, match=r"ids must be one sequence \[1, N\], got \(2, 5\)"):
        save_heads(model, torch.zeros(2, 5, dtype=torch.long), tmp_path)


def test_a_sliding_window_is_refused(tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    local = MistralForCausalLM(
        MistralConfig(vocab_size=256, num_key_value_heads=1, sliding_window=4, **sizes)
    ).eval()
    with pytest.raises(Unsupported, match=r"saving layer 0.*causal over all positions, got a"):
        save_heads(local, IDS[:, :12], tmp_path)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"query": torch.zeros(1, 4, 6, 8)}, "bad.safetensors must hold query"),
        ({name: torch.zeros(1, 3, 6, 8) for name in ("query", "key")} | {"value": torch.zeros(1, 2, 6, 8)}, "bad"),
        ({name: torch.zeros(2, 3, 6, 8) for name in ("query", "key", "value")}, r"got .*\(2, 3, 6, 8\)"),
    ],
)
def test_files_that_hold_something_else_are_refused(tensors, said, tmp_path):
    save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match=said):
        find_heads(tmp_path)


def test_no_files_and_no_safetensors_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--heads must be a directory with .safetensors files, got"):
        find_heads(tmp_path)
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"junk.safetensors must be a safetensors file, got b'junk'"):
        find_heads(tmp_path)


def test_lengths_are_those_a_file_has(saved):
    assert lengths_of(saved[:1], None) == [(saved[0], LENGTH)]
    assert lengths_of(saved[:1], [100, 9999]) == [(saved[0], 100)]
    with pytest.raises(ValueError, match=r"--n must be at most the 2700 positions of layer-00, got \[9999\]"):
        lengths_of(saved, [9999])
    with pytest.raises(ValueError, match="n must be between 1 and the 2700 positions of layer-00, got 2701"):
        saved[0].inputs(2701, torch.float32)
    query, key, _ = saved[0].inputs(100, torch.float64)
    assert query.shape == (1, 4, 100, 8)
    assert key.dtype == torch.float64


def test_figures_hold_the_error_beside_the_time(saved):
    figures = measure_heads(
        saved[0], setting_of(saved[0], methods=("default", "kmeans"), top_k=256, min_seq_len=512)
    )
    exact, own, paper = (figures["methods"][name] for name in ("exact", "default", "kmeans"))
    assert exact["speedup"] == 1.0
    assert 0 < own["error"] < 0.5
    assert len(own["head_errors"]) == 4
    assert own["keys_per_query"] < (LENGTH + 1) / 2
    assert 0 < own["searched_per_query"] < LENGTH
    assert own["rows_off"] == paper["rows_off"] == 0.0
    assert paper["searched_per_query"] == 0.0
    assert min(entry["seconds"] for entry in figures["methods"].values()) > 0


def test_short_heads_are_exact(saved):
    figures = measure_heads(saved[0], setting_of(saved[0], n=64))["methods"]["default"]
    assert figures["error"] < 1e-9
    assert figures["keys_per_query"] == 32.5
    assert figures["searched_per_query"] == 0.0


def test_a_wrong_output_is_not_timed(saved, monkeypatch):
    right = speed_heads._call

    def wrong(inputs, config, scale):
        call = right(inputs, config, scale)
        return lambda: call() * 1.01

    monkeypatch.setattr(speed_heads, "_call", wrong)
    with pytest.raises(RuntimeError, match="output of default on layer-00 must match its reference in all rows"):
        measure_heads(saved[0], setting_of(saved[0]))


def test_relative_error_of_known_tensors():
    wanted = torch.tensor([3.0, 4.0])
    assert relative_error(wanted * 1.1, wanted) == pytest.approx(0.01)


@pytest.mark.parametrize(("n_off", "fails"), [(0, False), (1, False), (2, True)])
def test_few_rows_may_differ(n_off, fails):
    """One row of two hundred."""
    wanted = torch.ones(1, 1, 200, 4)
    output = wanted.clone()
    output[0, 0, :n_off, 2] += 0.1
    if fails:
        with pytest.raises(RuntimeError, match=r"output of it must match .* in all rows but 0.005, got 0.01"):
            speed_check.check_rows("it", output, wanted)
    else:
        assert speed_check.check_rows("it", output, wanted) == n_off / 200
    output[0, 0, :2] = torch.nan
    with pytest.raises(RuntimeError, match=r"got 0.01"):
        speed_check.check_rows("it", output, wanted)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("place", [1100, 2050])
def test_long_routed_calls_are_checked_in_the_middle_and_at_the_end(causal, place, monkeypatch):
    monkeypatch.setattr(speed_check, "ORACLE_LENGTH", 1024)
    config = Routed(min_weight=1 / 32, cluster_size=16, chunk_size=64, exact_until=128)
    inputs = attention_tensors(n_keys=2100, dim=16, dtype=torch.float32)
    output = speed_check.plain_output(inputs, config, causal)
    assert speed_check.check_method("routed", inputs, config, output, causal) < 1e-6
    output[0, 1, place, 3] += 9  # more than a key at the limit weighs
    with pytest.raises(RuntimeError, match=r"output of routed must match its reference to 0.0002, got (9|8.9)"):
        speed_check.check_method("routed", inputs, config, output, causal)


def test_a_plan_with_heads(saved):
    base = Setting(64, causal=False, backward=False, methods=("default",), repeats=2)
    plan = SpeedPlan(base, [64], studies=["heads", "parts", "steps"], heads=saved)
    configs = [row.config for row in plan.rows(0)]
    assert [(c["study"], c["heads"], c["n"]) for c in configs] == [
        (study, f"layer-0{layer}", LENGTH) for study in ("heads", "parts", "steps") for layer in (0, 1)
    ]
    random = SpeedPlan(base, [8192], studies=["parts", "steps"]).rows(0)
    assert [(r.config["study"], r.config["heads"], r.config["n"]) for r in random] == [
        ("parts", None, 8192), *(("steps", None, n) for n in (8192, 32768, 131072)),
    ]  # fmt: skip
    assert {(r.config["query_heads"], r.config["key_heads"], r.config["dim"]) for r in random} == {(14, 2, 64)}
    with pytest.raises(ValueError, match="--heads must be a directory of saved heads for --study heads, got none"):
        SpeedPlan(base, [64], studies=["heads"])
    with pytest.raises(ValueError, match="--heads must come with causal and forward"):
        SpeedPlan(base, [64], studies=["heads"], heads=saved, backward=[True])


def test_the_command_saves_and_measures(tmp_path, capsys):
    model = save_tiny_language_model(tmp_path / "model")
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 60)
    text, heads = str(tmp_path / "book.txt"), str(tmp_path / "heads")
    save = ["speed", "--save-heads", heads, "--model", str(model), "--text-file", text]
    assert main([*save, "--n", str(LENGTH), "--layers", "last:1"]) == 0  # longer than it was trained on
    assert capsys.readouterr().out.splitlines() == [f"{heads}/layer-01.safetensors"]
    small = ["--memory", "system", "--repeats", "1", "--n-heads", "1", "--dim", "8", "--method", "default"]
    both = ["--study", "lengths", "--n", "64", "--causal", "--no-backward"]
    assert main(["speed", "--heads", heads, *both, *small, "--out", str(tmp_path / "both")]) == 0
    shown = capsys.readouterr().out
    assert "Attention, causal, forward" in shown
    assert "Saved heads, causal, forward" in shown
    assert (tmp_path / "both" / "curves.png").exists()
    assert main(["speed", "--heads", heads, *small, "--out", str(tmp_path / "heads-only")]) == 0
    (record,) = read_records(tmp_path / "heads-only" / "records.jsonl")
    assert (record.config["study"], record.config["heads"], record.config["n"]) == ("heads", "layer-01", LENGTH)
    assert json.loads(record.to_json())["figures"]["methods"]["default"]["error"] > 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--save-heads", "heads"], "--save-heads must come with a --text-file, got none"),
        (["--study", "heads"], "--heads must be a directory of saved heads for --study heads, got none"),
    ],
)
def test_bad_usage_is_one_sentence(argv, said, tmp_path, capsys):
    assert main(["speed", *argv, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_records_name_their_settings(saved):
    setting = setting_of(saved[0])
    config = dict(heads_row(saved[0], setting, 0).config)
    assert config.pop("study") == "heads"
    assert HeadsSetting(**{**config, "methods": tuple(config["methods"])}) == setting
    own = saved_setting(saved[0], 64, dtype="float32", repeats=1, memory="kept")
    (row,) = layer_rows("steps", [(own, saved[0])], measure_steps, 0)
    assert {"study": "steps", **dataclasses.asdict(own)} == row.config
