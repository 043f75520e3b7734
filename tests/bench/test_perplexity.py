"""Windows and losses, and `prescore perplexity` from the command line."""

import csv
import json

import pytest
import torch
from oracles.tiny_language_model import tiny_language_model

from prescore.bench.cli.main import main
from prescore.bench.cli.options import Language, read_budget, read_layers
from prescore.bench.language.documents import Document
from prescore.bench.language.model import LanguageModel
from prescore.bench.language.perplexity import loss_row, make_windows, measure_loss, window_losses
from prescore.bench.methods import EXACT

TEXT = "In the beginning there was a key, and the key was with the query. " * 20


def test_losses_are_the_models_own(precise):
    window = make_windows(precise, [Document("text", TEXT)], 200)[0]
    with torch.no_grad():
        logits = precise.model(input_ids=window.tokens[None]).logits[0]
    whole = torch.nn.functional.cross_entropy(logits[99:199].double(), window.tokens[100:200], reduction="none")
    torch.testing.assert_close(window_losses(precise, window, at_once=7), whole)
    results = measure_loss(precise, window, EXACT, segments=4)
    assert results["positions"] == 100
    assert sum(results["segment_losses"]) / 4 == pytest.approx(results["loss"])
    row = loss_row(precise, window, EXACT, experiment="x", layers="last:1", seed=3)
    wanted = {"document": "text", "digest": window.digest, "n_tokens": 200, "first": 100, "layers": "last:1"}
    assert {name: row.config[name] for name in wanted} == wanted
    assert row.seed == 3


def test_windows_are_spread_over_the_text_and_do_not_overlap(precise):
    text = "".join(chr(97 + number % 26) for number in range(1000))
    tokens = precise.encode(text)
    windows = make_windows(precise, [Document("text", text)], 100, offset=50, per_document=4)
    starts = [50 + number * ((len(tokens) - 150) // 3) for number in range(4)]  # more than 100 apart
    assert [window.document for window in windows] == [f"text, window {number}" for number in (1, 2, 3, 4)]
    for window, start in zip(windows, starts, strict=True):
        assert torch.equal(window.tokens, tokens[start : start + 100])


def test_past_the_trained_length_positions_are_scaled_and_said():
    model, tokenizer = tiny_language_model(max_positions=64)
    short = LanguageModel("tiny", model, tokenizer)
    inside, beyond = (make_windows(short, [Document("text", TEXT)], length)[0] for length in (64, 128))
    rotary = model.model.rotary_emb
    scaled = measure_loss(short, beyond, EXACT)
    assert scaled["position_scaling"] == {"rope": "yarn", "factor": 2.0, "trained_length": 64}
    assert model.model.rotary_emb is rotary
    assert abs(scaled["loss"] - float(window_losses(short, beyond).mean())) > 1e-6
    assert "position_scaling" not in measure_loss(short, inside, EXACT)


def test_a_head_that_is_not_plain_is_refused(precise, monkeypatch):
    precise.check_head()
    right = LanguageModel.logits
    monkeypatch.setattr(LanguageModel, "logits", lambda self, hidden: 1.5 * right(self, hidden))
    with pytest.raises(ValueError, match="measuring tiny cannot run: its logits are not"):
        precise.check_head()


def test_how_option_values_are_read():
    given = ["sinks=2", "inner.alignment=hash", "min_score=null", "leaf_inclusive=true", " top_k =0.5", "a=b=c"]
    fields = {"sinks": 2, "inner.alignment": "hash", "min_score": None, "leaf_inclusive": True, "top_k": 0.5}
    assert Language(changes=given).fields == {**fields, "a": "b=c"}
    assert Language(changes=None).fields == {}
    assert [read_budget(text) for text in ("12", "0.5", "1.0")] == [12, 0.5, 1.0]
    assert isinstance(read_budget("1.0"), float)
    assert [read_layers(text) for text in ("0,3,-1", "2", "last:4")] == [[0, 3, -1], [2], "last:4"]


@pytest.fixture
def run(saved, text, tmp_path):
    """`prescore perplexity` on the tiny model. Records go to `tmp_path / "run"`."""
    given = ["perplexity", "--model", saved, "-d", text, "--out", str(tmp_path / "run")]
    return lambda *options: main([*given, *options])


def test_json_prints_records_only_and_fields_reach_the_configurations_that_have_them(run, capsys):
    options = "-n 64 --method hyper --method paper:kmeans --method default --method streaming --layers 0 --json"
    fields = ("inner.n_projections=3", "scorer.n_clusters=5", "sinks=1", "lsh.n_projections=4", "cluster_size=8")
    assert run(*options.split(), *(f"--set={field}" for field in fields)) == 0
    shown = capsys.readouterr()
    printed = [json.loads(line) for line in shown.out.splitlines()]
    assert "default is exact at 64 tokens: it reads everything up to exact_until=2048" in shown.err
    labels = ["exact", "local only", "hyper", "paper:kmeans", "default", "streaming"]
    assert [record["config"]["method"]["label"] for record in printed] == labels
    hyper, kmeans, default = configs = [record["config"]["method"]["config"] for record in printed[2:5]]
    assert (hyper["lsh"]["n_projections"], kmeans["inner"]["n_projections"]) == (4, 3)
    assert (kmeans["scorer"]["n_clusters"], default["cluster_size"]) == (5, 8)
    assert {config["sinks"] for config in configs} == {1}
    assert printed[2]["config"]["layers"] == [0]
    assert printed[2]["results"]["layers_replaced"] == 1


def test_grids_keep_their_axes(run, tmp_path):
    options = "-n 64 --method paper:kmeans --top-k 8 --top-k 16 --set sinks=2 --dtype bfloat16"
    assert run(*options.split()) == 0
    rows = list(csv.DictReader((tmp_path / "run" / "perplexity.csv").open()))[2:]
    found = [(row["method"], row["series"], row["top_k"], row["sample_size"], row["sinks"]) for row in rows]
    assert found == [(f"paper:kmeans, top {k}", "paper:kmeans", k, "1", "2") for k in ("8", "16")]


def test_short_documents_of_the_default_corpus_are_left_out_by_name(saved, tmp_path, capsys, monkeypatch):
    texts = [Document("short", "word " * 20), Document("long", "word " * 400)]
    monkeypatch.setattr("prescore.bench.language.documents.default_corpus", lambda: iter(texts))
    arguments = ["perplexity", "--model", saved, "-n", "64", "-n", "128", "--method", "exact"]
    assert main([*arguments, "--json", "--out", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr()
    assert "left out, with fewer than 128 tokens: short" in printed.err
    assert {json.loads(line)["config"]["document"] for line in printed.out.splitlines()} == {"long"}
    files = [tmp_path / f"{text.name}.txt" for text in texts]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text.text)
    given = [word for file in files for word in ("-d", str(file))]
    assert main([*arguments, *given, "--out", str(tmp_path / "given")]) == 2
    assert "document short.txt must have at least 128 tokens" in capsys.readouterr().err
    assert main([*arguments, *given, "--out", str(tmp_path / "given"), "--skip-short", "--documents", "1"]) == 0
    assert main([*arguments, "-n", "100000", "--out", str(tmp_path / "other")]) == 2
    assert "documents must have one of at least 100000 tokens, got 2 shorter" in capsys.readouterr().err


def test_a_damaged_result_is_refused_before_anything_is_measured(run, lines, tmp_path, capsys):
    options, path = ("-n", "64", "--method", "exact", "--resume"), tmp_path / "run" / "records.jsonl"
    assert run(*options) == 0
    first = lines(tmp_path / "run")[0]
    path.write_text(json.dumps({**first, "results": {**first["results"], "loss": None}}) + "\n")
    assert run(*options) == 2
    assert "must have a number as loss, got None" in capsys.readouterr().err
    assert len(lines(tmp_path / "run")) == 1
