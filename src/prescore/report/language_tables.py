"""Language experiments as tables: one line per method, and the paper's own shapes as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prescore.records import Record
from prescore.report.language_summary import Summary, holds_for, keeps_every_key
from prescore.report.tables import MISSING, Table, as_text

_NAMES = {
    "kmeans": "K-means",
    "kmedian": "K-median",
    "leverage": "Leverage",
    "gaussian-kmeans": "Gaussian kernel K-means",
    "none": "none",
}
_SCALED = "positions past the trained length by RoPE scaling (YaRN), without training"
Lines = list[list[Any]]


def loss_table(summaries: Sequence[Summary], title: str, note: str = "") -> Table:
    """Loss, perplexity, share of the gap closed, rows, attention time and speed-up per method."""
    lengths = {summary.n_tokens for summary in summaries}
    rows = []
    for summary in summaries:
        label = summary.label if len(lengths) == 1 else f"{summary.label} @ {summary.n_tokens}"
        rows.append(
            (
                label,
                f"{summary.loss:.4f}" + _plus_minus(summary.half_width),
                as_text(summary.perplexity, 4),
                percent(summary.gap_closed),
                as_text(summary.rows_per_query, 4),
                f"{summary.attention_seconds:.2f} s",
                times(summary.speed_up),
            )
        )
    return Table(
        title=title,
        columns=("method", "loss (nats)", "perplexity", "gap closed", "rows/query", "attention", "speed-up"),
        rows=tuple(rows),
        note=note,
    )


def describe_run(summaries: Sequence[Summary], model: str) -> str:
    """What the figures are over, in one line."""
    documents = list(dict.fromkeys(name.split("@")[0] for summary in summaries for name in summary.losses))
    lengths = sorted({summary.n_tokens for summary in summaries})
    layers = sorted({str(summary.layers) for summary in summaries})
    shown = ", ".join(documents) if len(documents) <= 3 else f"{len(documents)} documents"
    scaled = any(summary.position_scaling for summary in summaries)
    extra = f"; {_SCALED}" if scaled else ""
    return f"{model}, {', '.join(map(str, lengths))} tokens of {shown}, layers: {', '.join(layers)}{extra}"


def retrieval_table(records: Sequence[Record]) -> Table:
    """Accuracy by method, task, length and depth; exact attention first, since it bounds what can be asked."""
    found = [record for record in records if record.config.get("part") == "retrieval"]
    cells = list(dict.fromkeys((r.config["task"], r.config["n_tokens"], r.config["depth"]) for r in found))
    labels = list(dict.fromkeys(record.config["method"]["label"] for record in found))
    values = {
        (r.config["method"]["label"], r.config["task"], r.config["n_tokens"], r.config["depth"]): r.figures
        for r in found
    }
    rows = []
    for label in labels:
        figures = [values.get((label, *cell)) for cell in cells]
        shown = [
            MISSING if f is None else f"{100 * f['accuracy']:.0f} % ({f['answer_loss']:.2f})" for f in figures
        ]
        rows.append((label, *shown))
    scaled = any(record.figures.get("position_scaling") for record in found)
    return Table(
        title=f"Retrieval; {_SCALED}" if scaled else "Retrieval",
        columns=("method", *(f"{task} {length} at {100 * depth:.0f} %" for task, length, depth in cells)),
        rows=tuple(rows),
        note="share of answers whose every token is the likeliest one (mean loss of the answer's tokens in nats); "
        "where exact attention fails, the model cannot do the task and the column says nothing about methods",
    )


def full_csv(summaries: Sequence[Summary]) -> str:
    """Every figure of every line."""
    axes = list(dict.fromkeys(name for summary in summaries for name in summary.axes))
    documents = list(dict.fromkeys(name for summary in summaries for name in summary.losses))
    head = ["method", "kind", "n_tokens", "layers", *axes, "loss", "ci95_half_width", "perplexity", "gap_closed"]
    head += ["above_exact", "above_exact_ci95_half_width", "rows_per_query"]
    head += ["attention_seconds", "attention_processor_seconds", "speed_up", "forward_seconds"]
    head += [f"loss {document}" for document in documents]
    lines: Lines = [head]
    for s in summaries:
        lines.append(
            [s.label, s.kind, s.n_tokens, s.layers, *(s.axes.get(name) for name in axes)]
            + [s.loss, s.half_width, s.perplexity, s.gap_closed, s.above_exact, s.above_exact_half_width]
            + [s.rows_per_query, s.attention_seconds, s.processor_seconds, s.speed_up, s.forward_seconds]
            + [s.losses.get(document) for document in documents]
        )
    return _text(lines)


def paper_csv(experiment: str, summaries: Sequence[Summary]) -> str | None:
    """The experiment in the paper's shape, perplexity as e to the loss in nats; None = the paper has none."""
    shapes: dict[str, Callable[[Sequence[Summary]], Lines]] = {
        "table1": _table1,
        "appendix-a": _appendix_a,
        "figure-glm3": _appendix_a,
        "appendix-f": _appendix_f,
        "appendix-i": _appendix_i,
        "longest": _longest,
    }
    return _text(shapes[experiment](summaries)) if experiment in shapes else None


def percent(value: float | None) -> str:
    """A share in whole per cent, `worse` where it is below nothing."""
    if value is None or math.isnan(value):
        return MISSING
    shown = round(100 * value)
    return f"{shown} %" if shown >= 0 else f"worse ({shown} %)"


def times(value: float | None) -> str:
    """A speed-up."""
    return MISSING if value is None else f"{value:.2f}x"


def _plus_minus(half_width: float | None) -> str:
    return "" if half_width is None else f" ± {half_width:.3f}"


def _table1(summaries: Sequence[Summary]) -> Lines:
    lines: Lines = [["Method", "Pre-score", "Blockwise Opt.", "PPL", "Loss", "Gap closed"]]
    for s in summaries:
        if s.kind == "local":
            continue
        pre = s.axes.get("scorer", "none") != "none"
        name = "Exact" if s.kind == "exact" else "K-means+Hyper" if pre else "HyperAttention"
        lines.append([name, pre, bool(s.axes.get("blockwise")), s.perplexity, s.loss, s.gap_closed])
    return lines


def _appendix_a(summaries: Sequence[Summary]) -> Lines:
    lines: Lines = [
        ["Method", "Top K", "Sample Size", "PPL", "PPL*", "Top K / n", "Paper's Top K", "Paper's Sample Size"]
    ]
    for scorer in _scorers(summaries):
        cells = [s for s in summaries if holds_for(s, scorer)]
        for samples in _ordered(s.axes["paper_sample_size"] for s in cells)[::-1]:
            for top_k in _ordered(s.axes["paper_top_k"] for s in cells):
                same = [
                    s for s in cells if (s.axes["paper_top_k"], s.axes["paper_sample_size"]) == (top_k, samples)
                ]
                values = {s.axes["blockwise"]: s.perplexity for s in same}
                if same:
                    one = same[0].axes
                    lines.append([_NAMES.get(scorer, scorer), one["top_k"], one["sample_size"]])
                    lines[-1] += [values.get(False), values.get(True), one["fraction"], top_k, samples]
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
    samples = _ordered(s.axes["paper_sample_size"] for s in cells)[::-1]
    shown = {s.axes["paper_sample_size"]: s.axes["sample_size"] for s in cells}
    lines: Lines = [["Top K", *(f"PPL, Sample Size = {shown[n]}" for n in samples), "Paper's Top K"]]
    for top_k in _ordered(s.axes["paper_top_k"] for s in cells):
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
    found = dict.fromkeys(s.axes["scorer"] for s in summaries if s.axes.get("scorer"))
    return [scorer for scorer in found if scorer != "none"]


def _ordered(values: Iterable[int]) -> list[int]:
    return sorted(set(values))


def _text(lines: Lines) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()
