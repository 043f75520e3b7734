"""`prescore coverage`: how many of the large attention weights lie on the selected keys (Appendix G)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prescore.bench.cli import vision
from prescore.bench.cli.options import Json, Out, Quick, Resume, Seed, Threads, open_session
from prescore.bench.records import Row, Values

_QUICK_METHODS = ["kmeans", "kmedian", "random"]
_DIGIT_BUDGETS = [8, 16, 32]


def command(
    model: vision.Model = None,
    arch: vision.Arch = None,
    images: vision.ImageDir = None,
    labels: vision.Labels = None,
    limit: vision.Limit = None,
    resolution: vision.Resolution = None,
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
    clusters: vision.Clusters = None,
    samples: vision.Samples = None,
    epsilon: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0, max=1.0, help="An entry above this is heavy; may be repeated.  [default: 0.01 0.1 0.3]"
        ),
    ] = None,
    prefix: vision.Prefix = "free",
    seeds: vision.Seeds = 1,
    batch_size: vision.BatchSize = 50,
    device: vision.Device = "cpu",
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
    resume: Resume = False,
    quick: Quick = False,
    threads: Threads = None,
) -> None:
    """Measure the share of heavy attention entries, and of the heaviest columns, on selected keys.

    Example: prescore coverage --model deit.safetensors --images val --limit 100 --samples 64
    """
    from prescore.bench.vision import tables
    from prescore.bench.vision.coverage import coverage_rows

    digits = model is None and language_model is None
    grid = vision.read_grid(
        methods=method or (_QUICK_METHODS if quick else None),
        budgets=samples or (_DIGIT_BUDGETS if digits else None),
        n_clusters=clusters,
        prefix=prefix,
        thresholds=epsilon,
        seeds=range(seed, seed + seeds),
    )
    if language_model is None:
        if text:
            raise ValueError(f"text must be given with a language model, got text {text[0]!r} alone")
        study = vision.open_study(model, images, limit, batch_size, device, quick, arch, labels, resolution)
        rows = coverage_rows(study.observe, study.described, n_prefix=study.model.n_prefix, **grid)
    else:
        if model is not None or images is not None:
            raise ValueError(f"language_model must be given without model and images, got {language_model!r}")
        rows = _text_rows(language_model, text, length, limit, device, grid)
    session = open_session("coverage", out=out, json=json, resume=resume, threads=threads, device=device)
    made = (tables.coverage_table,)
    vision.show_run(session, session.run(rows), made, tables.coverage_plot)


def _text_rows(
    name: str, text: list[str] | None, length: int, limit: int | None, device: str, grid: Values
) -> list[Row]:
    from prescore.bench.language.documents import load_documents
    from prescore.bench.language.model import load_language_model
    from prescore.bench.vision.coverage import coverage_rows, observe_texts

    loaded = load_language_model(name, device=device)
    documents = load_documents(text, limit=limit)
    long_enough = [tokens[:length] for d in documents if len(tokens := loaded.encode(d.text)) >= length]
    if not long_enough:
        raise ValueError(f"text must hold at least one document of {length} tokens, got {len(documents)} shorter")
    described: Values = {"model": Path(name).name, "texts": [document.name for document in documents]}
    described |= {"length": length, "n_texts": len(long_enough)}
    return coverage_rows(observe_texts(loaded.model, long_enough), described, **grid)
