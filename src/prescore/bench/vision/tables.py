"""Vision records as tables and plots, with the paper's published numbers below ours."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prescore.bench.plots import figure, line_style
from prescore.bench.records import Record
from prescore.bench.tables import MISSING, Table, as_text, mean_and_spread

_PUBLISHED_TOKENS = 197
"""Tokens of the paper's models; a budget out of another number is not comparable."""

PUBLISHED = {
    "ViT-S/16 (exact 85.11), kmeans, 4 clusters": {32: "31.34", 64: "61.31", 96: "74.21", 128: "80.05"},
    "ViT-S/16 (exact 85.11), kmeans, 6 clusters": {128: "80.49"},
    "ViT-S/16 (exact 76.47), leverage": {32: "13.3"},
    "ViT-S/16 (exact 76.47), key-norm": {32: "3.3"},
    "ViT-L/16 (exact 85.85), kmeans, 4 clusters": {32: "53.05", 64: "78.10", 96: "82.89", 128: "84.46"},
    "ViT-L/16 (exact 85.85), kmeans, 6 clusters": {128: "84.46"},
    "ViT-L/16 (exact 78.83), leverage": {32: "48.58"},
    "ViT-L/16 (exact 78.83), key-norm": {32: "8.9"},
}
"""Top-1 of zero-shot substitution as printed in Table 2 and, for leverage and key norm, Appendix E (marked *)."""

PUBLISHED_COVERAGE = {
    ("kmeans", 32): ("22.57", "43.89", "43.83", "15.62"),
    ("kmeans", 64): ("40.89", "69.07", "69.89", "32.81"),
    ("kmeans", 128): ("70.54", "87.79", "88.15", "65.62"),
    ("kmedian", 32): ("22.56", "43.91", "43.81", "18.75"),
    ("kmedian", 64): ("40.22", "64.69", "69.74", "32.81"),
    ("kmedian", 128): ("69.54", "81.87", "87.64", "65.62"),
}
"""ViT-Base as printed in Appendix G: median coverage at 0.01, 0.1, 0.3, and mean coverage of the top columns."""

Line = tuple[str, int | None, float | None, bool]
"""Method, number of clusters, share of centroids, and whether the prefix is kept."""
ByLine = Mapping[Line, Mapping[int, Sequence[Any]]]
"""By line and budget, a value for each seed."""


def accuracy_table(records: Sequence[Record]) -> Table:
    """Methods down, budgets across: mean and spread over seeds; the paper's rows where they are comparable."""
    top1, top5, speed = (_values(records, name) for name in ("top1", "top5", "images_per_second"))
    budgets = sorted({budget for by_budget in top1.values() for budget in by_budget})
    rows = []
    for results in _exact(records):
        last = [as_text(results["top5"]), as_text(results["images_per_second"])]
        rows.append(("exact", *[f"{results['top1']:.1f}"] * len(budgets), *last))
    for line, by_budget in top1.items():
        cells = [mean_and_spread(by_budget.get(budget, []), digits=1) for budget in budgets]
        last = [as_text(statistics.fmean(values[line][max(by_budget)])) for values in (top5, speed)]
        rows.append((label(line), *cells, *last))
    n_images, n_tokens = (records[0].results[name] for name in ("n_images", "n_tokens"))
    for name, printed in PUBLISHED.items() if n_tokens == _PUBLISHED_TOKENS else ():
        if printed.keys() & set(budgets):
            rows.append((f"paper: {name}", *(printed.get(b, MISSING) for b in budgets), MISSING, MISSING))
    share = records[0].results["top1_exact"] / 100
    error = 100 * (share * (1 - share) / n_images) ** 0.5
    return Table(
        title=f"Top-1 in per cent by keys and centroids read of {n_tokens} tokens, {n_images} images",
        columns=("method", *map(str, budgets), "top-5", "images/s"),
        rows=tuple(rows),
        note=f"mean ± standard deviation over seeds; the standard error from {n_images} images is about "
        f"{error:.1f} points; top-5 and images/s at the largest budget; the paper does not say whether its "
        "k-means keys are the nearest ones or a sample",
    )


def coverage_table(records: Sequence[Record]) -> Table:
    """Median / mean coverage per threshold, top columns and mass, with chance in the last column."""
    thresholds = [f"{value:g}" for value in records[0].config["thresholds"]]
    names = [f"heavy_{e}_{kind}" for e in thresholds for kind in ("median", "mean")]
    columns = [f"columns_{e}_mean" for e in thresholds]
    cells = {name: _values(records, name) for name in (*names, *columns, "mass_mean", "chance")}
    rows = []
    for line, by_budget in cells["chance"].items():
        for budget in by_budget:
            shares = {name: as_text(_mean(values[line][budget])) for name, values in cells.items()}
            heavy = [f"{shares[f'heavy_{e}_median']} / {shares[f'heavy_{e}_mean']}" for e in thresholds]
            last = (" / ".join(shares[name] for name in columns), shares["mass_mean"], shares["chance"])
            rows.append((label(line, keeps_prefix=False), str(budget), *heavy, *last))
    if thresholds == ["0.01", "0.1", "0.3"] and records[0].results["n_keys"] == _PUBLISHED_TOKENS:
        for (method, budget), printed in PUBLISHED_COVERAGE.items():
            rows.append((f"paper: ViT-B/16, {method}", str(budget), *printed, MISSING, MISSING))
    return Table(
        title="Coverage of heavy attention entries, per cent: median / mean",
        columns=("method", "keys", *(f"> {e}" for e in thresholds), "heaviest columns", "mass", "chance s/n"),
        rows=tuple(rows),
        note="over inputs, layers and heads that have such an entry; heaviest columns: share of the s columns "
        "with the most such entries that are selected, mean, for each threshold; mass: weight on selected keys; "
        "the paper prints medians and does not say for which threshold its columns are",
    )


def accuracy_plot(records: Sequence[Record], path: str | Path) -> None:
    """Top-1 against the budget, a line per method."""
    with figure(path, (8, 5)) as (_, axes):
        for place, (line, by_budget) in enumerate(_values(records, "top1").items()):
            budgets = sorted(by_budget)
            means = [statistics.fmean(by_budget[b]) for b in budgets]
            spreads = [statistics.stdev(by_budget[b]) if len(by_budget[b]) > 1 else 0.0 for b in budgets]
            style = {"markersize": 4, "capsize": 2, **line_style(place)}
            axes.errorbar(budgets, means, yerr=spreads, label=label(line), **style)
        for results in _exact(records):
            axes.axhline(results["top1"], color="#444444", linewidth=1, linestyle="--", label="exact")
        axes.set(title="Accuracy against the budget", xlabel="keys and centroids read", ylabel="top-1, per cent")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def coverage_plot(records: Sequence[Record], path: str | Path) -> None:
    """Median coverage against the budget, a panel per threshold and one for the top columns, with chance."""
    thresholds = [f"{value:g}" for value in records[0].config["thresholds"]]
    panels = {f"heavy_{e}_median": f"entries > {e}, median" for e in thresholds}
    panels[f"columns_{thresholds[0]}_mean"] = f"heaviest columns by entries > {thresholds[0]}, mean"
    chances = _values(records, "chance").values()
    chance = {b: _mean(seeds) for by_budget in chances for b, seeds in sorted(by_budget.items())}
    with figure(path, (3.2 * len(panels), 3.4), ncols=len(panels), sharey=True) as (_, axes):
        for panel, (name, title) in zip(axes, panels.items(), strict=True):
            for place, (line, by_budget) in enumerate(_values(records, name).items()):
                means = [_mean(by_budget[budget]) for budget in sorted(by_budget)]
                words = label(line, keeps_prefix=False)
                # open markers and thin lines: a line that equals another one stays visible
                style = {"markersize": 9 - place % 4 * 2, "markerfacecolor": "none", **line_style(place)}
                panel.plot(sorted(by_budget), means, label=words, **style)
            panel.plot(list(chance), list(chance.values()), "--", color="#444444", label="chance")
            # lines at 0 and 100 need room
            panel.set(title=title, xlabel="keys selected", ylim=(-4, 110))
            panel.set_xticks(list(chance))
        axes[0].set_ylabel("covered, per cent")
        axes[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


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


def _values(records: Sequence[Record], name: str) -> ByLine:
    """One result of every method but exact attention."""
    values: dict[Line, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        config = record.config
        if config["method"] != "exact":
            line = config["method"], config["n_clusters"], config.get("centroid_share"), config["keep_prefix"]
            values[line][config["budget"]].append(record.results.get(name))
    return values


def _mean(shares: Sequence[float | None]) -> float | None:
    """The mean over seeds in per cent; None where no seed has a value."""
    known = [share for share in shares if share is not None]
    return 100 * statistics.fmean(known) if known else None
