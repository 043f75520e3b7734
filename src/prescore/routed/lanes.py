"""Routed attention of sequences that begin at one position: the exact beginning, then some key heads at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.call import Call
from prescore.config import Routed
from prescore.ops.backend import Backend, readable
from prescore.ops.native.library import NO_LEVEL
from prescore.routed.compiled.far import level_for
from prescore.routed.compiled.nodes import build_nodes_compiled, can_build
from prescore.routed.far import Search
from prescore.routed.figures import error_figures, geometry, keys_seen, met, real_queries
from prescore.routed.layout import Layout, make_layout
from prescore.routed.softmax import attend_sources
from prescore.routed.sources import Sources, View
from prescore.routed.tables import build_nodes, mean_of_first, pooled
from prescore.routed.tolerance.within import attend_to_tolerance, is_over
from prescore.types import Attended
from prescore.values import Values

SHARE_PER_ROW = 2
"""A key is read where its weight may exceed one part in so many times `rows`: at most as many can."""
KEY_NUMBERS_AT_ONCE = 2**22
"""Numbers in the keys (or values) of the sequences that go together: copies of them are mapped memory in use."""


class Answer(NamedTuple):
    """A result, and figures about it."""

    attended: Attended
    figures: Values


def attend_lanes(call: Call, config: Routed) -> Answer:
    """Attention over local chunks, sinks, rows found and stand-ins.

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
    n_apart = n_exact if level == NO_LEVEL or is_learned(call) or n_exact == layout.n_query else 0
    if n_apart or not layout.n_query:
        results.append(attend_beginning(call, layout, n_apart))
    if n_exact < layout.n_query:
        routed = _attend_heads(call, layout, n_apart, config)
        results.append(routed.attended)
        figures |= {**met(call, layout, n_exact, routed.counts), "native": level}
    whole = results[0]
    if len(results) > 1:
        whole = Attended(*(torch.cat(tensors, dim=2) for tensors in zip(*results, strict=True)))
    if config.tolerance is None or n_exact == layout.n_query:
        return Answer(whole, figures)
    limit, error, further = (pad(bar, (n_apart, 0)) for bar in routed.bars)
    real = real_queries(call)[:, None].expand_as(limit)
    over = is_over(limit, config) & real
    figures["rows_per_query"] += float((over * keys_seen(call)[:, None]).sum() / real.sum().clamp_min(1))
    figures.update(error_figures(limit[real], error[real], further[real], over[real]))
    return Answer(whole, figures)


def is_learned(call: Call) -> bool:
    """Whether gradients of a call are recorded."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in (call.query, call.key, call.value))


def search_of(config: Routed) -> Search:
    """What is looked for with so many rows."""
    return Search(float(SHARE_PER_ROW * config.rows))


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
