"""Routed attention as a whole call: rows that matter are read by themselves, centroids carry all others.

Why each part is there, with figures in docs/default.md: *local chunks*, because nearby tokens are read by almost
every head; *sinks*, because the first keys draw mass from every query and drown in any mean; *rows found by their
codes*, because what else matters is single keys that depend on the query, and a choice shared with later queries
would leak the future; *centroids that know their spread*, because many small weights add up. The ideas come from
tree and multipole methods (one mean for a far cluster), from quantised search, and from the laplace approximation
of a sum by a normal.

This file splits a call into what the lanes can do: sequences whose queries begin at one position, and that have no
padding behind their first key.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.call import Call
from prescore.config import Routed
from prescore.ops.backend import Backend, readable
from prescore.ops.native.library import NO_LEVEL
from prescore.routed.error_bound import attend_to_tolerance, is_over
from prescore.routed.index import build_nodes, mean_of_first, pooled
from prescore.routed.layout import Layout, make_layout
from prescore.routed.native import build_nodes_compiled, can_build, level_for
from prescore.routed.reference import Search
from prescore.routed.softmax import attend_sources
from prescore.routed.sources import Sources, View
from prescore.types import Attended, Reads, Result, Selection, Values

ERROR_FIGURES = ("error_estimate", "error_bound_mean", "error_bound_max", "refined", "read_all")
"""What a call with a tolerance tells; all zero where everything is read."""
MEANS = {"keys_per_query", "keys_compared", "far_keys_read", "centroids_per_query"} | set(ERROR_FIGURES) - {
    "error_bound_max"
}
"""Figures that are means over queries."""


def reads_every_key(call: Call, config: Routed) -> bool:
    """Whether every query of a call without padding reads every key it may see."""
    if call.is_causal:
        return make_layout(call.n_query, call.n_keys, causal=True, config=config).n_chunks == 0
    return call.n_query < config.exact_until


def attend_routed(call: Call, config: Routed, *, explain: bool = False) -> Result:
    """Run routed attention; with `explain` also tell what could be read, and figures about what was."""
    begin = time.perf_counter()
    gaps = _with_gaps(call)
    if isinstance(call.query_start, int):
        answer = _at_one_start(call, config, gaps)
    else:
        answer = _start_by_start(call, config, gaps)
    stats = answer.figures
    reads = Reads(float(stats["keys_per_query"]), float(stats["centroids_per_query"]))

    def count_reads() -> Reads:
        return reads

    if not explain:
        return Result(*answer.attended, count_reads, stats)
    stats = {
        "backend": call.backend.name,
        **stats,
        "keys_selected": call.mean_keys(),
        "depth": 0,
        "fallbacks": 0,
        "seconds": {"attending": time.perf_counter() - begin},
    }
    return Result(*answer.attended, count_reads, stats, _reachable(call, config))


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
    if "error_bound_max" in figures:
        figures["error_bound_max"] = max(part.figures["error_bound_max"] for part in parts)
    found = [part.figures["exact_sequences"] for part in parts if "exact_sequences" in part.figures]
    if found:
        figures["exact_sequences"] = sum(found)
    # parts differ in length alone, and only those that routed know it
    names = ("native_level", "backend")
    figures |= {name: part.figures[name] for part in reversed(parts) for name in names if name in part.figures}
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


# Routed attention of sequences that begin at one position: the exact beginning, then some key heads at a time.

KEY_NUMBERS_AT_ONCE = 2**22
"""Numbers in the keys (or values) of the sequences that go together: copies of them are mapped memory in use."""


class Answer(NamedTuple):
    """A result, and figures about it."""

    attended: Attended
    figures: Values


def attend_lanes(call: Call, config: Routed) -> Answer:
    """Attention over local chunks, sinks, rows found and centroids.

    Args:
        call: Aligned inputs whose queries all begin at one position. Padding may only lie behind the last real
            key, and in causal mode only where each query has its own key; without a causal mask every sequence
            has a full chunk.
        config: The geometry, and how many rows are looked for.
    """
    layout = make_layout(call.n_query, call.n_keys, causal=call.is_causal, config=config)
    n_exact = layout.n_exact if call.query.numel() and call.key.numel() else layout.n_query
    figures = geometry(call, layout, n_exact, config)
    results = []
    level = level_for(call.query, call.value.shape[-1], layout.leaf, call.backend)
    # compiled code reads the beginning too, and faster; the operator alone has its gradients
    n_apart = n_exact if level == NO_LEVEL or needs_gradients(call) or n_exact == layout.n_query else 0
    if n_apart or not layout.n_query:
        results.append(attend_beginning(call, layout, n_apart))
    if n_exact < layout.n_query:
        routed = _attend_heads(call, layout, n_apart, config)
        results.append(routed.attended)
        figures |= {
            **met(call, layout, n_exact, routed.counts),
            "native_level": level,
            **({} if level == NO_LEVEL else {"backend": "native"}),
        }
    whole = results[0]
    if len(results) > 1:
        whole = Attended(*(torch.cat(tensors, dim=2) for tensors in zip(*results, strict=True)))
    if config.tolerance is None or n_exact == layout.n_query:
        return Answer(whole, figures)
    limit, error, further = (pad(bar, (n_apart, 0)) for bar in routed.bars)
    real = real_queries(call)[:, None].expand_as(limit)
    over = is_over(limit, config) & real
    figures["keys_per_query"] += float((over * keys_seen(call)[:, None]).sum() / real.sum().clamp_min(1))
    figures.update(error_figures(limit[real], error[real], further[real], over[real]))
    return Answer(whole, figures)


def needs_gradients(call: Call) -> bool:
    """Whether gradients of a call are recorded."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in (call.query, call.key, call.value))


def search_of(config: Routed) -> Search:
    """What is looked for with so many rows."""
    return Search(1 / config.min_weight if config.min_weight < 1 else 0.0)


def exact_answer(call: Call, config: Routed) -> Answer:
    """Every query of the call reads every key it may see."""
    layout = make_layout(call.n_query, call.n_keys, causal=call.is_causal, config=config)
    return Answer(call.exactly("few"), geometry(call, layout, layout.n_query, config))


def attend_beginning(call: Call, layout: Layout, n_exact: int) -> Attended:
    """The first queries, which read everything exactly."""
    query, key, value, valid = call.query[:, :, :n_exact], call.key, call.value, call.valid
    if layout.causal:
        stop = layout.first + n_exact
        key, value = key[:, :, :stop], value[:, :, :stop]
        valid = None if valid is None else valid[:, :stop]
    return replace(call, query=query, key=key, value=value, valid=valid).exactly("head")


class _Routed(NamedTuple):
    """Results of routed queries, what all of them searched and read, and with a tolerance their error bars."""

    attended: Attended
    counts: Tensor
    bars: tuple[Tensor, ...]


def _attend_heads(call: Call, layout: Layout, n_skipped: int, config: Routed) -> _Routed:
    """The queries behind the first `n_skipped`."""
    search = search_of(config)
    results: list[tuple[Tensor, ...]] = []
    counts = torch.zeros(2, dtype=torch.double, device=call.query.device)
    for lanes in lanes_of(call, n_skipped):
        backend = call.backend.at(f"lane {len(results)}")
        view = view_of(lanes, layout, search, call.scale, backend)
        sources = sources_of(lanes, layout, backend)
        if config.tolerance is None:
            found = attend_sources(lanes.query, sources, view)
            results.append((found.output, found.lse))
            counts += found.counts
        else:
            bars = attend_to_tolerance(lanes.query, sources, view, config, call.streams.child("samples").seed)
            results.append(bars[:5])
            counts += bars.counts
    output, lse, *told = (_joined(part, call.query.shape[:2]) for part in zip(*results, strict=True))
    return _Routed(Attended(output, lse), counts, tuple(told))


def _joined(lanes: Sequence[Tensor], heads: torch.Size) -> Tensor:
    """Parts `[t, G, n, ...]` of all lanes -> `[B, Hq, n, ...]`."""
    whole = torch.cat(tuple(lanes)) if len(lanes) > 1 else lanes[0]
    return whole.reshape(*heads, *whole.shape[2:])


class Lanes(NamedTuple):
    """Some lanes: queries `[t, G, n, D]`, keys and values `[t, Nk, D]`.

    Attributes:
        valid: `[t, Nk]` keys that are real; None = all are.
        looking: `[t, n]` queries that look for far keys; padded ones, answered elsewhere, do not. None = all do.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor | None
    looking: Tensor | None


def lanes_of(call: Call, n_skipped: int) -> Iterator[Lanes]:
    """Some lanes at a time, of their queries those behind the first `n_skipped`.

    So few that what is made on the way is memory in use: fresh memory costs more than the arithmetic. A long
    sequence goes alone, short ones go together.
    """
    n_kv_heads = call.key.shape[1]
    queries = call.query[:, :, n_skipped:].unflatten(1, (n_kv_heads, call.group)).flatten(0, 1)
    keys, values = (readable(tensor.flatten(0, 1)) for tensor in (call.key, call.value))
    looking = call.query_valid[:, n_skipped:] if call.is_causal and call.query_valid is not None else None
    valids, lookings = (
        None if mark is None else mark.repeat_interleave(n_kv_heads, dim=0) for mark in (call.valid, looking)
    )
    step = max(1, KEY_NUMBERS_AT_ONCE // (call.n_keys * max(keys.shape[-1], values.shape[-1])))
    for start in range(0, len(queries), step):
        some = slice(start, start + step)
        own = (None if mark is None else mark[some] for mark in (valids, lookings))
        yield Lanes(readable(queries[some]), keys[some], values[some], *own)


def view_of(lanes: Lanes, layout: Layout, search: Search, scale: float, backend: Backend) -> View:
    """What the queries of some lanes see: the last ones of a causal call, or all."""
    n_lanes, _, n_query, _ = lanes.query.shape
    if layout.causal:
        position = torch.arange(layout.n_key - n_query, layout.n_key)[None]
        chunks, stop = layout.chunks_seen(position), position + 1
    else:
        chunks = layout.full_chunks(lanes.valid, n_lanes).cpu()[:, None]
        stop = torch.tensor(layout.n_key) if lanes.valid is None else lanes.valid.sum(1, keepdim=True).cpu()
    first = (layout.sinks + chunks * layout.chunk).masked_fill(chunks == 0, 0)
    seen = (chunks * layout.nodes_per_chunk, first, stop)
    shape = (n_lanes, n_query)
    visible, first, stop = (t.expand(shape).to(torch.int32).contiguous() for t in seen)
    if lanes.looking is not None:
        visible.masked_fill_(~lanes.looking.cpu(), 0)
    per_pool = layout.nodes_per_chunk * (1 if layout.causal else layout.n_chunks)
    return View(visible, first, stop, layout.causal, layout.chunk, per_pool, search, scale, backend)


def sources_of(lanes: Lanes, layout: Layout, backend: Backend) -> Sources:
    """What is made of the keys of some lanes, and they themselves."""
    build = build_nodes_compiled if can_build(lanes.key, lanes.value, layout, backend) else build_nodes
    nodes = build(lanes.key, lanes.value, layout, layout.sinks, layout.n_chunks)
    # without a causal mask the queries of a lane all see the same chunks
    seen = None if layout.causal else layout.full_chunks(lanes.valid, len(lanes.key)).to(lanes.key.device)
    spread, drift = (pooled(t) if seen is None else mean_of_first(t, seen) for t in (nodes.spread, nodes.drift))
    return Sources(
        key=lanes.key,
        value=lanes.value,
        sink_key=lanes.key[:, : layout.sinks],
        sink_value=lanes.value[:, : layout.sinks],
        node_key=nodes.key,
        node_value=nodes.value,
        spread=spread,
        drift=drift,
        rows=nodes.rows,
        packed=nodes.codes.packed,
        scales=nodes.codes.scales,
    )


# Figures about a routed call: what its queries met, and how far off they may be.


def real_queries(call: Call) -> Tensor:
    """`[B, Nq]`: the queries that figures are about."""
    if call.query_valid is not None:
        return call.query_valid
    return torch.ones((call.query.shape[0], call.n_query), dtype=torch.bool, device=call.query.device)


def keys_seen(call: Call) -> Tensor:
    """`[B, Nq]` in float64: real keys that each query may see; causal queries are the last positions."""
    shape = (call.query.shape[0], call.n_keys)
    valid = call.valid
    if valid is None:
        valid = torch.ones(shape, dtype=torch.bool, device=call.query.device)
    if call.is_causal:
        return valid.cumsum(1)[:, call.n_keys - call.n_query :].double()
    return valid.sum(1, keepdim=True).expand(-1, call.n_query).double()


def geometry(call: Call, layout: Layout, n_exact: int, config: Routed) -> Values:
    """What is known before anything was read, as if all queries read everything."""
    rows = _mean(keys_seen(call), real_queries(call))
    nothing = dict.fromkeys(("keys_compared", "far_keys_read", "centroids_per_query"), 0.0)
    bars = dict.fromkeys(ERROR_FIGURES if config.tolerance is not None else (), 0.0)
    return {**asdict(layout), "exact_queries": n_exact, **nothing, "keys_per_query": rows, **bars}


def met(call: Call, layout: Layout, n_exact: int, counts: Tensor) -> Values:
    """What queries met on average; `counts` are the keys that all of them searched, and the rows they found.

    Those of padding look for nothing in a causal call. Without a causal mask they are answered as others are, and
    what they find counts.
    """
    real = real_queries(call)
    if layout.causal:
        position = torch.arange(layout.n_query, device=real.device) + layout.first
        chunks = layout.chunks_seen(position).expand(real.shape)
    else:
        chunks = layout.full_chunks(call.valid, real.shape[0]).to(real.device)[:, None].expand(real.shape)
    routed = real[:, n_exact:]
    n_looking = int(routed.sum()) if layout.causal else routed.numel()
    searched, found = (counts / (call.query.shape[1] * max(1, n_looking))).tolist()
    rows = keys_seen(call) - chunks * layout.chunk  # the keys of far chunks are read only where they are found
    share = int(routed.sum()) / max(1, int(real.sum()))
    return {
        "keys_compared": searched,
        "far_keys_read": found,
        "centroids_per_query": _mean(chunks.double(), real) * layout.nodes_per_chunk,
        "keys_per_query": _mean(rows, real) + found * share,
    }


def _mean(numbers: Tensor, of: Tensor) -> float:
    """Of some of them; 0 where there are none."""
    some = numbers[of]
    return float(some.mean()) if some.numel() else 0.0


def error_figures(limit: Tensor, error: Tensor, further: Tensor, over: Tensor) -> Values:
    """Figures about the error bars of some queries, of which those `over` the tolerance read everything."""
    if not limit.numel():
        return dict.fromkeys(ERROR_FIGURES, 0.0)
    bars = limit.masked_fill(over, 0.0)
    return {
        "error_estimate": float(error.masked_fill(over, 0.0).mean()),
        "error_bound_mean": float(bars.mean()),
        "error_bound_max": float(bars.max()),
        "refined": float((further | over).double().mean()),
        "read_all": float(over.double().mean()),
    }
