"""The vision study: data, models by name, rows in all, figures, command line."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("PIL") is None:
    pytest.skip("transformers or pillow is not installed", allow_module_level=True)

from PIL import Image

import prescore
from prescore import KMeans, Selected
from prescore.bench.cli.main import main
from prescore.bench.records import read_records
from prescore.bench.vision import models as digits
from prescore.bench.vision.accuracy import Grid, Study, study_rows
from prescore.bench.vision.methods import EXACT, parse_method
from prescore.bench.vision.models import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Preprocessing,
    decode_image,
    load_vision_model,
    open_folder,
    vit_shape,
)
from prescore.bench.vision.tables import accuracy_plot, accuracy_table, leverage_table, paper_accuracy_table
from prescore.integrations.attention import PrescoredAttention, attend_exactly
from prescore.integrations.torchvision import import_timm, mend_torchvision
from prescore.selected import plan

HAS_TIMM = all(importlib.util.find_spec(name) is not None for name in ("timm", "torchvision"))
needs_timm = pytest.mark.skipif(not HAS_TIMM, reason="timm or torchvision is not installed")
VISION = Path(__file__).parents[4] / "shared" / "data" / "vision"


def method_layer(name, rows, clusters):
    return PrescoredAttention(parse_method(name).config(rows, clusters=clusters, share=0.5, n_prefix=1))


def picture(path, colour, size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def model_folder(tmp_path):
    """A random ViT of 17 tokens with five classes, saved as transformers saves."""
    mend_torchvision()
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
    model = ViTForImageClassification(ViTConfig(**shape, image_size=32, patch_size=8, num_labels=5))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def image_folder(tmp_path):
    draw = torch.Generator().manual_seed(1)
    for label in range(5):
        for number in range(2):
            noise = torch.randint(0, 256, (36, 44, 3), generator=draw, dtype=torch.uint8)
            path = tmp_path / "images" / f"class{label}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.frombytes("RGB", (44, 36), bytes(noise.flatten().tolist())).save(path)
    return tmp_path / "images"


def test_folders_of_classes_are_numbered_by_name(tmp_path):
    picture(tmp_path / "dog" / "1.png", "red")
    picture(tmp_path / "cat" / "2.jpg", "red")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    found = open_folder(tmp_path)
    assert [(path.name, label) for path, label in zip(found.paths, found.labels, strict=True)] == [
        ("2.jpg", 0),
        ("1.png", 1),
    ]


@pytest.mark.parametrize("place", ["labels.json", "../flat_labels.json", "elsewhere"])
def test_labels_from_json(tmp_path, place):
    folder = tmp_path / "flat"
    for name in ("a.png", "b.png"):
        picture(folder / name, "blue")
    file = tmp_path / "other.json" if place == "elsewhere" else folder / place
    file.write_text(json.dumps({"b.png": 7, "a.png": 3, "absent.png": 1}))
    found = open_folder(folder, labels=file if place == "elsewhere" else None)
    assert [path.name for path in found.paths] == ["a.png", "b.png"]
    assert found.labels == [3, 7]


def test_a_smaller_limit_is_the_start_of_a_larger(image_folder):
    assert open_folder(image_folder, limit=3).paths == open_folder(image_folder, limit=6).paths[:3]
    assert len(open_folder(image_folder, limit=99)) == 10


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: open_folder(p / "absent"), "images must be a folder, got .*absent"),
        (open_folder, "no labelled"),
        (lambda p: open_folder(p, labels=p / "absent.json"), "labels must be a JSON file, got .*absent"),
        (lambda p: load_vision_model(p / "absent.safetensors"), "file that exists, got .*absent"),
        (lambda p: load_vision_model(p, arch="vit"), "arch must not be given.*'vit'"),
        (lambda p: vit_shape({}), "got no patch_embed"),
        (lambda p: parse_method("kmeens"), "got 'kmeens'"),
        (lambda p: parse_method("kmeans-closest"), "got 'kmeans-closest'"),
        (lambda p: parse_method("farthest"), "got 'farthest'"),
        (
            lambda p: parse_method("key-norm-farthest"),
            "makes clusters, a rule .* got 'key-norm-farthest'",
        ),
        (
            lambda p: parse_method("centroids").config(1, clusters=None, share=0.5, n_prefix=1),
            "rows must .* got 1",
        ),
    ],
)
def test_refusals(tmp_path, make, said):
    with pytest.raises(ValueError, match=said):
        make(tmp_path)


@needs_timm
def test_damaged_and_foreign_checkpoints_are_refused_in_one_sentence(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "broken.safetensors").write_bytes(b"nothing of the kind" * 20)
    with pytest.raises(OSError, match=r"readable checkpoint, got broken\.safetensors"):
        load_vision_model(tmp_path / "broken.safetensors")
    torch.save({"patch_embed.proj.weight": torch.zeros(2)}, tmp_path / "pickled.pth")
    with pytest.raises(
        ValueError, match=r"must be a \.safetensors file, for a pickled one can run code, got .*pth"
    ):
        load_vision_model(tmp_path / "pickled.pth")
    save_file({"patch_embed.proj.weight": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(ValueError, match="arch must be an architecture of timm, got 'vit_huge'"):
        load_vision_model(tmp_path / "foreign.safetensors", arch="vit_huge")
    with pytest.raises(ValueError, match=r"weights of resnet10t, got foreign\.safetensors") as caught:
        load_vision_model(tmp_path / "foreign.safetensors", arch="resnet10t")
    assert "\n" not in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match=r"image classifier of transformers, got .*empty") as caught:
        load_vision_model(tmp_path / "empty")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="device must be usable, got 'nowhere'"):
        load_vision_model(tmp_path / "empty", device="nowhere")


def test_labels_that_the_model_does_not_have_are_refused(model_folder, image_folder, tmp_path):
    names = [f"{kind.name}/{file.name}" for kind in image_folder.iterdir() for file in kind.iterdir()]
    (tmp_path / "labels.json").write_text(json.dumps(dict.fromkeys(names, 7)))
    study = Study(load_vision_model(model_folder), open_folder(image_folder, labels=tmp_path / "labels.json"), {})
    with pytest.raises(ValueError, match="labels must lie below the model's 5 classes, got 7"):
        study.exact()
    (tmp_path / "labels.json").write_text("{no")
    with pytest.raises(ValueError, match=r"labels must be a JSON file, got .*labels\.json"):
        open_folder(image_folder, labels=tmp_path / "labels.json")


def test_no_more_rows_are_counted_than_there_are_keys(model_folder, image_folder):
    study = Study(load_vision_model(model_folder), open_folder(image_folder), {})
    planned = study_rows(study, Grid(methods=("kmeans", "centroids"), rows=(8, 500)))
    assert [row.config["rows"] for row in planned] == [8, 17, 8, 17]
    assert [row.config["config"]["top_k"] for row in planned] == [8, 17, 1, 1]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["vision", "--resolution", "16"], "resolution must be given with a model and images, got resolution 16"),
        (["vision", "--arch", "vit"], "arch must be given with a model"),
        (["vision", "--labels", "labels.json"], "labels must be given with a model"),
        (
            ["coverage", "--text", "book.txt"],
            "text must be given with a language model, got text 'book.txt' alone",
        ),
    ],
)
def test_options_that_would_do_nothing_are_refused(argv, said, tmp_path, capsys):
    assert main([*argv, "--out", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_preprocessing_crops_the_centre_and_normalises(tmp_path):
    picture(tmp_path / "a" / "x.png", (255, 0, 128), size=(80, 40))
    pixels = decode_image(tmp_path / "a" / "x.png", 28, 0.875)
    assert pixels.shape == (3, 28, 28)
    assert pixels[:, 0, 0].tolist() == [255, 0, 128]
    batch, labels = next(open_folder(tmp_path).batches(Preprocessing(28), 4))
    wanted = [(v / 255 - m) / s for v, m, s in zip((255, 0, 128), IMAGENET_MEAN, IMAGENET_STD, strict=True)]
    torch.testing.assert_close(batch[0, :, 5, 5], torch.tensor(wanted))
    assert labels.tolist() == [0]


def test_the_crop_is_the_centre(tmp_path):
    image = Image.new("RGB", (64, 32), "black")
    image.paste((255, 255, 255), (16, 0, 48, 32))
    image.save(tmp_path / "x.png")
    assert decode_image(tmp_path / "x.png", 32, 1.0).float().mean() == 255


@pytest.mark.parametrize(
    ("name", "scorer", "rule", "selector", "remainder"),
    [
        ("kmeans", "kmeans", "nearest", "top", "none"),
        ("kmeans-cluster-share", "kmeans", "cluster-share", "top", "none"),
        ("kmedian-farthest-sample", "kmedian", "farthest", "sample", "none"),
        ("gaussian-kmeans-balanced", "gaussian-kmeans", "balanced", "top", "none"),
        ("random", "uniform", None, "top", "none"),
        ("key-diff+centroids", "key-diff", None, "top", KMeans(n_clusters=8, normalize=False)),
        ("centroids", "kmeans", "farthest", "top", "centroids"),
    ],
)
def test_method_names(name, scorer, rule, selector, remainder):
    config = parse_method(name).config(32, clusters=6, share=0.25, n_prefix=1)
    assert isinstance(config, Selected)
    assert (config.scoring.name, getattr(config.scoring, "rule", None)) == (scorer, rule)
    assert (config.selector, config.remainder) == (selector, remainder)
    centroids = 0 if remainder == "none" else clusters_of_stand_ins(config).n_clusters
    assert config.top_k + centroids == 32
    assert centroids == {"key-diff+centroids": 8, "centroids": 31}.get(name, 0)
    if rule is not None and remainder == "none":
        assert config.scoring.n_clusters == 6


def clusters_of_stand_ins(config):
    """What makes the clusters: the scorer itself, or a k-means of their own where it makes none."""
    return config.scoring if config.remainder == "centroids" else config.remainder


def read_by_a_query(part):
    """Columns of a part that a query can see: filler and empty clusters have a bias of minus infinity."""
    columns = sum(rows.shape[-1] for rows in (part.key_rows, part.extra_rows) if rows is not None)
    return columns if part.bias is None else int(torch.isfinite(part.bias).sum(-1).max())


@pytest.mark.parametrize("name", ["kmeans", "kmeans-farthest+centroids", "centroids", "random"])
def test_rows_are_counted_as_a_query_reads_them(name, model_folder, image_folder, monkeypatch):
    widths = []
    real = plan.attend_parts

    def spy(query, key, value, parts, **kwargs):
        widths.append(sum(map(read_by_a_query, parts)))
        return real(query, key, value, parts, **kwargs)

    monkeypatch.setattr(plan, "attend_parts", spy)
    study = Study(load_vision_model(model_folder), open_folder(image_folder), {})
    study.run(method_layer(name, 9, clusters=3))
    # two layers, one batch; a cluster whose keys were all selected leaves its row unused
    assert len(widths) == 2
    assert all(7 <= width <= 9 for width in widths)


@pytest.mark.parametrize(("n_tokens", "n_prefix"), [(577, 1), (197, 1), (198, 2), (64, 0)])
@pytest.mark.parametrize("rows", [40, 63])
def test_routed_rows_are_a_limit_of_those_of_the_call(rows, n_tokens, n_prefix):
    method = parse_method("routed")
    config = method.config(rows, clusters=None, share=0.0, n_prefix=n_prefix, n_tokens=n_tokens)
    query, key, value = torch.randn(3, 1, 2, n_tokens, 16, generator=torch.Generator().manual_seed(0))
    _, aux = prescore.prescored_attention(query, key, value, config, return_aux=True)
    assert aux.stats["exact_queries"] == 0
    assert aux.stats["far_keys_read"] > 0
    assert aux.stats["keys_per_query"] <= method.rows(config, rows, n_tokens=n_tokens) <= rows


def test_routed_needs_room_and_the_untouched_default_is_exact_when_short(model_folder, image_folder):
    with pytest.raises(ValueError, match=r"rows must leave room for 1 prefix tokens.*got 2"):
        parse_method("routed").config(2, clusters=None, share=0.0, n_prefix=1, n_tokens=197)
    study = Study(load_vision_model(model_folder), open_folder(image_folder), {})
    rows = study_rows(study, Grid(methods=("default", "routed"), rows=(9, 10), protect=(True, False)))
    assert (rows[0].config["method"], rows[0].config["rows"]) == ("default", 17)
    assert [row.config["method"] for row in rows].count("default") == 1
    assert rows[0].measure()["agreement"] == 100
    assert rows[1].measure()["kl"] > 0


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
        {},
        {"reg_tokens": 2, "no_embed_class": True},
        {"class_token": False, "global_pool": "avg", "fc_norm": False},
        {"global_pool": "avg"},
        {"qk_norm": True, "init_values": 0.1, "qkv_bias": False},
    ],
    ids=str,
)
def test_a_checkpoint_tells_its_architecture(tmp_path, options):
    import_timm()
    from safetensors.torch import save_file
    from timm.models.vision_transformer import VisionTransformer

    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 1, "num_classes": 5}
    model = VisionTransformer(**shape, **options).eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = load_vision_model(tmp_path / "model.safetensors")
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(loaded.logits(pixels), model(pixels))
    assert load_vision_model(tmp_path / "model.safetensors", resolution=64).n_tokens - loaded.n_tokens == 48


@pytest.mark.parametrize(
    ("described", "crop"),
    [
        ({}, 0.875),
        (
            {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True},
            0.875,
        ),
        ({"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True}, 0.8),
        ({"size": {"height": 224, "width": 224}}, 1.0),
        ({"size": 224}, 0.875),
    ],
)
def test_the_crop_is_the_one_the_model_was_made_with(described, crop, model_folder):
    (model_folder / "preprocessor_config.json").write_text(json.dumps(described))
    assert load_vision_model(model_folder).preprocessing.crop == crop


def test_figures_of_exact_and_of_everything_selected(model_folder, image_folder):
    study = Study(load_vision_model(model_folder), open_folder(image_folder), {}, batch_size=4)
    exact = study.figures(attend_exactly)
    assert exact["agreement"] == 100
    assert exact["kl"] == 0
    assert exact["n_images"] == 10
    logits, labels = study.exact().logits, study.exact().labels
    assert exact["top1"] == pytest.approx(100 * float((logits.argmax(-1) == labels).float().mean()))
    assert exact["top5"] == 100
    all_keys = study.figures(method_layer("kmeans", 17, clusters=3))
    assert all_keys["kl"] == pytest.approx(0, abs=1e-5)
    few = study.figures(method_layer("kmeans", 3, clusters=3))
    assert few["kl"] > 1e-3
    assert few["attention_seconds"] > 0


def test_the_grid_repeats_nothing_that_cannot_differ(model_folder, image_folder):
    study = Study(load_vision_model(model_folder), open_folder(image_folder), {})
    grid = Grid(
        methods=(EXACT, "kmeans", "key-norm", "kmeans-farthest+centroids"),
        rows=(4, 8),
        clusters=(2, 3),
        shares=(0.25, 0.5),
        protect=(True, False),
        seeds=(0, 1),
    )
    counts = {}
    for row in study_rows(study, grid):
        counts[row.config["method"]] = counts.get(row.config["method"], 0) + 1
    assert counts == {EXACT: 1, "kmeans": 16, "key-norm": 4, "kmeans-farthest+centroids": 16}


def test_stand_ins_are_clusters_of_true_keys():
    for name in ("key-diff+centroids", "centroids", "leverage+centroids"):
        config = parse_method(name).config(32, clusters=None, share=0.5, n_prefix=1)
        assert clusters_of_stand_ins(config).normalize is False


def test_command_measures_records_resumes_and_draws(model_folder, image_folder, tmp_path, capsys):
    argv = ["vision", "--model", str(model_folder), "--images", str(image_folder), "--out", str(tmp_path / "run")]
    argv += [
        "--method",
        "exact",
        "--method",
        "kmeans",
        "--method",
        "centroids",
        "--num-sample",
        "6",
        "--seeds",
        "2",
    ]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "kmeans, 4 clusters" in shown
    assert "±" in shown
    records = read_records(tmp_path / "run" / "records.jsonl")
    assert len(records) == 5
    assert (tmp_path / "run" / "vision.png").stat().st_size > 1000
    assert main([*argv, "--resume", "--prefix", "both"]) == 0
    assert len(read_records(tmp_path / "run" / "records.jsonl")) == 9
    assert main([*argv, "--resume", "--prefix", "none"]) == 2
    assert "got 'none'" in capsys.readouterr().err


def test_command_refuses_half_a_study(model_folder, capsys):
    assert main(["vision", "--model", str(model_folder)]) == 2
    assert "images must be given together with model" in capsys.readouterr().err


def test_paper_table_compares_only_what_is_comparable(model_folder, image_folder, tmp_path):
    argv = ["vision", "--model", str(model_folder), "--images", str(image_folder), "--out", str(tmp_path / "run")]
    assert main([*argv, "--method", "kmeans", "--samples", "32", "--json"]) == 0
    records = read_records(tmp_path / "run" / "records.jsonl")
    assert paper_accuracy_table(records).rows == ()
    # what the paper printed is 32 rows of 197; this model has 17 tokens, and reads no more rows than that
    records[0].figures["n_tokens"], records[0].config["rows"] = 197, 32
    assert paper_accuracy_table(records).rows[0][3:] == ("31.34 of 85.11", "53.05 of 85.85")
    assert accuracy_table(records).rows[0][0] == "kmeans, 4 clusters"
    assert leverage_table(records).rows == ()
    other = dataclasses.replace(
        records[0],
        config={**records[0].config, "method": "leverage", "clusters": None},
        figures={**records[0].figures, "top1": records[0].figures["top1"] - 2.5},
    )
    assert leverage_table([records[0], other]).rows == (("kmeans, 4 clusters", "+2.5"),)
    accuracy_plot(records, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists()


def test_digits_are_split_once_and_for_all():
    pytest.importorskip("sklearn")
    (known, unseen), (again, _) = digits.load_digits(), digits.load_digits()
    assert (len(known), len(unseen)) == (1297, 500)
    assert torch.equal(known.pixels, again.pixels)
    assert known.pixels.shape[1:] == (1, 8, 8)
    assert known.pixels.min() == -1
    assert known.pixels.max() == 1


@pytest.mark.slow
def test_the_digits_model_learns_and_is_trained_once(tmp_path):
    pytest.importorskip("sklearn")
    state = torch.get_rng_state()
    said = []
    folder = digits.digits_model(epochs=digits.QUICK_EPOCHS, cache=tmp_path, report=said.append)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(said) == 1
    loaded = load_vision_model(folder)
    assert loaded.n_tokens == 65
    # six epochs read 64 of the first 100 test scans when this was written; guessing reads one in ten
    assert digits.accuracy(loaded.model, digits.load_digits()[1]) > 0.4
    assert digits.digits_model(epochs=digits.QUICK_EPOCHS, cache=tmp_path, report=said.append) == folder
    assert len(said) == 1


@pytest.mark.slow
@needs_timm
@pytest.mark.skipif(not VISION.is_dir(), reason="the development images are not there")
def test_deit_tiny_reads_real_images():
    loaded = load_vision_model(VISION / "deit_tiny_patch16_224.safetensors")
    study = Study(loaded, open_folder(VISION / "imagenet_val_1000", limit=20), {}, batch_size=20)
    assert loaded.n_tokens == 197
    # 72.9 % on all thousand; 20 images must be far above one in a thousand
    assert study.figures(attend_exactly)["top1"] >= 50
    few = study.figures(method_layer("centroids", 64, clusters=None))
    assert few["agreement"] >= 60
