"""Heavy-entry coverage: solved by hand, on both kinds of model, and by the command."""

import importlib.util
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from matplotlib.figure import Figure
from oracles.tiny_language_model import tiny_language_model

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("PIL") is None:
    pytest.skip("transformers or pillow is not installed", allow_module_level=True)

from prescore import KMeans, Selected, select
from prescore.bench.cli.main import main
from prescore.bench.records import Record, read_records, row_key
from prescore.bench.vision import coverage, tables
from prescore.bench.vision.coverage import attention_weights, coverage_rows, head_coverage, measure_coverage
from prescore.integrations.attention import AttentionContext

ALONE = AttentionContext(layer=0)


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
    # column sums 0.55 0.35 1.0 0.1: the two heaviest are 2 and 0, of which 0 is selected
    assert shares["columns"].item() == pytest.approx(1 / 2)
    assert shares["mass"].item() == pytest.approx((0.5 + 0.05 + 0.05 + 0.05) / 2)


def test_causal_and_grouped_heads():
    draw = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 4, 6, 8, generator=draw), torch.randn(2, 2, 6, 8, generator=draw)
    causal = AttentionContext(layer=0, is_causal=True)
    weights = attention_weights(query, key, causal)
    assert weights.shape == (2, 4, 6, 6)
    assert (weights.triu(1) == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 6))
    selected = torch.zeros(2, 2, 6, dtype=torch.bool)
    selected[:, 0, 0] = True
    shares = head_coverage(query, key, selected, causal, (0.01,))
    # heads 0 and 1 read the first KV head, whose first key is selected; heads 2 and 3 have no selected key
    assert (shares["mass"][:, :2] > 0.1).all()
    assert (shares["mass"][:, 2:] == 0).all()


def test_all_keys_cover_everything_and_random_keys_cover_chance():
    draw = torch.Generator().manual_seed(0)
    query, key = (torch.randn(40, 2, 50, 8, generator=draw) for _ in range(2))
    full = head_coverage(query, key, torch.ones(40, 2, 50, dtype=torch.bool), ALONE, (0.01, 0.1))
    assert all((values[~values.isnan()] == 1).all() for values in full.values())
    selected = torch.rand(40, 2, 50, generator=draw).argsort(-1) < 20
    some = head_coverage(query, key, selected, ALONE, (0.01,))
    # 80 heads of about 1000 heavy entries on 50 keys: the mean's standard error is below 0.01
    assert some["heavy_0.01"].mean().item() == pytest.approx(0.4, abs=0.04)
    assert some["columns"].mean().item() == pytest.approx(0.4, abs=0.05)


def test_selected_keys_are_the_selection():
    key = torch.randn(2, 3, 20, 8, generator=torch.Generator().manual_seed(0))
    selected = coverage.selected_keys(key, Selected(KMeans(n_clusters=3), 7, sinks=0), 5)
    assert (selected.sum(-1) == 7).all()
    assert selected.gather(-1, select(key, KMeans(n_clusters=3), top_k=7, sinks=0, generator=5).indices).all()


def test_observing_shows_the_keys_and_changes_nothing(study):
    model = study.model.model
    pixels, _ = next(study.images.batches(study.model.preprocessing, 4))
    keys = {}
    with torch.inference_mode():
        before = model(pixel_values=pixels).logits
        first = model.vit.layers[0]
        wanted = first.attention.k_proj(first.layernorm_before(model.vit.embeddings(pixels)))
        study.observe(lambda q, k, context: keys.setdefault(context.layer, k))
        assert torch.equal(model(pixel_values=pixels).logits, before)
    assert sorted(keys) == [0, 1]
    torch.testing.assert_close(keys[0].transpose(1, 2).flatten(2), wanted)


def test_language_models_work_too():
    model = tiny_language_model(max_positions=64)[0]
    texts = list(torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(0)))
    with torch.no_grad():
        before = model(texts[0][None]).logits
    observe = coverage.observe_texts(model, texts)
    results = coverage_rows(observe, {}, methods=("kmeans", "random"), budgets=(8,), n_clusters=(3,))[0].measure()
    # two sequences, two layers, four query heads
    assert (results["n_heads"], results["n_keys"]) == (2 * 2 * 4, 24)
    assert results["chance"] == pytest.approx(8 / 24)
    assert len(results["mass_layers"]) == 2
    assert 0 < results["heavy_0.01_mean"] < 1
    with torch.no_grad():
        assert torch.equal(model(texts[0][None]).logits, before)


def test_rows_of_a_vision_study(study):
    grid = {"methods": ("kmeans", "key-norm"), "budgets": (4, 8), "n_clusters": (2, 3), "seeds": (0, 1)}
    rows = coverage_rows(study.observe, study.described, n_prefix=1, **grid)
    methods = list({row_key("coverage", row.config, row.seed): row.config["method"] for row in rows}.values())
    assert (methods.count("kmeans"), methods.count("key-norm")) == (2 * 2 * 2, 2)
    results = rows[0].measure()
    assert (results["n_heads"], results["n_keys"]) == (10 * 2 * 3, 17)
    assert set(results) >= {"heavy_0.01_median", "heavy_0.1_mean", "heavy_0.3_without", "columns_mean", "chance"}
    empty = measure_coverage(study.observe, Selected("key-norm", 4, sinks=0), (1.0,))
    assert empty["heavy_1_mean"] is None
    assert empty["heavy_1_without"] == empty["n_heads"]


@pytest.mark.parametrize("keep_prefix", [True, False])
def test_a_protected_prefix_is_selected(keep_prefix, study, monkeypatch):
    selected = []
    real = coverage.selected_keys
    monkeypatch.setattr(coverage, "selected_keys", lambda *given: selected.append(real(*given)) or selected[-1])
    measure_coverage(study.observe, Selected("uniform", 3, sinks=0), (0.1,), keep_prefix=keep_prefix)
    assert all(keys[..., 0].all() for keys in selected) == keep_prefix


@pytest.mark.parametrize("name", ["exact", "centroids", r"kmeans\+centroids", "routed", "default"])
def test_methods_that_do_not_only_select_are_refused(name):
    with pytest.raises(ValueError, match=f"got '{name}'"):
        coverage_rows(None, {}, methods=(name.replace("\\", ""),))


def test_the_median_of_an_even_number_lies_between_the_middle_two():
    def observe(look):
        # every query of a head reads one key: the coverage of a head is all or nothing
        key = torch.eye(4)[None, None].expand(1, 2, 4, 4) * 9.0
        query = torch.stack([torch.eye(4)[[0] * 4], torch.eye(4)[[3] * 4]])[None] * 9.0
        look(query, key, ALONE)

    config = Selected("uniform", 1, sinks=1, remainder="none")
    results = measure_coverage(observe, config, (0.3,))
    # the first key is selected: it holds all heavy entries of one head and none of the other
    assert results["heavy_0.3_median"] == results["heavy_0.3_mean"] == 0.5


def test_command(model_folder, image_folder, tmp_path, capsys):
    argv = ["coverage", "--model", str(model_folder), "--images", str(image_folder), "--samples", "4"]
    assert main([*argv, "--out", str(tmp_path / "run"), "--method", "kmeans", "--method", "random"]) == 0
    assert "chance" in capsys.readouterr().out
    records = read_records(tmp_path / "run" / "records.jsonl")
    assert len(records) == 2
    assert (tmp_path / "run" / "coverage.png").stat().st_size > 1000
    assert tables.paper_coverage_table(records).rows == ()


def coverage_record(method, budget, covered):
    config = {"method": method, "n_clusters": None, "keep_prefix": False, "budget": budget, "thresholds": [0.3]}
    results = {"heavy_0.3_median": covered, "columns_mean": covered, "chance": budget / 197}
    return Record("coverage", f"{method}{budget}", config, 0, results, 1.0)


def test_equal_curves_do_not_hide_each_other(monkeypatch):
    panels = []

    @contextmanager
    def keep(path, size, **subplots):
        panels.extend(Figure().subplots(**subplots))
        yield None, panels

    monkeypatch.setattr(tables, "figure", keep)
    covered = {"kmeans": 0.0, "kmedian": 0.0, "leverage": 1.0, "key-diff": 1.0}
    budgets = (32, 64, 128)
    tables.coverage_plot([coverage_record(m, budget, covered[m]) for m in covered for budget in budgets], "")
    for panel in panels:
        curves = [line for line in panel.lines if line.get_label() != "chance"]
        points = [point for line in curves for point in zip(*line.get_data(), strict=True)]
        assert len(set(points)) == len(points) == 12
        # equal lines are drawn one above the other, further apart than they are wide
        heights = sorted({y for _, y in points})
        assert len(heights) == 4
        assert all(upper - lower > 2 for lower, upper in pairwise(heights))
        low, high = panel.get_ylim()
        assert low < 0 < 100 < high  # a line at either end is not cut in half
        assert list(panel.get_xticks()) == [32, 64, 128]
