"""Folders of labelled images as batches of normalised pixels, with PIL and torch alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_CACHE_BYTES = 2**30


@dataclass(frozen=True)
class Preprocessing:
    """Shorter side to `size / crop`, centre crop of `size`, then `(x - mean) / std` on values in [0, 1]."""

    size: int = 224
    crop: float = 0.875
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD


class Images(Protocol):
    """Labelled images that come in batches."""

    def __len__(self) -> int:
        """How many there are."""

    def batches(self, preprocessing: Preprocessing, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`(pixels [B, 3, S, S], labels [B])`, always in the same order."""


@dataclass(eq=False)
class ImageFolder:
    """Images on disk. Decoded pixels are kept, as bytes, while they are few enough to keep."""

    paths: list[Path]
    labels: list[int]
    _kept: dict[tuple[int, int, float], Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.paths)

    def batches(self, preprocessing: Preprocessing, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Images.batches`."""
        mean = torch.tensor(preprocessing.mean).view(-1, 1, 1)
        std = torch.tensor(preprocessing.std).view(-1, 1, 1)
        for start in range(0, len(self), batch_size):
            numbers = range(start, min(start + batch_size, len(self)))
            pixels = torch.stack([self._pixels(number, preprocessing) for number in numbers])
            yield (pixels / 255 - mean) / std, torch.tensor(self.labels[start : start + batch_size])

    def _pixels(self, number: int, preprocessing: Preprocessing) -> Tensor:
        place = (number, preprocessing.size, preprocessing.crop)
        if place not in self._kept:
            decoded = decode_image(self.paths[number], preprocessing.size, preprocessing.crop)
            if (len(self._kept) + 1) * decoded.numel() > _CACHE_BYTES:
                return decoded
            self._kept[place] = decoded
        return self._kept[place]


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


def open_folder(
    folder: str | Path, *, labels: str | Path | None = None, limit: int | None = None, seed: int = 0
) -> ImageFolder:
    """Find labelled images.

    Args:
        folder: Either one sub-folder per class (classes are numbered in the order of their names), or images
            beside each other, with a labels file.
        labels: JSON that maps file names to class numbers. None = `labels.json` inside the folder or
            `<folder>_labels.json` beside it, if there is one.
        limit: Take this many, chosen at random with `seed`; the first n of a larger n.
        seed: Of that choice.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"images must be a folder, got {folder}")
    file = _labels_file(folder, labels)
    found = _from_json(folder, file) if file is not None else _from_classes(folder)
    if not found:
        raise ValueError(
            f"images must be a folder of class folders, or of images with a labels JSON, got {folder} "
            f"with no labelled {', '.join(SUFFIXES)} in it"
        )
    if limit is not None and limit < len(found):
        random.Random(seed).shuffle(found)
        found = found[:limit]
    return ImageFolder([path for path, _ in found], [label for _, label in found])


def _labels_file(folder: Path, labels: str | Path | None) -> Path | None:
    if labels is not None:
        if not Path(labels).is_file():
            raise ValueError(f"labels must be a JSON file, got {labels}")
        return Path(labels)
    guesses = (folder / "labels.json", folder.parent / f"{folder.name}_labels.json")
    return next((guess for guess in guesses if guess.is_file()), None)


def _from_json(folder: Path, file: Path) -> list[tuple[Path, int]]:
    try:
        known: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # not text, or not JSON
        raise ValueError(f"labels must be a JSON file, got {file} ({error})") from error
    if not isinstance(known, dict) or not all(isinstance(label, int) for label in known.values()):
        raise ValueError(f"labels must map file names to class numbers, got something else in {file}")
    return [(folder / name, label) for name, label in sorted(known.items()) if (folder / name).is_file()]


def _from_classes(folder: Path) -> list[tuple[Path, int]]:
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    return [
        (path, label)
        for label, kind in enumerate(classes)
        for path in sorted(kind.iterdir())
        if path.suffix.lower() in SUFFIXES
    ]
