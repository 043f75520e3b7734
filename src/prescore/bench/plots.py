"""One house style for all plots: quiet axes, direct titles, colours that survive colour blindness."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prescore.bench.records import Values, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's palette, black last
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
# without yellow, which is invisible on white, and black, which is for the main line; then Tol's muted ones
_LINES = (*COLOURS[:6], "#332288", "#882255", "#999933", "#117733")
_MARKERS = "osD^vPXp*h"
_DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)))
_STYLE: Values = {
    "figure.dpi": 120,
    "savefig.bbox": "tight",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


@contextmanager
def figure(
    path: str | Path, size: tuple[float, float], settings: Any = None, **subplots: Any
) -> Iterator[tuple[Figure, Any]]:
    """Draw in the house style and save to `path`; the caller's matplotlib settings do not change.

    Args:
        path: The file; its suffix is the format.
        size: Width and height in inches.
        settings: Of matplotlib, in place of those of the house style.
        subplots: Arguments of `Figure.subplots`.

    Example:
        >>> with figure("loss.png", (6, 4)) as (_, axes):
        ...     axes.plot(lengths, losses, color=COLOURS[0])
    """
    import matplotlib
    from cycler import cycler
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as NewFigure

    style: Any = {**_STYLE, "axes.prop_cycle": cycler(color=COLOURS), **(settings or {})}
    with matplotlib.rc_context(style):
        drawn = NewFigure(figsize=size, layout="constrained")
        FigureCanvasAgg(drawn)
        yield drawn, drawn.subplots(**subplots)
        with replacing(path) as working:
            drawn.savefig(working)


def line_style(number: int) -> Values:
    """Colour, marker and dashes of a line by its number: no two of the first ten share a colour or a marker."""
    cycle, index = divmod(number, len(_LINES))
    dashes = _DASHES[cycle % len(_DASHES)]
    return {"color": _LINES[index], "marker": _MARKERS[(index + cycle) % len(_MARKERS)], "linestyle": dashes}


def line_plot(
    rows: Sequence[Values], path: str | Path, *, x: str, y: str, by: str, log_x: bool = False, log_y: bool = False
) -> None:
    """Columns of rows against each other, a line for each value of a third; points with equal x are averaged."""
    points: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        values = row.get(x), row.get(y)
        if by in row and all(isinstance(value, int | float) and math.isfinite(value) for value in values):
            line = points.setdefault(str(row[by]), {})
            line.setdefault(float(values[0]), []).append(float(values[1]))  # type: ignore[arg-type]
    if not points:
        known = sorted({name for row in rows for name in row})
        raise ValueError(f"rows must have numbers in {x!r} and {y!r}, and {by!r}, got {len(rows)} with {known}")
    with figure(path, (6.4, 4.2)) as (_, axes):
        for number, (name, line) in enumerate(points.items()):
            means = [(at, statistics.fmean(line[at])) for at in sorted(line)]
            axes.plot(*zip(*means, strict=True), label=name, markersize=4, **line_style(number))
        if log_x:
            powers_of_two(axes)
        if log_y:
            axes.set_yscale("log")
        axes.set(xlabel=x, ylabel=y)
        axes.legend(fontsize=7)


def powers_of_two(axes: Axes) -> None:
    """Scale the x axis in powers of two."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.{6 if value >= 1 else 2}g}")


def bars(axes: Axes, values: Mapping[str, Sequence[float]], colours: Sequence[str]) -> None:
    """Horizontal bars from top to bottom: means with a whisker of one standard deviation, labelled by the mean."""
    means = [statistics.fmean(line) if line else 0.0 for line in values.values()]
    spreads = [statistics.stdev(line) if len(line) > 1 else 0.0 for line in values.values()]
    heights = list(range(len(means)))
    whiskers = {"elinewidth": 1, "ecolor": "#444444"}
    axes.barh(heights, means, xerr=spreads, color=colours, height=0.72, error_kw=whiskers)
    axes.set_yticks(heights, list(values))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    for height, mean, spread in zip(heights, means, spreads, strict=True):
        label, end = f"{mean:.2f}", (mean + spread, height)
        axes.annotate(label, end, (3, 0), textcoords="offset points", va="center", fontsize=7)
