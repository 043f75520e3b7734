"""Pictures of the language experiments: loss against budget, against cost, against length."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prescore.report.language_summary import Summary, confidence_half_width, find
from prescore.report.language_tables import percent
from prescore.report.plots import COLOURS, bars, figure

_DASHED = (0, (4, 2))
# black is kept for what a picture is about; yellow is lost on white
_OTHERS = tuple(colour for colour in COLOURS if colour not in ("#000000", "#F0E442"))


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
        above = [_above_exact(s, summaries) for s in shown]
        means = [sum(values) / len(values) if values else 0.0 for values in above]
        spreads = [confidence_half_width(values) or 0.0 for values in above]
        bars(axes, [s.label for s in shown], means, spreads, [_colour(n) for n in range(len(shown))])
        axes.set(title=title, xlabel="loss above exact, nats per token")


def plot_budgets(summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """Loss against top_k, one line per scorer, dashed without residual samples; one panel per leaf rule."""
    rules = sorted({s.axes["blockwise"] for s in summaries if "blockwise" in s.axes}) or [False]
    with figure(path, (5.2 * len(rules) + 1.6, 4.2), ncols=len(rules), squeeze=False, sharey=True) as (
        drawn,
        grid,
    ):
        drawn.suptitle(title, x=0.01, ha="left")
        for axes, inclusive in zip(grid[0], rules, strict=True):
            inside = [s for s in summaries if s.axes.get("blockwise") == inclusive]
            _references(axes, summaries)
            scorers = list(dict.fromkeys(s.axes["scorer"] for s in inside if s.axes["scorer"] != "none"))
            for place, scorer in enumerate(scorers):
                for samples in sorted({s.axes["sample_size"] for s in inside}, reverse=True):
                    line = [s for s in inside if (s.axes["scorer"], s.axes["sample_size"]) == (scorer, samples)]
                    _line(axes, line, "top_k", f"{scorer}, {samples} samples", place, dashed=samples == 0)
            for s in inside:
                if s.axes["scorer"] == "none":
                    words = f"no selection, {s.axes['sample_size']} samples"
                    axes.axhline(s.loss, color="#888888", linewidth=1.2, label=words)
                    axes.lines[-1].set_linestyle("-" if s.axes["sample_size"] else _DASHED)
            rule = "blocks as long as a leaf exact" if inclusive else "published leaf rule"
            axes.set(title=rule, xlabel="top_k per block")
            _powers_of_two(axes)
        grid[0][0].set_ylabel("loss, nats per token")
        grid[0][-1].legend(loc="upper left", bbox_to_anchor=(1.02, 1), fontsize=7)


def plot_couplings(summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """Loss against top_k under the corrected coupling, each artefact alone, and all three."""
    with figure(path, (7.4, 4.4)) as (_, axes):
        _references(axes, summaries)
        names = list(dict.fromkeys((s.axes["coupling"], s.axes["scorer"]) for s in summaries if s.axes))
        for place, (coupling, scorer) in enumerate(name for name in names if name[1] != "none"):
            line = [
                s for s in summaries if s.axes and (s.axes["coupling"], s.axes["scorer"]) == (coupling, scorer)
            ]
            _line(axes, line, "top_k", f"{coupling}, {scorer}", place, dashed=scorer != "kmeans")
        axes.set(title=title, xlabel="top_k per block", ylabel="loss, nats per token")
        _powers_of_two(axes)
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), fontsize=7)


def plot_lengths(summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """Loss against the length of the context, one line per method."""
    with figure(path, (6.4, 4.2)) as (_, axes):
        kinds = list(dict.fromkeys(_family(s) for s in summaries))
        for place, family in enumerate(kinds):
            line = sorted((s for s in summaries if _family(s) == family), key=lambda s: s.n_tokens)
            lengths, losses = [s.n_tokens for s in line], [s.loss for s in line]
            axes.plot(lengths, losses, "o-", color=_colour(place), label=family)
        trained = {s.position_scaling["trained_length"] for s in summaries if s.position_scaling}
        for length in trained:
            axes.axvline(length, color="#888888", linestyle=_DASHED, linewidth=1)
            axes.annotate("trained length", (length, axes.get_ylim()[1]), (3, -10), textcoords="offset points")
        axes.set(title=title, xlabel="tokens", ylabel="loss, nats per token")
        _powers_of_two(axes)
        axes.legend(fontsize=8)


def plot_cost(summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """Loss against key rows per query and against attention time: equal cost is a vertical line."""
    with figure(path, (12, 4.6), ncols=2, sharey=True) as (drawn, grid):
        drawn.suptitle(title, x=0.01, ha="left")
        families = list(dict.fromkeys(_family(s) for s in summaries if s.kind not in ("exact", "local")))
        for axes, cost in zip(grid, ("rows_per_query", "attention_seconds"), strict=True):
            _references(axes, summaries, cost)
            for place, family in enumerate(families):
                line = [s for s in summaries if _family(s) == family and getattr(s, cost) is not None]
                line.sort(key=lambda s: float(getattr(s, cost)))
                style: dict[str, Any] = {"color": _colour(place), "label": family, "markersize": 4}
                style["linestyle"] = "-" if place < len(_OTHERS) else _DASHED
                if family == "default":
                    style.update(color="#000000", linestyle="-", linewidth=2.8, zorder=5)
                axes.plot([getattr(s, cost) for s in line], [s.loss for s in line], marker="o", **style)
        _powers_of_two(grid[0])
        grid[1].set_xscale("log")
        grid[0].set(xlabel="key rows per query", ylabel="loss, nats per token")
        grid[1].set(xlabel="attention time in one forward, scoring included (s)")
        _bound_losses(grid[0], summaries)
        grid[1].legend(loc="upper left", bbox_to_anchor=(1.02, 1), fontsize=7)


def _above_exact(summary: Summary, summaries: Sequence[Summary]) -> list[float]:
    exact = find(summaries, "exact", summary.n_tokens)
    if exact is None:
        return []
    return [loss - exact.losses[name] for name, loss in summary.losses.items() if name in exact.losses]


def _powers_of_two(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _references(axes: Any, summaries: Sequence[Summary], cost: str | None = None) -> None:
    for kind, colour in (("exact", "#000000"), ("local", "#888888")):
        for length in sorted({s.n_tokens for s in summaries}):
            found = find(summaries, kind, length)
            if found is None:
                continue
            axes.axhline(found.loss, color=colour, linewidth=1, linestyle=":")
            place = (1, found.loss)
            axes.annotate(
                found.label, place, (-2, 2), xycoords=axes.get_yaxis_transform(), textcoords="offset points",
                fontsize=7, ha="right", color=colour,
            )  # fmt: skip
            if cost is not None and getattr(found, cost):
                axes.plot([getattr(found, cost)], [found.loss], marker="s", color=colour, markersize=5)


def _bound_losses(axes: Any, summaries: Sequence[Summary]) -> None:
    """Leave out what is far worse than dropping the far context: it would flatten everything else."""
    exact = min((s.loss for s in summaries if s.kind == "exact"), default=None)
    local = max((s.loss for s in summaries if s.kind == "local"), default=None)
    if exact is None or local is None or local <= exact:
        return
    worst = max(s.loss for s in summaries)
    top = local + 1.5 * (local - exact)
    axes.set_ylim(exact - 0.1 * (local - exact), min(worst + 0.05 * (local - exact), top))
    hidden = sum(s.loss > top for s in summaries)
    if hidden:
        words = f"{hidden} points above the frame, all below {percent((local - top) / (local - exact))}"
        axes.annotate(words, (0.01, 0.97), xycoords="axes fraction", fontsize=7, va="top", color="#666666")


def _line(axes: Any, line: Sequence[Summary], axis: str, label: str, place: int, *, dashed: bool) -> None:
    if line:
        points = sorted((s.axes[axis], s.loss) for s in line)
        style = _DASHED if dashed else "-"
        x, y = [p[0] for p in points], [p[1] for p in points]
        axes.plot(x, y, marker="o", markersize=3.5, linestyle=style, color=_colour(place), label=label)


def _family(summary: Summary) -> str:
    return str(summary.axes.get("series", summary.label.split(",")[0]))


def _colour(place: int) -> str:
    return _OTHERS[place % len(_OTHERS)]
