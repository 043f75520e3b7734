"""`prescore vision`: what a vision transformer loses when its queries read only some keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from prescore.bench.cli.options import Json, Out, Quick, Resume, Seed, Threads, open_session
from prescore.types import Values

if TYPE_CHECKING:
    from prescore.bench.vision.accuracy import Study


Model = Annotated[
    str | None,
    typer.Option(
        help="timm architecture, Hugging Face folder, or checkpoint file with timm's names.  "
        "[default: a small ViT trained here on scikit-learn's digits, once]"
    ),
]
Arch = Annotated[str | None, typer.Option(help="timm architecture of a checkpoint.  [default: a plain ViT]")]
ImageDir = Annotated[
    Path | None,
    typer.Option("--images", help="Folder of images: one folder per class, or images and a labels JSON."),
]
Labels = Annotated[Path | None, typer.Option(help="JSON from file name to class number.  [default: found]")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use this many images, chosen at random.")]
Resolution = Annotated[
    int | None, typer.Option(min=1, help="Image side in pixels; position embeddings are resized.")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Images per forward pass.")]
Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")]

_QUICK_LIMIT = 100
_QUICK_METHODS = ("exact", "kmeans", "kmeans-farthest-sample", "random", "centroids")
_DIGIT_ROWS = (8, 16, 24, 32)
_PROTECT = {"protected": (True,), "free": (False,), "both": (True, False)}


def command(
    model: Model = None,
    arch: Arch = None,
    images: ImageDir = None,
    labels: Labels = None,
    limit: Limit = None,
    resolution: Resolution = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="exact, centroids, routed, default, or SCORER[-RULE][-sample][+centroids]; may be repeated.  "
            "[default: the paper's grid and ours]"
        ),
    ] = None,
    clusters: Annotated[
        list[int] | None,
        typer.Option(
            "--clusters",
            "--num-cluster",
            min=1,
            help="Clusters of clustering scorers; may be repeated.  [default: 4]",
        ),
    ] = None,
    samples: Annotated[
        list[int] | None,
        typer.Option(
            "--samples",
            "--num-sample",
            min=1,
            help="Key rows in all, centroids included; may be repeated.  [default: 32 64 96 128]",
        ),
    ] = None,
    share: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01, max=0.99, help="Share of centroids in `+centroids`; may be repeated.  [default: 0.5]"
        ),
    ] = None,
    prefix: Annotated[str, typer.Option(help="Class token and its like: protected, free or both.")] = "protected",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per setting, from --seed up.")] = 1,
    batch_size: BatchSize = 50,
    device: Device = "cpu",
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
    resume: Resume = False,
    quick: Quick = False,
    threads: Threads = None,
) -> None:
    """Measure top-1, top-5 and throughput of a ViT with pre-scored attention against exact attention.

    Example: prescore vision --model deit.safetensors --images val --samples 64 --samples 128 --seeds 3
    """
    from prescore.bench.vision.accuracy import Grid, study_rows
    from prescore.bench.vision.tables import accuracy_plot, accuracy_table, leverage_table, paper_accuracy_table

    base = Grid()
    grid = Grid(
        methods=tuple(method or (_QUICK_METHODS if quick else base.methods)),
        rows=tuple(samples or (base.rows if model else _DIGIT_ROWS)),
        clusters=tuple(clusters or base.clusters),
        shares=tuple(share or base.shares),
        protect=protections(prefix),
        seeds=tuple(range(seed, seed + seeds)),
    )
    asked = StudyOptions(model, arch, images, labels, limit, resolution, batch_size, device, quick)
    study = open_study(asked)
    # methods are checked here, so that a bad one leaves no empty run behind
    planned = study_rows(study, grid)
    session = open_session("vision", out=out, json=json, resume=resume, threads=threads, device=device)
    records = session.run(planned)
    session.show(accuracy_table(records).to_rich())
    for beside in (leverage_table(records), paper_accuracy_table(records)):
        if beside.rows:
            session.show(beside.to_rich())
    picture = session.out / "vision.png"
    accuracy_plot(records, picture)
    session.say(f"plot: {picture}")
    session.say(f"records: {session.file.path}")


def protections(prefix: str) -> tuple[bool, ...]:
    """Whether the class token and its like are kept, from what `--prefix` says."""
    if prefix not in _PROTECT:
        raise ValueError(f"prefix must be one of {', '.join(_PROTECT)}, got {prefix!r}")
    return _PROTECT[prefix]


class StudyOptions(NamedTuple):
    """What the command line says about a model and its images."""

    model: str | None
    arch: str | None
    images: Path | None
    labels: Path | None
    limit: int | None
    resolution: int | None
    batch_size: int
    device: str
    quick: bool


def open_study(asked: StudyOptions) -> Study:
    """The model on its images, from what the command line says; shared with `prescore coverage`."""
    from prescore.bench.vision.accuracy import Study
    from prescore.bench.vision.models import load_vision_model, open_folder

    if (asked.model is None) != (asked.images is None):
        missing, given = ("images", "model") if asked.images is None else ("model", "images")
        raise ValueError(f"{missing} must be given together with {given}, got only {given}")
    limit = asked.limit or (_QUICK_LIMIT if asked.quick else None)
    described = {"arch": asked.arch, "resolution": asked.resolution, "batch_size": asked.batch_size}
    if asked.model is None or asked.images is None:
        return _open_digits(asked, limit, described)
    found = open_folder(asked.images, labels=asked.labels, limit=limit)
    loaded = load_vision_model(asked.model, arch=asked.arch, resolution=asked.resolution, device=asked.device)
    described |= {"model": Path(asked.model).name, "images": asked.images.name, "n_images": len(found)}
    return Study(loaded, found, described, asked.batch_size, asked.device)


def _open_digits(asked: StudyOptions, limit: int | None, described: Values) -> Study:
    """The offline default: a model trained here on scans that come with scikit-learn."""
    import sys

    from prescore.bench.vision.accuracy import Study
    from prescore.bench.vision.models import (
        EPOCHS,
        QUICK_EPOCHS,
        Digits,
        digits_model,
        load_digits,
        load_vision_model,
    )

    for name in ("arch", "labels", "resolution"):
        value = getattr(asked, name)
        if value is not None:
            raise ValueError(f"{name} must be given with a model and images, got {name} {value} for the digits")
    epochs = QUICK_EPOCHS if asked.quick else EPOCHS
    folder = digits_model(epochs=epochs, report=lambda line: print(line, file=sys.stderr, flush=True))
    digits = load_digits()[1]
    digits = Digits(digits.pixels[:limit], digits.labels[:limit])
    described |= {"model": f"digits ({epochs} epochs)", "images": "digits", "n_images": len(digits)}
    return Study(load_vision_model(folder, device=asked.device), digits, described, asked.batch_size, asked.device)
