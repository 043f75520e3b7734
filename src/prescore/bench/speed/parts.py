"""The study `parts`: where the time of a routed call goes.

Parts that Python calls are timed alone: the queries before `exact_until`, the key index, its tables for native
code, the local keys. The rest is one call, timed three times with less to do each time: without a search
(centroids), with a search that finds nothing, and in full. The differences are the times of search and keys read.
Each part's multiply-adds per second are compared with those of exact attention in the same run.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prescore.attention import prescored_attention
from prescore.bench.records import Values
from prescore.bench.speed.timing import EXACT, Answer, Inputs, check_exact, check_method, seconds, timed
from prescore.call import Call
from prescore.config import Routed
from prescore.ops.backend import Needs, pick_backend
from prescore.routed import attention as routed
from prescore.routed.layout import Layout, make_layout
from prescore.routed.local import attend_near
from prescore.routed.native import attend_compiled, attend_near_compiled, can_build, make_tables
from prescore.routed.plain import attend_plain
from prescore.routed.reference import Search
from prescore.routed.sources import Sources, View
from prescore.routed.tree import FIT_SIZE
from prescore.types import Attended

PARTS = ("exact queries", "index", "local", "tables", "centroids", "search", "keys")
OTHER = "other"
"""What no part explains: checks, and joining the results."""


@torch.no_grad()
def measure_parts(inputs: Inputs, scale: float, repeats: int, *, from_model: bool) -> Values:
    """Seconds, multiply-adds and their rate for every part of `Routed()` on one layer, causal, forward."""
    config, (query, key, value) = Routed(), inputs
    layout = make_layout(query.shape[2], key.shape[2], causal=True, config=config)
    if layout.n_exact == layout.n_query:
        raise ValueError(f"n must be more than {layout.head}, where routing starts, got {layout.n_query}")
    call = Call(query, key, value, is_causal=True, scale=scale, backend=pick_backend(Needs.of(query)))
    exact = partial(scaled_dot_product_attention, *inputs, is_causal=True, scale=scale, enable_gqa=True)
    default = partial(prescored_attention, *inputs, config, is_causal=True, scale=scale)
    check_exact("exact attention", inputs, exact(), is_causal=True, scale=scale)
    check_method("the default", inputs, config, default(), is_causal=True, scale=scale, from_model=from_model)
    _, counts = _time_parts(call, layout, config)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        round_ = {EXACT: seconds(exact), "call": seconds(default), **_time_parts(call, layout, config)[0]}
        for name, spent in round_.items():
            times[name].append(spent)
    median = {name: statistics.median(spent) for name, spent in times.items()}
    work = _multiply_adds(call, layout, *counts)
    exact_rate = work[EXACT] / median[EXACT]
    parts = {
        name: {
            "seconds": median[name],
            "share": median[name] / median["call"],
            "multiply_adds": work[name],
            "of_exact_rate": work[name] / median[name] / exact_rate if work[name] and median[name] > 0 else None,
        }
        for name in PARTS
    }
    other = median["call"] - sum(median[name] for name in PARTS)
    parts[OTHER] = {
        "seconds": other,
        "share": other / median["call"],
        "multiply_adds": 0.0,
        "of_exact_rate": None,
    }
    total = sum(work[name] for name in PARTS)
    return {
        "exact_seconds": median[EXACT],
        "exact_multiply_adds": work[EXACT],
        "call_seconds": median["call"],
        "call_multiply_adds": total,
        "speedup": median[EXACT] / median["call"],
        "call_of_exact_rate": total / median["call"] / exact_rate,
        "parts": parts,
    }


def _time_parts(call: Call, layout: Layout, config: Routed) -> tuple[dict[str, float], tuple[int, int]]:
    """Seconds of every part in one run; int4 keys that all queries compared, and far keys that they read."""
    spent: dict[str, float] = defaultdict(float)

    def lap(name: str, work: Callable[[], Answer]) -> Answer:
        took, result = timed(work)
        spent[name] += took
        return result

    search, n_exact = routed.search_of(config), layout.n_exact
    native = can_build(call.key, call.value, layout, call.backend)
    if n_exact and not native:
        lap("exact queries", lambda: routed.attend_beginning(call, layout, n_exact))
    attend, attend_local = (attend_compiled, attend_near_compiled) if native else (_attend_plain, attend_near)
    n_compared = n_read = 0
    for every, some in zip(routed.lanes_of(call, 0), routed.lanes_of(call, n_exact), strict=True):
        sources = lap("index", partial(routed.sources_of, some, layout, call.backend))
        every_view, view = (
            routed.view_of(heads, layout, search, call.scale, call.backend) for heads in (every, some)
        )
        if native:
            lap("tables", partial(make_tables, sources))
            lap("exact queries and local", partial(attend_near_compiled, every.query, sources, every_view))
        lap("local", partial(attend_local, some.query, sources, view))
        lap("no search", partial(attend, some.query, sources, replace(view, search=Search(0.0))))
        # int4 keys whose scale is not a number reach no threshold
        blind = sources._replace(scales=torch.full_like(sources.scales, torch.nan))
        lap("nothing found", partial(attend, some.query, blind, view))
        compared, read = lap("full", partial(attend, some.query, sources, view))[2].tolist()
        n_compared, n_read = n_compared + compared, n_read + read
    if native:
        spent["exact queries"] = spent["exact queries and local"] - spent["local"]
    parts = {
        "exact queries": spent["exact queries"],
        "index": spent["index"],
        "local": spent["local"] - spent["tables"],  # every native call makes its tables
        "tables": spent["tables"],
        "centroids": spent["no search"] - spent["local"],
        "search": spent["nothing found"] - spent["no search"],
        "keys": spent["full"] - spent["nothing found"],
    }
    return parts, (n_compared, n_read)


def _attend_plain(query: Tensor, sources: Sources, view: View) -> tuple[Attended, Tensor, Tensor]:
    return attend_plain(query, sources, view, attend_near(query, sources, view))


def _multiply_adds(call: Call, layout: Layout, n_compared: int, n_read: int) -> dict[str, float]:
    """Multiply-adds of exact attention and of every part, over all heads; tables need none.

    A key that is read costs `D + Dv`, one that is compared `D`. The index costs the covariances behind its
    clusters, those that correct centroids, and the projections.
    """
    dim, both = call.key.shape[-1], call.key.shape[-1] + call.value.shape[-1]
    heads, kv_heads = call.query.shape[:2].numel(), call.key.shape[:2].numel()
    position = torch.arange(layout.n_exact, layout.n_query, dtype=torch.long)
    chunks = layout.chunks_seen(position)
    n_centroids = layout.sinks + chunks * layout.nodes_per_chunk
    n_local = position + 1 - layout.sinks - chunks * layout.chunk
    strides = [max(1, (layout.chunk >> level) // FIT_SIZE) for level in range(layout.levels)]
    per_key = dim * both + sum(dim * (dim / stride + 1) for stride in strides)
    return {
        EXACT: heads * both * layout.n_query * (layout.n_query + 1) / 2,
        "exact queries": heads * both * layout.n_exact * (layout.n_exact + 1) / 2,
        "index": kv_heads * layout.n_chunks * layout.chunk * per_key,
        "local": heads * both * float(n_local.sum()),
        "tables": 0.0,
        "centroids": heads * both * float(n_centroids.sum()),
        "search": float(n_compared) * dim,
        "keys": float(n_read) * both,
    }
