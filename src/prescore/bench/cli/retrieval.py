"""`prescore retrieval`: can the model still find a fact far back when its attention is replaced?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import typer

from prescore.bench.cli import options as cli

_USUAL = ("hyper", "paper:kmeans", "uniform", "default")
_QUICK_MANY_LENGTH = 1536


def command(
    given: cli.Comparison,
    run: cli.Run,
    task: list[str] | None = typer.Option(
        None,
        help="single-needle, multi-key-needle, variable-tracking (default: these), or many-needles, which "
        "reads all depths in one forward; repeatable.",
    ),
    depth: list[float] | None = typer.Option(
        None,
        help="Where the fact stands, 0 to 1; repeatable (default: 0.1, 0.5; many-needles: 0.1, 0.3, ... 0.9).",
    ),
    samples: int | None = typer.Option(
        None, min=1, help="Problems per task, length and depth; texts of many-needles.  [default: 10]"
    ),
    top_k: str | None = typer.Option(None, help="Keys kept, count or fraction.  [default: 256]"),
    document: str = typer.Option(
        "python-reference", "--document", "-d", help="The text around the fact: a file or a name of the corpus."
    ),
) -> None:
    """Hide facts in a long text and count how often the model states them, exactly and with replaced attention.

    Example: prescore retrieval --method default --method paper:kmeans -n 4096 --depth 0.5 --samples 20

    Example: prescore retrieval --task many-needles --method default -n 4096 -n 8192 --samples 25 -d book.txt
    """
    from prescore.bench.language import retrieval
    from prescore.bench.language.answers import retrieval_table
    from prescore.bench.language.documents import load_documents
    from prescore.bench.methods import Sizes, check_changes, parse_method

    tasks: Sequence[str] = task or retrieval.TASKS
    many, leaf, seed = retrieval.MANY_NEEDLES, given.leaf, run.seed
    lengths = given.length or [4096]
    if run.quick:
        tasks, samples = task or retrieval.TASKS[:1], samples or 1
        lengths = given.length or [_QUICK_MANY_LENGTH if many in tasks else cli.QUICK_LENGTH]
        leaf, top_k = leaf or cli.QUICK_LEAF, top_k or cli.QUICK_TOP_K
    samples, budget = samples or 10, cli.read_budget(top_k or "256")
    single = [name for name in tasks if name != many]
    jobs = [
        (retrieval.Task(name, n, (at,)), range(samples))
        for n, name, at in itertools.product(lengths, single, depth or retrieval.TASK_DEPTHS)
    ]
    # text by text, each under all methods: the records of a killed run can be compared
    jobs += [
        (retrieval.Task(many, n, tuple(depth or retrieval.NEEDLE_DEPTHS)), range(sample, sample + 1))
        for n, sample in itertools.product(lengths if many in tasks else [], range(samples))
    ]
    # local-only is the floor of single answers; many needles are expensive, and only exact attention is added
    names = dict.fromkeys(["exact", *(["local"] if single else []), *(given.method or _USUAL)])
    fields, places = given.fields, cli.read_layers(given.layers)
    methods = {n: [parse_method(name, Sizes.of_text(n, leaf, budget, fields)) for name in names] for n in lengths}
    check_changes(fields, [each for own in methods.values() for each in own])
    haystack = load_documents([document], limit=1)[0]
    session = run.open("retrieval", given.device)
    loaded = given.load()
    # a length without room for the facts is refused before anything is measured
    for one, numbers in jobs:
        retrieval.make_problem(loaded, haystack, one, seed=seed, sample=numbers[0])
    records = session.run(
        [
            retrieval.retrieval_row(loaded, haystack, each, one, numbers, layers=places, seed=seed)
            for one, numbers in jobs
            for each in methods[one.length]
        ]
    )
    cli.say_what_is_exact(session, methods)
    with session.reading():
        session.show(retrieval_table(records).to_rich())
    session.say(f"records: {session.file.path}")
