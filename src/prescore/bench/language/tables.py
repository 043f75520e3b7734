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
from typing import Any, TypeVar

from prescore.bench.language.experiments import largest_block
from prescore.bench.language.held_out import HELD_OUT
from prescore.bench.language.retrieval import MANY_NEEDLES
from prescore.bench.plots import figure, line_style, powers_of_two
from prescore.bench.records import Record, Values
from prescore.bench.tables import MISSING, Table, as_text, number, percent, times

# two-sided 95 % points of Student's t for 1, 2, ... degrees of freedom
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
READS = "keys and centroids read"
_SCALED = "positions past the trained length by RoPE scaling (YaRN), without training"
_Key = TypeVar("_Key")
_Item = TypeVar("_Item")


def _group(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Items by key, in the order of first appearance."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _number(record: Record, name: str) -> float:
    return number(record, record.results.get(name), name)


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
    def published_perplexity(self) -> float:
        """As the paper's scripts compute it: the mean over documents of 2 to the loss in nats."""
        return statistics.fmean(2.0 ** min(loss, 1000.0) for loss in self.losses.values())


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
    fields = ("model", "dtype", "n_tokens", "layers", "method")
    own = [record for record in records if record.config.get("part") == "loss"]
    groups = _group(own, lambda record: repr([record.config[field] for field in fields]))
    summaries = [_summary(group) for group in groups.values()]
    return [_compare(summary, summaries) for summary in summaries]


def _summary(group: Sequence[Record]) -> Summary:
    config, method = group[0].config, group[0].config["method"]
    documents = _group(group, lambda record: f"{record.config['document']}@{record.config['digest']}")
    losses = {name: statistics.fmean(_number(r, "loss") for r in own) for name, own in documents.items()}
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
        losses=losses,
        reads_per_query=statistics.fmean(reads) if reads else None,
        attention_seconds=statistics.fmean(_number(record, "attention_seconds") for record in group),
        forward_seconds=statistics.fmean(_number(record, "forward_seconds") for record in group),
        processor_seconds=None if None in processor else statistics.fmean(processor),
        position_scaling=group[0].results.get("position_scaling"),
    )


def _compare(summary: Summary, summaries: Sequence[Summary]) -> Summary:
    """Add the comparison with exact and local attention at the same length."""
    same = [s for s in summaries if s.n_tokens == summary.n_tokens]
    exact = next((s for s in same if s.is_exact), None)
    if exact is None:
        return summary
    # of several local ones the one with the same leaves
    leaf = summary.config.get("min_seq_len", summary.config.get("chunk_size"))
    local = min((s for s in same if s.is_local), key=lambda s: s.config.get("chunk_size") != leaf, default=None)
    above = [summary.losses[n] - exact.losses[n] for n in summary.losses if n in exact.losses]
    gap = None
    shared = [n for n in summary.losses if local and n in exact.losses and n in local.losses]
    if local and shared:
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
    """Whether a line of a grid is one of that scorer's: its own, or one that keeps every key."""
    measured = summary.axes.get("scorer")
    return measured == scorer or ("none" not in (scorer, measured) and keeps_every_key(summary))


def keeps_every_key(summary: Summary) -> bool:
    """Whether the budget filters nothing, so that one scorer's line holds for all."""
    budget, leaf = summary.config.get("top_k"), summary.config.get("min_seq_len")
    if not budget or leaf is None:
        return False
    return bool(budget == 1.0 if isinstance(budget, float) else budget >= largest_block(summary.n_tokens, leaf))


def loss_table(summaries: Sequence[Summary], title: str, note: str = "") -> Table:
    """Loss, perplexity, share of the gap closed, reads, attention time and speed-up per method."""
    is_one = len({summary.n_tokens for summary in summaries}) == 1
    rows = []
    for s in summaries:
        label = s.label if is_one else f"{s.label} @ {s.n_tokens}"
        loss = f"{s.loss:.4f}" + ("" if s.half_width is None else f" ± {s.half_width:.3f}")
        cells = (label, loss, as_text(s.perplexity, 4), percent(s.gap_closed), as_text(s.reads_per_query, 4))
        rows.append((*cells, f"{s.attention_seconds:.2f} s", times(s.speed_up)))
    columns = ("method", "loss (nats)", "perplexity", "gap closed", READS, "attention", "speed-up")
    return Table(title, columns, tuple(rows), note)


def describe_run(summaries: Sequence[Summary], model: str) -> str:
    """Model, lengths, documents and layers of a run in one line."""
    documents = list(dict.fromkeys(name.split("@")[0] for summary in summaries for name in summary.losses))
    lengths = sorted({summary.n_tokens for summary in summaries})
    layers = sorted({str(summary.layers) for summary in summaries})
    shown = ", ".join(documents) if len(documents) <= 3 else f"{len(documents)} documents"
    scaled = f"; {_SCALED}" if any(summary.position_scaling for summary in summaries) else ""
    return f"{model}, {', '.join(map(str, lengths))} tokens of {shown}, layers: {', '.join(layers)}{scaled}"


# CSV: every number, and the paper's own columns.

Lines = list[list[Any]]
_NAMES = {
    "kmeans": "K-means",
    "kmedian": "K-median",
    "leverage": "Leverage",
    "gaussian-kmeans": "Gaussian kernel K-means",
    "none": "HyperAttention",
}
_NUMBERS = {
    "loss": "loss",
    "ci95_half_width": "half_width",
    "perplexity": "perplexity",
    "gap_closed": "gap_closed",
    "above_exact": "above_exact",
    "above_exact_ci95_half_width": "above_exact_half_width",
    "reads_per_query": "reads_per_query",
    "attention_seconds": "attention_seconds",
    "attention_processor_seconds": "processor_seconds",
    "speed_up": "speed_up",
    "forward_seconds": "forward_seconds",
}


def full_csv(summaries: Sequence[Summary]) -> str:
    """Every number of every line."""
    axes = list(dict.fromkeys(name for summary in summaries for name in summary.axes))
    documents = list(dict.fromkeys(name for summary in summaries for name in summary.losses))
    lines: Lines = [
        ["method", "type", "n_tokens", "layers", *axes, *_NUMBERS, *(f"loss {name}" for name in documents)]
    ]
    for s in summaries:
        line = [s.label, s.config.get("type"), s.n_tokens, s.layers, *(s.axes.get(name) for name in axes)]
        line += [getattr(s, field) for field in _NUMBERS.values()]
        lines.append(line + [s.losses.get(name) for name in documents])
    return _text(lines if summaries else [[]])


def paper_csv(summaries: Sequence[Summary]) -> str | None:
    """The columns of the paper's tables, PPL* by the inclusive leaf rule; None = no method is the paper's.

    PPL is e to the mean loss; `2^loss` and `2^loss*` are what the published scripts print.
    """
    cells = [s for s in summaries if "paper_top_k" in s.axes]
    counts = ("Context", "Coupling", "Method", "Top K", "Sample Size")
    lines: Lines = [[*counts, "PPL", "PPL*", "Top K / n", "Paper's Top K", "Paper's Sample Size"]]
    lines[0] = [*lines[0], "2^loss", "2^loss*"]
    for s in summaries:
        if s not in cells:
            line = [s.n_tokens, None, s.label, None, None, s.perplexity, None, None, None, None]
            lines.append([*line, s.published_perplexity, None])
    for (length, coupling), inside in _group(cells, lambda s: (s.n_tokens, s.axes["coupling"])).items():
        for scorer in dict.fromkeys(s.axes["scorer"] for s in inside):
            own = [s for s in inside if holds_for(s, scorer)]
            budgets = _group(own, lambda s: (-s.axes["paper_sample_size"], s.axes["paper_top_k"]))
            for (_, top_k), same in sorted(budgets.items()):
                ppl, axes = {s.axes["leaf_inclusive"]: s.perplexity for s in same}, same[0].axes
                line = [length, coupling, _NAMES.get(scorer, scorer), axes["top_k"], axes["sample_size"]]
                line += [ppl.get(False), ppl.get(True), axes["fraction"], top_k, axes["paper_sample_size"]]
                published = {s.axes["leaf_inclusive"]: s.published_perplexity for s in same}
                line += [published.get(False), published.get(True)]
                lines.append(line)
    return _text(lines) if cells else None


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
_Measured = dict[str, Record]
"""A window: the records of `exact` and of what is compared with it."""


def held_out_tables(records: Sequence[Record]) -> list[Table]:
    """One table for every variant of the default and kind of window, reported windows first.

    A line per text, and below the texts of a model and length one over all their windows.
    """
    own = [r for r in records if r.config.get("part") == "loss" and r.config.get("experiment") == HELD_OUT]
    methods = [record.config["method"] for record in own]
    labels = dict.fromkeys(method["label"] for method in methods if method["config"]["type"] == "Routed")
    # `reported` or `tuning`, from a name such as "novel.txt, reported window 2"
    kinds = _group(own, lambda record: str(record.config["document"]).rpartition(", ")[2].split(" ")[0])
    tables = []
    for kind, label in itertools.product(sorted(kinds), labels):
        windows = [window for window in _windows(kinds[kind], label) if "default" in window]
        if windows:
            tables.append(_held_out_table(windows, f"{label}, {kind} windows"))
    return tables


def _windows(records: Sequence[Record], label: str) -> Iterable[_Measured]:
    """What was measured on each window, for one variant of the default."""
    fields = ("model", "dtype", "layers", "document", "digest", "n_tokens")
    columns = {"Exact": "exact", "Routed": "default", "Baseline": "window", "Local": "local"}
    windows: dict[str, _Measured] = {}
    for record in records:
        method = record.config["method"]
        kind = method["config"]["type"]
        default = {"Routed": method["label"], "Baseline": method["axes"].get("compared_with")}.get(kind, label)
        if default == label:
            name = repr([*(record.config[field] for field in fields), record.seed])
            windows.setdefault(name, {})[columns[kind]] = record
    return windows.values()


def _held_out_table(windows: Sequence[_Measured], title: str) -> Table:
    def where(window: _Measured) -> tuple[str, str]:
        config, results = window["default"].config, window["default"].results
        scaled = "" if results.get("position_scaling") is None else " (YaRN)"
        return str(config["model"]), f"{config['n_tokens']}{scaled}"

    rows = []
    for place, inside in _group(windows, where).items():
        texts = _group(inside, lambda window: str(window["default"].config["document"]).rpartition(", ")[0])
        texts |= {"all": inside} if len(texts) > 1 else {}
        rows += [(*place, text, *_held_out_cells(own)) for text, own in texts.items()]
    columns = (
        *("model", "tokens", "text", "windows", "exact loss", *(f"{name} above" for name in _COMPARED)),
        *(READS, "exact s", *(f"{name} s" for name in _COMPARED), "speed-up"),
    )
    return Table(title, columns, tuple(rows), _HELD_OUT_NOTE, left=3)


def _held_out_cells(windows: Sequence[_Measured]) -> tuple[str, ...]:
    def mean(name: str, field: str) -> float | None:
        values = [_number(window[name], field) for window in windows if name in window]
        return statistics.fmean(values) if values else None

    def above(name: str) -> str:
        """The mean, and the worst of several; a window that is not measured yet leaves both open."""
        if not all(name in window and "exact" in window for window in windows):
            return MISSING
        losses = [_number(window[name], "loss") - _number(window["exact"], "loss") for window in windows]
        shown = f"{statistics.fmean(losses):+.4f}"
        return shown if len(losses) == 1 else f"{shown} ({max(losses):+.4f})"

    loss = mean("exact", "loss")
    exact, default, *_ = seconds = [mean(name, "attention_seconds") for name in ("exact", *_COMPARED)]
    return (
        str(len(windows)),
        MISSING if loss is None else f"{loss:.4f}",
        *(above(name) for name in _COMPARED),
        as_text(mean("default", "replaced_reads_per_query"), 4),
        *(MISSING if spent is None else f"{spent:.1f}" for spent in seconds),
        times(exact / default if exact and default else None),
    )


# Retrieval.

_RETRIEVAL_NOTE = (
    "found: share of answers whose every token is the likeliest one; loss: mean of the answers' tokens in nats; "
    "points: above exact attention on the same texts; lost: exact attention alone finds them, gained: the method "
    "alone; where exact attention fails, the model cannot do the task and the line says nothing about methods"
)


def retrieval_table(records: Sequence[Record]) -> Table:
    """A line for every task, length, depth and method, and one over all depths; exact attention comes first.

    Methods are compared with exact attention on texts that both have read.
    """
    own = [record for record in records if record.config.get("part") in ("retrieval", MANY_NEEDLES)]
    columns = ("task", "tokens", "depth", "method", "answers", "found", "loss", "points", "lost", "gained")
    rows = []
    tasks = _group(own, lambda record: (record.config.get("task", MANY_NEEDLES), record.config["n_tokens"]))
    for (task, length), some in tasks.items():
        answers: dict[str, _Answers] = {}
        for record in some:
            answers.setdefault(record.config["method"]["label"], {}).update(_answers(record))
        depths: list[float | None] = [*sorted({depth for texts in answers.values() for _, depth in texts})]
        depths += [None] if len(depths) > 1 else []
        labels = sorted(answers, key=lambda label: label != "exact")
        for depth, label in itertools.product(depths, labels):
            inside = {key: own for key, own in answers[label].items() if depth in (None, key[1])}
            at = "all" if depth is None else f"{100 * depth:.0f} %"
            exact = {} if label == "exact" else answers.get("exact", {})
            rows.append((task, str(length), at, label, *_retrieval_cells(inside, exact)))
    is_scaled = any(record.results.get("position_scaling") for record in own)
    title = f"Retrieval; {_SCALED}" if is_scaled else "Retrieval"
    return Table(title, columns, tuple(rows), _RETRIEVAL_NOTE, left=4)


_Answers = dict[tuple[str, float], tuple[list[int], float]]
"""By text and depth a 1 or 0 for every answer, and their mean loss."""


def _answers(record: Record) -> _Answers:
    # what identifies a text, whatever the method; rows of many needles are one text, others all texts of a depth
    name = repr([*sorted((k, v) for k, v in record.config.items() if k != "method"), record.seed])
    if "by_depth" not in record.results:
        return {(name, float(record.config["depth"])): (record.results["hits"], record.results["answer_loss"])}
    answers: _Answers = {}
    for entry in record.results["by_depth"]:
        hits = entry.get("hits")
        if not isinstance(hits, list) or len(hits) != entry.get("n_needles"):
            raise ValueError(f"record {record.key} must have a 0 or 1 for every needle, got {hits!r}")
        answers[name, float(entry["depth"])] = (hits, entry["answer_loss"])
    return answers


def _retrieval_cells(answers: _Answers, exact: _Answers) -> tuple[str, ...]:
    hits = [hit for own, _ in answers.values() for hit in own]
    if not hits:
        return ("0", *[MISSING] * 5)
    loss = sum(len(own) * loss for own, loss in answers.values()) / len(hits)
    cells = (str(len(hits)), f"{100 * sum(hits) / len(hits):.1f} %", f"{loss:.2f}")
    both = [(exact[key][0], answers[key][0]) for key in answers if key in exact]
    pairs = [pair for theirs, own in both for pair in zip(theirs, own, strict=True)]
    if not pairs:
        return (*cells, *[MISSING] * 3)
    lost, gained = pairs.count((1, 0)), pairs.count((0, 1))
    return (*cells, f"{100 * (gained - lost) / len(pairs):+.1f}", str(lost), str(gained))


# RULER.

_RULER_NOTE = (
    "score: share of the right words in the answers, in per cent; interval: 95 %, Wilson's; points: above exact "
    "attention on the same samples, with Student's 95 % interval; lost, gained: samples with a lower or higher "
    "score than with exact attention; solved: tasks on which exact attention scores at least 50 %, the others say "
    "nothing about methods; solved and all have the samples that every method has read"
)
SOLVED = 0.5


def ruler_table(records: Sequence[Record]) -> Table:
    """A line for every model, length, task and method, then the tasks that exact attention solves, then all."""
    own = [record for record in records if record.config.get("part") == "ruler"]
    columns = ("model", "tokens", "task", "method", "samples", "score", "interval", "points", "lost", "gained")
    rows, losses = [], []
    for (model, length), some in _group(own, lambda r: (r.config["model"], r.config["n_tokens"])).items():
        scores: dict[str, dict[str, _Scores]] = {}
        reads: dict[str, list[float]] = {}
        for record in some:
            label, sample = _ruler_label(record), (record.config["digest"], record.seed)
            scores.setdefault(record.config["task"], {}).setdefault(label, {})[sample] = _number(record, "score")
            if record.results.get("prompt_reads_per_query") is not None:
                reads.setdefault(label, []).append(_number(record, "prompt_reads_per_query"))
        labels = sorted(dict.fromkeys(label for task in scores.values() for label in task), key=_exact_first)
        solved = [task for task, by in scores.items() if by.get("exact") and _mean(by["exact"]) >= SOLVED]
        groups = {**{task: [task] for task in scores}, "solved": solved, "all": list(scores)}
        for (name, tasks), label in itertools.product(groups.items(), labels):
            by_label = {each: _joined(scores[task].get(each, {}) for task in tasks) for each in labels}
            inside, exact = by_label[label], {} if label == "exact" else by_label.get("exact", {})
            if name not in scores:  # over several tasks, what every method has read
                inside = {
                    key: value for key, value in inside.items() if all(key in own for own in by_label.values())
                }
            if inside:
                rows.append((str(model), str(length), name, label, *_ruler_cells(inside, exact)))
            if label in reads and name in solved:
                losses.append((_points(inside, exact), f"{name} at {length} tokens with {label}"))
    worst = min(losses, default=(0.0, ""))
    lost = (
        f"worst of them: {worst[1]}, {worst[0]:+.1f} points" if worst[0] < 0 else "no method loses points on one"
    )
    note = f"{_RULER_NOTE}; {lost}" if losses else _RULER_NOTE
    is_scaled = any(record.results.get("position_scaling") for record in own)
    return Table(f"RULER; {_SCALED}" if is_scaled else "RULER", columns, tuple(rows), note, left=4)


_Scores = dict[tuple[str, int | None], float]
"""Scores by prompt and seed."""


def _exact_first(label: str) -> bool:
    return label != "exact"


def _ruler_label(record: Record) -> str:
    method = record.config["method"]
    beside = method["axes"].get("compared_with")
    return str(method["label"]) if beside is None else f"{method['label']} as wide as {beside}"


def _joined(some: Iterable[_Scores]) -> _Scores:
    return {key: value for scores in some for key, value in scores.items()}


def _mean(scores: _Scores) -> float:
    return statistics.fmean(scores.values())


def _points(scores: _Scores, exact: _Scores) -> float:
    return 100 * statistics.fmean([value - exact[key] for key, value in scores.items() if key in exact] or [0.0])


def _ruler_cells(scores: _Scores, exact: _Scores) -> tuple[str, ...]:
    low, high = wilson_interval(_mean(scores), len(scores))
    cells = (str(len(scores)), f"{100 * _mean(scores):.1f} %", f"{100 * low:.0f} to {100 * high:.0f}")
    above = [value - exact[key] for key, value in scores.items() if key in exact]
    if not above:
        return (*cells, *[MISSING] * 3)
    half = confidence_half_width(above)  # differences that are all the same say nothing about it
    points = f"{_points(scores, exact):+.1f}" + (f" ± {100 * half:.1f}" if half else "")
    return (*cells, points, str(sum(each < 0 for each in above)), str(sum(each > 0 for each in above)))


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share; for scores between 0 and 1 it is wider than needed."""
    square = 1.96**2 / count
    middle = (mean + square / 2) / (1 + square)
    half = math.sqrt(square * (mean * (1 - mean) + square / 4)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


# Generation.


def generation_table(records: Sequence[Record]) -> Table:
    """Prefill and decode, how much of either is attention, memory, and agreement with exact attention.

    Of a beam search, the best beam and its probability under exact attention.
    """
    config, last = records[0].config, records[-1].results
    results = {record.config["attention"]: record.results for record in records}
    title = f"{config['model']}, {config['prompt_tokens']} prompt tokens"
    if config["beams"] > 1:
        columns = ("attention", "time", "log-probability", "under exact attention", "tokens as exact")
        rows = [
            (name, f"{r['seconds']:.2f} s", f"{r['score']:.4f}", f"{r['exact_score']:.4f}", _same_tokens(r))
            for name, r in results.items()
        ]
        note = "summed log-probability of the best beam, in nats"
        return Table(f"{title}, {config['beams']} beams", columns, tuple(rows), note)
    phases = ("prefill", "attention part", "decode", "attention part")
    names = ("attention", *phases, "cache", "tokens as exact", "after the exact text")
    lines = []
    for name, r in results.items():
        agreement = f"{100 * r['agreement']:.1f} % of {r['compared']}" if "agreement" in r else MISSING
        cells = (*_phase(r, "prefill"), *_phase(r, "decode"))
        lines.append((name, *cells, f"{r['cache']['bytes'] / 2**20:.1f} MiB", _same_tokens(r), agreement))
    ran = last["prefill_ran"]
    prompt = ", ".join(name if len(ran) == 1 else f"{name} in {n} layers" for name, n in ran.items())
    notes = (
        _speed_note(results),
        f"prefill: {prompt}" if prompt else "",
        ", ".join(f"{count} times {path}" for path, count in last["decode_paths"].items()),
        _selection_note(last),
    )
    return Table(title, names, tuple(lines), "; ".join(note for note in notes if note))


def _phase(results: Values, phase: str) -> tuple[str, str]:
    """Time and speed of a phase, and its time in attention."""
    seconds, attention = results[f"{phase}_seconds"], results[f"{phase}_attention_seconds"]
    speed = results[f"{phase}_tokens_per_second"]
    shown = MISSING if speed is None else f"{seconds:.2f} s ({as_text(speed)} tok/s)"
    return shown, f"{attention:.2f} s"


def _same_tokens(results: Values) -> str:
    return f"{results['same_tokens']} of {results['new_tokens']}" if "same_tokens" in results else MISSING


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
    for size, group in itertools.groupby(
        entries, key=lambda entry: f"{entry['selected'] + entry['centroids']} of {entry['selected_from']}"
    ):
        numbers = [entry["layer"] for entry in group]
        groups.append(f"layers {'-'.join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))}: {size}")
    return f"keys and centroids of the prompt: {', '.join(groups)}"


# Pictures of the language experiments: loss against budget, against cost.

_GRIDS = ("appendix-a", "figure-glm3", "appendix-i", "appendix-f")
_MAIN_LINE: Values = {"color": "#000000", "linewidth": 2.6, "zorder": 5, "marker": "o"}
_COLOURS = {"Exact": "#666666", "Local": "#999999"}
_Lines = dict[str, list[Summary]]
"""By label the points of a line."""


def plot_experiment(experiment: str | None, summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """Loss against what the experiment varies; against cost where it varies nothing else.

    A row of panels for every cost, in each a panel per leaf rule. Equal cost is a vertical line.
    """
    factor = math.inf  # how far losses may lie above local-only, see `_bound_losses`
    if experiment in _GRIDS:
        panels, costs = _grid_lines(summaries), {"top_k per block": "budget"}
        factor = math.inf if experiment == "appendix-f" else 15
    else:
        methods = [s for s in summaries if not s.is_exact and not s.is_local]
        panels, costs = {"": _group(methods, _series)}, {"keys and centroids read per query": "reads_per_query"}
        # other load stretches wall time, but not processor time
        processor = all(s.processor_seconds is not None for s in summaries)
        words = f"attention of one forward, {'processor ' if processor else ''}seconds"
        costs[words] = "processor_seconds" if processor else "attention_seconds"
        factor = math.inf if experiment == "table1" else 1.5
    size = (max(6.4, 3.4 * len(panels)), 2.8 * len(costs) + 1.6)
    shape = {"nrows": len(costs), "ncols": len(panels), "squeeze": False, "sharex": "row", "sharey": True}
    with figure(path, size, **shape) as (drawn, all_axes):
        drawn.suptitle(textwrap.fill(title, 90), x=0.01, ha="left")
        top = _bound_losses(all_axes[0][0], summaries, factor)
        for row, (words, cost) in zip(all_axes, costs.items(), strict=True):
            row[0].set_ylabel("loss, nats per token")
            for axes, (name, lines) in zip(row, panels.items(), strict=True):
                _draw_references(axes, summaries, cost)
                _draw_lines(axes, lines, cost, top)
                axes.set_title(name, fontsize=8)
                axes.set_xlabel(words, fontsize=8)
            powers_of_two(row[0])
        if len({tuple(lines) for lines in panels.values()}) == 1:
            labels = all_axes[-1][0].get_legend_handles_labels()
            drawn.legend(*labels, loc="outside lower center", ncols=2, fontsize=8)
        else:
            for axes in all_axes[-1]:
                axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)


def _grid_lines(summaries: Sequence[Summary]) -> dict[str, _Lines]:
    """A panel per leaf rule, a line per scorer, number of samples and coupling."""
    rules = {False: "published leaf rule", True: "blocks as long as a leaf exact"}
    panels = {}
    cells = [s for s in summaries if "scorer" in s.axes]
    for inclusive, inside in sorted(_group(cells, lambda s: bool(s.axes["leaf_inclusive"])).items()):
        lines = {}
        grids = _group(inside, lambda s: (s.axes["coupling"], -s.axes["sample_size"]))
        for scorer, ((coupling, count), same) in itertools.product(
            dict.fromkeys(s.axes["scorer"] for s in inside), sorted(grids.items())
        ):
            if scorer in {s.axes["scorer"] for s in same}:
                words = [_NAMES.get(scorer, scorer), f"{-count} samples"]
                words += [coupling] if coupling != "corrected" else []
                line = [s for s in same if holds_for(s, scorer)]
                lines[", ".join(words)] = sorted(line, key=lambda s: int(s.axes["top_k"]))
        panels[rules[inclusive]] = lines
    return panels


def _series(summary: Summary) -> str:
    return str(summary.axes.get("series", summary.label.split(",")[0]))


def _cost(summary: Summary, cost: str) -> float | None:
    value = summary.axes["top_k"] if cost == "budget" else getattr(summary, cost)
    return None if value is None else float(value)


def _draw_lines(axes: Any, lines: _Lines, cost: str, top: float) -> None:
    """One line per method; says how many points lie above the frame."""
    others, hidden = [label for label in lines if label != "default"], 0
    for label, line in lines.items():
        style = _MAIN_LINE if label == "default" else line_style(others.index(label))
        hidden += sum(s.loss > top for s in line)
        points = [(x, s.loss) for s in line for x in [_cost(s, cost)] if x is not None]
        if points and points[0][0] == 0:  # without a selection there is no budget
            axes.axhline(points[0][1], label=label, color=style["color"], linewidth=1.1, linestyle=(0, (4, 2)))
        else:
            axes.plot([x for x, _ in points], [loss for _, loss in points], markersize=4, label=label, **style)
    if hidden:
        words = f"{hidden} point{'s' if hidden > 1 else ''} above the frame"
        # outside of the frame, where there is no curve; the title is at the other end
        axes.annotate(words, (1, 1.01), xycoords="axes fraction", fontsize=7, ha="right", color="#666666")


def _draw_references(axes: Any, summaries: Sequence[Summary], cost: str) -> None:
    """Exact and local attention, with a mark at their cost."""
    for kind, colour in _COLOURS.items():
        for s in [s for s in summaries if s.config.get("type") == kind][:1]:
            axes.axhline(s.loss, color=colour, linewidth=1, linestyle=":")
            # exact attention costs most and local least: each name stands where its mark is not
            end, side, shift = (0, "left", 3) if kind == "Exact" else (1, "right", -2)
            place = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "ha": side}
            axes.annotate(s.label, (end, s.loss), (shift, 2), fontsize=7, color=colour, **place)
            if cost != "budget" and _cost(s, cost):
                axes.plot([_cost(s, cost)], [s.loss], marker="s", color=colour, markersize=5)


def _bound_losses(axes: Any, summaries: Sequence[Summary], factor: float) -> float:
    """Cut off losses worse than local-only by more than `factor` times the gap: they would flatten all others.

    Returns the upper end of the frame; infinity = everything is inside.
    """
    exact = min((s.loss for s in summaries if s.is_exact), default=math.nan)
    local = max((s.loss for s in summaries if s.is_local), default=math.nan)
    top = local + factor * (local - exact)
    losses = [s.loss for s in summaries if math.isfinite(s.loss)]
    if not (exact < local and top < max(losses)):
        return math.inf
    axes.set_ylim(min(losses) - 0.1 * (local - exact), top)
    return top
