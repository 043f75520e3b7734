"""The table of held-out windows: every figure where it belongs, and what is not measured yet a dash."""

import pytest

from prescore.bench.language.held_out import held_out_tables
from prescore.bench.records import Record


def record(kind, loss, seconds, *, document="novel, reported window 1", length=8192, **changes):
    label = {"prescored": "default", "exact": "exact", "local": "local only", "baseline": "sliding window"}[kind]
    axes = {"beside": "default"} if kind == "baseline" else {}
    config = {
        "part": "loss",
        "experiment": "default",
        "model": "m",
        "dtype": "float32",
        "document": document,
        "digest": document,
        "n_tokens": length,
        "layers": "all",
        "method": {"label": label, "kind": kind, "settings": {}, "axes": axes},
    }
    figures = {"loss": loss, "attention_seconds": seconds, "replaced_rows_per_query": 1500.0, **changes}
    return Record("perplexity", f"{kind} {document} {length}", config, 0, figures, 1.0)


def window(document, exact, length=8192, **changes):
    losses = {"exact": exact, "prescored": exact + 0.004, "baseline": exact + 0.05, "local": exact + 0.1}
    times = {"exact": 8.0, "prescored": 2.0, "baseline": 1.6, "local": 1.0}
    return [record(k, losses[k], times[k], document=document, length=length, **changes) for k in losses]


def cells(table, place):
    return dict(zip(table.columns, table.rows[place], strict=True))


def test_a_line_has_losses_rows_and_times():
    (table,) = held_out_tables(window("novel, reported window 1", 2.5))
    assert table.title == "default, reported windows"
    assert cells(table, 0) == {
        "model": "m",
        "tokens": "8192",
        "text": "novel",
        "windows": "1",
        "exact loss": "2.5000",
        "default above": "+0.0040",
        "window above": "+0.0500",
        "local above": "+0.1000",
        "rows": "1500",
        "exact s": "8.0",
        "default s": "2.0",
        "window s": "1.6",
        "local s": "1.0",
        "speed-up": "4.00x",
    }
    assert len(table.rows) == 1


def test_texts_lengths_and_kinds_of_windows_stay_apart():
    records = [
        *window("novel, reported window 1", 2.0),
        *window("novel, reported window 2", 3.0),
        *window("code, reported window 1", 1.0),
        *window("novel, reported window 1", 2.0, length=16384, position_scaling={"rope": "yarn"}),
        *window("novel, tuning window 7", 2.0),
    ]
    records[1] = record("prescored", 2.02, 2.0)
    reported, tuning = held_out_tables(records)
    assert [(line[1], line[2], line[3]) for line in reported.rows] == [
        ("8192", "novel", "2"),
        ("8192", "code", "1"),
        ("8192", "all", "3"),
        ("16384 (YaRN)", "novel", "1"),
    ]
    assert cells(reported, 0)["default above"] == "+0.0120 (+0.0200)"
    assert cells(reported, 0)["exact loss"] == "2.5000"
    assert cells(reported, 2)["exact loss"] == "2.0000"
    assert (tuning.title, len(tuning.rows)) == ("default, tuning windows", 1)


def test_what_is_not_measured_is_a_dash():
    whole = window("novel, reported window 1", 2.0)
    (table,) = held_out_tables([*whole[:2], *window("novel, reported window 2", 2.0)])
    line = cells(table, 0)
    assert (line["window above"], line["local above"]) == ("-", "-")  # no mean over half of the windows
    assert line["default above"] == "+0.0040 (+0.0040)"
    (table,) = held_out_tables(whole[1:2])
    assert cells(table, 0)["default above"] == cells(table, 0)["exact loss"] == cells(table, 0)["speed-up"] == "-"
    assert held_out_tables(whole[:1]) == []


def test_other_experiments_are_passed_over_and_damage_is_refused():
    other = record("exact", 2.0, 1.0)
    other.config["experiment"] = "table1"
    assert held_out_tables([other]) == []
    with pytest.raises(ValueError, match="must have a number as loss, got 'high'"):
        held_out_tables([record("exact", "high", 1.0), record("prescored", 2.0, 1.0)])
