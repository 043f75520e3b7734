"""Loss records of many documents as one line per method."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from prescore.causal_sizes import largest_block
from prescore.records import Record
from prescore.values import Values

# two-sided 95 % points of Student's t for 1, 2, ... degrees of freedom
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)

_NEEDED = ("loss", "rows_per_query", "attention_seconds", "forward_seconds")


@dataclass(frozen=True)
class Summary:
    """One method at one length, over documents and seeds.

    Attributes:
        label, kind, settings, axes: The method.
        n_tokens, layers: Where it was measured.
        losses: Loss in nats by document (mean over seeds).
        rows_per_query: Key rows met.
        attention_seconds: Inside the attention functions, per forward.
        processor_seconds: The same as processor time; None where it was not measured on a CPU.
        forward_seconds: Whole forward and loss.
        gap_closed: `(local - loss) / (local - exact)` over the same documents; None when they are missing.
        above_exact: Mean over the same documents of what the loss is above exact attention's.
        above_exact_half_width: Half of its 95 % interval, which is much narrower than that of the loss itself.
        speed_up: Exact attention's time over this one's.
        position_scaling: How positions past the trained length were made, if they were.
    """

    label: str
    kind: str
    settings: Values
    axes: Values
    n_tokens: int
    layers: Any
    losses: dict[str, float]
    rows_per_query: float | None
    attention_seconds: float
    forward_seconds: float
    processor_seconds: float | None = None
    gap_closed: float | None = None
    above_exact: float | None = None
    above_exact_half_width: float | None = None
    speed_up: float | None = None
    position_scaling: Values | None = None

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
        found = self.settings.get("leaf", self.settings.get("min_seq_len", self.settings.get("chunk_size")))
        return None if found is None else int(found)


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
        if record.config.get("part") == "loss":
            config = record.config
            name = repr((config["model"], config["dtype"], config["n_tokens"], config["layers"], config["method"]))
            groups.setdefault(name, []).append(record)
    summaries = [_summary(group) for group in groups.values()]
    return [_compared(summary, summaries) for summary in summaries]


def _check(record: Record) -> None:
    for name in _NEEDED:
        figure = record.figures.get(name)
        plain = isinstance(figure, int | float) or figure in ("nan", "inf", "-inf")
        if not plain and not (name == "rows_per_query" and figure is None and name in record.figures):
            raise ValueError(f"record {record.key} must have a number as {name}, got {figure!r}")


def find(summaries: Sequence[Summary], kind: str, n_tokens: int, leaf: int | None = None) -> Summary | None:
    """The exact or local-only line of a length; of several local ones the one with the same leaves."""
    found = [summary for summary in summaries if summary.kind == kind and summary.n_tokens == n_tokens]
    same = [summary for summary in found if leaf is not None and summary.leaf == leaf]
    return next(iter(same or found), None)


def _summary(group: Sequence[Record]) -> Summary:
    for record in group:
        _check(record)
    method, figures = group[0].config["method"], [record.figures for record in group]
    by_document: dict[str, list[float]] = {}
    for record in group:
        name = f"{record.config['document']}@{record.config['digest']}"
        by_document.setdefault(name, []).append(float(record.figures["loss"]))
    rows = [figure["rows_per_query"] for figure in figures if figure["rows_per_query"] is not None]
    processor: list[Any] = [figure.get("attention_processor_seconds") for figure in figures]
    return Summary(
        label=method["label"],
        kind=method["kind"],
        settings=method["settings"],
        axes=method["axes"],
        n_tokens=group[0].config["n_tokens"],
        layers=group[0].config["layers"],
        losses={name: statistics.fmean(values) for name, values in by_document.items()},
        rows_per_query=statistics.fmean(rows) if rows else None,
        attention_seconds=statistics.fmean(figure["attention_seconds"] for figure in figures),
        forward_seconds=statistics.fmean(figure["forward_seconds"] for figure in figures),
        processor_seconds=None if None in processor else statistics.fmean(processor),
        position_scaling=figures[0].get("position_scaling"),
    )


def _compared(summary: Summary, summaries: Sequence[Summary]) -> Summary:
    exact = find(summaries, "exact", summary.n_tokens)
    local = find(summaries, "local", summary.n_tokens, summary.leaf)
    gap = None
    if exact is not None and local is not None:
        shared = [name for name in summary.losses if name in exact.losses and name in local.losses]
        gap = _gap(*([part.losses[name] for name in shared] for part in (summary, exact, local)))
    above = (
        [] if exact is None else [summary.losses[n] - exact.losses[n] for n in summary.losses if n in exact.losses]
    )
    fast = None
    if exact is not None and summary.attention_seconds > 0:
        fast = exact.attention_seconds / summary.attention_seconds
    return replace(
        summary,
        gap_closed=gap,
        above_exact=statistics.fmean(above) if above else None,
        above_exact_half_width=confidence_half_width(above),
        speed_up=fast,
    )


def _gap(losses: Sequence[float], exact: Sequence[float], local: Sequence[float]) -> float | None:
    if not losses:
        return None
    floor, best, own = (statistics.fmean(values) for values in (local, exact, losses))
    # a model that reads no better with its far context than without has no gap to close
    return None if floor <= best else (floor - own) / (floor - best)


def holds_for(summary: Summary, scorer: str) -> bool:
    """Whether a line of a grid is one of that scorer's: its own, or one where no scorer plays a part."""
    return summary.axes.get("scorer") in (scorer, "none") or keeps_every_key(summary)


def keeps_every_key(summary: Summary) -> bool:
    """Whether the budget filters nothing, so that one scorer's line holds for all."""
    budget, leaf = summary.settings.get("top_k"), summary.settings.get("min_seq_len")
    if not budget or leaf is None:
        return False
    return bool(budget == 1.0 if isinstance(budget, float) else budget >= largest_block(summary.n_tokens, leaf))
