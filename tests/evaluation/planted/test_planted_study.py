"""The study's checkers report a break where one is built in and a success where one is; no theorem is asserted."""

import dataclasses

import pytest
import torch
from planted_sweep import run_sweep

from prescore.bench.planted import model as planted
from prescore.bench.planted import study as checks
from prescore.bench.planted.study import QUICK, PlantedMethod, Sweep, best_recovery, rows
from prescore.bench.records import row_key
from prescore.registry import list_scorers

TINY = dataclasses.replace(QUICK, n=(200,), d=(4,), seeds=(0, 1), powers=(2.0, 3.0), n_queries=16, restarts=1)


def exact_model(n_noise=20, noise=0.0):
    """Two groups of two equal rows on the axes, and noise rows of a given size along (1, 1)."""
    signal = torch.eye(2, dtype=torch.float64).repeat_interleave(2, 0)
    keys = torch.cat((signal, torch.full((n_noise, 2), noise, dtype=torch.float64)))
    groups = torch.tensor([1, 1, 2, 2, *[0] * n_noise])
    return planted.PlantedModel(keys, groups, torch.eye(2, dtype=torch.float64), 0.5, 0.1, 0.1, "small-noise")


def by_quantity(found):
    return {check.quantity: check for check in found}


@pytest.mark.parametrize(
    ("relation", "holds", "breaks"),
    [
        ("<=", 1.0, 1.1),
        (">=", 1.0, 0.9),
        ("<", 0.9, 1.0),
        (">", 1.1, 1.0),
        ("=", 1.0, 0.99),
        ("within 4x of", 3.9, 4.1),
    ],
)
def test_a_check_can_hold_and_can_break(relation, holds, breaks):
    assert checks.Check("claim", "x", holds, relation, 1.0).held
    assert not checks.Check("claim", "x", breaks, relation, 1.0).held
    assert not checks.Check("claim", "x", float("nan"), relation, 1.0).held


def test_leverage_checks_tell_separated_from_mixed():
    # noise rows without any length have leverage 0; the signal rows of a group share 1
    good = by_quantity(checks.leverage_checks(exact_model(noise=1e-3)))
    assert good["min signal leverage / eps"].held
    assert good["min signal leverage / max noise leverage"].held
    assert good["sigma_min^2 * eps"].held
    bad = by_quantity(checks.leverage_checks(exact_model(n_noise=2, noise=3.0)))
    assert not bad["min signal leverage / max noise leverage"].held
    assert not bad["delta_1"].held  # rows of a group are parallel, whatever the noise


def test_recovery_of_the_truth_and_of_mistakes():
    model = exact_model(noise=0.01)
    perfect = checks.recovery(model, model.groups)
    assert (perfect.groups, perfect.noise, perfect.cost_ratio) == (1.0, 1.0, 1.0)
    renamed = checks.recovery(model, 2 - model.groups)
    assert renamed.groups == renamed.noise == 1.0
    mixed = model.groups.clone()
    mixed[0] = 0
    assert checks.recovery(model, mixed).groups == 0.5
    split = model.groups.clone()
    split[4:14] = 3
    assert checks.recovery(model, split).noise == 0.5
    merged = torch.zeros_like(model.groups)
    assert checks.recovery(model, merged).groups == 0.0
    assert checks.recovery(model, merged).cost_ratio < 1


def test_a_cheaper_partition_than_the_truth_is_reported():
    model = exact_model(n_noise=40, noise=0.0)
    keys = model.keys.clone()
    keys[4:24] = torch.tensor([-5.0, 0.0], dtype=torch.float64)
    keys[24:] = torch.tensor([0.0, -5.0], dtype=torch.float64)
    far = dataclasses.replace(model, keys=keys)
    labels = torch.tensor([0, 0, 0, 0, *[1] * 20, *[2] * 20])
    found = by_quantity(checks.clustering_checks(checks.recovery(far, labels), "Theorem 2"))
    assert not found["cost of the truth / cost found"].held
    assert not found["signal groups that are one cluster"].held
    assert found["noise rows in one cluster"].note == "the truth is not optimal"
    unrefuted = by_quantity(checks.clustering_checks(checks.recovery(far, far.groups), "Theorem 2"))
    assert unrefuted["cost of the truth / cost found"].note == "none cheaper found, no proof"


def test_centroid_checks_see_a_shifted_group():
    good = checks.centroid_checks(exact_model())
    assert all(check.held for check in good)
    model = exact_model()
    shifted = dataclasses.replace(model, keys=model.keys + 5.0)
    assert not any(check.held for check in checks.centroid_checks(shifted))


def test_lp_claim_needs_the_standard_basis():
    settings = planted.PlantedSetting(300, 8, 0.2, 0.001, 0.01)
    perfect = checks.Recovery(1.0, 1.0, 1.0)
    for p in (1.0, 3.0):
        standard = settings.draw("small-noise", generator=0)
        rotated = settings.draw("small-noise", rotated=True, generator=0)
        assert by_quantity(checks.lp_checks(standard, perfect, p, "standard"))["Delta_min"].held
        assert not by_quantity(checks.lp_checks(rotated, perfect, p, "rotated"))["Delta_min"].held


def test_counterexample_checks_report_both_outcomes():
    model = planted.counterexample_keys(100, 8)
    lost, kept = checks.Recovery(0.0, 1.0, 1.0), checks.Recovery(1.0, 1.0, 1.0)
    assert all(check.held for check in checks.counterexample_checks(model, lost, kept, "x"))
    broken = by_quantity(checks.counterexample_checks(model, kept, lost, "x"))
    assert not broken["signal rows isolated, raw keys"].held
    assert not broken["signal rows isolated, normalised keys"].held
    assert "only 5 different rows" in broken["signal rows isolated, raw keys"].note


def test_universal_set_covers_heavy_entries_of_quadratic_attention():
    # a quadratic entry is at most the key's leverage: algebra, not a theorem of the paper
    model = planted.PlantedSetting(300, 8, 0.2, 0.01, 0.01).draw("small-noise", generator=0)
    found = by_quantity(checks.universal_set_checks(model, n_queries=64, seed=0))
    assert found["recall of entries > eps/2, degree 2"].held


def test_clustering_finds_groups_that_are_far_apart():
    model = planted.PlantedSetting(60, 4, 0.2, 1e-6, 1e-6).draw("small-noise", generator=0)
    found = best_recovery(model, 8, 0)
    assert found.groups == found.noise == 1.0
    with pytest.raises(ValueError, match="restarts must be at least 1, got 0"):
        best_recovery(model, 0, 0)


def test_rows_are_unique_and_cover_every_scorer():
    found = rows(TINY)
    keys = [row_key("planted", row.config, row.seed) for row in found]
    assert len(keys) == len(set(keys))
    named = {row.config["method"].split(" ")[0] for row in found if row.config["part"] == "recall"}
    assert named >= set(list_scorers())
    assert {row.seed for row in found} == {0, 1}


def test_two_epsilons_share_the_rows_that_do_not_depend_on_it():
    both = rows(dataclasses.replace(TINY, epsilon=(0.1, 0.2)))
    topics = [row.config.get("topic") for row in both if row.seed == 0]
    assert topics.count("singleton") == 2
    assert topics.count("counterexample") == 2
    assert topics.count("leverage") == 4


def test_study_measures_recall_that_can_be_high_and_low():
    records = run_sweep(dataclasses.replace(TINY, methods=("key-norm", "uniform"), seeds=(0,)))
    recall = {
        (record.config["method"], record.config["reading"]): record.figures["recall"]["-"]
        for record in records
        if record.config["part"] == "recall" and record.config["normalize"] is False
    }
    assert recall["key-norm", "small-noise"] == 1.0
    assert recall["uniform", "small-noise"] < 0.6
    verdicts = {check["held"] for r in records if r.config["part"] == "claims" for check in r.figures["checks"]}
    assert verdicts == {True, False}
    assert all(record.key and record.seconds >= 0 for record in records)


def test_choosing_keeps_exactly_the_budget():
    model = planted.PlantedSetting(200, 4, 0.1, 0.05, 0.1).draw("small-noise", generator=0)
    for name in ("kmeans", "leverage", "lp-sensitivity"):
        method = PlantedMethod(name, 1.0, "small-noise", False)
        assert int(method.choose(model, method.rules(("farthest",))[0], 0, 0).sum()) == 40
    assert Sweep().seeds == tuple(range(10))


def test_bad_settings_are_refused_before_anything_runs():
    with pytest.raises(ValueError, match="n must be above"):
        rows(dataclasses.replace(TINY, n=(200, 10)))
    with pytest.raises(ValueError, match=r"method must be one of .*, got 'magic'"):
        rows(dataclasses.replace(TINY, methods=("magic",)))
