"""Summaries, tables, CSV and plots of the language experiments."""

import csv
import io
import itertools
import math

import pytest

from prescore.bench.language import tables
from prescore.bench.language.tables import loss_table, summarise
from prescore.bench.records import Record
from prescore.bench.tables import percent
from prescore.paper.tables import holds_for, paper_csv, plot_experiment


def record(label, loss, document="a", n_tokens=4096, config=None, **axes):
    kind = {"exact": "Exact", "local only": "Local"}.get(label, "Selected")
    method = {"label": label, "config": {"type": kind, **(config or {})}, "axes": axes}
    where = {"model": "tiny", "dtype": "float32", "document": document, "digest": "0", "n_tokens": n_tokens}
    results = {"loss": loss, "reads_per_query": 10.0, "attention_seconds": 0.5, "forward_seconds": 1.0}
    config = {"part": "loss", **where, "layers": "all", "method": method}
    return Record("perplexity", f"{label}-{document}-{n_tokens}", config, 0, results, 1.0)


def references(exact=2.0, local=3.0, **options):
    return [record("exact", exact, **options), record("local only", local, **options)]


def cell(scorer, top_k, loss, samples=256, inclusive=False, coupling="corrected", leaf=512):
    """A method at an eighth of the paper's length, its counts as the paper prints them."""
    axes = {"top_k": top_k // 8, "paper_top_k": top_k, "fraction": top_k / 32768, "coupling": coupling}
    axes |= {"sample_size": samples // 8, "paper_sample_size": samples, "leaf_inclusive": inclusive}
    config, name = {"top_k": top_k // 8, "min_seq_len": leaf}, "none" if top_k == 0 else scorer
    label = f"{name}{top_k}{samples}{inclusive}{coupling}"
    return record(label, loss, config=config, scorer=name, **axes)


def grid():
    cells = [
        cell(scorer, top_k, 2.1 + 0.01 * top_k / 32 + 0.1 * inclusive + 0.001 * number, samples, inclusive)
        for number, scorer in enumerate(("kmeans", "leverage"))
        for samples, top_k, inclusive in itertools.product((256, 0), (0, 32, 2048), (False, True))
    ]
    return [*references(), *{one.key: one for one in cells}.values()]


def printed(records):
    """The file with the paper's columns, as a list of dictionaries."""
    return list(csv.DictReader(io.StringIO(paper_csv(summarise(records)))))


def test_results_that_are_nan_or_absent_are_shown_and_not_fatal(drawn):
    records = [record("x", "nan"), *references()]
    records[0].results["reads_per_query"] = None  # a forward without a causal layer
    assert "nan" in loss_table(summarise(records), "t").to_markdown()
    assert "nan" in tables.full_csv(summarise(records))
    drawn(None, records)


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


def test_the_papers_columns_have_both_leaf_rules_in_the_papers_order():
    full = list(csv.DictReader(io.StringIO(tables.full_csv(summarise(grid())))))
    assert (len(full), full[0]["loss a@0"]) == (len(grid()), "2.0")
    lines = printed(grid())
    budgets = [("4", "32"), ("256", "32"), ("4", "0"), ("256", "0")]
    wanted = [("exact", "", ""), ("local only", "", ""), *(("HyperAttention", "0", n) for n in ("32", "0"))]
    wanted += [(name, *budget) for name in ("K-means", "Leverage") for budget in budgets]
    assert [(line["Method"], line["Top K"], line["Sample Size"]) for line in lines] == wanted
    assert float(lines[4]["PPL"]) == pytest.approx(math.exp(2.11))
    assert float(lines[4]["PPL*"]) == pytest.approx(math.exp(2.21))
    assert (float(lines[4]["2^loss"]), float(lines[4]["2^loss*"])) == pytest.approx((2**2.11, 2**2.21))
    assert {(line["Context"], line["Coupling"]) for line in lines[2:]} == {("4096", "corrected")}
    assert paper_csv(summarise(references())) is None


def test_a_budget_that_keeps_every_key_is_every_scorers():
    records = [
        cell("none", 0, 2.9),
        cell("kmeans", 32, 2.8),
        cell("kmeans", 16384, 2.5, coupling="early"),
        cell("kmedian", 32, 2.7, coupling="early"),
        cell("kmedian", 16384, 2.5, coupling="early"),
        cell("leverage", 32, 2.6, coupling="early"),  # its largest budget is the same computation, and not run
    ]
    lines = printed(records)
    found = [(line["Coupling"], line["Method"], line["Paper's Top K"]) for line in lines]
    assert found == [
        *(("corrected", "HyperAttention", "0"), ("corrected", "K-means", "32"), ("early", "K-means", "16384")),
        *(("early", name, top_k) for name in ("K-median", "Leverage") for top_k in ("32", "16384")),
    ]
    losses = [math.log(float(line["PPL"])) for line in lines]
    assert losses == pytest.approx([2.9, 2.8, 2.5, 2.7, 2.5, 2.6, 2.5])
    # blocks of 600, 1200, 2400 keys: the last are filtered by the same budget
    assert not holds_for(summarise([cell("kmeans", 16384, 2.6, leaf=600)])[0], "leverage")


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draw a picture; its axes."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: (figures.append(figure), save(figure, path)))

    def draw(experiment, records):
        plot_experiment(experiment, summarise(records), tmp_path / "picture.png", "title")
        assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
        return figures[-1].axes

    return draw


@pytest.mark.parametrize(
    ("experiment", "n_lines"),
    [
        *((name, 6) for name in ("appendix-a", "figure-glm3", "appendix-f")),
        ("table1", 3),
        ("baselines", 3),
        (None, 3),
    ],
)
def test_every_experiment_has_a_picture_with_its_lines(drawn, experiment, n_lines):
    few = [*references(), *(record(f"{name}, 1", 2.5) for name in ("x", "y")), record("default, 1", 2.1)]
    axes = drawn(experiment, grid() if n_lines == 6 else few)
    assert [len(one.get_legend_handles_labels()[1]) for one in axes] == [n_lines] * 2
