"""The planted model and its study: a check reports what holds or breaks; no theorem is asserted."""

import dataclasses

import pytest
import torch

from prescore.bench.records import measure, row_key
from prescore.paper.planted import model as planted
from prescore.paper.planted import study, tables
from prescore.paper.planted.model import lewis_weights
from prescore.paper.planted.study import QUICK, Recovery, check, planted_rows, recovery
from prescore.registry import list_scorers


def draw(reading="small-noise", *, rotated=False, generator=0, **changes):
    settings = {"n": 600, "d": 8, "epsilon": 0.1, "c_signal": 0.05, "c_noise": 0.1, **changes}
    return planted.PlantedSetting(**settings).draw(reading, rotated=rotated, generator=generator)


def tiny_rows(**changes):
    few = {"n": (200,), "d": (4,), "powers": (2.0, 3.0), "n_queries": 16, "restarts": 1}
    return planted_rows(dataclasses.replace(QUICK, **{**few, **changes}))


@pytest.mark.parametrize("reading", planted.READINGS)
@pytest.mark.parametrize("rotated", [False, True])
def test_directions_are_orthonormal_and_those_of_the_signal(reading, rotated):
    model = draw(reading=reading, rotated=rotated)
    eye = torch.eye(8, dtype=torch.float64)
    torch.testing.assert_close(model.directions @ model.directions.mT, eye, atol=1e-12, rtol=0)  # QR in float64
    assert torch.equal(model.directions, eye) != rotated
    # a signal row points along its own direction more than along any other
    nearest = (model.keys[model.signal] @ model.directions.mT).argmax(-1) + 1
    assert (nearest == model.groups[model.signal]).double().mean() > 0.95


def test_rows_are_shuffled_and_seeded_and_readings_differ_in_norms_alone():
    assert not draw().signal[:80].all()
    assert torch.equal(draw().keys, draw().keys)
    assert not torch.equal(draw().keys, draw(generator=1).keys)
    unit, raw = draw(reading="normalized"), draw(reading="small-noise")
    assert torch.equal(unit.groups, raw.groups)
    torch.testing.assert_close(unit.keys, torch.nn.functional.normalize(raw.keys, dim=-1))
    torch.testing.assert_close(unit.keys.norm(dim=-1), torch.ones(600, dtype=torch.float64))
    # mean squared norm of 520 noise rows of 8 coordinates: relative deviation about sqrt(2 / 4160) = 0.02
    squared = raw.keys[~raw.signal].square().sum(-1).mean()
    assert float(squared) == pytest.approx(8 * 0.1 / (600 * 0.1), rel=0.1)


@pytest.mark.parametrize(("epsilon", "size"), [(1.0, 1), (0.5, 2), (0.3, 4), (0.1, 10), (0.02, 50), (1 / 3, 3)])
def test_group_size(epsilon, size):
    model = draw(epsilon=epsilon)
    assert torch.bincount(model.groups).tolist() == [600 - 8 * size, *[size] * 8]


@pytest.mark.parametrize(
    ("make", "changes", "said"),
    [
        (draw, {"n": 80}, r"n must be above d \* ceil\(1 / epsilon\) = 80, got 80"),
        (draw, {"epsilon": 1.5}, "epsilon must be at most 1, got 1.5"),
        (draw, {"epsilon": 0.0}, "epsilon must be finite and above 0.0, got 0.0"),
        (draw, {"reading": "both"}, "reading must be one of 'normalized', 'small-noise', got 'both'"),
        (draw, {"c_noise": 0.0}, "c_noise must be finite and above 0.0, got 0.0"),
        (tiny_rows, {"n": (200, 10)}, "n must be above"),
        (tiny_rows, {"methods": ("magic",)}, "method must be one of .*, got 'magic'"),
        (tiny_rows, {"rules": ("magic",)}, "rule must be one of .*, got 'magic'"),
        (tiny_rows, {"restarts": 0}, "restarts must be at least 1, got 0"),
        (planted.counterexample_keys, {"n": 200, "d": 8, "norm": -1.0}, "norm must be finite and above 0.0, got"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(make, changes, said):
    with pytest.raises(ValueError, match=said):
        make(**changes)


def test_counterexample_is_orthogonal_and_long():
    model = planted.counterexample_keys(200, 8, 100.0)
    assert int(model.signal.sum()) == 4
    assert len(torch.unique(model.keys, dim=0)) == 5
    assert planted.correlations(model) == (0.0, 0.0)
    assert set(model.keys[~model.signal].norm(dim=-1).tolist()) == {100.0}
    spread = planted.counterexample_keys(200, 8, 100.0, spread=0.5)
    norms = spread.keys[~spread.signal].norm(dim=-1)
    assert planted.correlations(spread) == (0.0, 0.0)
    assert 50 <= norms.min() < 60 < 140 < norms.max() <= 150


def test_the_sensitivity_at_two_is_the_leverage():
    keys = torch.randn(3, 40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = (keys @ torch.linalg.pinv(keys)).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(lewis_weights(keys, 2.0), expected)
    torch.testing.assert_close(lewis_weights(keys, 1.0)[1], lewis_weights(keys[1], 1.0))
    torch.testing.assert_close(planted.lp_sensitivities(keys[0], 2.0, generator=0), expected[0])
    deficient = torch.cat((keys, keys[..., :1]), dim=-1)
    torch.testing.assert_close(lewis_weights(deficient, 2.0), expected)


@pytest.mark.parametrize("p", [0.5, 1.0, 1.5, 3.0])
def test_lewis_weights_bound_the_sensitivities(p):
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(60, 4, dtype=torch.float64, generator=generator)
    keys[0] *= 20
    keys[5] = 0
    weights = lewis_weights(keys, p)
    assert float(weights.sum()) == pytest.approx(4, abs=1e-4)  # rank(K); the iteration stops short of the limit
    assert weights[5] == 0
    directions = torch.randn(4, 5000, dtype=torch.float64, generator=generator)
    powers = (keys @ directions).abs().pow(p)
    reached = (powers / powers.sum(0)).amax(-1)
    assert (reached <= weights * 4 ** max(0.0, p / 2 - 1) + 1e-6).all()
    assert int(weights.argmax()) == int(reached.argmax()) == 0
    # the search finds at least what 5000 random directions reach, and never more than the bound
    found = planted.lp_sensitivities(keys, p, generator=0)
    assert (found <= weights * 4 ** max(0.0, p / 2 - 1) + 1e-6).all()
    assert p < 1 or float((found >= 0.9 * reached).double().mean()) > 0.9  # below p = 1 the problem is not convex


def test_correlations_and_threshold_by_hand():
    keys = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 2.0]], dtype=torch.float64)
    groups = torch.tensor([1, 2, 0])
    model = planted.PlantedModel(keys, groups, torch.eye(2, dtype=torch.float64), 1.0, 0.1, 0.1)
    # inside S: 0.5 / min(1, 0.5); across: max(0, 1 / min(0.5, 4))
    assert planted.correlations(model) == (1.0, 2.0)
    claims = held(study.universal_set_claims(model, n_queries=4, seed=0), "measured")
    leverage = lewis_weights(keys, 2.0)[:2].min()
    assert claims["min signal leverage / rho"] == pytest.approx(float(leverage) * (1 + 1 * 2 + 4 * 3))


def test_polynomial_attention_and_heavy_recall_by_hand():
    query, key = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 5.0], [-1.0, 3.0], [0.0, 1.0]])
    assert planted.polynomial_attention(query, key, 2).tolist() == [pytest.approx([0.8, 0.2, 0.0])]
    assert planted.polynomial_attention(query, torch.zeros(3, 2), 2).sum() == 0
    attention = torch.tensor([[0.8, 0.2, 0.0], [0.1, 0.3, 0.6]])
    chosen = torch.tensor([True, False, False])
    assert planted.heavy_recall(attention, chosen, 0.25) == pytest.approx(1 / 3)
    assert planted.heavy_recall(attention, chosen, 0.9) is None


def test_queries_alternate_between_directions_and_anywhere():
    query = torch.nn.functional.normalize(planted.planted_queries(draw(), 100, generator=3), dim=-1)
    aligned = (query @ draw().directions.mT).amax(-1)
    assert aligned[1::2].mean() < 0.8 < aligned[::2].min()


def exact_model(n_noise=20, noise=0.0):
    """Two groups of two equal rows on the axes, and noise rows of a given size along (1, 1)."""
    signal = torch.eye(2, dtype=torch.float64).repeat_interleave(2, 0)
    keys = torch.cat((signal, torch.full((n_noise, 2), noise, dtype=torch.float64)))
    groups = torch.tensor([1, 1, 2, 2, *[0] * n_noise])
    return planted.PlantedModel(keys, groups, torch.eye(2, dtype=torch.float64), 0.5, 0.1, 0.1)


def held(claims, field="held"):
    return {claim["quantity"]: claim[field] for claim in claims}


@pytest.mark.parametrize(
    ("relation", "holds", "breaks"),
    [
        *(("<=", 1.0, 1.1), (">=", 1.0, 0.9), ("<", 0.9, 1.0)),
        *((">", 1.1, 1.0), ("=", 1.0, 0.99), ("within 4x of", 3.9, 4.1)),
    ],
)
def test_a_check_can_hold_and_can_break(relation, holds, breaks):
    found = [check("claim", "x", measured, relation, 1.0)["held"] for measured in (holds, breaks, float("nan"))]
    assert found == [True, False, False]


def test_leverage_claims_tell_separated_from_mixed():
    # noise rows without any length have leverage 0; the signal rows of a group share 1
    good = held(study.leverage_claims(exact_model(noise=1e-3)))
    ratio = "min signal leverage / max noise leverage"
    assert all(good[name] for name in ("min signal leverage / eps", ratio, "sigma_min^2 * eps"))
    bad = held(study.leverage_claims(exact_model(n_noise=2, noise=3.0)))
    assert not bad[ratio]
    assert not bad["delta_1"]  # rows of a group are parallel, whatever the noise


def test_recovery_of_the_truth_and_of_mistakes():
    model = exact_model(noise=0.01)
    assert recovery(model, model.groups) == (1.0, 1.0, 1.0)
    renamed = recovery(model, 2 - model.groups)
    assert renamed.groups == renamed.noise == 1.0
    rows = torch.arange(len(model.groups))
    assert recovery(model, model.groups.masked_fill(rows == 0, 0)).groups == 0.5
    assert recovery(model, model.groups.masked_fill((rows >= 4) & (rows < 14), 3)).noise == 0.5
    merged = recovery(model, torch.zeros_like(model.groups))
    assert merged.groups == 0.0
    assert merged.cost_ratio < 1


def test_a_cheaper_partition_than_the_truth_is_reported(monkeypatch):
    def claims_of(labels):
        monkeypatch.setattr(study, "best_recovery", lambda *_: recovery(far, labels))
        return study.clustering_claims(far, claim="Theorem 2", restarts=1, seed=0)

    far = exact_model(n_noise=40)
    far.keys[4:24] = torch.tensor([-5.0, 0.0])
    far.keys[24:] = torch.tensor([0.0, -5.0])
    labels = torch.tensor([0, 0, 0, 0, *[1] * 20, *[2] * 20])
    claims = claims_of(labels)
    names = ("cost of the truth / cost found", "signal groups that are one cluster")
    assert not any(held(claims)[name] for name in names)
    assert held(claims, "note")["noise rows in one cluster"] == "the truth is not optimal"
    assert held(claims_of(far.groups), "note")["cost of the truth / cost found"] == "none cheaper found, no proof"


def test_centroid_claims_see_a_shifted_group():
    model = exact_model()
    assert all(held(study.centroid_claims(model)).values())
    shifted = dataclasses.replace(model, keys=model.keys + 5.0)
    assert not any(held(study.centroid_claims(shifted)).values())


@pytest.mark.parametrize("p", [1.0, 3.0])
def test_the_lp_claim_needs_the_standard_basis(p):
    for basis in ("standard", "rotated"):
        model = draw(rotated=basis == "rotated", n=300, epsilon=0.2, c_signal=0.001, c_noise=0.01)
        found = held(study.lp_claims(model, p=p, basis=basis, seed=0))["Delta_min"]
        assert found == (basis == "standard")


@pytest.mark.parametrize(("raw", "normalized", "expected"), [(0.0, 1.0, True), (1.0, 0.0, False)])
def test_counterexample_claims_report_both_outcomes(raw, normalized, expected, monkeypatch):
    groups = iter((raw, normalized))
    monkeypatch.setattr(study, "best_recovery", lambda *_: Recovery(next(groups), 1.0, 1.0))
    claims = study.counterexample_claims(planted.counterexample_keys(100, 8), name="x", restarts=1, seed=0)
    quantities = ["signal rows isolated, raw keys", "signal rows isolated, normalised keys"]
    assert [held(claims)[quantity] for quantity in quantities] == [expected, expected]
    assert held(claims)["max(delta_1, delta_2)"]
    assert "only 5 different rows" in held(claims, "note")[quantities[0]]


def test_isolated_rows_of_a_latent_subspace():
    model = planted.latent_keys(200, 16, 0.01, generator=0)
    torch.testing.assert_close(model.keys.norm(dim=-1), torch.ones(200, dtype=torch.float64))
    assert int(model.signal.sum()) == 4
    claims = study.latent_claims(model, restarts=4, seed=0)
    assert all(
        held(claims)[quantity] for quantity in ("D_min / D_sep", "min signal leverage / rho", "|U| / (d / rho)")
    )
    # the distance that the correlations allow is met by the pair that has the largest one
    assert held(claims, "measured")["D_min / D_sep"] == pytest.approx(1.0, abs=0.05)
    crowded = dataclasses.replace(model, keys=model.keys[:1].expand(200, 16) + 1e-3 * model.keys)
    assert not any(held(study.distance_claims(crowded)).values())


def test_rows_of_two_variances_and_their_gap():
    model = planted.variance_keys(300, 16, 0.01, generator=0)
    energy = model.keys[:, :8].square().sum(-1)
    assert energy[model.signal].min() > 0.9
    assert energy[~model.signal].max() < 0.1
    assert int(model.signal.sum()) == 16
    far = held(study.gap_claims(planted.variance_keys(300, 16, 0.0, generator=0), ratio=0.0))
    assert all(far.values())  # rows in orthogonal halves
    assert not any(held(study.gap_claims(planted.variance_keys(300, 16, 1.0), ratio=0.0)).values())


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_the_universal_set_of_a_polynomial_kernel_holds_its_heavy_entries(degree):
    claims = study.kernel_claims(draw(n=100), degree=degree, n_queries=64, seed=0)
    assert held(claims, "measured")[f"recall of entries > eps/2, degree {degree}"] == 1
    rows = [row for row in tiny_rows(degrees=(2, 4)) if row.config.get("topic") == "leverage" and row.seed == 0]
    assert [row.config.get("degree", 2) for row in rows] == [2, 4, 2, 4]


def test_one_cluster_for_each_heavy_row():
    model = draw(n=60, d=4, epsilon=0.5, c_signal=0.4, c_noise=1e-6)
    assert (
        held(study.many_cluster_claims(model, seed=0), "measured")["signal rows that are clusters of their own"]
        > 0
    )
    unit = draw(reading="normalized", n=60, d=4, epsilon=0.5, c_signal=0.4, c_noise=1e-6)
    assert not held(study.many_cluster_claims(unit, seed=0))["noise rows in one cluster"]


def test_claims_that_must_hold():
    # a quadratic entry is at most the key's leverage: algebra, not a theorem of the paper
    model = draw(n=300, epsilon=0.2, c_signal=0.01, c_noise=0.01)
    assert held(study.universal_set_claims(model, n_queries=64, seed=0))["recall of entries > eps/2, degree 2"]
    # clusters that are far apart are found
    model = draw(n=60, d=4, epsilon=0.2, c_signal=1e-6, c_noise=1e-6)
    assert all(held(study.clustering_claims(model, claim="Theorem 2", restarts=8, seed=0)).values())


def test_rows_cover_every_scorer_and_share_what_does_not_depend_on_epsilon():
    rows = tiny_rows(epsilon=(0.1, 0.2))
    rows = list({row_key("planted", row.config, row.seed): row for row in rows}.values())
    methods = {row.config["method"].split(" ")[0] for row in rows if row.config["part"] == "recall"}
    assert methods >= set(list_scorers())
    assert {row.seed for row in rows} == {0, 1}
    topics = [row.config.get("topic") for row in rows if row.seed == 0]
    assert [topics.count(topic) for topic in ("singleton", "counterexample", "leverage")] == [2, 2, 4]


@pytest.mark.parametrize("name", ["kmeans", "leverage", "minkowski"])
def test_a_method_selects_exactly_its_budget(name):
    model = draw(n=200, d=4)
    options = {"rule": "farthest", "normalize": False, "p": 1.0}
    assert int(study.select_planted(model, name, options, 0).sum()) == 40


@pytest.fixture(scope="module")
def records():
    methods = ("kmeans", "key-norm", "uniform")
    rows = tiny_rows(n=(200, 300), powers=(2.0,), rules=("nearest", "farthest"), methods=methods, n_queries=8)
    return [measure("planted", row) for row in rows]


def test_recall_can_be_high_and_low(records):
    raw = {"part": "recall", "normalize": False, "reading": "small-noise"}
    found = [record for record in records if record.config.items() >= raw.items()]
    recall = {record.config["method"]: record.results["recall"].get("-") for record in found}
    assert recall["uniform"] < 0.6 < recall["key-norm"] == 1.0
    claims = [check for r in records if r.config["part"] == "claims" for check in r.results["checks"]]
    assert {check["held"] for check in claims} == {True, False}


def test_tables_have_methods_and_claims(records, tmp_path):
    settings = tables.recall_settings(records)
    assert [setting[0] for setting in settings] == [200, 300]
    table = tables.recall_table(records, settings[0])
    names = [("kmeans", "nearest"), ("kmeans", "farthest"), ("key-norm", "-"), ("uniform", "-")]
    assert [row[:2] for row in table.rows] == names
    assert all("±" in row[2] for row in table.rows)
    assert "n=200" in table.title
    table = tables.claim_table(records)
    claims = {"Lemma 1", "Lemma 2", "Theorem 1", "Theorem 2", "Corollary 1", "Claim 1, p=2, rotated"}
    claims |= {"Appendix B, as printed", "Appendix B, norms spread", "rho: S in U"}
    claims |= {"Appendix C, k = d m + 1", "Appendix D"}
    assert claims <= {row[0] for row in table.rows}
    verdicts = {cell.split()[0] for row in table.rows for cell in (row[5], row[7])}
    assert {"yes", "no"} <= verdicts <= {"yes", "no", "partly", "-"}
    both = [{"held": True, "measured": 1.0}, {"held": False, "measured": 3.0}]
    assert tables.verdict(both) == ("2 (1 to 3)", "partly 1/2")
    table = tables.probability_table(records)
    assert table.columns[2:] == ("n = 200", "n = 300", "eps = 0.1", "eps = 1", "all draws", "95 %")
    rows = {row[:2]: row[2:] for row in table.rows}
    lemma = ("Lemma 1, small-noise", "max noise leverage / eps <= 1")
    assert rows[lemma] == ("2/2", "2/2", "4/4", "-", "4/4", "51 to 100 %")
    corollary = ("Corollary 1, normalized", "signal groups that are one cluster = 1")
    assert rows[corollary] == ("0/2", "0/2", "-", "0/4", "0/4", "0 to 49 %")
    tables.planted_plot(records, settings[0], tmp_path / "planted.png")
    assert (tmp_path / "planted.png").read_bytes().startswith(b"\x89PNG")
