"""`prescore perplexity --experiment default` from the command line, on a tiny model."""

import json

import pytest
from oracles.tiny_language_model import save_tiny_language_model

from prescore.bench.cli.main import main

SMALL = ("chunk_size=16", "exact_until=32", "leaf_size=4", "rows=8")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_language_model(tmp_path_factory.mktemp("tiny"), max_positions=128))


@pytest.fixture
def arguments(model, tmp_path, monkeypatch):
    from prescore.bench.language import documents

    (tmp_path / "novel.txt").write_text("The keys that matter are few, and the rest may be stood for. " * 30)
    # half a megabyte of Python takes seconds to cut into letters
    monkeypatch.setattr(documents, "SOURCE_MODULES", ("this",))
    short = documents.Document(documents.TOPICS, "What every Python has. " * 100)
    whole = documents._python_document
    monkeypatch.setattr(
        documents, "_python_document", lambda name: short if name == documents.TOPICS else whole(name)
    )
    changes = [word for change in SMALL for word in ("--set", change)]
    words = ["perplexity", "--experiment", "default", "--model", model, "-d", str(tmp_path / "novel.txt")]
    return [*words, "-n", "64", "-n", "256", *changes, "--out", str(tmp_path / "run")]


def lines(directory):
    return [json.loads(line) for line in (directory / "records.jsonl").read_text().splitlines()]


def test_the_table_has_every_text_and_length(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "reported windows" in printed
    assert "256 (YaRN)" in printed
    records = lines(tmp_path / "run")
    assert len(records) == 2 * 3 * 4  # lengths, texts, methods
    assert {record["config"]["method"]["label"] for record in records} == {
        "exact",
        "default, chunk_size=16, exact_until=32, leaf_size=4, rows=8",
        "local only",
        "sliding window",
    }
    assert {record["config"]["document"].split(",")[0] for record in records} == {
        "novel.txt",
        "python-reference",
        "python-source",
    }
    page = (tmp_path / "run" / "default.md").read_text()
    assert page.count("\n| ") >= 2 + 2 * 4  # head and rule, then texts and all of them


def test_a_run_goes_on_where_it_stopped(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    file = tmp_path / "run" / "records.jsonl"
    whole = file.read_text().splitlines()
    for kept in (0, 5, 11):
        file.write_text("".join(f"{line}\n" for line in whole[:kept]))
        assert main([*arguments, "--resume"]) == 0
        again = lines(tmp_path / "run")
        assert [record["key"] for record in again] == [json.loads(line)["key"] for line in whole]
    capsys.readouterr()
    assert main([*arguments, "--resume", "--json"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert {json.loads(line)["key"] for line in printed} == {record["key"] for record in again}
    assert len(lines(tmp_path / "run")) == len(whole)


def test_tuning_windows_are_others_and_have_a_table_of_their_own(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    assert main([*arguments, "--resume", "--tuning", "--seed", "3"]) == 0
    documents = {record["config"]["document"] for record in lines(tmp_path / "run")}
    assert {"novel.txt, reported window 1", "novel.txt, tuning window 3"} <= documents
    shown = capsys.readouterr().out
    assert "tuning windows" in shown


def test_texts_that_are_too_short_are_named(arguments, capsys):
    assert main([*arguments, "-n", "1500"]) == 0
    assert "left out at 1500 tokens: python-source, which has " in capsys.readouterr().err
    assert main([*arguments, "-n", "100000", "--resume"]) == 2
    assert "length must be at most that of the longest text, got 100000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--windows", "3"], "the experiment default must be given without method, .*, got windows too"),
        (["--method", "kmeans"], "got method too"),
        (["--first", "0"], "got first too"),
        (["--set", "top_k=3"], "got 'top_k'"),
        (["--experiment", "rows", "--tuning"], "tuning must come with the experiment default, got 'rows'"),
        (["--experiment", "defaults"], "experiment must be one of .* got 'defaults'"),
    ],
)
def test_what_it_has_no_use_for_is_refused(arguments, tmp_path, capsys, options, words):
    import re

    assert main([*arguments, *options]) == 2
    error = capsys.readouterr().err
    assert re.search(words, error)
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
