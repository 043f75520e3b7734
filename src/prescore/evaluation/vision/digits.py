"""The offline default of the vision studies: a small ViT trained on scikit-learn's digits.

1,797 real 8x8 scans come with scikit-learn; the model sees every pixel as a token (65 with the class token)
and is trained in about a minute on a CPU, once, then kept in the user's cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prescore.evaluation.vision.data import Preprocessing
from prescore.integrations.offline_model import cache_directory
from prescore.integrations.timm_import import mend_torchvision
from prescore.values import Values

SIZE = 8
N_TEST = 500
EPOCHS = 30
QUICK_EPOCHS = 6
_BATCH = 32
_RATE = 2e-3
# small weights at the start make all pixel tokens look alike, and learning takes three times as long
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
# part of the cache's name: another recipe must not find an old model
_RECIPE = "digits-vit-1"


@dataclass(frozen=True, eq=False)
class Digits:
    """Scans `[n, 1, 8, 8]` in [-1, 1] and their labels; preprocessing is fixed."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        """How many there are."""
        return len(self.labels)

    def batches(self, preprocessing: Preprocessing, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Images.batches`."""
        yield from zip(self.pixels.split(batch_size), self.labels.split(batch_size), strict=True)


def load_digits() -> tuple[Digits, Digits]:
    """Train and test digits; the split never changes."""
    from sklearn.datasets import load_digits as load

    data = load()
    pixels = torch.from_numpy(data.images).float()[:, None] / 8 - 1
    labels = torch.from_numpy(data.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:N_TEST], order[N_TEST:]
    return Digits(pixels[train], labels[train]), Digits(pixels[test], labels[test])


def digits_model(
    *, epochs: int = EPOCHS, cache: Path | None = None, report: Callable[[str], None] | None = None
) -> Path:
    """The folder of the trained model, in Hugging Face format; trains it when it is not there.

    Args:
        epochs: How long it is trained; a model of its own for every value.
        cache: Where models are kept; None = `$XDG_CACHE_HOME/prescore` or `~/.cache/prescore`.
        report: Told what is going on, one line at a time.
    """
    folder = (cache or cache_directory()) / f"{_RECIPE}-{epochs}"
    if (folder / "config.json").is_file():
        return folder
    say = report or (lambda line: None)
    say(f"training a small ViT on scikit-learn's digits, once, for {folder}")
    model = train(epochs=epochs, report=say)
    # a name of its own first: two runs, or an interrupted one, must not leave half a model
    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    model.save_pretrained(part)
    if folder.exists():
        return folder
    part.rename(folder)
    return folder


def train(*, epochs: int = EPOCHS, seed: int = 0, report: Callable[[str], None] | None = None) -> Any:
    """A ViT that reads digits (93.6 % of the test scans after `EPOCHS`, seed 0)."""
    mend_torchvision()
    from transformers import ViTConfig, ViTForImageClassification

    known, unseen = load_digits()
    # initialisation draws from the global generator: fork it, so that the caller's stays as it was
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = ViTForImageClassification(ViTConfig(**_SHAPE))
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.05)
    steps = epochs * -(-len(known) // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=_RATE, total_steps=steps, pct_start=0.2)
    for epoch in range(epochs):
        model.train()
        for chosen in torch.randperm(len(known), generator=order).split(_BATCH):
            logits = model(pixel_values=_shifted(known.pixels[chosen], order)).logits
            loss = nn.functional.cross_entropy(logits, known.labels[chosen], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if report is not None and (epoch + 1) % 10 == 0:
            report(f"epoch {epoch + 1} of {epochs}: {100 * accuracy(model, unseen):.1f} % of the test scans")
    return model.eval()


@torch.inference_mode()
def accuracy(model: Any, digits: Digits) -> float:
    """Share of the scans that are read correctly."""
    model.eval()
    right = sum(
        int((model(pixel_values=pixels).logits.argmax(-1) == labels).sum())
        for pixels, labels in digits.batches(Preprocessing(SIZE), 256)
    )
    return right / len(digits)


def _shifted(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Move a batch by up to one pixel: 1,297 scans are few, and position is most of what there is to overfit."""
    down, right = torch.randint(-1, 2, (2,), generator=generator).tolist()
    padded = nn.functional.pad(pixels, (1, 1, 1, 1), value=-1.0)
    return padded[:, :, 1 + down : 1 + down + SIZE, 1 + right : 1 + right + SIZE]
