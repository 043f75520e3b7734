"""Tables as values, numbers as text, and the style of plots."""

import math

import pytest

from prescore.bench.tables import Table, as_text, mean_and_spread, span


def test_table_as_markdown():
    table = Table("Title", ("name", "value"), (("a|b", "1"),), note="below")
    assert table.to_markdown() == "**Title**\n\n| name | value |\n| --- | ---: |\n| a\\|b | 1 |\n\nbelow\n"
    with pytest.raises(ValueError, match="rows must have 2 cells, got 1"):
        Table("T", ("a", "b"), (("x",),))


def test_table_on_a_terminal_prints_brackets_as_they_are(capsys):
    from rich.console import Console

    Console(width=100).print(Table("T", ("a", "b"), (("[bold]", "prescore[eval]"),)).to_rich())
    assert {"[bold]", "prescore[eval]"} <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (1.0, "1"), (0.12345, "0.123"), (1234.5, "1234"), (1e-6, "1e-06"),
     (2.5e7, "2.5e+07"), (math.inf, "inf"), ("nan", "nan"), (-0.5, "-0.5"), (100.0, "100")],
)  # fmt: skip
def test_number(value, text):
    assert as_text(value) == text


def test_spreads():
    assert mean_and_spread([0.5, 0.7]) == "0.60 ± 0.14"
    assert mean_and_spread([0.5]) == "0.50"
    assert mean_and_spread([None, 0.5]) == "0.50"
    assert mean_and_spread([None]) == mean_and_spread([]) == span([]) == "-"
    assert span([1.0, 3.0]) == "2 (1 to 3)"
    assert span([1.0, 1.0]) == "1"
    assert span([1.0, math.inf]) == "inf (1 to inf)"
