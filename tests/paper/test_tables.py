"""The paper's tables, CSV files and pictures: its figures beside ours."""

import csv
import io
import itertools
import math

import pytest
from loss_records import draw, record, references

from prescore.bench.language.tables import full_csv, summarise
from prescore.bench.records import Record
from prescore.paper import printed as paper_prints
from prescore.paper.tables import holds_for, informative, paper_csv, paper_tables, plot_experiment
from prescore.paper.vision import beside_published


def cell(scorer, top_k, loss, samples=256, inclusive=False, coupling="corrected", leaf=512, **options):
    """A method at an eighth of the paper's length, its counts as the paper prints them."""
    axes = {"top_k": top_k // 8, "paper_top_k": top_k, "fraction": top_k / 32768, "coupling": coupling}
    axes |= {"sample_size": samples // 8, "paper_sample_size": samples, "leaf_inclusive": inclusive}
    config, name = {"top_k": top_k // 8, "min_seq_len": leaf}, "none" if top_k == 0 else scorer
    label = f"{name}{top_k}{samples}{inclusive}{coupling}"
    return record(label, loss, config=config, scorer=name, **axes, **options)


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


def test_the_papers_columns_have_both_leaf_rules_in_the_papers_order():
    full = list(csv.DictReader(io.StringIO(full_csv(summarise(grid())))))
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


def test_a_text_that_repeats_itself_is_left_out_of_every_method():
    copied = [*references(exact=0.02, local=0.5, document="copies"), cell("kmeans", 32, 0.4, document="copies")]
    kept, dull = informative([*grid(), *copied])
    assert (kept, dull) == (grid(), ["copies, 4096 tokens"])
    assert informative(grid()) == (grid(), [])


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


@pytest.mark.parametrize(
    ("item", "n_lines"),
    [*((name, 6) for name in ("appendix-a", "figure-glm3", "appendix-f")), ("table1", 3), ("baselines", 3)],
)
def test_every_item_has_a_picture_with_its_lines(item, n_lines, monkeypatch, tmp_path):
    few = [*references(), *(record(f"{name}, 1", 2.5) for name in ("x", "y")), record("default, 1", 2.1)]
    summaries = summarise(grid() if n_lines == 6 else few)
    axes = draw(monkeypatch, tmp_path / "picture.png", lambda *given: plot_experiment(item, *given), summaries)
    n_panels = 1 if item == "figure-glm3" else 2  # its last picture is of time
    assert [len(one.get_legend_handles_labels()[1]) for one in axes] == [n_lines] * n_panels


def test_budgets_stand_beside_the_papers_in_nats():
    with_samples, without = paper_tables("appendix-a", summarise(grid()))
    assert with_samples.columns == ("top_k (paper's)", "kmeans", "kmeans, paper", "leverage", "leverage, paper")
    assert [row[0] for row in with_samples.rows] == ["0 (0)", "4 (32)", "256 (2048)"]
    # 2.1 + 0.01 * 32 / 32, and 0.1 more with the flag, above 2.0
    assert with_samples.rows[1][1] == "+0.110 / +0.210"
    # the paper prints 17.3717 and 14.2691, and 5.6 for exact attention
    assert with_samples.rows[1][2] == "+1.633 / +1.349"
    assert without.rows[1][4] == "+0.924 / +0.593"
    *_, times = paper_tables("figure-glm3", summarise(grid()))
    assert times.columns == ("scorer", "top 0", "top 4", "top 256")
    assert times.rows[0] == ("HyperAttention, 32 samples", "0.50 s", "-", "-")
    assert times.rows[2] == ("K-means, 32 samples", "-", "0.50 s", "0.50 s")
    assert times.rows[-1] == ("exact", "0.50 s", "", "")
    early = [*references(), cell("kmeans", 32, 2.5, coupling="early")]
    (table,) = paper_tables("appendix-f", summarise(early))
    assert table.rows == (("early, kmeans", "+0.500"), ("paper, Appendix A: kmeans", "+1.633"))


def test_table_1_has_the_papers_losses_and_our_interval():
    cells = [cell("kmeans", 0, 3.0), cell("kmeans", 2048, 2.5), cell("kmeans", 8192, 2.4, inclusive=True)]
    second = [record("exact", 2.2, document="b"), cell("kmeans", 2048, 2.8, document="b")]
    (table,) = paper_tables("table1", summarise([*references(), *cells, *second]))
    rows = {row[0]: row for row in table.rows}
    assert rows["exact"][-2:] == ("2.485", "+0.000")
    assert rows["local only"][-2:] == ("-", "-")
    assert rows["none0256Falsecorrected"][-2:] == ("4.133", "+1.647")
    label = "kmeans2048256Falsecorrected"
    assert rows[label][3:5] == ("+0.550", f"{12.706 * 0.05:.2f}")
    assert rows[label][-2:] == ("3.376", "+0.890")
    assert rows["kmeans8192256Truecorrected"][-2:] == ("3.252", "+0.767")


def test_top_1_of_the_paper_stands_below_ours():
    config = {"method": "kmeans", "n_clusters": 4, "keep_prefix": True, "budget": 32}
    results = {"top1": 40.0, "top5": 60.0, "images_per_second": 9.0, "top1_exact": 70.0}
    results |= {"n_images": 100, "n_tokens": 197}
    ours, *theirs = beside_published([Record("vision", "a", config, 0, results, 1.0)]).rows
    assert ours[:2] == ("kmeans, 4 clusters", "40.0 ± 9.6")  # 1.96 sqrt(0.4 * 0.6 / 100)
    assert len(theirs) == len(paper_prints.TOP_1)
    assert theirs[0] == (
        "paper: ViT-S/16 (exact 85.11), kmeans, 4 clusters",
        "31.34",
        "61.31",
        "74.21",
        "80.05",
        "-",
        "-",
    )
