"""A line chart as inline SVG: crisp on any screen, coloured by the page's own style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720.0, 380.0
NARROW = 360.0
"""Width of the same chart for a phone, where a wide one would shrink its words beyond reading."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 80.0, 16.0, 14.0, 46.0
FLOOR = 1e-3
"""Where values that have no logarithm are drawn."""


@dataclass(frozen=True)
class Series:
    """Points joined by a line; `place` picks the colour `--series-<place>` of the page."""

    label: str
    points: tuple[tuple[float, float], ...]
    place: int


@dataclass(frozen=True)
class Level:
    """A line of reference: horizontal, or upright where `upright` is set and `value` is a place on the x axis."""

    label: str
    value: float
    upright: bool = False


def line_chart(
    series: Sequence[Series],
    levels: Sequence[Level],
    *,
    x_label: str,
    y_label: str,
    title: str,
    width: float = WIDTH,
    style: str = "",
) -> str:
    """The chart: x in powers of two, y in powers of ten; what is not above `FLOOR` is drawn at it.

    Args:
        series: Lines.
        levels: Lines of reference.
        x_label: Below the x axis.
        y_label: Beside the y axis.
        title: For readers who do not see it.
        width: In the units of its text size.
        style: A further class of the style sheet.
    """
    if not any(one.points for one in series):
        return f'<p class="{style}">No points to draw.</p>'
    frame = _Frame.around(series, levels, width)
    kind = f"chart {style}".strip()
    parts = [
        f'<svg class="{kind}" viewBox="0 0 {width:g} {HEIGHT:g}" role="img" aria-label="{escape(title)}">',
        *_axes(frame, x_label, y_label),
        *_levels(frame, levels),
    ]
    for one in series:
        parts += _line(frame, one)
    return "\n".join([*parts, "</svg>"])


def legend(series: Sequence[Series]) -> str:
    """Names and colours of the lines."""
    items = [
        f'<li><span class="swatch" style="background:var(--series-{one.place})"></span>{escape(one.label)}</li>'
        for one in series
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


@dataclass(frozen=True)
class _Frame:
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    width: float

    @classmethod
    def around(cls, series: Sequence[Series], levels: Sequence[Level], width: float) -> _Frame:
        xs = [math.log2(x) for one in series for x, _ in one.points]
        xs += [math.log2(level.value) for level in levels if level.upright]
        ys = [_log(y) for one in series for _, y in one.points]
        ys += [_log(level.value) for level in levels if not level.upright]
        pad = 0.08 * ((max(ys) - min(ys)) or 1.0)
        x_pad = 0.05 * ((max(xs) - min(xs)) or 1.0)
        return cls(min(xs) - x_pad, max(xs) + x_pad, min(ys) - pad, max(ys) + pad, width)

    @property
    def right(self) -> float:
        """Where the plot ends."""
        return self.width - _RIGHT

    def x(self, value: float) -> float:
        share = (math.log2(value) - self.x_low) / (self.x_high - self.x_low)
        return _LEFT + share * (self.right - _LEFT)

    def y(self, value: float) -> float:
        share = (_log(value) - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


def _log(value: float) -> float:
    return math.log10(max(value, FLOOR))


def _axes(frame: _Frame, x_label: str, y_label: str) -> list[str]:
    bottom = HEIGHT - _BOTTOM
    parts = []
    for exponent in range(math.ceil(frame.x_low), math.floor(frame.x_high) + 1):
        x = frame.x(2.0**exponent)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP:g}" y2="{bottom:g}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{bottom + 16:g}" text-anchor="middle">{2**exponent}</text>'
        )
    for value in _ticks(frame.y_low, frame.y_high):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT:g}" x2="{frame.right:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    middle = (_LEFT + frame.right) / 2
    parts.append(
        f'<text class="axis" x="{middle:g}" y="{HEIGHT - 6:g}" text-anchor="middle">{escape(x_label)}</text>'
    )
    parts.append(
        f'<text class="axis" transform="translate(16 {(_TOP + bottom) / 2:g}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_label)}</text>'
    )
    return parts


def _levels(frame: _Frame, levels: Sequence[Level]) -> list[str]:
    parts = []
    # methods worse than the level are cheap: the right end above it is free
    end = min([frame.right, *(frame.x(level.value) - 8 for level in levels if level.upright)])
    for level in levels:
        if level.upright:
            x = frame.x(level.value)
            parts.append(
                f'<line class="level" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP:g}" y2="{HEIGHT - _BOTTOM:g}"/>'
            )
            place = f'transform="translate({x - 5:.1f} {_TOP:g}) rotate(-90)" text-anchor="end"'
            parts.append(f'<text class="level-name" {place}>{escape(level.label)}</text>')
            continue
        y = frame.y(level.value)
        parts.append(f'<line class="level" x1="{_LEFT:g}" x2="{frame.right:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        place = f'x="{end:.1f}" y="{y - 5:.1f}" text-anchor="end"'
        parts.append(f'<text class="level-name" {place}>{escape(level.label)}</text>')
    return parts


def _line(frame: _Frame, one: Series) -> list[str]:
    colour = f"var(--series-{one.place})"
    points = sorted(one.points)
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    parts = [f'<polyline class="line" points="{path}" style="stroke:{colour}"/>'] if len(points) > 1 else []
    for x, y in points:
        place = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="4.5" style="fill:{colour}"'
        words = escape(f"{one.label}: {y:.3f} at {x:.0f}")
        parts.append(f"<circle {place}><title>{words}</title></circle>")
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between two exponents; powers alone where these would crowd."""
    factors = (1, 2, 5) if high - low < 2.2 else (1,)
    powers = range(math.floor(low), math.ceil(high) + 1)
    values = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in values if low <= math.log10(value) <= high]
