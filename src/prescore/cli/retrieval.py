"""`prescore retrieval`: can the model still find a fact far back when its attention is replaced?"""

from __future__ import annotations

import itertools
from typing import Annotated

import typer

from prescore.cli.options import Json, Out, Resume, Seed, Threads, open_session
from prescore.cli.settings import (
    Changes,
    Device,
    Dtype,
    Layers,
    Leaf,
    Model,
    RemoteCode,
    quiet_loading,
    read_budget,
    read_changes,
    read_layers,
    tell_what_is_exact,
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
        list[int] | None, typer.Option("--length", "-n", help="Tokens; repeatable (default: 4096).")
    ] = None,
    depth: Annotated[
        list[float] | None, typer.Option(help="Where the fact stands, 0 to 1; repeatable (default: 0.1, 0.5).")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Problems per task, length and depth.")] = 10,
    top_k: Annotated[str, typer.Option(help="Keys kept, count or fraction.")] = "256",
    leaf: Leaf = None,
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
    from prescore.evaluation.language.documents import load_documents
    from prescore.evaluation.language.methods import asked_for
    from prescore.evaluation.language.model import load_language_model
    from prescore.evaluation.language.overrides import check_overrides
    from prescore.evaluation.language.retrieval import TASKS, Question, make_problem, retrieval_row
    from prescore.report.language_tables import retrieval_table

    lengths = length or [4096]
    questions = [
        Question(one, n, place) for n, one, place in itertools.product(lengths, task or TASKS, depth or [0.1, 0.5])
    ]
    names = dict.fromkeys(["exact", "local", *(method or ["hyper", "kmeans", "random", "default"])])
    overrides, budget = read_changes(changes), read_budget(top_k)
    methods = {
        n: [asked_for(name, length=n, leaf=leaf, top_k=budget, overrides=overrides) for name in names]
        for n in lengths
    }
    for made in methods.values():
        check_overrides(overrides, [config for each in made if (config := each.config) is not None])
    haystack = load_documents([document], limit=1)[0]
    session = open_session("retrieval", out=out, json=json, resume=resume, threads=threads, device=device)
    quiet_loading()
    loaded = load_language_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    # a length without room for a question is refused before any is measured
    for question in questions:
        make_problem(loaded, haystack, question, seed)
    places = read_layers(layers)
    rows = [
        retrieval_row(loaded, haystack, each, question, samples=samples, layers=places, seed=seed)
        for question in questions
        for each in methods[question.length]
    ]
    records = session.run(rows)
    tell_what_is_exact(session, methods)
    session.show(retrieval_table(records).to_rich())
    session.say(f"records: {session.file.path}")
