import pytest
from planted_sweep import run_sweep

from prescore.bench.planted import study as report
from prescore.bench.planted.study import QUICK


@pytest.fixture(scope="module")
def records():
    import dataclasses

    small = dataclasses.replace(
        QUICK, n=(200, 300), d=(4,), powers=(2.0,), rules=("nearest", "farthest"), methods=("kmeans", "key-norm"),
        n_queries=8, restarts=1,
    )  # fmt: skip
    return run_sweep(small)


def test_recall_table_has_a_row_per_method_and_rule(records):
    points = report.settings(records)
    assert [point[0] for point in points] == [200, 300]
    table = report.recall_table(records, points[0])
    assert [row[:2] for row in table.rows] == [("kmeans", "nearest"), ("kmeans", "farthest"), ("key-norm", "-")]
    assert all("±" in row[2] for row in table.rows)
    assert "n=200" in table.title


def test_claim_table_counts_the_seeds_in_which_a_claim_held(records):
    table = report.claim_table(records)
    claims = {row[0] for row in table.rows}
    assert {"Lemma 1", "Lemma 2", "Theorem 1", "Theorem 2", "Corollary 1", "Claim 1, p=2, rotated"} <= claims
    assert {"Appendix B, as printed", "Appendix B, norms spread", "rho: S in U"} <= claims
    verdicts = {cell.split()[0] for row in table.rows for cell in (row[5], row[7])}
    assert {"yes", "no"} <= verdicts <= {"yes", "no", "partly", "-"}
    held = {"held": True, "measured": 1.0}
    assert report._verdict([held, {"held": False, "measured": 3.0}]) == ("2 (1 to 3)", "partly 1/2")


def test_plot_is_written(records, tmp_path):
    report.planted_plot(records, report.settings(records)[0], tmp_path / "planted.png")
    assert (tmp_path / "planted.png").stat().st_size > 10_000
