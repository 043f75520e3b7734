"""`prescore vision`: what a vision transformer loses when its queries read only some keys."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prescore.bench.cli.options import Json, Out, Quick, Resume, Seed, Session, Threads, open_session
from prescore.bench.records import Values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prescore.bench.records import Record
    from prescore.bench.tables import Table
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
Clusters = Annotated[
    list[int] | None,
    typer.Option(
        "--clusters", "--num-cluster", min=1, help="Clusters of the scorers; may be repeated.  [default: 4]"
    ),
]
Samples = Annotated[
    list[int] | None,
    typer.Option(
        "--samples",
        "--num-sample",
        min=1,
        help="Keys and centroids that a query reads; may be repeated.  [default: 32 64 (96) 128]",
    ),
]
Prefix = Annotated[str, typer.Option(help="Whether class tokens are always read: protected, free or both.")]
Seeds = Annotated[int, typer.Option(min=1, help="Seeds per setting, from --seed up.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Images per forward pass.")]
Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")]

_QUICK_LIMIT = 100
_QUICK_METHODS = ["exact", "kmeans", "kmeans-farthest-sample", "random", "centroids"]
_DIGIT_BUDGETS = [8, 16, 24, 32]
_KEEP_PREFIX = {"protected": (True,), "free": (False,), "both": (True, False)}


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
    clusters: Clusters = None,
    samples: Samples = None,
    share: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01, max=0.99, help="Share of centroids in `+centroids`; may be repeated.  [default: 0.5]"
        ),
    ] = None,
    prefix: Prefix = "protected",
    seeds: Seeds = 1,
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
    from prescore.bench.vision import tables
    from prescore.bench.vision.accuracy import accuracy_rows

    grid = read_grid(
        methods=method or (_QUICK_METHODS if quick else None),
        budgets=samples or (None if model else _DIGIT_BUDGETS),
        n_clusters=clusters,
        centroid_shares=share,
        prefix=prefix,
        seeds=range(seed, seed + seeds),
    )
    study = open_study(model, images, limit, batch_size, device, quick, arch, labels, resolution)
    # methods are checked before a run is opened
    rows = accuracy_rows(study, **grid)
    session = open_session("vision", out=out, json=json, resume=resume, threads=threads, device=device)
    made = (tables.accuracy_table,)
    show_run(session, session.run(rows), made, tables.accuracy_plot)


def read_grid(*, prefix: str, **options: Sequence[object] | None) -> Values:
    """The options that were given; the study has the defaults of the others."""
    from prescore import checks

    checks.one_of("prefix", prefix, _KEEP_PREFIX)
    given = {name: tuple(values) for name, values in options.items() if values}
    return {**given, "keep_prefix": _KEEP_PREFIX[prefix]}


def show_run(
    session: Session,
    records: Sequence[Record],
    tables: Sequence[Callable[[Sequence[Record]], Table]],
    draw: Callable[[Sequence[Record], Path], None],
) -> None:
    """Print the tables that have rows, and save the plot."""
    shown = [table(records) for table in tables]
    session.show(*(table.to_rich() for table in shown if table.rows))
    picture = session.out / f"{session.command}.png"
    draw(records, picture)
    session.say(f"plot: {picture}\nrecords: {session.file.path}")


def open_study(
    model: str | None,
    images: Path | None,
    limit: int | None,
    batch_size: int,
    device: str,
    quick: bool,
    arch: str | None,
    labels: Path | None,
    resolution: int | None,
) -> Study:
    """The model on its images, for `vision` and `coverage`; without either, the digits."""
    from prescore.bench.vision import models
    from prescore.bench.vision.accuracy import Study

    if (model is None) != (images is None):
        missing, given = ("images", "model") if images is None else ("model", "images")
        raise ValueError(f"{missing} must be given together with {given}, got only {given}")
    limit = limit or (_QUICK_LIMIT if quick else None)
    described: Values = {"arch": arch, "resolution": resolution, "batch_size": batch_size}
    data: models.Images
    if model is not None and images is not None:
        data = models.open_folder(images, labels=labels, limit=limit)
        described |= {"model": Path(model).name, "images": images.name}
    else:
        for name, value in (("arch", arch), ("labels", labels), ("resolution", resolution)):
            if value is not None:
                raise ValueError(
                    f"{name} must be given with a model and images, got {name} {value} for the digits"
                )
        epochs = models.QUICK_EPOCHS if quick else models.EPOCHS
        model = str(
            models.digits_model(epochs=epochs, report=lambda line: print(line, file=sys.stderr, flush=True))
        )
        test = models.load_digits()[1]
        data = models.Digits(test.pixels[:limit], test.labels[:limit])
        described |= {"model": f"digits ({epochs} epochs)", "images": "digits"}
    described["n_images"] = len(data)
    loaded = models.load_vision_model(model, arch=arch, resolution=resolution, device=device)
    return Study(loaded, data, described, batch_size, device)
