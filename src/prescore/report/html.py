"""The demo's report: one self-contained page from records alone."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template

from prescore.records import Record
from prescore.report.chart import NARROW, Mark, Series, Words, legend, line_chart
from prescore.report.language_summary import Summary, find, summarise
from prescore.report.language_tables import describe_run, percent, times
from prescore.report.tables import as_text
from prescore.report.token_map import token_map

_TEMPLATES = "templates"
N_COLOURS = 6


def demo_page(records: Sequence[Record]) -> str:
    """The whole page.

    Args:
        records: Of one run of `prescore demo`: `loss` rows, those of the table marked by `axes.table`, and one
            `tokens` row.
    """
    summaries = summarise(records)
    table = [summary for summary in summaries if in_table(summary)]
    first = next(record for record in records if record.config["part"] == "loss")
    maps = [token_map(record) for record in records if record.config["part"] == "tokens"]
    values = {
        "style": _template("style.css"),
        "script": _template("script.js"),
        "headline": headline(table),
        "run": escape(describe_run(table, first.config["model"])),
        "table": _table(table),
        "chart": _chart(summaries),
        "tokens": "\n".join(maps) or "<p>No token map was made.</p>",
        "document": escape(first.config["document"]),
        "timings": _timings(records),
        "facts": _facts(records, first),
        "date": escape(max(record.created for record in records)),
    }
    return Template(_template("report.html")).substitute(values)


def in_table(summary: Summary) -> bool:
    """Whether a line belongs to the demo's table, not only to its plot."""
    return summary.kind in ("exact", "local") or bool(summary.axes.get("table"))


def headline(table: Sequence[Summary]) -> str:
    """What the table says, in one sentence."""
    best = next((summary for summary in table if summary.axes.get("series") == "default"), None)
    if best is None or best.gap_closed is None or best.rows_per_query is None:
        return "A language model read a long text with its attention replaced."
    exact = find(table, "exact", best.n_tokens)
    rows = "" if exact is None else f", where exact attention meets {as_text(exact.rows_per_query, 3)}"
    return (
        f"Meeting {as_text(best.rows_per_query, 3)} key rows per query{rows}, the default keeps "
        f"<strong>{escape(percent(best.gap_closed))}</strong> of what the far context is worth to the model."
    )


def _table(table: Sequence[Summary]) -> str:
    slowest = max((summary.attention_seconds for summary in table), default=1.0) or 1.0
    lines = []
    for summary in table:
        gap = summary.gap_closed
        width = 100 * min(1.0, max(0.0, gap)) if gap is not None else 0.0
        time = 100 * summary.attention_seconds / slowest
        lines.append(
            f"<tr{_row_class(summary)}><th scope='row'>{escape(summary.label)}</th>"
            f"<td data-name='loss'>{summary.loss:.3f}</td>"
            f"<td data-name='perplexity'>{as_text(summary.perplexity, 4)}</td>"
            f"<td data-name='gap closed' class='bar-cell'>{_fill(width, 'fill good')}"
            f"<span>{escape(percent(gap))}</span></td>"
            f"<td data-name='rows per query'>{as_text(summary.rows_per_query, 4)}</td>"
            f"<td data-name='attention time' class='bar-cell'>{_fill(time, 'fill')}"
            f"<span>{summary.attention_seconds:.2f} s</span></td>"
            f"<td data-name='speed-up'>{times(summary.speed_up)}</td></tr>"
        )
    names = ("method", "loss", "perplexity", "gap closed", "rows per query", "attention time", "speed-up")
    head = "".join(f"<th scope='col'>{name}</th>" for name in names)
    return f"<table class='results'><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _fill(width: float, kind: str) -> str:
    return f"<span class='{kind}' style='width:{width:.0f}%'></span>"


def _row_class(summary: Summary) -> str:
    return " class='best'" if summary.axes.get("series") == "default" else ""


def _chart(summaries: Sequence[Summary]) -> str:
    exact = next((s for s in summaries if s.kind == "exact"), None)
    if exact is None:
        return "<p>Exact attention was not measured.</p>"
    names = list(dict.fromkeys(str(s.axes["series"]) for s in summaries if "series" in s.axes))
    series = [
        Series(
            name,
            tuple(
                (s.rows_per_query, s.loss - exact.loss)
                for s in summaries
                if s.axes.get("series") == name and s.rows_per_query is not None
            ),
            place % N_COLOURS,
        )
        for place, name in enumerate(names)
    ]
    marks = [Mark(s.label, s.loss - exact.loss) for s in summaries if s.kind == "local"]
    if exact.rows_per_query is not None:
        marks.append(Mark("exact", exact.rows_per_query, upright=True))
    title = "loss above exact against key rows per query"
    words = Words("key rows met per query", "loss above exact (nats)", title)
    wide = line_chart(series, marks, words)
    narrow = line_chart(series, marks, words, width=NARROW, style="narrow")
    return wide + narrow + legend(series)


def _timings(records: Sequence[Record]) -> str:
    lines = []
    for record in records:
        if record.config["part"] == "loss":
            figures = record.figures
            rest = figures["forward_seconds"] - figures["attention_seconds"]
            lines.append(
                f"<tr><th scope='row'>{escape(record.config['method']['label'])}</th>"
                f"<td>{figures['attention_seconds']:.2f} s</td><td>{rest:.2f} s</td>"
                f"<td>{record.seconds:.2f} s</td></tr>"
            )
    total = sum(record.seconds for record in records)
    names = ("row", "attention", "rest of the model", "wall time")
    head = "".join(f"<th scope='col'>{name}</th>" for name in names)
    return (
        f"<table class='plain'><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        f"<p>{len(records)} rows, {total:.0f} s in all, loading the model not counted.</p>"
    )


def _facts(records: Sequence[Record], first: Record) -> str:
    command = shlex.join(first.argv) if first.argv else "prescore demo"
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    facts = {
        "command": f"<code>{escape(command)}</code>",
        "versions": escape(versions),
        "device": escape(f"{first.device}, {first.threads} threads, {first.config['dtype']}"),
        "seed": escape(str(first.seed)),
        "records": f"{len(records)} lines in <code>records.jsonl</code>; every figure here is read from them",
    }
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts.items()) + "</dl>"


def _template(name: str) -> str:
    return (resources.files("prescore.report") / _TEMPLATES / name).read_text(encoding="utf-8")
