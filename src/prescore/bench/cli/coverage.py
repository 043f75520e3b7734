"""`prescore coverage`: how many of the large attention weights lie on the keys that were kept (Appendix G)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prescore.bench.cli.options import Json, Out, Quick, Resume, Seed, Threads, open_session
from prescore.bench.cli.vision import (
    Arch,
    BatchSize,
    Device,
    ImageDir,
    Labels,
    Limit,
    Model,
    Resolution,
    StudyOptions,
    open_study,
    protections,
)

if TYPE_CHECKING:
    from prescore.bench.vision.coverage import Subject


_QUICK_METHODS = ("kmeans", "kmedian", "random")
_DIGIT_ROWS = (8, 16, 32)


def command(
    model: Model = None,
    arch: Arch = None,
    images: ImageDir = None,
    labels: Labels = None,
    limit: Limit = None,
    resolution: Resolution = None,
    language_model: Annotated[
        str | None,
        typer.Option(help="Measure a causal language model instead: smollm2, a folder, or a name on the hub."),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Text file or folder for the language model; may be repeated.  [default: Python's own]"),
    ] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens per text.")] = 1024,
    method: Annotated[
        list[str] | None,
        typer.Option(help="SCORER[-RULE][-sample]; may be repeated.  [default: the paper's and baselines]"),
    ] = None,
    clusters: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Clusters of clustering scorers; may be repeated.  [default: 4]"),
    ] = None,
    samples: Annotated[
        list[int] | None, typer.Option(min=1, help="Keys kept; may be repeated.  [default: 32 64 128]")
    ] = None,
    epsilon: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0, max=1.0, help="An entry above this is heavy; may be repeated.  [default: 0.01 0.1 0.3]"
        ),
    ] = None,
    prefix: Annotated[str, typer.Option(help="Class token and its like: protected, free or both.")] = "free",
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
    """Measure the share of heavy attention entries, and of the heaviest columns, that selected keys cover.

    Example: prescore coverage --model deit.safetensors --images val --limit 100 --samples 64
    """
    from prescore.bench.vision.coverage import CoverageGrid, VisionSubject, coverage_rows
    from prescore.bench.vision.tables import coverage_plot, coverage_table, paper_coverage_table

    base = CoverageGrid()
    digits = model is None and language_model is None
    grid = CoverageGrid(
        methods=tuple(method or (_QUICK_METHODS if quick else base.methods)),
        rows=tuple(samples or (_DIGIT_ROWS if digits else base.rows)),
        clusters=tuple(clusters or base.clusters),
        protect=protections(prefix),
        thresholds=tuple(epsilon or base.thresholds),
        seeds=tuple(range(seed, seed + seeds)),
    )
    if text and language_model is None:
        raise ValueError(f"text must be given with a language model, got text {text[0]!r} alone")
    subject: Subject
    if language_model is not None:
        if model is not None or images is not None:
            raise ValueError(f"language_model must be given without model and images, got {language_model!r}")
        subject = _texts(language_model, text, length, limit, device)
    else:
        asked = StudyOptions(model, arch, images, labels, limit, resolution, batch_size, device, quick)
        subject = VisionSubject(open_study(asked))
    planned = coverage_rows(subject, grid)
    session = open_session("coverage", out=out, json=json, resume=resume, threads=threads, device=device)
    records = session.run(planned)
    session.show(coverage_table(records).to_rich())
    beside = paper_coverage_table(records)
    if beside.rows:
        session.show(beside.to_rich())
    picture = session.out / "coverage.png"
    coverage_plot(records, picture)
    session.say(f"plot: {picture}")
    session.say(f"records: {session.file.path}")


def _texts(name: str, text: list[str] | None, length: int, limit: int | None, device: str) -> Subject:
    import torch

    from prescore.bench.language.documents import load_documents
    from prescore.bench.language.model import load_language_model
    from prescore.bench.vision.coverage import TextSubject

    loaded = load_language_model(name, device=device)
    documents = load_documents(text, limit=limit)
    long_enough = [tokens[:length] for d in documents if len(tokens := loaded.encode(d.text)) >= length]
    if not long_enough:
        raise ValueError(f"text must hold at least one document of {length} tokens, got {len(documents)} shorter")
    described = {
        "model": Path(name).name,
        "texts": [document.name for document in documents],
        "length": length,
        "n_texts": len(long_enough),
    }
    return TextSubject(loaded.model, torch.stack(long_enough).to(loaded.device), described)
