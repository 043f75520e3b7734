"""The paper's grids, scaled, and grids of options."""

import pytest
import torch

from prescore import Coupling, Hyper, Lsh, Routed, Selected, prescored_attention
from prescore.bench.language import grid
from prescore.bench.methods import EXACT, Baseline, local_only
from prescore.paper import grids as experiments
from prescore.paper.grids import COUPLINGS, Scale, experiment_methods


def configs(name, length, **options):
    """Methods with a configuration of the library, beside exact attention."""
    methods = experiment_methods(name, length, **options)
    return [(method, method.config) for method in methods if isinstance(method.config, Routed | Selected | Hyper)]


def top_k(config):
    """Keys kept, 0 where nothing is filtered out, as the paper counts."""
    return 0 if isinstance(config, Hyper) or config.top_k == 1.0 else config.top_k


def lsh(config):
    return config.lsh if isinstance(config, Hyper) else config.inner


def test_a_budget_of_half_the_length_filters_nothing():
    """So the grid may run it for one scorer: every other one gives the same output, which is HyperAttention's."""
    tensors = torch.randn(3, 1, 2, 64, 8, generator=torch.Generator().manual_seed(0))
    cells = [("kmeans", 0), *((name, 16384) for name in ("kmeans", "kmedian", "leverage", "gaussian-kmeans"))]
    configs = [Scale(64, leaf=8).paper(*cell, 8192).config for cell in (*cells, ("kmeans", 8192))]
    plain, *same, less = (prescored_attention(*tensors, config, is_causal=True, generator=1) for config in configs)
    for output in same:
        torch.testing.assert_close(output, plain)
    assert not torch.allclose(less, plain)


@pytest.mark.parametrize("share", [1, 8])
def test_appendix_a_is_the_papers_grid_at_a_share_of_its_length(share):
    length = experiments.PAPER_LENGTH // share
    found = configs("appendix-a", length)
    budgets = [0, *(count // share for count in (32, 128, 512, 2048, 8192, 16384))]
    assert {top_k(config) for _, config in found} == set(budgets)
    assert {method.axes["fraction"] for method, _ in found} == {budget / length for budget in budgets}
    assert {lsh(config).sample_size for _, config in found} == {0, 256 // share}
    assert {lsh(config).block_size for _, config in found} == {256 // share}
    assert {lsh(config).alignment for _, config in found} == {"rank"}
    assert {config.min_seq_len for _, config in found} == {4096 // share}
    assert {config.leaf_inclusive for _, config in found} == {False, True}
    # 4 scorers by 5 budgets by 2 by 2, and once for all scorers the rows that select nothing or everything
    assert len(found) == 4 * 5 * 4 + 4 + 4
    assert {config.sinks for _, config in found} == {0}
    assert {config.sinks for _, config in configs("appendix-a", length, sinks=4)} == {4}


def test_rows_of_table1_and_appendix_i():
    table1 = experiment_methods("table1", 8192)[2:]
    shapes = [(method.axes["paper_top_k"], method.axes["leaf_inclusive"]) for method in table1]
    assert shapes == [(0, False), (0, True), (2048, False), (8192, True)]
    assert {config.coupling for _, config in configs("appendix-i", 4096)} == {COUPLINGS["early"]}
    corrected = configs("appendix-i", 4096, coupling="corrected")
    assert {method.axes["coupling"] for method, _ in corrected} == {"corrected"}


def test_appendix_f_switches_one_artefact_at_a_time():
    for method, config in configs("appendix-f", 4096):
        own = Coupling() if isinstance(config, Hyper) else config.coupling
        assert own == COUPLINGS[method.axes["coupling"]]
    alone = [COUPLINGS[name] for name in ("zeroed keys", "residual by n", "overlap counted")]
    corrected = vars(COUPLINGS["corrected"]).items()
    assert [len(vars(coupling).items() - corrected) for coupling in alone] == [1, 1, 1]


def test_appendix_f_under_one_coupling():
    (_, without), *others = configs("appendix-f", 4096, coupling="blocks over all keys")
    assert isinstance(without, Hyper)
    assert [config.coupling.blocks for _, config in others] == ["all"] * 6


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_every_experiment_begins_with_its_two_references(name):
    methods = experiment_methods(name, 2048)
    own = {"baselines": experiments.READS_LEAF}
    assert methods[:2] == [EXACT, local_only(own.get(name, 256))]
    names = [repr(method.describe()) for method in methods]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("length", [4096, 8192])
def test_baselines_read_equally_many_keys(length):
    methods = {method.label: method.config for method in experiment_methods("baselines", length)[2:]}
    assert len(methods) == 17
    reads = {label: config.reads(length) for label, config in methods.items() if isinstance(config, Baseline)}
    draw = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, length, 8, generator=draw) for _ in range(2))
    for label in ("paper: leverage + Hyper", "HyperAttention", "leverage, 4 sinks", "random keys, 4 sinks"):
        _, aux = prescored_attention(query, key, key, methods[label], is_causal=True, generator=0, return_aux=True)
        reads[label] = aux.stats.keys_per_query
    # LSH blocks and residual samples overlap, and Reformer's chunks are counted before the causal mask
    assert all(0.88 * experiments.READS <= count <= experiments.READS + 1 for count in reads.values()), reads


def test_the_columns_of_appendix_a_can_be_run_one_at_a_time():
    methods = experiment_methods("appendix-a", 4096, scorers=["kmedian"])
    assert {method.axes.get("scorer", "none") for method in methods} == {"none", "kmedian"}
    with pytest.raises(ValueError, match=r"method must be one of .*, got 'uniform'"):
        experiment_methods("appendix-a", 4096, scorers=["uniform"])
    with pytest.raises(ValueError, match=r"experiment with methods must be one of .*, got 'table1'"):
        experiment_methods("table1", 4096, scorers=["kmeans"])


def test_lengths_stay_inside_what_was_trained():
    asked = ("appendix-a", 8192), ("table1", 8192), ("table1", 2048), ("baselines", 8192)
    assert [experiments.default_lengths(*one) for one in asked] == [[4096], [8192], [2048], [4096, 8192]]


def test_a_grid_has_every_method_at_every_budget_once():
    names = ["paper:kmeans", "key-diff", "default", "hyper", "exact", "key-diff"]
    methods = grid.grid_methods(names, 1024, top_k=[8, 16], changes={"lsh.sample_size": 4})
    by_label = {method.label: method.config for method in methods}
    budgets = [f"{name}, top {top_k}" for name in ("paper:kmeans", "key-diff") for top_k in (8, 16)]
    assert list(by_label) == ["exact", "local only", *budgets, "default", "hyper"]
    assert len(methods) == len(by_label)
    assert by_label["default"] == Routed()
    assert by_label["key-diff, top 8"] == Selected("key-diff", 8, min_seq_len=128)
    assert by_label["hyper"] == Hyper(Lsh(8, 4, alignment="rank"), min_seq_len=128)
    assert [method.label for method in grid.grid_methods((), 1024)[2:]] == list(grid.USUAL)
