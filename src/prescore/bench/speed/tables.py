"""Speed records as tables and a log-log plot with fitted exponents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from prescore.bench.plots import COLOURS, figure, powers_of_two
from prescore.bench.records import Record
from prescore.bench.tables import MISSING, Table, as_text
from prescore.types import Values

STAGES = ("scoring", "centroids", "hashing", "sorting", "gathering", "operator", "routing")


def kinds(records: Sequence[Record], study: str = "lengths") -> list[tuple[bool, bool]]:
    """(causal, backward) pairs that were measured, in order."""
    found: dict[tuple[bool, bool], None] = {}
    for record in records:
        if record.config["study"] == study:
            found[(record.config["causal"], record.config["backward"])] = None
    return list(found)


def title(causal: bool, backward: bool) -> str:
    """How a kind is called in tables and plots."""
    return f"{'causal' if causal else 'full'}, {'forward + backward' if backward else 'forward'}"


def length_table(records: Sequence[Record], causal: bool, backward: bool) -> Table:
    """Speed-up over exact attention by length, and the share of the arithmetic limit reached."""
    chosen = _of_kind(records, causal, backward)
    methods = list(chosen[0].figures["methods"])
    rows = []
    for record in chosen:
        entries = record.figures["methods"]
        mark = "*" if record.figures["exact_scaled"] else ""
        cells = [f"{record.config['n']}", f"{time_cell(entries['exact'])}{mark}"]
        for method in methods[1:]:
            entry = entries[method]
            share = f"({100 * entry['limit_share']:.0f} %)"
            cells.append(f"{entry['speedup']:.2f}x {share}\n{time_cell(entry)}")
        rows.append(tuple(cells))
    exponents = tuple(_exponent_cell(chosen, method) for method in methods)
    rows.append(("exponent", *exponents))
    real = _heads_rows(records, methods) if causal and not backward else []
    rows += real
    note = (
        "x = exact time / method time in the same run; (%) = share of the arithmetic limit; ± = spread of repeats"
    )
    if real:
        note += "; named rows = saved heads of a model, with the relative squared error of the layer's output"
    if any(record.figures["exact_scaled"] for record in chosen):
        heads = chosen[0].config["heads"]
        note += f"; * = exact measured on fewer heads and scaled to {heads}"
    return Table(f"Attention, {title(causal, backward)}", ("n", *methods), tuple(rows), note)


def _heads_rows(records: Sequence[Record], methods: Sequence[str]) -> list[tuple[str, ...]]:
    """Saved heads under the same methods; a method that was not timed on them is a dash."""
    rows = []
    for record in records:
        if record.config["study"] != "heads":
            continue
        entries, cells = record.figures["methods"], []
        for method in methods[1:]:
            entry = entries.get(method)
            error = "" if entry is None else f"error {as_text(entry['error'], 2)}"
            cells.append(MISSING if entry is None else f"{entry['speedup']:.2f}x {error}\n{time_cell(entry)}")
        label = f"{record.config['heads']} {record.config['n']}"
        rows.append((label, time_cell(entries["exact"]), *cells))
    return rows


def share_table(records: Sequence[Record], causal: bool) -> Table:
    """Where the forward time goes at the longest length."""
    record = _of_kind(records, causal, False)[-1]
    rows = []
    for method, entry in record.figures["methods"].items():
        if method == "exact":
            continue
        shares = [f"{100 * entry['shares'].get(stage, 0.0):.0f} %" for stage in STAGES]
        rows.append(
            (method, *shares, f"{100 * entry['scoring_of_exact']:.2f} %", f"{entry['keys_per_query']:.0f}")
        )
    name = f"Shares of the forward time, {title(causal, False)}, n = {record.config['n']}"
    return Table(name, ("method", *STAGES, "scoring / exact", "rows per query"), tuple(rows))


def sweep_table(records: Sequence[Record], study: str, field: str) -> Table:
    """Seconds against one option (`top_k` or `n_clusters`)."""
    chosen = [record for record in records if record.config["study"] == study]
    methods = [name for name in chosen[0].figures["methods"] if name != "exact"]
    rows = tuple(
        (str(record.config[field]), *(time_cell(record.figures["methods"][name]) for name in methods))
        for record in chosen
    )
    return Table(f"Time against {field}, n = {chosen[0].config['n']}, full, forward", (field, *methods), rows)


def decode_table(records: Sequence[Record]) -> Table:
    """One decode step: kept rows against the whole cache."""
    rows = []
    for record in records:
        if record.config["study"] != "decode":
            continue
        seconds = record.figures["seconds"]
        cells = (f"{1e3 * seconds['exact']:.2f} ms", f"{1e3 * seconds['selected']:.3f} ms")
        rows.append(
            (str(record.config["n"]), str(record.figures["rows"]), *cells, f"{record.figures['speedup']:.1f}x")
        )
    return Table("One decode step", ("cache", "rows read", "exact", "selected", "speed-up"), tuple(rows))


def scoring_table(records: Sequence[Record]) -> Table:
    """What scoring alone costs, beside exact full attention."""
    rows = []
    for record in records:
        if record.config["study"] != "scoring":
            continue
        figures = record.figures
        for method, median in figures["seconds"].items():
            entry = {"seconds": median, "spread": figures["spread"][method]}
            rows.append(
                (str(record.config["n"]), method, time_cell(entry), f"{100 * figures['of_exact'][method]:.2f} %")
            )
    return Table("Scoring alone, full", ("n", "method", "time", "share of exact"), tuple(rows), left=2)


def short_table(records: Sequence[Record]) -> Table:
    """How fast short inputs run, 1.00 = exact attention's speed."""
    chosen = [record for record in records if record.config["study"] == "short"]
    names = (name for record in chosen for name in record.figures["of_exact"] if name != "exact")
    methods = list(dict.fromkeys(names))
    rows = []
    for record in chosen:
        config, figures = record.config, record.figures
        exact = {"seconds": figures["seconds"]["exact"], "spread": figures["spread"]["exact"]}
        speeds = (f"{1 / figures['of_exact'][name]:.2f}x" for name in methods)
        rows.append((title(config["causal"], config["backward"]), str(config["n"]), time_cell(exact), *speeds))
    note = "x = exact time / method time; the default is exact attention at most of these lengths"
    return Table("Short inputs", ("", "n", "exact", *methods), tuple(rows), note)


def speed_plot(records: Sequence[Record], path: Path) -> None:
    """Seconds against length, log-log, one panel per kind, exponents in the legend."""
    panels = kinds(records)
    with figure(path, (4.6 * len(panels), 4.0), ncols=len(panels), squeeze=False) as (_, grid):
        for axes, (causal, backward) in zip(grid[0], panels, strict=True):
            chosen = _of_kind(records, causal, backward)
            lengths = [record.config["n"] for record in chosen]
            for index, method in enumerate(chosen[0].figures["methods"]):
                seconds = [record.figures["methods"][method]["seconds"] for record in chosen]
                slope = exponent(chosen, method)
                label = method if slope is None else f"{method}  n^{slope:.2f}"
                colour = COLOURS[-1] if method == "exact" else COLOURS[index - 1]
                axes.loglog(lengths, seconds, marker="o", markersize=3, color=colour, label=label)
            axes.set_title(title(causal, backward))
            axes.set_xlabel("sequence length")
            axes.set_ylabel("seconds")
            axes.set_xticks(lengths, [_short(n) for n in lengths], minor=False)
            axes.minorticks_off()
            axes.legend(fontsize=7)


def exponent(records: Sequence[Record], method: str) -> float | None:
    """Growth exponent of time between the longest length and a quarter of it (or the one before)."""
    points = [(record.config["n"], record.figures["methods"][method]["seconds"]) for record in records]
    if len(points) < 2:
        return None
    last = points[-1]
    first = next((point for point in points if point[0] * 4 == last[0]), points[-2])
    return math.log(last[1] / first[1]) / math.log(last[0] / first[0])


def _of_kind(records: Sequence[Record], causal: bool, backward: bool) -> list[Record]:
    wanted = {"study": "lengths", "causal": causal, "backward": backward}
    chosen = [r for r in records if all(r.config.get(name) == value for name, value in wanted.items())]
    return sorted(chosen, key=lambda record: record.config["n"])


def _exponent_cell(records: Sequence[Record], method: str) -> str:
    slope = exponent(records, method)
    return "-" if slope is None else f"n^{slope:.2f}"


def time_cell(entry: Values) -> str:
    """A median and its spread."""
    return f"{as_text(1e3 * entry['seconds'])} ± {as_text(1e3 * entry['spread'], 2)} ms"


def _short(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 else str(n)


# Speed on saved heads, part by part, step by step, and the curves of all methods with exact attention at 1.

LABELS = {"hyper": "HyperAttention", "kmeans": "k-means", "kmedian": "k-median", "default": "ours (default)"}


def heads_table(records: Sequence[Record]) -> Table:
    """Saved heads of a model: time, error, and what a query read and searched."""
    rows = []
    for record in _of(records, "heads"):
        for method, entry in record.figures["methods"].items():
            error, read, searched = (entry.get(name) for name in ("error", "keys_per_query", "searched_per_query"))
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
        "centroids, search and rows are differences of calls that ask for less"
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


# Records of several ranks as a table: bytes sent and times, beside the gathering of all keys.

_MEGA = 2**20


def parallel_table(records: Sequence[Record]) -> Table:
    """One line for each way, length and number of ranks."""
    rows = []
    for record in records:
        config = record.config
        if config["study"] != "parallel":
            continue
        kind = f"{'causal' if config['causal'] else 'full'}{', + backward' if config['backward'] else ''}"
        for name, figures in record.figures["ways"].items():
            rows.append(
                (
                    kind,
                    str(config["n"]),
                    str(config["ranks"]),
                    name,
                    figures["way"],
                    f"{figures['bytes'] / _MEGA:.3f}",
                    f"{figures['of_all_gather']:.3f}",
                    f"{1e3 * figures['seconds']:.1f}",
                )
            )
    note = (
        "MB sent by the busiest rank in one call (one layer), counted; a ring sends what all-gather sends; "
        "time of the slowest rank, all ranks on this machine"
    )
    header = ("", "n", "ranks", "configuration", "way", "MB sent", "of all-gather", "ms")
    return Table("Several ranks", header, tuple(rows), note, left=5)
