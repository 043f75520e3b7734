"""Speed records as tables and plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


class Entry(NamedTuple):
    """What a row of a table shows: a record's settings, a name (of a method or a part) and its results."""

    config: Values
    name: str
    results: Values


class Spec(NamedTuple):
    """A table whose rows are the entries of a study; `columns` are names of `CELLS`, separated by `|`."""

    title: str
    columns: str
    entries: Callable[[Record], Iterator[Entry]]
    note: str = ""
    left: int = 1


def kind(config: Values) -> str:
    """What tables and plots call a (causal, backward) pair."""
    passes = "forward + backward" if config["backward"] else "forward"
    return f"{'causal' if config['causal'] else 'full'}, {passes}"


def time(entry: Values) -> str:
    """A median, and the distance between the slowest and the fastest round where it is known."""
    spread = f" ± {as_text(1e3 * entry['spread'], 2)}" if "spread" in entry else ""
    return f"{as_text(1e3 * entry['seconds'])}{spread} ms"


def layer(config: Values) -> str:
    """Name and length of saved heads."""
    return f"{config['heads'] or 'random'} {config['n']}"


def milliseconds(entry: Entry, name: str) -> str:
    """One of the times of a decode step."""
    return f"{1e3 * entry.results['seconds'][name]:.3f} ms"


def count(entry: Entry, name: str) -> str:
    """A mean count without decimals; a dash where it is missing."""
    return f"{entry.results[name]:.0f}" if name in entry.results else MISSING


CELLS: dict[str, Callable[[Entry], str]] = {
    "": lambda e: kind(e.config),
    "n": lambda e: str(e.config["n"]),
    "ranks": lambda e: str(e.config["ranks"]),
    "layer": lambda e: layer(e.config),
    "method": lambda e: e.name,
    "part": lambda e: e.name,
    "path": lambda e: ", ".join(e.results["path"]),
    "exchange": lambda e: e.results["exchange"],
    "time": lambda e: time(e.results),
    "exact": lambda e: milliseconds(e, EXACT),
    "exact, packed": lambda e: milliseconds(e, "packed"),
    "selected": lambda e: milliseconds(e, "selected"),
    "routed": lambda e: milliseconds(e, "routed"),
    "first step": lambda e: f"{1e3 * e.results['index_seconds']:.1f} ms",
    "ms": lambda e: f"{1e3 * e.results['seconds']:.1f}",
    "speed-up": lambda e: f"{e.results['speedup']:.2f}x",
    "over packed": lambda e: f"{e.results['speedup_packed']:.2f}x",
    "share of exact": lambda e: f"{100 / e.results['speedup']:.2f} %",
    "scoring / exact": lambda e: f"{100 * e.results['scoring_of_exact']:.2f} %",
    "share of the call": lambda e: percent(e.results["share"]),
    "error": lambda e: as_text(None if e.name == EXACT else e.results["error"], 2),
    "keys and centroids read": lambda e: count(e, "reads_per_query"),
    "keys compared": lambda e: count(e, "keys_compared_per_query"),
    "billion multiply-adds": lambda e: as_text(e.results["multiply_adds"] / 1e9 or None),
    "of exact attention's rate": lambda e: percent(e.results["of_exact_rate"]),
    "MB sent": lambda e: f"{e.results['bytes'] / 2**20:.3f}",
    "of all-gather": lambda e: f"{e.results['of_all_gather']:.3f}",
}


def of_methods(record: Record) -> Iterator[Entry]:
    """An entry for each method."""
    return (Entry(record.config, name, results) for name, results in record.results["methods"].items())


def of_record(record: Record) -> Iterator[Entry]:
    """One entry."""
    yield Entry(record.config, "", record.results)


def of_parts(record: Record) -> Iterator[Entry]:
    """Exact attention, the call, and its parts."""
    results = record.results
    exact = {"seconds": results["exact_seconds"], "multiply_adds": results["exact_multiply_adds"]}
    call = {"seconds": results["call_seconds"], "multiply_adds": results["call_multiply_adds"]}
    exact |= {"share": None, "of_exact_rate": 1.0}
    call |= {"share": 1.0, "of_exact_rate": results["call_of_exact_rate"]}
    for name, part in {EXACT: exact, "the call": call, **results["parts"]}.items():
        yield Entry(record.config, name, part)


SPECS = {
    "decode": Spec("One decode step", "n|keys and centroids read|exact|selected|speed-up", of_record),
    "scoring": Spec("Scoring alone, full", "n|method|time|share of exact", of_methods, left=2),
    "short": Spec(
        "Short inputs",
        "|n|method|time|speed-up",
        of_methods,
        "speed-up = exact time / method time; up to `exact_until` the default is exact attention",
        left=3,
    ),
    "heads": Spec(
        "Saved heads, causal, forward",
        "layer|method|time|speed-up|error|keys and centroids read|keys compared",
        of_methods,
        _ERROR,
        left=2,
    ),
    "parts": Spec(
        "Parts of the default, causal, forward",
        "layer|part|time|share of the call|billion multiply-adds|of exact attention's rate",
        of_parts,
        "parts are differences of calls with less to do; a search multiplies int8 numbers, of which a processor "
        "does more at once",
        left=2,
    ),
    "steps": Spec(
        "One decode step of the default",
        "layer|path|exact|exact, packed|routed|speed-up|over packed|first step|keys and centroids read|error",
        of_record,
        "medians; packed = the heads of a group as queries of one KV head; the first step builds the index",
        left=2,
    ),
    "parallel": Spec(
        "Context parallel",
        "|n|ranks|method|exchange|MB sent|of all-gather|ms",
        of_methods,
        "MB sent by the busiest rank in one call (one layer), counted; a ring sends as much as all-gather; "
        "time of the slowest rank, all ranks on this machine",
        left=5,
    ),
}


def tables(records: Sequence[Record]) -> list[Table]:
    """The tables of every study that was run."""
    made = []
    for causal, backward in kinds(records):
        made.append(length_table(records, causal, backward))
        if not backward:
            made.append(share_table(of_kind(records, causal, backward)[-1]))
    for study, field in (("top-k", "top_k"), ("clusters", "n_clusters")):
        if chosen := of_study(records, study):
            methods = [name for name in chosen[0].results["methods"] if name != EXACT]
            rows = [(str(r.config[field]), *(time(r.results["methods"][m]) for m in methods)) for r in chosen]
            title = f"Time against {field}, n = {chosen[0].config['n']}, full, forward"
            made.append(Table(title, (field, *methods), tuple(rows)))
    for study, spec in SPECS.items():
        if chosen := of_study(records, study):
            made.append(study_table(spec, [entry for record in chosen for entry in spec.entries(record)]))
    return made


def study_table(spec: Spec, entries: Sequence[Entry]) -> Table:
    """A row for each entry."""
    columns = tuple(spec.columns.split("|"))
    rows = tuple(tuple(CELLS[column](entry) for column in columns) for entry in entries)
    return Table(spec.title, columns, rows, spec.note, spec.left)


def length_table(records: Sequence[Record], causal: bool, backward: bool) -> Table:
    """Speed-up over exact attention by length; causal and forward also on saved heads."""
    chosen = of_kind(records, causal, backward)
    saved = of_study(records, "heads") if causal and not backward else []
    methods = list(chosen[0].results["methods"])
    slopes = [exponent(chosen, method) for method in methods]
    rows = [_length_cells(record, methods, str(record.config["n"])) for record in chosen]
    rows.append(("exponent", *(MISSING if slope is None else f"n^{slope:.2f}" for slope in slopes)))
    rows += [_length_cells(record, methods, layer(record.config)) for record in saved]
    heads = " and ".join(str(number) for number in sorted({record.config["heads"] for record in chosen}))
    note = (
        "x = exact time / method time on the same heads; (%) = share of the speed-up that the keys read allow; "
        f"± = slowest - fastest; {heads} heads"
    )
    note += f"; named rows = saved heads of a model; {_ERROR}" if saved else ""
    return Table(f"Attention, {kind(chosen[0].config)}", ("n", *methods), tuple(rows), note)


def _length_cells(record: Record, methods: Sequence[str], label: str) -> tuple[str, ...]:
    entries, cells = record.results["methods"], []
    for entry in map(entries.get, methods[1:]):
        if entry is None:
            cells.append(MISSING)
        elif record.config["study"] == "heads":
            cells.append(f"{entry['speedup']:.2f}x error {as_text(entry['error'], 2)}\n{time(entry)}")
        else:
            cells.append(f"{entry['speedup']:.2f}x ({percent(entry['share_of_bound'])})\n{time(entry)}")
    return (label, time(entries[EXACT]), *cells)


def share_table(record: Record) -> Table:
    """Shares of the forward time of each method, by stage."""
    entries = [entry for entry in of_methods(record) if entry.name != EXACT]
    stages = list(dict.fromkeys(stage for entry in entries for stage in entry.results["shares"]))
    last = ("scoring / exact", "keys and centroids read")
    rows = []
    for entry in entries:
        shares = (percent(entry.results["shares"].get(stage, 0.0)) for stage in stages)
        rows.append((entry.name, *shares, *(CELLS[name](entry) for name in last)))
    title = f"Shares of the forward time, {kind(record.config)}, n = {record.config['n']}"
    return Table(title, ("method", *stages, *last), tuple(rows))


def length_plot(records: Sequence[Record], path: Path, field: str) -> None:
    """`seconds` (per head) against the length, or `speedup` with exact attention at 1; a panel per kind."""
    panels = kinds(records)
    # not every length has every method
    names = list(dict.fromkeys(e.name for r in of_study(records, "lengths") for e in of_methods(r)))
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
