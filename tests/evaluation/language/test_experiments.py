"""The paper's grids, scaled."""

import pytest
import torch

from prescore import Coupling, Exact, Hyper, Lsh, Routed, Selected, prescored_attention
from prescore.bench.language.experiments import (
    COUPLINGS,
    EXPERIMENTS,
    PAPER_LENGTH,
    MethodChoice,
    Scale,
    default_leaf,
    default_lengths,
    experiment_methods,
)
from prescore.bench.language.methods import asked_for


def configs(name, scale, **options):
    found = [method for method in experiment_methods(name, scale, **options) if method.kind == "prescored"]
    return [(method, method.config) for method in found]


def top_k(config):
    """Keys kept, 0 where nothing is filtered out, as the paper counts."""
    return 0 if isinstance(config, Hyper) or config.top_k == 1.0 else config.top_k


def lsh(config):
    return config.lsh if isinstance(config, Hyper) else config.inner


def test_at_the_papers_length_the_counts_are_the_papers():
    scale = Scale(PAPER_LENGTH)
    assert (scale.leaf_size, scale.count(256), scale.count(2048)) == (4096, 256, 2048)
    kept = {top_k(config) for _, config in configs("appendix-a", scale)}
    assert kept == {0, 32, 128, 512, 2048, 8192, 16384}


def test_a_budget_of_half_the_length_filters_nothing():
    """So the grid may run it for one scorer: every other one gives the same output, which is HyperAttention's."""
    query, key, value = torch.randn(3, 1, 2, 64, 8, generator=torch.Generator().manual_seed(0))
    scale = Scale(64, leaf=8)

    def output(scorer: str, top_k: int):
        config = scale.prescored(scorer, top_k, 8192).config
        generator = torch.Generator().manual_seed(1)
        return prescored_attention(query, key, value, is_causal=True, config=config, generator=generator)

    plain = output("kmeans", 0)
    for scorer in ("kmeans", "kmedian", "leverage", "gaussian-kmeans"):
        torch.testing.assert_close(output(scorer, 16384), plain)
    assert not torch.allclose(output("kmeans", 8192), plain)


def test_appendix_a_at_an_eighth_is_the_grid_of_the_issue():
    found = configs("appendix-a", Scale(4096))
    assert {top_k(config) for _, config in found} == {0, 4, 16, 64, 256, 1024, 2048}
    assert {lsh(config).sample_size for _, config in found} == {0, 32}
    assert {lsh(config).block_size for _, config in found} == {32}
    assert {lsh(config).alignment for _, config in found} == {"rank"}
    assert {config.min_seq_len for _, config in found} == {512}
    assert {config.leaf_inclusive for _, config in found} == {False, True}
    # 4 scorers by 5 budgets by 2 by 2, and once for all scorers the rows that select nothing or everything
    assert len(found) == 4 * 5 * 4 + 4 + 4
    assert {config.sinks for _, config in found} == {0}
    assert {config.sinks for _, config in configs("appendix-a", Scale(4096, sinks=4))} == {4}
    assert {method.axes["fraction"] for method, _ in found} == {
        0,
        4 / 4096,
        16 / 4096,
        1 / 64,
        1 / 16,
        1 / 4,
        1 / 2,
    }


def test_table1_is_five_rows_and_the_floor():
    methods = experiment_methods("table1", Scale(8192))
    assert [method.kind for method in methods] == ["exact", "local"] + ["prescored"] * 4
    shapes = [(m.axes["paper_top_k"], m.axes["blockwise"]) for m in methods[2:]]
    assert shapes == [(0, False), (0, True), (2048, False), (8192, True)]


def test_appendix_f_switches_one_artefact_at_a_time():
    for method, config in configs("appendix-f", Scale(4096)):
        own = Coupling() if isinstance(config, Hyper) else config.coupling
        assert own == COUPLINGS[method.axes["coupling"]]
    alone = [COUPLINGS[name] for name in ("zeroed keys", "residual by n", "overlap counted")]
    changed = [
        sum(getattr(coupling, field) != getattr(COUPLINGS["corrected"], field) for field in vars(coupling))
        for coupling in alone
    ]
    assert changed == [1, 1, 1]


def test_appendix_i_is_early_as_printed_and_can_be_corrected():
    early = configs("appendix-i", Scale(4096))
    assert {method.axes["coupling"] for method, _ in early} == {"early"}
    assert {config.coupling for _, config in early} == {COUPLINGS["early"]}
    fixed = configs("appendix-i", Scale(4096), coupling="corrected")
    assert {method.axes["coupling"] for method, _ in fixed} == {"corrected"}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_begins_with_its_two_references(name):
    methods = experiment_methods(name, Scale(2048))
    assert [method.kind for method in methods[:2]] == ["exact", "local"]
    assert methods[1].settings == {"leaf": 256}
    names = [repr(method.describe()) for method in methods]
    assert len(set(names)) == len(names)


def test_cost_compares_all_baselines_at_every_budget():
    methods = experiment_methods("cost", Scale(4096))[2:]
    series = {}
    for method in methods:
        series.setdefault(method.axes["series"], []).append(method.axes["budget"])
    assert set(series) >= {"random + sinks", "key-norm + sinks", "key-diff + sinks", "lev-attention", "streaming"}
    assert set(series) >= {"heavy-hitters", "HyperAttention", "oracle", "default", "paper: k-means + Hyper"}
    groups = {method.axes["series"]: method.axes["group"] for method in methods}
    assert [name for name, group in groups.items() if group is None] == ["default"]
    assert groups["oracle"] == groups["heavy-hitters"] == "sees the queries first"
    assert all(budgets == [32, 64, 128, 256, 512, 1024] for budgets in series.values())


def test_a_budget_changes_nothing_of_the_default_but_its_rows():
    found = [m for m in experiment_methods("cost", Scale(4096)) if m.axes.get("series") == "default"]
    assert [method.config for method in found] == [
        Routed(min_weight=1 / (2 * method).axes["budget"], chunk_size=512, exact_until=512) for method in found
    ]
    assert len(found) == 6


def test_lengths_stay_inside_what_was_trained_but_for_longest():
    assert default_lengths("appendix-a", 8192) == [4096]
    assert default_lengths("table1", 8192) == [8192]
    assert default_lengths("table1", 2048) == [2048]
    assert default_lengths("longest", 8192) == [8192, 16384, 32768]
    with pytest.raises(ValueError, match=r"experiment must be one of .* got 'table9'"):
        experiment_methods("table9", Scale(4096))


def test_the_budgets_of_the_default_change_nothing_but_the_rows():
    methods = experiment_methods("rows", Scale(8192, default_leaf("rows", 8192)))
    assert [method.label for method in methods[2:]] == [f"default, {rows} rows" for rows in (256, 512, 1024)]
    usual = Routed().to_dict()
    for method in methods[2:]:
        changed = {name for name, value in method.settings.items() if value != usual[name]}
        assert changed <= {"rows"}
    assert methods[1].settings == {"leaf": usual["chunk_size"]}


def test_a_field_that_is_set_reaches_every_configuration_that_has_it():
    fields = {"lsh.n_projections": 5, "inner.n_projections": 5, "tolerance": 0.5}
    plain, set_ = (
        [m.config for m in experiment_methods("cost", Scale(1024, overrides=overrides)) if m.kind == "prescored"]
        for overrides in ({}, fields)
    )
    assert len(plain) == len(set_)
    for before, after in zip(plain, set_, strict=True):
        assert type(before) is type(after)
        if isinstance(after, Routed):
            assert (before.tolerance, after.tolerance) == (None, 0.5)
        elif isinstance(lsh(after), Lsh):
            assert (lsh(before).n_projections, lsh(after).n_projections) == (7, 5)
        else:
            assert isinstance(after.inner, Exact)
            assert before == after
    assert {type(config) for config in plain} == {Routed, Selected, Hyper}


def test_a_field_that_no_configuration_has_is_refused():
    with pytest.raises(ValueError, match=r"got 'block_size' \(did you mean '(inner|lsh)\.block_size'\?\)"):
        experiment_methods("cost", Scale(1024, overrides={"block_size": 5}))
    with pytest.raises(ValueError, match=r"^Hyper or Selected must have fields among .* got 'tolerance'"):
        experiment_methods("table1", Scale(1024, overrides={"tolerance": 0.5}))


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("sinks", [0, 3])
def test_without_a_selection_only_residual_and_overlap_differ(coupling, sinks):
    """HyperAttention, or a selection of every key where an artefact asks for one: the keys are the same."""
    query, key, value = torch.randn(3, 1, 2, 64, 8, generator=torch.Generator().manual_seed(0))
    config = Scale(64, leaf=8, sinks=sinks).prescored("kmeans", 0, 8192, coupling=coupling).config
    plain = Hyper(Lsh(1, 16, alignment="rank"), sinks, 8)
    got, wanted = (
        prescored_attention(query, key, value, one, is_causal=True, generator=1) for one in (config, plain)
    )
    changes_something = coupling in ("overlap counted", "early") or (coupling == "residual by n" and sinks)
    assert torch.allclose(got, wanted, atol=1e-6) != bool(changes_something)


@pytest.mark.parametrize("length", [512, 8192])
def test_without_a_leaf_the_default_is_left_as_it_is(length):
    names = ("default", "kmeans")
    untouched, *_ = (method.config for method in MethodChoice(names=names).methods(length)[2:])
    assert untouched == Routed()
    changed, other = (m.config for m in MethodChoice(names=names, leaf=64).methods(length)[2:])
    assert changed == Routed(chunk_size=64, exact_until=64)
    assert other.min_seq_len == 64
    assert asked_for("default", length=length, leaf=None, overrides={"rows": 64}).config == Routed(
        min_weight=1 / 128
    )
    assert asked_for("kmeans", length=length, leaf=None).config.min_seq_len == length // 8
    with pytest.raises(ValueError, match=r"method must be one of .* got 'flash'"):
        asked_for("flash", length=length, leaf=None)
