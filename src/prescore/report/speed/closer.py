"""Speed on saved heads, part by part, step by step, and the curves of all methods with exact attention at 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prescore.records import Record
from prescore.report.plots import COLOURS, figure, powers_of_two
from prescore.report.speed.tables import kinds, time_cell, title
from prescore.report.tables import MISSING, Table, as_text

LABELS = {"hyper": "HyperAttention", "kmeans": "k-means", "kmedian": "k-median", "default": "ours (default)"}


def heads_table(records: Sequence[Record]) -> Table:
    """Saved heads of a model: time, error, and what a query read and searched."""
    rows = []
    for record in _of(records, "heads"):
        for method, entry in record.figures["methods"].items():
            error, read, searched = (entry.get(name) for name in ("error", "rows_per_query", "searched_per_query"))
            cells = (as_text(error, 2), _count(read), _count(searched))
            name = f"{record.config['heads']} {record.config['n']}"
            rows.append((name, method, time_cell(entry), f"{entry['speedup']:.2f}x", *cells))
    columns = ("heads", "method", "time", "speed-up", "error", "rows per query", "keys searched per query")
    note = "error = relative squared error of the layer's output against exact attention"
    return Table("Saved heads, causal, forward", columns, tuple(rows), note, left=2)


def parts_table(records: Sequence[Record]) -> Table:
    """Where a routed call spends its time, and the share of the arithmetic limit that each part reaches."""
    rows = []
    for record in _of(records, "parts"):
        figures = record.figures
        entries = {
            "exact": (figures["exact_seconds"], None, figures["exact_multiply_adds"], 1.0),
            "the call": (figures["call_seconds"], 1.0, figures["call_multiply_adds"], figures["call_of_limit"]),
        }
        for name, entry in figures["parts"].items():
            entries[name] = (entry["seconds"], entry["share"], entry["multiply_adds"], entry["of_limit"])
        for name, (seconds, share, work, of_limit) in entries.items():
            cells = (_percent(share), as_text(work / 1e9) if work else MISSING, _percent(of_limit))
            rows.append((_layer(record), name, f"{as_text(1e3 * seconds)} ms", *cells))
    columns = ("layer", "part", "time", "share of the call", "billion multiply-adds", "of exact attention's rate")
    note = (
        "search multiplies four-bit numbers, of which a processor does more at once; "
        "stand-ins, search and rows are differences of calls that ask for less"
    )
    return Table("Parts of the default, causal, forward", columns, tuple(rows), note, left=2)


def steps_table(records: Sequence[Record]) -> Table:
    """One routed decode step against an exact one."""
    rows = []
    for record in _of(records, "steps"):
        figures = record.figures
        times = tuple(f"{1e3 * figures['seconds'][name]:.3f} ms" for name in ("exact", "folded", "routed"))
        speeds = (f"{figures['speedup']:.2f}x", f"{figures['speedup_folded']:.2f}x")
        more = (f"{1e3 * figures['index_seconds']:.1f} ms", _count(figures["rows"]), as_text(figures["error"], 2))
        path = ", ".join(figures["path"])
        rows.append((_layer(record), path, *times, *speeds, *more))
    columns = (
        *("layer", "path", "exact", "exact, folded", "routed"),
        *("speed-up", "over folded", "first step", "rows read", "error"),
    )
    note = "medians; folded = the heads of a group as queries of one key head; the first step makes the index"
    return Table("One decode step of the default", columns, tuple(rows), note, left=2)


def curves_plot(records: Sequence[Record], path: Path) -> None:
    """Speed against length with exact attention at 1: one panel per kind, one curve per method."""
    panels = kinds(records)
    # of records that share a length, one has them all: the order of methods is the order of first appearance
    names = dict.fromkeys(
        name for r in _of(records, "lengths") for name in r.figures["methods"] if name != "exact"
    )
    colours = dict(zip(names, COLOURS, strict=False))
    size = (4.6 * len(panels), 4.0)
    with figure(path, size, ncols=len(panels), squeeze=False, sharey=True) as (_, grid):
        for axes, kind in zip(grid[0], panels, strict=True):
            for method in names:
                points = curve(records, method, *kind)
                if points:
                    lengths, speeds = zip(*points, strict=True)
                    label = LABELS.get(method, method)
                    axes.plot(lengths, speeds, marker="o", markersize=3, color=colours[method], label=label)
            axes.axhline(1.0, color=COLOURS[-1], linewidth=1.2, label="exact")
            powers_of_two(axes)
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
            axes.set_title(title(*kind))
            axes.set_xlabel("sequence length")
            axes.legend(fontsize=7)
        grid[0][0].set_ylabel("exact time / method time")


def curve(records: Sequence[Record], method: str, causal: bool, backward: bool) -> list[tuple[int, float]]:
    """Lengths and speeds of a method, ascending."""
    wanted = (causal, backward)
    return sorted(
        (record.config["n"], record.figures["methods"][method]["speedup"])
        for record in _of(records, "lengths")
        if (record.config["causal"], record.config["backward"]) == wanted and method in record.figures["methods"]
    )


def _of(records: Sequence[Record], study: str) -> list[Record]:
    return [record for record in records if record.config["study"] == study]


def _layer(record: Record) -> str:
    return f"{record.config['heads'] or 'random'} {record.config['n']}"


def _count(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0f}"


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.0f} %"
