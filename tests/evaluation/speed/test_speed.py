"""The speed study: its figures, its gate, its tables. No timing is asserted."""

import dataclasses

import pytest
import torch
from oracles.dense import dense_attention
from oracles.naive import naive_weights

from prescore import Hyper, KMeans, Routed, Selected
from prescore.bench.cli.main import main
from prescore.bench.records import measure, read_records
from prescore.bench.speed import studies as speed_studies
from prescore.bench.speed import timing as speed
from prescore.bench.speed import timing as speed_check
from prescore.bench.speed.plan import SpeedPlan
from prescore.bench.speed.studies import DecodeSetting, decode_rows, measure_decode
from prescore.bench.speed.tables import (
    decode_table,
    exponent,
    kinds,
    length_table,
    scoring_table,
    share_table,
    short_table,
    speed_plot,
)
from prescore.registry import get_scorer, list_scorers
from prescore.scoring.kmeans import ClusteringScorer

SETTING = speed.Setting(
    n=300, causal=True, backward=True, heads=2, dim=8, exact_heads=1, repeats=1, top_k=32, min_seq_len=64
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", ["kmeans", "hyper"])
def test_the_reference_is_the_definition(causal, method):
    setting = dataclasses.replace(SETTING, n=150, causal=causal, dtype="float64", backward=False)
    query, key, value = inputs = setting.inputs(2, 0)
    config = setting.config(method)
    weights = naive_weights(query, key, config, is_causal=causal)
    wanted = dense_attention(query, key, value, weights, scale=8**-0.5).output
    got = speed_check.plain_output(inputs, config, causal)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)  # both are float64


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("exact_until", [0, 4096])
def test_routed_attention_is_held_against_its_definition(causal, exact_until, monkeypatch):
    setting = dataclasses.replace(SETTING, causal=causal, backward=False)
    inputs = setting.inputs(2, 0)
    config = Routed(chunk_size=32, cluster_size=8, min_weight=1 / 32, exact_until=exact_until)
    output = speed_check.plain_output(inputs, config, causal)
    assert speed_check.check_method("routed", inputs, config, output, causal) < 1e-6
    # an error that the plain backend shares
    monkeypatch.setattr(speed_check, "plain_output", lambda *_: output + 1.0)
    with pytest.raises(RuntimeError, match=r"output of routed must match its reference to 0.0002, got (0.9|1)"):
        speed_check.check_method("routed", inputs, config, output + 1.0, causal)


@pytest.mark.parametrize(("n_rows", "off", "fine"), [(1, 0.01, True), (4, 0.01, False), (1, 0.05, False)])
def test_few_rows_may_be_off_by_keys_at_the_limit(n_rows, off, fine):
    wanted = torch.zeros(1, 2, 150, 4)
    output = wanted.clone()
    output[0, 1, :n_rows, 2] = off
    if fine:
        assert speed_check.check_output("routed", output, wanted, at_limit=0.02) == pytest.approx(off)
    else:
        with pytest.raises(RuntimeError, match=f"got 0.0.* in {n_rows} rows"):
            speed_check.check_output("routed", output, wanted, at_limit=0.02)
    with pytest.raises(RuntimeError, match="output of routed must match its reference"):
        speed_check.check_output("routed", output, wanted)


def test_rows_of_exact_attention_follow_the_definition():
    query, key, value = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3))
    got = speed_check.softmax_rows(query, key, value, torch.tensor([3, 17]), True)
    weights = torch.softmax(query @ key.transpose(-1, -2) / 2 + torch.full((9, 9), -torch.inf).triu(1), -1)
    torch.testing.assert_close(got, (weights @ value).reshape(-1, 4)[[3, 17]])


def test_figures_hold_a_ratio_a_check_and_shares_for_every_method():
    figures = speed.measure_setting(SETTING, seed=0)
    assert figures["exact_scaled"] is True
    assert set(figures["methods"]) == {"exact", *speed.METHODS}
    for name in speed.METHODS:
        entry = figures["methods"][name]
        assert entry["error"] < speed_check.TOLERANCE
        assert entry["seconds"] > 0
        assert sum(entry["shares"].values()) == pytest.approx(1.0)
        assert entry["limit_share"] == pytest.approx(entry["speedup"] / entry["limit"])


@pytest.mark.parametrize("causal", [False, True])
def test_where_a_call_is_exact_it_is_checked_and_timed_too(causal):
    """A length below the exact leaves: as in `prescore speed --quick`."""
    setting = dataclasses.replace(SETTING, n=48, causal=causal, exact_heads=2)
    figures = speed.measure_setting(setting, seed=0)["methods"]
    assert set(figures) == {"exact", *speed.METHODS}
    columns = 24.5 if causal else 48
    assert figures["hyper"]["keys_per_query"] == figures["default"]["keys_per_query"] == columns
    assert all(entry["error"] < 1e-6 for entry in figures.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_types_are_checked_at_their_own_precision(dtype):
    figures = speed.measure_setting(dataclasses.replace(SETTING, dtype=dtype, backward=False), seed=0)["methods"]
    assert all(entry["error"] < 2e-2 for entry in figures.values())


def test_a_wrong_output_is_never_timed(monkeypatch):
    right = speed_check.plain_output

    def broken(inputs, config, is_causal):
        return right(inputs, config, is_causal) + 1.0

    monkeypatch.setattr(speed_check, "plain_output", broken)
    with pytest.raises(
        RuntimeError, match=r"output of hyper at n = 300 must match its reference to 0.0002, got (0.9|1)"
    ):
        speed.measure_setting(SETTING, seed=0)


@pytest.mark.parametrize("place", [(0, 0, 0, 0), (0, 1, 123, 4), (0, 1, 299, 7)])
def test_no_row_goes_unchecked(place):
    inputs = SETTING.inputs(2, 0)
    config = SETTING.config("kmeans")
    output = speed_check.plain_output(inputs, config, True)
    speed_check.check_method("kmeans", inputs, config, output, True)
    output[place] = torch.nan
    with pytest.raises(RuntimeError, match=r"output of kmeans must match its reference to 0.0002, got nan"):
        speed_check.check_method("kmeans", inputs, config, output, True)


def test_decode_reads_the_selected_rows_only():
    figures = measure_decode(DecodeSetting(n=256, top_k=32, heads=2, dim=8, steps=2), seed=0)
    assert figures["rows"] == 32
    assert figures["error"] < speed_check.TOLERANCE


def test_tables_and_plot_from_records(tmp_path):
    settings = [dataclasses.replace(SETTING, n=n, backward=False) for n in (128, 256)]
    rows = speed.length_rows(settings, 0) + decode_rows([DecodeSetting(256, 32, 2, 8, 2)], 0)
    records = [measure("speed", row) for row in rows]
    assert kinds(records) == [(True, False)]
    table = length_table(records, True, False)
    assert [row[0] for row in table.rows] == ["128", "256", "exponent"]
    assert "*" in table.rows[0][1]
    assert len(share_table(records, True).rows) == len(speed.METHODS)
    assert decode_table(records).rows[0][1] == "32"
    speed_plot(records, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_the_exponent_of_a_known_curve():
    records = [measure("speed", row) for row in speed.length_rows([SETTING], 0)]
    made = []
    for n in (1024, 4096):
        figures = {"exact_scaled": False, "methods": {"exact": {"seconds": 1e-9 * n**1.5}}}
        made.append(dataclasses.replace(records[0], config={**records[0].config, "n": n}, figures=figures))
    assert exponent(made, "exact") == pytest.approx(1.5)


def test_methods_are_the_presets_they_claim_to_be():
    assert SETTING.config("default") == Routed()
    assert SETTING.config("kmedian") == Selected.paper("kmedian", 32, min_seq_len=64)
    assert SETTING.config("hyper") == Hyper.published(min_seq_len=64)
    many = dataclasses.replace(SETTING, n_clusters=5)
    assert many.config("kmeans") == Selected.paper(KMeans(n_clusters=5), 32, min_seq_len=64)
    assert many.config("leverage") == SETTING.config("leverage")


def test_every_clustering_method_is_scored_against_exact_attention():
    setting = speed_studies.ScoringSetting(n=128, heads=2, dim=8, repeats=3)
    figures = speed_studies.measure_scoring(setting, seed=0)
    assert set(figures["seconds"]) == {"exact", *speed_studies.SCORERS}
    methods = {scorer.name for scorer in speed_studies.SCORERS.values()}
    clustering = {name for name in list_scorers() if issubclass(get_scorer(name), ClusteringScorer)}
    assert clustering <= methods
    assert figures["rounds"] == {"exact": 2, **dict.fromkeys(speed_studies.SCORERS, 3)}
    share = figures["seconds"]["kmedian"] / figures["seconds"]["exact"]
    assert figures["of_exact"]["kmedian"] == pytest.approx(share)


@pytest.mark.parametrize("backward", [False, True])
def test_short_inputs_are_timed_only_if_right(backward, monkeypatch):
    monkeypatch.setattr(speed_studies, "FEWEST_SECONDS", 0.0)
    setting = speed_studies.ShortSetting(48, True, backward, heads=2, dim=8, repeats=2)
    figures = speed_studies.measure_short(setting, seed=0)
    assert set(figures["of_exact"]) == set(figures["error"]) == {"exact", "Exact()", "default"}
    assert max(figures["error"].values()) < 1e-6
    right = speed_check.plain_output
    monkeypatch.setattr(speed_check, "plain_output", lambda *call: right(*call) + 1.0)
    with pytest.raises(RuntimeError, match=r"output of Exact\(\) at n = 48 must match its reference to 0.0002"):
        speed_studies.measure_short(setting, seed=0)


def test_tables_of_the_two_closer_looks(monkeypatch):
    monkeypatch.setattr(speed_studies, "FEWEST_SECONDS", 0.0)
    kinds = [(False, False), (False, True), (True, False), (True, True)]
    rows = [speed_studies.scoring_row(speed_studies.ScoringSetting(96, 2, 8, 1), 0)]
    rows += speed_studies.short_rows([speed_studies.ShortSetting(32, *kind, 2, 8, 1) for kind in kinds], 0)
    records = [measure("speed", row) for row in rows]
    scoring = scoring_table(records)
    assert [row[1] for row in scoring.rows] == ["exact", *speed_studies.SCORERS]
    assert scoring.rows[0][3] == "100.00 %"
    short = short_table(records)
    assert short.columns == ("", "n", "exact", "Exact()", "default")
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
    with pytest.raises(RuntimeError, match="output of hyper at n = 300 must match its reference"):
        speed.measure_setting(SETTING, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["--quick"], ["--n", "1024"], ["--n", "64", "--study", "top-k"]], ids=" ".join)
def test_the_command_runs_at_short_lengths(argv, tmp_path, capsys):
    small = ["--n-heads", "1", "--dim", "8", "--repeats", "1", "--memory", "system", "--no-backward"]
    if "--n" in argv:
        small += ["--study", "lengths", "--study", "decode"]
    assert main(["speed", *argv, *small, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "Attention, full, forward" in shown
    assert "One decode step" in shown
    records = read_records(tmp_path / "records.jsonl")
    assert {record.config["study"] for record in records} == {"lengths", "decode"}
    assert (tmp_path / "speed.png").exists()


def test_a_plan_is_every_study_at_its_lengths():
    base = dataclasses.replace(SETTING, exact_heads=4, heads=4, repeats=2)
    plan = SpeedPlan(base, [1024, 65536], caches=[256], short=[64])
    by_study = {}
    for row in plan.rows(3):
        by_study.setdefault(row.config["study"], []).append(row.config)
        assert row.seed == 3
    assert list(by_study) == ["lengths", "top-k", "clusters", "decode", "scoring", "short"]
    kinds = [(c["causal"], c["backward"], c["n"], c["exact_heads"]) for c in by_study["lengths"]]
    assert kinds == [
        (c, b, n, h) for c in (False, True) for b in (False, True) for n, h in ((1024, 4), (65536, 1))
    ]
    assert [(c["n"], c["top_k"]) for c in by_study["top-k"]] == [(32768, 2**power) for power in range(8, 14)]
    assert {(c["n"], c["causal"], c["backward"]) for c in by_study["clusters"]} == {(32768, False, False)}
    assert [c["n_clusters"] for c in by_study["clusters"]] == [8, 16, 32, 65, 128, 256]
    assert [(c["n"], c["top_k"], c["steps"]) for c in by_study["decode"]] == [(256, 32, 20)]
    assert [(c["n"], c["repeats"]) for c in by_study["scoring"]] == [(32768, 5)]
    assert len(by_study["short"]) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"studies": ["speed"]}, "--study must be one of .* got 'speed'"),
        ({"base": dataclasses.replace(SETTING, methods=("magic",))}, "scorer must be one of .* got 'magic'"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SpeedPlan(**{"base": SETTING, "lengths": [64], **changes})
