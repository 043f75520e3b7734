"""The paper's language tables and figures from records of `prescore perplexity`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prescore.bench.language.plots import BUDGET, Lines, plot_losses
from prescore.bench.language.tables import Summary, csv_text, group_by
from prescore.paper.grids import largest_block

CsvLines = list[list[Any]]
_GRIDS = ("appendix-a", "figure-glm3", "appendix-i", "appendix-f")


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
            own = [s for s in inside if holds_for(s, scorer)]
            budgets = group_by(own, lambda s: (-s.axes["paper_sample_size"], s.axes["paper_top_k"]))
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
    else:
        plot_losses(summaries, path, title, factor=math.inf if experiment == "table1" else 1.5)
