"""`prescore retrieval --task many-needles` from the command line, on a tiny model."""

import json

import pytest
from oracles.tiny_language_model import save_tiny_language_model

from prescore import Routed
from prescore.bench.cli.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_language_model(tmp_path_factory.mktemp("tiny"), max_positions=4096))


@pytest.fixture
def arguments(model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The keys that matter are few, and the rest may be stood for. " * 60)
    return ["retrieval", "--task", "many-needles", "--model", model, "-d", str(text), "-n", "2600"]


def lines(directory):
    return [json.loads(line) for line in (directory / "records.jsonl").read_text().splitlines()]


def test_a_row_is_one_text_under_one_method(arguments, tmp_path, capsys):
    out = tmp_path / "run"
    arguments += ["-n", "1400", "--method", "exact", "--method", "default", "--samples", "2", "--out", str(out)]
    assert main(arguments) == 0
    printed, said = capsys.readouterr()
    found = lines(out)
    assert [
        (line["config"]["n_tokens"], line["config"]["sample"], line["config"]["method"]["label"]) for line in found
    ] == [(n, sample, label) for n in (2600, 1400) for sample in (0, 1) for label in ("exact", "default")]
    assert found[1]["config"]["method"]["settings"] == Routed().to_dict()
    assert found[1]["figures"]["keys_per_query"] < found[0]["figures"]["keys_per_query"]
    assert "default is exact at 1400 tokens" in said
    assert "default is exact at 2600" not in said
    shown = [line.split() for line in printed.splitlines()]
    for depth in ("10", "30", "50", "70", "90"):
        assert ["2600", depth, "%", "4"] in [words[:4] for words in shown]
    assert ["2600", "all", "20"] in [words[:3] for words in shown]
    exact, default = (line["figures"]["by_depth"] for line in found[4:6])
    assert exact == default  # the same texts, and at this length the same attention


def test_a_run_goes_on_text_by_text(arguments, tmp_path, capsys):
    out = tmp_path / "run"
    arguments += ["--method", "default", "--depth", "0.5", "--resume", "--out", str(out)]
    assert main([*arguments, "--samples", "2"]) == 0
    whole = (out / "records.jsonl").read_text()
    kept = whole.splitlines(keepends=True)
    assert len(kept) == 4
    (out / "records.jsonl").write_text("".join(kept[:3]))
    assert main([*arguments, "--samples", "3"]) == 0
    assert "3 of 6 rows are finished" in capsys.readouterr().err
    assert (out / "records.jsonl").read_text().startswith("".join(kept[:3]))
    again = lines(out)
    assert len(again) == 6
    assert again[3]["key"] == json.loads(kept[3])["key"]
    assert again[3]["figures"]["by_depth"] == json.loads(kept[3])["figures"]["by_depth"]


def test_json_has_a_line_per_text_and_method(arguments, tmp_path, capsys):
    arguments += ["--method", "local", "--samples", "1", "--json", "--out", str(tmp_path / "run")]
    assert main(arguments) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["config"]["method"]["label"] for line in printed] == ["exact", "local only"]
    assert [sum(one["asked"] for one in line["figures"]["by_depth"]) for line in printed] == [10, 10]


def test_it_runs_beside_other_tasks(arguments, tmp_path, capsys):
    arguments += ["--task", "single-needle", "--method", "exact", "--depth", "0.5", "--samples", "1"]
    assert main([*arguments, "--out", str(tmp_path / "run")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "single-needle 2600 at 50 %" in printed
    assert "Many needles" in printed


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["-n", "600"], "length must leave room for 10 needles, their questions and 512 tokens between, at least"),
        (["--depth", "1.5"], "depth must lie between 0 and 1, got 1.5"),
        (["--depth", "0.5", "--depth", "0.5"], "depths must differ from each other, got [0.5, 0.5]"),
        (
            [word for n in range(9) for word in ("--depth", f"0.{n}")],
            "depths must be 1 to 8 for many-needles, got 9",
        ),
        (["--task", "some-needles"], "task must be one of"),
        (["--method", "flash"], "method must be one of"),
    ],
)
def test_refusals_are_one_sentence_and_leave_no_records(arguments, options, sentence, tmp_path, capsys):
    assert main([*arguments, *options, "--out", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.strip().count("\n") == 0
    path = tmp_path / "run" / "records.jsonl"
    assert not path.exists() or not path.read_text()
