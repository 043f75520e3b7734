"""`prescore generate` on a tiny saved model."""

import json

import pytest

from prescore.cli.generate import _budget, _config, _layers
from prescore.cli.main import main
from prescore.testing.tiny_language_model import save_tiny_language_model

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, the age of foolishness."


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_language_model(tmp_path_factory.mktemp("model"), n_layers=3))


def run(model, out, *extra):
    common = ["generate", "--model", model, "--prompt", TEXT, "--max-new-tokens", "5", "--out", str(out)]
    return main([*common, "--set", "min_seq_len=16", *extra])


def test_text_speeds_memory_and_selection_are_shown(model, tmp_path, capsys):
    assert run(model, tmp_path, "--top-k", "12", "--set", "remainder=none", "--layers", "last:2") == 0
    shown = capsys.readouterr().out
    for words in ("exact", "prescored", "tok/s", "MiB", "layers 1-2: 12 of"):
        assert words in shown
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    exact, own = (record["figures"] for record in records)
    assert exact["new_tokens"] == own["new_tokens"] == 5
    assert own["prompt_tokens"] == len(TEXT)
    assert [entry.get("rows") for entry in own["cache"]["layers"]] == [None, 12, 12]
    assert own["prefill_attention_seconds"] < own["prefill_seconds"]
    assert exact["text"] in shown


def test_every_key_gives_the_exact_text(model, tmp_path, capsys):
    assert run(model, tmp_path, "--top-k", "none", "--set", "inner=exact", "--json") == 0
    exact, own = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert own["figures"]["text"] == exact["figures"]["text"]
    assert own["figures"]["same_tokens"] == 5
    assert own["figures"]["first_token_kl"] < 1e-6


def test_eviction_frees_memory(model, tmp_path):
    assert run(model, tmp_path, "--top-k", "12", "--evict", "--no-exact") == 0
    (record,) = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    cache = record["figures"]["cache"]
    assert all(entry["evicted"] for entry in cache["layers"])
    assert cache["bytes"] < cache["exact_bytes"]


def test_beams_say_how_far_they_are_from_exact(model, tmp_path, capsys):
    assert run(model, tmp_path, "--top-k", "8", "--beams", "3", "--set", "remainder=none") == 0
    assert "under exact attention" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    exact, own = (record["figures"] for record in records)
    # an exact search scores its own tokens as exact attention does, up to rounding
    assert exact["score"] == pytest.approx(exact["exact_score"], abs=1e-3)
    assert abs(own["score"] - own["exact_score"]) > 1e-3
    assert "same_tokens" in own


def test_finished_rows_are_not_run_again(model, tmp_path, capsys):
    assert run(model, tmp_path, "--no-exact") == 0
    before = (tmp_path / "records.jsonl").read_text()
    assert run(model, tmp_path, "--no-exact", "--resume") == 0
    assert (tmp_path / "records.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such-model", "--prompt", "a"], "no/such-model"),
        (["--model", "missing.gguf", "--prompt", "a"], "missing.gguf"),
        ([], "exactly one of --prompt and --prompt-file"),
        (["--prompt", "a", "--top-k", "many"], "got 'many'"),
        (["--prompt", "a", "--set", "topk=3"], "topk"),
        (["--prompt", "a", "--set", "sinks"], "FIELD=VALUE"),
        (["--prompt", "a", "--method", "magic"], "magic"),
    ],
)
def test_bad_usage_is_one_sentence(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["generate", *arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_wrong_layers_are_refused_before_anything_runs(model, tmp_path, capsys):
    assert run(model, tmp_path, "--layers", "last:9") == 2
    said = capsys.readouterr().err
    assert "at most the model's 3 layers, got 'last:9'" in said
    assert "reading" not in said


def test_options_become_a_config():
    config = _config("kmeans", "0.25", ["sinks=7", "rule=farthest", "refresh_every=null"])
    assert (config.method, config.top_k, config.sinks) == ("kmeans", 0.25, 7)
    assert (config.rule, config.refresh_every) == ("farthest", None)
    assert [_budget(text) for text in ("12", "0.5", "None")] == [12, 0.5, None]
    assert _layers("0,3,-1") == [0, 3, -1]
    assert _layers("last:4") == "last:4"
