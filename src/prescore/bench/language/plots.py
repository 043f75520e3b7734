"""Losses as pictures: loss against a budget, or against cost."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prescore.bench.language.tables import Summary, group_by
from prescore.bench.plots import figure, line_style, powers_of_two
from prescore.bench.records import Values

BUDGET = "budget"
"""The cost of a point that is its `top_k`."""
_MAIN_LINE: Values = {"color": "#000000", "linewidth": 2.6, "zorder": 5, "marker": "o"}
_COLOURS = {"Exact": "#666666", "Local": "#999999"}
Lines = dict[str, list[Summary]]
"""By label the points of a line."""


def plot_losses(
    summaries: Sequence[Summary],
    path: str | Path,
    title: str,
    *,
    panels: Mapping[str, Lines] | None = None,
    costs: Mapping[str, str] | None = None,
    factor: float = 1.5,
) -> None:
    """Loss against cost: a row of panels for every cost. Equal cost is a vertical line.

    Args:
        summaries: Everything that was measured at one length, exact and local attention included.
        path: The picture.
        title: Above it.
        panels: Lines by the title of their panel; None = one panel with a line for every series of methods.
        costs: The x axes, fields of `Summary` or `BUDGET` by their words; None = keys read and seconds.
        factor: How far losses may lie above local-only, in gaps between exact and local.
    """
    if panels is None:
        panels = {"": group_by([s for s in summaries if not s.is_exact and not s.is_local], _series)}
    costs = costs or _costs(summaries)
    size = (max(6.4, 3.4 * len(panels)), 2.8 * len(costs) + 1.6)
    shape = {"nrows": len(costs), "ncols": len(panels), "squeeze": False, "sharex": "row", "sharey": True}
    with figure(path, size, **shape) as (drawn, all_axes):
        drawn.suptitle(textwrap.fill(title, 90), x=0.01, ha="left")
        top = _bound_losses(all_axes[0][0], summaries, factor)
        for row, (words, cost) in zip(all_axes, costs.items(), strict=True):
            row[0].set_ylabel("loss, nats per token")
            for axes, (name, lines) in zip(row, panels.items(), strict=True):
                _draw_references(axes, summaries, cost)
                _draw_lines(axes, lines, cost, top)
                axes.set_title(name, fontsize=8)
                axes.set_xlabel(words, fontsize=8)
            powers_of_two(row[0])
        _draw_legends(drawn, all_axes[-1], panels)


def _costs(summaries: Sequence[Summary]) -> dict[str, str]:
    # other load stretches wall time, but not processor time
    processor = all(s.processor_seconds is not None for s in summaries)
    words = f"attention of one forward, {'processor ' if processor else ''}seconds"
    seconds = "processor_seconds" if processor else "attention_seconds"
    return {"keys and centroids read per query": "reads_per_query", words: seconds}


def _draw_legends(drawn: Any, row: Sequence[Any], panels: Mapping[str, Lines]) -> None:
    """One legend where all panels have the same lines, otherwise one below each."""
    if len({tuple(lines) for lines in panels.values()}) == 1:
        drawn.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
        return
    for axes in row:
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)


def _series(summary: Summary) -> str:
    return str(summary.axes.get("series", summary.label.split(",")[0]))


def _cost(summary: Summary, cost: str) -> float | None:
    value = summary.axes["top_k"] if cost == BUDGET else getattr(summary, cost)
    return None if value is None else float(value)


def _draw_lines(axes: Any, lines: Lines, cost: str, top: float) -> None:
    """One line per method; says how many points lie above the frame."""
    others, hidden = [label for label in lines if label != "default"], 0
    for label, line in lines.items():
        style = _MAIN_LINE if label == "default" else line_style(others.index(label))
        hidden += sum(s.loss > top for s in line)
        points = [(x, s.loss) for s in line for x in [_cost(s, cost)] if x is not None]
        if points and points[0][0] == 0:  # without a selection there is no budget
            axes.axhline(points[0][1], label=label, color=style["color"], linewidth=1.1, linestyle=(0, (4, 2)))
        else:
            axes.plot([x for x, _ in points], [loss for _, loss in points], markersize=4, label=label, **style)
    if hidden:
        words = f"{hidden} point{'s' if hidden > 1 else ''} above the frame"
        # outside of the frame, where there is no curve; the title is at the other end
        axes.annotate(words, (1, 1.01), xycoords="axes fraction", fontsize=7, ha="right", color="#666666")


def _draw_references(axes: Any, summaries: Sequence[Summary], cost: str) -> None:
    """Exact and local attention, with a mark at their cost."""
    for kind, colour in _COLOURS.items():
        for s in [s for s in summaries if s.config.get("type") == kind][:1]:
            axes.axhline(s.loss, color=colour, linewidth=1, linestyle=":")
            # exact attention costs most and local least: each name stands where its mark is not
            end, side, shift = (0, "left", 3) if kind == "Exact" else (1, "right", -2)
            anchor = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "ha": side}
            axes.annotate(s.label, (end, s.loss), (shift, 2), fontsize=7, color=colour, **anchor)
            if cost != BUDGET and _cost(s, cost):
                axes.plot([_cost(s, cost)], [s.loss], marker="s", color=colour, markersize=5)


def _bound_losses(axes: Any, summaries: Sequence[Summary], factor: float) -> float:
    """Cut off losses worse than local-only by more than `factor` times the gap: they would flatten all others.

    Returns the upper end of the frame; infinity = everything is inside.
    """
    exact = min((s.loss for s in summaries if s.is_exact), default=math.nan)
    local = max((s.loss for s in summaries if s.is_local), default=math.nan)
    top = local + factor * (local - exact)
    losses = [s.loss for s in summaries if math.isfinite(s.loss)]
    if not (exact < local and top < max(losses)):
        return math.inf
    axes.set_ylim(min(losses) - 0.1 * (local - exact), top)
    return top
