"""`prescore records` and `prescore plot`: what becomes of finished records."""

import csv

import pytest

from prescore.bench.cli.main import main
from prescore.bench.records import Record, RecordFile, flat_rows, read_records, row_key


def record(n, loss, label="exact", seed=0, **results):
    config = {"part": "loss", "n_tokens": n, "method": {"label": label, "axes": {"series": label}}}
    results = {"loss": loss, "reads_per_query": n / 2, "segment_losses": [loss], **results}
    return Record("perplexity", row_key("perplexity", config, seed), config, seed, results, 2.0)


def speed(n):
    config = {"n": n, "causal": True, "methods": ["default"]}
    methods = {
        name: {"seconds": n * factor, "shares": {"search": 0.5}} for name, factor in (("exact", 2), ("default", 1))
    }
    return Record("speed", row_key("speed", config, 0), config, 0, {"methods": methods}, 1.0)


@pytest.fixture
def runs(tmp_path):
    for name, records in {
        "a": [record(64, 3.0), record(128, 2.0)],
        "b/c": [record(64, 9.0), record(64, 4.0, "local")],
    }.items():
        file = RecordFile(tmp_path / "runs" / name / "records.jsonl")
        for one in records:
            file.append(one)
        file.close()
    return tmp_path / "runs"


def test_runs_are_merged_and_a_row_counts_once(runs, tmp_path, capsys):
    out = tmp_path / "all.jsonl"
    assert main(["records", str(runs), "--out", str(out)]) == 0
    assert capsys.readouterr().err == "3 records: 3 of perplexity\n"
    assert [one.results["loss"] for one in read_records(out)] == [3.0, 2.0, 4.0]  # of the first file
    assert len(RecordFile(out, resume=True)) == 3
    before = out.read_bytes()
    assert main(["records", str(runs), "--out", str(out)]) == 2
    assert "--out must name a new file" in capsys.readouterr().err
    assert out.read_bytes() == before


def test_records_as_csv(runs, tmp_path, capsys):
    assert main(["records", str(runs / "a" / "records.jsonl"), str(runs / "b"), "--csv", "-"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [(row["method.label"], row["n_tokens"], row["loss"]) for row in rows] == [
        ("exact", "64", "3.0"), ("exact", "128", "2.0"), ("local", "64", "4.0"),
    ]  # fmt: skip
    assert main(["records", str(runs), "--csv", str(tmp_path / "all.csv")]) == 0
    with (tmp_path / "all.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == rows


def test_a_record_of_several_methods_is_several_rows():
    rows = flat_rows(speed(64))
    assert [(row["method"], row["n"], row["seconds"], row["shares.search"]) for row in rows] == [
        ("exact", 64, 128, 0.5), ("default", 64, 64, 0.5),
    ]  # fmt: skip


def test_a_record_of_several_claims_is_several_rows(tmp_path, capsys):
    claims = [{"claim": "Theorem 2", "measured": share, "held": share == 1.0} for share in (1.0, 0.5)]
    config = {"n": 64, "reading": "normalized"}
    file = RecordFile(tmp_path / "records.jsonl")
    file.append(Record("planted", row_key("planted", config, 0), config, 0, {"checks": claims}, 1.0))
    file.close()
    assert main(["records", str(tmp_path), "--csv", "-"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [(row["claim"], row["n"], row["measured"], row["held"]) for row in rows] == [
        ("Theorem 2", "64", "1.0", "True"), ("Theorem 2", "64", "0.5", "False"),
    ]  # fmt: skip
    assert main(["plot", str(tmp_path), "--out", str(tmp_path / "a.png")]) == 2
    known = "claim, command, held, measured, n, reading, row_seconds, seed"
    assert f"-x, -y and --by must be given for records of planted, which have {known}" in capsys.readouterr().err


def test_finished_records_are_drawn(runs, tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda _, *points, label, **_s: drawn.append((label, points)))
    assert main(["plot", str(runs), "--out", str(tmp_path / "loss.png")]) == 0
    assert drawn == [("exact", ((32.0, 64.0), (3.0, 2.0))), ("local", ((32.0,), (4.0,)))]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    drawn.clear()
    words = "-x n_tokens -y loss --by part --where n_tokens=64 --log-x --log-y"
    assert main(["plot", str(runs), *words.split(), "--out", str(tmp_path / "b.svg")]) == 0
    assert drawn == [("loss", ((64.0,), (3.5,)))]  # the mean
    capsys.readouterr()
    assert main(["plot", str(runs), "--out", str(tmp_path / "c")]) == 2
    assert "--out must end in a suffix that names the format, such as .png, got" in capsys.readouterr().err
    assert main(["plot", str(runs), "-y", "speed", "--out", str(tmp_path / "c.png")]) == 2
    assert "rows must have numbers in 'reads_per_query' and 'speed', and" in capsys.readouterr().err
    assert not (tmp_path / "c.png").exists()


@pytest.mark.parametrize("words", ["records --csv", "records --out", "plot --out"])
def test_a_directory_that_is_missing_is_named(words, runs, tmp_path, capsys):
    command, option = words.split()
    out = tmp_path / "nowhere" / "a.png"
    assert main([command, str(runs / "a"), option, str(out)]) == 2
    assert f"the directory of a file must exist, got {out}\n" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["records", "plot"])
def test_nothing_to_read_is_one_sentence(command, tmp_path, capsys):
    assert main([command, str(tmp_path), *(["--out", str(tmp_path / "a.png")] if command == "plot" else [])]) == 2
    assert "there must be records below" in capsys.readouterr().err
    (tmp_path / "records.jsonl").write_text("no record\n")
    assert main([command, str(tmp_path), *(["--out", str(tmp_path / "a.png")] if command == "plot" else [])]) == 2
    assert "damaged line 1" in capsys.readouterr().err
