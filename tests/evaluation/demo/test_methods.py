"""What the demo compares: windows apart, the default as it is, rivals that read as many rows and no fewer."""

import pytest

from prescore import Routed
from prescore.bench.demo.run import (
    BUDGET_ROWS,
    BUDGETS,
    budget_methods,
    budget_rivals,
    demo_windows,
    first_methods,
    rivals,
    selected_rows,
    short_length,
    short_window,
    shown_config,
)
from prescore.bench.language.perplexity import loss_row, measure_loss
from prescore.bench.records import Record, measure


def record_of(tiny, window, method):
    return measure("demo", loss_row(tiny, window, method, stretches=4))


def test_windows_share_no_token(tiny, text):
    first, second = demo_windows(text, 256)
    words = tiny.tokenizer.decode(text.tokens.tolist())
    places = [words.index(tiny.tokenizer.decode(window.tokens.tolist())) for window in (first, second)]
    assert places[1] >= places[0] + 256
    assert [window.document for window in (first, second)] == ["words, window 1", "words, window 2"]
    assert len(demo_windows(text, 1024)) == 1  # a second one would overlap
    assert short_window(text, 1024).tokens.tolist() == demo_windows(text, 1024)[0].tokens[:256].tolist()
    with pytest.raises(
        ValueError, match=f"document words must have at least 99999 tokens, got {len(text.tokens)}"
    ):
        demo_windows(text, 99999)


def test_the_default_is_as_it_is_wherever_it_routes_by_itself():
    assert shown_config(8192) == shown_config(2049) == Routed()
    for length in (2048, 512, 128):
        config = shown_config(length)
        assert config.exact_until == 0
        assert config.sinks + 3 * config.chunk_size < length  # some chunk is far
    assert [short_length(length) for length in (8192, 256, 100)] == [2048, 128, 100]


def test_rivals_read_as_many_rows_and_no_fewer(tiny, text):
    window = demo_windows(text, 512)[0]
    methods = first_methods(512)
    assert [method.axes["series"] for method in methods] == ["exact", "default", "local only"]
    default = record_of(tiny, window, methods[1])
    rows = default.figures["replaced_rows_per_query"]
    sliding, selection = rivals(default)
    for method in (sliding, selection):
        read = measure_loss(tiny, window, method)["keys_per_query"]
        assert rows <= read < 1.15 * rows
        assert method.settings["sinks"] == shown_config(512).sinks
    leaf, top_k = selection.settings["min_seq_len"], selection.settings["top_k"]
    assert measure_loss(tiny, window, selection)["keys_per_query"] == pytest.approx(
        selected_rows(512, leaf, top_k), abs=0.01
    )
    smaller = max(selected_rows(512, leaf, top_k - 1), 0)
    assert smaller < rows or top_k == selection.settings["sinks"] + 1
    broken = Record(**{**vars(default), "figures": {"replaced_rows_per_query": None}})
    with pytest.raises(ValueError, match="must have the rows that the default read, got None"):
        rivals(broken)


def test_budgets_of_the_default_and_of_everything_else(tiny, text):
    window = short_window(text, 512)
    methods = budget_methods(len(window.tokens))
    assert [method.settings.get("rows") for method in methods] == [None, None, *BUDGET_ROWS]
    defaults = [record_of(tiny, window, method) for method in methods[2:]]
    others = budget_rivals(defaults)
    series = [method.axes["series"] for method in others]
    assert list(dict.fromkeys(series)) == [
        "sliding window + sinks",
        "selection + sinks",
        "paper: k-means",
        "HyperAttention + sinks",
    ]
    assert {method.axes["comparison"] for method in (*methods, *others)} == {BUDGETS}
    for method in others[:: len(BUDGET_ROWS)]:
        assert measure_loss(tiny, window, method)["loss"] > 0


def test_losses_of_stretches_make_up_the_loss(tiny, text):
    figures = measure_loss(tiny, demo_windows(text, 256)[0], first_methods(256)[0], stretches=4)
    assert len(figures["stretch_losses"]) == 4
    assert sum(figures["stretch_losses"]) / 4 == pytest.approx(figures["loss"])
