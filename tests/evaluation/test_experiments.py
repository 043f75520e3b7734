"""The paper's grids, scaled."""

import pytest
import torch

from prescore import prescored_attention
from prescore.config import PrescoreConfig
from prescore.evaluation.experiments import (
    COUPLINGS,
    EXPERIMENTS,
    PAPER_LENGTH,
    Scale,
    default_leaf,
    default_lengths,
    experiment_methods,
)


def configs(name, scale, **options):
    found = [method for method in experiment_methods(name, scale, **options) if method.kind == "prescored"]
    return [(method, PrescoreConfig.from_dict(dict(method.settings))) for method in found]


def test_at_the_papers_length_the_counts_are_the_papers():
    scale = Scale(PAPER_LENGTH)
    assert (scale.leaf_size, scale.count(256), scale.count(2048)) == (4096, 256, 2048)
    kept = {config.top_k for _, config in configs("appendix-a", scale)}
    assert kept == {0, 32, 128, 512, 2048, 8192, 16384}


def test_a_budget_of_half_the_length_filters_nothing():
    """So the grid may run it for one scorer: every other one gives the same output, which is HyperAttention's."""
    query, key, value = torch.randn(3, 1, 2, 64, 8, generator=torch.Generator().manual_seed(0))
    scale = Scale(64, leaf=8)

    def output(scorer: str, top_k: int):
        config = PrescoreConfig.from_dict(dict(scale.prescored(scorer, top_k, 8192).settings))
        generator = torch.Generator().manual_seed(1)
        return prescored_attention(query, key, value, is_causal=True, config=config, generator=generator)

    plain = output("kmeans", 0)
    for scorer in ("kmeans", "kmedian", "leverage", "gaussian-kmeans"):
        torch.testing.assert_close(output(scorer, 16384), plain)
    assert not torch.allclose(output("kmeans", 8192), plain)


def test_appendix_a_at_an_eighth_is_the_grid_of_the_issue():
    found = configs("appendix-a", Scale(4096))
    assert {config.top_k for _, config in found} == {0, 4, 16, 64, 256, 1024, 2048}
    assert {config.sample_size for _, config in found} == {0, 32}
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
        assert config.coupling == COUPLINGS[method.axes["coupling"]]
    alone = [COUPLINGS[name] for name in ("zeroed keys", "residual by n", "overlap counted")]
    changed = [
        sum(getattr(coupling, field) != getattr(COUPLINGS["corrected"], field) for field in vars(coupling))
        for coupling in alone
    ]
    assert changed == [1, 1, 1]


def test_appendix_i_is_early_as_printed_and_can_be_corrected():
    early = {method.axes["coupling"] for method, config in configs("appendix-i", Scale(4096)) if config.top_k}
    assert early == {"early"}
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


def test_lengths_stay_inside_what_was_trained_but_for_longest():
    assert default_lengths("appendix-a", 8192) == [4096]
    assert default_lengths("table1", 8192) == [8192]
    assert default_lengths("table1", 2048) == [2048]
    assert default_lengths("longest", 8192) == [8192, 16384, 32768]
    with pytest.raises(ValueError, match=r"experiment must be one of .* got 'table9'"):
        experiment_methods("table9", Scale(4096))


def test_the_default_experiment_changes_nothing_but_the_rows():
    methods = experiment_methods("default", Scale(8192, default_leaf("default", 8192)))
    assert [method.label for method in methods[2:]] == [f"default, {rows} rows" for rows in (256, 512, 1024)]
    usual = PrescoreConfig().to_dict()
    for method in methods[2:]:
        changed = {name for name, value in method.settings.items() if value != usual[name]}
        assert changed <= {"rows"}
    assert methods[1].settings == {"leaf": 512}


def test_a_field_that_is_set_reaches_every_configuration_of_the_comparison():
    plain, changed = (
        [m for m in experiment_methods("cost", Scale(1024, overrides=fields)) if m.kind == "prescored"]
        for fields in ({}, {"n_projections": 5})
    )
    assert {m.settings["n_projections"] for m in plain} == {7}
    assert {m.settings["n_projections"] for m in changed} == {5}
    assert len(plain) == len(changed)
