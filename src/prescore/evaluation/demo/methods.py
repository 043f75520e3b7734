"""What the demo compares: the default as it is, and rivals that read as many rows per query."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from prescore.config import Hyper, Lsh, Routed, Selected, config_from_dict
from prescore.evaluation.language.held_out import REPORTED, TokenizedText
from prescore.evaluation.language.methods import LanguageMethod, exact, nearby, prescored, sliding_window
from prescore.evaluation.language.perplexity import Window
from prescore.records import Record

STARTS = REPORTED[8192]
"""Where windows begin, as shares of the text: nothing was tuned on these."""
EQUAL_ROWS, BUDGETS = "equal rows", "budgets"
"""The two comparisons: the default as it is beside rivals that read as much, and several budgets of all."""
BUDGET_ROWS = (512, 128, 32)
"""`rows` of the default in the second comparison."""
STRETCHES = 16
"""Parts of a window whose losses are kept apart, for intervals."""
_SHORTEST = 128
_SHORT_SINKS = 4


def demo_windows(text: TokenizedText, length: int) -> list[Window]:
    """Windows of a text that share no token; the second half of each counts in the loss."""
    total = len(text.tokens)
    if total < length:
        raise ValueError(f"document {text.name} must have at least {length} tokens, got {total}")
    starts = [round(share * (total - length)) for share in STARTS]
    apart = [start for place, start in enumerate(starts) if place == 0 or start >= starts[place - 1] + length]
    return [text.window(start, length, f"window {number}") for number, start in enumerate(apart, start=1)]


def short_window(text: TokenizedText, length: int) -> Window:
    """A quarter of the first window, for the comparison over budgets."""
    start = round(STARTS[0] * (len(text.tokens) - length))
    return text.window(start, short_length(length), "beginning of window 1")


def short_length(length: int) -> int:
    """Tokens of that quarter."""
    return min(length, max(_SHORTEST, length // 4))


def shown_config(length: int) -> Routed:
    """The default as it is; where it would read everything, one that is made to route."""
    alone = Routed()
    if length > alone.exact_until:
        return alone
    rows, chunk = max(1, length // 16), max(1, min(alone.chunk_size, length // 8))
    return Routed(rows=rows, chunk_size=chunk, sinks=_SHORT_SINKS, exact_until=0)


def first_methods(length: int) -> list[LanguageMethod]:
    """Exact attention, the default, and the default without its far part."""
    config = shown_config(length)
    return [
        _named(exact(), "exact", EQUAL_ROWS),
        _named(prescored("default", config), "default", EQUAL_ROWS),
        _named(nearby(config.chunk_size, config.sinks), "local only", EQUAL_ROWS),
    ]


def rivals(default: Record) -> list[LanguageMethod]:
    """A sliding window and a selection, both with sinks, that read no fewer rows than this record's default."""
    read = _read(default)
    return [_window(*read, EQUAL_ROWS), _selection(*read, EQUAL_ROWS)]


def budget_methods(length: int) -> list[LanguageMethod]:
    """Exact attention, the default without its far part, and the default at several budgets."""
    config = replace(shown_config(length), exact_until=0)
    found = [
        _named(exact(), "exact", BUDGETS),
        _named(nearby(config.chunk_size, config.sinks), "local only", BUDGETS),
    ]
    for rows in BUDGET_ROWS:
        method = prescored(f"default, rows={rows}", replace(config, rows=rows))
        found.append(_named(method, "default", BUDGETS))
    return found


def budget_rivals(defaults: Sequence[Record]) -> list[LanguageMethod]:
    """Rivals that read as many rows as each of these records of the default, the most telling first."""
    read = [_read(record) for record in defaults]
    found = [_window(*one, BUDGETS) for one in read]
    found += [_selection(*one, BUDGETS) for one in read]
    for selects in (True, False):
        found += [_published(*one, selects=selects) for one in read]
    return found


def selected_rows(length: int, leaf: int, top_k: int) -> float:
    """Keys that a causal query meets in a selection: those of its exact leaf, and the kept ones of each block."""
    position = torch.arange(length)
    rows, block = position % leaf + 1, leaf
    while block < length:
        rows += (position // block % 2) * min(top_k, block)
        block *= 2
    return float(rows.double().mean())


def _window(length: int, config: Routed, rows: float, part: str) -> LanguageMethod:
    method = sliding_window(length, rows, config.sinks)
    return _named(method, f"sliding window, {method.settings['window']}", part, series="sliding window + sinks")


def _selection(length: int, config: Routed, rows: float, part: str) -> LanguageMethod:
    leaf = 2 * config.chunk_size  # the default reads two chunks too
    top_k = _budget(length, leaf, rows, config.sinks)
    selected = Selected("key-diff", top_k, sinks=config.sinks, remainder="none", min_seq_len=leaf)
    return _named(prescored("", selected), f"selection, top {top_k}", part, series="selection + sinks")


def _published(length: int, config: Routed, rows: float, *, selects: bool) -> LanguageMethod:
    """The paper's algorithm with k-means, or HyperAttention with the others' sinks, at about as many rows."""
    leaf = config.chunk_size
    budget = _budget(length, leaf, rows, config.sinks)
    half = max(1, budget // 2)
    lsh = Lsh(half, half, alignment="rank")
    if not selects:
        hyper = Hyper(lsh, config.sinks, leaf)
        return _named(
            prescored("", hyper), f"HyperAttention, {2 * half}", BUDGETS, series="HyperAttention + sinks"
        )
    paper = Selected.paper("kmeans", 2 * budget, inner=lsh, min_seq_len=leaf)
    return _named(prescored("", paper), f"paper: k-means, top {2 * budget}", BUDGETS, series="paper: k-means")


def _budget(length: int, leaf: int, rows: float, sinks: int) -> int:
    """The smallest selection that reads no fewer rows and has room for the sinks."""
    counts = range(sinks + 1, max(sinks + 2, length))
    place = bisect.bisect_left(counts, rows, key=lambda count: selected_rows(length, leaf, count))
    return counts[min(place, len(counts) - 1)]


def _read(default: Record) -> tuple[int, Routed, float]:
    """Length and configuration of a record of the default, and the rows that it read."""
    rows, config = (
        default.figures.get("replaced_rows_per_query"),
        config_from_dict(default.config["method"]["settings"]),
    )
    if not isinstance(rows, int | float) or not isinstance(config, Routed):
        raise ValueError(f"record {default.key} must have the rows that the default read, got {rows!r}")
    return int(default.config["n_tokens"]), config, float(rows)


def _named(method: LanguageMethod, label: str, part: str, **axes: Any) -> LanguageMethod:
    return replace(method, label=label, axes={"series": label, "comparison": part, **axes})
