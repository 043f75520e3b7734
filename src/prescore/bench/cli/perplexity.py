"""`prescore perplexity`: loss on long documents while the attention of a language model is replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from prescore.bench.cli import options as cli
from prescore.bench.records import replacing

if TYPE_CHECKING:
    from prescore.bench.language.held_out import TokenizedText
    from prescore.bench.language.perplexity import Window
    from prescore.bench.methods import Method
    from prescore.bench.records import Record, Row, Values


_OF_EXPERIMENTS = ("top_k",)
_OF_HELD_OUT = (
    *(*_OF_EXPERIMENTS, "method", "leaf", "coupling", "sinks", "first", "offset", "windows", "documents"),
    *("skip_short", "parallel"),
)
_ELSEWHERE = {
    **dict.fromkeys(("table2", "appendix-e"), "prescore vision"),
    **{"appendix-b": "prescore planted", "appendix-g": "prescore coverage"},
}
"""What of the paper other commands measure."""
_TYPICAL_LENGTH = 4096
_QUICK_DEFAULT_LENGTH = 2560
"""Of `--quick` where the default runs as it is: up to 2048 tokens that is exact attention."""


def command(
    context: typer.Context,
    given: cli.Comparison,
    run: cli.Run,
    experiment: str | None = typer.Option(
        None,
        help="table1, appendix-a or figure-glm3 (--method SCORER runs one of their columns), appendix-f, "
        "appendix-i, baselines, universal-set or default.",
    ),
    top_k: list[str] | None = typer.Option(None, help="Keys kept, count or fraction; repeatable."),
    coupling: str | None = typer.Option(
        None, help="corrected (default of appendix-a), early (of appendix-i), or a line of appendix-f."
    ),
    sinks: int = typer.Option(0, min=0, help="First tokens that the paper's methods keep in an experiment."),
    first: int | None = typer.Option(None, help="First position in the loss. (default: the middle)"),
    offset: int = typer.Option(0, min=0, help="Tokens skipped at the start of a document."),
    windows: int = typer.Option(1, min=1, help="Windows read in each document, evenly spaced over it."),
    document: list[str] | None = typer.Option(
        None,
        "--document",
        "-d",
        help="Text file, directory or LongBench .jsonl; repeatable. (default: Python's own docs)",
    ),
    documents: int | None = typer.Option(None, min=1, help="Documents at most."),
    skip_short: bool = typer.Option(False, "--skip-short", help="Leave out documents that are too short."),
    tuning: bool = typer.Option(
        False, "--tuning", help="default: windows drawn by --seed, apart from the reported ones."
    ),
    parallel: bool = typer.Option(
        False,
        "--parallel",
        help="Context parallel on the ranks that torchrun started: "
        "torchrun --nproc-per-node 4 -m prescore perplexity ... --parallel",
    ),
) -> None:
    """Measure the loss of a language model on long documents under exact, local-only and replaced attention.

    `--experiment default` measures the default on windows it was not tuned on, in the given documents and in
    Python's own; a further model joins the table with `--resume --out DIR`.

    Example: prescore perplexity --method key-diff --method default --top-k 64 --top-k 256 -n 4096 --out runs/first

    Example: prescore perplexity --experiment appendix-a -d book.txt --out runs/appendix-a   (--resume goes on)

    Example: torchrun --nproc-per-node 4 -m prescore perplexity --method paper:kmeans -n 8192 --parallel
    """
    from prescore import checks
    from prescore.bench.language import held_out, tables
    from prescore.bench.language.documents import load_documents
    from prescore.bench.language.grid import grid_methods
    from prescore.bench.language.perplexity import has_tokens, loss_row, make_windows
    from prescore.paper import grids as experiments

    is_held_out = experiment == held_out.HELD_OUT
    fields, places, seed = given.fields, cli.read_layers(given.layers), run.seed
    leaf, length = given.leaf, given.length
    if run.quick:
        as_it_is = experiment == held_out.HELD_OUT
        length = length or [_QUICK_DEFAULT_LENGTH if as_it_is else cli.QUICK_LENGTH]
        leaf, documents, top_k = leaf or cli.QUICK_LEAF, documents or 1, top_k or [cli.QUICK_TOP_K]
    if experiment in _ELSEWHERE:
        raise ValueError(
            f"experiment must be of a language model, got {experiment!r}: run {_ELSEWHERE[experiment]}"
        )
    if experiment is not None:
        checks.one_of("experiment", experiment, (*experiments.EXPERIMENTS, held_out.HELD_OUT))
        cli.refuse_options(
            context, _OF_HELD_OUT if is_held_out else _OF_EXPERIMENTS, f"the experiment {experiment}"
        )
    for name, value in {"coupling": coupling, "sinks": sinks}.items():
        if value and experiment is None:
            raise ValueError(f"{name} must come with an experiment, got {value!r} without one")
    if tuning and not is_held_out:
        raise ValueError(f"tuning must come with the experiment {held_out.HELD_OUT}, got {experiment!r}")
    if experiment is None:
        budgets = [cli.read_budget(text) for text in top_k or ()]
        methods_at = partial(grid_methods, given.method or (), leaf=leaf, top_k=budgets, changes=fields)
    else:
        options: Values = {"leaf": leaf, "sinks": sinks, "coupling": coupling, "changes": fields}
        options["scorers"] = given.method or ()
        methods_at = partial(experiments.experiment_methods, experiment, **options)
    # bad options and documents are refused before anything is loaded
    if is_held_out:
        methods, texts = held_out.held_out_methods(fields), held_out.held_out_texts(document)
    else:
        methods_at(length=_TYPICAL_LENGTH)
        skip_short = skip_short or document is None
        texts = load_documents(document, limit=None if skip_short else documents)
    name = experiment or "perplexity"
    writes = ("default.md",) if is_held_out else (f"{name}*.csv", f"{name}*.png")
    with cli.parallel_session("perplexity", run, parallel, given.device, writes) as (session, ranks):
        loaded = given.load()
        row = partial(loss_row, loaded, experiment=experiment, layers=places, seed=seed, group=ranks)
        # a damaged result is refused before hours of measuring
        with session.reading():
            (held_out.held_out_tables if is_held_out else tables.summarise)(list(session.file))
        if is_held_out:
            tokenized = [held_out.TokenizedText.of(loaded, text) for text in texts]
            for n_tokens in length or held_out.LENGTHS:
                _measure_held_out(session, row, tokenized, methods, n_tokens, seed if tuning else None)
            with session.reading():
                _write_held_out(session)
            return
        lengths = length or experiments.default_lengths(experiment, loaded.trained_length)
        if skip_short:
            needed = offset + windows * max(lengths)
            long = [text for text in texts if has_tokens(loaded, text, needed)]
            left_out = ", ".join(text.name for text in texts if text not in long)
            if not long:
                raise ValueError(f"documents must have one of at least {needed} tokens, got {len(texts)} shorter")
            if left_out:
                session.say(f"left out, with fewer than {needed} tokens: {left_out}")
            texts = long[:documents]
        by_length = {n_tokens: methods_at(length=n_tokens) for n_tokens in lengths}
        rows = []
        for n_tokens, own in by_length.items():
            read = make_windows(loaded, texts, n_tokens, first=first, offset=offset, per_document=windows)
            rows += [row(window, each) for each in own for window in read]
        records = session.run(rows)
        cli.say_what_is_exact(session, by_length)
        if session.quiet:
            return
        with session.reading():
            _write_results(session, records, experiment, loaded.name)


def _write_results(session: cli.Session, records: Sequence[Record], experiment: str | None, model: str) -> None:
    """The table on the terminal, CSV files and plots in the run's directory."""
    from prescore.bench.language import tables
    from prescore.paper.tables import paper_csv, plot_experiment

    summaries, name = tables.summarise(records), experiment or "perplexity"
    note = "gap closed = (local - loss) / (local - exact); attention = inside the attention functions, one forward"
    title = f"{name}: {tables.describe_run(summaries, model)}"
    session.show(tables.loss_table(summaries, title, note).to_rich())
    made = {f"{name}.csv": tables.full_csv(summaries), f"{name}-as-printed.csv": paper_csv(summaries)}
    files = {file: text for file, text in made.items() if text is not None}
    for file, text in files.items():
        _write(session.out / file, text)
    # a picture is for one length
    lengths = sorted({summary.n_tokens for summary in summaries})
    for length in lengths if len(lengths) > 1 else [None]:
        inside = [summary for summary in summaries if length in (None, summary.n_tokens)]
        file = f"{name}.png" if length is None else f"{name}-{length}.png"
        files[file] = ""
        title = f"{name}: {tables.describe_run(inside, model)}"
        plot_experiment(experiment, inside, session.out / file, title)
    session.say(f"records: {session.file.path}; also {', '.join(files)}")


def _measure_held_out(
    session: cli.Session,
    row: Callable[[Window, Method], Row],
    texts: Sequence[TokenizedText],
    methods: Sequence[Method],
    length: int,
    tuning_seed: int | None,
) -> None:
    """Reported windows, or with a seed tuning windows; a sliding window reads as much as `Routed` on each."""
    from prescore.bench.language.held_out import held_out_windows, window_like
    from prescore.config import Routed

    windows: list[Window] = []
    for text in texts:
        own = held_out_windows(text, length, tuning_seed)
        if not own:
            session.say(f"left out at {length} tokens: {text.name}, which has {len(text.tokens)}")
        windows += own
    if not windows:
        raise ValueError(f"length must be at most that of the longest text, got {length}")
    pairs = [(window, method) for window in windows for method in methods]
    measured = zip(pairs, session.run([row(*pair) for pair in pairs]), strict=True)
    defaults = [(window, record) for (window, method), record in measured if isinstance(method.config, Routed)]
    with session.reading():
        alike = [row(window, window_like(record)) for window, record in defaults]
    session.run(alike)


def _write_held_out(session: cli.Session) -> None:
    from prescore.bench.language.held_out import held_out_tables

    tables = held_out_tables(list(session.file))
    session.show(*(table.to_rich() for table in tables))
    _write(session.out / "default.md", "\n".join(table.to_markdown() for table in tables))
    session.say(f"records: {session.file.path}; also default.md")


def _write(path: Path, text: str) -> None:
    with replacing(path) as working:
        working.write_text(text, encoding="utf-8")
