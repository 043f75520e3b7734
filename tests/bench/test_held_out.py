"""Held-out windows: fixed, apart from what was tuned on, and measured beside a window that reads as much."""

import json

import pytest
import torch

from prescore.bench.cli.main import main
from prescore.bench.language import documents, held_out
from prescore.bench.language.documents import SOURCE, SOURCE_MODULES, TOPICS, Document, load_documents
from prescore.bench.language.held_out import LENGTHS, TokenizedText, held_out_tables, held_out_windows
from prescore.bench.records import Record

NOVEL = 325_000  # tokens of the shorter of two novels


def numbered(total, bos=None):
    """A text whose tokens are their own positions."""
    return TokenizedText("text", torch.arange(total), bos)


def interval(window):
    """First and one past the last position of a window of a numbered text."""
    return int(window.tokens[0]), int(window.tokens[-1]) + 1


def apart(one, other):
    return one[1] <= other[0] or other[1] <= one[0]


def test_reported_windows_are_a_fixed_list():
    """Changing one of these after something was measured would be choosing by the result."""
    text = numbered(100_000)
    starts = {length: [interval(w)[0] for w in held_out_windows(text, length)] for length in LENGTHS}
    assert starts == {8192: [41314, 73446], 16384: [33446], 32768: [33616]}
    windows = held_out_windows(text, 8192)
    assert [(w.document, w.first) for w in windows] == [(f"text, reported window {n}", 4096) for n in (1, 2)]
    assert held_out_windows(numbered(8191), 8192) == []


@pytest.mark.parametrize("total", [NOVEL, 460_000])
def test_no_reported_window_was_seen(total):
    seen = [
        (round(s * (total - n)), round(s * (total - n)) + n) for n, shares in held_out.SEEN.items() for s in shares
    ]
    for length in LENGTHS:
        for window in held_out_windows(numbered(total), length):
            assert all(apart(interval(window), other) for other in (*seen, held_out.SEEN_TOKENS))


@pytest.mark.parametrize("length", LENGTHS)
def test_tuning_windows_are_drawn_by_their_seed_apart_from_the_reported(length):
    text = numbered(NOVEL)
    reported = [interval(window) for n in held_out.REPORTED for window in held_out_windows(text, n)]
    drawn = [held_out_windows(text, length, seed)[0] for seed in range(30)]
    assert all(apart(interval(window), other) for window in drawn for other in reported)
    assert len({interval(window) for window in drawn}) > 25
    assert interval(held_out_windows(text, length, 7)[0]) == interval(drawn[7])
    assert drawn[7].document == "text, tuning window 7"
    assert held_out_windows(numbered(length - 1), length, 0) == []
    assert held_out_windows(numbered(length + 1), length, 0) == []  # the reported window leaves no room


def test_a_beginning_token_takes_the_first_place():
    window = held_out_windows(numbered(1000, bos=5), 100)[0]
    assert window.tokens.tolist() == [5, *range(406, 505)]


def test_texts_are_those_given_one_record_of_a_file_and_pythons_own(tmp_path):
    records = tmp_path / "bench.jsonl"
    records.write_text("\n".join(json.dumps({"context": f"story {n}", "_id": str(n)}) for n in range(3)))
    (tmp_path / "novel.txt").write_text("Once")
    given = [str(tmp_path / "novel.txt"), str(records), TOPICS]
    names = [[document.name for document in held_out.held_out_texts(paths)] for paths in (given, None)]
    assert names == [["novel.txt", "bench.jsonl#0", TOPICS, SOURCE], [TOPICS, SOURCE]]
    text = load_documents([SOURCE])[0].text
    assert len(text) > 400_000
    assert "class SequenceMatcher" in text
    assert not set(SOURCE_MODULES) & set(documents.DEFAULT_MODULES)


SMALL = ("chunk_size=32", "exact_until=32", "cluster_size=16", "min_weight=0.0625")


@pytest.fixture
def run(saved, tmp_path, monkeypatch):
    """The experiment on a tiny model and short texts."""
    whole = documents._python_document
    (tmp_path / "novel.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 40)
    short = {TOPICS: 2000, SOURCE: 1400}
    replaced = {name: Document(name, whole(name).text[:size]) for name, size in short.items()}
    monkeypatch.setattr(documents, "_python_document", lambda name: replaced.get(name) or whole(name))
    words = ["perplexity", "--held-out", "--model", saved, "-d", str(tmp_path / "novel.txt")]
    words += ["-n", "64", "-n", "256", *(word for change in SMALL for word in ("--set", change))]
    return lambda *options: main([*words, "--out", str(tmp_path / "run"), *options])


def test_the_table_has_every_text_and_length_and_a_run_can_be_continued(run, lines, tmp_path, capsys):
    assert run() == 0
    assert "reported windows" in capsys.readouterr().out
    records = lines(tmp_path / "run")
    assert len(records) == 2 * 3 * 4  # lengths, texts, methods
    label = f"default, {', '.join(SMALL)}"
    assert {r["config"]["method"]["label"] for r in records} == {"exact", label, "local only", "sliding window"}
    same = [r for r in records if r["config"]["digest"] == records[-1]["config"]["digest"]]
    reads = {r["config"]["method"]["label"]: r["results"]["replaced_reads_per_query"] for r in same}
    assert 0 <= reads["sliding window"] - reads[label] < 1  # it reads as much
    texts = {record["config"]["document"].split(",")[0] for record in records}
    assert texts == {"novel.txt", "python-reference", "python-source"}
    assert (tmp_path / "run" / "default.md").read_text().count("\n| ") >= 2 + 2 * 4  # head, rule, texts and all
    file = tmp_path / "run" / "records.jsonl"
    whole = file.read_text().splitlines(keepends=True)
    file.write_text("".join(whole[:11]))
    assert run("--resume") == 0
    assert [record["key"] for record in lines(tmp_path / "run")] == [record["key"] for record in records]
    assert run("--resume", "--tuning", "--seed", "3") == 0
    documents_ = {record["config"]["document"] for record in lines(tmp_path / "run")}
    assert {"novel.txt, reported window 1", "novel.txt, tuning window 3"} <= documents_
    assert "tuning windows" in capsys.readouterr().out


def test_texts_that_are_too_short_are_named(run, capsys):
    assert run("-n", "1390", "--layers", "0") == 0
    assert run("-n", "100000", "--resume") == 2
    said = capsys.readouterr().err
    assert "left out at 100000 tokens: novel.txt, which has" in said
    assert "length must be at most that of the longest text, got 100000" in said


TYPES = {"exact": "Exact", "default": "Routed", "window": "Baseline", "local": "Local"}


def record(name, loss, seconds, *, document="novel, reported window 1", length=8192, **results):
    axes = {"compared_with": "default"} if name == "window" else {}
    method = {"label": name, "config": {"type": TYPES[name]}, "axes": axes}
    config = {"part": "loss", "experiment": "default", "model": "m", "dtype": "float32", "layers": "all"}
    config |= {"document": document, "digest": document, "n_tokens": length, "method": method}
    results = {"loss": loss, "attention_seconds": seconds, "replaced_reads_per_query": 1500.0, **results}
    return Record("perplexity", f"{name} {document} {length}", config, 0, results, 1.0)


def window(document, exact, length=8192, **results):
    values = {"exact": (0, 8.0), "default": (0.004, 2.0), "window": (0.05, 1.6), "local": (0.1, 1.0)}
    where = {"document": document, "length": length, **results}
    return [record(name, exact + above, seconds, **where) for name, (above, seconds) in values.items()]


def cells(table, place):
    return dict(zip(table.columns, table.rows[place], strict=True))


def test_texts_lengths_and_kinds_of_windows_stay_apart():
    reported = {"novel, reported window 1": 2.0, "novel, reported window 2": 3.0, "code, reported window 1": 1.0}
    records = [each for name, loss in reported.items() for each in window(name, loss)]
    records += window("novel, reported window 1", 2.0, length=16384, position_scaling={"rope": "yarn"})
    records += window("novel, tuning window 7", 2.5)
    records[1] = record("default", 2.02, 2.0)
    reported, tuning = held_out_tables(records)
    rows = [("8192", "novel", "2"), ("8192", "code", "1"), ("8192", "all", "3"), ("16384 (YaRN)", "novel", "1")]
    assert [line[1:4] for line in reported.rows] == rows
    assert cells(reported, 0)["default above"] == "+0.0120 (+0.0200)"
    assert [cells(reported, place)["exact loss"] for place in (0, 2)] == ["2.5000", "2.0000"]
    assert (reported.title, tuning.title) == ("default, reported windows", "default, tuning windows")
    losses = ("m", "8192", "novel", "1", "2.5000", "+0.0040", "+0.0500", "+0.1000")
    assert tuning.rows == ((*losses, "1500", "8.0", "2.0", "1.6", "1.0", "4.00x"),)
    assert cells(tuning, 0)["speed-up"] == "4.00x"


def test_what_is_not_measured_is_a_dash():
    every = window("novel, reported window 1", 2.0)
    (table,) = held_out_tables([*every[:2], *window("novel, reported window 2", 2.0)])
    line = cells(table, 0)
    assert (line["window above"], line["local above"]) == ("-", "-")  # no mean over half of the windows
    assert line["default above"] == "+0.0040 (+0.0040)"
    (table,) = held_out_tables(every[1:2])
    assert cells(table, 0)["default above"] == cells(table, 0)["exact loss"] == cells(table, 0)["speed-up"] == "-"
    assert held_out_tables(every[:1]) == []
    for one in every:
        one.config["experiment"] = "table1"
    assert held_out_tables(every) == []
