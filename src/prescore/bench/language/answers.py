"""Records of `prescore retrieval` and `prescore ruler` as tables."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence

from prescore.bench.language.retrieval import MANY_NEEDLES
from prescore.bench.language.tables import SCALED, confidence_half_width, group_by, result
from prescore.bench.records import Record
from prescore.bench.tables import MISSING, Table

_RETRIEVAL_NOTE = (
    "found: share of answers whose every token is the likeliest one; loss: mean of the answers' tokens in nats; "
    "points: above exact attention on the same texts; lost: exact attention alone finds them, gained: the method "
    "alone; where exact attention fails, the model cannot do the task and the line says nothing about methods"
)


def retrieval_table(records: Sequence[Record]) -> Table:
    """A line for every task, length, depth and method, and one over all depths; exact attention comes first.

    Methods are compared with exact attention on texts that both have read.
    """
    chosen = [record for record in records if record.config.get("part") in ("retrieval", MANY_NEEDLES)]
    columns = ("task", "tokens", "depth", "method", "answers", "found", "loss", "points", "lost", "gained")
    rows = []
    tasks = group_by(chosen, lambda record: (record.config.get("task", MANY_NEEDLES), record.config["n_tokens"]))
    for (task, length), some in tasks.items():
        answers: dict[str, _Answers] = {}
        for record in some:
            answers.setdefault(record.config["method"]["label"], {}).update(_answers(record))
        depths: list[float | None] = [*sorted({depth for texts in answers.values() for _, depth in texts})]
        depths += [None] if len(depths) > 1 else []
        labels = sorted(answers, key=lambda label: label != "exact")
        for depth, label in itertools.product(depths, labels):
            inside = {key: answer for key, answer in answers[label].items() if depth in (None, key[1])}
            at = "all" if depth is None else f"{100 * depth:.0f} %"
            exact = {} if label == "exact" else answers.get("exact", {})
            rows.append((task, str(length), at, label, *_retrieval_cells(inside, exact)))
    is_scaled = any(record.results.get("position_scaling") for record in chosen)
    title = f"Retrieval; {SCALED}" if is_scaled else "Retrieval"
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
    hits = [hit for hits, _ in answers.values() for hit in hits]
    if not hits:
        return ("0", *[MISSING] * 5)
    loss = sum(len(hits_of) * loss for hits_of, loss in answers.values()) / len(hits)
    cells = (str(len(hits)), f"{100 * sum(hits) / len(hits):.1f} %", f"{loss:.2f}")
    both = [(exact[key][0], answers[key][0]) for key in answers if key in exact]
    pairs = [pair for theirs, ours in both for pair in zip(theirs, ours, strict=True)]
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
    chosen = [record for record in records if record.config.get("part") == "ruler"]
    columns = ("model", "tokens", "task", "method", "samples", "score", "interval", "points", "lost", "gained")
    rows, losses = [], []
    for (model, length), some in group_by(chosen, lambda r: (r.config["model"], r.config["n_tokens"])).items():
        scores = _by_task(some)
        routed = {_ruler_label(r) for r in some if r.results.get("prompt_reads_per_query") is not None}
        labels = sorted(dict.fromkeys(label for task in scores.values() for label in task), key=_exact_first)
        solved = [task for task, by in scores.items() if by.get("exact") and _mean(by["exact"]) >= SOLVED]
        groups = {**{task: [task] for task in scores}, "solved": solved, "all": list(scores)}
        for (name, tasks), label in itertools.product(groups.items(), labels):
            by_label = {label: _joined(scores[task].get(label, {}) for task in tasks) for label in labels}
            # over several tasks, what every method has read
            inside = by_label[label] if name in scores else _in_all(by_label[label], by_label.values())
            exact = {} if label == "exact" else by_label.get("exact", {})
            if inside:
                rows.append((str(model), str(length), name, label, *_ruler_cells(inside, exact)))
            if label in routed and name in solved:
                losses.append((_points(inside, exact), f"{name} at {length} tokens with {label}"))
    worst = min(losses, default=(0.0, ""))
    lost = (
        f"worst of them: {worst[1]}, {worst[0]:+.1f} points" if worst[0] < 0 else "no method loses points on one"
    )
    note = f"{_RULER_NOTE}; {lost}" if losses else _RULER_NOTE
    is_scaled = any(record.results.get("position_scaling") for record in chosen)
    return Table(f"RULER; {SCALED}" if is_scaled else "RULER", columns, tuple(rows), note, left=4)


_Scores = dict[tuple[str, int | None], float]
"""Scores by prompt and seed."""


def _by_task(records: Sequence[Record]) -> dict[str, dict[str, _Scores]]:
    """Scores by task and method."""
    scores: dict[str, dict[str, _Scores]] = {}
    for record in records:
        by_method = scores.setdefault(record.config["task"], {})
        of_method = by_method.setdefault(_ruler_label(record), {})
        of_method[record.config["digest"], record.seed] = result(record, "score")
    return scores


def _in_all(scores: _Scores, by_method: Iterable[_Scores]) -> _Scores:
    """The scores of the samples that all methods have."""
    return {sample: score for sample, score in scores.items() if all(sample in others for others in by_method)}


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
    return (
        *cells,
        points,
        str(sum(difference < 0 for difference in above)),
        str(sum(difference > 0 for difference in above)),
    )


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share; for scores between 0 and 1 it is wider than needed."""
    square = 1.96**2 / count
    middle = (mean + square / 2) / (1 + square)
    half = math.sqrt(square * (mean * (1 - mean) + square / 4)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)
