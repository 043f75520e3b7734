"""Routed attention as a whole call: rows that matter are read by themselves, stand-ins carry all others.

Why each part is there, with figures in docs/default.md: *local chunks*, because nearby tokens are read by almost
every head; *sinks*, because the first keys draw mass from every query and drown in any mean; *rows found by their
codes*, because what else matters is single keys that depend on the query, and a choice shared with later queries
would leak the future; *stand-ins that know their spread*, because many small weights add up. The ideas come from
tree and multipole methods (one mean for a far cluster), from quantised search, and from the laplace approximation
of a sum by a normal.

This file splits a call into what the lanes can do: sequences whose queries begin at one position, and that have no
padding behind their first key.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.call import Call
from prescore.config import Routed
from prescore.routed.figures import ERROR_FIGURES, real_queries
from prescore.routed.lanes import Answer, attend_lanes, exact_answer
from prescore.routed.layout import make_layout
from prescore.types import Attended, Outcome, Selection

MEANS = {"rows_per_query", "searched_keys", "far_rows", "stand_in_rows"} | set(ERROR_FIGURES) - {"error_limit_max"}
"""Figures that are means over queries."""


def routes_nothing(call: Call, config: Routed) -> bool:
    """Whether every query of a call without padding reads every key it may see."""
    if call.is_causal:
        return make_layout(call.n_query, call.n_keys, causal=True, config=config).n_chunks == 0
    return call.n_query < config.exact_until


def attend_routed(call: Call, config: Routed, *, explain: bool = False) -> Outcome:
    """Run routed attention; with `explain` also tell what could be read, and figures about what was."""
    begin = time.perf_counter()
    gaps = _with_gaps(call)
    if isinstance(call.query_start, int):
        answer = _at_one_start(call, config, gaps)
    else:
        answer = _start_by_start(call, config, gaps)
    rows = float(answer.figures["rows_per_query"])

    def count_rows() -> float:
        return rows

    if not explain:
        return Outcome(answer.attended, count_rows, stats=answer.figures)
    stats = {
        **answer.figures,
        "keys_kept": call.mean_keys(),
        "depth": 0,
        "fallbacks": 0,
        "seconds": {"attending": time.perf_counter() - begin},
        "backend": call.backend.name,
    }
    return Outcome(answer.attended, count_rows, _reachable(call, config), stats)


def _with_gaps(call: Call) -> Tensor | None:
    """`[B]`: sequences with padding between keys that a query sees, which chunks cannot express; None = none.

    Trailing padding is no gap without a causal mask, nor where each query has its own key: it lies in every real
    query's future.
    """
    if call.valid is None:
        return None
    n_real = call.valid.sum(1)
    column = torch.arange(call.n_keys, device=call.valid.device)
    gaps = (call.valid != (column < n_real[:, None])).any(1) | (n_real == 0)
    if call.is_causal and call.n_query != call.n_keys:
        gaps = gaps | (n_real < call.query_start + call.n_query)
    return gaps if bool(gaps.any()) else None


def _at_one_start(call: Call, config: Routed, gaps: Tensor | None) -> Answer:
    """A call whose rows all begin at one position; those in `gaps`, and short ones, read everything exactly."""
    few = gaps
    if not call.is_causal:
        few = _short(call, config) if gaps is None else _short(call, config) | gaps
    if few is None or not bool(few.any()):
        return attend_lanes(call, config)
    if bool(few.all()):
        answer = exact_answer(call, config)
    else:
        rows = [own.nonzero().squeeze(1) for own in (few, ~few)]
        parts = [
            attend(_some_rows(call, own, call.n_keys, 0, place), config)
            for attend, own, place in zip((exact_answer, attend_lanes), rows, ("few", "many"), strict=True)
        ]
        answer = _in_order(call, parts, rows)
    if gaps is not None:
        answer.figures["exact_sequences"] = int(gaps.sum())
    return answer


def _short(call: Call, config: Routed) -> Tensor:
    """`[B]`: sequences without a causal mask that read everything, having few queries or no full chunk of keys."""
    layout = make_layout(call.n_query, call.n_keys, causal=False, config=config)
    n_query = torch.full((call.query.shape[0],), call.n_query, device=call.query.device)
    n_keys = torch.full_like(n_query, call.n_keys) if call.valid is None else call.valid.sum(1)
    n_query = n_query if call.query_valid is None else call.query_valid.sum(1)
    return (n_query < config.exact_until) | (n_keys < layout.sinks + layout.chunk)


def _start_by_start(call: Call, config: Routed, gaps: Tensor | None) -> Answer:
    """Queries of a padded batch that begin at different positions: one call per position."""
    start = torch.as_tensor(call.query_start)
    parts, rows = [], []
    for first in start.unique().tolist():
        some = (start == first).nonzero().squeeze(1)
        unseen = min(max(0, -first), call.n_query)  # queries before the first real key see nothing
        own = _some_rows(call, some, max(0, first + call.n_query), unseen, f"start {first}")
        answer = _at_one_start(own, config, None if gaps is None else gaps.index_select(0, some))
        output, lse = answer.attended
        shifted = Attended(pad(output, (0, 0, unseen, 0)), pad(lse, (unseen, 0), value=-torch.inf))
        parts.append(Answer(shifted, answer.figures))
        rows.append(some)
    return _in_order(call, parts, rows)


def _in_order(call: Call, parts: list[Answer], rows: list[Tensor]) -> Answer:
    """Answers for some sequences each, as one; figures are means over queries, the geometry is the last part's."""
    back = torch.cat(rows).argsort()
    whole = (torch.cat(t).index_select(0, back) for t in zip(*(part.attended for part in parts), strict=True))
    real = real_queries(call)
    counts = [int(real.index_select(0, own).sum()) for own in rows]
    figures = dict(parts[-1].figures)
    for name in MEANS & figures.keys():
        total = sum(count * part.figures[name] for count, part in zip(counts, parts, strict=True))
        figures[name] = total / max(1, sum(counts))
    if "error_limit_max" in figures:
        figures["error_limit_max"] = max(part.figures["error_limit_max"] for part in parts)
    found = [part.figures["exact_sequences"] for part in parts if "exact_sequences" in part.figures]
    if found:
        figures["exact_sequences"] = sum(found)
    # parts differ in length alone, and only those that routed know it
    figures |= next(({"native": part.figures["native"]} for part in parts if "native" in part.figures), {})
    return Answer(Attended(*whole), figures)


def _some_rows(call: Call, rows: Tensor, n_keys: int, n_skipped: int, place: str) -> Call:
    """Some sequences of a call, their first `n_keys` keys, and their queries behind the first `n_skipped`."""
    query, key, value = (t.index_select(0, rows) for t in (call.query, call.key, call.value))
    valid = None if call.valid is None else call.valid.index_select(0, rows)[:, :n_keys]
    asked = None if call.query_valid is None else call.query_valid.index_select(0, rows)[:, n_skipped:]
    return replace(
        call,
        query=query[:, :, n_skipped:],
        key=key[:, :, :n_keys],
        value=value[:, :, :n_keys],
        backend=call.backend.at(place),
        valid=valid,
        query_start=n_keys - (call.n_query - n_skipped) if call.is_causal else 0,
        query_valid=asked,
    )


def _reachable(call: Call, config: Routed) -> list[Selection]:
    """What may be routed to: every key, chunk by chunk in causal mode."""
    size = config.chunk_size if call.is_causal else max(1, call.n_keys)
    chunks = []
    for begin in range(0, call.n_keys, size):
        indices = torch.arange(begin, min(begin + size, call.n_keys), device=call.key.device)
        indices = indices.expand(*call.key.shape[:2], -1)
        valid = torch.ones_like(indices, dtype=torch.bool)
        if call.valid is not None:
            valid = call.valid[:, None, begin : begin + size].expand(indices.shape)
        chunks.append(Selection(indices, valid))
    return chunks
