"""`prescore generate` on a tiny saved model."""

import json

import pytest
from oracles.tiny_language_model import save_tiny_language_model

from prescore import Exact, Hyper, KMeans, Lsh, Routed, Selected
from prescore.bench.cli.generate import read_config
from prescore.bench.cli.main import main

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, the age of foolishness."


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_language_model(tmp_path_factory.mktemp("model"), n_layers=3))


def run(model, out, *extra):
    common = ["generate", "--model", model, "--prompt", TEXT, "--max-new-tokens", "5", "--out", str(out)]
    return main([*common, *extra])


KEY_DIFF = ("--method", "key-diff", "--set", "min_seq_len=16")


def test_text_speeds_memory_and_selection_are_shown(model, lines, tmp_path, capsys):
    assert run(model, tmp_path, *KEY_DIFF, "--top-k", "12", "--set", "remainder=none", "--layers", "last:2") == 0
    shown = capsys.readouterr().out
    for words in ("exact", "key-diff", "tok/s", "MiB", "prefill: selected", "layers 1-2: 12 of"):
        assert words in shown
    exact, own = (record["results"] for record in lines(tmp_path))
    assert exact["new_tokens"] == own["new_tokens"] == 5
    assert own["prompt_tokens"] == len(TEXT)
    entries = [entry.get("selected", 0) + entry.get("centroids", 0) for entry in own["cache"]["layers"]]
    assert entries == [0, 12, 12]
    assert own["prefill_attention_seconds"] < own["prefill_seconds"]
    assert exact["text"] in shown


@pytest.mark.parametrize("config", [("exact",), ("default",), ("key-diff", "--top-k", "1.0")], ids="-".join)
def test_every_key_gives_the_exact_text(model, tmp_path, capsys, config):
    assert run(model, tmp_path, "--method", *config, "--json") == 0
    exact, own = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert (own["results"]["text"], own["results"]["same_tokens"]) == (exact["results"]["text"], 5)
    assert own["results"]["first_token_kl"] < 1e-6


def test_a_prompt_that_is_too_short_says_so(model, tmp_path, capsys):
    assert run(model, tmp_path, "--no-exact") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"prefill: exact: up to exact_until={Routed().exact_until}" in said


def test_choices_after_the_exact_text_are_compared_with_it(model, lines, tmp_path, capsys):
    def agreed(name, own, *extra):
        assert run(model, tmp_path / name, "--agreement", "--ignore-end", *extra) == 0
        records = lines(tmp_path / name)
        names = [record["config"]["attention"] for record in records]
        assert names == ["exact", own, f"{own}, after the exact text"]
        return [record["results"] for record in records]

    same = agreed("same", "exact by prescore", "--method", "exact")[2]
    assert (same["agreement"], same["step_agreement"], same["compared"]) == (1.0, 1.0, 5)
    assert "100.0 % of 5" in capsys.readouterr().out
    few = (*KEY_DIFF, "--top-k", "1", "--set", "remainder=none", "--set", "sinks=0")
    exact, free, forced = agreed("few", "key-diff", *few)
    assert forced["agreement"] < 1.0  # one key of a hundred is not enough
    assert forced["new_tokens"] == len(exact["tokens"])
    assert sum(forced["decode_paths"].values()) == 3 * 4  # layers and steps
    # until the first difference both saw the same
    assert free["same_tokens"] <= round(5 * forced["agreement"])
    assert "12 times step over the selection" in capsys.readouterr().out


def test_eviction_frees_memory_and_a_refreshed_selection_covers_the_new_tokens(model, lines, tmp_path):
    caches = []
    for name, *options in (("evict", "--evict"), ("refresh", "--refresh-every", "2")):
        assert run(model, tmp_path / name, *KEY_DIFF, "--top-k", "12", "--no-exact", *options) == 0
        caches.append(lines(tmp_path / name)[0]["results"]["cache"])
    evicted, refreshed = caches
    assert all(entry["evicted"] for entry in evicted["layers"])
    assert evicted["bytes"] < evicted["exact_bytes"]
    assert {entry["selected_from"] for entry in refreshed["layers"]} == {len(TEXT) + 4}


def test_beams_say_how_far_they_are_from_exact_and_use_the_requested_cache(model, lines, tmp_path):
    scores = []
    for number, extra in enumerate(((), ("--refresh-every", "1"))):
        options = ("--top-k", "8", "--beams", "3", "--set", "remainder=none", *extra)
        assert run(model, tmp_path / str(number), *KEY_DIFF, *options) == 0
        exact, own = (record["results"] for record in lines(tmp_path / str(number)))
        # an exact search scores its own tokens as exact attention does, up to rounding
        assert exact["score"] == pytest.approx(exact["exact_score"], abs=1e-3)
        assert abs(own["score"] - own["exact_score"]) > 1e-3
        assert "same_tokens" in own
        scores.append(own["score"])
    assert scores[0] != scores[1]


def test_finished_rows_are_not_run_again(model, tmp_path):
    def lines(*options):
        assert run(model, tmp_path, *KEY_DIFF, "--resume", *options) == 0
        return (tmp_path / "records.jsonl").read_text().splitlines()

    before = lines()
    assert lines("--no-exact") == before
    # another way to continue is another row, and so is agreement with the finished exact one
    assert len(lines("--no-exact", "--refresh-every", "2")) == 3
    assert 0 <= json.loads(lines("--agreement")[3])["results"]["agreement"] <= 1
    # a row that is measured later is compared with the finished exact one too
    assert [json.loads(line)["results"].get("same_tokens") for line in lines("--top-k", "8")][-1] >= 0


def test_options_become_a_config():
    changes = {
        "sinks": 7,
        "scorer.rule": "farthest",
        "scorer.n_clusters": None,
        "inner": "Lsh",
        "inner.sample_size": 0,
    }
    wanted = Selected(KMeans(rule="farthest"), 0.25, sinks=7, inner=Lsh(sample_size=0))
    assert read_config("kmeans", "0.25", changes) == wanted
    assert read_config("kmeans", None, {}) == Selected("kmeans")
    assert read_config("default", None, {"min_weight": 0.0078125}) == Routed(min_weight=1 / 128)
    assert read_config("hyper", None, {"lsh.block_size": 64}) == Hyper(lsh=Lsh(block_size=64, alignment="rank"))
    assert read_config("paper:kmeans", "64", {}) == Selected.paper("kmeans", 64)
    assert read_config("exact", None, {}) == Exact()
