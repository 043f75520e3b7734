"""`prescore demo`: what the library does, on a real model and a real text, in a few minutes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from prescore.bench.cli.options import Json, Model, Out, Resume, Seed, Threads, open_session

REPORT = Path("report")


def command(
    length: Annotated[int, typer.Option("--length", "-n", min=128, help="Tokens of a window.")] = 8192,
    document: Annotated[
        str, typer.Option("--document", "-d", help="A text file; the default ships with every Python.")
    ] = "python-reference",
    model: Model = "smollm2",
    minutes: Annotated[
        float,
        typer.Option(
            min=0, help="Time for everything: the second window and the plot are left out when it runs short."
        ),
    ] = 6.0,
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
    resume: Resume = False,
    threads: Threads = None,
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

    texts = load_documents([document], limit=1)
    session = open_session("demo", out=out, json=json, resume=resume, threads=threads)
    session.say(f"loading {model}")
    loaded = load_language_model(model)
    text = TokenizedText.of(loaded, texts[0])
    records = Demo(session, loaded, text, length, seed, started + 60 * minutes).run()
    page = write_page(records, session.out if out is not None else REPORT)
    session.show(comparison_table(records).to_rich())
    session.say(f"records: {session.file.path}\nreport:  {page}  ({time.monotonic() - started:.0f} s)")
