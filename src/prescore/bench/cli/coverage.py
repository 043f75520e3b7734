"""`prescore coverage`: how many of the large attention weights lie on the selected keys (Appendix G)."""

from __future__ import annotations

from pathlib import Path

import typer

from prescore.bench.cli.options import Run
from prescore.bench.cli.vision import VisionOptions, show_run
from prescore.bench.records import Row, Values

_QUICK_METHODS = ["kmeans", "kmedian", "random"]
_DIGIT_BUDGETS = [8, 16, 32]


def command(
    given: VisionOptions,
    run: Run,
    language_model: str | None = typer.Option(
        None, help="Measure a causal language model instead: smollm2, a folder, or a name on the hub."
    ),
    text: list[str] | None = typer.Option(
        None, help="Text file or folder for the language model; may be repeated.  [default: Python's own]"
    ),
    length: int = typer.Option(1024, min=2, help="Tokens per text."),
    method: list[str] | None = typer.Option(
        None, help="SCORER[-RULE][-sample]; may be repeated.  [default: the paper's and baselines]"
    ),
    epsilon: list[float] | None = typer.Option(
        None, min=0.0, max=1.0, help="An entry above this is heavy; may be repeated.  [default: 0.01 0.1 0.3]"
    ),
    prefix: str = typer.Option("free", help="Whether class tokens are always read: protected, free or both."),
) -> None:
    """Measure the share of heavy attention entries, and of the heaviest columns, on selected keys.

    Example: prescore coverage --model deit.safetensors --images val --limit 100 --samples 64
    """
    from prescore.bench.vision import tables
    from prescore.paper.coverage import coverage_rows

    digits = given.model is None and language_model is None
    methods = method or (_QUICK_METHODS if run.quick else None)
    budgets = given.samples or (_DIGIT_BUDGETS if digits else None)
    grid = given.grid(run, prefix, methods=methods, budgets=budgets, thresholds=epsilon)
    if language_model is None:
        if text:
            raise ValueError(f"text must be given with a language model, got text {text[0]!r} alone")
        study = given.study(run.quick)
        rows = coverage_rows(study.observe, study.described, n_prefix=study.model.n_prefix, **grid)
    else:
        if given.model is not None or given.images is not None:
            raise ValueError(f"language_model must be given without model and images, got {language_model!r}")
        rows = _text_rows(language_model, text, length, given.limit, given.device, grid)
    session = run.open("coverage", given.device, writes=["coverage.png"])
    made = (tables.coverage_table,)
    show_run(session, session.run(rows), made, tables.coverage_plot)


def _text_rows(
    name: str, text: list[str] | None, length: int, limit: int | None, device: str, grid: Values
) -> list[Row]:
    from prescore.bench.language.documents import load_documents
    from prescore.bench.language.model import load_language_model
    from prescore.paper.coverage import coverage_rows, observe_texts

    loaded = load_language_model(name, device=device)
    documents = load_documents(text, limit=limit)
    long_enough = [tokens[:length] for d in documents if len(tokens := loaded.encode(d.text)) >= length]
    if not long_enough:
        raise ValueError(f"text must hold at least one document of {length} tokens, got {len(documents)} shorter")
    described: Values = {"model": Path(name).name, "texts": [document.name for document in documents]}
    described |= {"length": length, "n_texts": len(long_enough)}
    return coverage_rows(observe_texts(loaded.model, long_enough), described, **grid)
