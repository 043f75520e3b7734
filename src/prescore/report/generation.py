"""Generations as tables: speed and memory, or what a beam search found."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from prescore.records import Record
from prescore.report.tables import MISSING, Table, as_text
from prescore.values import Values


def generation_table(records: Sequence[Record]) -> Table:
    """Prefill and decode, how much of either is attention, memory, and agreement with exact attention."""
    rows = []
    for record in records:
        figures = record.figures
        speed, same = figures["decode_tokens_per_second"], figures.get("same_tokens")
        rows.append(
            (
                record.config["attention"],
                f"{figures['prefill_seconds']:.2f} s ({figures['prefill_tokens_per_second']:.0f} tok/s)",
                f"{figures['prefill_attention_seconds']:.2f} s",
                MISSING if speed is None else f"{figures['decode_seconds']:.2f} s ({speed:.1f} tok/s)",
                f"{figures['decode_attention_seconds']:.2f} s",
                f"{figures['cache']['bytes'] / 2**20:.1f} MiB",
                MISSING if same is None else f"{same} of {figures['new_tokens']}",
                _agreement(figures),
            )
        )
    columns = (
        *("attention", "prefill", "attention part", "decode", "attention part", "cache"),
        *("tokens as exact", "shown the exact text"),
    )
    title = f"{records[0].config['model']}, {records[0].config['prompt_tokens']} prompt tokens"
    last = records[-1]
    lines = (_speed_line(records), _prompt_line(last), _paths(last), _selection_line(last))
    note = "; ".join(line for line in lines if line)
    return Table(title, columns, tuple(rows), note)


def error_table(record: Record) -> Table | None:
    """What layers with a tolerance read, and how far they may be off; None where none was asked for."""
    bars = record.figures.get("error_bars")
    if bars is None:
        return None
    rows = tuple(
        (
            *(str(bar["layer"]), bar["phase"], as_text(bar["rows"], 4), as_text(bar["visible"], 4)),
            *(f"{bar['error']:.4f}", f"{bar['error_limit']:.4f}"),
            *(f"{100 * bar[name]:.1f} %" for name in ("read_further", "read_everything")),
        )
        for bar in sorted(bars, key=lambda bar: bar["phase"])
    )
    config = record.config["config"]
    columns = ("layer", "phase", "rows read", "of", "error", "error at most", "read further", "read everything")
    note = "last call of each phase: expected relative error of a query's output, and the limit of the worst query"
    return Table(f"within {config['tolerance']:g} of exact attention", columns, rows, note, left=2)


def _agreement(figures: Values) -> str:
    """How many choices are exact attention's, of one that was shown the exact text."""
    share = figures.get("agreement")
    return MISSING if share is None else f"{100 * share:.1f} % of {figures['compared']}"


def _speed_line(records: Sequence[Record]) -> str:
    """How many times as fast as exact attention; nothing where that did not run."""
    found = {record.config["attention"]: record.figures for record in records}
    if "exact" not in found or "prescored" not in found:
        return ""
    exact, own = found["exact"], found["prescored"]
    words = []
    for part in ("prefill", "decode"):
        speeds = [figures[f"{part}_tokens_per_second"] for figures in (own, exact)]
        attention = [figures[f"{part}_attention_seconds"] for figures in (exact, own)]
        if None not in speeds and min(attention) > 0 and min(speeds) > 0:
            within = attention[0] / attention[1]
            within *= 1 if part == "prefill" else max(1, own["new_tokens"] - 1) / max(1, exact["new_tokens"] - 1)
            words.append(f"{part} {speeds[0] / speeds[1]:.2f}x exact's speed (attention {within:.2f}x)")
    return ", ".join(words)


def _prompt_line(record: Record) -> str:
    """What ran for the prompt, and why it was exact where it was; nothing of a model's own attention."""
    ran = record.figures["prefill_ran"]
    ways = [words if len(ran) == 1 else f"{words} in {count} layers" for words, count in ran.items()]
    return f"the prompt: {', '.join(ways)}" if ways else ""


def _paths(record: Record) -> str:
    """Which way the steps of a generation went."""
    paths = record.figures["decode_paths"]
    return ", ".join(f"{count} times {path}" for path, count in paths.items())


def beam_table(records: Sequence[Record]) -> Table:
    """What a beam search found, and what exact attention thinks of it."""
    rows = []
    for record in records:
        figures = record.figures
        same = figures.get("same_tokens")
        rows.append(
            (
                record.config["attention"],
                f"{figures['seconds']:.2f} s",
                f"{figures['score']:.4f}",
                f"{figures['exact_score']:.4f}",
                MISSING if same is None else f"{same} of {figures['new_tokens']}",
            )
        )
    columns = ("attention", "time", "log-probability", "under exact attention", "tokens as exact")
    config = records[0].config
    title = f"{config['model']}, {config['prompt_tokens']} prompt tokens, {config['beams']} beams"
    return Table(title, columns, tuple(rows), note="summed log-probability of the best beam, in nats")


def _selection_line(record: Record) -> str:
    """Rows a decode step reads for the prompt; neighbouring layers with the same number share an entry."""
    entries = [entry for entry in record.figures["cache"]["layers"] if "rows" in entry]
    if not entries:
        routed = "routed step" in record.figures["decode_paths"]
        return "every key was kept" if routed else "no layer made a selection: every key was kept"
    groups = []
    for rows, group in itertools.groupby(entries, key=lambda entry: (entry["rows"], entry["selected_from"])):
        numbers = [entry["layer"] for entry in group]
        span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        groups.append(f"layers {span}: {rows[0]} of {rows[1]}")
    return f"rows that stand for the prompt: {', '.join(groups)}"
