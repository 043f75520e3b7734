"""Speed records as tables and a log-log plot with fitted exponents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from prescore.records import Record
from prescore.report.plots import COLOURS, figure
from prescore.report.tables import MISSING, Table, as_text
from prescore.values import Values

STAGES = ("scoring", "stand-ins", "hashing", "sorting", "gathering", "operator", "routing")


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
            (method, *shares, f"{100 * entry['scoring_of_exact']:.2f} %", f"{entry['rows_per_query']:.0f}")
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
