"""Every registered scorer keeps the contract, and the contract can be broken."""

from dataclasses import dataclass

import pytest
import torch

from prescore import KMeans, KMedian, Leverage, Minkowski
from prescore import testing as scorer_contract
from prescore.registry import _SCORERS, get_scorer, list_scorers, register_scorer
from prescore.scoring.base import Scorer, as_scorer
from prescore.testing import CONTRACT, check_scorer

BUILT_IN = [
    "companions",
    "gaussian-kmeans",
    "key-diff",
    "key-norm",
    "kmeans",
    "kmedian",
    "leverage",
    "minkowski",
    "uniform",
]


@pytest.fixture
def registered():
    """Names registered by a test disappear with it."""
    before = dict(_SCORERS)
    yield
    _SCORERS.clear()
    _SCORERS.update(before)


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", list_scorers())
def test_registered_scorer(name, check):
    check(as_scorer(name))


@pytest.mark.parametrize("rule", ["farthest", "cluster-share", "sensitivity", "balanced"])
def test_rules_keep_the_contract(rule):
    check_scorer(KMeans(rule=rule))


@pytest.mark.parametrize(
    "scorer",
    [
        Minkowski(p=1.5),
        Minkowski(p=3.0),
        Minkowski(p=0.5),
        KMeans(seeding="random"),
        KMeans(fit_size=40, n_clusters=4),
        KMedian(fit_size=40, n_clusters=4, normalize=False),
        Leverage(sketch_size=20),
        Leverage(noise=0.1),
        Leverage(normalize=True),
        KMeans(noise=0.1, max_iter=0),
    ],
    ids=str,
)
def test_options_keep_the_contract(scorer):
    check_scorer(scorer)


def test_names_and_files_agree():
    assert set(BUILT_IN) <= set(list_scorers())
    for name in BUILT_IN:
        assert get_scorer(name).__module__ == f"prescore.scoring.{name.replace('-', '_')}"


@pytest.mark.usefixtures("registered")
def test_a_third_party_scorer_is_one_class():
    @register_scorer("first-coordinate")
    @dataclass(frozen=True)
    class FirstCoordinate(Scorer):
        def score(self, keys, *, valid, streams):
            return keys[..., 0].clone()

    assert "first-coordinate" in list_scorers()
    check_scorer("first-coordinate")


def _register(name, function, **attributes):
    scorer = dataclass(frozen=True)(
        type(name, (Scorer,), {"score": lambda self, keys, *, valid, streams: function(keys), **attributes})
    )
    register_scorer(name)(scorer)
    return scorer()


def _overwritten(keys):
    scores = keys.sum(-1)
    keys.zero_()
    return scores


def _position(keys):
    return keys.sum(-1) + torch.arange(keys.shape[2])


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("function", "check", "message"),
    [
        (lambda k: k, scorer_contract.shapes_and_dtypes, r"\[B, H, N\]"),
        (lambda k: k[..., 0].to(torch.float32), scorer_contract.shapes_and_dtypes, "float64"),
        (lambda k: k.sum(-1) / k.norm(dim=-1), scorer_contract.finite_on_degenerate_keys, "zero keys"),
        (lambda k: torch.rand(k.shape[:3]), scorer_contract.same_seed_same_scores, "generator"),
        (_overwritten, scorer_contract.inputs_untouched, "write to the keys"),
        (lambda k: k.sum(-1) - k.mean(), scorer_contract.heads_and_rows_are_independent, "row 0, head 0"),
        (lambda k: k.sum(-1) / k.shape[2], scorer_contract.padding_changes_nothing, "alone and padded"),
        (_position, scorer_contract.permuting_keys_permutes_scores, "permuted keys"),
    ],
)
def test_each_check_can_fail(function, check, message):
    scorer = _register("broken", function)
    with pytest.raises(AssertionError, match=message):
        check(scorer)


def test_only_scorers_are_registered():
    class Duck:
        def score(self, keys, *, valid, streams):
            return keys.norm(dim=-1)

    with pytest.raises(TypeError, match=r"derived from prescore\.Scorer, got .*Duck"):
        register_scorer("duck")(Duck)
    assert "duck" not in list_scorers()
