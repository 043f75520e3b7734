"""The demo's report: one self-contained page from records alone."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from prescore.bench.busy import busy_words
from prescore.bench.language.tables import Summary, confidence_half_width, describe_run, summarise
from prescore.bench.records import Record, replacing
from prescore.bench.tables import MISSING, Table, as_text, percent, times


def write_page(records: Sequence[Record], directory: Path) -> Path:
    """Write `index.html`; an earlier page is replaced only by a complete new one."""
    text = demo_page(records)
    directory.mkdir(parents=True, exist_ok=True)
    page = directory / "index.html"
    with replacing(page) as working:
        working.write_text(text, encoding="utf-8")
    return page


def demo_page(records: Sequence[Record]) -> str:
    """The whole page, from the records of one run: `loss` rows and a `reads` row."""
    lines = compare(records)
    first = next(record for record in records if record.config["part"] == "loss")
    reads = [reads_section(record) for record in records if record.config["part"] == "reads"]
    values = {
        "style": _template("style.css"),
        "script": _template("script.js"),
        "headline": headline(lines, busy_words(records)),
        "run": escape(describe_run([line.summary for line in lines], first.config["model"])),
        "panels": _panels(lines),
        "table": _html_table(_COLUMNS, map(_cells, lines)),
        "interval": _interval_words(lines),
        "reads": "\n".join(reads),
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


def compare(records: Sequence[Record]) -> list[Line]:
    """A line for each method, in the order of the records."""
    losses = [r for r in records if r.config["part"] == "loss"]
    exact = {_window(r): r for r in losses if r.config["method"]["config"]["type"] == "Exact"}
    lines = []
    for summary in summarise(losses):
        mine = [record for record in losses if record.config["method"]["config"] == summary.config]
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
    losses = zip(one.results["segment_losses"], exact.results["segment_losses"], strict=True)
    return [float(loss) - float(exact_loss) for loss, exact_loss in losses]


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
    lines = compare(records)
    first = next(record for record in records if record.config["part"] == "loss")
    return Table(
        title=describe_run([line.summary for line in lines], first.config["model"]),
        columns=_COLUMNS,
        rows=tuple(_cells(line) for line in lines),
        note="above exact: on the same tokens, with a 95 % interval over segments of text; gap closed: from "
        "local only (far keys dropped) to exact; speed-up: against fused exact attention",
    )


def headline(lines: Sequence[Line], busy: str = "") -> str:
    """What was read, what it cost in loss and in time, and what the default does unchanged.

    On a busy machine the headline has no times, but the warning of `busy_words`.
    """
    default, exact = (next((line for line in lines if line.name == name), None) for name in ("default", "exact"))
    if default is None or exact is None or default.above is None:
        return "A language model read a long text with its attention replaced."
    ours, full = default.summary, exact.summary
    lost = above_words(default).replace(" ", "\N{NO-BREAK SPACE}")
    reads = f"{as_text(ours.reads_per_query, 3)} keys and centroids of {as_text(full.reads_per_query, 4)} keys"
    ratio = _ratio(full.attention_seconds / ours.attention_seconds)
    speed = (
        f" and takes <strong>{ours.attention_seconds:.1f} s</strong> for attention instead of "
        f"{full.attention_seconds:.1f} s: <strong>{ratio}</strong>; "
        f"the whole forward is {_ratio(full.forward_seconds / ours.forward_seconds)}."
    )
    if busy:
        speed = f". <strong>{busy[0].upper()}{busy[1:]}.</strong>"
    return (
        f"Reading <strong>{reads}</strong> per query, the default loses <strong>{lost} nats</strong> per token "
        f"against exact attention (perplexity {as_text(ours.perplexity, 4)} instead of "
        f"{as_text(full.perplexity, 4)}){speed} {_unchanged(ours)}"
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
    n_tokens = most.summary.n_tokens // 2 * most.n_windows // most.n_segments
    windows = "one window" if most.n_windows == 1 else f"{most.n_windows} windows"
    return (
        f"± is half of a 95 % interval over {most.n_segments} segments of {n_tokens} tokens from {windows}, "
        "each compared with exact attention on the same tokens."
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


# What the default reads for a token: templates/script.js fills this in.


def reads_section(record: Record) -> str:
    """HTML of a `reads` record; empty where no layer searches, because all have a sliding window."""
    if not record.results["heads"]:
        return ""
    data = json.dumps(record.results).replace("<", "\\u003c")  # a text may hold the end of a script
    return Template(_template("reads.html")).substitute(data=data)
