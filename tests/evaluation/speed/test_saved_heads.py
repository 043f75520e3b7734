"""Attention inputs of a model as files, and the studies on one layer. No time is asserted."""

import pytest
import torch
from oracles.tiny_language_model import save_tiny_language_model
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention

from prescore import Exact, Routed, apply
from prescore.bench.cli.main import main
from prescore.bench.records import measure, read_records
from prescore.bench.speed import studies
from prescore.bench.speed.heads import find_heads, heads_at_lengths, save_heads
from prescore.bench.speed.studies import Run, measure_layer, measure_methods, plan_rows, relative_error
from prescore.bench.speed.tables import tables
from prescore.errors import Unsupported

LENGTH = 2700
IDS = torch.arange(LENGTH)[None] % 251
DEFAULT = Routed()
START = max(DEFAULT.sinks + 2 * DEFAULT.chunk_size, DEFAULT.exact_until)
"""Where the default starts to route."""
PARTS = ["exact queries", "index", "local and centroids", "search and keys"]
SETTINGS = {
    "heads": 4, "dim": 16, "dtype": "float32", "repeats": 1, "top_k": 256, "min_seq_len": 512,
    "methods": ["default"], "memory": "system",
}  # fmt: skip


def layer_config(study, n, **changes):
    return {**SETTINGS, "study": study, "n": n, "query_heads": 2, "kv_heads": 1, **changes}


def test_what_is_saved_is_what_reaches_attention(model, tmp_path):
    (path,) = save_heads(model, IDS[:, :40], tmp_path, layers=[1], dtype=torch.float32)
    tensors = load_file(path)
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    assert (query.shape, key.shape, value.shape) == ((1, 4, 40, 8), (1, 2, 40, 8), (1, 2, 40, 8))
    exact = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    projected = []
    projection = model.model.layers[1].self_attn.o_proj
    hook = projection.register_forward_pre_hook(lambda _, given: projected.append(given[0]))
    with torch.no_grad():
        before = model(IDS[:, :40]).logits
    hook.remove()
    torch.testing.assert_close(exact.transpose(1, 2).flatten(2), projected[0])
    # the model is as before
    with torch.no_grad():
        assert torch.equal(model(IDS[:, :40]).logits, before)
    with apply(model, Exact()) as applied:
        assert len(applied.layers) == 2


def test_another_scale_is_saved_and_used(model, tmp_path, monkeypatch):
    monkeypatch.setattr(model.model.layers[0].self_attn, "scaling", 0.25)
    save_heads(model, IDS[:, :20], tmp_path)
    first, second = find_heads(tmp_path)
    assert (first.scale, second.scale) == (0.25, None)
    scales = []
    monkeypatch.setattr(studies, "measure_steps", lambda inputs, scale, n_steps: scales.append(scale))
    for saved in (first, second):
        measure_layer(layer_config("steps", 20, dim=8), 0, saved=saved)
    assert scales == [0.25, 8**-0.5]


def test_models_and_tokens_that_cannot_be_saved(model, tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    with pytest.raises(ValueError, match=r"ids must be one sequence \[1, N\], got \(2, 5\)"):
        save_heads(model, torch.zeros(2, 5, dtype=torch.long), tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    local = MistralForCausalLM(MistralConfig(vocab_size=256, num_key_value_heads=1, sliding_window=4, **sizes))
    with pytest.raises(Unsupported, match=r"saving layer 0.*causal over all positions, got a"):
        save_heads(local.eval(), IDS[:, :12], tmp_path)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (None, "bad.safetensors must be a safetensors file, got "),
        ({"query": (1, 4, 6, 8)}, "bad.safetensors must hold query"),
        ({"query": (1, 3, 6, 8), "key": (1, 3, 6, 8), "value": (1, 2, 6, 8)}, "bad.safetensors must hold"),
        ({"query": (2, 3, 6, 8), "key": (2, 3, 6, 8), "value": (2, 3, 6, 8)}, r"got .*\(2, 3, 6, 8\)"),
    ],
)
def test_files_that_hold_something_else_are_refused(shapes, said, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--heads must be a directory with .safetensors files, got"):
        find_heads(tmp_path)
    if shapes is None:
        (tmp_path / "bad.safetensors").write_bytes(b"junk")
    else:
        save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match=said):
        find_heads(tmp_path)


def test_lengths_are_those_that_a_file_has(saved):
    assert heads_at_lengths(saved[:1], None) == [(saved[0], LENGTH)]
    assert heads_at_lengths(saved[:1], [100, 9999]) == [(saved[0], 100)]
    with pytest.raises(ValueError, match=r"--n must be at most the 2700 positions of layer-00, got \[9999\]"):
        heads_at_lengths(saved, [9999])
    with pytest.raises(ValueError, match="n must be between 1 and the 2700 positions of layer-00, got 2701"):
        saved[0].inputs(2701)
    query, key, _ = saved[0].inputs(100, "float64")
    assert query.shape == (1, 4, 100, 8)
    assert key.dtype == torch.float64


def test_results_hold_the_error_beside_the_time(saved):
    config = {**SETTINGS, "n": LENGTH, "methods": ["default", "paper:kmeans"]}
    methods = measure_methods(config, 0, saved=saved[0])["methods"]
    default, paper = methods["default"], methods["paper:kmeans"]
    assert methods["exact"]["speedup"] == 1.0
    assert 0 < default["error"] < 0.5
    assert len(default["head_errors"]) == 4
    assert default["reads_per_query"] < (LENGTH + 1) / 2
    assert 0 < default["keys_compared_per_query"] < LENGTH
    assert default["mismatched_queries"] == paper["mismatched_queries"] == 0.0
    assert paper["keys_compared_per_query"] == 0.0
    short = measure_methods({**config, "n": 64}, 0, saved=saved[0])["methods"]["default"]
    assert short["error"] < 1e-9
    assert (short["reads_per_query"], short["keys_compared_per_query"]) == (32.5, 0.0)
    assert relative_error(torch.tensor([3.3, 4.4]), torch.tensor([3.0, 4.0])) == pytest.approx(0.01)


@pytest.mark.parametrize("dim", [8, 16])
def test_parts_add_up_to_the_call(dim, saved):
    """Native code runs heads of 16 dimensions, where there is any."""
    results = measure_layer(layer_config("parts", LENGTH, dim=dim), 0, saved=saved[0] if dim == 8 else None)
    heads = 4 if dim == 8 else 2
    parts = results["parts"]
    assert list(parts) == PARTS
    assert sum(entry["seconds"] for entry in parts.values()) == pytest.approx(results["call_seconds"])
    assert results["exact_multiply_adds"] == heads * 2 * dim * LENGTH * (LENGTH + 1) / 2
    assert 0 < results["call_multiply_adds"] < results["exact_multiply_adds"]
    work = {name: entry["multiply_adds"] / (heads * dim) for name, entry in parts.items()}
    # counted position by position, from the default's sizes
    chunk, sinks = DEFAULT.chunk_size, DEFAULT.sinks
    centroids, routed = chunk // DEFAULT.cluster_size, range(START, LENGTH)
    assert work["exact queries"] == START * (START + 1)
    local = sum(sinks + (p - sinks) % chunk + 1 + chunk for p in routed)
    far = sum(centroids * ((p - sinks) // chunk - 1) for p in routed)
    assert work["local and centroids"] == pytest.approx(2 * (local + far))
    assert work["search and keys"] > 0
    with pytest.raises(ValueError, match=f"n must be more than {START}, where routing starts, got 600"):
        measure_layer(layer_config("parts", 600), 0, saved=None)


@pytest.mark.parametrize(("n", "path"), [(LENGTH, "routed step"), (300, "step over all keys")])
def test_steps_are_queries_of_the_full_call(saved, n, path):
    results = measure_layer(layer_config("steps", n, dim=8, repeats=3), 0, saved=saved[0])
    assert results["path"] == [path]
    assert results["mismatched_queries"] == 0.0
    assert set(results["seconds"]) == {"exact", "packed", "routed"}
    assert (results["reads_per_query"] < n / 2) == (path == "routed step")
    assert (results["error"] < 1e-9) == (path != "routed step")
    query, key, value = saved[0].inputs(50)
    newest = query[:, :, -1:], key, value
    exact = scaled_dot_product_attention(*newest, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(studies.packed_step(newest, 0.3), exact)


def test_a_wrong_step_is_refused(saved, monkeypatch):
    right = studies._routed_step

    def wrong(*given):
        output, *more = right(*given)
        return output * 1.01, *more

    monkeypatch.setattr(studies, "_routed_step", wrong)
    with pytest.raises(RuntimeError, match="output of a routed step at n = 300 must match its reference"):
        measure_layer(layer_config("steps", 300, dim=8, repeats=3), 0, saved=saved[0])
    with pytest.raises(ValueError, match="n must be more than the 5 steps, got 5"):
        measure_layer(layer_config("steps", 5, repeats=5), 0, saved=None)


def test_a_run_with_heads(saved):
    run = Run(SETTINGS, lengths=[64], saved=saved)
    configs = [row.config for row in plan_rows(run, ["heads", "parts", "steps"])]
    assert [(c["study"], c["heads"], c["n"]) for c in configs] == [
        (study, f"layer-0{layer}", LENGTH) for study in ("heads", "parts", "steps") for layer in (0, 1)
    ]
    random = [row.config for row in plan_rows(Run(SETTINGS, lengths=[8192]), ["parts", "steps"])]
    assert [(c["study"], c["heads"], c["n"]) for c in random] == [
        ("parts", None, 8192), *(("steps", None, n) for n in (8192, 32768, 131072)),
    ]  # fmt: skip
    assert {(c["query_heads"], c["kv_heads"], c["dim"]) for c in random} == {(14, 2, 16)}
    with pytest.raises(ValueError, match="--heads must come with causal and forward"):
        plan_rows(Run(SETTINGS, saved=saved, backward=[True]), ["heads"])


def test_tables_show_random_and_saved_heads(saved):
    rows = plan_rows(Run({**SETTINGS, "methods": ["hyper", "default"]}, n=[64], lengths=[64]), ["lengths"])
    rows = [row for row in rows if row.config["causal"] and not row.config["backward"]]
    run = Run(SETTINGS, n=[64], saved=saved[:1])
    rows += plan_rows(run, ["heads"]) + plan_rows(Run(SETTINGS, saved=saved[:1]), ["parts", "steps"])
    made = {table.title.split(",")[0]: table for table in tables([measure("speed", row) for row in rows])}
    lengths = made["Attention"]
    assert [row[0] for row in lengths.rows] == ["64", "exponent", "layer-00 64"]
    assert lengths.rows[2][2] == "-"  # hyper was not timed there
    assert "x error " in lengths.rows[2][3]
    assert [row[:2] for row in made["Saved heads"].rows] == [("layer-00 64", "exact"), ("layer-00 64", "default")]
    assert [row[1] for row in made["Parts of the default"].rows] == ["exact", "the call", *PARTS]
    assert made["Parts of the default"].rows[0][-1] == "100 %"
    assert made["One decode step of the default"].rows[0][:2] == ("layer-00 2700", "routed step")


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
    assert record.results["methods"]["default"]["error"] > 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--save-heads", "heads"], "--save-heads must come with a --text-file, got none"),
        (["--study", "heads"], "--heads must be a directory of saved heads for --study heads, got none"),
        (["--layers", "0"], "--layers must come with --save-heads, got 0 without it"),
    ],
)
def test_bad_usage_is_one_sentence(argv, said, tmp_path, capsys):
    assert main(["speed", *argv, "--out", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
