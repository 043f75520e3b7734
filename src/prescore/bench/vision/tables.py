"""Records of `prescore vision` as a table and a plot."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prescore.bench.language.tables import confidence_half_width
from prescore.bench.plots import figure, line_style
from prescore.bench.records import Record
from prescore.bench.tables import MISSING, Table, as_text

Line = tuple[str, int | None, float | None, bool]
"""Method, number of clusters, share of centroids, and whether the prefix is kept."""
ByLine = Mapping[Line, Mapping[int, Sequence[Any]]]
"""By line and budget, a value for each seed."""


def accuracy_table(records: Sequence[Record]) -> Table:
    """Methods down, budgets across: mean with half of its 95 % interval."""
    top1, top5, speed = (values_by_line(records, name) for name in ("top1", "top5", "images_per_second"))
    budgets = sorted({budget for by_budget in top1.values() for budget in by_budget})
    n_images, n_tokens = (records[0].results[name] for name in ("n_images", "n_tokens"))
    rows = []
    for results in _exact(records):
        last = [as_text(results["top5"]), as_text(results["images_per_second"])]
        rows.append(("exact", *[f"{results['top1']:.1f}"] * len(budgets), *last))
    for line, by_budget in top1.items():
        cells = [_with_interval(by_budget.get(budget, []), n_images) for budget in budgets]
        last = [as_text(statistics.fmean(values[line][max(by_budget)])) for values in (top5, speed)]
        rows.append((label(line), *cells, *last))
    return Table(
        title=f"Top-1 in per cent by keys and centroids read of {n_tokens} tokens, {n_images} images",
        columns=("method", *map(str, budgets), "top-5", "images/s"),
        rows=tuple(rows),
        note="± 95 % over images or over seeds, the wider; top-5 and images/s at the largest budget",
    )


def _with_interval(by_seed: Sequence[float], n_images: int) -> str:
    if not by_seed:
        return MISSING
    mean = statistics.fmean(by_seed)
    over_images = 1.96 * (max(0.0, mean * (100 - mean)) / n_images) ** 0.5
    return f"{mean:.1f} ± {max(over_images, confidence_half_width(by_seed) or 0.0):.1f}"


def accuracy_plot(records: Sequence[Record], path: str | Path) -> None:
    """Top-1 against the budget, a line per method."""
    with figure(path, (8, 5)) as (_, axes):
        for number, (line, by_budget) in enumerate(values_by_line(records, "top1").items()):
            budgets = sorted(by_budget)
            means = [statistics.fmean(by_budget[b]) for b in budgets]
            spreads = [statistics.stdev(by_budget[b]) if len(by_budget[b]) > 1 else 0.0 for b in budgets]
            style = {"markersize": 4, "capsize": 2, **line_style(number)}
            axes.errorbar(budgets, means, yerr=spreads, label=label(line), **style)
        for results in _exact(records):
            axes.axhline(results["top1"], color="#444444", linewidth=1, linestyle="--", label="exact")
        axes.set(title="Accuracy against the budget", xlabel="keys and centroids read", ylabel="top-1, per cent")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def label(line: Line, *, keeps_prefix: bool = True) -> str:
    """A method in words; `keeps_prefix` is what goes without saying."""
    method, n_clusters, share, keep_prefix = line
    words = [method]
    if n_clusters is not None:
        words.append(f"{n_clusters} clusters")
    if share is not None:
        words.append(f"{100 * share:g} % centroids")
    if keep_prefix != keeps_prefix:
        words.append("class token protected" if keep_prefix else "class token free")
    return ", ".join(words)


def _exact(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [record.results for record in records if record.config["method"] == "exact"]


def values_by_line(records: Sequence[Record], name: str) -> ByLine:
    """One result of every method but exact attention."""
    values: dict[Line, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        config = record.config
        if config["method"] != "exact":
            line = config["method"], config["n_clusters"], config.get("centroid_share"), config["keep_prefix"]
            values[line][config["budget"]].append(record.results.get(name))
    return values
