"""Heavy-entry coverage as a table and a plot, each figure beside chance."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prescore.records import Record
from prescore.report.plots import figure, line_style
from prescore.report.tables import MISSING, Table

PUBLISHED = {
    ("kmeans", 32): ("22.57", "43.89", "43.83", "15.62"),
    ("kmeans", 64): ("40.89", "69.07", "69.89", "32.81"),
    ("kmeans", 128): ("70.54", "87.79", "88.15", "65.62"),
    ("kmedian", 32): ("22.56", "43.91", "43.81", "18.75"),
    ("kmedian", 64): ("40.22", "64.69", "69.74", "32.81"),
    ("kmedian", 128): ("69.54", "81.87", "87.64", "65.62"),
}
"""ViT-Base as printed in Appendix G: median coverage at 0.01, 0.1, 0.3, and mean coverage of the top columns."""
_PUBLISHED_TOKENS = 197

_ASIDE = 0.012
"""How far lines are drawn apart sideways, as a share of the widest budget."""
_ABOVE, _ALIKE = 2.4, 1.5
"""Lines that are nowhere more than so many per cent apart are drawn one above the other, at this distance."""

Line = tuple[str, int | None, bool, int]


def coverage_table(records: Sequence[Record]) -> Table:
    """Median / mean coverage per threshold, columns and mass, with chance in the last column."""
    groups = _groups(records)
    thresholds = [f"{value:g}" for value in records[0].config["thresholds"]] if records else []
    body = []
    for line, found in groups.items():
        method, clusters, protect, rows = line
        words = method if clusters is None else f"{method}, {clusters} clusters"
        words += "" if not protect else ", prefix protected"
        cells = [f"{_mean(found, f'heavy_{e}_median')} / {_mean(found, f'heavy_{e}_mean')}" for e in thresholds]
        rest = [_mean(found, name) for name in ("columns_mean", "mass_mean", "chance")]
        body.append((words, str(rows), *cells, *rest))
    return Table(
        title="Coverage of heavy attention entries, per cent: median / mean",
        columns=(
            "method",
            "keys",
            *(f"> {e}" for e in thresholds),
            "top columns",
            "mass",
            "chance s/n",
        ),
        rows=tuple(body),
        note="over inputs, layers and heads that have such an entry; top columns: share of the s columns with the "
        "largest sums that are kept; mass: attention on kept keys",
    )


def paper_coverage_table(records: Sequence[Record]) -> Table:
    """Our medians beside the paper's, for the settings it prints."""
    body = []
    for (method, _, _, rows), found in _groups(records).items():
        printed = PUBLISHED.get((method.split("-")[0], rows))
        if printed is None or found[0].figures["n_keys"] != _PUBLISHED_TOKENS:
            continue
        names = [*(f"heavy_{e}_median" for e in ("0.01", "0.1", "0.3")), "columns_mean"]
        ours = [_mean(found, name) if name in found[0].figures else MISSING for name in names]
        body.append((method, str(rows), *(f"{a} / {b}" for a, b in zip(ours, printed, strict=True))))
    return Table(
        title="Beside the paper's Appendix G: ours / ViT-B/16 as printed",
        columns=("method", "keys", "> 0.01", "> 0.1", "> 0.3", "top columns"),
        rows=tuple(body),
        note="the paper does not say whether it kept the nearest keys or a sample; its top columns equal chance",
    )


def coverage_plot(records: Sequence[Record], path: str | Path) -> None:
    """Median coverage against keys kept, a panel per threshold and one for the top columns, with chance."""
    thresholds = [f"{value:g}" for value in records[0].config["thresholds"]] if records else []
    panels = [(f"heavy_{e}_median", f"entries > {e}, median") for e in thresholds]
    panels.append(("columns_mean", "top columns, mean"))
    groups = _groups(records)
    lines = list(dict.fromkeys(line[:3] for line in groups))
    chance = {n: _mean_value(found, "chance") for (*_, n), found in groups.items()}
    with figure(path, (3.2 * len(panels), 3.4), ncols=len(panels), sharey=True) as (_, axes):
        for panel, (name, title) in zip(axes, panels, strict=True):
            _curves(panel, groups, lines, name)
            panel.plot(sorted(chance), [chance[n] for n in sorted(chance)], "--", color="#444444", label="chance")
            # room for lines at 0 and for several at 100
            panel.set(title=title, xlabel="keys kept (equal lines drawn apart)", ylim=(-4, 110))
            panel.set_xticks(sorted(chance))
        axes[0].set_ylabel("covered, per cent")
        axes[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def _curves(panel: Any, groups: dict[Line, list[Record]], lines: Sequence[tuple[Any, ...]], name: str) -> None:
    """One panel's lines; equal ones would hide each other."""
    widest = max((rows for *_, rows in groups), default=0)
    drawn: list[dict[int, float]] = []
    for place, line in enumerate(lines):
        keys = sorted(rows for *start, rows in groups if tuple(start) == line)
        points = {n: _mean_value(groups[(*line, n)], name) for n in keys}
        known = {n: value for n, value in points.items() if value is not None}
        above = _ABOVE * sum(_alike(known, other) for other in drawn)
        drawn.append(known)
        aside = (place - (len(lines) - 1) / 2) * _ASIDE * widest
        words = line[0] + (" (protected)" if line[2] else "")
        places, values = [n + aside for n in known], [value + above for value in known.values()]
        panel.plot(places, values, label=words, markersize=5, **line_style(place))


def _alike(one: dict[int, float], other: dict[int, float]) -> bool:
    shared = one.keys() & other.keys()
    return bool(shared) and all(abs(one[n] - other[n]) <= _ALIKE for n in shared)


def _groups(records: Sequence[Record]) -> dict[Line, list[Record]]:
    groups: dict[Line, list[Record]] = defaultdict(list)
    for record in records:
        config = record.config
        groups[config["method"], config["clusters"], config["protect"], config["rows"]].append(record)
    return groups


def _mean_value(found: Sequence[Record], name: str) -> float | None:
    known = [record.figures[name] for record in found if record.figures[name] is not None]
    return 100 * statistics.fmean(known) if known else None


def _mean(found: Sequence[Record], name: str) -> str:
    value = _mean_value(found, name)
    return MISSING if value is None else f"{value:.1f}"
