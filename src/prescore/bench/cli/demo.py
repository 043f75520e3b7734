"""`prescore demo`: what the library does, on a real model and a real text, in a few minutes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prescore.bench.cli.options import Json, Out, Resume, Seed, Session, Threads, open_session
from prescore.bench.cli.settings import Model, quiet_loading
from prescore.bench.records import Record, Row, row_key

if TYPE_CHECKING:
    from prescore.bench.language.held_out import TokenizedText
    from prescore.bench.language.methods import LanguageMethod
    from prescore.bench.language.model import LanguageModel
    from prescore.bench.language.perplexity import Window


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
    """Let a language model read a long text with exact attention, the default, and rivals that read as many rows.

    Prints one table and writes a report: report/index.html, or index.html in --out. In it every token of a passage
    can be asked what the default reads for it.

    Example: prescore demo --out report
    """
    started = time.monotonic()
    from prescore.bench.language.documents import load_documents
    from prescore.bench.language.held_out import tokenized
    from prescore.bench.language.model import load_language_model

    texts = load_documents([document], limit=1)
    session = open_session("demo", out=out, json=json, resume=resume, threads=threads)
    quiet_loading()
    session.say(f"loading {model}")
    loaded = load_language_model(model)
    tour = Tour(session, loaded, tokenized(loaded, texts)[0], length, seed, started + 60 * minutes)
    records = tour.run()
    from prescore.bench.demo.page import comparison_table

    page = write_report(records, session.out if out is not None else REPORT)
    session.show(comparison_table(records).to_rich())
    session.say(f"records: {session.file.path}\nreport:  {page}  ({time.monotonic() - started:.0f} s)")


@dataclass(frozen=True, eq=False)
class Tour:
    """One run: what must be there comes first, the rest as far as the time goes.

    Attributes:
        session: Where records go.
        loaded: The model.
        text: What it reads.
        length: Tokens of a window.
        seed: Of all randomness.
        deadline: On the clock of `time.monotonic`.
    """

    session: Session
    loaded: LanguageModel
    text: TokenizedText
    length: int
    seed: int
    deadline: float

    def run(self) -> list[Record]:
        """Measure; returns all records."""
        from prescore.bench.demo.run import demo_windows, first_methods, rivals

        first, *others = demo_windows(self.text, self.length)
        self.session.say(f"reading {self.length} tokens of {self.text.name} six times")
        methods = first_methods(self.length)
        records = self.session.run(self._losses(first, methods))
        default = next(r for r in records if r.config["method"]["axes"]["series"] == "default")
        beside = rivals(default)
        records += self.session.run([*self._losses(first, beside), self._reading(first)])
        seconds = sum(record.seconds for record in records if record.config["part"] == "loss")
        for window in others:
            rows = self._losses(window, [*methods, *beside])
            if self._has_time(rows, seconds):
                self.session.say(f"the same with {window.document}")
                records += self.session.run(rows)
            else:
                self.session.say(f"no time is left for {window.document}; --minutes gives more")
        return records + self._budgets(statistics.median(r.seconds for r in records))

    def _budgets(self, seconds: float) -> list[Record]:
        """The comparison over budgets, on a shorter text; a row of the other one takes so many seconds."""
        from prescore.bench.demo.run import budget_methods, budget_rivals, short_length, short_window

        window = short_window(self.text, self.length)
        each = seconds * short_length(self.length) / self.length
        rows = [*self._losses(window, budget_methods(len(window.tokens))), self._kept(window)]
        if not self._has_time(rows, each * len(rows)):
            self.session.say("no time is left for several budgets; --minutes gives more")
            return []
        self.session.say(f"several budgets on {len(window.tokens)} tokens")
        records = self.session.run(rows)
        each = max(statistics.median(record.seconds for record in records), 1e-3)
        defaults = [
            r for r in records if r.config["part"] == "loss" and r.config["method"]["axes"]["series"] == "default"
        ]
        more = self._losses(window, budget_rivals(defaults))
        fitting = [row for place, row in enumerate(more) if self._has_time([row], (place + 1) * each)]
        if len(fitting) < len(more):
            self.session.say(f"the time is up: the plot has {len(fitting)} of {len(more)} further points")
        return records + self.session.run(fitting)

    def _has_time(self, rows: Sequence[Row], seconds: float) -> bool:
        """Whether rows that take so long are over before the deadline; finished ones take no time."""
        finished = all(row_key("demo", row.config, row.seed) in self.session.file for row in rows)
        return finished or time.monotonic() + seconds <= self.deadline

    def _losses(self, window: Window, methods: Sequence[LanguageMethod]) -> list[Row]:
        from prescore.bench.demo.run import STRETCHES
        from prescore.bench.language.perplexity import loss_row

        return [
            loss_row(self.loaded, window, method, experiment="demo", seed=self.seed, stretches=STRETCHES)
            for method in methods
        ]

    def _reading(self, window: Window) -> Row:
        """What the default reads for single tokens, in an early, a middle and a late layer."""
        from prescore.bench.demo.run import reading_row, shown_config

        return reading_row(self.loaded, window, shown_config(self.length), layers=self._layers(), seed=self.seed)

    def _kept(self, window: Window) -> Row:
        """Which keys of the first half each scorer keeps, in the same layers."""
        from prescore.bench.demo.run import token_row
        from prescore.config import Selected

        budget = max(1, len(window.tokens) // 16)
        configs = {
            "key-diff with sinks": Selected("key-diff", budget),
            "k-means, nearest (paper)": Selected.paper("kmeans", budget),
            "leverage (paper)": Selected.paper("leverage", budget),
            "random": Selected.paper("uniform", budget),
        }
        return token_row(self.loaded, window, configs, layers=self._layers(), budget=budget, seed=self.seed)

    def _layers(self) -> list[int]:
        n_layers = self.loaded.model.config.get_text_config(decoder=True).num_hidden_layers
        return sorted({n_layers // 6, n_layers // 2, n_layers - 1 - n_layers // 6})


def write_report(records: Sequence[Record], directory: Path) -> Path:
    """Write `index.html`; an earlier report is replaced only by a whole new one."""
    from prescore.bench.demo.page import DOCUMENTS, demo_page

    text = demo_page(records, find_documents(DOCUMENTS, directory))
    directory.mkdir(parents=True, exist_ok=True)
    page = directory / "index.html"
    page.write_text(text, encoding="utf-8")
    return page


def find_documents(names: Iterable[str], directory: Path) -> dict[str, str]:
    """Addresses of documents as seen from a directory: of the built site, else of the source; none in a wheel."""
    root = Path(__file__).resolve().parents[3]
    found = {}
    for name in names:
        for path in (root / "site" / f"{name}.html", root / "docs" / f"{name}.md"):
            if path.is_file():
                found[name] = Path(os.path.relpath(path, directory.resolve())).as_posix()
                break
    return found
