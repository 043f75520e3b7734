"""Records of `prescore perplexity` as a table and a CSV file."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from prescore.bench.records import Record, Values
from prescore.bench.tables import Table, as_text, number, percent, times

# two-sided 95 % points of Student's t for 1, 2, ... degrees of freedom
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
READS = "keys and centroids read"
SCALED = "positions past the trained length by RoPE scaling (YaRN), without training"
_Key = TypeVar("_Key")
_Item = TypeVar("_Item")


def group_by(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Items by key, in the order of first appearance."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def result(record: Record, name: str) -> float:
    """A result as a number."""
    return number(record, record.results.get(name), name)


@dataclass(frozen=True)
class Summary:
    """One method at one length, over documents and seeds.

    Attributes:
        label, config, axes: The method.
        n_tokens, layers: Where it was measured.
        runs: Loss in nats by document and seed.
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
    runs: dict[tuple[str, int | None], float]
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
    def losses(self) -> dict[str, float]:
        """Loss in nats by document, mean over seeds."""
        return _means(self.runs, 0)

    @property
    def loss(self) -> float:
        """Mean over documents, nats per token."""
        return statistics.fmean(self.losses.values())

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval over documents or over seeds, the wider one; None for one run."""
        return half_width(self.runs)

    @property
    def perplexity(self) -> float:
        """E to the mean loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def published_perplexity(self) -> float:
        """As the paper's scripts compute it: the mean over documents of 2 to the loss in nats."""
        return statistics.fmean(2.0 ** min(loss, 1000.0) for loss in self.losses.values())


def half_width(runs: Mapping[tuple[str, int | None], float]) -> float | None:
    """Half of the 95 % interval of the mean over documents x seeds; None for one run.

    The wider of two: over documents (each a mean over seeds), and over seeds (each a mean over documents).
    """
    widths = [confidence_half_width(list(_means(runs, part).values())) for part in (0, 1)]
    return max((width for width in widths if width is not None), default=None)


def _means(runs: Mapping[tuple[str, int | None], float], part: int) -> dict[Any, float]:
    """Means by document (place 0) or by seed (place 1)."""
    groups = group_by(runs, lambda key: key[part])
    return {name: statistics.fmean(runs[key] for key in keys) for name, keys in groups.items()}


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
    losses = [record for record in records if record.config.get("part") == "loss"]
    groups = group_by(losses, lambda record: repr([record.config[field] for field in fields]))
    summaries = [_summary(group) for group in groups.values()]
    return [_compare(summary, summaries) for summary in summaries]


def _summary(group: Sequence[Record]) -> Summary:
    config, method = group[0].config, group[0].config["method"]
    runs = {(f"{r.config['document']}@{r.config['digest']}", r.seed): result(r, "loss") for r in group}
    reads = [result(r, "reads_per_query") for r in group if r.results.get("reads_per_query", "") is not None]
    processor: list[Any] = [record.results.get("attention_processor_seconds") for record in group]
    # records of schema 1 were fitted on a sample, which today's configurations are not
    is_sampled = method["config"].get("scorer", {}).get("fit_size") == "auto"
    return Summary(
        label=f"{method['label']} (sampled fit)" if is_sampled else method["label"],
        config=method["config"],
        axes=method["axes"],
        n_tokens=config["n_tokens"],
        layers=config["layers"],
        runs=runs,
        reads_per_query=statistics.fmean(reads) if reads else None,
        attention_seconds=statistics.fmean(result(record, "attention_seconds") for record in group),
        forward_seconds=statistics.fmean(result(record, "forward_seconds") for record in group),
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
    # exact attention has one seed
    above = {key: loss - exact.losses[key[0]] for key, loss in summary.runs.items() if key[0] in exact.losses}
    gap = None
    shared = [n for n in summary.losses if local and n in exact.losses and n in local.losses]
    if local and shared:
        floor, best, loss = (statistics.fmean(s.losses[n] for n in shared) for s in (local, exact, summary))
        # a model that reads no better with its far context than without has no gap to close
        gap = None if floor <= best else (floor - loss) / (floor - best)
    return replace(
        summary,
        gap_closed=gap,
        above_exact=statistics.fmean(above.values()) if above else None,
        above_exact_half_width=half_width(above),
        speed_up=exact.attention_seconds / summary.attention_seconds if summary.attention_seconds > 0 else None,
    )


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
    scaled = f"; {SCALED}" if any(summary.position_scaling for summary in summaries) else ""
    return f"{model}, {', '.join(map(str, lengths))} tokens of {shown}, layers: {', '.join(layers)}{scaled}"


Lines = list[list[Any]]
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
    return csv_text(lines if summaries else [[]])


def csv_text(lines: Iterable[Sequence[Any]]) -> str:
    """Lines of a CSV file."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()
