"""A line chart as inline SVG: crisp on any screen, coloured by the page's own style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720.0, 380.0
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
    """A horizontal line of reference."""

    label: str
    value: float


def line_chart(
    series: Sequence[Series], levels: Sequence[Level], *, x_label: str, y_label: str, title: str
) -> str:
    """The chart: x in powers of two, y in powers of ten; what is not above `FLOOR` is drawn at it."""
    if not any(one.points for one in series):
        return "<p>No points to draw.</p>"
    frame = _Frame.around(series, levels)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(title)}">',
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

    @classmethod
    def around(cls, series: Sequence[Series], levels: Sequence[Level]) -> _Frame:
        xs = [math.log2(x) for one in series for x, _ in one.points]
        ys = [_log(y) for one in series for _, y in one.points] + [_log(level.value) for level in levels]
        pad = 0.08 * ((max(ys) - min(ys)) or 1.0)
        x_pad = 0.05 * ((max(xs) - min(xs)) or 1.0)
        return cls(min(xs) - x_pad, max(xs) + x_pad, min(ys) - pad, max(ys) + pad)

    def x(self, value: float) -> float:
        share = (math.log2(value) - self.x_low) / (self.x_high - self.x_low)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

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
        parts.append(f'<line class="grid" x1="{_LEFT:g}" x2="{WIDTH - _RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
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
    for level in levels:
        y = frame.y(level.value)
        parts.append(f'<line class="level" x1="{_LEFT:g}" x2="{WIDTH - _RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="level-name" x="{WIDTH - _RIGHT:g}" y="{y - 5:.1f}" text-anchor="end">'
            f"{escape(level.label)}</text>"
        )
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
