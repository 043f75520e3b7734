"""`prescore retrieval`: can the model still find a fact far back when its attention is replaced?"""

from __future__ import annotations

import itertools
from typing import Annotated

import typer

from prescore.bench.cli.options import Json, Out, Resume, Seed, Threads, open_session
from prescore.bench.cli.settings import (
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
    say_what_is_exact,
)

_USUAL = ("hyper", "paper:kmeans", "uniform", "default")


def command(
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="single-needle, multi-key-needle, variable-tracking (default: these), or many-needles, which "
            "reads all depths in one forward; repeatable."
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="default, hyper, SCORER, paper:SCORER, a baseline; repeatable. exact is always measured."
        ),
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option("--length", "-n", help="Tokens; repeatable (default: 4096).")
    ] = None,
    depth: Annotated[
        list[float] | None,
        typer.Option(
            help="Where the fact stands, 0 to 1; repeatable (default: 0.1, 0.5; many-needles: 0.1, 0.3, ... 0.9)."
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Problems per task, length and depth; texts of many-needles.")
    ] = 10,
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

    Example: prescore retrieval --method default --method paper:kmeans -n 4096 --depth 0.5 --samples 20

    Example: prescore retrieval --task many-needles --method default -n 4096 -n 8192 --samples 25 -d book.txt
    """
    from prescore import checks
    from prescore.bench.language.documents import load_documents
    from prescore.bench.language.methods import check_changes, named_method
    from prescore.bench.language.model import load_language_model
    from prescore.bench.language.retrieval import (
        MANY_NEEDLES,
        NEEDLE_DEPTHS,
        TASK_DEPTHS,
        TASKS,
        Needles,
        Question,
        make_needle_text,
        make_problem,
        needles_row,
        retrieval_row,
    )
    from prescore.bench.language.tables import needles_table, retrieval_table

    lengths, tasks = length or [4096], task or TASKS
    for one in tasks:
        checks.one_of("task", one, (*TASKS, MANY_NEEDLES))
    single = [one for one in tasks if one != MANY_NEEDLES]
    questions = [Question(one, n, at) for n, one, at in itertools.product(lengths, single, depth or TASK_DEPTHS)]
    texts = [Needles(n, tuple(depth or NEEDLE_DEPTHS)) for n in lengths] if MANY_NEEDLES in tasks else []
    # local-only is the floor of single answers; many needles are expensive, and only exact attention is added
    names = dict.fromkeys(["exact", *(["local"] if single else []), *(method or _USUAL)])
    fields, budget, places = read_changes(changes), read_budget(top_k), read_layers(layers)
    methods = {
        n: [named_method(name, length=n, leaf=leaf, top_k=budget, changes=fields) for name in names]
        for n in lengths
    }
    for own in methods.values():
        check_changes(fields, own)
    haystack = load_documents([document], limit=1)[0]
    session = open_session("retrieval", out=out, json=json, resume=resume, threads=threads, device=device)
    quiet_loading()
    loaded = load_language_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    # a length without room for the facts is refused before anything is measured
    for question in questions:
        make_problem(loaded, haystack, question, seed)
    for text, sample in itertools.product(texts, range(samples)):
        make_needle_text(loaded, haystack, text, seed=seed, sample=sample)
    rows = [
        retrieval_row(loaded, haystack, each, question, samples=samples, layers=places, seed=seed)
        for question in questions
        for each in methods[question.length]
    ]
    # text by text, each under all methods: the records of a killed run can be compared
    rows += [
        needles_row(loaded, haystack, each, text, sample=sample, layers=places, seed=seed)
        for text in texts
        for sample in range(samples)
        for each in methods[text.length]
    ]
    records = session.run(rows)
    say_what_is_exact(session, methods)
    if questions:
        session.show(retrieval_table(records).to_rich())
    if texts:
        session.show(needles_table(records).to_rich())
    session.say(f"records: {session.file.path}")
