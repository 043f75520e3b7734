"""The speed studies: the check before a time, results, tables, saved heads. No time is asserted."""

import pytest
import torch
from oracles.inputs import attention_tensors
from oracles.tiny_language_model import save_tiny_language_model, tiny_language_model
from routed_checks import needs_native
from safetensors.torch import load_file, save_file
from tiny_models import tiny as tiny_model
from torch.nn.functional import scaled_dot_product_attention

from prescore import Exact, Hyper, KMeans, Routed, Selected, apply, prescored_attention
from prescore.bench.cli.main import main
from prescore.bench.records import Record, measure, read_records
from prescore.bench.speed import studies, timing
from prescore.bench.speed.heads import find_heads, heads_at_lengths, save_heads
from prescore.bench.speed.studies import METHODS, Run, make_method, measure_methods, plan_rows
from prescore.bench.speed.tables import curve, exponent, kinds, length_plot, selects, tables
from prescore.errors import Unsupported

SETTINGS = {"heads": 2, "dim": 16, "dtype": "float32", "repeats": 1, "top_k": 32, "min_seq_len": 64}
SETTINGS |= {"methods": list(METHODS), "memory": "system"}
CONFIG = {**SETTINGS, "n": 300, "causal": True, "backward": True}
ALL = slice(0, 300)
LENGTH = 2700
"""More than `exact_until` of the default: some queries are routed."""
IDS = torch.arange(LENGTH)[None] % 251


def inputs(config=CONFIG):
    return timing.random_inputs(config["n"], config["heads"], config["dim"], dtype=config["dtype"])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("place", [1100, 2050])
def test_long_routed_calls_are_checked_in_the_middle_and_at_the_end(causal, place, monkeypatch):
    monkeypatch.setattr(timing, "LONG_CALL", 1024)
    config = Routed(min_weight=1 / 32, cluster_size=16, chunk_size=64, exact_until=128)
    given = attention_tensors(n_keys=2100, dim=16, dtype=torch.float32)
    output = timing.plain_output(given, config, slice(0, 2100), causal)
    assert timing.check_method("routed", given, config, output, is_causal=causal)["error"] < 1e-6
    output[0, 1, place, 3] += 9  # more than a key at the threshold weighs
    with pytest.raises(RuntimeError, match=r"output of routed must match its reference to 0.0002, got (9|8.9)"):
        timing.check_method("routed", given, config, output, is_causal=causal)


@pytest.mark.parametrize("n", [127, 128, 129])
@pytest.mark.parametrize("causal", [False, True])
def test_calls_around_exact_until_match_their_reference(n, causal):
    config = Routed(min_weight=1.0, cluster_size=16, chunk_size=32, exact_until=128)
    given = attention_tensors(n_keys=n, dim=16, dtype=torch.float32)
    output, aux = prescored_attention(*given, config, is_causal=causal, return_aux=True)
    assert (aux.stats.centroids_per_query > 0) == (n > 128)
    assert timing.check_method("routed", given, config, output, is_causal=causal)["error"] < 1e-5


@pytest.mark.parametrize(
    ("n_off", "off", "allowed", "passes"),
    [
        *((0, 0.0, {}, True), (1, 0.015625, {}, False), (1, 0.015625, {"most": 1, "by": 0.02}, True)),
        *((4, 0.015625, {"most": 3, "by": 0.02}, False), (1, 0.0625, {"most": 3, "by": 0.02}, False)),
        *((1, 5.0, {"most": 1}, True), (2, 5.0, {"most": 1.5}, False), (1, 5.0, {"unit": 1e5}, True)),
        *((1, torch.nan, {}, False), (1, torch.nan, {"most": 9}, False)),
    ],
)
def test_which_outputs_are_refused(n_off, off, allowed, passes):
    wanted = torch.zeros(1, 2, 100, 4)
    output = wanted.clone()
    output[0, 1, :n_off, 2] = off
    if passes:
        checked = timing.check_output("it", output, wanted, **allowed)
        assert checked["error"] == pytest.approx(off)
        assert checked["mismatched_queries"] == (0 if "unit" in allowed else n_off / 200)
    else:
        with pytest.raises(RuntimeError, match=f"output of it must match .*got {off} in {n_off} of 200"):
            timing.check_output("it", output, wanted, **allowed)


@pytest.mark.parametrize("causal", [False, True])
def test_exact_attention_follows_the_definition(causal):
    given = [torch.randn(1, heads, 9, 4, dtype=torch.float64) for heads in (4, 2, 2)]
    wanted = scaled_dot_product_attention(*given, is_causal=causal, enable_gqa=True)
    timing.check_exact("exact", given, wanted, is_causal=causal)
    with pytest.raises(RuntimeError, match="output of exact must match"):
        timing.check_exact("exact", given, wanted + 0.1, is_causal=causal)


def test_all_calls_run_equally_often():
    runs = []
    calls = {name: lambda name=name: runs.append(name) or torch.zeros(1) for name in ("exact", "other")}
    times = timing.time_calls(calls, 3)
    assert runs == ["exact", "other"] * 4  # one round is not counted
    assert times["exact"]["speedup"] == 1.0
    assert times["other"]["speedup"] == pytest.approx(times["exact"]["seconds"] / times["other"]["seconds"])


@pytest.mark.parametrize(
    ("changes", "most", "reads"),
    [
        ({}, timing.TOLERANCE, None),
        *(({"dtype": dtype, "backward": False}, 2e-2, None) for dtype in ("bfloat16", "float16", "float64")),
        *(({"n": 48, "causal": False}, 1e-6, 48), ({"n": 48}, 1e-6, 24.5)),  # exact
    ],
)
def test_results_hold_a_ratio_a_check_and_shares_for_every_method(changes, most, reads):
    config = {**CONFIG, **changes}
    results = measure_methods(config, 0)
    methods = results["methods"]
    assert results["shape"] == [[1, 2, config["n"], 16]] * 3
    assert list(methods) == ["exact", *METHODS]
    assert all(entry["error"] < most for entry in methods.values())
    assert reads is None or {methods[name]["reads_per_query"] for name in ("hyper", "default")} == {reads}
    for entry in [methods[name] for name in METHODS]:
        assert sum(entry["shares"].values()) == pytest.approx(1.0)
        assert entry["share_of_bound"] == pytest.approx(entry["speedup"] / entry["speedup_bound"])


@pytest.mark.parametrize(("module", "name"), [(timing, "plain_output"), (studies, "prescored_attention")])
def test_a_wrong_output_is_never_timed(module, name, monkeypatch):
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given, **more: right(*given, **more) + 1.0)
    monkeypatch.setattr(timing, "seconds", lambda *_: pytest.fail("timed"))
    with pytest.raises(RuntimeError, match=r"output of (exact|hyper) at n = 300 must match its reference"):
        measure_methods(CONFIG, 0)


def test_methods_are_the_presets_they_claim_to_be():
    assert make_method("default", CONFIG) == Routed()
    assert make_method("paper:kmedian", CONFIG) == Selected.paper("kmedian", 32, min_seq_len=64)
    assert make_method("hyper", CONFIG) == Hyper.published(min_seq_len=64)
    many = {**CONFIG, "n_clusters": 5}
    assert make_method("paper:kmeans", many) == Selected.paper(KMeans(n_clusters=5), 32, min_seq_len=64)
    assert make_method("paper:leverage", many) == make_method("paper:leverage", CONFIG)


def test_a_run_is_every_study_at_its_lengths():
    run = Run({**SETTINGS, "heads": None}, lengths=[1024, 65536], seed=3)
    by_study, rows = {}, plan_rows(run, ["steps", "lengths"])
    assert {row.seed for row in rows} == {3}
    for row in rows:
        by_study.setdefault(row.config["study"], []).append(row.config)
    assert list(by_study) == ["lengths", "steps"]
    # fewer heads for all methods where exact attention is slow
    modes = [(c, b, n, h) for c in (False, True) for b in (False, True) for n, h in ((1024, 4), (65536, 2))]
    assert [(c["causal"], c["backward"], c["n"], c["heads"]) for c in by_study["lengths"]] == modes
    assert [c["n"] for c in by_study["steps"]] == [1024, 65536]
    usual = plan_rows(Run(SETTINGS, causal=[True], backward=[False]), ["lengths", "steps"])
    assert [row.config["n"] for row in usual] == [*studies.LENGTHS, *studies.STEP_LENGTHS]
    assert [row.config["heads"] for row in plan_rows(Run(SETTINGS, lengths=[65536]), ["lengths"])] == [2] * 4


def test_every_study_becomes_a_table(monkeypatch, tmp_path):
    monkeypatch.setattr(studies, "STEPS", 2)
    run = Run(SETTINGS, lengths=[128, 256], causal=[True], backward=[False])
    records = [measure("speed", row) for row in plan_rows(run, ["lengths", "steps"])]
    assert kinds(records) == [(True, False)]
    made = {table.title.split(",")[0]: table for table in tables(records)}
    assert [row[0] for row in made["Attention"].rows] == ["128", "256", "exponent"]
    assert len(made["Shares of the forward time"].rows) == len(METHODS)
    assert [row[:2] for row in made["One decode step of the default"].rows] == [
        (f"random {n}", "step over all keys") for n in (128, 256)
    ]
    for field in ("seconds", "speedup"):
        length_plot(records, tmp_path / "plot.png", field)
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_columns_in_which_nothing_is_selected_say_so():
    run = Run({**SETTINGS, "top_k": 64, "methods": ["hyper", "paper:key-norm"]}, lengths=[128, 256], causal=[True])
    (table,) = (
        t for t in tables([measure("speed", row) for row in plan_rows(run, ["lengths"])][:2]) if "n" in t.columns
    )
    # blocks of 64 keys at 128 tokens, and of 128 at 256
    assert [["no selection" in cell for cell in row] for row in table.rows[:2]] == [
        [False] * 3 + [True],
        [False] * 4,
    ]
    config = {"top_k": 2048, "min_seq_len": 2048}
    chosen = [
        selects({**config, "n": n, "causal": c}, "paper:kmeans") for n in (4096, 4097) for c in (True, False)
    ]
    assert chosen == [False, True, True, True]


def test_curves_and_exponents_of_known_records():
    records = []
    for n, heads, speed in ((4096, 4, 16384.0), (1024, 4, 4096.0), (16384, 1, 9.0)):
        methods = {"default": {"seconds": 1e-9 * heads * n**1.5, "speedup": speed}}
        config = {"study": "lengths", "n": n, "causal": True, "backward": False, "heads": heads}
        records.append(Record("speed", "a", config, 0, {"methods": methods}, 1.0))
    assert curve(records, "default", "speedup") == [(1024, 4096.0), (4096, 16384.0), (16384, 9.0)]
    # times are per head: long inputs have fewer heads
    assert exponent(records, "default") == pytest.approx(1.5)
    assert exponent(records[:1], "default") is None


@pytest.fixture(scope="session")
def model():
    return tiny_language_model(max_positions=4096)[0]


@pytest.fixture(scope="session")
def saved(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    paths = save_heads(model, IDS, folder)
    assert [path.name for path in paths] == ["layer-00.safetensors", "layer-01.safetensors"]
    return find_heads(folder)


LAYER = {**SETTINGS, "heads": 4, "top_k": 256, "min_seq_len": 512, "methods": ["default"]}


def measured_layer(measure, n, saved=None, **changes):
    config = {**LAYER, "n": n, "query_heads": 2, "kv_heads": 1, **changes}
    return measure(config, 0, saved)


def test_what_is_saved_is_what_reaches_attention(model, tmp_path):
    (path,) = save_heads(model, IDS[:, :40], tmp_path, layers=[1], dtype=torch.float32)
    tensors = load_file(path)
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    exact = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    projected = []
    projection = model.model.layers[1].self_attn.o_proj
    hook = projection.register_forward_pre_hook(lambda _, given: projected.append(given[0]))
    with torch.no_grad():
        model(IDS[:, :40])
    hook.remove()
    torch.testing.assert_close(exact.transpose(1, 2).flatten(2), projected[0])
    with apply(model, Exact()) as applied:  # the model is as before
        assert len(applied.layers) == 2


def test_another_scale_is_saved_and_used(model, tmp_path, monkeypatch):
    monkeypatch.setattr(model.model.layers[0].self_attn, "scaling", 0.5)
    save_heads(model, IDS[:, :20], tmp_path)
    first, second = find_heads(tmp_path)
    assert (first.scale, second.scale) == (0.5, None)
    scales = []
    right = studies.packed_step
    monkeypatch.setattr(studies, "packed_step", lambda newest, scale: scales.append(scale) or right(newest, scale))
    for saved in (first, second):
        measured_layer(studies.measure_steps, 20, saved, repeats=1)
    assert scales == [0.5, 0.5, None, None]


def test_models_and_tokens_that_cannot_be_saved(model, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--heads must be a directory with .safetensors files, got"):
        find_heads(tmp_path)
    with pytest.raises(ValueError, match=r"ids must be one sequence \[1, N\], got \(2, 5\)"):
        save_heads(model, torch.zeros(2, 5, dtype=torch.long), tmp_path)
    with pytest.raises(Unsupported, match=r"saving layer 0.*causal over all positions, got a"):
        save_heads(tiny_model("Mistral"), IDS[:, :12], tmp_path)


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
    if shapes is None:
        (tmp_path / "bad.safetensors").write_bytes(b"junk")
    else:
        save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match=said):
        find_heads(tmp_path)


def test_lengths_are_those_that_a_file_has(saved):
    assert heads_at_lengths(saved[:1], None) == [(saved[0], LENGTH)]
    assert heads_at_lengths(saved[:1], [100, 9999]) == [(saved[0], 100)]
    with pytest.raises(ValueError, match=r"-n must be at most the 2700 positions of layer-00, got \[9999\]"):
        heads_at_lengths(saved, [9999])
    query, key, _ = saved[0].inputs(100, "float64")
    assert (query.shape, key.dtype) == ((1, 4, 100, 16), torch.float64)


@needs_native
def test_results_hold_the_error_beside_the_time(saved):
    config = {**LAYER, "n": LENGTH, "methods": ["default", "paper:kmeans"]}
    methods = measure_methods(config, 0, saved=saved[0])["methods"]
    default, paper = methods["default"], methods["paper:kmeans"]
    assert 0 < default["error"] < 0.5
    assert len(default["head_errors"]) == 4
    assert default["reads_per_query"] < (LENGTH + 1) / 2
    assert 0 < default["keys_compared_per_query"] < LENGTH
    assert default["mismatched_queries"] == paper["mismatched_queries"] == 0.0
    assert paper["keys_compared_per_query"] == 0.0


@pytest.mark.parametrize(
    ("n", "path"), [pytest.param(LENGTH, "routed step", marks=needs_native), (300, "step over all keys")]
)
def test_steps_are_queries_of_the_full_call(saved, n, path):
    results = measured_layer(studies.measure_steps, n, saved[0], repeats=3)
    assert results["path"] == [path]
    assert results["mismatched_queries"] == 0.0
    assert set(results["seconds"]) == {"exact", "packed", "routed"}
    assert results["reads_per_query"] <= n
    assert (results["error"] < 1e-9) == (path != "routed step")
    query, key, value = saved[0].inputs(50)
    newest = query[:, :, -1:], key, value
    exact = scaled_dot_product_attention(*newest, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(studies.packed_step(newest, 0.3), exact)


def test_a_wrong_step_is_refused(saved, monkeypatch):
    right = studies._routed_step
    monkeypatch.setattr(studies, "_routed_step", lambda *given: (1.01 * right(*given)[0], *right(*given)[1:]))
    with pytest.raises(RuntimeError, match="output of a routed step at n = 300 must match its reference"):
        measured_layer(studies.measure_steps, 300, saved[0], repeats=3)
    with pytest.raises(ValueError, match="n must be more than the 5 steps, got 5"):
        measured_layer(studies.measure_steps, 5, repeats=5)


def test_a_run_with_heads(saved):
    run = Run(LAYER, lengths=[64, 99999], saved=saved)
    configs = [row.config for row in plan_rows(run, ["heads", "steps"])]
    wanted = [(study, f"layer-0{layer}", 64) for study in ("heads", "steps") for layer in (0, 1)]
    assert [(c["study"], c["heads"], c["n"]) for c in configs] == wanted
    (random, *_) = [row.config for row in plan_rows(Run(LAYER), ["steps"])]
    assert (random["query_heads"], random["kv_heads"], random["dim"]) == (14, 2, 16)
    row = plan_rows(Run(LAYER, saved=saved, backward=[True]), ["heads"])[0]
    (table,) = tables([Record("speed", "key", dict(row.config), 0, row.measure(), 0.0)])
    label = f"layer-00 {LENGTH}, with backward"
    assert [line[:2] for line in table.rows] == [(label, "exact"), (label, "default")]
    with pytest.raises(ValueError, match="--heads must come with --causal, got --no-causal"):
        plan_rows(Run(LAYER, saved=saved, causal=[False]), ["heads"])


@needs_native
def test_heads_are_saved_and_measured(tmp_path, capsys):
    model, heads = save_tiny_language_model(tmp_path / "model"), tmp_path / "heads"
    text = tmp_path / "book.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 60)
    save = f"save-heads --out {heads} --model {model} -d {text} --layers last:1"
    assert main([*save.split(), "-n", "99999"]) == 2
    assert "-n must be at most the " in capsys.readouterr().err
    assert main([*save.split(), "-n", str(LENGTH)]) == 0  # longer than it was trained on
    assert capsys.readouterr().out.splitlines() == [f"{heads}/layer-01.safetensors"]
    assert main([*save.split(), "-n", "64"]) == 2
    assert "--out must name a directory without saved heads, got" in capsys.readouterr().err
    small = f"speed --heads {heads} --memory system --repeats 1 --n-heads 1 --dim 16 --method default"
    both = f"{small} --out {tmp_path}/both --study lengths --study heads -n 64 --causal --no-backward"
    assert main(both.split()) == 0
    shown = capsys.readouterr().out
    for title in ("Attention, causal, forward", "layer-01 64", "Saved heads, causal"):
        assert title in shown
    assert (tmp_path / "both" / "curves.png").exists()
    assert main(f"{small} --out {tmp_path}/only".split()) == 0
    shown = capsys.readouterr().out
    for title in ("Saved heads, causal", "One decode step of the default", "routed step"):
        assert title in shown
    records = read_records(tmp_path / "only" / "records.jsonl")
    assert [record.config["study"] for record in records] == ["heads", "steps"]
    assert {(record.config["heads"], record.config["n"]) for record in records} == {("layer-01", LENGTH)}
    assert records[0].results["methods"]["default"]["error"] > 0
