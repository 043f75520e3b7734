"""The paper's language tables and figures from records of `prescore perplexity`."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prescore.bench.language.plots import BUDGET, Lines, plot_losses
from prescore.bench.language.tables import Summary, csv_text, group_by, result
from prescore.bench.methods import largest_block
from prescore.bench.plots import line_plot
from prescore.bench.records import Record
from prescore.bench.tables import MISSING, Table, as_text, percent
from prescore.paper import printed

CsvLines = list[list[Any]]
_GRIDS = ("appendix-a", "figure-glm3", "appendix-i", "appendix-f")
_ABOVE = (
    "loss above exact attention, nats per token, ± 95 % over documents x seeds; PPL / PPL* = without / with the "
    "blockwise flag; paper: log2 of its perplexity less that of exact attention"
)
LEAST_LOSS = 0.1
"""A text on which exact attention loses less, in nats, repeats itself: it shows how a method copies."""
Columns = Mapping[str, tuple[str, int]]
"""Scorer and the paper's residual samples, by the head of their column."""


def informative(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Records of the texts on which exact attention loses at least `LEAST_LOSS`, and the names of the others."""
    losses = {_text(r): result(r, "loss") for r in records if r.config["method"]["config"]["type"] == "Exact"}
    dull = {text for text, loss in losses.items() if loss < LEAST_LOSS}
    kept = [record for record in records if _text(record) not in dull]
    return kept, sorted(f"{name}, {n_tokens} tokens" for name, _, n_tokens in dull)


def _text(record: Record) -> tuple[str, str, int]:
    config = record.config
    return config["document"], config["digest"], config["n_tokens"]


def signed(value: float | None, half_width: float | None = None) -> str:
    """A difference in nats, with half of its interval."""
    if value is None:
        return MISSING
    return f"{value:+.3f}" + ("" if half_width is None else f" ± {half_width:.2f}")


def above(summary: Summary | None) -> str:
    """Loss above exact attention with half of its interval."""
    return MISSING if summary is None else signed(summary.above_exact, summary.above_exact_half_width)


def paper_tables(item: str, summaries: Sequence[Summary]) -> list[Table]:
    """The paper's figures beside ours: a table for every length, coupling and number of samples."""
    tables = []
    for length, same in group_by(summaries, lambda s: s.n_tokens).items():
        title = f"{item}, {length} tokens"
        if item == "table1":
            tables.append(replace(table1(same), title=title))
        elif item == "appendix-f":
            tables.append(replace(couplings(same), title=title))
        elif item not in _GRIDS:
            tables.append(replace(equal_reads(same), title=title))
        else:
            tables += _grid_tables(same, title)
        if item == "figure-glm3":
            tables.append(replace(times(same), title=f"{title}, time of attention"))
    return tables


def _grid_tables(summaries: Sequence[Summary], title: str) -> list[Table]:
    cells = [s for s in summaries if "paper_sample_size" in s.axes]
    tables = []
    for (coupling, samples), inside in group_by(
        cells, lambda s: (s.axes["coupling"], s.axes["paper_sample_size"])
    ).items():
        names = [name for name in dict.fromkeys(s.axes["scorer"] for s in inside) if name != "none"]
        made = by_budget(inside, {name: (name, samples) for name in names})
        tables.append(
            replace(made, title=f"{title}, {coupling}, {inside[0].axes['sample_size']} samples", note=_ABOVE)
        )
    return tables


def by_budget(summaries: Sequence[Summary], columns: Columns) -> Table:
    """Budgets down, scorers across, each beside the paper's; PPL / PPL* where both were measured."""
    cells = [s for s in summaries if "paper_top_k" in s.axes]
    rules = sorted({bool(s.axes["leaf_inclusive"]) for s in cells})
    rows = []
    for top_k in sorted({s.axes["paper_top_k"] for s in cells}):
        inside = [s for s in cells if s.axes["paper_top_k"] == top_k]
        row = [f"{inside[0].axes['top_k']} ({top_k})"]
        for scorer, samples in columns.values():
            same = [s for s in inside if s.axes["paper_sample_size"] == samples and _is_line(s, scorer)]
            by_rule = {bool(s.axes["leaf_inclusive"]): s for s in same}
            ours = [above(by_rule[rule]) for rule in rules if rule in by_rule]
            pair = printed.GRID.get((scorer, samples), {}).get(top_k, (None, None))
            theirs = [printed.above_exact(pair[rule]) for rule in rules if pair[rule] is not None]
            row += [
                " / ".join(ours) or MISSING,
                " / ".join(map(signed, theirs)) or MISSING,
            ]
        rows.append(tuple(row))
    heads = (f"{name}{of}" for name in columns for of in ("", ", paper"))
    return Table("", ("top_k (paper's)", *heads), tuple(rows))


def _is_line(summary: Summary, scorer: str) -> bool:
    """Without a selection one run holds for every scorer, and so does one that keeps every key."""
    return summary.axes["paper_top_k"] == 0 or holds_for(summary, scorer)


def table1(summaries: Sequence[Summary]) -> Table:
    """The five rows of Table 1 and the floor."""
    rows = []
    for s in summaries:
        key = (s.axes.get("scorer") == "kmeans", bool(s.axes.get("leaf_inclusive")))
        theirs = printed.EXACT if s.is_exact else printed.TABLE_1.get(key) if s.axes else None
        width = f"{s.above_exact_half_width:.2f}" if s.above_exact_half_width else ""
        cells = [s.label, f"{s.loss:.3f}", as_text(s.perplexity, 4), signed(s.above_exact), width]
        cells += [percent(s.gap_closed), as_text(s.reads_per_query, 4)]
        cells += [
            MISSING if theirs is None else f"{printed.nats(theirs):.3f}",
            signed(printed.above_exact(theirs)),
        ]
        rows.append(tuple(cells))
    columns = ("method", "loss", "perplexity", "above exact", "± 95 %", "gap closed", "keys and centroids read")
    note = "losses in nats per token; the paper's loss is log2 of its printed perplexity; ±: documents x seeds"
    return Table("", (*columns, "paper's loss", "above its exact"), tuple(rows), note)


def couplings(summaries: Sequence[Summary]) -> Table:
    """Budgets across, couplings and scorers down; below them the paper's Appendix A, most likely the early one."""
    cells = [s for s in summaries if "coupling" in s.axes]
    budgets = {s.axes["paper_top_k"]: s.axes["top_k"] for s in cells if s.axes["paper_top_k"]}
    rows = []
    for coupling, inside in group_by(cells, lambda s: str(s.axes["coupling"])).items():
        for scorer in dict.fromkeys(s.axes["scorer"] for s in inside if s.axes["scorer"] != "none"):
            line = {s.axes["paper_top_k"]: s for s in inside if holds_for(s, scorer)}
            values = [
                (line[b].above_exact, line[b].above_exact_half_width) if b in line else (None,) for b in budgets
            ]
            rows.append((f"{coupling}, {scorer}", *(signed(*value) for value in values)))
    for scorer in dict.fromkeys(s.axes["scorer"] for s in cells):
        if (scorer, 256) in printed.GRID:
            theirs = (printed.above_exact(printed.GRID[scorer, 256][b][0]) for b in budgets)
            rows.append((f"paper, Appendix A: {scorer}", *map(signed, theirs)))
    return Table("", ("coupling, scorer", *(f"top {top_k}" for top_k in budgets.values())), tuple(rows), _ABOVE)


def times(summaries: Sequence[Summary]) -> Table:
    """Attention of one forward by budget, scoring included: the third observation on Figure GLM3."""
    rows = []
    lines = {name: line for lines in _grid_lines(summaries).values() for name, line in lines.items()}
    budgets = sorted({s.axes["top_k"] for line in lines.values() for s in line})
    for name, line in lines.items():
        by_budget = {s.axes["top_k"]: f"{_seconds(s):.2f} s" for s in line}
        rows.append((name, *(by_budget.get(top_k, MISSING) for top_k in budgets)))
    rows += [(s.label, f"{_seconds(s):.2f} s", *[""] * (len(budgets) - 1)) for s in summaries if s.is_exact]
    note = "the paper prints no times; it says that they hardly depend on k; k-means and k-median add more"
    return Table("", ("scorer", *(f"top {top_k}" for top_k in budgets)), tuple(rows), note)


def _seconds(summary: Summary) -> float:
    return summary.attention_seconds if summary.processor_seconds is None else summary.processor_seconds


def equal_reads(summaries: Sequence[Summary]) -> Table:
    """Loss above exact attention, keys and centroids read, processor seconds, by length; the paper prints none."""
    by_label: dict[str, dict[int, Summary]] = defaultdict(dict)
    for s in summaries:
        by_label[s.label][s.n_tokens] = s
    lengths = sorted({s.n_tokens for s in summaries})
    rows = []
    for label, by_length in by_label.items():
        cells = [label]
        for length in lengths:
            if length not in by_length:
                cells += [MISSING] * 3
                continue
            s = by_length[length]
            reads = MISSING if s.reads_per_query is None else f"{s.reads_per_query:.0f}"
            cells += [above(s), reads, f"{_seconds(s):.1f} s"]
        rows.append(tuple(cells))
    heads = (f"{n}: {word}" for n in lengths for word in ("above exact", "read", "attention"))
    note = (
        "above exact: nats per token, ± 95 % over documents x seeds; the paper prints no figures to compare with"
    )
    return Table("", ("method", *heads), tuple(rows), note)


def holds_for(summary: Summary, scorer: str) -> bool:
    """Whether a line of a grid is one of that scorer's: its own, or one that keeps every key."""
    measured = summary.axes.get("scorer")
    return measured == scorer or ("none" not in (scorer, measured) and keeps_every_key(summary))


def keeps_every_key(summary: Summary) -> bool:
    """Whether the budget filters nothing, so that one scorer's line holds for all."""
    budget, leaf = summary.config.get("top_k"), summary.config.get("min_seq_len")
    if not budget or leaf is None:
        return False
    return bool(budget == 1.0 if isinstance(budget, float) else budget >= largest_block(summary.n_tokens, leaf))


_NAMES = {
    "kmeans": "K-means",
    "kmedian": "K-median",
    "leverage": "Leverage",
    "gaussian-kmeans": "Gaussian kernel K-means",
    "none": "HyperAttention",
}


def paper_csv(summaries: Sequence[Summary]) -> str | None:
    """The columns of the paper's tables, PPL* by the inclusive leaf rule; None = no method is the paper's.

    PPL is e to the mean loss; `2^loss` and `2^loss*` are what the published scripts print.
    """
    cells = [s for s in summaries if "paper_top_k" in s.axes]
    counts = ("Context", "Coupling", "Method", "Top K", "Sample Size")
    lines: CsvLines = [[*counts, "PPL", "PPL*", "Top K / n", "Paper's Top K", "Paper's Sample Size"]]
    lines[0] = [*lines[0], "2^loss", "2^loss*"]
    for s in summaries:
        if s not in cells:
            line = [s.n_tokens, None, s.label, None, None, s.perplexity, None, None, None, None]
            lines.append([*line, s.published_perplexity, None])
    for (length, coupling), inside in group_by(cells, lambda s: (s.n_tokens, s.axes["coupling"])).items():
        for scorer in dict.fromkeys(s.axes["scorer"] for s in inside):
            column = [s for s in inside if holds_for(s, scorer)]
            budgets = group_by(column, lambda s: (-s.axes["paper_sample_size"], s.axes["paper_top_k"]))
            for (_, top_k), same in sorted(budgets.items()):
                ppl, axes = {s.axes["leaf_inclusive"]: s.perplexity for s in same}, same[0].axes
                line = [length, coupling, _NAMES.get(scorer, scorer), axes["top_k"], axes["sample_size"]]
                line += [ppl.get(False), ppl.get(True), axes["fraction"], top_k, axes["paper_sample_size"]]
                published = {s.axes["leaf_inclusive"]: s.published_perplexity for s in same}
                line += [published.get(False), published.get(True)]
                lines.append(line)
    return csv_text(lines) if cells else None


def _grid_lines(summaries: Sequence[Summary]) -> dict[str, Lines]:
    """A panel per leaf rule, a line per scorer, number of samples and coupling."""
    rules = {False: "published leaf rule", True: "blocks as long as a leaf exact"}
    panels = {}
    cells = [s for s in summaries if "scorer" in s.axes]
    for inclusive, inside in sorted(group_by(cells, lambda s: bool(s.axes["leaf_inclusive"])).items()):
        lines = {}
        grids = group_by(inside, lambda s: (s.axes["coupling"], -s.axes["sample_size"]))
        for scorer, ((coupling, count), same) in itertools.product(
            dict.fromkeys(s.axes["scorer"] for s in inside), sorted(grids.items())
        ):
            if scorer in {s.axes["scorer"] for s in same}:
                words = [_NAMES.get(scorer, scorer), f"{-count} samples"]
                words += [coupling] if coupling != "corrected" else []
                line = [s for s in same if holds_for(s, scorer)]
                lines[", ".join(words)] = sorted(line, key=lambda s: int(s.axes["top_k"]))
        panels[rules[inclusive]] = lines
    return panels


def plot_experiment(experiment: str | None, summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """Loss against what the experiment varies; against cost where it varies nothing else."""
    if experiment in _GRIDS:
        factor = math.inf if experiment == "appendix-f" else 15
        panels = _grid_lines(summaries)
        plot_losses(summaries, path, title, panels=panels, costs={"top_k per block": BUDGET}, factor=factor)
        if experiment == "figure-glm3":
            lines = {name: line for lines in panels.values() for name, line in lines.items()}
            points = [
                {"top_k": s.axes["top_k"], "attention, seconds": _seconds(s), "scorer": name}
                for name in lines
                for s in lines[name]
            ]
            line_plot(
                points,
                Path(path).with_stem(f"{Path(path).stem}-time"),
                x="top_k",
                y="attention, seconds",
                by="scorer",
            )
    else:
        plot_losses(summaries, path, title, factor=math.inf if experiment == "table1" else 1.5)
