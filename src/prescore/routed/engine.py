"""Routed attention as a whole call: queries choose clusters of keys; exact inside them, stand-ins for all others.

Why each part is there, with figures in docs/default.md: *local chunks*, because nearby tokens are read by
almost every head; *sinks and single keys*, because a few keys unlike all others draw mass from every query and
drown in any mean; *leaves chosen per query*, because what else matters depends on the query, and a choice shared
with later queries would leak the future; *fine leaves for heads that copy*, because a large leaf hides the one key
they look for; *stand-ins*, because many small weights add up. The ideas come from tree and multipole methods (one
mean for a far cluster), from cluster attention, and from mixture-of-experts dispatch (tiles of queries that read
one leaf).

This file splits a call into what the lanes can do: sequences whose queries begin at one position, and that have no
padding behind their first key.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.call import Call
from prescore.config import Routed
from prescore.routed.lanes import Answer, attend_lanes, exact_answer
from prescore.routed.layout import make_layout
from prescore.types import Attended, Outcome, Selection
from prescore.values import Values


def routes_nothing(call: Call, config: Routed) -> bool:
    """Whether every query of a call without padding reads every key it may see."""
    if call.is_causal:
        return make_layout(call.n_query, call.n_keys, causal=True, config=config).n_pieces == 0
    return call.n_query < config.exact_until


def attend_routed(call: Call, config: Routed, *, explain: bool = False) -> Outcome:
    """Run routed attention; with `explain` also tell what could be read, and figures about what was."""
    begin = time.perf_counter()
    gaps = _with_gaps(call)
    if isinstance(call.query_start, int):
        answer = _at_one_start(call, config, gaps, explain)
    else:
        answer = _start_by_start(call, config, gaps, explain)
    rows = float(answer.figures["rows_per_query"])

    def count_rows() -> float:
        return rows

    if not explain:
        return Outcome(answer.attended, count_rows)
    stats = {
        **answer.figures,
        "keys_kept": call.mean_keys(),
        "depth": 0,
        "fallbacks": 0,
        "captured_mass": 1.0 - answer.figures.get("lost_bound_mean", 0.0),
        "seconds": {"attending": time.perf_counter() - begin},
        "backend": call.backend.name,
    }
    return Outcome(answer.attended, count_rows, _reachable(call, config), stats)


def _with_gaps(call: Call) -> Tensor | None:
    """`[B]`: sequences whose queries have padding behind them, which chunks cannot express; None = none.

    Trailing padding is no gap where each query has its own key: it lies in every real query's future.
    """
    if not call.is_causal or call.valid is None:
        return None
    n_real = call.valid.sum(1)
    column = torch.arange(call.n_keys, device=call.valid.device)
    gaps = (call.valid != (column < n_real[:, None])).any(1) | (n_real == 0)
    if call.n_query != call.n_keys:
        gaps = gaps | (n_real < call.query_start + call.n_query)
    return gaps if bool(gaps.any()) else None


def _at_one_start(call: Call, config: Routed, gaps: Tensor | None, explain: bool) -> Answer:
    """A call whose rows all begin at one position; those in `gaps`, and short ones, read everything exactly."""
    few = gaps
    if not call.is_causal:
        n_query = torch.full((call.query.shape[0],), call.n_query, device=call.query.device)
        few = (n_query if call.query_valid is None else call.query_valid.sum(1)) < config.exact_until
    if few is None or not bool(few.any()):
        return attend_lanes(call, config, explain)
    exact = exact_answer(call, config, explain)
    if bool(few.all()):
        answer = exact
    else:
        asked = ~few[:, None].expand(-1, call.n_query)
        asked = asked if call.query_valid is None else asked & call.query_valid
        answer = attend_lanes(replace(call, query_valid=asked), config, explain)
        output = torch.where(few[:, None, None, None], exact.attended.output, answer.attended.output)
        lse = torch.where(few[:, None, None], exact.attended.lse, answer.attended.lse)
        answer = Answer(Attended(output, lse), answer.figures)
    if gaps is not None:
        answer.figures["exact_sequences"] = int(gaps.sum())
    return answer


def _start_by_start(call: Call, config: Routed, gaps: Tensor | None, explain: bool) -> Answer:
    """Queries of a padded batch that begin at different positions: one call per position."""
    start = torch.as_tensor(call.query_start)
    parts, rows = [], []
    figures: list[tuple[int, Values]] = []
    for first in start.unique().tolist():
        some = (start == first).nonzero().squeeze(1)
        unseen = min(max(0, -first), call.n_query)  # queries before the first real key see nothing
        own = _some_rows(call, some, max(0, first + call.n_query), unseen, f"start {first}")
        answer = _at_one_start(own, config, None if gaps is None else gaps.index_select(0, some), explain)
        n_queries = own.query[:, 0, :, 0].numel() if own.query_valid is None else int(own.query_valid.sum())
        figures.append((n_queries, answer.figures))
        output, lse = answer.attended
        parts.append(Attended(pad(output, (0, 0, unseen, 0)), pad(lse, (unseen, 0), value=-torch.inf)))
        rows.append(some)
    back = torch.cat(rows).argsort()
    whole = (torch.cat(tensors).index_select(0, back) for tensors in zip(*parts, strict=True))
    return Answer(Attended(*whole), _together(figures))


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
        query_start=n_keys - (call.n_query - n_skipped),
        query_valid=asked,
    )


def _together(figures: list[tuple[int, Values]]) -> Values:
    """Figures of several calls, with the number of queries in each, as one; the geometry is the longest's."""
    whole = dict(figures[-1][1])
    n_queries = max(1, sum(count for count, _ in figures))
    for name in {name for _, own in figures for name in own}:
        found = [(count, own[name]) for count, own in figures if name in own]
        if name in ("recomputed_queries", "fine_heads", "exact_sequences"):
            whole[name] = sum(figure for _, figure in found)
        elif name.endswith("_bound_max"):
            whole[name] = max((figure for count, figure in found if count), default=0.0)
        elif name == "sampled_error_se":
            whole[name] = math.hypot(*(count * figure for count, figure in found)) / n_queries
        elif name in ("sampled_error", "rows_per_query") or name.endswith("_bound_mean"):
            whole[name] = sum(count * figure for count, figure in found) / n_queries
    return whole


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
