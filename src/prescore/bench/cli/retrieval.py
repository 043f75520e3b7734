"""`prescore retrieval`: can the model still find a fact far back when its attention is replaced?"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

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
    tell_what_is_exact,
)

if TYPE_CHECKING:
    from prescore.bench.language.documents import Document
    from prescore.bench.language.methods import LanguageMethod
    from prescore.bench.language.model import LanguageModel
    from prescore.bench.language.needles import Needles
    from prescore.bench.language.retrieval import Question
    from prescore.bench.records import Row


_USUAL = ("hyper", "kmeans", "random", "default")
Methods = Mapping[int, Sequence["LanguageMethod"]]
"""What is measured at each length."""


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
        typer.Option(help="exact is always measured; default, hyper, random, a scorer, a baseline; repeatable."),
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
        int, typer.Option(min=1, help="BlockPairs per task, length and depth; texts of many-needles.")
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

    Example: prescore retrieval --method default --method kmeans -n 4096 --depth 0.5 --samples 20

    Example: prescore retrieval --task many-needles --method default -n 4096 -n 8192 --samples 25 -d book.txt
    """
    from prescore import checks
    from prescore.bench.language.documents import load_documents
    from prescore.bench.language.methods import asked_for, check_overrides
    from prescore.bench.language.model import load_language_model
    from prescore.bench.language.needles import DEPTHS, TASK, Needles, needles_table
    from prescore.bench.language.retrieval import TASKS, Question
    from prescore.bench.language.tables import retrieval_table

    lengths, tasks = length or [4096], task or TASKS
    for one in tasks:
        checks.one_of("task", one, (*TASKS, TASK))
    single = [one for one in tasks if one != TASK]
    questions = [
        Question(one, n, place) for n, one, place in itertools.product(lengths, single, depth or (0.1, 0.5))
    ]
    texts = [Needles(n, tuple(depth or DEPTHS)) for n in lengths] if TASK in tasks else []
    # local only is the floor of problems with one answer; many needles are dear, and only exact joins unasked
    names = dict.fromkeys(["exact", *(["local"] if single else []), *(method or _USUAL)])
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
    places = read_layers(layers)
    rows = _rows_of_questions(loaded, haystack, methods, questions, samples=samples, layers=places, seed=seed)
    rows += _rows_of_texts(loaded, haystack, methods, texts, samples=samples, layers=places, seed=seed)
    records = session.run(rows)
    tell_what_is_exact(session, methods)
    if questions:
        session.show(retrieval_table(records).to_rich())
    if texts:
        session.show(needles_table(records).to_rich())
    session.say(f"records: {session.file.path}")


def _rows_of_questions(
    loaded: LanguageModel,
    haystack: Document,
    methods: Methods,
    questions: Sequence[Question],
    *,
    samples: int,
    layers: str | list[int],
    seed: int,
) -> list[Row]:
    """Every question under every method."""
    from prescore.bench.language.retrieval import make_problem, retrieval_row

    # a length without room for a question is refused before any is measured
    for question in questions:
        make_problem(loaded, haystack, question, seed)
    return [
        retrieval_row(loaded, haystack, each, question, samples=samples, layers=layers, seed=seed)
        for question in questions
        for each in methods[question.length]
    ]


def _rows_of_texts(
    loaded: LanguageModel,
    haystack: Document,
    methods: Methods,
    texts: Sequence[Needles],
    *,
    samples: int,
    layers: str | list[int],
    seed: int,
) -> list[Row]:
    """Text by text, each under all methods: what a killed run leaves can be compared."""
    from prescore.bench.language.needles import make_needle_text, needles_row

    # how much room needles need depends on the cities that are drawn
    for text, sample in itertools.product(texts, range(samples)):
        make_needle_text(loaded, haystack, text, seed=seed, sample=sample)
    return [
        needles_row(loaded, haystack, each, text, sample=sample, layers=layers, seed=seed)
        for text in texts
        for sample in range(samples)
        for each in methods[text.length]
    ]
