"""The table of many needles: shares by depth, and methods beside exact attention needle by needle."""

import pytest

from prescore.bench.language.needles import needles_table
from prescore.bench.records import Record


def record(label, sample, found, *, n_tokens=4096, **figures):
    """One text; `found` has the needles of each depth."""
    by_depth = [
        {"depth": depth, "asked": len(own), "found": own, "answer_loss": 0.5} for depth, own in found.items()
    ]
    config = {
        "part": "many-needles",
        "model": "m",
        "dtype": "float32",
        "document": "book",
        "digest": "d",
        "needle": "{city} = {number}",
        "n_tokens": n_tokens,
        "depths": list(found),
        "per_depth": 2,
        "sample": sample,
        "layers": "all",
        "method": {"label": label},
    }
    key = f"{label} {sample} {n_tokens}"
    return Record("retrieval", key, config, 0, {"by_depth": by_depth, **figures}, 1.0)


def test_a_line_per_depth_and_one_over_all():
    table = needles_table(
        [
            record("default", 0, {0.1: [1, 0], 0.9: [0, 1]}),
            record("exact", 0, {0.1: [0, 1], 0.9: [1, 1]}),
            record("exact", 1, {0.1: [1, 1], 0.9: [0, 1]}),
            record("default", 1, {0.1: [1, 1], 0.9: [0, 1]}),
        ]
    )
    assert table.columns == ("tokens", "depth", "needles", "exact", "default", "points", "lost", "gained")
    assert table.rows == (
        ("4096", "10 %", "4", "75.0 %", "75.0 %", "+0.0", "1", "1"),
        ("4096", "90 %", "4", "75.0 %", "50.0 %", "-25.0", "1", "0"),
        ("4096", "all", "8", "75.0 %", "62.5 %", "-12.5", "2", "1"),
    )
    assert table.title == "Many needles"


def test_lengths_stand_apart_and_unfinished_texts_are_not_compared():
    table = needles_table(
        [
            record("exact", 0, {0.5: [1, 1]}),
            record("exact", 1, {0.5: [0, 0]}),
            record("x", 0, {0.5: [1, 0]}),
            record("exact", 0, {0.5: [1, 1]}, n_tokens=8192, position_scaling={"rope": "yarn"}),
        ]
    )
    assert [row[:2] for row in table.rows] == [(n, d) for n in ("4096", "8192") for d in ("50 %", "all")]
    assert table.rows[0][2:] == ("4", "50.0 %", "50.0 %", "-50.0", "1", "0")
    assert table.rows[2][2:] == ("2", "100.0 %", "-", "-", "-", "-")
    assert "RoPE scaling" in table.title


def test_without_exact_attention_nothing_is_compared():
    table = needles_table([record("x", 0, {0.5: [1, 0]})])
    assert table.rows[0] == ("4096", "50 %", "2", "50.0 %", "-", "-", "-")
    assert needles_table([]).rows == ()


def test_other_records_are_left_out():
    other = Record("retrieval", "k", {"part": "retrieval"}, 0, {"accuracy": 1.0}, 1.0)
    assert needles_table([other]).rows == ()


def test_a_damaged_record_is_refused():
    damaged = record("exact", 0, {0.5: [1, 0]})
    damaged.figures["by_depth"][0]["found"] = [1]
    with pytest.raises(
        ValueError, match=r"record exact 0 4096 must have a 0 or 1 for every needle asked, got \[1\]"
    ):
        needles_table([damaged])
