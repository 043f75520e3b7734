"""Summaries, tables and plots of losses."""

import math

import pytest
from loss_records import draw, record, references

from prescore.bench.language import tables
from prescore.bench.language.plots import plot_losses
from prescore.bench.language.tables import loss_table, summarise
from prescore.bench.tables import percent


def test_results_that_are_nan_or_absent_are_shown_and_not_fatal(monkeypatch, tmp_path):
    records = [record("x", "nan"), *references()]
    records[0].results["reads_per_query"] = None  # a forward without a causal layer
    assert "nan" in loss_table(summarise(records), "t").to_markdown()
    assert "nan" in tables.full_csv(summarise(records))
    draw(monkeypatch, tmp_path / "picture.png", plot_losses, summarise(records))


def test_losses_are_averaged_over_documents_with_students_interval():
    records = [record("exact", loss, document=name) for name, loss in (("a", 2.0), ("b", 2.5), ("c", 3.0))]
    summary = summarise(records)[0]
    assert summary.loss == 2.5
    assert summary.perplexity == pytest.approx(math.exp(2.5))
    assert summary.published_perplexity == pytest.approx((2**2.0 + 2**2.5 + 2**3.0) / 3)
    assert summary.half_width == pytest.approx(4.303 * 0.5 / math.sqrt(3))
    assert tables.confidence_half_width([1.0]) is None


def test_gap_is_over_the_same_documents_and_the_same_leaves():
    records = [
        *references(),
        record("local only", 5.0, config={"chunk_size": 64}),
        *references(exact=1.0, local=9.0, document="b"),
        record("x", 2.25, config={"min_seq_len": 512}),
        record("y", 2.6, config={"min_seq_len": 64}),
    ]
    by_label = {summary.label: summary for summary in summarise(records)}
    assert by_label["x"].gap_closed == pytest.approx(0.75)
    assert by_label["y"].gap_closed == pytest.approx(0.8)
    assert by_label["x"].speed_up == 1.0
    # without a gap none is closed
    assert summarise([*references(exact=3.0, local=2.9), record("x", 2.0)])[-1].gap_closed is None
    assert summarise([record("x", 2.0)])[0].gap_closed is None


def test_above_exact_is_paired_by_document():
    records = [record("exact", loss, document=name) for name, loss in (("a", 2.0), ("b", 4.0))]
    records += [record("x", loss, document=name) for name, loss in (("a", 2.5), ("b", 4.7), ("c", 9.0))]
    summary = summarise(records)[-1]
    assert summary.above_exact == pytest.approx(0.6)
    assert summary.above_exact_half_width == pytest.approx(12.706 * 0.1)
    assert summarise(records[2:])[-1].above_exact is None


def test_the_table_shows_every_method():
    sampled = record("paper:kmeans", 2.25, config={"scorer": {"name": "kmeans", "fit_size": "auto"}})
    table = loss_table(summarise([*references(), sampled]), "title")
    assert [row[0] for row in table.rows] == ["exact", "local only", "paper:kmeans (sampled fit)"]
    assert table.rows[2][1:4] == ("2.2500", "9.488", "75 %")
    assert [percent(share) for share in (-0.001, -0.25, None)] == ["0 %", "worse (-25 %)", "-"]


def test_losses_are_drawn_against_reads_and_time(monkeypatch, tmp_path):
    records = [*references(), *(record(f"{name}, 1", 2.5) for name in ("x", "y")), record("default, 1", 2.1)]
    axes = draw(monkeypatch, tmp_path / "picture.png", plot_losses, summarise(records))
    assert [len(one.get_legend_handles_labels()[1]) for one in axes] == [3] * 2


def test_the_interval_is_the_wider_one_of_documents_and_seeds():
    def half_width(losses):
        return summarise([record("x", loss, document=name, seed=seed) for (name, seed), loss in losses.items()])[
            0
        ].half_width

    by_document = {("a", 0): 2.0, ("a", 1): 2.0, ("b", 0): 3.0, ("b", 1): 3.0}
    assert half_width(by_document) == pytest.approx(12.706 * 0.5)
    by_seed = {("a", 0): 2.0, ("a", 1): 2.4, ("b", 0): 2.0, ("b", 1): 2.4}
    assert half_width(by_seed) == pytest.approx(12.706 * 0.2)
    assert half_width({("a", 0): 2.0, ("a", 1): 2.4}) == pytest.approx(12.706 * 0.2)
    assert half_width({("a", 0): 2.0}) is None
