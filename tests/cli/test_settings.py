"""What the words behind `--set`, `--top-k` and `--layers` mean, for every command alike."""

import pytest

from prescore.bench.cli.settings import read_budget, read_changes, read_layers


def test_values_are_json_or_words():
    given = ["sinks=2", "inner.alignment=hash", "tolerance=null", "leaf_inclusive=true", " top_k =0.5", "a=b=c"]
    assert read_changes(given) == {
        "sinks": 2,
        "inner.alignment": "hash",
        "tolerance": None,
        "leaf_inclusive": True,
        "top_k": 0.5,
        "a": "b=c",
    }
    assert read_changes(None) == {}
    with pytest.raises(ValueError, match="set must be FIELD=VALUE, got 'sinks'"):
        read_changes(["sinks"])


def test_budgets_are_counts_or_shares():
    assert [read_budget(text) for text in ("12", "0.5", "1.0")] == [12, 0.5, 1.0]
    assert isinstance(read_budget("1.0"), float)
    with pytest.raises(ValueError, match="top_k must be a count or a fraction, got 'many'"):
        read_budget("many")


def test_layers_are_numbers_or_a_pattern():
    assert read_layers("0,3,-1") == [0, 3, -1]
    assert read_layers("2") == [2]
    assert read_layers("last:4") == "last:4"
