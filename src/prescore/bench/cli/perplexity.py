"""`prescore perplexity`: loss on long documents while the attention of a language model is replaced."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from prescore.bench.cli import options as cli
from prescore.bench.records import Values, replacing, row_key

if TYPE_CHECKING:
    from prescore.bench.language.documents import Document
    from prescore.bench.language.held_out import TokenizedText
    from prescore.bench.language.model import LanguageModel
    from prescore.bench.language.perplexity import Window
    from prescore.bench.language.tables import Summary
    from prescore.bench.methods import Method
    from prescore.bench.records import Record, Row

COMMAND = "perplexity"
"""The name of its records."""
_NOT_HELD_OUT = (
    *("top_k", "method", "leaf", "first", "offset", "windows", "documents", "seeds"),
    *("skip_short", "parallel"),
)
_TYPICAL_LENGTH, _QUICK_DEFAULT_LENGTH = 4096, 2560
"""The second is that of `--quick` where the default runs as it is: up to 2048 tokens that is exact attention."""


@dataclass(frozen=True)
class Texts:
    """Options: which tokens are read, how often."""

    document: list[str] | None = typer.Option(
        None,
        "--document",
        "-d",
        help="Text file, directory or LongBench .jsonl; repeatable. (default: Python's own docs)",
    )
    documents: int | None = typer.Option(None, min=1, help="Documents at most.")
    skip_short: bool = typer.Option(False, "--skip-short", help="Leave out documents that are too short.")
    first: int | None = typer.Option(None, help="First position in the loss. (default: the middle)")
    offset: int = typer.Option(0, min=0, help="Tokens skipped at the start of a document.")
    windows: int = typer.Option(1, min=1, help="Windows read in each document, evenly spaced over it.")
    seeds: int = typer.Option(1, min=1, help="Seeds of every random method, from --seed up.")

    @property
    def skips(self) -> bool:
        """Whether short documents are left out: those of the default corpus always are."""
        return self.skip_short or self.document is None

    def load(self, quick: bool) -> list[Document]:
        """The documents, before it is known how long they are."""
        from prescore.bench.language.documents import load_documents

        return load_documents(self.document, limit=None if self.skips else self.most(quick))

    def most(self, quick: bool) -> int | None:
        """How many documents are read at most."""
        return self.documents or (1 if quick else None)

    def read(
        self,
        session: cli.Session,
        loaded: LanguageModel,
        texts: Sequence[Document],
        lengths: Sequence[int],
        quick: bool,
    ) -> dict[int, list[Window]]:
        """The windows of every length, in the same documents."""
        from prescore.bench.language.perplexity import has_tokens, make_windows

        if self.skips:
            needed = self.offset + self.windows * max(lengths)
            long = [text for text in texts if has_tokens(loaded, text, needed)]
            short = ", ".join(text.name for text in texts if text not in long)
            if not long:
                raise ValueError(f"documents must have one of at least {needed} tokens, got {len(texts)} shorter")
            if short:
                session.say(f"left out, with fewer than {needed} tokens: {short}")
            texts = long[: self.most(quick)]
        where: Values = {"first": self.first, "offset": self.offset, "per_document": self.windows}
        return {length: make_windows(loaded, texts, length, **where) for length in lengths}


@dataclass(frozen=True)
class Losses:
    """What a run measures and what it writes.

    Attributes:
        name: Of its files.
        methods_at: The methods at a length.
        lengths: The lengths, of the trained one.
        write: Tables and files from all records and the model's name.
        experiment: The field of this name in its records.
    """

    name: str
    methods_at: Callable[[int], Sequence[Method]]
    lengths: Callable[[int | None], Sequence[int]]
    write: Callable[[cli.Session, Sequence[Record], str], None]
    experiment: str | None = None


def command(
    context: typer.Context,
    given: cli.Comparison,
    texts: Texts,
    run: cli.Run,
    top_k: list[str] | None = typer.Option(None, help="Keys kept, count or fraction; repeatable."),
    held_out: bool = typer.Option(
        False, "--held-out", help="The default on windows it was not tuned on, beside a window that reads as much."
    ),
    tuning: bool = typer.Option(
        False, "--tuning", help="With --held-out: windows drawn by --seed, apart from the reported ones."
    ),
    parallel: bool = typer.Option(
        False,
        "--parallel",
        help="Context parallel on the ranks that torchrun started: "
        "torchrun --nproc-per-node 4 -m prescore perplexity ... --parallel",
    ),
) -> None:
    """Measure the loss of a language model on long documents under exact, local-only and replaced attention.

    `--held-out` measures the default on windows it was not tuned on, in the given documents and in Python's own; a
    further model joins the table with `--resume --out DIR`.

    Example: prescore perplexity --method key-diff --method default --top-k 64 --top-k 256 -n 4096 --out runs/first

    Example: prescore perplexity --held-out -n 8192 -d book.txt --out runs/default   (--resume goes on)

    Example: torchrun --nproc-per-node 4 -m prescore perplexity --method paper:kmeans -n 8192 --parallel
    """
    if tuning and not held_out:
        raise ValueError("tuning must come with --held-out, got --tuning alone")
    if held_out:
        cli.refuse_options(context, _NOT_HELD_OUT, "--held-out")
        _measure_held_out(given, texts.document, run, tuning)
        return
    from prescore.bench.language.grid import grid_methods

    leaf = given.leaf or (cli.QUICK_LEAF if run.quick else None)
    words = top_k or ([cli.QUICK_TOP_K] if run.quick else [])
    budgets = [cli.read_budget(text) for text in words]

    def methods_at(length: int) -> list[Method]:
        return grid_methods(given.method or (), length, leaf=leaf, top_k=budgets, changes=given.fields)

    longest = cli.QUICK_LENGTH if run.quick else _TYPICAL_LENGTH
    losses = Losses(COMMAND, methods_at, lambda trained: [min(trained or longest, longest)], _write)
    measure_losses(losses, given, texts, run, parallel=parallel)


def measure_losses(
    losses: Losses, given: cli.Comparison, texts: Texts, run: cli.Run, *, parallel: bool = False
) -> None:
    """Measure every method on every window; bad options are refused before the model is loaded."""
    from prescore.bench.language.grid import is_random
    from prescore.bench.language.perplexity import loss_row
    from prescore.bench.language.tables import summarise

    layers = cli.read_layers(given.layers)
    losses.methods_at(_TYPICAL_LENGTH)
    documents = texts.load(run.quick)
    writes = (f"{losses.name}*.csv", f"{losses.name}*.png")
    with cli.parallel_session(COMMAND, run, parallel, given.device, writes) as (session, ranks):
        loaded = given.load()
        # a damaged result is refused before hours of measuring
        with session.reading():
            summarise(list(session.file))
        lengths = given.length or losses.lengths(loaded.trained_length)
        by_length = {length: losses.methods_at(length) for length in lengths}
        windows = texts.read(session, loaded, documents, lengths, run.quick)
        rows = [
            loss_row(loaded, window, method, experiment=losses.experiment, layers=layers, seed=seed, group=ranks)
            for length, methods in by_length.items()
            for method in methods
            for window in windows[length]
            for seed in range(run.seed, run.seed + (texts.seeds if is_random(method) else 1))
        ]
        records = session.run(rows)
        cli.say_what_is_exact(session, by_length)
        if not session.quiet:
            with session.reading():
                losses.write(session, records, loaded.name)


def _write(session: cli.Session, records: Sequence[Record], model: str) -> None:
    """The table on the terminal, a CSV file and a plot of every length in the run's directory."""
    from prescore.bench.language import tables
    from prescore.bench.language.plots import plot_losses

    summaries = tables.summarise(records)
    note = "gap closed = (local - loss) / (local - exact); attention = inside the attention functions, one forward"
    session.show(
        tables.loss_table(summaries, f"{COMMAND}: {tables.describe_run(summaries, model)}", note).to_rich()
    )
    files = {f"{COMMAND}.csv": tables.full_csv(summaries)}
    save_losses(session, COMMAND, files, summaries, model, plot_losses)


def save_losses(
    session: cli.Session,
    name: str,
    files: Mapping[str, str],
    summaries: Sequence[Summary],
    model: str,
    plot: Callable[[Sequence[Summary], Path, str], None],
) -> None:
    """Write text files by name, and a picture of every length."""
    from prescore.bench.language.tables import describe_run, group_by

    for file, text in files.items():
        write_text(session.out / file, text)
    groups, pictures = group_by(summaries, lambda summary: summary.n_tokens), []
    for length, inside in groups.items():
        pictures.append(f"{name}-{length}.png" if len(groups) > 1 else f"{name}.png")
        plot(inside, session.out / pictures[-1], f"{name}: {describe_run(inside, model)}")
    session.say(f"records: {session.file.path}; also {', '.join([*files, *pictures])}")


def write_text(path: Path, text: str) -> None:
    """A file that is there as a whole or not at all."""
    with replacing(path) as working:
        working.write_text(text, encoding="utf-8")


# The default on held-out windows.


def _measure_held_out(given: cli.Comparison, sources: Sequence[str] | None, run: cli.Run, is_tuning: bool) -> None:
    from prescore.bench.language import held_out
    from prescore.bench.language.perplexity import loss_row
    from prescore.config import Routed

    methods, texts = held_out.held_out_methods(given.fields), held_out.held_out_texts(sources)
    lengths = given.length or ([_QUICK_DEFAULT_LENGTH] if run.quick else held_out.LENGTHS)
    session = run.open(COMMAND, given.device, writes=("default.md",))
    loaded, layers = given.load(), cli.read_layers(given.layers)
    row = partial(loss_row, loaded, experiment=held_out.HELD_OUT, layers=layers, seed=run.seed)
    with session.reading():
        held_out.held_out_tables(list(session.file))
    tokenized = [held_out.TokenizedText.of(loaded, text) for text in texts]
    seed = run.seed if is_tuning else None
    by_length = [_held_out_windows(session, tokenized, length, seed) for length in lengths]
    pairs = [[(window, method) for window in windows for method in methods] for windows in by_length]
    # beside every default runs a sliding window of the same cost
    rows = [(row(*pair), 1 + isinstance(pair[1].config, Routed)) for pair in itertools.chain(*pairs)]
    left = (times * own.cost for own, times in rows if row_key(COMMAND, own.config, own.seed) not in session.file)
    with session.whole(sum(left)) as whole:
        for inside in pairs:
            _measure_windows(whole, row, inside)
    with session.reading():
        tables = held_out.held_out_tables(list(session.file))
        session.show(*(table.to_rich() for table in tables))
        write_text(session.out / "default.md", "\n".join(table.to_markdown() for table in tables))
        session.say(f"records: {session.file.path}; also default.md")


def _held_out_windows(
    session: cli.Session, texts: Sequence[TokenizedText], length: int, tuning_seed: int | None
) -> list[Window]:
    """Reported windows, or with a seed tuning windows."""
    from prescore.bench.language.held_out import held_out_windows

    windows: list[Window] = []
    for text in texts:
        inside = held_out_windows(text, length, tuning_seed)
        if not inside:
            session.say(f"left out at {length} tokens: {text.name}, which has {len(text.tokens)}")
        windows += inside
    if not windows:
        raise ValueError(f"length must be at most that of the longest text, got {length}")
    return windows


def _measure_windows(
    session: cli.Session,
    row: Callable[[Window, Method], Row],
    pairs: Sequence[tuple[Window, Method]],
) -> None:
    """Windows under methods, and a sliding window that reads as much as `Routed` on each."""
    from prescore.bench.language.held_out import window_like
    from prescore.config import Routed

    measured = zip(pairs, session.run([row(*pair) for pair in pairs]), strict=True)
    defaults = [(window, record) for (window, method), record in measured if isinstance(method.config, Routed)]
    with session.reading():
        alike = [row(window, window_like(record)) for window, record in defaults]
    session.run(alike)
