"""Pictures of the language experiments: loss against budget, against cost, against length."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prescore.report.language_summary import Summary, find, holds_for
from prescore.report.plots import bars, figure, line_style, powers_of_two
from prescore.values import Values

_DASHED = (0, (4, 2))
_EXACT, _LOCAL = "#666666", "#999999"


def plot_experiment(experiment: str | None, summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """The picture that belongs to an experiment; the comparison by cost where there is none of its own."""
    pictures: dict[str | None, Callable[[Sequence[Summary], str | Path, str], None]] = {
        "table1": plot_bars,
        "appendix-a": plot_budgets,
        "figure-glm3": plot_budgets,
        "appendix-f": plot_couplings,
        "appendix-i": plot_budgets,
        "longest": plot_lengths,
    }
    pictures.get(experiment, plot_cost)(summaries, path, textwrap.fill(title, 90))


def plot_bars(summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """Loss above exact, one bar per method, with the interval of the difference over documents."""
    shown = [s for s in summaries if s.kind != "exact"]
    with figure(path, (7.5, 1 + 0.38 * len(shown))) as (_, axes):
        means = [s.above_exact or 0.0 for s in shown]
        spreads = [s.above_exact_half_width or 0.0 for s in shown]
        bars(axes, [s.label for s in shown], means, spreads, [_colour(n) for n in range(len(shown))])
        axes.set(title=title, xlabel="loss above exact, nats per token")


def plot_budgets(summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """Loss against top_k: a column of panels per scorer, a row per leaf rule, a line per number of samples."""
    cells = [s for s in summaries if "scorer" in s.axes]
    rules = sorted({s.axes["blockwise"] for s in cells}) or [False]
    scorers = [name for name in dict.fromkeys(s.axes["scorer"] for s in cells) if name != "none"] or ["none"]
    samples = sorted({s.axes["sample_size"] for s in cells}, reverse=True)
    shape = {"nrows": len(rules), "ncols": len(scorers), "squeeze": False, "sharex": True, "sharey": True}
    size = (max(5.0, 2.7 * len(scorers)), 2.5 * len(rules) + 1.1)
    with figure(path, size, **shape) as (drawn, grid):
        drawn.suptitle(title, x=0.01, ha="left")
        for row, inclusive in zip(grid, rules, strict=True):
            for axes, scorer in zip(row, scorers, strict=True):
                inside = [s for s in cells if s.axes["blockwise"] == inclusive]
                _references(axes, summaries)
                for place, count in enumerate(samples):
                    same = [s for s in inside if s.axes["sample_size"] == count]
                    line = [s for s in same if s.axes["scorer"] != "none" and holds_for(s, scorer)]
                    _line(axes, line, "top_k", f"selection, {count} samples", place, dashed=False)
                    for s in same:
                        if s.axes["scorer"] == "none":
                            words = f"no selection (HyperAttention), {count} samples"
                            axes.axhline(
                                s.loss, color=_colour(place), linewidth=1.1, linestyle=_DASHED, label=words
                            )
                rule = "blocks as long as a leaf exact" if inclusive else "published leaf rule"
                axes.set_title(f"{scorer}\n{rule}", fontsize=8)
                powers_of_two(axes)
            row[0].set_ylabel("loss, nats per token")
        for axes in grid[-1]:
            axes.set_xlabel("top_k per block")
        top = _bound_losses(grid[0][0], summaries, times=15)
        for row, inclusive in zip(grid, rules, strict=True):
            inside = [s for s in cells if s.axes["blockwise"] == inclusive]
            for axes, scorer in zip(row, scorers, strict=True):
                _count_hidden(axes, [s for s in inside if holds_for(s, scorer)], top)
        _shared_legend(drawn, grid[0][0])


def plot_couplings(summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """Loss against top_k under the corrected coupling, each artefact alone, and all three."""
    with figure(path, (7.4, 4.4)) as (_, axes):
        _references(axes, summaries)
        names = list(dict.fromkeys((s.axes["coupling"], s.axes["scorer"]) for s in summaries if s.axes))
        for place, (coupling, scorer) in enumerate(name for name in names if name[1] != "none"):
            own = [s for s in summaries if s.axes and s.axes["coupling"] == coupling]
            line = [s for s in own if s.axes["scorer"] != "none" and holds_for(s, scorer)]
            _line(axes, line, "top_k", f"{coupling}, {scorer}", place, dashed=scorer != "kmeans")
        axes.set(title=title, xlabel="top_k per block", ylabel="loss, nats per token")
        powers_of_two(axes)
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), fontsize=7)


def plot_lengths(summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """Loss against the length of the context, one line per method."""
    with figure(path, (6.4, 4.2)) as (_, axes):
        kinds = list(dict.fromkeys(_family(s) for s in summaries))
        for place, family in enumerate(kinds):
            line = sorted((s for s in summaries if _family(s) == family), key=lambda s: s.n_tokens)
            lengths, losses = [s.n_tokens for s in line], [s.loss for s in line]
            axes.plot(lengths, losses, label=family, **line_style(place))
        trained = {s.position_scaling["trained_length"] for s in summaries if s.position_scaling}
        for length in trained:
            axes.axvline(length, color="#888888", linestyle=_DASHED, linewidth=1)
            axes.annotate("trained length", (length, axes.get_ylim()[1]), (3, -10), textcoords="offset points")
        axes.set(title=title, xlabel="tokens", ylabel="loss, nats per token")
        powers_of_two(axes)
        axes.legend(fontsize=8)


def plot_cost(summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """Loss against key rows per query (above) and attention time (below): equal cost is a vertical line.

    A column of panels per group of methods; what belongs to none, the default, is drawn in all.
    """
    methods = [s for s in summaries if s.kind not in ("exact", "local")]
    groups = [name for name in dict.fromkeys(s.axes.get("group") for s in methods) if name is not None] or [None]
    # a busy machine stretches seconds on the clock, but not those of the processor
    processor = all(s.processor_seconds is not None for s in summaries)
    seconds = "processor_seconds" if processor else "attention_seconds"
    words = f"attention of one forward, scoring included, {'processor ' if processor else ''}seconds"
    costs = {"rows_per_query": "key rows per query", seconds: words}
    shape = {"nrows": 2, "ncols": len(groups), "squeeze": False, "sharex": "row", "sharey": True}
    with figure(path, (max(6.4, 4.1 * len(groups)), 7.4), **shape) as (drawn, grid):
        drawn.suptitle(title, x=0.01, ha="left")
        for row, (cost, label) in zip(grid, costs.items(), strict=True):
            for axes, group in zip(row, groups, strict=True):
                inside = [s for s in methods if s.axes.get("group") in (group, None)]
                _references(axes, summaries, cost)
                _cost_lines(axes, inside, cost)
                axes.set(title=group or "")
                axes.set_xlabel(label, fontsize=8)
            row[0].set_ylabel("loss, nats per token")
        powers_of_two(grid[0][0])
        powers_of_two(grid[1][0])
        top = _bound_losses(grid[0][0], summaries)
        for row in grid:
            for axes, group in zip(row, groups, strict=True):
                _count_hidden(axes, [s for s in methods if s.axes.get("group") in (group, None)], top)
        for axes in grid[1] if methods else []:
            axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)


def _cost_lines(axes: Any, methods: Sequence[Summary], cost: str) -> None:
    families = list(dict.fromkeys(_family(s) for s in methods))
    others = [family for family in families if family != "default"]
    for family in families:
        line = [s for s in methods if _family(s) == family and getattr(s, cost) is not None]
        # joined in the order of their budgets: a dearer point may be to the left of a cheaper one
        line.sort(key=lambda s: (s.axes.get("budget", 0), float(getattr(s, cost))))
        style: Values = {"color": "#000000", "linewidth": 2.6, "zorder": 5, "marker": "o"}
        if family != "default":
            style = line_style(others.index(family))
        points = [getattr(s, cost) for s in line], [s.loss for s in line]
        axes.plot(*points, markersize=4, label=family, **style)


def _shared_legend(drawn: Any, axes: Any) -> None:
    """One legend below all panels, from the first."""
    handles, labels = axes.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)


def _references(axes: Any, summaries: Sequence[Summary], cost: str | None = None) -> None:
    for kind, colour in (("exact", _EXACT), ("local", _LOCAL)):
        for length in sorted({s.n_tokens for s in summaries}):
            found = find(summaries, kind, length)
            if found is None:
                continue
            axes.axhline(found.loss, color=colour, linewidth=1, linestyle=":")
            # exact attention is the dearest and local the cheapest: each name at the end where its mark is not
            end, side, shift = (0, "left", 3) if kind == "exact" else (1, "right", -2)
            place = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "ha": side}
            axes.annotate(found.label, (end, found.loss), (shift, 2), fontsize=7, color=colour, **place)
            if cost is not None and getattr(found, cost):
                axes.plot([getattr(found, cost)], [found.loss], marker="s", color=colour, markersize=5)


def _bound_losses(axes: Any, summaries: Sequence[Summary], *, times: float = 1.5) -> float | None:
    """Leave out what is worse than local only by more than `times` the gap: it would flatten everything else.

    Returns the upper end of the frame, None = everything is inside.
    """
    exact = min((s.loss for s in summaries if s.kind == "exact"), default=None)
    local = max((s.loss for s in summaries if s.kind == "local"), default=None)
    if exact is None or local is None or local <= exact:
        return None
    best, worst = (bound(s.loss for s in summaries) for bound in (min, max))
    top = local + times * (local - exact)
    axes.set_ylim(best - 0.1 * (local - exact), min(worst + 0.05 * (local - exact), top))
    return top


def _count_hidden(axes: Any, drawn: Sequence[Summary], top: float | None) -> None:
    """Say in a panel how many of its own points lie above the frame."""
    hidden = 0 if top is None else sum(s.loss > top for s in drawn)
    if hidden:
        words = f"{hidden} point{'s' if hidden > 1 else ''} above the frame"
        # outside of the frame, where no curve goes; the title is at the other end
        axes.annotate(words, (1, 1.01), xycoords="axes fraction", fontsize=7, ha="right", color="#666666")


def _line(axes: Any, line: Sequence[Summary], axis: str, label: str, place: int, *, dashed: bool) -> None:
    if line:
        points = sorted((s.axes[axis], s.loss) for s in line)
        style = line_style(place) | ({"linestyle": _DASHED} if dashed else {})
        x, y = [p[0] for p in points], [p[1] for p in points]
        axes.plot(x, y, markersize=3.5, label=label, **style)


def _family(summary: Summary) -> str:
    return str(summary.axes.get("series", summary.label.split(",")[0]))


def _colour(place: int) -> str:
    return str(line_style(place)["color"])
