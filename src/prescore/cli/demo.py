"""`prescore demo`: what the library does, on a real model and a real text, in a few minutes."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prescore.cli.options import Json, Out, Resume, Seed, Threads, open_session
from prescore.cli.settings import Model, quiet_loading

if TYPE_CHECKING:
    from prescore.evaluation.language.experiments import Scale
    from prescore.evaluation.language.methods import LanguageMethod
    from prescore.evaluation.language.model import LanguageModel
    from prescore.evaluation.language.perplexity import Window
    from prescore.records import Row

REPORT = Path("report")
BUDGETS = (8192, 2048, 512)
"""Budgets of the plot, as the paper counts them (at 32768 tokens)."""
TABLE_BUDGET = 2048


def command(
    length: Annotated[int, typer.Option("--length", "-n", min=64, help="Tokens of the document.")] = 4096,
    document: Annotated[
        str, typer.Option("--document", "-d", help="A text file; the default ships with every Python.")
    ] = "python-reference",
    model: Model = "smollm2",
    minutes: Annotated[
        float, typer.Option(min=0, help="Time for everything: the plot has fewer points when it runs short.")
    ] = 6.0,
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
    resume: Resume = False,
    threads: Threads = None,
) -> None:
    """Let a language model read a long text with exact, local-only, published and default attention.

    Prints one table and writes a report: report/index.html, or index.html in --out.

    Example: prescore demo --out report
    """
    started = time.monotonic()
    from prescore.evaluation.language.documents import load_documents
    from prescore.evaluation.language.experiments import Scale
    from prescore.evaluation.language.model import load_language_model
    from prescore.evaluation.language.perplexity import loss_row, make_windows

    texts = load_documents([document], limit=1)
    session = open_session("demo", out=out, json=json, resume=resume, threads=threads)
    quiet_loading()
    session.say(f"loading {model}")
    loaded = load_language_model(model)
    window = make_windows(loaded, texts, length)[0]
    scale = Scale(length)
    session.say(f"reading {length} tokens of {window.document} six times, once per row of the table")
    rows = [loss_row(loaded, window, method, experiment="demo", seed=seed) for method in table_methods(scale)]
    rows.append(tokens_row(loaded, window, scale, seed))
    records = session.run(rows)
    # one slow row must not cost the plot; half as much again is for the slower ones to come
    per_row = 1.5 * statistics.median(record.seconds for record in records)
    left = int(max(0.0, 60 * minutes - (time.monotonic() - started)) / max(per_row, 1e-3))
    more = [loss_row(loaded, window, method, experiment="demo", seed=seed) for method in plot_methods(scale)]
    done = [row for row in more[left:] if _finished(session.file, row)]
    if more[:left]:
        session.say(f"{len(more[:left])} more budgets for the plot")
    records += session.run([*more[:left], *done])
    if left < len(more):
        session.say(f"the time is up: the plot has {len(more[:left]) + len(done)} of {len(more)} further points")
    page = write_report(records, session.out if out is not None else REPORT)
    session.show(demo_table(records))
    session.say(f"records: {session.file.path}\nreport:  {page}  ({time.monotonic() - started:.0f} s)")


def table_methods(scale: Scale) -> list[LanguageMethod]:
    """The six rows: exact, local only, HyperAttention, the paper with k-means and leverage, the default."""
    from prescore.evaluation.language.experiments import default_method
    from prescore.evaluation.language.methods import exact, local

    hyper, kmeans, leverage = (
        scale.prescored(*one) for one in (("kmeans", 0), ("kmeans", TABLE_BUDGET), ("leverage", TABLE_BUDGET))
    )
    return [
        exact(),
        local(scale.leaf_size),
        _named(hyper, "HyperAttention", "HyperAttention", table=True),
        _named(kmeans, "paper: k-means", "paper: k-means", table=True),
        _named(leverage, "paper: leverage", "paper: leverage", table=True),
        _named(default_method(scale), "default", "default", table=True),
    ]


def plot_methods(scale: Scale) -> list[LanguageMethod]:
    """Further budgets of the same methods, the most telling first."""
    from prescore.evaluation.language.experiments import default_at
    from prescore.evaluation.language.methods import SINKS

    found = []
    for top_k in BUDGETS:
        count = scale.count(top_k)
        found.append(_named(default_at(scale, count), f"default, {count}", "default"))
        lines = [(top_k, SINKS, "k-means + sinks")]
        # the others stand in the table at that budget
        lines += [(top_k, 0, "paper: k-means"), (0, 0, "HyperAttention")] if top_k != TABLE_BUDGET else []
        for budget, sinks, words in lines:
            # blocks and samples grow with the budget, as the paper's 256 and 256 go with 2048
            size = scale.count(top_k // 8)
            own = replace(scale, sinks=sinks, overrides={"lsh.block_size": size, "inner.block_size": size})
            method = own.prescored("kmeans", budget, top_k // 8)
            found.append(_named(method, f"{words}, {count}", words))
    return found


def tokens_row(loaded: LanguageModel, window: Window, scale: Scale, seed: int) -> Row:
    """Which keys of the first half each scorer keeps, in an early, a middle and a late layer."""
    from prescore.config import Selected
    from prescore.evaluation.language.token_choice import token_row

    budget = min(scale.count(TABLE_BUDGET), scale.length // 2)
    configs = {
        "key-diff with sinks": Selected("key-diff", budget),
        "k-means, nearest (paper)": Selected.paper("kmeans", budget),
        "leverage (paper)": Selected.paper("leverage", budget),
        "random": Selected.paper("uniform", budget),
    }
    n_layers = loaded.model.config.get_text_config(decoder=True).num_hidden_layers
    layers = sorted({n_layers // 6, n_layers // 2, n_layers - 1 - n_layers // 6})
    return token_row(loaded, window, configs, layers=layers, budget=budget, seed=seed)


def write_report(records: list[Any], directory: Path) -> Path:
    """Write `index.html`; an earlier report is replaced only by a whole new one."""
    from prescore.report.html import demo_page

    text = demo_page(records)
    directory.mkdir(parents=True, exist_ok=True)
    page = directory / "index.html"
    page.write_text(text, encoding="utf-8")
    return page


def demo_table(records: list[Any]) -> Any:
    """The table for the terminal."""
    from prescore.report.html import in_table
    from prescore.report.language_summary import summarise
    from prescore.report.language_tables import describe_run, loss_table

    table = [summary for summary in summarise(records) if in_table(summary)]
    note = "gap closed: from local only (far context dropped) to exact; speed-up: against fused exact attention"
    return loss_table(table, describe_run(table, records[0].config["model"]), note).to_rich()


def _named(method: LanguageMethod, label: str, series: str, **axes: Any) -> LanguageMethod:
    return replace(method, label=label, axes={**method.axes, "series": series, **axes})


def _finished(file: Any, row: Row) -> bool:
    from prescore.records import row_key

    return row_key("demo", row.config, row.seed) in file
