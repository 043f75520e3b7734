"""`prescore demo`: what the library does, on a real model and a real text, in a few minutes."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from prescore.bench.cli.options import Model, Run

REPORT = Path("report")
_QUICK_LENGTH = 512


def command(
    run: Run,
    length: int | None = typer.Option(
        None, "--length", "-n", min=128, help="Tokens of a window.  [default: 8192]"
    ),
    document: str = typer.Option(
        "python-reference", "--document", "-d", help="A text file; the default ships with every Python."
    ),
    model: Model = "smollm2",
    minutes: float = typer.Option(
        6.0, min=0, help="Time for everything: the second window is left out when it runs short."
    ),
) -> None:
    """Let a language model read a long text with exact attention, the default, and methods that read as many keys.

    Prints one table and writes a report: report/index.html, or index.html in --out. The report shows what the
    default reads for every token of a passage.

    Example: prescore demo --out report
    """
    started = time.monotonic()
    from prescore.bench.demo.page import comparison_table, write_page
    from prescore.bench.demo.run import Demo
    from prescore.bench.language.documents import load_documents
    from prescore.bench.language.held_out import TokenizedText
    from prescore.bench.language.model import load_language_model

    length = length or (_QUICK_LENGTH if run.quick else 8192)
    earlier = REPORT / "index.html"
    if run.out is None and earlier.exists() and "prescore" not in earlier.read_text(errors="replace"):
        raise ValueError(f"{earlier} must be a report of prescore or absent, got another page; choose --out")
    texts = load_documents([document], limit=1)
    session = run.open("demo", writes=["index.html"])
    session.say(f"loading {model}")
    loaded = load_language_model(model)
    text = TokenizedText.of(loaded, texts[0])
    with session.reading():
        records = Demo(session, loaded, text, length, run.seed, started + 60 * minutes).run()
        page = write_page(records, session.out if run.out is not None else REPORT)
        session.show(comparison_table(records).to_rich())
    session.say(f"records: {session.file.path}\nreport:  {page}  ({time.monotonic() - started:.0f} s)")
