"""The demo's report: one self-contained page from records alone."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template
from typing import Any

from prescore.bench.language.tables import Summary, confidence_half_width, describe_run, percent, summarise, times
from prescore.bench.plots import drawing, powers_of_two
from prescore.bench.records import Record
from prescore.bench.tables import MISSING, Table, as_text
from prescore.types import Values

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
                (line.summary.keys_per_query, line.above)
                for line in lines
                if line.name == name and line.summary.keys_per_query is not None and line.above is not None
            ),
            place % N_COLOURS,
        )
        for place, name in enumerate(order)
    ]
    marks = [
        Mark(line.name, line.above) for line in lines if line.summary.kind == "local" and line.above is not None
    ]
    if exact is not None and exact.keys_per_query is not None:
        marks.append(Mark("exact", exact.keys_per_query, upright=True))
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
    return (resources.files("prescore.bench.demo") / _TEMPLATES / name).read_text(encoding="utf-8")


# Methods beside exact attention on the same stretches of text, with intervals.


@dataclass(frozen=True)
class Line:
    """One method.

    Attributes:
        summary: Its figures over all windows that it read.
        name: What it is called.
        n_windows: How many those are.
        n_stretches: Stretches of text that its loss was compared in, stretch by stretch.
        above: Loss above exact attention's on the same tokens, nats per token; None = that was not measured.
        half_width: Half of the 95 % interval of that, over the stretches.
    """

    summary: Summary
    name: str
    n_windows: int
    n_stretches: int
    above: float | None
    half_width: float | None

    @property
    def is_default(self) -> bool:
        """Whether it is what the page is about."""
        return self.name == "default"


def compare(records: Sequence[Record], comparison: str) -> list[Line]:
    """The lines of one comparison, in the order of their records."""
    own = [r for r in records if r.config["part"] == "loss" and _axes(r).get("comparison") == comparison]
    exact = {_window(record): record for record in own if record.config["method"]["kind"] == "exact"}
    lines = []
    for summary in summarise(own):
        mine = [record for record in own if record.config["method"]["label"] == summary.label]
        pairs = [(record, exact[_window(record)]) for record in mine if _window(record) in exact]
        apart = [gap for one, other in pairs for gap in _gaps(one, other)]
        lines.append(
            Line(
                summary,
                str(summary.axes["series"]),
                len({_window(record) for record in mine}),
                len(apart),
                statistics.fmean(apart) if apart else None,
                None if summary.kind == "exact" else confidence_half_width(apart),
            )
        )
    return lines


def find_line(lines: Sequence[Line], name: str) -> Line | None:
    """The line of that name."""
    return next((line for line in lines if line.name == name), None)


def _gaps(one: Record, other: Record) -> list[float]:
    """What the first lost more than the second, stretch by stretch."""
    losses = [record.figures.get("stretch_losses") for record in (one, other)]
    if not all(isinstance(parts, list) and parts for parts in losses):
        raise ValueError(f"record {one.key} must have losses by stretches of its text, got {losses[0]!r}")
    return [float(a) - float(b) for a, b in zip(*losses, strict=True)]


def _window(record: Record) -> str:
    return f"{record.config['document']}@{record.config['digest']}"


def _axes(record: Record) -> dict[str, object]:
    return dict(record.config["method"]["axes"])


# Methods that read as many rows: the headline, bars for the page, a table for the terminal.

EQUAL_ROWS = "equal rows"
_BEYOND = 1.3
"""Bars end at so many times what dropping the far context loses; a method that loses more is cut off there."""


def comparison_table(records: Sequence[Record]) -> Table:
    """The comparison for the terminal."""
    lines = compare(records, EQUAL_ROWS)
    first = next(record for record in records if record.config["part"] == "loss")
    rows = tuple(
        (
            line.name,
            str(line.n_windows),
            f"{line.summary.loss:.4f}",
            above_words(line),
            percent(line.summary.gap_closed),
            as_text(line.summary.keys_per_query, 4),
            f"{line.summary.attention_seconds:.2f} s",
            times(line.summary.speed_up),
        )
        for line in lines
    )
    return Table(
        title=describe_run([line.summary for line in lines], first.config["model"]),
        columns=(
            *("method", "windows", "loss (nats)", "above exact", "gap closed", "rows/query"),
            *("attention", "speed-up"),
        ),
        rows=rows,
        note="above exact: on the same tokens, with a 95 % interval over stretches of text; gap closed: from "
        "local only (far context dropped) to exact; speed-up: against fused exact attention",
    )


def headline(lines: Sequence[Line]) -> str:
    """What was read, what it cost in loss and in time, and what the default would do alone."""
    default, exact = find_line(lines, "default"), find_line(lines, "exact")
    if default is None or exact is None or default.above is None:
        return "A language model read a long text with its attention replaced."
    own, whole = default.summary, exact.summary
    lost = above_words(default).replace(" ", "\N{NO-BREAK SPACE}")
    fast = whole.attention_seconds / own.attention_seconds
    saved = whole.forward_seconds / own.forward_seconds
    return (
        f"BlockPair <strong>{as_text(own.keys_per_query, 3)} of {as_text(whole.keys_per_query, 4)} key rows</strong>"
        f" per query, the default loses <strong>{lost} nats</strong> per token against exact "
        f"attention (perplexity {as_text(own.perplexity, 4)} instead of {as_text(whole.perplexity, 4)}) and takes "
        f"<strong>{own.attention_seconds:.1f} s</strong> for attention instead of "
        f"{whole.attention_seconds:.1f} s: <strong>{_ratio(fast)}</strong>; the whole forward is {_ratio(saved)}. "
        f"{alone(default)}"
    )


def alone(default: Line) -> str:
    """What the default does at this length when nobody changes it."""
    length, until = default.summary.n_tokens, int(default.summary.settings.get("exact_until", 0))
    apply = "<code>prescore.apply(model)</code>"
    if until and length > until:
        return (
            f"This is what {apply} does by itself at {length} tokens; up to {until} it reads everything, exactly."
        )
    return (
        f"Left alone, {apply} reads everything at {length} tokens, exactly, because that is faster there: here it "
        "was made to route, to show how."
    )


@dataclass(frozen=True)
class Bar:
    """One bar of a panel; `spread` is half of its interval."""

    name: str
    value: float | None
    words: str
    best: bool
    spread: float = 0.0


def panels(lines: Sequence[Line]) -> str:
    """Loss, time and rows side by side, or below one another where the page is narrow."""
    local = find_line(lines, "local only")
    most = max((line.above + (line.half_width or 0.0) for line in lines if line.above is not None), default=0.0)
    if local is not None and local.above is not None and local.above > 0:
        most = min(most, _BEYOND * local.above)
    loss = [
        Bar(line.name, line.above, above_words(line, digits=3), line.is_default, line.half_width or 0.0)
        for line in lines
    ]
    seconds = [
        Bar(line.name, line.summary.attention_seconds, f"{line.summary.attention_seconds:.1f} s", line.is_default)
        for line in lines
    ]
    rows = [
        Bar(line.name, line.summary.keys_per_query, as_text(line.summary.keys_per_query, 4), line.is_default)
        for line in lines
    ]
    return (
        "<div class='panels'>"
        + _panel("Loss above exact", "nats per token", loss, most)
        + _panel("Time in attention", "one forward, all layers", seconds)
        + _panel("Key rows met per query", "centroids included", rows)
        + "</div>"
    )


def details(lines: Sequence[Line]) -> str:
    """Every figure, as a table."""
    names = (
        *("method", "windows", "loss", "perplexity", "above exact", "gap closed", "rows per query"),
        *("attention", "speed-up", "forward"),
    )
    body = []
    for line in lines:
        own = line.summary
        cells = (
            str(line.n_windows),
            f"{own.loss:.4f}",
            as_text(own.perplexity, 4),
            above_words(line),
            percent(own.gap_closed),
            as_text(own.keys_per_query, 4),
            f"{own.attention_seconds:.2f} s",
            times(own.speed_up),
            f"{own.forward_seconds:.2f} s",
        )
        kind = " class='best'" if line.is_default else ""
        body.append(
            f"<tr{kind}><th scope='row'>{escape(line.name)}</th>"
            + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            + "</tr>"
        )
    head = "".join(f"<th scope='col'>{name}</th>" for name in names)
    return f"<table class='plain'><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def interval_words(lines: Sequence[Line]) -> str:
    """What the intervals are over."""
    known = [line for line in lines if line.half_width is not None]
    if not known:
        return ""
    most = max(known, key=lambda line: line.n_stretches)
    each = most.summary.n_tokens // 2 * most.n_windows // most.n_stretches
    windows = "one window" if most.n_windows == 1 else f"{most.n_windows} windows"
    return (
        f"± is half of a 95 % interval over {most.n_stretches} stretches of {each} tokens from {windows}, each "
        "compared with exact attention on the same tokens."
    )


def above_words(line: Line, digits: int = 4) -> str:
    """What a method loses, with its interval; what would be shown as nothing has one more digit."""
    if line.above is None or math.isnan(line.above):
        return MISSING
    if line.summary.kind == "exact":
        return "0"
    digits += abs(line.above) < 0.5 * 10.0**-digits
    return f"{line.above:.{digits}f}" + ("" if line.half_width is None else f" ± {line.half_width:.{digits}f}")


def _ratio(value: float) -> str:
    return f"{value:.1f} times as fast" if value >= 1 else f"slower, by {1 / value:.1f} times"


def _panel(title: str, unit: str, bars: Sequence[Bar], most: float | None = None) -> str:
    top = max((bar.value or 0.0 for bar in bars), default=0.0) if most is None else most
    rows = "".join(_bar(bar, top or 1.0) for bar in bars)
    return (
        f"<figure class='measure'><figcaption><b>{title}</b><span class='better'>↓ lower is better · {unit}</span>"
        f"</figcaption>{rows}</figure>"
    )


def _bar(bar: Bar, top: float) -> str:
    value = bar.value or 0.0
    kinds = [name for name, holds in (("bar-row", True), ("best", bar.best), ("cut", value > top)) if holds]
    width = 100 * min(1.0, max(0.0, value / top))
    whisker = ""
    if bar.spread:
        low, high = (100 * min(1.0, max(0.0, end / top)) for end in (value - bar.spread, value + bar.spread))
        whisker = f"<span class='whisker' style='left:{low:.1f}%;width:{high - low:.1f}%'></span>"
    return (
        f"<div class='{' '.join(kinds)}'><span class='name'>{escape(bar.name)}</span>"
        f"<span class='value'>{escape(bar.words)}</span>"
        f"<span class='track'><span class='fill' style='width:{width:.1f}%'></span>{whisker}</span></div>"
    )


# What the default reads for a token that the reader picks: a passage to click in, and the data behind it.

BEFORE = 48
"""Tokens shown before those that can be picked."""
_FOUND = 2
"""Place in a look, as `prescore.bench.demo.run.QueryReading` has it."""


def reading_section(record: Record) -> str:
    """HTML of a `reading` record; `templates/reading.js` fills it in."""
    figures = record.figures
    if not figures["heads"]:
        return "<p>The layers that were looked at are local by design, and do not search.</p>"
    pieces: list[str] = figures["pieces"]
    first: int = figures["first"]
    before = escape("".join(pieces[max(0, first - BEFORE) : first]))
    tokens = "".join(_token(piece, number) for number, piece in enumerate(pieces[first:]))
    data = json.dumps({**figures, "start": telling(figures["looks"][figures["searching"]], pieces[first:])})
    return (
        '<div class="reading">\n'
        f'<p class="text passage"><span class="before">{before}</span>{tokens}</p>\n'
        '<p class="asked" aria-live="polite"><noscript>Picking a token needs JavaScript.</noscript></p>\n'
        f"{_legend()}\n"
        '<div class="cards"><div class="card"></div><div class="card"></div></div>\n'
        '<h3>Every head for this token: layer.head, weights, rows found</h3>\n<div class="heads"></div>\n'
        # a text may hold what ends a script
        f'<script type="application/json">{data.replace("<", chr(92) + "u003c")}</script>\n</div>'
    )


def telling(looks: list[list[int]], pieces: list[str]) -> int:
    """The query to begin with: of those that are words, the one that gives most weight to rows it found."""
    words = [number for number, piece in enumerate(pieces) if sum(map(str.isalpha, piece)) > 2]
    return max(words or range(len(pieces)), key=lambda number: looks[number][_FOUND])


def _token(piece: str, number: int) -> str:
    shown = piece if piece.strip("\n") else "⏎" * max(1, piece.count("\n")) + piece
    return f'<span class="token" role="button" tabindex="0" data-query="{number}">{escape(shown)}</span>'


def _legend() -> str:
    words = {
        "sinks": "first tokens",
        "near": "local part: own and previous chunk",
        "found": "rows found far away",
        "stands": "centroids for the rest",
    }
    items = "".join(f'<li><span class="swatch {kind}"></span>{text}</li>' for kind, text in words.items())
    return f'<ul class="legend">{items}</ul>'


# A picture of which tokens were kept: bars over the whole text, and the words themselves.

PASSAGE = 420
"""Tokens shown as text; the bars show all."""
_STRONG = 4
_BAR_WIDTH, _BAR_HEIGHT = 1000, 14


def token_map(record: Record) -> str:
    """HTML of one `tokens` record: choices, a bar per head, and a passage with the kept words marked."""
    figures = record.figures
    methods, layers = list(figures["kept"]), [str(layer) for layer in record.config["layers"]]
    choices = [
        _choice("method", "Keys chosen by", methods, methods),
        _choice("layer", "in", [f"layer {int(layer) + 1}" for layer in layers], layers),
    ]
    views = [
        _view(figures, method, layer, first=(method, layer) == (methods[0], layers[0]))
        for method in methods
        for layer in layers
    ]
    shown = (
        f'<div class="tokens">\n<div class="choices">{"".join(choices)}</div>\n' + "\n".join(views) + "\n</div>"
    )
    return shown + _mass_table(figures["mass"], methods, layers)


def _mass_table(mass: dict[str, dict[str, float]], methods: Sequence[str], layers: Sequence[str]) -> str:
    """The share of attention on kept keys, all methods and layers beside one another."""
    head = "".join(f"<th scope='col'>layer {int(layer) + 1}</th>" for layer in layers)
    lines = []
    for method in methods:
        cells = "".join(f"<td>{100 * mass[method][layer]:.0f} %</td>" for layer in layers)
        lines.append(f"<tr><th scope='row'>{escape(method)}</th>{cells}</tr>")
    table = (
        f"<thead><tr><th scope='col'>attention on kept keys</th>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    )
    return f"<div class='scroll'><table class='plain mass-table'>{table}</table></div>"


def _choice(name: str, words: str, labels: Sequence[str], values: Sequence[str]) -> str:
    options = "".join(
        f'<option value="{escape(value)}">{escape(label)}</option>'
        for label, value in zip(labels, values, strict=True)
    )
    return f'<label>{words} <select data-choice="{name}">{options}</select></label>'


def _view(figures: Values, method: str, layer: str, *, first: bool) -> str:
    heads: list[list[int]] = figures["kept"][method][layer]
    pieces: list[str] = figures["pieces"]
    mass = figures["mass"][method][layer]
    shown = "" if first else " hidden"
    counts = [len(head) for head in heads]
    kept = str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))
    bars = "".join(_bar_token_map(head, len(pieces), number) for number, head in enumerate(heads))
    return (
        f'<div class="view" data-method="{escape(method)}" data-layer="{escape(layer)}"{shown}>'
        f'<p class="mass">{kept} of {len(pieces)} keys kept per head; they receive '
        f"<strong>{100 * mass:.0f} %</strong> of the attention that the second half gives to these keys.</p>"
        f'<div class="bars">{bars}</div>'
        f'<p class="text">{_text(pieces, heads)}</p></div>'
    )


def _bar_token_map(head: Sequence[int], length: int, number: int) -> str:
    step = _BAR_WIDTH / length
    marks = "".join(f"M{position * step:.1f} 0v{_BAR_HEIGHT}" for position in head)
    return (
        f'<svg class="bar" viewBox="0 0 {_BAR_WIDTH} {_BAR_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="positions kept by head {number + 1}"><path d="{marks}"/></svg>'
    )


def _text(pieces: Sequence[str], heads: Sequence[Sequence[int]]) -> str:
    """The passage; a token kept by more heads is marked more strongly."""
    votes = [0] * len(pieces)
    for head in heads:
        for position in head:
            votes[position] += 1
    parts: list[str] = []
    plain: list[str] = []
    for piece, count in zip(pieces[:PASSAGE], votes, strict=False):
        if count == 0:
            plain.append(piece)
            continue
        parts.append(escape("".join(plain)))
        plain.clear()
        strength = max(1, round(_STRONG * count / len(heads)))
        parts.append(f'<mark class="s{strength}">{escape(_visible(piece))}</mark>')
    parts.append(escape("".join(plain)))
    return "".join(parts)


def _visible(piece: str) -> str:
    """A kept line end must be seen, and still end the line."""
    return piece if piece.strip("\n") else "⏎" * max(1, piece.count("\n")) + piece


# A line chart as SVG text inside a page, drawn by matplotlib and coloured by the page's own style sheet.

WIDTH, HEIGHT = 720.0, 380.0
NARROW = 360.0
"""Width of the same chart for a phone, where a wide one would shrink its words beyond reading."""
FLOOR = 1e-3
"""Where values that have no logarithm are drawn."""

_POINTS_PER_INCH = 72.0
_LINE_HEIGHT = 15.0 / 310.0
"""Of a label, as a share of the frame's height."""
_WRAP = 14
"""Letters in a line of a label where the chart is narrow."""
# colours that nothing else in a drawing has, and what they become in the page
_INK, _QUIET, _RULE = "#010101", "#020202", "#030303"
_VARIABLES = {_INK: "--ink", _QUIET: "--quiet", _RULE: "--rule"}
_SERIES = tuple(f"#0404{place:02x}" for place in range(16))
_STYLE = {
    "font.size": 12,
    "axes.labelsize": 13,
    "axes.labelcolor": _QUIET,
    "axes.edgecolor": _RULE,
    "xtick.labelcolor": _QUIET,
    "ytick.labelcolor": _QUIET,
    "xtick.color": _RULE,
    "ytick.color": _RULE,
    "grid.color": _RULE,
    "savefig.bbox": None,
    "svg.fonttype": "none",
    "svg.hashsalt": "prescore",
}
_REFERENCE: Values = {"color": _INK, "linewidth": 1.2, "linestyle": (0, (5, 4)), "alpha": 0.7}


@dataclass(frozen=True)
class Series:
    """Points joined by a line; `place` picks the colour `--series-<place>` of the page."""

    label: str
    points: tuple[tuple[float, float], ...]
    place: int


@dataclass(frozen=True)
class Mark:
    """A line of reference: horizontal, or upright where `upright` is set and `value` is a place on the x axis."""

    label: str
    value: float
    upright: bool = False


@dataclass(frozen=True)
class Words:
    """Below the x axis, beside the y axis, and for readers who do not see the chart."""

    x: str
    y: str
    title: str


def line_chart(
    series: Sequence[Series], marks: Sequence[Mark], words: Words, *, width: float = WIDTH, style: str = "wide"
) -> str:
    """The chart: x in powers of two, y in powers of ten; what is not above `FLOOR` is drawn at it.

    Args:
        series: Lines.
        marks: Lines of reference.
        words: What its axes are called.
        width: In the units of its text size.
        style: A further class of the style sheet, and what its parts' names begin with.
    """
    if not any(one.points for one in series):
        return f'<p class="{style}">No points to draw.</p>'
    text, size = io.StringIO(), (width / _POINTS_PER_INCH, HEIGHT / _POINTS_PER_INCH)
    with drawing(size, _STYLE) as (figure, axes):
        tips = [tip for number, one in enumerate(series) for tip in _line(axes, one, number)]
        for number, mark in enumerate(marks):
            draw = axes.axvline if mark.upright else axes.axhline
            draw(_drawn(mark.value), gid=f"mark-{number}", **_REFERENCE)
        _frame(axes)
        _names(axes, marks)
        _label_lines(axes, series, wrap=_WRAP if width < WIDTH else None)
        axes.set(xlabel=words.x, ylabel=words.y)
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return _inside_a_page(text.getvalue(), dict(tips), f"chart {style}", words.title)


def _line(axes: Any, one: Series, number: int) -> list[tuple[str, str]]:
    """Draw a series; returns the names of its points in the drawing, and what is said about each."""
    colour, points = _SERIES[one.place % len(_SERIES)], sorted(one.points)
    if len(points) > 1:
        x, y = zip(*points, strict=True)
        axes.plot(x, [_drawn(value) for value in y], color=colour, linewidth=2.5, gid=f"line-{number}")
    tips = []
    for place, (rows, value) in enumerate(points):
        name = f"point-{number}-{place}"
        axes.plot([rows], [_drawn(value)], marker="o", markersize=9, color=colour, gid=name, clip_on=False)
        tips.append((name, f"{one.label}: {value:.3f} at {rows:.0f}"))
    return tips


def _names(axes: Any, marks: Sequence[Mark]) -> None:
    """Beside the lines of reference; the upright ones from their upper ends down."""
    text: Values = {"textcoords": "offset points", "color": _INK, "fontweight": "bold", "ha": "right"}
    # methods worse than a level line are cheap: its right end is free, up to the first upright line
    end = min([axes.get_xlim()[1], *(mark.value for mark in marks if mark.upright)])
    for mark in marks:
        if mark.upright:
            top = {"xycoords": axes.get_xaxis_transform(), "rotation": 90, "va": "top"}
            axes.annotate(mark.label, (mark.value, 1), (-3, -2), **top, **text)
        else:
            axes.annotate(mark.label, (end, _drawn(mark.value)), (-8, 2), va="bottom", **text)


def _label_lines(axes: Any, series: Sequence[Series], *, wrap: int | None) -> None:
    """Each line's name in its colour, to the right of the frame, level with its end where others leave room."""
    low, high = (math.log(end) for end in axes.get_ylim())
    named = []
    for one in series:
        if one.points:
            x, y = max(one.points)
            words = one.label if wrap is None else textwrap.fill(one.label, wrap)
            named.append(((math.log(_drawn(y)) - low) / (high - low), x, _drawn(y), words, one.place))
    named.sort(key=lambda name: name[0])
    heights = apart([name[0] for name in named], [_LINE_HEIGHT * (1 + name[3].count("\n")) for name in named])
    for height, (_, x, y, words, place) in zip(heights, named, strict=True):
        colour = _SERIES[place % len(_SERIES)]
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 1, "shrinkB": 6}
        text = {"color": colour, "va": "center", "ha": "left", "fontweight": "bold", "arrowprops": line}
        axes.annotate(words, (x, y), (1.04, height), textcoords="axes fraction", annotation_clip=False, **text)


def apart(places: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Ascending places moved up or down until things of these sizes do not overlap, and stay between 0 and 1."""
    moved: list[float] = []
    for number, (place, size) in enumerate(zip(places, sizes, strict=True)):
        least = size / 2 if number == 0 else moved[-1] + (sizes[number - 1] + size) / 2
        moved.append(max(place, least))
    most = 1.0
    for number in reversed(range(len(moved))):
        moved[number] = min(moved[number], most - sizes[number] / 2)
        most = moved[number] - sizes[number] / 2
    return moved


def _frame(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    powers_of_two(axes)
    axes.margins(x=0.05, y=0.08)
    low, high = axes.get_ylim()
    # 1, 2 and 5 times powers of ten; powers alone where these would crowd
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 200 else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _drawn(value: float) -> float:
    return max(value, FLOOR)


def _inside_a_page(svg: str, tips: dict[str, str], kind: str, title: str) -> str:
    """The drawing as a page wants it: nothing to fetch, colours of the style sheet, names that are its own."""
    svg = svg[svg.index("<svg") :]
    box = re.search(r'viewBox="[^"]*"', svg)
    if box is None:
        raise ValueError("matplotlib's SVG must say its viewBox")
    look = 'style="stroke-linejoin:round" role="img"'
    svg = re.sub(r"<svg[^>]*>", f'<svg class="{kind}" {box[0]} {look} aria-label="{escape(title)}">', svg, count=1)
    # addresses of what its words mean, a style that would hold for the whole page, fonts that are not the page's
    for foreign in (r"<metadata>.*?</metadata>", r"<style.*?</style>", r"font-family: [^;]*; "):
        svg = re.sub(foreign, "", svg, flags=re.DOTALL)
    for name, words in tips.items():
        svg = svg.replace(f'<g id="{name}">', f'<g id="{name}"><title>{escape(words)}</title>', 1)
    prefix = kind.split()[-1]
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    for place, colour in enumerate(_SERIES):
        svg = svg.replace(colour, f"var(--series-{place})")
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.replace("xlink:href", "href").strip()
