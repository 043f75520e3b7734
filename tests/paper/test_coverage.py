"""Coverage of heavy entries, Appendix G."""

import itertools
import re

import pytest
import torch

from prescore import Selected
from prescore.bench.records import Record, row_key
from prescore.bench.vision.accuracy import Study
from prescore.bench.vision.models import load_vision_model, open_folder
from prescore.integrations.attention import AttentionContext
from prescore.paper import coverage
from prescore.paper.coverage import attention_weights, coverage_rows, head_coverage, measure_coverage

ALONE = AttentionContext(layer=0)


@pytest.fixture
def study(images):
    model, folder = images
    return Study(load_vision_model(model), open_folder(folder), {"model": "tiny"}, batch_size=4)


def test_a_case_solved_by_hand():
    """Two queries over four keys with known weights."""
    wanted = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.05, 0.85, 0.05]])
    query, key = torch.eye(2)[None, None], wanted.log().T[None, None].contiguous()
    context = AttentionContext(layer=0, scale=1.0)
    torch.testing.assert_close(attention_weights(query, key, context)[0, 0], wanted)
    selected = torch.tensor([[[True, False, False, True]]])
    shares = head_coverage(query, key, selected, context, (0.1, 0.2, 0.9))
    # above 0.1: keys 0, 1, 2 of the first query and 2 of the second; one of these four is selected
    assert shares["heavy_0.1"].item() == pytest.approx(1 / 4)
    assert shares["heavy_0.2"].item() == pytest.approx(1 / 3)
    assert shares["heavy_0.9"].isnan().item()
    # entries above 0.1 by column: 1 1 2 0; column 2, and 0 or 1 for the second place: 0 is selected
    assert shares["columns_0.1"].item() == pytest.approx(1 / 4)
    # above 0.2: 1 1 1 0, three columns for two places
    assert shares["columns_0.2"].item() == pytest.approx(1 / 3)
    assert shares["columns_0.9"].isnan().item()
    assert shares["mass"].item() == pytest.approx((0.5 + 0.05 + 0.05 + 0.05) / 2)


def test_causal_and_grouped_heads():
    draw = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 4, 6, 8, generator=draw), torch.randn(2, 2, 6, 8, generator=draw)
    causal = AttentionContext(layer=0, is_causal=True)
    weights = attention_weights(query, key, causal)
    assert (weights.triu(1) == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 6))
    selected = torch.zeros(2, 2, 6, dtype=torch.bool)
    selected[:, 0, 0] = True
    shares = head_coverage(query, key, selected, causal, (0.01,))
    # heads 0 and 1 read the first KV head, whose first key is selected; heads 2 and 3 have no selected key
    assert (shares["mass"][:, :2] > 0.1).all()
    assert (shares["mass"][:, 2:] == 0).all()


def test_rows_of_a_vision_study(study):
    grid = {"methods": ("kmeans", "key-norm"), "budgets": (4, 8), "n_clusters": (2, 3), "seeds": (0, 1)}
    rows = coverage_rows(study.observe, study.described, n_prefix=1, **grid)
    methods = list({row_key("coverage", row.config, row.seed): row.config["method"] for row in rows}.values())
    assert [methods.count(name) for name in grid["methods"]] == [2 * 2 * 2, 2]
    results = rows[0].measure()
    assert (results["n_heads"], results["n_keys"]) == (10 * 2 * 3, 17)
    assert set(results) >= {
        "heavy_0.01_median",
        "heavy_0.1_mean",
        "heavy_0.3_without",
        "columns_0.1_mean",
        "chance",
    }
    empty = measure_coverage(study.observe, Selected("key-norm", 4, sinks=0), (1.0,))
    assert (empty["heavy_1_mean"], empty["heavy_1_without"]) == (None, empty["n_heads"])


@pytest.mark.parametrize("keep_prefix", [True, False])
def test_a_protected_prefix_is_selected(keep_prefix, study, monkeypatch):
    selected = []
    real = coverage.membership
    monkeypatch.setattr(coverage, "membership", lambda *given: selected.append(real(*given)) or selected[-1])
    measure_coverage(study.observe, Selected("uniform", 3, sinks=0), (0.1,), keep_prefix=keep_prefix)
    assert all(keys[..., 0].all() for keys in selected) == keep_prefix
    # every image of a batch has draws of its own
    assert not any(torch.equal(one, other) for keys in selected for one, other in itertools.combinations(keys, 2))


@pytest.mark.parametrize("name", ["exact", "centroids", "kmeans+centroids", "routed", "default"])
def test_methods_that_do_not_only_select_are_refused(name):
    with pytest.raises(ValueError, match=f"got '{re.escape(name)}'"):
        coverage_rows(None, {}, methods=(name,))


def test_the_median_of_an_even_number_lies_between_the_middle_two():
    def observe(look):
        # every query of a head reads one key: the coverage of a head is all or nothing
        key = torch.eye(4)[None, None].expand(1, 2, 4, 4) * 9.0
        query = torch.stack([torch.eye(4)[[0] * 4], torch.eye(4)[[3] * 4]])[None] * 9.0
        look(query, key, ALONE)

    results = measure_coverage(observe, Selected("uniform", 1, sinks=1, remainder="none"), (0.3,))
    # the first key is selected: it holds all heavy entries of one head and none of the other
    assert results["heavy_0.3_median"] == results["heavy_0.3_mean"] == 0.5


def test_the_coverage_of_the_paper_stands_below_ours():
    names = (*(f"{what}_{eps}" for what in ("heavy", "columns") for eps in (0.01, 0.1, 0.3)), "mass")
    results = {f"{name}_{kind}": 0.25 for name in names for kind in ("median", "mean")}
    results |= {"chance": 32 / 197, "n_keys": 197}
    config = {
        "method": "kmeans",
        "n_clusters": 4,
        "keep_prefix": False,
        "budget": 32,
        "thresholds": [0.01, 0.1, 0.3],
    }
    record = Record("coverage", "a", config, 0, results, 1.0)
    ours, paper, *_ = coverage.coverage_table([record]).rows
    assert ours == ("kmeans, 4 clusters", "32", *["25 / 25"] * 3, "25 / 25 / 25", "25", "16.2")
    assert paper == ("paper: ViT-B/16, kmeans", "32", "22.57", "43.89", "43.83", "15.62", "-", "-")
    record.config["thresholds"] = [0.01]
    assert len(coverage.coverage_table([record]).rows) == 1  # the paper has other thresholds
