"""A line chart as SVG text inside a page, drawn by matplotlib and coloured by the page's own style sheet."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from prescore.report.plots import drawing, powers_of_two
from prescore.values import Values

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
