"""Speed records as tables and plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prescore.bench.methods import PAPER, largest_block
from prescore.bench.plots import COLOURS, figure, powers_of_two
from prescore.bench.records import Record, Values
from prescore.bench.speed.timing import EXACT
from prescore.bench.tables import MISSING, Table, as_text, percent

_LABELS = {
    "hyper": "HyperAttention",
    "paper:kmeans": "paper, k-means",
    "paper:kmedian": "paper, k-median",
    "paper:leverage": "paper, leverage",
    "default": "ours (default)",
}
_ERROR = "error = relative squared error of the layer's output against exact attention"

CELLS = {
    "": "{kind}",
    "method": "{name}",
    "exact": "{ms[exact]:.3f} ms",
    "exact, packed": "{ms[packed]:.3f} ms",
    "routed": "{ms[routed]:.3f} ms",
    "first step": "{index_ms:.1f} ms",
    "speed-up": "{speedup:.2f}x",
    "over packed": "{speedup_packed:.2f}x",
    "share of exact": "{of_exact:.2f} %",
    "scoring / exact": "{scoring:.2f} %",
    "keys and centroids read": "{reads_per_query:.0f}",
    "keys compared": "{keys_compared_per_query:.0f}",
}
"""How a column shows an entry; any other column shows the field of its name."""
_NAMES = ("", "n", "ranks", "layer", "method", "path", "exchange")
"""Columns that are aligned left."""

SPECS = {
    "heads": (
        "Saved heads, causal",
        "layer|method|time|speed-up|error|keys and centroids read|keys compared",
        _ERROR,
    ),
    "steps": (
        "One decode step of the default",
        "layer|path|exact|exact, packed|routed|speed-up|over packed|first step|keys and centroids read|error",
        "medians; packed = the heads of a group as queries of one KV head; the first step builds the index",
    ),
}
"""Title, columns (names of `CELLS`) and note of the studies whose table has a row for each entry."""


def tables(records: Sequence[Record]) -> list[Table]:
    """The tables of every study that was run."""
    made = []
    for causal, backward in kinds(records):
        made.append(length_table(records, causal, backward))
        if not backward:
            made.append(share_table(of_kind(records, causal, backward)[-1]))
    for study, (title, columns, note) in SPECS.items():
        if chosen := of_study(records, study):
            made.append(entry_table(chosen, title, columns, note))
    return made


def entry_table(records: Sequence[Record], title: str, columns: str, note: str = "") -> Table:
    """A row for each entry of the records, and columns by their names, with | between them."""
    names = tuple(columns.split("|"))
    lines = [tuple(cell(entry, name) for name in names) for record in records for entry in entries(record)]
    return Table(title, names, tuple(lines), note, left=sum(name in _NAMES for name in names))


def entries(record: Record) -> list[Values]:
    """What each row of a record's table shows: the settings, the name of a method, and its results."""
    named = record.results.get("methods", {"": record.results})
    return [_entry(record.config, name, results) for name, results in named.items()]


def _entry(config: Values, name: str, results: Values) -> Values:
    spent: Any = results["seconds"]
    of_many, layer = isinstance(spent, dict), f"{config.get('heads') or 'random'} {config['n']}"
    return {
        **config,
        **results,
        "name": name,
        "kind": kind(config),
        "layer": f"{layer}, with backward" if config.get("backward") else layer,
        "path": ", ".join(results.get("path", ())),
        "ms": {call: 1e3 * value for call, value in spent.items()} if of_many else 1e3 * spent,
        "time": MISSING if of_many else time(results),
        "index_ms": 1e3 * results.get("index_seconds", 0.0),
        "error": as_text(None if name == EXACT else results.get("error"), 2),
        "of_exact": 100 / results.get("speedup", 1.0),
        "scoring": 100 * results.get("scoring_of_exact", 0.0),
    }


def cell(entry: Values, column: str) -> str:
    """One cell of an entry; a dash where the result is missing."""
    try:
        return CELLS.get(column, f"{{{column}}}").format_map(entry)
    except KeyError:
        return MISSING


def kind(config: Values) -> str:
    """What tables and plots call a (causal, backward) pair."""
    passes = "forward + backward" if config.get("backward") else "forward"
    return f"{'causal' if config.get('causal') else 'full'}, {passes}"


def time(entry: Values) -> str:
    """A median, and the distance between the slowest and the fastest round where it is known."""
    spread = f" ± {as_text(1e3 * entry['spread'], 2)}" if "spread" in entry else ""
    return f"{as_text(1e3 * entry['seconds'])}{spread} ms"


def length_table(records: Sequence[Record], causal: bool, backward: bool) -> Table:
    """Speed-up over exact attention by length; causal also on saved heads."""
    chosen = of_kind(records, causal, backward)
    saved = [r for r in of_study(records, "heads") if causal and r.config.get("backward", False) == backward]
    methods = list(chosen[0].results["methods"])
    rows: list[tuple[str, ...]] = []
    for record in (*chosen, *saved):
        is_saved, cells = record.config["study"] == "heads", []
        by_name = {entry["name"]: entry for entry in entries(record)}
        for entry in map(by_name.get, methods[1:]):
            if entry is None:
                cells.append(MISSING)
            else:
                also = f"error {entry['error']}" if is_saved else f"({percent(entry['share_of_bound'])})"
                also += "" if selects(record.config, entry["name"]) else ", no selection"
                cells.append(f"{entry['speedup']:.2f}x {also}\n{entry['time']}")
        label = by_name[EXACT]["layer"] if is_saved else str(record.config["n"])
        rows.append((label, by_name[EXACT]["time"], *cells))
    slopes = [exponent(chosen, method) for method in methods]
    grows = ("exponent", *(MISSING if slope is None else f"n^{slope:.2f}" for slope in slopes))
    rows.insert(len(chosen), grows)
    heads = " and ".join(str(number) for number in sorted({record.config["heads"] for record in chosen}))
    note = (
        "x = exact time / method time on the same heads; (%) = share of the speed-up that the keys read allow; "
        f"± = slowest - fastest; {heads} heads; no selection = the budget keeps every key, so nothing is scored"
    )
    note += f"; named rows = saved heads of a model; {_ERROR}" if saved else ""
    return Table(f"Attention, {kind(chosen[0].config)}", ("n", *methods), tuple(rows), note)


def selects(config: Values, method: str) -> bool:
    """Whether a method is none of the paper's, or its budget leaves out a key."""
    n, leaf = config["n"], config["min_seq_len"]
    return not method.startswith(PAPER) or config["top_k"] < (
        largest_block(n, leaf) if config.get("causal", True) else n
    )


def share_table(record: Record) -> Table:
    """Shares of the forward time of each method, by stage."""
    methods = [entry for entry in entries(record) if entry["name"] != EXACT]
    stages = list(dict.fromkeys(stage for entry in methods for stage in entry["shares"]))
    last = ("scoring / exact", "keys and centroids read")
    rows = []
    for entry in methods:
        shares = (percent(entry["shares"].get(stage, 0.0)) for stage in stages)
        rows.append((entry["name"], *shares, *(cell(entry, name) for name in last)))
    title = f"Shares of the forward time, {kind(record.config)}, n = {record.config['n']}"
    return Table(title, ("method", *stages, *last), tuple(rows))


def length_plot(records: Sequence[Record], path: Path, field: str) -> None:
    """`seconds` (per head) against the length, or `speedup` with exact attention at 1; a panel per kind."""
    panels = kinds(records)
    # not every length has every method
    names = list(dict.fromkeys(name for r in of_study(records, "lengths") for name in r.results["methods"]))
    names.remove(EXACT)
    colours = {**dict(zip(names, COLOURS, strict=False)), EXACT: COLOURS[-1]}
    with figure(path, (4.6 * len(panels), 4.0), ncols=len(panels), squeeze=False, sharey=True) as (_, grid):
        for axes, panel in zip(grid[0], panels, strict=True):
            chosen = of_kind(records, *panel)
            for name in [*names, EXACT]:
                slope = exponent(chosen, name) if field == "seconds" else None
                label = _LABELS.get(name, name) + ("" if slope is None else f"  n^{slope:.2f}")
                points: Any = zip(*curve(chosen, name, field), strict=True)
                axes.plot(*points, marker="o", markersize=3, color=colours[name], label=label)
            powers_of_two(axes)
            axes.set_yscale("log", base=10 if field == "seconds" else 2)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}" + ("x" if field == "speedup" else ""))
            axes.set(title=kind(chosen[0].config), xlabel="sequence length")
            axes.legend(fontsize=7)
        grid[0][0].set_ylabel("seconds per head" if field == "seconds" else "exact time / method time")


def curve(records: Sequence[Record], method: str, field: str) -> list[tuple[int, float]]:
    """Lengths and values of a method, ascending; times are those of one head, as long inputs have fewer."""
    points = []
    for record in records:
        if method in record.results["methods"]:
            value = record.results["methods"][method][field]
            points.append((record.config["n"], value / (record.config["heads"] if field == "seconds" else 1)))
    return sorted(points)


def exponent(records: Sequence[Record], method: str) -> float | None:
    """Growth exponent of time between the longest length and a quarter of it (or the one before)."""
    points = curve(records, method, "seconds")
    if len(points) < 2:
        return None
    last = points[-1]
    first = next((point for point in points if point[0] * 4 == last[0]), points[-2])
    return math.log(last[1] / first[1]) / math.log(last[0] / first[0])


def of_study(records: Sequence[Record], study: str) -> list[Record]:
    """The records of a study."""
    return [record for record in records if record.config["study"] == study]


def kinds(records: Sequence[Record]) -> list[tuple[bool, bool]]:
    """(causal, backward) pairs of the study `lengths`, in order."""
    return list(dict.fromkeys((r.config["causal"], r.config["backward"]) for r in of_study(records, "lengths")))


def of_kind(records: Sequence[Record], causal: bool, backward: bool) -> list[Record]:
    """The records of the study `lengths` of one kind, by length."""
    chosen = [r for r in of_study(records, "lengths") if r.config["causal"] == causal]
    chosen = [r for r in chosen if r.config["backward"] == backward]
    return sorted(chosen, key=lambda record: record.config["n"])
