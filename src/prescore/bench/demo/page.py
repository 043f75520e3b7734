"""The demo's report: one self-contained page from records alone."""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from prescore.bench.demo.run import BUDGETS, EQUAL_READS
from prescore.bench.language.tables import Summary, confidence_half_width, describe_run, summarise
from prescore.bench.plots import figure, powers_of_two
from prescore.bench.records import Record, Values, replacing
from prescore.bench.tables import MISSING, Table, as_text, percent, times

_NO_BUDGETS = (
    "No time was left for it: <code>prescore demo --minutes 12</code>, or <code>--resume</code> with more minutes."
)


def write_page(records: Sequence[Record], directory: Path) -> Path:
    """Write `index.html`; an earlier page is replaced only by a complete new one."""
    text = demo_page(records)
    directory.mkdir(parents=True, exist_ok=True)
    page = directory / "index.html"
    with replacing(page) as working:
        working.write_text(text, encoding="utf-8")
    return page


def demo_page(records: Sequence[Record]) -> str:
    """The whole page, from the records of one run.

    These are `loss` rows of its two comparisons, a `reads` row and, where there was time for it, a `selections`
    row.
    """
    lines, budgets = compare(records, EQUAL_READS), compare(records, BUDGETS)
    first = next(record for record in records if record.config["part"] == "loss")
    parts = {name: [r for r in records if r.config["part"] == name] for name in ("reads", "selections")}
    values = {
        "style": _template("style.css"),
        "script": _template("script.js"),
        "headline": headline(lines),
        "run": escape(describe_run([line.summary for line in lines], first.config["model"])),
        "panels": _panels(lines),
        "details": _details(lines),
        "interval": _interval_words(lines),
        "reads": "\n".join(map(reads_section, parts["reads"])) or "<p>Nothing was recorded.</p>",
        "chart": budget_chart(budgets) + _details(budgets) if budgets else f"<p>{_NO_BUDGETS}</p>",
        "short": str(budgets[0].summary.n_tokens) if budgets else "fewer",
        "selections": "\n".join(map(selection_section, parts["selections"])) or f"<p>{_NO_BUDGETS}</p>",
        "facts": _facts(records, first),
        "date": escape(max(record.created for record in records)),
    }
    return Template(_template("report.html")).substitute(values)


def _template(name: str) -> str:
    return (resources.files("prescore.bench.demo") / "templates" / name).read_text(encoding="utf-8")


def _html_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column names the rows; the default's row stands out."""
    body = "".join(
        f"<tr class='{'best' if name == 'default' else 'row'}'><th scope='row'>{escape(name)}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, *cells in rows
    )
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in columns)
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _details(lines: Sequence[Line]) -> str:
    return f"<details><summary>All numbers</summary>{_html_table(_COLUMNS, map(_cells, lines))}</details>"


def _facts(records: Sequence[Record], first: Record) -> str:
    facts = {
        "command": f"<code>{escape(shlex.join(first.argv) if first.argv else 'prescore demo')}</code>",
        "versions": escape(", ".join(f"{name} {version}" for name, version in first.versions.items())),
        "device": escape(f"{first.device}, {first.threads} threads, {first.config['dtype']}"),
        "seed": escape(str(first.seed)),
        "time": f"{sum(record.seconds for record in records):.0f} s, loading the model not counted",
        "records": f"{len(records)} lines in <code>records.jsonl</code>; every number here is read from them",
    }
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts.items()) + "</dl>"


# Methods compared with exact attention on the same segments of text, with intervals.


@dataclass(frozen=True)
class Line:
    """One method.

    Attributes:
        summary: Its results over all windows.
        name: Its name on the page.
        n_windows: Number of windows.
        n_segments: Segments of text in which its loss is compared with exact attention's.
        above: Loss above exact attention's on the same tokens, nats per token; None = that was not measured.
        half_width: Half of the 95 % interval of that, over the segments.
    """

    summary: Summary
    name: str
    n_windows: int
    n_segments: int
    above: float | None
    half_width: float | None


def compare(records: Sequence[Record], comparison: str) -> list[Line]:
    """The lines of one comparison, in the order of their records."""
    own = [
        r
        for r in records
        if r.config["part"] == "loss" and r.config["method"]["axes"].get("comparison") == comparison
    ]
    exact = {_window(r): r for r in own if r.config["method"]["config"]["type"] == "Exact"}
    lines = []
    for summary in summarise(own):
        mine = [record for record in own if record.config["method"]["config"] == summary.config]
        gaps = [gap for one in mine if _window(one) in exact for gap in _gaps(one, exact[_window(one)])]
        lines.append(
            Line(
                summary,
                str(summary.axes["series"]),
                len({_window(record) for record in mine}),
                len(gaps),
                statistics.fmean(gaps) if gaps else None,
                None if summary.is_exact else confidence_half_width(gaps),
            )
        )
    return lines


def _window(record: Record) -> str:
    return f"{record.config['document']}@{record.config['digest']}"


def _gaps(one: Record, exact: Record) -> list[float]:
    """Differences of the losses of two records, segment by segment."""
    losses = [record.results.get("segment_losses") for record in (one, exact)]
    if not all(isinstance(parts, list) and parts for parts in losses):
        raise ValueError(f"record {one.key} must have a list as segment_losses, got {losses[0]!r}")
    return [float(a) - float(b) for a, b in zip(*losses, strict=True)]


_COLUMNS = (
    *("method", "windows", "loss", "perplexity", "above exact", "gap closed", "keys and centroids read"),
    *("attention", "speed-up", "forward"),
)


def _cells(line: Line) -> tuple[str, ...]:
    s = line.summary
    return (
        line.name,
        str(line.n_windows),
        f"{s.loss:.4f}",
        as_text(s.perplexity, 4),
        above_words(line),
        percent(s.gap_closed),
        as_text(s.reads_per_query, 4),
        f"{s.attention_seconds:.2f} s",
        times(s.speed_up),
        f"{s.forward_seconds:.2f} s",
    )


def comparison_table(records: Sequence[Record]) -> Table:
    """The comparison for the terminal."""
    lines = compare(records, EQUAL_READS)
    first = next(record for record in records if record.config["part"] == "loss")
    return Table(
        title=describe_run([line.summary for line in lines], first.config["model"]),
        columns=_COLUMNS,
        rows=tuple(_cells(line) for line in lines),
        note="above exact: on the same tokens, with a 95 % interval over segments of text; gap closed: from "
        "local only (far keys dropped) to exact; speed-up: against fused exact attention",
    )


def headline(lines: Sequence[Line]) -> str:
    """What was read, what it cost in loss and in time, and what the default does unchanged."""
    default, exact = (next((line for line in lines if line.name == name), None) for name in ("default", "exact"))
    if default is None or exact is None or default.above is None:
        return "A language model read a long text with its attention replaced."
    own, full = default.summary, exact.summary
    lost = above_words(default).replace(" ", "\N{NO-BREAK SPACE}")
    reads = f"{as_text(own.reads_per_query, 3)} keys and centroids of {as_text(full.reads_per_query, 4)} keys"
    return (
        f"Reading <strong>{reads}</strong> per query, the default loses <strong>{lost} nats</strong> per token "
        f"against exact attention (perplexity {as_text(own.perplexity, 4)} instead of "
        f"{as_text(full.perplexity, 4)}) and takes <strong>{own.attention_seconds:.1f} s</strong> for attention "
        f"instead of {full.attention_seconds:.1f} s: "
        f"<strong>{_ratio(full.attention_seconds / own.attention_seconds)}</strong>; "
        f"the whole forward is {_ratio(full.forward_seconds / own.forward_seconds)}. {_unchanged(own)}"
    )


def _unchanged(default: Summary) -> str:
    """What the default does at this length without changes."""
    length, until = default.n_tokens, int(default.config.get("exact_until", 0))
    apply = "<code>prescore.apply(model)</code>"
    if until and length > until:
        return f"This is what {apply} does at {length} tokens; up to {until} it reads every key."
    return (
        f"Unchanged, {apply} reads every key at {length} tokens, because that is faster there; here it is set to "
        "route, to show how."
    )


def _ratio(value: float) -> str:
    return f"{value:.1f} times as fast" if value >= 1 else f"slower, by {1 / value:.1f} times"


def above_words(line: Line, digits: int = 4) -> str:
    """Loss above exact with its interval; a value that would be shown as zero has one more digit."""
    if line.above is None or math.isnan(line.above):
        return MISSING
    if line.summary.is_exact:
        return "0"
    digits += abs(line.above) < 0.5 * 10.0**-digits
    return f"{line.above:.{digits}f}" + ("" if line.half_width is None else f" ± {line.half_width:.{digits}f}")


def _interval_words(lines: Sequence[Line]) -> str:
    known = [line for line in lines if line.half_width is not None]
    if not known:
        return ""
    most = max(known, key=lambda line: line.n_segments)
    each = most.summary.n_tokens // 2 * most.n_windows // most.n_segments
    windows = "one window" if most.n_windows == 1 else f"{most.n_windows} windows"
    return (
        f"± is half of a 95 % interval over {most.n_segments} segments of {each} tokens from {windows}, each "
        "compared with exact attention on the same tokens."
    )


_CUT = 1.3
"""Bars of the loss end at so many times the loss of local-only; a longer bar is cut off there."""


def _panels(lines: Sequence[Line]) -> str:
    """Loss, time and reads side by side, or below one another where the page is narrow."""
    most = max((line.above + (line.half_width or 0.0) for line in lines if line.above is not None), default=0.0)
    local = next((line.above for line in lines if line.name == "local only"), None)
    if local is not None and local > 0:
        most = min(most, _CUT * local)
    loss = [(line, line.above, above_words(line, digits=3), line.half_width or 0.0) for line in lines]
    seconds, reads = (
        [(line, value, shown(value), 0.0) for line in lines for value in [getattr(line.summary, name)]]
        for name, shown in (("attention_seconds", "{:.1f} s".format), ("reads_per_query", lambda n: as_text(n, 4)))
    )
    return (
        "<div class='panels'>"
        + _panel("Loss above exact", "nats per token", loss, most)
        + _panel("Time in attention", "one forward, all layers", seconds)
        + _panel("Keys and centroids read", "per query", reads)
        + "</div>"
    )


def _panel(
    title: str, unit: str, bars: Sequence[tuple[Line, float | None, str, float]], most: float | None = None
) -> str:
    top = (max((value or 0.0 for _, value, _, _ in bars), default=0.0) if most is None else most) or 1.0
    rows = []
    for line, value, words, spread in bars:
        length = value or 0.0
        low, width, high = (
            100 * min(1.0, max(0.0, end / top)) for end in (length - spread, length, length + spread)
        )
        kinds = "bar-row" + (" best" if line.name == "default" else "") + (" cut" if length > top else "")
        whisker = (
            f"<span class='whisker' style='left:{low:.1f}%;width:{high - low:.1f}%'></span>" if spread else ""
        )
        rows.append(
            f"<div class='{kinds}'><span class='name'>{escape(line.name)}</span>"
            f"<span class='value'>{escape(words)}</span>"
            f"<span class='track'><span class='fill' style='width:{width:.1f}%'></span>{whisker}</span></div>"
        )
    return (
        f"<figure class='measure'><figcaption><b>{title}</b><span class='better'>↓ lower is better · {unit}</span>"
        f"</figcaption>{''.join(rows)}</figure>"
    )


# What the default reads for a token, and what scorers select: templates/script.js fills these in.


def reads_section(record: Record) -> str:
    """HTML of a `reads` record."""
    if not record.results["heads"]:
        return "<p>These layers have a sliding window and do not search.</p>"
    return Template(_template("reads.html")).substitute(data=_json(record.results))


def selection_section(record: Record) -> str:
    """HTML of a `selections` record."""
    layers = [str(layer) for layer in record.config["layers"]]
    shares = {method: [own[layer] for layer in layers] for method, own in record.results["mass"].items()}
    rows = [(method, *(f"{100 * share:.0f} %" for share in own)) for method, own in shares.items()]
    columns = ("attention on selected keys", *(f"layer {int(layer) + 1}" for layer in layers))
    section = Template(_template("selections.html")).substitute(data=_json(record.results))
    return f"{section}<div class='mass-table'>{_html_table(columns, rows)}</div>"


def _json(values: Values) -> str:
    """JSON inside a script element; a text may hold the end of a script."""
    return json.dumps(values).replace("<", "\\u003c")


# Loss above exact against reads, drawn by matplotlib and coloured by the page's style sheet.

FLOOR = 1e-3
"""Values below this are drawn at it."""
COLOURS = {
    **{"#010101": "ink", "#020202": "quiet", "#030303": "rule"},
    **{f"#0400{place:02d}": f"series-{place}" for place in range(6)},
}
"""Colours that stand for variables of the style sheet, which differ on a dark page."""


def budget_chart(lines: Sequence[Line]) -> str:
    """The chart as inline SVG, wide and narrow: a wide one would shrink its words beyond reading on a phone."""
    return _chart(lines, "wide", (7.2, 3.8)) + _chart(lines, "narrow", (3.6, 4.6))


def _chart(lines: Sequence[Line], style: str, size: tuple[float, float]) -> str:
    coloured = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings = {**dict.fromkeys(coloured, "#020202"), "grid.color": "#030303", "axes.facecolor": "none"}
    settings |= {"savefig.facecolor": "none", "svg.fonttype": "none", "svg.hashsalt": style}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chart.svg"
        with figure(path, size, settings) as (drawn, axes):
            draw_budgets(axes, lines)
            drawn.legend(loc="outside right center" if style == "wide" else "outside lower center")
        svg = path.read_text(encoding="utf-8")
    for colour, name in COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub("<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    opening = r'<svg class="chart STYLE" viewBox="\1" role="img" aria-label="loss above exact against reads">'
    return re.sub(r'^.*?<svg[^>]*viewBox="([^"]*)"[^>]*>', opening.replace("STYLE", style), svg, flags=re.DOTALL)


def draw_budgets(axes: Any, lines: Sequence[Line]) -> None:
    """A curve for each method, the default first; exact attention and local only are dashed lines."""
    from matplotlib.ticker import LogLocator

    ink, _, _, *colours = COLOURS
    points: dict[str, list[tuple[float, float]]] = {}
    for line in sorted(lines, key=lambda line: line.name != "default"):
        reads, above = line.summary.reads_per_query, line.above
        if line.summary.is_exact and reads is not None:
            axes.axvline(reads, color=ink, linestyle="--", linewidth=1, label="exact")
        elif line.summary.is_local and above is not None:
            axes.axhline(max(above, FLOOR), color=ink, linestyle=":", linewidth=1, label=line.name)
        elif reads is not None and above is not None:
            points.setdefault(line.name, []).append((reads, max(above, FLOOR)))
    for place, (name, own) in enumerate(points.items()):
        curve: Any = zip(*sorted(own), strict=True)
        axes.plot(*curve, "o-", markersize=5, color=colours[place % len(colours)], label=name)
    powers_of_two(axes)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="keys and centroids read per query (← cheaper)", ylabel="↓ loss above exact (nats)")
