"""Loss records of many documents as one line per method."""

from __future__ import annotations

import csv
import io
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prescore.bench.language.experiments import largest_block
from prescore.bench.plots import bars, figure, line_style, powers_of_two
from prescore.bench.records import Record
from prescore.bench.tables import MISSING, Table, as_text
from prescore.types import Values

# two-sided 95 % points of Student's t for 1, 2, ... degrees of freedom
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)

_NEEDED = ("loss", "keys_per_query", "attention_seconds", "forward_seconds")


@dataclass(frozen=True)
class Summary:
    """One method at one length, over documents and seeds.

    Attributes:
        label, kind, settings, axes: The method.
        n_tokens, layers: Where it was measured.
        losses: Loss in nats by document (mean over seeds).
        keys_per_query: Key rows met.
        attention_seconds: Inside the attention functions, per forward.
        processor_seconds: The same as processor time; None where it was not measured on a CPU.
        forward_seconds: Whole forward and loss.
        gap_closed: `(local - loss) / (local - exact)` over the same documents; None when they are missing.
        above_exact: Mean over the same documents of what the loss is above exact attention's.
        above_exact_half_width: Half of its 95 % interval, which is much narrower than that of the loss itself.
        speed_up: Exact attention's time over this one's.
        position_scaling: How positions past the trained length were made, if they were.
    """

    label: str
    kind: str
    settings: Values
    axes: Values
    n_tokens: int
    layers: Any
    losses: dict[str, float]
    keys_per_query: float | None
    attention_seconds: float
    forward_seconds: float
    processor_seconds: float | None = None
    gap_closed: float | None = None
    above_exact: float | None = None
    above_exact_half_width: float | None = None
    speed_up: float | None = None
    position_scaling: Values | None = None

    @property
    def loss(self) -> float:
        """Mean over documents, nats per token."""
        return statistics.fmean(self.losses.values())

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % confidence interval over documents; None for one document."""
        return confidence_half_width(list(self.losses.values()))

    @property
    def perplexity(self) -> float:
        """E to the mean loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def leaf(self) -> int | None:
        """Size of the exact local part, where the method has one."""
        found = self.settings.get("leaf", self.settings.get("min_seq_len", self.settings.get("chunk_size")))
        return None if found is None else int(found)


def confidence_half_width(values: Sequence[float]) -> float | None:
    """Half of Student's 95 % interval of the mean."""
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    # beyond the table a short expansion is right to three digits
    factor = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.5 / freedom
    return factor * statistics.stdev(values) / math.sqrt(len(values))


def summarise(records: Sequence[Record]) -> list[Summary]:
    """Group loss records by method, length and layers, in the order of first appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.config.get("part") == "loss":
            config = record.config
            name = repr((config["model"], config["dtype"], config["n_tokens"], config["layers"], config["method"]))
            groups.setdefault(name, []).append(record)
    summaries = [_summary(group) for group in groups.values()]
    return [_compared(summary, summaries) for summary in summaries]


def _check(record: Record) -> None:
    for name in _NEEDED:
        figure = record.figures.get(name)
        plain = isinstance(figure, int | float) or figure in ("nan", "inf", "-inf")
        if not plain and not (name == "keys_per_query" and figure is None and name in record.figures):
            raise ValueError(f"record {record.key} must have a number as {name}, got {figure!r}")


def find(summaries: Sequence[Summary], kind: str, n_tokens: int, leaf: int | None = None) -> Summary | None:
    """The exact or local-only line of a length; of several local ones the one with the same leaves."""
    found = [summary for summary in summaries if summary.kind == kind and summary.n_tokens == n_tokens]
    same = [summary for summary in found if leaf is not None and summary.leaf == leaf]
    return next(iter(same or found), None)


def _summary(group: Sequence[Record]) -> Summary:
    for record in group:
        _check(record)
    method, figures = group[0].config["method"], [record.figures for record in group]
    by_document: dict[str, list[float]] = {}
    for record in group:
        name = f"{record.config['document']}@{record.config['digest']}"
        by_document.setdefault(name, []).append(float(record.figures["loss"]))
    rows = [figure["keys_per_query"] for figure in figures if figure["keys_per_query"] is not None]
    processor: list[Any] = [figure.get("attention_processor_seconds") for figure in figures]
    return Summary(
        label=method["label"],
        kind=method["kind"],
        settings=method["settings"],
        axes=method["axes"],
        n_tokens=group[0].config["n_tokens"],
        layers=group[0].config["layers"],
        losses={name: statistics.fmean(values) for name, values in by_document.items()},
        keys_per_query=statistics.fmean(rows) if rows else None,
        attention_seconds=statistics.fmean(figure["attention_seconds"] for figure in figures),
        forward_seconds=statistics.fmean(figure["forward_seconds"] for figure in figures),
        processor_seconds=None if None in processor else statistics.fmean(processor),
        position_scaling=figures[0].get("position_scaling"),
    )


def _compared(summary: Summary, summaries: Sequence[Summary]) -> Summary:
    exact = find(summaries, "exact", summary.n_tokens)
    local = find(summaries, "local", summary.n_tokens, summary.leaf)
    gap = None
    if exact is not None and local is not None:
        shared = [name for name in summary.losses if name in exact.losses and name in local.losses]
        gap = _gap(*([part.losses[name] for name in shared] for part in (summary, exact, local)))
    above = (
        [] if exact is None else [summary.losses[n] - exact.losses[n] for n in summary.losses if n in exact.losses]
    )
    fast = None
    if exact is not None and summary.attention_seconds > 0:
        fast = exact.attention_seconds / summary.attention_seconds
    return replace(
        summary,
        gap_closed=gap,
        above_exact=statistics.fmean(above) if above else None,
        above_exact_half_width=confidence_half_width(above),
        speed_up=fast,
    )


def _gap(losses: Sequence[float], exact: Sequence[float], local: Sequence[float]) -> float | None:
    if not losses:
        return None
    floor, best, own = (statistics.fmean(values) for values in (local, exact, losses))
    # a model that reads no better with its far context than without has no gap to close
    return None if floor <= best else (floor - own) / (floor - best)


def holds_for(summary: Summary, scorer: str) -> bool:
    """Whether a line of a grid is one of that scorer's: its own, or one where no scorer plays a part."""
    return summary.axes.get("scorer") in (scorer, "none") or keeps_every_key(summary)


def keeps_every_key(summary: Summary) -> bool:
    """Whether the budget filters nothing, so that one scorer's line holds for all."""
    budget, leaf = summary.settings.get("top_k"), summary.settings.get("min_seq_len")
    if not budget or leaf is None:
        return False
    return bool(budget == 1.0 if isinstance(budget, float) else budget >= largest_block(summary.n_tokens, leaf))


# Language experiments as tables: one line per method, and the paper's own shapes as CSV.

_NAMES = {
    "kmeans": "K-means",
    "kmedian": "K-median",
    "leverage": "Leverage",
    "gaussian-kmeans": "Gaussian kernel K-means",
    "none": "none",
}
_SCALED = "positions past the trained length by RoPE scaling (YaRN), without training"
Lines = list[list[Any]]


def loss_table(summaries: Sequence[Summary], title: str, note: str = "") -> Table:
    """Loss, perplexity, share of the gap closed, rows, attention time and speed-up per method."""
    lengths = {summary.n_tokens for summary in summaries}
    rows = []
    for summary in summaries:
        label = summary.label if len(lengths) == 1 else f"{summary.label} @ {summary.n_tokens}"
        rows.append(
            (
                label,
                f"{summary.loss:.4f}" + _plus_minus(summary.half_width),
                as_text(summary.perplexity, 4),
                percent(summary.gap_closed),
                as_text(summary.keys_per_query, 4),
                f"{summary.attention_seconds:.2f} s",
                times(summary.speed_up),
            )
        )
    return Table(
        title=title,
        columns=("method", "loss (nats)", "perplexity", "gap closed", "rows/query", "attention", "speed-up"),
        rows=tuple(rows),
        note=note,
    )


def describe_run(summaries: Sequence[Summary], model: str) -> str:
    """What the figures are over, in one line."""
    documents = list(dict.fromkeys(name.split("@")[0] for summary in summaries for name in summary.losses))
    lengths = sorted({summary.n_tokens for summary in summaries})
    layers = sorted({str(summary.layers) for summary in summaries})
    shown = ", ".join(documents) if len(documents) <= 3 else f"{len(documents)} documents"
    scaled = any(summary.position_scaling for summary in summaries)
    extra = f"; {_SCALED}" if scaled else ""
    return f"{model}, {', '.join(map(str, lengths))} tokens of {shown}, layers: {', '.join(layers)}{extra}"


def retrieval_table(records: Sequence[Record]) -> Table:
    """Accuracy by method, task, length and depth; exact attention first, since it bounds what can be asked."""
    found = [record for record in records if record.config.get("part") == "retrieval"]
    cells = list(dict.fromkeys((r.config["task"], r.config["n_tokens"], r.config["depth"]) for r in found))
    labels = list(dict.fromkeys(record.config["method"]["label"] for record in found))
    values = {
        (r.config["method"]["label"], r.config["task"], r.config["n_tokens"], r.config["depth"]): r.figures
        for r in found
    }
    rows = []
    for label in labels:
        figures = [values.get((label, *cell)) for cell in cells]
        shown = [
            MISSING if f is None else f"{100 * f['accuracy']:.0f} % ({f['answer_loss']:.2f})" for f in figures
        ]
        rows.append((label, *shown))
    scaled = any(record.figures.get("position_scaling") for record in found)
    return Table(
        title=f"Retrieval; {_SCALED}" if scaled else "Retrieval",
        columns=("method", *(f"{task} {length} at {100 * depth:.0f} %" for task, length, depth in cells)),
        rows=tuple(rows),
        note="share of answers whose every token is the likeliest one (mean loss of the answer's tokens in nats); "
        "where exact attention fails, the model cannot do the task and the column says nothing about methods",
    )


def full_csv(summaries: Sequence[Summary]) -> str:
    """Every figure of every line."""
    axes = list(dict.fromkeys(name for summary in summaries for name in summary.axes))
    documents = list(dict.fromkeys(name for summary in summaries for name in summary.losses))
    head = ["method", "kind", "n_tokens", "layers", *axes, "loss", "ci95_half_width", "perplexity", "gap_closed"]
    head += ["above_exact", "above_exact_ci95_half_width", "keys_per_query"]
    head += ["attention_seconds", "attention_processor_seconds", "speed_up", "forward_seconds"]
    head += [f"loss {document}" for document in documents]
    lines: Lines = [head]
    for s in summaries:
        lines.append(
            [s.label, s.kind, s.n_tokens, s.layers, *(s.axes.get(name) for name in axes)]
            + [s.loss, s.half_width, s.perplexity, s.gap_closed, s.above_exact, s.above_exact_half_width]
            + [s.keys_per_query, s.attention_seconds, s.processor_seconds, s.speed_up, s.forward_seconds]
            + [s.losses.get(document) for document in documents]
        )
    return _text(lines)


def paper_csv(experiment: str, summaries: Sequence[Summary]) -> str | None:
    """The experiment in the paper's shape, perplexity as e to the loss in nats; None = the paper has none."""
    shapes: dict[str, Callable[[Sequence[Summary]], Lines]] = {
        "table1": _table1,
        "appendix-a": _appendix_a,
        "figure-glm3": _appendix_a,
        "appendix-f": _appendix_f,
        "appendix-i": _appendix_i,
        "longest": _longest,
    }
    return _text(shapes[experiment](summaries)) if experiment in shapes else None


def percent(value: float | None) -> str:
    """A share in whole per cent, `worse` where it is below nothing."""
    if value is None or math.isnan(value):
        return MISSING
    shown = round(100 * value)
    return f"{shown} %" if shown >= 0 else f"worse ({shown} %)"


def times(value: float | None) -> str:
    """A speed-up."""
    return MISSING if value is None else f"{value:.2f}x"


def _plus_minus(half_width: float | None) -> str:
    return "" if half_width is None else f" ± {half_width:.3f}"


def _table1(summaries: Sequence[Summary]) -> Lines:
    lines: Lines = [["Method", "Pre-score", "Blockwise Opt.", "PPL", "Loss", "Gap closed"]]
    for s in summaries:
        if s.kind == "local":
            continue
        pre = s.axes.get("scorer", "none") != "none"
        name = "Exact" if s.kind == "exact" else "K-means+Hyper" if pre else "HyperAttention"
        lines.append([name, pre, bool(s.axes.get("blockwise")), s.perplexity, s.loss, s.gap_closed])
    return lines


def _appendix_a(summaries: Sequence[Summary]) -> Lines:
    lines: Lines = [
        ["Method", "Top K", "Sample Size", "PPL", "PPL*", "Top K / n", "Paper's Top K", "Paper's Sample Size"]
    ]
    for scorer in _scorers(summaries):
        cells = [s for s in summaries if holds_for(s, scorer)]
        for samples in _ordered(s.axes["paper_sample_size"] for s in cells)[::-1]:
            for top_k in _ordered(s.axes["paper_top_k"] for s in cells):
                same = [
                    s for s in cells if (s.axes["paper_top_k"], s.axes["paper_sample_size"]) == (top_k, samples)
                ]
                values = {s.axes["blockwise"]: s.perplexity for s in same}
                if same:
                    one = same[0].axes
                    lines.append([_NAMES.get(scorer, scorer), one["top_k"], one["sample_size"]])
                    lines[-1] += [values.get(False), values.get(True), one["fraction"], top_k, samples]
    return lines


def _appendix_f(summaries: Sequence[Summary]) -> Lines:
    lines: Lines = [["Coupling", "Method", "Top K", "PPL", "Loss", "Top K / n", "Paper's Top K"]]
    cells = [s for s in summaries if s.axes]
    for coupling, scorer in dict.fromkeys((s.axes["coupling"], s.axes["scorer"]) for s in cells):
        same = [s for s in cells if s.axes["coupling"] == coupling]
        own = {s.axes["paper_top_k"]: s for s in same if s.axes["scorer"] == scorer}
        # a budget that keeps every key is run for one scorer and holds for the others
        every = {s.axes["paper_top_k"]: s for s in same if scorer != "none" and keeps_every_key(s)}
        for top_k, s in sorted({**every, **own}.items()):
            lines.append([coupling, _NAMES.get(scorer, scorer), s.axes["top_k"], s.perplexity, s.loss])
            lines[-1] += [s.axes["fraction"], top_k]
    return lines


def _appendix_i(summaries: Sequence[Summary]) -> Lines:
    cells = [s for s in summaries if s.axes]
    samples = _ordered(s.axes["paper_sample_size"] for s in cells)[::-1]
    shown = {s.axes["paper_sample_size"]: s.axes["sample_size"] for s in cells}
    lines: Lines = [["Top K", *(f"PPL, Sample Size = {shown[n]}" for n in samples), "Paper's Top K"]]
    for top_k in _ordered(s.axes["paper_top_k"] for s in cells):
        same = [s for s in cells if s.axes["paper_top_k"] == top_k]
        values = {s.axes["paper_sample_size"]: s.perplexity for s in same}
        lines.append([same[0].axes["top_k"], *(values.get(n) for n in samples), top_k])
    return lines


def _longest(summaries: Sequence[Summary]) -> Lines:
    lines: Lines = [["Context", "Method", "PPL", "Loss", "Positions scaled"]]
    for s in summaries:
        lines.append([s.n_tokens, s.label, s.perplexity, s.loss, bool(s.position_scaling)])
    return lines


def _scorers(summaries: Sequence[Summary]) -> list[str]:
    found = dict.fromkeys(s.axes["scorer"] for s in summaries if s.axes.get("scorer"))
    return [scorer for scorer in found if scorer != "none"]


def _ordered(values: Iterable[int]) -> list[int]:
    return sorted(set(values))


def _text(lines: Lines) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


# Pictures of the language experiments: loss against budget, against cost, against length.

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
    costs = {"keys_per_query": "key rows per query", seconds: words}
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
