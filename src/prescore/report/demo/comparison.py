"""Methods that read as many rows: the headline, bars for the page, a table for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from prescore.records import Record
from prescore.report.demo.compared import Line, compare, find_line
from prescore.report.language_tables import describe_run, percent, times
from prescore.report.tables import MISSING, Table, as_text

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
            as_text(line.summary.rows_per_query, 4),
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
        f"Meeting <strong>{as_text(own.rows_per_query, 3)} of {as_text(whole.rows_per_query, 4)} key rows</strong>"
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
        Bar(line.name, line.summary.rows_per_query, as_text(line.summary.rows_per_query, 4), line.is_default)
        for line in lines
    ]
    return (
        "<div class='panels'>"
        + _panel("Loss above exact", "nats per token", loss, most)
        + _panel("Time in attention", "one forward, all layers", seconds)
        + _panel("Key rows met per query", "stand-ins included", rows)
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
            as_text(own.rows_per_query, 4),
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
