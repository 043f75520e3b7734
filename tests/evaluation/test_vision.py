"""Vision models at a budget of keys: images, models, results, the command."""

import importlib.util
import itertools
import json

import pytest
import torch

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("PIL") is None:
    pytest.skip("transformers or pillow is not installed", allow_module_level=True)

from PIL import Image
from safetensors.torch import save_file
from tiny_images import save_tiny_images, save_tiny_vit

import prescore
from prescore import KMeans, Selected
from prescore.bench.cli.main import main
from prescore.bench.methods import full_budget, image_config
from prescore.bench.records import read_records, row_key
from prescore.bench.vision import models
from prescore.bench.vision.accuracy import Study, accuracy_rows
from prescore.bench.vision.models import IMAGENET_MEAN, IMAGENET_STD, Preprocessing, load_vision_model, open_folder
from prescore.integrations.attention import AttentionContext, PrescoredAttention, original_attention
from prescore.integrations.torchvision import import_timm, mend_torchvision

mend_torchvision()
HAS_TIMM = all(importlib.util.find_spec(name) is not None for name in ("timm", "torchvision"))
needs_timm = pytest.mark.skipif(not HAS_TIMM, reason="timm or torchvision is not installed")
ALONE = AttentionContext(layer=0)


@pytest.fixture
def model_folder(tmp_path):
    return save_tiny_vit(tmp_path / "model")


@pytest.fixture
def image_folder(tmp_path):
    return save_tiny_images(tmp_path / "images")


@pytest.fixture
def study(model_folder, image_folder):
    return Study(load_vision_model(model_folder), open_folder(image_folder), {"model": "tiny"}, batch_size=4)


def picture(path, colour="red"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (80, 40), colour).save(path)


def test_folders_of_classes_are_numbered_by_name(tmp_path, image_folder):
    picture(tmp_path / "pets" / "dog" / "1.png")
    picture(tmp_path / "pets" / "cat" / "2.jpg")
    (tmp_path / "pets" / "cat" / "notes.txt").write_text("no image")
    images = open_folder(tmp_path / "pets")
    assert ([path.name for path in images.paths], images.labels) == (["2.jpg", "1.png"], [0, 1])
    # a smaller limit is the start of a larger one
    assert open_folder(image_folder, limit=3).paths == open_folder(image_folder, limit=6).paths[:3]
    assert len(open_folder(image_folder, limit=99)) == 10


@pytest.mark.parametrize("place", ["labels.json", "../flat_labels.json", "elsewhere"])
def test_labels_from_json(tmp_path, place):
    folder = tmp_path / "flat"
    picture(folder / "a.png")
    picture(folder / "b.png")
    file = tmp_path / "other.json" if place == "elsewhere" else folder / place
    file.write_text(json.dumps({"b.png": 7, "a.png": 3, "absent.png": 1}))
    images = open_folder(folder, labels=file if place == "elsewhere" else None)
    assert ([path.name for path in images.paths], images.labels) == (["a.png", "b.png"], [3, 7])


def test_preprocessing_crops_the_centre_and_normalises(tmp_path):
    picture(tmp_path / "a" / "x.png", (255, 0, 128))
    batch, labels = next(open_folder(tmp_path).batches(Preprocessing(28), 4))
    wanted = [(v / 255 - m) / s for v, m, s in zip((255, 0, 128), IMAGENET_MEAN, IMAGENET_STD, strict=True)]
    torch.testing.assert_close(batch, torch.tensor(wanted)[None, :, None, None].expand(1, 3, 28, 28))
    assert labels.tolist() == [0]
    image = Image.new("RGB", (64, 32), "black")
    image.paste((255, 255, 255), (16, 0, 48, 32))
    image.save(tmp_path / "centre.png")
    assert models.decode_image(tmp_path / "centre.png", 32, 1.0).float().mean() == 255


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: open_folder(p / "absent"), "images must be a folder, got .*absent"),
        (open_folder, "no labelled"),
        (lambda p: open_folder(p, labels=p / "absent.json"), "labels must be a JSON file, got .*absent"),
        (lambda p: load_vision_model(p / "absent.safetensors"), "file that exists, got .*absent"),
        (lambda p: load_vision_model(p, arch="vit"), "arch must not be given.*'vit'"),
        (lambda p: load_vision_model(p, device="nowhere"), "device must be usable, got 'nowhere'"),
        (lambda p: load_vision_model(p / "x.pth"), r"must be a \.safetensors file, for a pickled .* got .*pth"),
        (lambda p: models.vit_shape({}), "got no patch_embed"),
        (lambda p: image_config("kmeans-closest", 8), "got 'kmeans-closest'"),
        (lambda p: image_config("farthest", 8), "got 'farthest'"),
        (lambda p: image_config("key-norm-farthest", 8), "method must be one of .* got 'key-norm-farthest'"),
        (lambda p: image_config("centroids", 1, n_prefix=1), "budget must leave room .* got 1"),
        (lambda p: image_config("routed", 2, n_prefix=1, n_tokens=197), "leave room for 1 prefix.*got 2"),
    ],
)
def test_refusals(tmp_path, make, said):
    with pytest.raises(ValueError, match=said):
        make(tmp_path)


@needs_timm
@pytest.mark.parametrize(
    ("name", "arch", "said"),
    [
        ("broken.safetensors", None, r"readable checkpoint, got broken\.safetensors"),
        ("foreign.safetensors", "vit_huge", "arch must be an architecture of timm, got 'vit_huge'"),
        ("foreign.safetensors", "resnet10t", r"weights of resnet10t, got foreign\.safetensors"),
        ("registers.safetensors", None, r"weights of a plain ViT \(or give arch\), got registers\.safetensors"),
        (".", None, r"image classifier of transformers, got"),
    ],
)
def test_damaged_and_foreign_checkpoints_are_refused_in_one_sentence(name, arch, said, tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"nothing of the kind" * 20)
    save_file({"patch_embed.proj.weight": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    names = {"patch_embed.proj.weight": (64, 3, 8, 8), "pos_embed": (1, 17, 64), "cls_token": (1, 1, 64)}
    names |= {"blocks.0.mlp.fc1.weight": (64, 64), "head.weight": (5, 64), "reg_token": (1, 2, 64)}
    save_file({name: torch.zeros(shape) for name, shape in names.items()}, tmp_path / "registers.safetensors")
    with pytest.raises((ValueError, OSError), match=said) as caught:
        load_vision_model(tmp_path / name, arch=arch)
    assert "\n" not in str(caught.value)


def test_labels_that_the_model_does_not_have_are_refused(model_folder, image_folder, tmp_path):
    labels = tmp_path / "labels.json"
    labels.write_text('{"class0/0.png": 7}')
    study = Study(load_vision_model(model_folder), open_folder(image_folder, labels=labels), {})
    with pytest.raises(ValueError, match="labels must lie below the model's 5 classes, got 7"):
        _ = study.exact
    labels.write_text("{no")
    with pytest.raises(ValueError, match=r"labels must be a JSON file, got .*labels\.json"):
        open_folder(image_folder, labels=labels)


def test_hugging_face_folder_and_resolution(model_folder):
    loaded = load_vision_model(model_folder)
    assert (loaded.n_tokens, loaded.n_prefix, loaded.n_layers, loaded.preprocessing.size) == (17, 1, 2, 32)
    larger = load_vision_model(model_folder, resolution=48)
    assert larger.n_tokens == 37
    assert larger.logits(torch.zeros(1, 3, 48, 48)).shape == (1, 5)


@needs_timm
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"global_pool": "avg"}, {"qkv_bias": False}),
        {"class_token": False, "global_pool": "avg", "fc_norm": False},
    ],
)
def test_the_architecture_of_a_checkpoint_is_read_from_its_weights(tmp_path, options):
    import_timm()
    from timm.models.vision_transformer import VisionTransformer

    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 1, "num_classes": 5}
    model = VisionTransformer(**shape, **options).eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = load_vision_model(tmp_path / "model.safetensors")
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(loaded.logits(pixels), model(pixels))
    assert load_vision_model(tmp_path / "model.safetensors", resolution=64).n_tokens - loaded.n_tokens == 48


@needs_timm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width", "heads"), [("vit_small_patch16_224", 384, 6), ("vit_large_patch16_224", 1024, 16)]
)
def test_the_vits_of_the_paper_load_by_shape_and_by_name(tmp_path, name, width, heads):
    """Random weights and two layers; everything else is that of timm's S/16 and L/16."""
    timm = import_timm()
    model = timm.create_model(name, depth=2).eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    loaded = load_vision_model(tmp_path / "model.safetensors")
    assert (loaded.n_tokens, loaded.model.embed_dim, loaded.model.blocks[0].attn.num_heads) == (197, width, heads)
    with torch.inference_mode():
        torch.testing.assert_close(loaded.logits(pixels), model(pixels))
    config = image_config("published", 128, n_clusters=4)
    with prescore.apply(loaded.model, config) as applied, torch.inference_mode():
        assert loaded.logits(pixels).shape == (1, 1000)
    assert "2 of 2 layers" in repr(applied)


@pytest.mark.parametrize(
    ("described", "crop"),
    [
        ({}, 0.875),
        ({"size": {"shortest_edge": 256}, "crop_size": {"height": 224}, "do_center_crop": True}, 0.875),
        ({"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True}, 0.8),
        ({"size": {"height": 224, "width": 224}}, 1.0),
        ({"size": 224}, 0.875),
    ],
)
def test_the_crop_is_the_one_the_model_was_made_with(described, crop, model_folder):
    (model_folder / "preprocessor_config.json").write_text(json.dumps(described))
    assert load_vision_model(model_folder).preprocessing.crop == crop


@pytest.mark.parametrize(
    ("name", "scorer", "rule", "selector", "remainder", "n_centroids"),
    [
        ("kmeans", "kmeans", "nearest", "top", "none", 0),
        ("kmeans-cluster-share", "kmeans", "cluster-share", "top", "none", 0),
        ("published", "kmeans", "farthest", "sample", "none", 0),
        ("kmedian-farthest-sample", "kmedian", "farthest", "sample", "none", 0),
        ("gaussian-kmeans-balanced", "gaussian-kmeans", "balanced", "top", "none", 0),
        ("random", "uniform", None, "top", "none", 0),
        ("key-diff+centroids", "key-diff", None, "top", KMeans(n_clusters=8, normalize=False), 8),
        ("centroids", "kmeans", "farthest", "top", "centroids", 31),
    ],
)
def test_method_names(name, scorer, rule, selector, remainder, n_centroids):
    config = image_config(name, 32, n_clusters=6, share=0.25, n_prefix=1)
    assert isinstance(config, Selected)
    assert (config.scoring.name, getattr(config.scoring, "rule", None)) == (scorer, rule)
    assert (config.selector, config.remainder, config.top_k) == (selector, remainder, 32 - n_centroids)
    if n_centroids:
        clustering = config.scoring if remainder == "centroids" else remainder
        assert (clustering.n_clusters, clustering.normalize) == (n_centroids, False)
    elif rule is not None:
        assert config.scoring.n_clusters == 6


@pytest.mark.parametrize(("n_tokens", "n_prefix"), [(577, 1), (197, 1), (198, 2), (64, 0)])
@pytest.mark.parametrize("name", ["routed", "kmeans", "kmeans-farthest+centroids", "centroids", "random"])
def test_a_query_reads_at_most_its_budget(name, n_tokens, n_prefix):
    query, key, value = torch.randn(3, 1, 2, n_tokens, 16, generator=torch.Generator().manual_seed(0))
    for budget in (40, 63):
        config = image_config(name, budget, n_clusters=3, n_prefix=n_prefix, n_tokens=n_tokens)
        stats = prescore.prescored_attention(query, key, value, config, return_aux=True)[1].stats
        reads = stats.keys_per_query + stats.centroids_per_query
        assert reads <= full_budget(config, budget, n_tokens) <= budget
        if name == "routed":
            assert stats.exact_queries == 0
            assert stats.far_keys_read > 0
        else:
            assert reads > 0.9 * budget  # a cluster whose keys are all selected has no centroid


def test_results_of_exact_and_of_all_keys_selected(study):
    exact = study.measure(original_attention)
    assert (exact["agreement"], exact["kl"], exact["n_images"], exact["top5"]) == (100, 0, 10, 100)
    hits = int((study.exact.logits.argmax(-1) == study.exact.labels).sum())
    assert exact["top1"] == pytest.approx(10 * hits)
    configs = (image_config("kmeans", budget, n_clusters=3, n_prefix=1) for budget in (17, 3))
    every, few = (study.measure(PrescoredAttention(config)) for config in configs)
    assert every["kl"] == pytest.approx(0, abs=1e-5)
    assert few["kl"] > 1e-3
    assert few["attention_seconds"] > 0


def test_every_image_has_draws_of_its_own_whatever_the_batches(model_folder, tmp_path):
    for number in range(4):
        picture(tmp_path / "same" / "class" / f"{number}.png")
    images, model = open_folder(tmp_path / "same"), load_vision_model(model_folder)
    config = image_config("random", 4, n_prefix=1)

    def logits(batch_size, seed):
        return Study(model, images, {}, batch_size).predict(PrescoredAttention(config), seed).logits

    drawn = logits(4, 0)
    assert all(float((one - other).abs().max()) > 1e-4 for one, other in itertools.combinations(drawn, 2))
    torch.testing.assert_close(logits(3, 0), drawn)
    assert float((logits(4, 1) - drawn).abs().max()) > 1e-4


def test_the_grid_repeats_nothing_that_cannot_differ(study):
    grid = {"budgets": (4, 8), "n_clusters": (2, 3), "centroid_shares": (0.25, 0.5)}
    grid |= {"keep_prefix": (True, False), "seeds": (0, 1)}
    names = ("exact", "kmeans", "key-norm", "kmeans-farthest+centroids", "default")
    rows = accuracy_rows(study, methods=names, **grid)
    methods = list({row_key("vision", row.config, row.seed): row.config["method"] for row in rows}.values())
    assert [methods.count(name) for name in names] == [1, 16, 4, 16, 1]


def test_no_budget_exceeds_the_keys_and_the_default_is_exact_when_short(study):
    rows = accuracy_rows(study, methods=("kmeans", "centroids"), budgets=(8, 500))
    assert [row.config["budget"] for row in rows] == [8, 17, 8, 17]
    assert [row.config["config"]["top_k"] for row in rows] == [8, 17, 1, 1]
    default, _, routed, _ = accuracy_rows(study, methods=("default", "routed"), budgets=(9, 10))
    assert (default.config["method"], default.config["budget"]) == ("default", 17)
    assert default.measure()["agreement"] == 100
    assert routed.measure()["kl"] > 0


def test_command_measures_records_resumes_and_draws(model_folder, image_folder, tmp_path, capsys):
    line = f"vision --model {model_folder} --images {image_folder} --seeds 2 --num-sample 6"
    line += f" --out {tmp_path / 'run'} --method exact --method kmeans --method centroids"
    assert main(line.split()) == 0
    shown = capsys.readouterr().out
    assert "kmeans, 4 clusters" in shown
    assert "±" in shown
    assert len(read_records(tmp_path / "run" / "records.jsonl")) == 5
    assert (tmp_path / "run" / "vision.png").stat().st_size > 1000
    assert main(f"{line} --resume --prefix both".split()) == 0
    assert len(read_records(tmp_path / "run" / "records.jsonl")) == 9


@pytest.mark.slow
def test_the_digits_model_learns_and_is_trained_once(tmp_path):
    pytest.importorskip("sklearn")
    training, test = models.load_digits()
    assert (len(training), len(test)) == (1297, 500)
    assert torch.equal(models.load_digits()[1].pixels, test.pixels)
    assert (training.pixels.min(), training.pixels.max()) == (-1, 1)
    state, lines = torch.get_rng_state(), []
    folder = models.digits_model(epochs=models.QUICK_EPOCHS, cache=tmp_path, report=lines.append)
    assert torch.equal(torch.get_rng_state(), state)
    loaded = load_vision_model(folder)
    assert loaded.n_tokens == 65
    # six epochs classify 64 of the first 100 test scans; chance is one in ten
    assert Study(loaded, test, {}).measure(original_attention)["top1"] > 40
    assert models.digits_model(epochs=models.QUICK_EPOCHS, cache=tmp_path, report=lines.append) == folder
    assert len(lines) == 1
