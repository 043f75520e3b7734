"""`prescore retrieval`: can the model still find a fact far back when its attention is replaced?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from prescore.bench.cli import options as cli

if TYPE_CHECKING:
    from prescore.bench.language.retrieval import Task

_USUAL = ("hyper", "paper:kmeans", "uniform", "default")
_QUICK_MANY_LENGTH = 1536


@dataclass(frozen=True)
class Problems:
    """Options: what is hidden in which text."""

    task: list[str] | None = typer.Option(
        None,
        help="single-needle, multi-key-needle, variable-tracking (default: these), or many-needles, which "
        "reads all depths in one forward; repeatable.",
    )
    depth: list[float] | None = typer.Option(
        None,
        help="Where the fact stands, 0 to 1; repeatable (default: 0.1, 0.5; many-needles: 0.1, 0.3, ... 0.9).",
    )
    samples: int | None = typer.Option(
        None, min=1, help="Problems per task, length and depth; texts of many-needles.  [default: 10]"
    )
    document: str = typer.Option(
        "python-reference", "--document", "-d", help="The text around the fact: a file or a name of the corpus."
    )


def command(
    given: cli.Comparison,
    run: cli.Run,
    problems: Problems,
    top_k: str | None = typer.Option(None, help="Keys kept, count or fraction.  [default: 256]"),
) -> None:
    """Hide facts in a long text and count how often the model states them, exactly and with replaced attention.

    Example: prescore retrieval --method default --method paper:kmeans -n 4096 --depth 0.5 --samples 20

    Example: prescore retrieval --task many-needles --method default -n 4096 -n 8192 --samples 25 -d book.txt
    """
    from prescore.bench.language.answers import retrieval_table
    from prescore.bench.language.documents import load_documents
    from prescore.bench.language.retrieval import MANY_NEEDLES, TASKS, make_problem, retrieval_row

    tasks, samples, leaf = problems.task or list(TASKS), problems.samples, given.leaf
    lengths = given.length or [4096]
    if run.quick:
        tasks, samples = problems.task or list(TASKS[:1]), samples or 1
        lengths = given.length or [_QUICK_MANY_LENGTH if MANY_NEEDLES in tasks else cli.QUICK_LENGTH]
        leaf, top_k = leaf or cli.QUICK_LEAF, top_k or cli.QUICK_TOP_K
    jobs = _jobs(tasks, lengths, problems.depth, samples or 10)
    # local-only is the floor of single answers; many needles are expensive, and only exact attention is added
    floor = ["local"] if set(tasks) != {MANY_NEEDLES} else []
    names = ["exact", *floor, *(given.method or _USUAL)]
    methods = given.methods(lengths, names, leaf=leaf, top_k=top_k)
    layers, haystack = cli.read_layers(given.layers), load_documents([problems.document], limit=1)[0]
    session = run.open("retrieval", given.device)
    loaded = given.load()
    # a length without room for the facts is refused before anything is measured
    for job, numbers in jobs:
        make_problem(loaded, haystack, job, seed=run.seed, sample=numbers[0])
    rows = [
        retrieval_row(loaded, haystack, method, job, numbers, layers=layers, seed=run.seed)
        for job, numbers in jobs
        for method in methods[job.length]
    ]
    records = session.run(rows)
    cli.say_what_is_exact(session, methods)
    with session.reading():
        session.show(retrieval_table(records).to_rich())
    session.say(f"records: {session.file.path}")


def _jobs(
    tasks: Sequence[str], lengths: Sequence[int], depths: Sequence[float] | None, samples: int
) -> list[tuple[Task, range]]:
    """Tasks, and the numbers of the samples that a row of each has."""
    from prescore.bench.language.retrieval import MANY_NEEDLES, NEEDLE_DEPTHS, TASK_DEPTHS, Task

    single = [name for name in tasks if name != MANY_NEEDLES]
    jobs = [
        (Task(name, n, (at,)), range(samples))
        for n, name, at in itertools.product(lengths, single, depths or TASK_DEPTHS)
    ]
    # text by text, each under all methods: the records of a killed run can be compared
    many = itertools.product(lengths if MANY_NEEDLES in tasks else [], range(samples))
    needles = tuple(depths or NEEDLE_DEPTHS)
    return jobs + [(Task(MANY_NEEDLES, n, needles), range(sample, sample + 1)) for n, sample in many]
