"""Records of the language commands as tables, CSV files and pictures."""

from __future__ import annotations

import csv
import io
import itertools
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prescore.bench.language.experiments import largest_block
from prescore.bench.language.held_out import HELD_OUT
from prescore.bench.language.retrieval import MANY_NEEDLES
from prescore.bench.plots import bars, figure, line_style, powers_of_two
from prescore.bench.records import Record, Values
from prescore.bench.tables import MISSING, Table, as_text, number, percent, times

# two-sided 95 % points of Student's t for 1, 2, ... degrees of freedom
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
READS = "keys and centroids read"
_SCALED = "positions past the trained length by RoPE scaling (YaRN), without training"


@dataclass(frozen=True)
class Summary:
    """One method at one length, over documents and seeds.

    Attributes:
        label, config, axes: The method.
        n_tokens, layers: Where it was measured.
        losses: Loss in nats by document (mean over seeds).
        reads_per_query: Keys and centroids read.
        attention_seconds: Inside the attention functions, per forward.
        forward_seconds: Whole forward and loss.
        processor_seconds: Attention as processor time; None where it was not measured on a CPU.
        position_scaling: How positions past the trained length were made, if they were.
        gap_closed: `(local - loss) / (local - exact)` over the same documents; None where one is missing.
        above_exact: Mean difference to the loss of exact attention over the same documents.
        above_exact_half_width: Half of its 95 % interval, which is much narrower than that of the loss itself.
        speed_up: Exact attention's time over this one's.
    """

    label: str
    config: Values
    axes: Values
    n_tokens: int
    layers: Any
    losses: dict[str, float]
    reads_per_query: float | None
    attention_seconds: float
    forward_seconds: float
    processor_seconds: float | None = None
    position_scaling: Values | None = None
    gap_closed: float | None = None
    above_exact: float | None = None
    above_exact_half_width: float | None = None
    speed_up: float | None = None

    @property
    def is_exact(self) -> bool:
        """Whether it is exact attention."""
        return self.config.get("type") == "Exact"

    @property
    def is_local(self) -> bool:
        """Whether it is local attention alone."""
        return self.config.get("type") == "Local"

    @property
    def loss(self) -> float:
        """Mean over documents, nats per token."""
        return statistics.fmean(self.losses.values())

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % confidence interval over documents; None for one document."""
        return confidence_half_width(list(self.losses.values()))

    @property
    def perplexity(self) -> float:
        """E to the mean loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def leaf(self) -> int | None:
        """Size of the exact local part, where the method has one."""
        leaf = self.config.get("min_seq_len", self.config.get("chunk_size"))
        return None if leaf is None else int(leaf)


def confidence_half_width(values: Sequence[float]) -> float | None:
    """Half of Student's 95 % interval of the mean."""
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    # beyond the table a short expansion is right to three digits
    factor = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.5 / freedom
    return factor * statistics.stdev(values) / math.sqrt(len(values))


def summarise(records: Sequence[Record]) -> list[Summary]:
    """Group loss records by method, length and layers, in the order of first appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        config = record.config
        if config.get("part") == "loss":
            name = repr([config[field] for field in ("model", "dtype", "n_tokens", "layers", "method")])
            groups.setdefault(name, []).append(record)
    summaries = [_summary(group) for group in groups.values()]
    return [_compare(summary, summaries) for summary in summaries]


def _summary(group: Sequence[Record]) -> Summary:
    config, method = group[0].config, group[0].config["method"]
    by_document: dict[str, list[float]] = {}
    for record in group:
        name = f"{record.config['document']}@{record.config['digest']}"
        by_document.setdefault(name, []).append(_number(record, "loss"))
    reads = [_number(r, "reads_per_query") for r in group if r.results.get("reads_per_query", "") is not None]
    processor: list[Any] = [record.results.get("attention_processor_seconds") for record in group]
    # records of schema 1 were fitted on a sample, which today's configurations are not
    is_sampled = method["config"].get("scorer", {}).get("fit_size") == "auto"
    return Summary(
        label=f"{method['label']} (sampled fit)" if is_sampled else method["label"],
        config=method["config"],
        axes=method["axes"],
        n_tokens=config["n_tokens"],
        layers=config["layers"],
        losses={name: statistics.fmean(losses) for name, losses in by_document.items()},
        reads_per_query=statistics.fmean(reads) if reads else None,
        attention_seconds=statistics.fmean(_number(record, "attention_seconds") for record in group),
        forward_seconds=statistics.fmean(_number(record, "forward_seconds") for record in group),
        processor_seconds=None if None in processor else statistics.fmean(processor),
        position_scaling=group[0].results.get("position_scaling"),
    )


def _number(record: Record, name: str) -> float:
    return number(record, record.results.get(name), name)


def find(summaries: Sequence[Summary], kind: str, n_tokens: int, leaf: int | None = None) -> Summary | None:
    """The exact or local line of a length; of several local ones the one with the same leaves."""
    found = [s for s in summaries if s.config.get("type") == kind and s.n_tokens == n_tokens]
    same = [summary for summary in found if leaf is not None and summary.leaf == leaf]
    return next(iter(same or found), None)


def _compare(summary: Summary, summaries: Sequence[Summary]) -> Summary:
    exact = find(summaries, "Exact", summary.n_tokens)
    local = find(summaries, "Local", summary.n_tokens, summary.leaf)
    if exact is None:
        return summary
    above = [summary.losses[n] - exact.losses[n] for n in summary.losses if n in exact.losses]
    gap = None
    shared = [n for n in summary.losses if local is not None and n in exact.losses and n in local.losses]
    if local is not None and shared:
        floor, best, loss = (statistics.fmean(s.losses[n] for n in shared) for s in (local, exact, summary))
        # a model that reads no better with its far context than without has no gap to close
        gap = None if floor <= best else (floor - loss) / (floor - best)
    return replace(
        summary,
        gap_closed=gap,
        above_exact=statistics.fmean(above) if above else None,
        above_exact_half_width=confidence_half_width(above),
        speed_up=exact.attention_seconds / summary.attention_seconds if summary.attention_seconds > 0 else None,
    )


def holds_for(summary: Summary, scorer: str) -> bool:
    """Whether a line of a grid is one of that scorer's: its own, or one where the scorer has no effect."""
    return summary.axes.get("scorer") in (scorer, "none") or keeps_every_key(summary)


def keeps_every_key(summary: Summary) -> bool:
    """Whether the budget filters nothing, so that one scorer's line holds for all."""
    budget, leaf = summary.config.get("top_k"), summary.config.get("min_seq_len")
    if not budget or leaf is None:
        return False
    return bool(budget == 1.0 if isinstance(budget, float) else budget >= largest_block(summary.n_tokens, leaf))


def loss_table(summaries: Sequence[Summary], title: str, note: str = "") -> Table:
    """Loss, perplexity, share of the gap closed, reads, attention time and speed-up per method."""
    lengths = {summary.n_tokens for summary in summaries}
    rows = []
    for s in summaries:
        interval = "" if s.half_width is None else f" ± {s.half_width:.3f}"
        rows.append(
            (
                s.label if len(lengths) == 1 else f"{s.label} @ {s.n_tokens}",
                f"{s.loss:.4f}{interval}",
                as_text(s.perplexity, 4),
                percent(s.gap_closed),
                as_text(s.reads_per_query, 4),
                f"{s.attention_seconds:.2f} s",
                times(s.speed_up),
            )
        )
    columns = (
        "method",
        "loss (nats)",
        "perplexity",
        "gap closed",
        READS,
        "attention",
        "speed-up",
    )
    return Table(title, columns, tuple(rows), note)


def describe_run(summaries: Sequence[Summary], model: str) -> str:
    """Model, lengths, documents and layers of a run in one line."""
    documents = list(dict.fromkeys(name.split("@")[0] for summary in summaries for name in summary.losses))
    lengths = sorted({summary.n_tokens for summary in summaries})
    layers = sorted({str(summary.layers) for summary in summaries})
    shown = ", ".join(documents) if len(documents) <= 3 else f"{len(documents)} documents"
    scaled = f"; {_SCALED}" if any(summary.position_scaling for summary in summaries) else ""
    return f"{model}, {', '.join(map(str, lengths))} tokens of {shown}, layers: {', '.join(layers)}{scaled}"


# CSV: every number, and the paper's own shapes.

Lines = list[list[Any]]
_NAMES = {
    "kmeans": "K-means",
    "kmedian": "K-median",
    "leverage": "Leverage",
    "gaussian-kmeans": "Gaussian kernel K-means",
}


def full_csv(summaries: Sequence[Summary]) -> str:
    """Every number of every line."""
    axes = list(dict.fromkeys(name for summary in summaries for name in summary.axes))
    documents = list(dict.fromkeys(name for summary in summaries for name in summary.losses))
    lines = []
    for s in summaries:
        line = {"method": s.label, "type": s.config.get("type"), "n_tokens": s.n_tokens, "layers": s.layers}
        line |= {name: s.axes.get(name) for name in axes}
        line |= {
            "loss": s.loss,
            "ci95_half_width": s.half_width,
            "perplexity": s.perplexity,
            "gap_closed": s.gap_closed,
            "above_exact": s.above_exact,
            "above_exact_ci95_half_width": s.above_exact_half_width,
            "reads_per_query": s.reads_per_query,
            "attention_seconds": s.attention_seconds,
            "attention_processor_seconds": s.processor_seconds,
            "speed_up": s.speed_up,
            "forward_seconds": s.forward_seconds,
        }
        lines.append(line | {f"loss {name}": s.losses.get(name) for name in documents})
    return _text([list(lines[0]) if lines else [], *(list(line.values()) for line in lines)])


def paper_csv(experiment: str | None, summaries: Sequence[Summary]) -> str | None:
    """The experiment in the paper's shape, perplexity as e to the loss in nats; None = the paper has none."""
    shapes: dict[str | None, Callable[[Sequence[Summary]], Lines]] = {
        "table1": _table1,
        "appendix-a": _appendix_a,
        "figure-glm3": _appendix_a,
        "appendix-f": _appendix_f,
        "appendix-i": _appendix_i,
        "longest": _longest,
    }
    return _text(shapes[experiment](summaries)) if experiment in shapes else None


def _table1(summaries: Sequence[Summary]) -> Lines:
    lines: Lines = [["Method", "Pre-score", "Blockwise Opt.", "PPL", "Loss", "Gap closed"]]
    for s in summaries:
        if not s.is_local:
            selects = s.axes.get("scorer", "none") != "none"
            name = "Exact" if s.is_exact else "K-means+Hyper" if selects else "HyperAttention"
            lines.append([name, selects, bool(s.axes.get("leaf_inclusive")), s.perplexity, s.loss, s.gap_closed])
    return lines


def _appendix_a(summaries: Sequence[Summary]) -> Lines:
    lines: Lines = [
        ["Method", "Top K", "Sample Size", "PPL", "PPL*", "Top K / n", "Paper's Top K", "Paper's Sample Size"]
    ]
    for scorer in _scorers(summaries):
        cells = [s for s in summaries if holds_for(s, scorer)]
        samples = _values(cells, "paper_sample_size")[::-1]
        for n_samples, top_k in itertools.product(samples, _values(cells, "paper_top_k")):
            same = [s for s in cells if (s.axes["paper_top_k"], s.axes["paper_sample_size"]) == (top_k, n_samples)]
            values = {s.axes["leaf_inclusive"]: s.perplexity for s in same}
            if same:
                one = same[0].axes
                lines.append([_NAMES.get(scorer, scorer), one["top_k"], one["sample_size"]])
                lines[-1] += [values.get(False), values.get(True), one["fraction"], top_k, n_samples]
    return lines


def _appendix_f(summaries: Sequence[Summary]) -> Lines:
    lines: Lines = [["Coupling", "Method", "Top K", "PPL", "Loss", "Top K / n", "Paper's Top K"]]
    cells = [s for s in summaries if s.axes]
    for coupling, scorer in dict.fromkeys((s.axes["coupling"], s.axes["scorer"]) for s in cells):
        same = [s for s in cells if s.axes["coupling"] == coupling]
        own = {s.axes["paper_top_k"]: s for s in same if s.axes["scorer"] == scorer}
        # a budget that keeps every key is run for one scorer and holds for the others
        every = {s.axes["paper_top_k"]: s for s in same if scorer != "none" and keeps_every_key(s)}
        for top_k, s in sorted({**every, **own}.items()):
            lines.append([coupling, _NAMES.get(scorer, scorer), s.axes["top_k"], s.perplexity, s.loss])
            lines[-1] += [s.axes["fraction"], top_k]
    return lines


def _appendix_i(summaries: Sequence[Summary]) -> Lines:
    cells = [s for s in summaries if s.axes]
    samples = _values(cells, "paper_sample_size")[::-1]
    shown = {s.axes["paper_sample_size"]: s.axes["sample_size"] for s in cells}
    lines: Lines = [["Top K", *(f"PPL, Sample Size = {shown[n]}" for n in samples), "Paper's Top K"]]
    for top_k in _values(cells, "paper_top_k"):
        same = [s for s in cells if s.axes["paper_top_k"] == top_k]
        values = {s.axes["paper_sample_size"]: s.perplexity for s in same}
        lines.append([same[0].axes["top_k"], *(values.get(n) for n in samples), top_k])
    return lines


def _longest(summaries: Sequence[Summary]) -> Lines:
    lines: Lines = [["Context", "Method", "PPL", "Loss", "Positions scaled"]]
    for s in summaries:
        lines.append([s.n_tokens, s.label, s.perplexity, s.loss, bool(s.position_scaling)])
    return lines


def _scorers(summaries: Sequence[Summary]) -> list[str]:
    names = dict.fromkeys(s.axes["scorer"] for s in summaries if s.axes.get("scorer"))
    return [name for name in names if name != "none"]


def _values(summaries: Iterable[Summary], axis: str) -> list[Any]:
    return sorted({s.axes[axis] for s in summaries})


def _text(lines: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


# The default on held-out windows: what is lost, what is read and how long it takes, text by text.

_COMPARED = ("default", "window", "local")
_HELD_OUT_NOTE = (
    "above: loss over the second half of a window minus exact attention's, nats per token (worst of several "
    "windows); window: a sliding window with sinks that reads as much as the default; local: own and previous "
    "chunk with sinks; s: seconds inside the attention functions; YaRN: positions past the trained length"
)


def held_out_tables(records: Sequence[Record]) -> list[Table]:
    """One table for every variant of the default and kind of window, reported windows first.

    A line per text, and below the texts of a model and length one over all their windows.
    """
    own = [r for r in records if r.config.get("part") == "loss" and r.config.get("experiment") == HELD_OUT]
    labels = dict.fromkeys(
        r.config["method"]["label"] for r in own if r.config["method"]["config"]["type"] == "Routed"
    )
    kinds = sorted({_window_kind(record) for record in own})
    tables = [
        _held_out_table([record for record in own if _window_kind(record) == kind], label, kind)
        for kind in kinds
        for label in labels
    ]
    return [table for table in tables if table.rows]


def _window_kind(record: Record) -> str:
    """`reported` or `tuning`, from a name such as "novel.txt, reported window 2"."""
    return str(record.config["document"]).rpartition(", ")[2].split(" ")[0]


def _held_out_table(records: Sequence[Record], label: str, kind: str) -> Table:
    windows: dict[str, dict[str, Record]] = {}
    for record in records:
        fields = ("model", "dtype", "layers", "document", "digest", "n_tokens")
        column = _held_out_column(record, label)
        if column is not None:
            name = repr([*(record.config[field] for field in fields), record.seed])
            windows.setdefault(name, {})[column] = record
    texts: dict[tuple[tuple[str, str], str], list[dict[str, Record]]] = {}
    for window in windows.values():
        default = window.get("default")
        if default is not None:
            scaled = " (YaRN)" if default.results.get("position_scaling") is not None else ""
            where = (str(default.config["model"]), f"{default.config['n_tokens']}{scaled}")
            text = str(default.config["document"]).rpartition(", ")[0]
            texts.setdefault((where, text), []).append(window)
    rows = []
    for where in dict.fromkeys(where for where, _ in texts):
        own = {text: found for (place, text), found in texts.items() if place == where}
        rows += [(*where, text, *_held_out_cells(found)) for text, found in own.items()]
        if len(own) > 1:
            rows.append((*where, "all", *_held_out_cells([w for found in own.values() for w in found])))
    columns = (
        *("model", "tokens", "text", "windows", "exact loss", *(f"{name} above" for name in _COMPARED)),
        *(READS, "exact s", *(f"{name} s" for name in _COMPARED), "speed-up"),
    )
    return Table(f"{label}, {kind} windows", columns, tuple(rows), _HELD_OUT_NOTE, left=3)


def _held_out_column(record: Record, label: str) -> str | None:
    method = record.config["method"]
    kind = method["config"]["type"]
    if kind == "Routed" and method["label"] != label:
        return None
    if kind == "Baseline" and method["axes"].get("compared_with") != label:
        return None
    return {"Exact": "exact", "Routed": "default", "Baseline": "window", "Local": "local"}.get(kind)


def _held_out_cells(windows: Sequence[dict[str, Record]]) -> tuple[str, ...]:
    def column(name: str, field: str) -> list[float]:
        return [_number(window[name], field) for window in windows if name in window]

    def above(name: str) -> str:
        """The mean, and the worst of several; a window that is not measured yet leaves both open."""
        if not all(name in window and "exact" in window for window in windows):
            return MISSING
        losses = [_number(window[name], "loss") - _number(window["exact"], "loss") for window in windows]
        mean = f"{statistics.fmean(losses):+.4f}"
        return mean if len(losses) == 1 else f"{mean} ({max(losses):+.4f})"

    losses = column("exact", "loss")
    seconds = [column(name, "attention_seconds") for name in ("exact", *_COMPARED)]
    exact, default, *_ = means = [statistics.fmean(spent) if spent else None for spent in seconds]
    return (
        str(len(windows)),
        f"{statistics.fmean(losses):.4f}" if losses else MISSING,
        *(above(name) for name in _COMPARED),
        as_text(statistics.fmean(column("default", "replaced_reads_per_query")), 4),
        *(MISSING if mean is None else f"{mean:.1f}" for mean in means),
        times(exact / default if exact and default else None),
    )


# Retrieval.


def retrieval_table(records: Sequence[Record]) -> Table:
    """Accuracy by method, task, length and depth; exact attention first, since it bounds what can be found."""
    own = [record for record in records if record.config.get("part") == "retrieval"]
    cells = {
        (r.config["method"]["label"], (r.config["task"], r.config["n_tokens"], r.config["depth"])): r.results
        for r in own
    }
    columns, labels = dict.fromkeys(cell for _, cell in cells), dict.fromkeys(label for label, _ in cells)
    rows = []
    for label in labels:
        results = [cells.get((label, cell)) for cell in columns]
        shown = [
            MISSING if r is None else f"{100 * r['accuracy']:.0f} % ({r['answer_loss']:.2f})" for r in results
        ]
        rows.append((label, *shown))
    return Table(
        title=f"Retrieval; {_SCALED}" if _is_scaled(own) else "Retrieval",
        columns=("method", *(f"{task} {length} at {100 * depth:.0f} %" for task, length, depth in columns)),
        rows=tuple(rows),
        note="share of answers whose every token is the likeliest one (mean loss of the answer's tokens in nats); "
        "where exact attention fails, the model cannot do the task and the column says nothing about methods",
    )


def _is_scaled(records: Sequence[Record]) -> bool:
    return any(record.results.get("position_scaling") for record in records)


_NEEDLES_NOTE = (
    "share of needles whose every token is the likeliest one; points: above exact attention on the same texts; "
    "lost: exact attention alone finds them, gained: the method alone; where exact attention fails, the model "
    "cannot do the task"
)
Hits = dict[str, dict[float, list[int]]]
"""By text and depth, a 1 or 0 for every needle in the order of the text."""


def needles_table(records: Sequence[Record]) -> Table:
    """A line for every length and depth, and one over all depths of a length.

    Methods are compared with exact attention on texts that both have read.
    """
    own = [record for record in records if record.config.get("part") == MANY_NEEDLES]
    labels = sorted(dict.fromkeys(r.config["method"]["label"] for r in own), key=lambda label: label != "exact")
    rows = []
    for length in dict.fromkeys(record.config["n_tokens"] for record in own):
        methods: dict[str, Hits] = {label: {} for label in labels}
        for record in own:
            if record.config["n_tokens"] == length:
                methods[record.config["method"]["label"]][_needle_text(record)] = _hits(record)
        depths = sorted({depth for texts in methods.values() for hits in texts.values() for depth in hits})
        rows += [_needles_line(str(length), depth, methods) for depth in (*depths, None)]
    columns = ["tokens", "depth", "needles"]
    for label in labels:
        columns += [label] if label == "exact" else [label, "points", "lost", "gained"]
    title = "Many needles" + (
        "; positions past the trained length by RoPE scaling (YaRN)" if _is_scaled(own) else ""
    )
    return Table(title, tuple(columns), tuple(rows), _NEEDLES_NOTE, left=2)


def _needle_text(record: Record) -> str:
    """What identifies a text among those of one length, whatever the method."""
    names = ("model", "dtype", "document", "digest", "needle", "needles_per_depth", "sample", "depths", "layers")
    return repr([*(record.config[name] for name in names), record.seed])


def _hits(record: Record) -> dict[float, list[int]]:
    by_depth: dict[float, list[int]] = {}
    for entry in record.results["by_depth"]:
        hits = entry.get("hits")
        if not isinstance(hits, list) or len(hits) != entry.get("n_needles"):
            raise ValueError(f"record {record.key} must have a 0 or 1 for every needle, got {hits!r}")
        by_depth[float(entry["depth"])] = hits
    return by_depth


def _needles_line(length: str, depth: float | None, methods: dict[str, Hits]) -> tuple[str, ...]:
    def hits(texts: Hits, among: Iterable[str]) -> list[int]:
        return [
            hit for text in among for place, own in texts[text].items() if depth in (None, place) for hit in own
        ]

    all_hits = {label: hits(texts, texts) for label, texts in methods.items()}
    cells = [length, "all" if depth is None else f"{100 * depth:.0f} %", str(max(map(len, all_hits.values())))]
    exact = methods.get("exact", {})
    for label, texts in methods.items():
        own = all_hits[label]
        cells.append(f"{100 * sum(own) / len(own):.1f} %" if own else MISSING)
        if label != "exact":
            both = [text for text in texts if text in exact]
            pairs = list(zip(hits(exact, both), hits(texts, both), strict=True))
            lost, gained = pairs.count((1, 0)), pairs.count((0, 1))
            points = f"{100 * (gained - lost) / len(pairs):+.1f}" if pairs else MISSING
            cells += [points, str(lost), str(gained)] if pairs else [MISSING] * 3
    return tuple(cells)


# Generation.


def generation_table(records: Sequence[Record]) -> Table:
    """Prefill and decode, how much of either is attention, memory, and agreement with exact attention."""
    rows = []
    for record in records:
        r = record.results
        speed, agreement = r["decode_tokens_per_second"], r.get("agreement")
        rows.append(
            (
                record.config["attention"],
                f"{r['prefill_seconds']:.2f} s ({r['prefill_tokens_per_second']:.0f} tok/s)",
                f"{r['prefill_attention_seconds']:.2f} s",
                MISSING if speed is None else f"{r['decode_seconds']:.2f} s ({speed:.1f} tok/s)",
                f"{r['decode_attention_seconds']:.2f} s",
                f"{r['cache']['bytes'] / 2**20:.1f} MiB",
                _same_tokens(r),
                MISSING if agreement is None else f"{100 * agreement:.1f} % of {r['compared']}",
            )
        )
    columns = (
        *("attention", "prefill", "attention part", "decode", "attention part", "cache"),
        *("tokens as exact", "after the exact text"),
    )
    config, last = records[0].config, records[-1].results
    prompt = [
        name if len(last["prefill_ran"]) == 1 else f"{name} in {n} layers"
        for name, n in last["prefill_ran"].items()
    ]
    notes = (
        _speed_note({record.config["attention"]: record.results for record in records}),
        f"prefill: {', '.join(prompt)}" if prompt else "",
        ", ".join(f"{count} times {path}" for path, count in last["decode_paths"].items()),
        _selection_note(last),
    )
    title = f"{config['model']}, {config['prompt_tokens']} prompt tokens"
    return Table(title, columns, tuple(rows), "; ".join(note for note in notes if note))


def _same_tokens(results: Values) -> str:
    same = results.get("same_tokens")
    return MISSING if same is None else f"{same} of {results['new_tokens']}"


def _speed_note(results: dict[str, Values]) -> str:
    """How many times as fast as exact attention; nothing where that did not run."""
    if "exact" not in results or "prescored" not in results:
        return ""
    exact, own = results["exact"], results["prescored"]
    words = []
    for phase in ("prefill", "decode"):
        speeds = [r[f"{phase}_tokens_per_second"] for r in (own, exact)]
        attention = [r[f"{phase}_attention_seconds"] for r in (exact, own)]
        if None not in speeds and min(attention) > 0 and min(speeds) > 0:
            ratio = attention[0] / attention[1]
            ratio *= 1 if phase == "prefill" else max(1, own["new_tokens"] - 1) / max(1, exact["new_tokens"] - 1)
            words.append(f"{phase} {speeds[0] / speeds[1]:.2f}x exact's speed (attention {ratio:.2f}x)")
    return ", ".join(words)


def _selection_note(results: Values) -> str:
    """Keys of the prompt that a decode step reads; neighbouring layers with the same number share an entry."""
    entries = [entry for entry in results["cache"]["layers"] if "selected" in entry]
    if not entries:
        routed = "routed step" in results["decode_paths"]
        return "every key is in the cache" if routed else "no layer made a selection: every key is read"
    groups = []
    for sizes, group in itertools.groupby(
        entries, key=lambda entry: (entry["selected"] + entry["centroids"], entry["selected_from"])
    ):
        numbers = [entry["layer"] for entry in group]
        span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        groups.append(f"layers {span}: {sizes[0]} of {sizes[1]}")
    return f"keys and centroids of the prompt: {', '.join(groups)}"


def error_table(record: Record) -> Table | None:
    """What layers with a tolerance read, and their error bounds; None without a tolerance."""
    bounds = record.results.get("error_bounds")
    if bounds is None:
        return None
    rows = tuple(
        (
            *(str(b["layer"]), b["phase"], as_text(b["reads"], 4), as_text(b["visible"], 4)),
            *(f"{b['error_estimate']:.4f}", f"{b['error_bound']:.4f}"),
            *(f"{100 * b[name]:.1f} %" for name in ("refined", "read_all")),
        )
        for b in sorted(bounds, key=lambda b: b["phase"])
    )
    columns = (
        *("layer", "phase", READS, "of", "error estimate", "error bound"),
        *("queries refined", "queries that read all"),
    )
    note = "last call of each phase: expected relative error of a query's output, and the bound of the worst query"
    return Table(
        f"within {record.config['config']['tolerance']:g} of exact attention", columns, rows, note, left=2
    )


def beam_table(records: Sequence[Record]) -> Table:
    """The best beam of a search, and its probability under exact attention."""
    rows = []
    for record in records:
        r = record.results
        scores = (f"{r['score']:.4f}", f"{r['exact_score']:.4f}")
        rows.append((record.config["attention"], f"{r['seconds']:.2f} s", *scores, _same_tokens(r)))
    columns = ("attention", "time", "log-probability", "under exact attention", "tokens as exact")
    config = records[0].config
    title = f"{config['model']}, {config['prompt_tokens']} prompt tokens, {config['beams']} beams"
    return Table(title, columns, tuple(rows), note="summed log-probability of the best beam, in nats")


# Pictures of the language experiments: loss against budget, against cost, against length.

_DASHED = (0, (4, 2))
_COLOURS = {"Exact": "#666666", "Local": "#999999"}
_LOSS = "loss, nats per token"


def plot_experiment(experiment: str | None, summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """The picture of an experiment; the comparison by cost where it has none of its own."""
    pictures: dict[str | None, Callable[[Sequence[Summary], str | Path, str], None]] = {
        "table1": _plot_bars,
        "appendix-a": _plot_budgets,
        "figure-glm3": _plot_budgets,
        "appendix-f": _plot_couplings,
        "appendix-i": _plot_budgets,
        "longest": _plot_lengths,
    }
    pictures.get(experiment, _plot_cost)(summaries, path, textwrap.fill(title, 90))


def _plot_bars(summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """Loss above exact, one bar per method, with the interval of the difference over documents."""
    shown = [s for s in summaries if not s.is_exact]
    with figure(path, (7.5, 1 + 0.38 * len(shown))) as (_, axes):
        means = [s.above_exact or 0.0 for s in shown]
        spreads = [s.above_exact_half_width or 0.0 for s in shown]
        bars(axes, [s.label for s in shown], means, spreads, [line_style(n)["color"] for n in range(len(shown))])
        axes.set(title=title, xlabel="loss above exact, nats per token")


def _plot_budgets(summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """Loss against top_k: a column of panels per scorer, a row per leaf rule, a line per number of samples."""
    cells = [s for s in summaries if "scorer" in s.axes]
    rules, scorers = _values(cells, "leaf_inclusive") or [False], _scorers(cells) or ["none"]
    samples = _values(cells, "sample_size")[::-1]
    shape = {"nrows": len(rules), "ncols": len(scorers), "squeeze": False, "sharex": True, "sharey": True}
    size = (max(5.0, 2.7 * len(scorers)), 2.5 * len(rules) + 1.1)
    with figure(path, size, **shape) as (drawn, grid):
        drawn.suptitle(title, x=0.01, ha="left")
        panels = [
            (axes, scorer, [s for s in cells if s.axes["leaf_inclusive"] == inclusive], inclusive)
            for row, inclusive in zip(grid, rules, strict=True)
            for axes, scorer in zip(row, scorers, strict=True)
        ]
        for axes, scorer, inside, inclusive in panels:
            _references(axes, summaries)
            for place, count in enumerate(samples):
                same = [s for s in inside if s.axes["sample_size"] == count]
                line = [s for s in same if s.axes["scorer"] != "none" and holds_for(s, scorer)]
                _budget_line(axes, line, f"selection, {count} samples", place, dashed=False)
                for s in same:
                    if s.axes["scorer"] == "none":
                        style = {"color": line_style(place)["color"], "linewidth": 1.1, "linestyle": _DASHED}
                        axes.axhline(s.loss, label=f"no selection (HyperAttention), {count} samples", **style)
            rule = "blocks as long as a leaf exact" if inclusive else "published leaf rule"
            axes.set_title(f"{scorer}\n{rule}", fontsize=8)
            powers_of_two(axes)
        for row in grid:
            row[0].set_ylabel(_LOSS)
        for axes in grid[-1]:
            axes.set_xlabel("top_k per block")
        top = _bound_losses(grid[0][0], summaries, factor=15)
        for axes, scorer, inside, _ in panels:
            _count_hidden(axes, [s for s in inside if holds_for(s, scorer)], top)
        handles, labels = grid[0][0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)


def _plot_couplings(summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """Loss against top_k under the corrected coupling, each artefact alone, and all three."""
    with figure(path, (7.4, 4.4)) as (_, axes):
        _references(axes, summaries)
        cells = [s for s in summaries if s.axes]
        names = dict.fromkeys((s.axes["coupling"], s.axes["scorer"]) for s in cells if s.axes["scorer"] != "none")
        for place, (coupling, scorer) in enumerate(names):
            own = [s for s in cells if s.axes["coupling"] == coupling and s.axes["scorer"] != "none"]
            line = [s for s in own if holds_for(s, scorer)]
            _budget_line(axes, line, f"{coupling}, {scorer}", place, dashed=scorer != "kmeans")
        axes.set(title=title, xlabel="top_k per block", ylabel=_LOSS)
        powers_of_two(axes)
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), fontsize=7)


def _plot_lengths(summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """Loss against the length of the context, one line per method."""
    with figure(path, (6.4, 4.2)) as (_, axes):
        for place, series in enumerate(dict.fromkeys(map(_series, summaries))):
            line = sorted((s for s in summaries if _series(s) == series), key=lambda s: s.n_tokens)
            axes.plot([s.n_tokens for s in line], [s.loss for s in line], label=series, **line_style(place))
        for length in {s.position_scaling["trained_length"] for s in summaries if s.position_scaling}:
            axes.axvline(length, color="#888888", linestyle=_DASHED, linewidth=1)
            axes.annotate("trained length", (length, axes.get_ylim()[1]), (3, -10), textcoords="offset points")
        axes.set(title=title, xlabel="tokens", ylabel=_LOSS)
        powers_of_two(axes)
        axes.legend(fontsize=8)


def _plot_cost(summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """Loss against reads per query (above) and attention time (below): equal cost is a vertical line.

    A column of panels per group of methods; what belongs to none, the default, is drawn in all.
    """
    methods = [s for s in summaries if not s.is_exact and not s.is_local]
    groups = [name for name in dict.fromkeys(s.axes.get("group") for s in methods) if name is not None] or [None]
    inside = [[s for s in methods if s.axes.get("group") in (group, None)] for group in groups]
    # other load stretches wall time, but not processor time
    processor = all(s.processor_seconds is not None for s in summaries)
    seconds = "processor_seconds" if processor else "attention_seconds"
    words = f"attention of one forward, scoring included, {'processor ' if processor else ''}seconds"
    costs = {"reads_per_query": "keys and centroids read per query", seconds: words}
    shape = {"nrows": 2, "ncols": len(groups), "squeeze": False, "sharex": "row", "sharey": True}
    with figure(path, (max(6.4, 4.1 * len(groups)), 7.4), **shape) as (drawn, grid):
        drawn.suptitle(title, x=0.01, ha="left")
        for row, (cost, label) in zip(grid, costs.items(), strict=True):
            for axes, group, own in zip(row, groups, inside, strict=True):
                _references(axes, summaries, cost)
                _cost_lines(axes, own, cost)
                axes.set(title=group or "")
                axes.set_xlabel(label, fontsize=8)
            row[0].set_ylabel(_LOSS)
            powers_of_two(row[0])
        top = _bound_losses(grid[0][0], summaries)
        for row in grid:
            for axes, own in zip(row, inside, strict=True):
                _count_hidden(axes, own, top)
        for axes in grid[1] if methods else []:
            axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)


def _cost_lines(axes: Any, methods: Sequence[Summary], cost: str) -> None:
    names = list(dict.fromkeys(map(_series, methods)))
    others = [name for name in names if name != "default"]
    for name in names:
        line = [s for s in methods if _series(s) == name and getattr(s, cost) is not None]
        # joined in the order of their budgets: a larger budget may cost less time
        line.sort(key=lambda s: (s.axes.get("budget", 0), float(getattr(s, cost))))
        style: Values = {"color": "#000000", "linewidth": 2.6, "zorder": 5, "marker": "o"}
        style = style if name == "default" else line_style(others.index(name))
        axes.plot([getattr(s, cost) for s in line], [s.loss for s in line], markersize=4, label=name, **style)


def _references(axes: Any, summaries: Sequence[Summary], cost: str | None = None) -> None:
    for kind, colour in _COLOURS.items():
        for length in sorted({s.n_tokens for s in summaries}):
            found = find(summaries, kind, length)
            if found is None:
                continue
            axes.axhline(found.loss, color=colour, linewidth=1, linestyle=":")
            # exact attention costs most and local least: each name stands where its mark is not
            end, side, shift = (0, "left", 3) if kind == "Exact" else (1, "right", -2)
            place = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "ha": side}
            axes.annotate(found.label, (end, found.loss), (shift, 2), fontsize=7, color=colour, **place)
            if cost is not None and getattr(found, cost):
                axes.plot([getattr(found, cost)], [found.loss], marker="s", color=colour, markersize=5)


def _bound_losses(axes: Any, summaries: Sequence[Summary], *, factor: float = 1.5) -> float | None:
    """Cut off losses worse than local-only by more than `factor` times the gap: they would flatten all others.

    Returns the upper end of the frame; None = everything is inside.
    """
    exact = min((s.loss for s in summaries if s.is_exact), default=None)
    local = max((s.loss for s in summaries if s.is_local), default=None)
    if exact is None or local is None or local <= exact:
        return None
    best, worst = (bound(s.loss for s in summaries) for bound in (min, max))
    top = local + factor * (local - exact)
    axes.set_ylim(best - 0.1 * (local - exact), min(worst + 0.05 * (local - exact), top))
    return top


def _count_hidden(axes: Any, drawn: Sequence[Summary], top: float | None) -> None:
    """Say in a panel how many of its points lie above the frame."""
    hidden = 0 if top is None else sum(s.loss > top for s in drawn)
    if hidden:
        words = f"{hidden} point{'s' if hidden > 1 else ''} above the frame"
        # outside of the frame, where there is no curve; the title is at the other end
        axes.annotate(words, (1, 1.01), xycoords="axes fraction", fontsize=7, ha="right", color="#666666")


def _budget_line(axes: Any, line: Sequence[Summary], label: str, place: int, *, dashed: bool) -> None:
    if line:
        points = sorted((s.axes["top_k"], s.loss) for s in line)
        style = line_style(place) | ({"linestyle": _DASHED} if dashed else {})
        axes.plot([p[0] for p in points], [p[1] for p in points], markersize=3.5, label=label, **style)


def _series(summary: Summary) -> str:
    return str(summary.axes.get("series", summary.label.split(",")[0]))
