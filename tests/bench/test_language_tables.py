"""Summaries, tables, CSV and plots of the language experiments."""

import csv
import io
import math

import pytest

from prescore.bench.language.tables import (
    confidence_half_width,
    full_csv,
    holds_for,
    loss_table,
    paper_csv,
    plot_experiment,
    summarise,
)
from prescore.bench.records import Record
from prescore.bench.tables import percent


def record(label, loss, document="a", n_tokens=4096, config=None, **axes):
    kind = {"exact": "Exact", "local only": "Local"}.get(label, "Selected")
    return Record(
        command="perplexity",
        key=f"{label}-{document}-{n_tokens}",
        config={
            "part": "loss",
            "model": "tiny",
            "dtype": "float32",
            "document": document,
            "digest": "0",
            "n_tokens": n_tokens,
            "layers": "all",
            "method": {"label": label, "config": {"type": kind, **(config or {})}, "axes": axes},
        },
        seed=0,
        results={"loss": loss, "reads_per_query": 10.0, "attention_seconds": 0.5, "forward_seconds": 1.0},
        seconds=1.0,
    )


def references(exact=2.0, local=3.0, **options):
    return [record("exact", exact, **options), record("local only", local, **options)]


def grid(scorers=("kmeans", "leverage")):
    found = references()
    for number, scorer in enumerate(scorers):
        for samples in (256, 0):
            for top_k in (0, 32, 2048):
                for leaf_inclusive in (False, True):
                    name = "none" if top_k == 0 else scorer
                    axes = {
                        "scorer": name, "top_k": top_k // 8, "paper_top_k": top_k, "fraction": top_k / 32768,
                        "sample_size": samples // 8, "paper_sample_size": samples,
                        "leaf_inclusive": leaf_inclusive,
                        "coupling": "corrected", "sinks": 0,
                    }  # fmt: skip
                    loss = 2.1 + 0.01 * top_k / 32 + 0.1 * leaf_inclusive + (0.001 * number if top_k else 0)
                    found.append(record(f"{name}{top_k}{samples}{leaf_inclusive}", loss, **axes))
    return list({one.key: one for one in found}.values())


def test_no_point_is_cut_off_below_the_frame(tmp_path):
    from matplotlib.figure import Figure

    from prescore.bench.language.tables import _bound_losses, _count_hidden

    axes = Figure().subplots()
    summaries = summarise([*references(), record("x", 1.5), record("y", 9.0)])
    top = _bound_losses(axes, summaries)
    low, high = axes.get_ylim()
    assert low < 1.5
    assert high == top == 4.5
    _count_hidden(axes, summaries[:-1], top)
    assert not axes.texts
    _count_hidden(axes, summaries, top)
    assert axes.texts[0].get_text() == "1 point above the frame"


def test_a_record_without_its_loss_is_refused_by_name():
    broken = record("x", 1.0)
    del broken.results["loss"]
    with pytest.raises(ValueError, match=r"record x-a-4096 must have a number as loss, got None"):
        summarise([broken])


@pytest.mark.parametrize("name", ["loss", "reads_per_query", "attention_seconds"])
@pytest.mark.parametrize("figure", ["text", [1.0], {}])
def test_a_figure_that_is_no_number_is_refused_by_name(name, figure):
    broken = record("x", 1.0)
    broken.results[name] = figure
    with pytest.raises(ValueError, match=rf"record x-a-4096 must have a number as {name}, got"):
        summarise([broken])


def test_a_loss_that_is_not_a_number_is_shown_and_not_fatal(tmp_path):
    records = [*references(), record("x", "nan")]
    summaries = summarise(records)
    assert "nan" in loss_table(summaries, "t").to_markdown()
    assert "nan" in full_csv(summaries)
    plot_experiment(None, summaries, tmp_path / "plot.png", "t")


def test_losses_are_averaged_over_documents_with_students_interval():
    records = [record("exact", loss, document=name) for name, loss in (("a", 2.0), ("b", 2.5), ("c", 3.0))]
    summary = summarise(records)[0]
    assert summary.loss == 2.5
    assert summary.perplexity == pytest.approx(math.exp(2.5))
    assert summary.half_width == pytest.approx(4.303 * 0.5 / math.sqrt(3))
    assert confidence_half_width([1.0]) is None


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


def test_above_exact_is_paired_by_document():
    records = [record("exact", loss, document=name) for name, loss in (("a", 2.0), ("b", 4.0))]
    records += [record("x", loss, document=name) for name, loss in (("a", 2.5), ("b", 4.7), ("c", 9.0))]
    summary = summarise(records)[-1]
    assert summary.above_exact == pytest.approx(0.6)
    assert summary.above_exact_half_width == pytest.approx(12.706 * 0.1)
    assert summarise(records[2:])[-1].above_exact is None


def test_without_a_gap_none_is_closed():
    records = [*references(exact=3.0, local=2.9), record("x", 2.0)]
    assert summarise(records)[-1].gap_closed is None
    assert summarise(records[2:])[0].gap_closed is None


def test_percent_has_no_minus_zero():
    assert percent(-0.001) == "0 %"
    assert percent(-0.25) == "worse (-25 %)"
    assert percent(None) == "-"


def test_table_shows_every_method():
    table = loss_table(summarise([*references(), record("x", 2.25)]), "title")
    assert [row[0] for row in table.rows] == ["exact", "local only", "x"]
    assert table.rows[2][1:4] == ("2.2500", "9.488", "75 %")


def test_appendix_a_has_the_papers_columns_and_order():
    lines = list(csv.reader(io.StringIO(paper_csv("appendix-a", summarise(grid())))))
    assert lines[0][:5] == ["Method", "Top K", "Sample Size", "PPL", "PPL*"]
    shape = [line[:3] for line in lines[1:7]]
    assert shape == [
        ["K-means", *map(str, pair)] for pair in ((0, 32), (4, 32), (256, 32), (0, 0), (4, 0), (256, 0))
    ]
    assert float(lines[2][3]) == pytest.approx(math.exp(2.11))
    assert float(lines[2][4]) == pytest.approx(math.exp(2.21))
    assert [line[0] for line in lines[7:]] == ["Leverage"] * 6


def test_a_line_that_keeps_every_key_is_every_scorers():
    whole = grid(("kmeans", "leverage"))
    axes = {"scorer": "kmeans", "top_k": 2048, "paper_top_k": 16384, "fraction": 0.5, "sample_size": 32}
    axes |= {"paper_sample_size": 256, "leaf_inclusive": False}
    whole.append(record("all", 2.5, config={"top_k": 2048, "min_seq_len": 512}, **axes))
    # blocks of 600, 1200, 2400 keys: the last are filtered by the same budget
    other = record("some", 2.6, config={"top_k": 2048, "min_seq_len": 600}, **axes)
    assert not holds_for(summarise([other])[0], "leverage")
    lines = list(csv.reader(io.StringIO(paper_csv("appendix-a", summarise(whole)))))
    kept = [line for line in lines if line[1] == "2048"]
    assert [line[0] for line in kept] == ["K-means", "Leverage"]
    assert [float(line[3]) for line in kept] == [pytest.approx(math.exp(2.5))] * 2


def test_appendix_i_has_a_column_per_sample_size():
    lines = list(csv.reader(io.StringIO(paper_csv("appendix-i", summarise(grid(("gaussian-kmeans",)))))))
    assert lines[0] == ["Top K", "PPL, Sample Size = 32", "PPL, Sample Size = 0", "Paper's Top K"]
    assert [line[3] for line in lines[1:]] == ["0", "32", "2048"]


def test_full_csv_has_every_line_and_document():
    lines = list(csv.DictReader(io.StringIO(full_csv(summarise(grid())))))
    assert len(lines) == len(grid())
    assert lines[0]["loss a@0"] == "2.0"
    assert paper_csv("cost", []) is None


@pytest.mark.parametrize(
    "experiment", ["table1", "appendix-a", "figure-glm3", "appendix-f", "longest", "cost", None]
)
def test_every_experiment_has_a_picture(experiment, tmp_path):
    records = grid()
    if experiment == "longest":
        records = records[:4] + references(exact=1.9, local=2.9, n_tokens=8192)
    path = tmp_path / "picture.png"
    plot_experiment(experiment, summarise(records), path, "title")
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert path.stat().st_size > 5000


def test_appendix_f_has_the_largest_budget_for_every_scorer():
    def cell(scorer, coupling, top_k, loss):
        axes = {"scorer": scorer, "coupling": coupling, "top_k": top_k // 8, "paper_top_k": top_k}
        settings = {"top_k": top_k // 8, "min_seq_len": 512}
        return record(f"{scorer}{coupling}{top_k}", loss, config=settings, fraction=top_k / 32768, **axes)

    records = [
        *references(),
        cell("none", "corrected", 0, 2.9),
        cell("kmeans", "corrected", 32, 2.8),
        cell("kmeans", "early", 16384, 2.5),
        cell("kmedian", "early", 32, 2.7),
        cell("kmedian", "early", 16384, 2.5),
        cell("leverage", "early", 32, 2.6),  # its largest budget is the same computation, and not run again
    ]
    lines = list(csv.DictReader(io.StringIO(paper_csv("appendix-f", summarise(records)))))
    assert [(line["Coupling"], line["Method"], line["Paper's Top K"], line["Loss"]) for line in lines] == [
        ("corrected", "none", "0", "2.9"),
        ("corrected", "K-means", "32", "2.8"),
        ("early", "K-means", "16384", "2.5"),
        ("early", "K-median", "32", "2.7"),
        ("early", "K-median", "16384", "2.5"),
        ("early", "Leverage", "32", "2.6"),
        ("early", "Leverage", "16384", "2.5"),
    ]


def test_a_sampled_fit_is_said():
    sampled = record("paper:kmeans", 2.0, config={"scorer": {"name": "kmeans", "fit_size": "auto"}})
    assert summarise([sampled])[0].label == "paper:kmeans (sampled fit)"


def test_the_note_about_hidden_points_is_outside_of_the_frame():
    from matplotlib.figure import Figure

    from prescore.bench.language.tables import Summary, _count_hidden

    axes = Figure().subplots()
    above = Summary("x", {}, {}, 64, "all", {"a": 9.0}, None, 1.0, 1.0)
    _count_hidden(axes, [above], 4.5)
    (note,) = axes.texts
    assert note.xy[1] > 1
    assert note.get_ha() == "right"  # the title is at the left
