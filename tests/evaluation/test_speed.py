"""The speed study: its figures, its gate, its tables. No timing is asserted."""

import dataclasses

import pytest
import torch

from prescore.config import PrescoreConfig
from prescore.evaluation import speed, speed_check, speed_studies
from prescore.pipeline import attend_with_plan
from prescore.records import measure
from prescore.registry import get_scorer, list_scorers
from prescore.report.speed import (
    decode_table,
    exponent,
    kinds,
    length_table,
    plot,
    scoring_table,
    share_table,
    short_table,
)
from prescore.scorers.clustered import ClusteringScorer

SETTING = speed.Setting(
    n=300, causal=True, backward=True, heads=2, dim=8, exact_heads=1, repeats=1, top_k=32, min_seq_len=64
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", ["kmeans", "default", "hyper"])
def test_a_planned_row_is_what_was_computed(causal, method):
    setting = dataclasses.replace(SETTING, causal=causal)
    inputs = speed._inputs(dataclasses.replace(setting, dtype="float64"), 2, 0)
    with torch.no_grad():
        attended, plan, call = attend_with_plan(*inputs, setting.config(method), causal)
    rows = torch.arange(0, 600, 37)
    wanted = speed_check.planned_rows(call, plan, rows, 8**-0.5)
    got = attended.output.reshape(-1, 8).index_select(0, rows)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)  # both are float64


def test_exact_rows_follow_the_definition():
    query, key, value = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3))
    got = speed_check.exact_rows(query, key, value, torch.tensor([3, 17]), True)
    weights = torch.softmax(query @ key.transpose(-1, -2) / 2 + torch.full((9, 9), -torch.inf).triu(1), -1)
    torch.testing.assert_close(got, (weights @ value).reshape(-1, 4)[[3, 17]])


def test_figures_hold_a_ratio_a_check_and_shares_for_every_method():
    figures = speed.measure(SETTING, seed=0)
    assert figures["exact_scaled"] is True
    assert set(figures["methods"]) == {"exact", *speed.METHODS}
    for name in speed.METHODS:
        entry = figures["methods"][name]
        assert entry["error"] < speed.TOLERANCE
        assert entry["seconds"] > 0
        assert sum(entry["shares"].values()) == pytest.approx(1.0)
        assert entry["limit_share"] == pytest.approx(entry["speedup"] / entry["limit"])


def test_a_wrong_output_is_never_timed(monkeypatch):
    def broken(call, plan, rows, scale):
        return speed_check.planned_rows(call, plan, rows, scale) + 1.0

    monkeypatch.setattr(speed, "planned_rows", broken)
    with pytest.raises(
        RuntimeError, match=r"output of hyper at n = 300 must match its plan to 0.0002, got (0.9|1)"
    ):
        speed.measure(SETTING, seed=0)


def test_decode_reads_the_selected_rows_only():
    figures = speed.measure_decode(n=256, top_k=32, heads=2, dim=8, steps=2, seed=0)
    assert figures["rows"] == 32
    assert figures["error"] < speed.TOLERANCE


def test_tables_and_plot_from_records(tmp_path):
    settings = [dataclasses.replace(SETTING, n=n, backward=False) for n in (128, 256)]
    rows = speed.length_rows(settings, 0) + speed.decode_rows([256], 32, 2, 8, 2, 0)
    records = [measure("speed", row) for row in rows]
    assert kinds(records) == [(True, False)]
    table = length_table(records, True, False)
    assert [row[0] for row in table.rows] == ["128", "256", "exponent"]
    assert "*" in table.rows[0][1]
    assert len(share_table(records, True).rows) == len(speed.METHODS)
    assert decode_table(records).rows[0][1] == "32"
    plot(records, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_the_exponent_of_a_known_curve():
    records = [measure("speed", row) for row in speed.length_rows([SETTING], 0)]
    made = []
    for n in (1024, 4096):
        figures = {"exact_scaled": False, "methods": {"exact": {"seconds": 1e-9 * n**1.5}}}
        made.append(dataclasses.replace(records[0], config={**records[0].config, "n": n}, figures=figures))
    assert exponent(made, "exact") == pytest.approx(1.5)


def test_methods_are_the_presets_they_claim_to_be():
    assert SETTING.config("default") == PrescoreConfig()
    assert SETTING.config("kmedian") == PrescoreConfig.paper("kmedian", 32, min_seq_len=64)
    assert SETTING.config("hyper").top_k is None


def test_every_clustering_method_is_scored_against_exact_attention():
    figures = speed_studies.measure_scoring(n=128, heads=2, dim=8, repeats=3, seed=0)
    assert set(figures["seconds"]) == {"exact", *speed_studies.SCORERS}
    methods = {fields["method"] for fields in speed_studies.SCORERS.values()}
    clustering = {name for name in list_scorers() if issubclass(get_scorer(name), ClusteringScorer)}
    assert clustering <= methods
    assert figures["rounds"] == {"exact": 2, **dict.fromkeys(speed_studies.SCORERS, 3)}
    share = figures["seconds"]["kmedian"] / figures["seconds"]["exact"]
    assert figures["of_exact"]["kmedian"] == pytest.approx(share)


@pytest.mark.parametrize("backward", [False, True])
def test_short_inputs_are_timed_only_if_auto_is_exact(backward, monkeypatch):
    monkeypatch.setattr(speed_studies, "FEWEST_SECONDS", 0.0)
    figures = speed_studies.measure_short(48, True, backward, 2, 8, 2, seed=0)
    assert set(figures["of_exact"]) == {"exact", "auto", "default"}
    assert figures["error"]["auto"] < speed.TOLERANCE
    monkeypatch.setattr(speed_studies, "TOLERANCE", -1.0)
    with pytest.raises(RuntimeError, match=r"auto at n = 48 must be exact attention to -1.0, got"):
        speed_studies.measure_short(48, True, backward, 2, 8, 2, seed=0)


def test_tables_of_the_two_closer_looks(monkeypatch):
    monkeypatch.setattr(speed_studies, "FEWEST_SECONDS", 0.0)
    rows = speed_studies.scoring_rows(96, 2, 8, 1, 0) + speed_studies.short_rows([32], 2, 8, 1, 0)
    records = [measure("speed", row) for row in rows]
    scoring = scoring_table(records)
    assert [row[1] for row in scoring.rows] == ["exact", *speed_studies.SCORERS]
    assert scoring.rows[0][3] == "100.00 %"
    short = short_table(records)
    assert [row[:2] for row in short.rows] == [
        ("full, forward", "32"), ("full, forward + backward", "32"),
        ("causal, forward", "32"), ("causal, forward + backward", "32"),
    ]  # fmt: skip


def test_the_timed_call_itself_is_checked(monkeypatch):
    right = speed._method_call

    def wrong(setting, method, inputs):
        call = right(setting, method, inputs)
        return lambda: call() + 1.0

    monkeypatch.setattr(speed, "_method_call", wrong)
    with pytest.raises(RuntimeError, match="output of hyper at n = 300 must match its plan"):
        speed.measure(SETTING, seed=0)
