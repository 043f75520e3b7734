"""`prescore retrieval`: can the model still find a fact far back when its attention is replaced?"""

from __future__ import annotations

import itertools
from typing import Annotated

import typer

from prescore.cli.options import Json, Out, Resume, Seed, Threads, open_session
from prescore.cli.perplexity import (
    Changes,
    Device,
    Dtype,
    Layers,
    Model,
    RemoteCode,
    quiet_loading,
    read_budget,
    read_changes,
    read_layers,
)


def command(
    task: Annotated[
        list[str] | None,
        typer.Option(help="single-needle, multi-key-needle, variable-tracking; repeatable. (default: all)"),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="exact is always measured; default, hyper, random, a scorer, a baseline; repeatable."),
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option("--length", "-n", help="Tokens; repeatable (default: 2048).")
    ] = None,
    depth: Annotated[
        list[float] | None, typer.Option(help="Where the fact stands, 0 to 1; repeatable (default: 0.1, 0.5).")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Problems per task, length and depth.")] = 10,
    top_k: Annotated[str, typer.Option(help="Keys kept, count or fraction.")] = "256",
    leaf: Annotated[int | None, typer.Option(min=1, help="Exact causal leaves. (default: length / 8)")] = None,
    document: Annotated[
        str, typer.Option("--document", "-d", help="The text around the fact: a file or a name of the corpus.")
    ] = "python-reference",
    model: Model = "smollm2",
    layers: Layers = "all",
    changes: Changes = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    trust_remote_code: RemoteCode = False,
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
    resume: Resume = False,
    threads: Threads = None,
) -> None:
    """Hide facts in a long text and count how often the model states them, exactly and with replaced attention.

    Example: prescore retrieval --method default --method kmeans -n 4096 --depth 0.5 --samples 20
    """
    from prescore import checks
    from prescore.evaluation.documents import load_documents
    from prescore.evaluation.language_model import load_language_model
    from prescore.evaluation.methods import named
    from prescore.evaluation.retrieval import TASKS, check_depths, make_problem, retrieval_row
    from prescore.report.language_tables import retrieval_table

    tasks, depths, lengths = task or list(TASKS), depth or [0.1, 0.5], length or [2048]
    for name in tasks:
        checks.one_of("task", name, TASKS)
    check_depths(depths)
    names = ["exact", "local", *(method or ["hyper", "kmeans", "random", "default"])]
    options = {"top_k": read_budget(top_k), "overrides": read_changes(changes)}
    by_length = {
        n: [named(name, leaf=leaf or max(1, n // 8), **options) for name in dict.fromkeys(names)]  # type: ignore[arg-type]
        for n in lengths
    }
    haystack = load_documents([document], limit=1)[0]
    session = open_session("retrieval", out=out, json=json, resume=resume, threads=threads, device=device)
    quiet_loading()
    loaded = load_language_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    # a length without room for a question is refused before any is measured
    for n, one, place in itertools.product(lengths, tasks, depths):
        make_problem(loaded, haystack, one, length=n, depth=place, seed=seed)
    rows = [
        retrieval_row(
            loaded,
            haystack,
            each,
            one,
            length=n,
            depth=place,
            samples=samples,
            layers=read_layers(layers),
            seed=seed,
        )
        for n in lengths
        for one in tasks
        for place in depths
        for each in by_length[n]
    ]
    records = session.run(rows)
    session.show(retrieval_table(records).to_rich())
    session.say(f"records: {session.file.path}")
