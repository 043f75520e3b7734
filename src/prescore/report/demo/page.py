"""The demo's report: one self-contained page from records alone."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from string import Template

from prescore.records import Record
from prescore.report.demo.chart import NARROW, Mark, Series, Words, line_chart
from prescore.report.demo.compared import Line, compare
from prescore.report.demo.comparison import EQUAL_ROWS, details, headline, interval_words, panels
from prescore.report.demo.reading import reading_section
from prescore.report.demo.token_map import token_map
from prescore.report.language_tables import describe_run

BUDGETS = "budgets"
N_COLOURS = 6
DOCUMENTS = {
    "default": "how the default works, and what was measured",
    "choosing": "choosing a configuration",
    "report": "what the report of an application says",
    "long-prompts": "long prompts",
    "glossary": "words used here",
}
"""Documents that the page points to."""
_TEMPLATES = "templates"
_NO_BUDGETS = (
    "No time was left for it: <code>prescore demo --minutes 12</code>, or <code>--resume</code> with more minutes."
)


def demo_page(records: Sequence[Record], documents: Mapping[str, str] | None = None) -> str:
    """The whole page.

    Args:
        records: Of one run of `prescore demo`: `loss` rows of its two comparisons, a `reading` row and, where
            there was time for it, a `tokens` row.
        documents: Addresses of `DOCUMENTS` by name; None = they are named, and not linked.
    """
    lines, budgets = compare(records, EQUAL_ROWS), compare(records, BUDGETS)
    first = next(record for record in records if record.config["part"] == "loss")
    parts = {name: [r for r in records if r.config["part"] == name] for name in ("reading", "tokens")}
    maps = "\n".join(map(token_map, parts["tokens"]))
    values = {
        "style": _template("style.css"),
        "script": _template("script.js") + _template("reading.js"),
        "headline": headline(lines),
        "run": escape(describe_run([line.summary for line in lines], first.config["model"])),
        "panels": panels(lines),
        "details": details(lines),
        "interval": interval_words(lines),
        "reading": "\n".join(map(reading_section, parts["reading"])) or "<p>Nobody was asked.</p>",
        "chart": budget_chart(budgets) if budgets else f"<p>{_NO_BUDGETS}</p>",
        "short": str(budgets[0].summary.n_tokens) if budgets else "fewer",
        "tokens": maps or f"<p>{_NO_BUDGETS}</p>",
        "documents": _documents(documents or {}),
        "timings": _timings(records),
        "facts": _facts(records, first),
        "date": escape(max(record.created for record in records)),
    }
    return Template(_template("report.html")).substitute(values)


def budget_chart(lines: Sequence[Line]) -> str:
    """Loss above exact against rows, wide and narrow; the style sheet shows one of them."""
    exact = next((line.summary for line in lines if line.summary.kind == "exact"), None)
    names = dict.fromkeys(line.name for line in lines if line.summary.kind not in ("exact", "local"))
    # the default has a colour of its own
    order = sorted(names, key=lambda name: name != "default")
    series = [
        Series(
            name,
            tuple(
                (line.summary.rows_per_query, line.above)
                for line in lines
                if line.name == name and line.summary.rows_per_query is not None and line.above is not None
            ),
            place % N_COLOURS,
        )
        for place, name in enumerate(order)
    ]
    marks = [
        Mark(line.name, line.above) for line in lines if line.summary.kind == "local" and line.above is not None
    ]
    if exact is not None and exact.rows_per_query is not None:
        marks.append(Mark("exact", exact.rows_per_query, upright=True))
    title = "loss above exact against key rows per query; lower is better"
    words = Words(
        "key rows met per query  (← fewer is cheaper)", "↓ loss above exact (nats), lower is better", title
    )
    short = Words("← key rows per query", "↓ loss above exact (nats)", title)
    return line_chart(series, marks, words) + line_chart(series, marks, short, width=NARROW, style="narrow")


def _documents(addresses: Mapping[str, str]) -> str:
    items = []
    for name, words in DOCUMENTS.items():
        shown = escape(words)
        if name in addresses:
            shown = f'<a href="{escape(addresses[name])}">{shown}</a>'
        items.append(f"<li>{shown} <code>docs/{name}.md</code></li>")
    return f"<ul>{''.join(items)}</ul>"


def _timings(records: Sequence[Record]) -> str:
    lines = []
    for record in records:
        if record.config["part"] == "loss":
            figures = record.figures
            rest = figures["forward_seconds"] - figures["attention_seconds"]
            label = f"{record.config['method']['label']}, {record.config['n_tokens']} tokens"
            lines.append(
                f"<tr><th scope='row'>{escape(label)}</th>"
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
