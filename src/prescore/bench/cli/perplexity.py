"""`prescore perplexity`: loss on long documents while the attention of a language model is replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from prescore.bench.cli.held_out import HeldOutRun
from prescore.bench.cli.options import (
    Json,
    Out,
    Parallel,
    Resume,
    Seed,
    Session,
    Threads,
    joined_ranks,
    open_session,
    shared_session,
)
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
    from prescore.bench.language.perplexity import Window
    from prescore.bench.records import Record, Row
    from prescore.parallel.comm import Group


Documents = Annotated[
    list[str] | None,
    typer.Option(
        "--document",
        "-d",
        help="Text file, directory or LongBench .jsonl; repeatable. (default: Python's own docs)",
    ),
]
_TYPICAL_LENGTH = 4096


def command(
    experiment: Annotated[
        str | None,
        typer.Option(
            help="table1, appendix-a, figure-glm3, appendix-f, appendix-i, longest, cost, rows or default."
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="exact, local, default, hyper, random, a scorer or a baseline; repeatable."),
    ] = None,
    top_k: Annotated[list[str] | None, typer.Option(help="Keys kept, count or fraction; repeatable.")] = None,
    sample_size: Annotated[list[int] | None, typer.Option(help="Residual samples; repeatable.")] = None,
    leaf: Leaf = None,
    leaf_rule: Annotated[
        str, typer.Option(help="exclusive (PPL), inclusive (PPL*, the blockwise flag) or both.")
    ] = "exclusive",
    coupling: Annotated[
        str | None, typer.Option(help="corrected (default of appendix-a) or early (of appendix-i).")
    ] = None,
    sinks: Annotated[int, typer.Option(min=0, help="First tokens that paper methods keep.")] = 0,
    length: Annotated[list[int] | None, typer.Option("--length", "-n", help="Tokens read; repeatable.")] = None,
    first: Annotated[int | None, typer.Option(help="First position in the loss. (default: the middle)")] = None,
    offset: Annotated[int, typer.Option(min=0, help="Tokens passed over at the start of a document.")] = 0,
    windows: Annotated[int, typer.Option(min=1, help="Windows read in each document, evenly spaced over it.")] = 1,
    document: Documents = None,
    documents: Annotated[int | None, typer.Option(min=1, help="Documents at most.")] = None,
    skip_short: Annotated[
        bool, typer.Option("--skip-short", help="Leave out documents that are too short.")
    ] = False,
    tuning: Annotated[
        bool, typer.Option("--tuning", help="default: windows drawn by --seed, apart from the reported ones.")
    ] = False,
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
    parallel: Parallel = False,
) -> None:
    """Measure the loss of a language model on long documents under exact, local-only and replaced attention.

    `--experiment default` measures the default on windows it was not tuned on, in the given documents and in
    Python's own; a further model joins the table with `--resume --out DIR`.

    Example: prescore perplexity --method kmeans --method default --top-k 64 --top-k 256 -n 4096 --out runs/first

    Example: prescore perplexity --experiment appendix-a -d book.txt --out runs/appendix-a   (--resume goes on)

    Example: torchrun --nproc-per-node 4 -m prescore perplexity --method kmeans -n 8192 --parallel
    """
    from prescore.bench.language.documents import load_documents
    from prescore.bench.language.experiments import MethodChoice, default_lengths
    from prescore.bench.language.held_out import HELD_OUT
    from prescore.bench.language.model import load_language_model
    from prescore.bench.language.perplexity import make_windows
    from prescore.bench.language.tables import summarise

    def start() -> tuple[Session, LanguageModel]:
        quiet_loading()
        opened = open_session("perplexity", out=out, json=json, resume=resume, threads=threads, device=device)
        return opened, load_language_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)

    check_experiment(experiment, tuning=tuning)
    places = read_layers(layers)
    if experiment == HELD_OUT:
        beside = {"method": method, "top-k": top_k, "sample-size": sample_size, "leaf": leaf, "coupling": coupling}
        beside |= {
            "leaf-rule": leaf_rule != "exclusive",
            "sinks": sinks,
            "first": first is not None,
            "offset": offset,
        }
        beside |= {"windows": windows != 1, "documents": documents, "skip-short": skip_short, "parallel": parallel}
        held_out = HeldOutRun(document, length, tuning, places, read_changes(changes), seed)
        held_out.check(beside)
        held_out.run(start)
        return
    chosen = MethodChoice(
        experiment,
        tuple(method or ()),
        tuple(read_budget(text) for text in top_k or ()),
        tuple(sample_size or ()),
        leaf,
        leaf_rule,
        coupling,
        sinks,
        read_changes(changes),
    )
    chosen.methods(_TYPICAL_LENGTH)  # what cannot be is refused before anything is loaded
    texts = load_documents(document, limit=None if document is None else documents)
    quiet_loading()
    with joined_ranks(parallel, device) as ranks:
        leads = ranks is None or ranks.rank == 0
        opened = None
        if leads:
            opened = open_session("perplexity", out=out, json=json, resume=resume, threads=threads, device=device)
        with shared_session(opened, ranks, "perplexity") as session:
            loaded = load_language_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
            lengths = length or default_lengths(experiment, loaded.trained_length)
            if document is None:
                texts = long_enough(session, loaded, texts, offset + windows * max(lengths), documents)
            methods = {n_tokens: chosen.methods(n_tokens) for n_tokens in lengths}
            rows: list[Row] = []
            for n_tokens in lengths:
                read = make_windows(
                    loaded,
                    texts,
                    n_tokens,
                    first=first,
                    offset=offset,
                    per_document=windows,
                    skip_short=skip_short,
                )
                rows += grid_rows(loaded, read, methods[n_tokens], experiment, places, seed, ranks)
            summarise(list(session.file))  # a damaged figure is refused before hours are spent beside it
            records = session.run(rows)
            tell_what_is_exact(session, methods)
            if leads:
                write_results(session, records, experiment, loaded)


def check_experiment(experiment: str | None, *, tuning: bool) -> None:
    """Refuse a name that no experiment has, and tuning windows where there are none."""
    from prescore import checks
    from prescore.bench.language.experiments import EXPERIMENTS
    from prescore.bench.language.held_out import HELD_OUT

    if experiment is not None:
        checks.one_of("experiment", experiment, (*EXPERIMENTS, HELD_OUT))
    if tuning and experiment != HELD_OUT:
        raise ValueError(f"tuning must come with the experiment {HELD_OUT}, got {experiment!r}")


def grid_rows(
    loaded: LanguageModel,
    windows: Sequence[Window],
    methods: Sequence[LanguageMethod],
    experiment: str | None,
    layers: str | list[int],
    seed: int,
    group: Group | None = None,
) -> list[Row]:
    """Every window under every method."""
    from prescore.bench.language.perplexity import loss_row

    return [
        loss_row(loaded, window, method, experiment=experiment, layers=layers, seed=seed, group=group)
        for method in methods
        for window in windows
    ]


def long_enough(
    session: Session, loaded: LanguageModel, texts: list[Document], wanted: int, most: int | None
) -> list[Document]:
    """The documents of the default corpus that hold the longest window; nobody asked for those that do not."""
    from prescore.bench.language.perplexity import has_tokens

    found = [text for text in texts if has_tokens(loaded, text, wanted)]
    if not found:
        raise ValueError(
            f"length must be at most that of a document of the default corpus, got {wanted} tokens; "
            "give a longer one by --document"
        )
    left_out = [text.name for text in texts if text not in found]
    if left_out:
        session.say(f"left out, with fewer than {wanted} tokens: {', '.join(left_out)}")
    return found[:most]


def write_results(session: Session, records: list[Record], experiment: str | None, loaded: LanguageModel) -> None:
    """The table on the terminal, CSV files and the plot in the run's directory."""
    from prescore.bench.language.tables import (
        describe_run,
        full_csv,
        loss_table,
        paper_csv,
        plot_experiment,
        summarise,
    )

    summaries = summarise(records)
    title = f"{experiment or 'perplexity'}: {describe_run(summaries, loaded.name)}"
    note = "gap closed = (local - loss) / (local - exact); attention = inside the attention functions, one forward"
    session.show(loss_table(summaries, title, note).to_rich())
    name = experiment or "perplexity"
    written = {f"{name}.csv": full_csv(summaries)}
    plots: list[str] = []
    # what the paper prints and most pictures have no place for a length: each gets files of its own
    lengths = sorted({summary.n_tokens for summary in summaries})
    apart = len(lengths) > 1 and experiment != "longest"
    for length in lengths if apart else [None]:
        inside = [summary for summary in summaries if length in (None, summary.n_tokens)]
        stem = name if length is None else f"{name}-{length}"
        shaped = None if experiment is None else paper_csv(experiment, inside)
        if shaped is not None:
            written[f"{stem}-as-printed.csv"] = shaped
        plots.append(f"{stem}.png")
        shown = f"{name}: {describe_run(inside, loaded.name)}"
        plot_experiment(experiment, inside, session.out / plots[-1], shown)
    for file, text in written.items():
        (session.out / file).write_text(text, encoding="utf-8")
    session.say(f"records: {session.file.path}; also {', '.join([*written, *plots])}")
