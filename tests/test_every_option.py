"""Every field of every configuration, part and scorer: another value changes the result, or is refused by name."""

import dataclasses
import inspect
import itertools
import json
import math
from functools import cache

import pytest
import torch
from oracles.inputs import attention_tensors

import prescore
from prescore import Coupling, Exact, Hyper, KMeans, Lsh, Routed, Selected, config, config_from_dict
from prescore.registry import get_scorer
from prescore.scoring.base import Scorer
from prescore.scoring.rules import RULES

MIN_SCORE = Selected("kmeans", min_score=-0.7, sinks=2, min_seq_len=16, remainder="none")
SCORERS = [get_scorer(name) for name in prescore.list_scorers()]
PARTS = {Lsh, Coupling}
TYPES = {*config.TYPES.values(), *PARTS, *SCORERS}
CLUSTERING = {"n_clusters": [None, 2, 3], "rule": list(RULES), "max_iter": [10, 0, 1], "normalize": [True, False]}
CLUSTERING |= {"noise": [0.0, 0.5], "seeding": ["k-means++", "random"], "fit_size": [None, 20, 40]}
LSH = Lsh(4, 5, 3)
LEAVES = {"min_seq_len": [16, 24, 40], "leaf_inclusive": [False, True]}
OF_ALL, COUNT = ("residual_weight", "blocks"), Coupling(overlap="count")
VALUES = {
    Routed: {
        "min_weight": [1 / 16, 1.0, 1 / 32],
        "cluster_size": [4, 2, 8],
        "chunk_size": [16, 8, 24],
        "sinks": [3, 0, 5],
        "exact_until": [0, 40, 70],
    },
    Selected: {
        "scorer": ["key-norm", "key-diff", "kmeans", KMeans(n_clusters=3)],
        "top_k": [12, 6, 0.5],
        "min_score": [None, -0.7, -0.6, -0.8],
        "selector": ["top", "sample"],
        "sinks": [2, 0, 5],
        "recent": [0, 3],
        "min_fraction": [0.0, 0.9],
        "remainder": ["none", "centroids", KMeans(n_clusters=2)],
        "inner": [Exact(), LSH, Lsh(6, 5, 3)],
        **LEAVES,
        "coupling": [Coupling(), Coupling("zero"), *(Coupling(**{name: "all"}) for name in OF_ALL), COUNT],
    },
    Hyper: {"lsh": [LSH, Lsh(6, 5, 3)], "sinks": [2, 0, 5], **LEAVES},
    Exact: {},
    Lsh: {
        "block_size": [4, 0, 8],
        "sample_size": [5, 0, 9],
        "n_projections": [3, 1, 6],
        "alignment": ["hash", "rank"],
    },
    Coupling: {
        "mask": ["exclude", "zero"],
        "residual_weight": ["selected", "all"],
        "overlap": ["exclude", "count"],
        "blocks": ["selected", "all"],
    },
    prescore.KMeans: CLUSTERING,
    prescore.KMedian: CLUSTERING,
    prescore.Minkowski: {**CLUSTERING, "p": [2.0, 0.5, 1.0, 3.0]},
    prescore.GaussianKMeans: {**CLUSTERING, "n_features": [128, 8, 32]},
    prescore.Leverage: {"sketch_size": [None, 16, 40], "normalize": [False, True], "noise": [0.0, 0.5]},
    prescore.KeyNorm: {},
    prescore.KeyDiff: {},
    prescore.Companions: {"n_tables": [8, 1, 2], "window": [128, 4, 16]},
    prescore.Uniform: {},
}
"""For every field some values, no two of which may give the same result."""

ROUTED = Routed(min_weight=1 / 16, cluster_size=4, chunk_size=16, sinks=3, exact_until=0)
BASES = {
    Routed: [ROUTED],
    Hyper: [Hyper(LSH, sinks=2, min_seq_len=16), Hyper(LSH.replace(alignment="rank"), min_seq_len=16)],
    Selected: [
        Selected("key-norm", 12, sinks=2, min_seq_len=16),
        Selected("key-norm", 12, sinks=2, min_seq_len=16, remainder="none"),
        Selected("key-norm", 12, sinks=2, min_seq_len=16, inner=LSH),
        Selected("key-norm", 12, sinks=2, min_seq_len=16, remainder="none", coupling=Coupling("zero")),
        Selected.paper("kmeans", 12, min_seq_len=16, inner=LSH.replace(alignment="rank")),
        Selected.early("kmeans", 12, min_seq_len=16, inner=LSH),
        MIN_SCORE,
    ],
    Lsh: [LSH, LSH.replace(alignment="rank")],
    Coupling: [Coupling(), Coupling("zero", "all", "count")],
    prescore.Companions: [prescore.Companions(window=16)],
}
"""Configurations in which every field of their type must do something, or be refused."""
CASES = [
    (base, name)
    for kind in sorted(TYPES, key=lambda kind: kind.__name__)
    for base in BASES.get(kind, [kind()])
    for name in VALUES[kind]
]
FIRST = [BASES.get(kind, [kind()])[0] for kind in sorted(TYPES, key=str)]
QUERY, KEY, VALUE = attention_tensors(batch=1, heads=2, kv_heads=1, n_keys=90, dim=8, seed=3)


@cache
def results(settings):
    """What a configuration, a part of one, or a scorer gives: with and without a causal mask, output and lse."""
    if isinstance(settings, Lsh):
        return results(Hyper(settings, min_seq_len=16)) + results(Selected.paper("key-norm", 12, inner=settings))
    if isinstance(settings, Coupling):
        return results(Selected.paper("key-norm", 12, min_seq_len=16, inner=LSH, coupling=settings))
    if isinstance(settings, Scorer):
        chosen = Selected(settings, 12, sinks=0, remainder="none", min_seq_len=16)
        return [prescore.score(KEY, settings), *results(chosen)]
    found = []
    for is_causal in (False, True):
        options = {"is_causal": is_causal, "generator": 5, "return_aux": True}
        output, aux = prescore.prescored_attention(QUERY, KEY, VALUE, settings, **options)
        found += [output, aux.lse]
    return found


def differ(one, other):
    return any(not torch.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in zip(one, other, strict=True))


def made(make, **fields):
    """What a function makes of some fields; where they are refused, the sentence."""
    try:
        return make(**fields)
    except ValueError as refusal:
        return str(refusal)


def outcomes(base, name):
    """The results of a field's values, by value; where one is refused, the sentence."""
    run = lambda **fields: results(type(base)(**fields))  # noqa: E731
    return {value: made(run, **{**vars(base), name: value}) for value in VALUES[type(base)][name]}


def test_every_type_and_every_field_has_a_row():
    assert set(config._Settings.__subclasses__()) == {*config.TYPES.values(), *PARTS}
    assert set(VALUES) == TYPES
    for kind in TYPES:
        assert list(VALUES[kind]) == [field.name for field in dataclasses.fields(kind)], kind
        assert all(len(values) > 1 for values in VALUES[kind].values()), kind


@pytest.mark.parametrize(("base", "name"), CASES, ids=str)
def test_another_value_changes_the_result_or_is_refused(base, name):
    found = outcomes(base, name)
    refusals = [outcome for outcome in found.values() if isinstance(outcome, str)]
    assert [refusal for refusal in refusals if name not in refusal] == [], "a refusal must name the field"
    ran = {value: outcome for value, outcome in found.items() if not isinstance(outcome, str)}
    for value, other in itertools.combinations(ran, 2):
        assert differ(ran[value], ran[other]), f"{name}={value!r} and {name}={other!r} give the same result"
    assert not isinstance(found.get(getattr(base, name)), str)


def test_every_field_does_something_somewhere():
    idle = {(type(base), name) for base, name in CASES}
    for base, name in CASES:
        if sum(not isinstance(outcome, str) for outcome in outcomes(base, name).values()) > 1:
            idle.discard((type(base), name))
    assert idle == set(), "these are refused in every configuration"


SELECT = ("scorer", "top_k", "sinks", "recent", "selector", "min_fraction")


@pytest.mark.parametrize("name", SELECT)
def test_every_option_of_select_changes_the_selection(name):
    others = {"key", "key_padding_mask", "generator"}
    assert set(SELECT) == set(inspect.signature(prescore.select).parameters) - others
    found = [prescore.select(KEY, **{"top_k": 12, name: value}).indices for value in VALUES[Selected][name]]
    for one, other in itertools.combinations(found, 2):
        assert not torch.equal(one, other)


def in_a_config(settings):
    """A configuration that contains a part or a scorer, and the field that holds it."""
    if isinstance(settings, Lsh):
        return Hyper(settings), "lsh"
    if isinstance(settings, Coupling):
        return Selected.paper(inner=LSH, coupling=settings), "coupling"
    return (Selected(settings), "scorer") if isinstance(settings, Scorer) else (settings, None)


@pytest.mark.parametrize(("base", "name"), CASES)
def test_replace_and_dictionaries_give_the_same_configuration(base, name):
    for value in VALUES[type(base)][name]:
        direct = made(type(base), **{**vars(base), name: value})
        assert isinstance(base, Scorer) or made(base.replace, **{name: value}) == direct
        if isinstance(direct, str) or isinstance(made(in_a_config, settings=direct), str):
            continue
        full, _ = in_a_config(direct)
        values = full.to_dict()
        assert values["type"] == type(full).__name__
        again = config_from_dict(json.loads(json.dumps(values)))
        assert (again, hash(again), again.to_dict()) == (full, hash(full), values)


@pytest.mark.parametrize("base", FIRST, ids=str)
def test_unknown_fields_are_refused_with_a_hint(base):
    (full, part), known = in_a_config(base), VALUES[type(base)]
    for name in known or ["nothing"]:
        typo = name[:-1] + 2 * name[-1]
        hint = f".*, got '{typo}' .did you mean '{name}'" if known else f"none, got '{typo}'"
        message = f"{type(base).__name__} must have fields among {hint}"
        values = full.to_dict()
        (values[part] if part else values)[typo] = 1
        with pytest.raises(TypeError, match=message):
            type(base)(**{typo: 1})
        with pytest.raises(ValueError, match=message):
            config_from_dict(values)
        if not isinstance(base, Scorer):
            with pytest.raises(ValueError, match=message):
                base.replace(**{typo: 1})


WRONG = {
    bool: {1: TypeError, "no": TypeError, None: TypeError},
    int: {True: TypeError, 2.5: TypeError, "x": TypeError, -1: ValueError},
    float: {True: TypeError, "x": TypeError, math.nan: ValueError, math.inf: ValueError},
    str: {"?": ValueError},
}
"""What is refused by every field whose values are of a type; an object of ours must be one."""


@pytest.mark.parametrize("base", FIRST, ids=str)
def test_wrong_values_are_refused_by_the_name_of_the_field(base):
    for name, values in VALUES[type(base)].items():
        usual = next(value for value in values if value is not None)
        for wrong, error in WRONG.get(type(usual), {"x": TypeError, None: TypeError}).items():
            if (name, wrong) == ("top_k", 2.5):  # a fraction, and too large
                continue
            fields = {"top_k": None, name: wrong} if name == "min_score" else {name: wrong}
            with pytest.raises(error, match=rf"^[^\n]*{name} must [^\n]*got (\w+ )?'?{wrong}'?[^\n]*$"):
                type(base)(**fields)
