"""Image classifiers by name, folders of labelled images, and the small model that needs neither."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from prescore import checks
from prescore.bench.records import Values
from prescore.integrations.apply import observe
from prescore.integrations.attention import AttentionContext
from prescore.integrations.offline import cache_directory, check_attention, first_line
from prescore.integrations.torchvision import import_timm, mend_torchvision

_CHECKPOINT = ".safetensors"
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_HEAD_DIM = 64


@dataclass(frozen=True, eq=False)
class VisionModel:
    """A classifier and what it expects.

    Attributes:
        model: The module, in evaluation mode.
        preprocessing: Of its images.
        n_tokens: Keys of an attention layer, prefix tokens included.
        n_prefix: Tokens before the patches.
        n_layers: Attention layers.
        arguments: Passed to every call with the pixels.
    """

    model: nn.Module
    preprocessing: Preprocessing
    n_tokens: int
    n_prefix: int
    n_layers: int
    arguments: Mapping[str, Any]

    def logits(self, pixels: Tensor) -> Tensor:
        """Class scores `[B, classes]`."""
        result = self.model(pixels, **self.arguments)
        return result if isinstance(result, Tensor) else result.logits


def load_vision_model(
    name: str | Path, *, arch: str | None = None, resolution: int | None = None, device: str = "cpu"
) -> VisionModel:
    """Load a classifier.

    Args:
        name: A folder with a Hugging Face model, a checkpoint with timm's key names (.safetensors),
            or the name of a timm architecture, whose weights timm then fetches.
        arch: timm architecture of a checkpoint; None = a plain ViT read off the shapes of the weights.
        resolution: Side of the images in pixels; position embeddings are resized. None = the model's own.
        device: Where it runs.
    """
    checks.device("device", device)
    path = Path(name)
    if path.is_dir():
        if arch is not None:
            raise ValueError(f"arch must not be given with a Hugging Face folder, got {arch!r}")
        model, preprocessing, arguments = _from_folder(path, resolution)
    elif path.suffix in _PICKLED:
        raise ValueError(f"model must be a {_CHECKPOINT} file, for a pickled one can run code, got {name}")
    elif path.suffix == _CHECKPOINT:
        if not path.is_file():
            raise ValueError(f"model must be a file that exists, got {name}")
        model, preprocessing, arguments = _from_checkpoint(path, arch, resolution)
    else:
        model, preprocessing, arguments = _from_timm(str(name), resolution)
    model = model.eval().to(device)
    return _with_sizes(model, preprocessing, arguments, device)


@contextmanager
def _refusing(sentence: str) -> Iterator[None]:
    """Libraries raise many types for a damaged file or a missing network, with messages of many lines."""
    try:
        yield
    except Exception as error:
        raise OSError(f"{sentence} ({first_line(error)})") from error


def _from_folder(path: Path, resolution: int | None) -> tuple[nn.Module, Preprocessing, Values]:
    mend_torchvision()
    from transformers import AutoConfig, AutoModelForImageClassification

    with _refusing(f"model must be an image classifier of transformers, got {path}"):
        check_attention(AutoConfig.from_pretrained(path, local_files_only=True))
        model = AutoModelForImageClassification.from_pretrained(path, local_files_only=True, use_safetensors=True)
    vision = getattr(model.config, "vision_config", model.config)
    size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
    described: Values = {}
    if (path / "preprocessor_config.json").is_file():
        described = json.loads((path / "preprocessor_config.json").read_text())
    preprocessing = _preprocessing(resolution or size, _crop(described), described, "image_")
    resized = resolution is not None and resolution != size
    return model, preprocessing, {"interpolate_pos_encoding": True} if resized else {}


def _crop(described: Mapping[str, Any]) -> float | None:
    """The centre's share of the shorter side, as `preprocessor_config.json` gives it."""
    resized, cropped = described.get("size"), described.get("crop_size")
    if not isinstance(resized, dict):
        return None
    short = resized.get("shortest_edge") or min(resized.get("height", 0), resized.get("width", 0))
    inner = min(cropped.values()) if isinstance(cropped, dict) and described.get("do_center_crop") else short
    return min(1.0, inner / short) if short else None


def _from_timm(name: str, resolution: int | None) -> tuple[nn.Module, Preprocessing, Values]:
    with _refusing("model must be one of transformers where timm is missing, got another"):
        timm = import_timm()
    if not timm.is_model(name):
        raise ValueError(
            f"model must be a folder, a checkpoint ({_CHECKPOINT}) or an architecture of timm, got {name!r}"
        )
    options = {} if resolution is None else {"img_size": resolution}
    with _refusing(f"model must be one whose weights timm can fetch, got {name!r}"):
        model = timm.create_model(name, pretrained=True, **options)
    return model, _timm_preprocessing(model, resolution), {}


def _from_checkpoint(
    path: Path, arch: str | None, resolution: int | None
) -> tuple[nn.Module, Preprocessing, Values]:
    with _refusing("model must be one of transformers where timm is missing, got another"):
        timm = import_timm()
    from safetensors.torch import load_file

    with _refusing(f"model must be a readable checkpoint, got {path.name}"):
        weights: dict[str, Tensor] = load_file(path)
    if arch is not None:
        if not timm.is_model(arch):
            raise ValueError(f"arch must be an architecture of timm, got {arch!r}")
        model = timm.create_model(arch, pretrained=False)
    else:
        from timm.models.vision_transformer import VisionTransformer

        model = VisionTransformer(**vit_shape(weights))
    with _refusing(f"checkpoint must have the weights of {arch or 'a plain ViT (or give arch)'}, got {path.name}"):
        model.load_state_dict(weights)
    if resolution is not None:
        model.set_input_size(img_size=(resolution, resolution))
    return model, _timm_preprocessing(model, resolution), {}


def vit_shape(weights: Mapping[str, Tensor]) -> Values:
    """Arguments of timm's `VisionTransformer` for the checkpoint of a plain ViT with heads of 64 dimensions.

    Activation and epsilon, which weights do not show, are timm's defaults for a ViT.
    """
    needed = ("patch_embed.proj.weight", "pos_embed", "blocks.0.mlp.fc1.weight", "head.weight")
    absent = [name for name in needed if name not in weights]
    if absent:
        raise ValueError(f"checkpoint must have timm's names of a plain ViT (or give arch), got no {absent[0]}")
    projection, positions, hidden, head = (weights[name] for name in needed)
    dim, patch, n_prefix = projection.shape[0], projection.shape[2], int("cls_token" in weights)
    if dim % _HEAD_DIM:
        raise ValueError(
            f"checkpoint must have a width that is a multiple of {_HEAD_DIM} (or give arch), got {dim}"
        )
    return {
        "img_size": patch * round((positions.shape[1] - n_prefix) ** 0.5),
        "patch_size": patch,
        "in_chans": projection.shape[1],
        "num_classes": head.shape[0],
        "class_token": bool(n_prefix),
        "global_pool": "token" if n_prefix and "fc_norm.weight" not in weights else "avg",
        "fc_norm": "fc_norm.weight" in weights,
        "embed_dim": dim,
        "depth": 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks.")),
        "num_heads": dim // _HEAD_DIM,
        "mlp_ratio": hidden.shape[0] / dim,
        "qkv_bias": "blocks.0.attn.qkv.bias" in weights,
    }


def _timm_preprocessing(model: Any, resolution: int | None) -> Preprocessing:
    described: Values = getattr(model, "pretrained_cfg", None) or {}
    return _preprocessing(resolution or int(model.patch_embed.img_size[0]), described.get("crop_pct"), described)


def _preprocessing(size: int, crop: float | None, described: Values, prefix: str = "") -> Preprocessing:
    """The model's own mean, deviation and crop where it comes with them, else those of ImageNet."""
    mean, std = described.get(f"{prefix}mean"), described.get(f"{prefix}std")
    return Preprocessing(
        size, crop or Preprocessing.crop, tuple(mean or IMAGENET_MEAN), tuple(std or IMAGENET_STD)
    )


@torch.inference_mode()
def _with_sizes(model: nn.Module, preprocessing: Preprocessing, arguments: Values, device: str) -> VisionModel:
    """Count layers and tokens on one empty image."""
    sizes: list[tuple[int, int]] = []

    def observer(query: Tensor, key: Tensor, context: AttentionContext) -> None:
        sizes.append((key.shape[2], context.n_prefix))

    channels = next(p.shape[1] for p in model.parameters() if p.ndim == 4)
    pixels = torch.zeros(1, channels, preprocessing.size, preprocessing.size, device=device)
    with observe(model, observer) as n_layers:
        model(pixels, **arguments)
    n_tokens, n_prefix = max(sizes)
    return VisionModel(model, preprocessing, n_tokens, n_prefix, n_layers, arguments)


# Folders of labelled images as batches of normalised pixels, with PIL and torch alone.

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_CACHED_IMAGES = 2000
"""Decoded images kept for the next method: 0.9 GB at 384 pixels."""


@dataclass(frozen=True)
class Preprocessing:
    """Shorter side to `size / crop`, centre crop of `size`, then `(x - mean) / std` on values in [0, 1]."""

    size: int = 224
    crop: float = 0.875
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """Images on disk."""

    paths: list[Path]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.paths)

    def batches(self, preprocessing: Preprocessing, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`(pixels [B, 3, S, S], labels [B])`, always in the same order."""
        mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (preprocessing.mean, preprocessing.std))
        for start in range(0, len(self), batch_size):
            chosen = slice(start, start + batch_size)
            pixels = [decode_image(path, preprocessing.size, preprocessing.crop) for path in self.paths[chosen]]
            yield (torch.stack(pixels) / 255 - mean) / std, torch.tensor(self.labels[chosen])


@lru_cache(maxsize=_CACHED_IMAGES)
def decode_image(path: Path, size: int, crop: float) -> Tensor:
    """One image as bytes `[3, size, size]`: shorter side to `size / crop` (bicubic), then the centre."""
    from PIL import Image

    with Image.open(path) as opened:
        image = opened.convert("RGB")
    short = round(size / crop)
    width, height = image.size
    if min(width, height) != short:
        ratio = short / min(width, height)
        wanted = (max(short, round(width * ratio)), max(short, round(height * ratio)))
        image = image.resize(wanted, Image.Resampling.BICUBIC)
    left, top = (image.size[0] - size) // 2, (image.size[1] - size) // 2
    image = image.crop((left, top, left + size, top + size))
    raw = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return raw.view(size, size, 3).permute(2, 0, 1).contiguous()


def open_folder(folder: str | Path, *, labels: str | Path | None = None, limit: int | None = None) -> ImageFolder:
    """Find labelled images.

    Args:
        folder: One sub-folder per class (numbered in the order of their names), or images with a labels file.
        labels: JSON that maps file names to class numbers. None = `labels.json` inside the folder or
            `<folder>_labels.json` next to it, if there is one.
        limit: Take this many, chosen at random; a smaller limit is the start of a larger one.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"images must be a folder, got {folder}")
    beside = (folder / "labels.json", folder.parent / f"{folder.name}_labels.json")
    file = labels or next((path for path in beside if path.is_file()), None)
    if file is None:
        classes = sorted(path for path in folder.iterdir() if path.is_dir())
        files = [(path, label) for label, kind in enumerate(classes) for path in sorted(kind.iterdir())]
        labelled = [(path, label) for path, label in files if path.suffix.lower() in SUFFIXES]
    else:
        labelled = [(folder / name, label) for name, label in sorted(_read_labels(Path(file)).items())]
        labelled = [(path, label) for path, label in labelled if path.is_file()]
    if not labelled:
        raise ValueError(
            f"images must be a folder of class folders, or of images with a labels JSON, got {folder} "
            f"with no labelled {', '.join(SUFFIXES)} in it"
        )
    if limit is not None and limit < len(labelled):
        random.Random(0).shuffle(labelled)
        labelled = labelled[:limit]
    return ImageFolder([path for path, _ in labelled], [label for _, label in labelled])


def _read_labels(file: Path) -> dict[str, int]:
    try:
        known: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # no file, not text, or not JSON
        raise ValueError(f"labels must be a JSON file, got {file} ({error})") from error
    if not isinstance(known, dict) or not all(isinstance(label, int) for label in known.values()):
        raise ValueError(f"labels must map file names to class numbers, got something else in {file}")
    return known


# The offline default of the vision studies: a small ViT trained on scikit-learn's digits.
#
# scikit-learn has 1,797 scans of 8x8 pixels. Every pixel is a token (65 with the class token). Training takes
# about a minute on a CPU; the model is cached.

SIZE = 8
N_TEST = 500
EPOCHS = 30
QUICK_EPOCHS = 6
_BATCH = 32
_RATE = 2e-3
# with smaller initial weights all pixel tokens are alike, and training takes three times as long
_SHAPE: Values = {
    "initializer_range": 0.1,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": SIZE,
    "patch_size": 1,
    "num_channels": 1,
    "num_labels": 10,
}
# part of the cached model's name; changes with the recipe
_RECIPE = "digits-vit-1"


@dataclass(frozen=True, eq=False)
class Digits:
    """Scans `[n, 1, 8, 8]` in [-1, 1] and their labels; preprocessing is fixed."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, preprocessing: Preprocessing, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`(pixels [B, 1, 8, 8], labels [B])`."""
        yield from zip(self.pixels.split(batch_size), self.labels.split(batch_size), strict=True)


Images: TypeAlias = ImageFolder | Digits
Report: TypeAlias = Callable[[str], None]


def load_digits() -> tuple[Digits, Digits]:
    """Train and test digits; the split never changes."""
    from sklearn.datasets import load_digits as load

    data = load()
    pixels = torch.from_numpy(data.images).float()[:, None] / 8 - 1
    labels = torch.from_numpy(data.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:N_TEST], order[N_TEST:]
    return Digits(pixels[train], labels[train]), Digits(pixels[test], labels[test])


def digits_model(*, epochs: int = EPOCHS, cache: Path | None = None, report: Report = print) -> Path:
    """The folder of the trained model in Hugging Face format; it is trained where it does not exist.

    Args:
        epochs: Training length; every value has its own model.
        cache: Parent folder; None = `$XDG_CACHE_HOME/prescore` or `~/.cache/prescore`.
        report: Receives progress, one line at a time.
    """
    folder = (cache or cache_directory()) / f"{_RECIPE}-{epochs}"
    if (folder / "config.json").is_file():
        return folder
    report(f"training a small ViT on scikit-learn's digits, once, for {folder}")
    model = train(epochs, report)
    # renamed when complete: two runs, or an interrupted one, must not leave half a model
    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    model.save_pretrained(part)
    if not folder.exists():
        part.rename(folder)
    return folder


def train(epochs: int, report: Report) -> Any:
    """Train a ViT on digits (93.6 % of the test scans after `EPOCHS`)."""
    mend_torchvision()
    from transformers import ViTConfig, ViTForImageClassification

    training, _ = load_digits()
    # initialisation draws from the global generator; the caller's state must not change
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = ViTForImageClassification(ViTConfig(**_SHAPE))
    order = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.05)
    steps = epochs * -(-len(training) // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=_RATE, total_steps=steps, pct_start=0.2)
    model.train()
    for epoch in range(epochs):
        for chosen in torch.randperm(len(training), generator=order).split(_BATCH):
            logits = model(pixel_values=_shifted(training.pixels[chosen], order)).logits
            loss = nn.functional.cross_entropy(logits, training.labels[chosen], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if (epoch + 1) % 10 == 0:
            report(f"epoch {epoch + 1} of {epochs}: loss {float(loss):.2f}")
    return model.eval()


def _shifted(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Move a batch by up to one pixel; without it the model overfits positions."""
    down, right = torch.randint(-1, 2, (2,), generator=generator).tolist()
    padded = nn.functional.pad(pixels, (1, 1, 1, 1), value=-1.0)
    return padded[:, :, 1 + down : 1 + down + SIZE, 1 + right : 1 + right + SIZE]
