"""Heavy-entry coverage: solved by hand, on both kinds of model, and by the command."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

from prescore import KMeans, Selected, select
from prescore.bench.cli.main import main
from prescore.bench.records import read_records
from prescore.bench.vision.accuracy import Study
from prescore.bench.vision.coverage import (
    CoverageGrid,
    TextSubject,
    VisionSubject,
    attention_weights,
    coverage_rows,
    head_coverage,
    kept_keys,
    measure_coverage,
)
from prescore.bench.vision.models import Digits, load_vision_model
from prescore.bench.vision.tables import paper_coverage_table
from prescore.integrations.apply import observe
from prescore.integrations.attention import AttentionContext
from prescore.integrations.torchvision import mend_torchvision

ALONE = AttentionContext(layer=0)


def tiny_vit(folder):
    mend_torchvision()
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = ViTForImageClassification(ViTConfig(**shape, image_size=8, patch_size=2, num_channels=1, num_labels=3))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    model.save_pretrained(folder)
    return load_vision_model(folder)


def tiny_llama():
    mend_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=32, vocab_size=50)).eval()


def tokens(n=2, length=24):
    return torch.randint(50, (n, length), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def vision_subject(tmp_path):
    images = Digits(torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2]))
    return VisionSubject(Study(tiny_vit(tmp_path / "model"), images, {"model": "tiny"}, batch_size=2))


def by_hand():
    """Two queries over four keys with known weights: 0.5 0.3 0.15 0.05, and 0.05 0.05 0.85 0.05."""
    weights = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.05, 0.85, 0.05]])
    return torch.eye(2)[None, None], weights.log().T[None, None].contiguous()


def test_a_case_solved_by_hand():
    query, key = by_hand()
    context = AttentionContext(layer=0, scale=1.0)
    torch.testing.assert_close(
        attention_weights(query, key, context)[0, 0, 0], torch.tensor([0.5, 0.3, 0.15, 0.05])
    )
    kept = torch.tensor([[[True, False, False, True]]])
    found = head_coverage(query, key, kept, context, (0.1, 0.2, 0.9))
    # above 0.1: keys 0, 1, 2 of the first query and 2 of the second; of these four only one is on a kept key
    assert found["heavy_0.1"].item() == pytest.approx(1 / 4)
    assert found["heavy_0.2"].item() == pytest.approx(1 / 3)
    assert found["heavy_0.9"].isnan().item()
    # column sums 0.55 0.35 1.0 0.1: the two heaviest are 2 and 0, of which 0 is kept
    assert found["columns"].item() == pytest.approx(1 / 2)
    assert found["mass"].item() == pytest.approx((0.5 + 0.05 + 0.05 + 0.05) / 2)


def test_causal_and_grouped_heads():
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 6, 8, generator=draw)
    key = torch.randn(2, 2, 6, 8, generator=draw)
    causal = AttentionContext(layer=0, is_causal=True)
    weights = attention_weights(query, key, causal)
    assert weights.shape == (2, 4, 6, 6)
    assert (weights.triu(1) == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 6))
    kept = torch.zeros(2, 2, 6, dtype=torch.bool)
    kept[:, 0, 0] = True
    found = head_coverage(query, key, kept, causal, (0.01,))
    # heads 0 and 1 read the first KV head, whose first key is kept; heads 2 and 3 keep nothing
    assert (found["mass"][:, :2] > 0.1).all()
    assert (found["mass"][:, 2:] == 0).all()


def test_everything_kept_covers_everything_and_random_keys_cover_chance():
    draw = torch.Generator().manual_seed(0)
    query, key = (torch.randn(40, 2, 50, 8, generator=draw) for _ in range(2))
    full = head_coverage(query, key, torch.ones(40, 2, 50, dtype=torch.bool), ALONE, (0.01, 0.1))
    assert all((values[~values.isnan()] == 1).all() for values in full.values())
    kept = torch.rand(40, 2, 50, generator=draw).argsort(-1) < 20
    some = head_coverage(query, key, kept, ALONE, (0.01,))
    # 80 heads of about 1000 heavy entries on 50 keys: the mean's standard error is below 0.01
    assert some["heavy_0.01"].mean().item() == pytest.approx(0.4, abs=0.04)
    assert some["columns"].mean().item() == pytest.approx(0.4, abs=0.05)


def test_kept_keys_are_the_selection():
    key = torch.randn(2, 3, 20, 8, generator=torch.Generator().manual_seed(0))
    kept = kept_keys(key, Selected(KMeans(n_clusters=3), 7, sinks=0), 5)
    assert (kept.sum(-1) == 7).all()
    chosen = select(key, KMeans(n_clusters=3), top_k=7, sinks=0, generator=5)
    assert kept.gather(-1, chosen.indices).all()


def test_observing_changes_nothing_and_shows_true_activations(vision_subject):
    model = vision_subject.study.model.model
    pixels = vision_subject.study.images.pixels
    seen = {}
    with torch.inference_mode():
        before = model(pixel_values=pixels).logits
        first = model.vit.layers[0]
        wanted = first.attention.k_proj(first.layernorm_before(model.vit.embeddings(pixels)))
        with observe(model, lambda q, k, s: seen.setdefault(s.layer, k)) as n_layers:
            during = model(pixel_values=pixels).logits
        after = model(pixel_values=pixels).logits
    assert n_layers == 2
    assert sorted(seen) == [0, 1]
    torch.testing.assert_close(seen[0].transpose(1, 2).flatten(2), wanted)
    # exact attention through another call: rounding of float32
    torch.testing.assert_close(during, before, rtol=1e-4, atol=1e-4)
    assert torch.equal(after, before)


def test_language_models_work_too():
    model = tiny_llama()
    before = model(tokens()).logits
    implementation = model.config._attn_implementation
    subject = TextSubject(model, tokens(), {"model": "tiny"})
    rows = coverage_rows(subject, CoverageGrid(methods=("kmeans", "random"), rows=(8,), clusters=(3,)))
    figures = rows[0].measure()
    # two sequences, two layers, four query heads
    assert figures["n_heads"] == 2 * 2 * 4
    assert figures["n_keys"] == 24
    assert figures["chance"] == pytest.approx(8 / 24)
    assert len(figures["mass_layers"]) == 2
    assert 0 < figures["heavy_0.01_mean"] < 1
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(tokens()).logits, before)


def test_rows_of_a_vision_study(vision_subject):
    grid = CoverageGrid(methods=("kmeans", "key-norm"), rows=(4, 8), clusters=(2, 3), seeds=(0, 1))
    rows = coverage_rows(vision_subject, grid)
    assert [row.config["method"] for row in rows].count("kmeans") == 2 * 2 * 2
    assert [row.config["method"] for row in rows].count("key-norm") == 2
    figures = rows[0].measure()
    assert figures["n_heads"] == 3 * 2 * 2
    assert figures["n_keys"] == 17
    assert set(figures) >= {"heavy_0.01_median", "heavy_0.1_mean", "heavy_0.3_without", "columns_mean", "chance"}


def test_a_protected_prefix_is_among_the_kept(vision_subject, monkeypatch):
    kept = []
    real = kept_keys
    monkeypatch.setattr(
        "prescore.bench.vision.coverage.kept_keys", lambda *given: kept.append(real(*given)) or kept[-1]
    )
    config = Selected("uniform", 3, sinks=0)
    measure_coverage(vision_subject, config, (0.1,), protect=True)
    assert all(found[..., 0].all() for found in kept)
    kept.clear()
    measure_coverage(vision_subject, config, (0.1,), protect=False)
    assert not all(found[..., 0].all() for found in kept)


@pytest.mark.parametrize("name", ["exact", "centroids", "kmeans+centroids", "routed", "default"])
def test_what_selects_nothing_is_refused(name, vision_subject):
    with pytest.raises(ValueError, match=f"got '{name}'".replace("+", r"\+")):
        coverage_rows(vision_subject, CoverageGrid(methods=(name,)))


def test_a_threshold_nothing_reaches_is_reported_as_missing(vision_subject):
    figures = measure_coverage(vision_subject, Selected("key-norm", 4, sinks=0), (1.0,))
    assert figures["heavy_1_mean"] is None
    assert figures["heavy_1_without"] == figures["n_heads"]


def test_command(tmp_path, capsys):
    pytest.importorskip("PIL")
    from PIL import Image

    tiny_vit(tmp_path / "model")
    # the tiny model reads one channel; a three-channel one is what folders of images need
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ViTForImageClassification(ViTConfig(**shape, image_size=16, patch_size=4)).save_pretrained(tmp_path / "rgb")
    for label in ("a", "b"):
        (tmp_path / "images" / label).mkdir(parents=True)
        Image.new("RGB", (20, 20), "red").save(tmp_path / "images" / label / "x.png")
    argv = ["coverage", "--model", str(tmp_path / "rgb"), "--images", str(tmp_path / "images")]
    argv += ["--out", str(tmp_path / "run"), "--samples", "4", "--method", "kmeans", "--method", "random"]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "chance" in shown
    records = read_records(tmp_path / "run" / "records.jsonl")
    assert len(records) == 2
    assert (tmp_path / "run" / "coverage.png").stat().st_size > 1000
    assert paper_coverage_table(records).rows == ()
    assert main([*argv, "--resume", "--language-model", "smollm2"]) == 2
    assert "got 'smollm2'" in capsys.readouterr().err


def test_the_median_of_an_even_number_lies_between_the_middle_two():
    class TwoHeads:
        described, n_prefix = {}, 0

        def run(self, look):
            # every query of a head looks at one key: kept entries are all or nothing
            key = torch.eye(4)[None, None].expand(1, 2, 4, 4) * 9.0
            query = torch.stack([torch.eye(4)[[0] * 4], torch.eye(4)[[3] * 4]])[None] * 9.0
            look(query, key, AttentionContext(layer=0))

    figures = measure_coverage(TwoHeads(), Selected("uniform", 1, sinks=1, remainder="none"), (0.3,))
    # the one kept key is the first: it holds all heavy entries of one head and none of the other
    assert figures["heavy_0.3_median"] == figures["heavy_0.3_mean"] == 0.5
