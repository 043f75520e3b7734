"""`prescore vision`: what a vision transformer loses when its queries read only some keys."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from prescore.bench.cli.options import Run
from prescore.bench.records import Values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prescore.bench.vision.accuracy import Study

_QUICK_LIMIT = 100
_QUICK_METHODS = ["exact", "kmeans", "kmeans-farthest-sample", "random", "centroids"]
DIGIT_BUDGETS = [8, 16, 24, 32]
_KEEP_PREFIX = {"protected": (True,), "free": (False,), "both": (True, False)}


@dataclass(frozen=True)
class VisionOptions:
    """A model on images, and a grid of settings."""

    model: str | None = typer.Option(
        None,
        help="timm architecture, Hugging Face folder, or checkpoint file with timm's names.  "
        "[default: a small ViT trained here on scikit-learn's digits, once]",
    )
    arch: str | None = typer.Option(None, help="timm architecture of a checkpoint.  [default: a plain ViT]")
    images: Path | None = typer.Option(
        None, help="Folder of images: one folder per class, or images and a labels JSON."
    )
    labels: Path | None = typer.Option(None, help="JSON from file name to class number.  [default: found]")
    limit: int | None = typer.Option(None, min=1, help="Use this many images, chosen at random.")
    resolution: int | None = typer.Option(
        None, min=1, help="Image side in pixels; position embeddings are resized."
    )
    clusters: list[int] | None = typer.Option(
        None, "--clusters", "--num-cluster", min=1, help="Clusters of the scorers; may be repeated.  [default: 4]"
    )
    samples: list[int] | None = typer.Option(
        None,
        "--samples",
        "--num-sample",
        min=1,
        help="Keys and centroids that a query reads; may be repeated.  [default: 32 64 (96) 128]",
    )
    seeds: int = typer.Option(1, min=1, help="Seeds per setting, from --seed up.")
    batch_size: int = typer.Option(50, min=1, help="Images per forward pass.")
    device: str = typer.Option("cpu", help="Where to run: cpu, cuda, ...")

    def grid(self, run: Run, prefix: str, **options: Sequence[object] | None) -> Values:
        """The settings that were given; the study has the defaults of the others."""
        from prescore import checks

        checks.one_of("prefix", prefix, _KEEP_PREFIX)
        options |= {"n_clusters": self.clusters, "seeds": range(run.seed, run.seed + self.seeds)}
        given = {name: tuple(values) for name, values in options.items() if values}
        return {**given, "keep_prefix": _KEEP_PREFIX[prefix]}

    def study(self, quick: bool, *, may_train: bool = True) -> Study:
        """The model on its images; without either, the digits, on which a model is trained once if it may."""
        from prescore.bench.vision import models
        from prescore.bench.vision.accuracy import Study

        if (self.model is None) != (self.images is None):
            missing, given = ("images", "model") if self.images is None else ("model", "images")
            raise ValueError(f"{missing} must be given together with {given}, got only {given}")
        limit = self.limit or (_QUICK_LIMIT if quick else None)
        described: Values = {"arch": self.arch, "resolution": self.resolution, "batch_size": self.batch_size}
        data: models.Images
        if self.model is not None and self.images is not None:
            model = self.model
            data = models.open_folder(self.images, labels=self.labels, limit=limit)
            described |= {"model": Path(model).name, "images": self.images.name}
        else:
            for name in ("arch", "labels", "resolution"):
                value = getattr(self, name)
                if value is not None:
                    raise ValueError(
                        f"{name} must be given with a model and images, got {name} {value} for the digits"
                    )
            epochs = models.QUICK_EPOCHS if quick and may_train else models.EPOCHS
            report = partial(print, file=sys.stderr, flush=True) if may_train else _refuse_training
            model = str(models.digits_model(epochs=epochs, report=report))
            test = models.load_digits()[1]
            data = models.Digits(test.pixels[:limit], test.labels[:limit])
            described |= {"model": f"digits ({epochs} epochs)", "images": "digits"}
        described["n_images"] = len(data)
        loaded = models.load_vision_model(model, arch=self.arch, resolution=self.resolution, device=self.device)
        return Study(loaded, data, described, self.batch_size, self.device)


def _refuse_training(progress: str) -> None:
    raise ValueError(
        "--quick must come with --model and --images, or after a run without it, because it trains no model, "
        f"got {progress!r}"
    )


def command(
    given: VisionOptions,
    run: Run,
    method: list[str] | None = typer.Option(
        None,
        help="exact, centroids, published, routed, default, or SCORER[-RULE][-sample][+centroids]; repeatable.  "
        "[default: the paper's grid and ours]",
    ),
    share: list[float] | None = typer.Option(
        None, min=0.01, max=0.99, help="Share of centroids in `+centroids`; may be repeated.  [default: 0.5]"
    ),
    prefix: str = typer.Option("protected", help="Whether class tokens are always read: protected, free or both."),
) -> None:
    """Measure top-1, top-5 and throughput of a ViT with pre-scored attention against exact attention.

    Example: prescore vision --model deit.safetensors --images val --samples 64 --samples 128 --seeds 3
    """
    from prescore.bench.vision import tables
    from prescore.bench.vision.accuracy import accuracy_rows

    methods = method or (_QUICK_METHODS if run.quick else None)
    budgets = given.samples or (None if given.model else DIGIT_BUDGETS)
    grid = given.grid(run, prefix, methods=methods, budgets=budgets, centroid_shares=share)
    # methods are checked before a run is opened
    rows = accuracy_rows(given.study(run.quick), **grid)
    session = run.open("vision", given.device, writes=["vision.png"])
    records, picture = session.run(rows), session.out / "vision.png"
    with session.reading():
        session.show(tables.accuracy_table(records).to_rich())
        tables.accuracy_plot(records, picture)
    session.say(f"plot: {picture}\nrecords: {session.file.path}")
