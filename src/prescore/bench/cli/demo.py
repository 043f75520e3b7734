"""`prescore demo`: what the library does, on a real model and a real text, in about two minutes."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import typer

from prescore.bench.cli.options import ARGV, Model, Run

REPORT = Path("report")
LENGTH, _QUICK_LENGTH = 5120, 512


def command(
    run: Run,
    length: int | None = typer.Option(
        None, "--length", "-n", min=128, help=f"Tokens of a window.  [default: {LENGTH}]"
    ),
    document: str = typer.Option(
        "python-reference", "--document", "-d", help="A text file; the default ships with every Python."
    ),
    model: Model = "smollm2",
    full: bool = typer.Option(False, "--full", help="Read a second window too, for narrower intervals."),
) -> None:
    """Let a language model read a long text with exact attention, the default, and methods that read as many keys.

    Prints one table and writes a report: report/index.html, or index.html in --out. The report shows what the
    default reads for every token of a passage.

    Example: prescore demo --out report
    """
    started = time.monotonic()
    from prescore.bench.demo.page import comparison_table, write_page
    from prescore.bench.demo.run import Demo, demo_windows
    from prescore.bench.language.documents import load_documents
    from prescore.bench.language.held_out import TokenizedText
    from prescore.bench.language.model import load_language_model

    length = length or (_QUICK_LENGTH if run.quick else LENGTH)
    earlier = REPORT / "index.html"
    if run.out is None and earlier.exists() and "prescore" not in earlier.read_text(errors="replace"):
        raise ValueError(f"{earlier} must be a report of prescore or absent, got another page; choose --out")
    texts = load_documents([document], limit=1)
    session = run.open("demo", writes=["index.html"])
    session.say(f"loading {model}")
    loaded = load_language_model(model)
    text = TokenizedText.of(loaded, texts[0])
    n_windows = len(demo_windows(text, length))
    session.say(f"reading {length} tokens of {text.name}, by one method after another")
    with session.reading():
        records = Demo(session, loaded, text, length, run.seed).run(n_windows if full else 1)
        page = write_page(records, session.out if run.out is not None else REPORT)
        session.show(comparison_table(records).to_rich())
    session.say(f"records: {session.file.path}\nreport:  {page}  ({time.monotonic() - started:.0f} s)")
    if not full and n_windows > 1:
        seconds = sum(record.seconds for record in records if record.config["part"] == "loss")
        words = [word for word in ARGV.get() if word not in ("--full", "--resume")]
        session.say(
            f"more:    {shlex.join([*words, '--full', '--resume'])}  (a second window, about {seconds:.0f} s)"
        )
