"""Where the time of routed attention goes, part by part, and how much of the arithmetic limit each part reaches.

Parts that Python sees are run and timed by themselves: what is made of the keys (trees, codes, covariances:
nodes), the tables that compiled code wants, what lies near, and with it what queries before `exact_until` read
(beginning). All else is one call with what lies near, of which less is asked for and the differences are taken:
nothing is looked for (stand-ins), keys are looked for and none reaches its limit (search), the call as it is
(rows). The rest of the call is what no part explains: checks, joining. The limit is the multiply-adds a second
that exact attention reaches in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prescore.api.attention import prescored_attention
from prescore.call import Call
from prescore.clustering.tree import FIT_SIZE
from prescore.config import Routed
from prescore.evaluation.speed.layer_inputs import LayerInputs, LayerSetting
from prescore.evaluation.speed.timing import EXACT, seconds
from prescore.ops.backend import Needs, pick_backend
from prescore.routed import lanes
from prescore.routed.compiled.far import attend_compiled, attend_near_compiled, make_tables
from prescore.routed.compiled.nodes import can_build
from prescore.routed.far import Search
from prescore.routed.layout import Layout, make_layout
from prescore.routed.local import attend_near
from prescore.routed.plain import attend_plain
from prescore.routed.sources import Sources, View
from prescore.types import Attended
from prescore.values import Values

PARTS = ("beginning", "nodes", "near", "tables", "stand-ins", "search", "rows")
REST = "the rest"
Result = TypeVar("Result")


@dataclass
class _Laps:
    """Seconds of named pieces of work, summed, and what the far part counted: keys searched, rows read."""

    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    searched: int = 0
    rows: int = 0

    def timed(self, name: str, work: Callable[[], Result]) -> Result:
        begin = time.perf_counter()
        result = work()
        self.spent[name] += time.perf_counter() - begin
        return result


@torch.no_grad()
def measure_parts(setting: LayerSetting, inputs: LayerInputs) -> Values:
    """Seconds, multiply-adds and share of the limit of every part of `Routed()` on one layer, causal, forward."""
    config, (query, key, value) = Routed(), inputs.tensors
    layout = make_layout(setting.n, setting.n, causal=True, config=config)
    if layout.n_exact == layout.n_query:
        raise ValueError(f"n must be more than {layout.head}, from where on queries are routed, got {setting.n}")
    backend = pick_backend(Needs.of(query))
    call = Call(query, key, value, is_causal=True, scale=inputs.scale, backend=backend)

    def exact() -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=inputs.scale, enable_gqa=True)

    def routed() -> torch.Tensor:
        return prescored_attention(query, key, value, config, is_causal=True, scale=inputs.scale)

    exact()  # the memory that a first call takes from the system is there for the timed ones
    routed()
    work = multiply_adds(call, layout, run_laps(call, layout, config))
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(setting.repeats):
        times[EXACT].append(seconds(exact))
        times["call"].append(seconds(routed))
        for name, spent in run_parts(call, layout, config).items():
            times[name].append(spent)
    median = {name: statistics.median(spent) for name, spent in times.items()}
    return _figures(median, work)


def _figures(median: dict[str, float], work: dict[str, float]) -> Values:
    limit = work[EXACT] / median[EXACT]
    parts: dict[str, Values] = {}
    for name in PARTS:
        rate = work[name] / median[name] if median[name] > 0 and work[name] else None
        parts[name] = {
            "seconds": median[name],
            "share": median[name] / median["call"],
            "multiply_adds": work[name],
            "of_limit": None if rate is None else rate / limit,
        }
    rest = median["call"] - sum(entry["seconds"] for entry in parts.values())
    parts[REST] = {"seconds": rest, "share": rest / median["call"], "multiply_adds": 0.0, "of_limit": None}
    whole = sum(work[name] for name in PARTS)
    return {
        "exact_seconds": median[EXACT],
        "exact_multiply_adds": work[EXACT],
        "call_seconds": median["call"],
        "call_multiply_adds": whole,
        "speedup": median[EXACT] / median["call"],
        "call_of_limit": whole / median["call"] / limit,
        "parts": parts,
    }


def run_parts(call: Call, layout: Layout, config: Routed) -> dict[str, float]:
    """Seconds of every part, in one run."""
    spent = run_laps(call, layout, config).spent
    own = {name: spent[name] for name in ("nodes", "tables")}
    own["beginning"] = spent["beginning"] or spent["beginning and near"] - spent["near"]
    own["near"] = spent["near"] - spent["tables"]  # every call makes them
    own["stand-ins"] = spent["nothing"] - spent["near"]
    own["search"] = spent["looked"] - spent["nothing"]
    own["rows"] = spent["whole"] - spent["looked"]
    return own


def run_laps(call: Call, layout: Layout, config: Routed) -> _Laps:
    """A routed call piece by piece, its last part three times."""
    laps, n_exact, search = _Laps(), layout.n_exact, lanes.search_of(config)
    compiled = can_build(call.key, call.value, layout, call.backend)
    if n_exact and not compiled:
        laps.timed("beginning", lambda: lanes.attend_beginning(call, layout, n_exact))
    attend = attend_compiled if compiled else _attend_plain
    for whole, lane in zip(lanes.lanes_of(call, 0), lanes.lanes_of(call, n_exact), strict=True):
        sources = laps.timed("nodes", partial(lanes.sources_of, lane, layout, call.backend))
        all_of_it, view = (lanes.view_of(some, layout, search, call.scale, call.backend) for some in (whole, lane))
        if compiled:
            laps.timed("tables", partial(make_tables, sources))
            laps.timed("beginning and near", partial(attend_near_compiled, whole.query, sources, all_of_it))
        near = attend_near_compiled if compiled else attend_near
        laps.timed("near", partial(near, lane.query, sources, view))
        laps.timed("nothing", partial(attend, lane.query, sources, replace(view, search=Search(0.0))))
        # a code that is worth no number reaches no limit
        blind = sources._replace(scales=torch.full_like(sources.scales, torch.nan))
        laps.timed("looked", partial(attend, lane.query, blind, view))
        found = laps.timed("whole", partial(attend, lane.query, sources, view))
        searched, rows = found[2].tolist()
        laps.searched += searched
        laps.rows += rows
    return laps


def _attend_plain(query: Tensor, sources: Sources, view: View) -> tuple[Attended, Tensor, Tensor]:
    return attend_plain(query, sources, view, attend_near(query, sources, view))


def multiply_adds(call: Call, layout: Layout, laps: _Laps) -> dict[str, float]:
    """Multiply-adds of exact attention and of every part, over all heads; making tables has none.

    A key that is read costs `D + Dv`, one that is searched `D`; nodes cost the covariances behind their trees and
    those that queries see, and the projections.
    """
    dim, both = call.key.shape[-1], call.key.shape[-1] + call.value.shape[-1]
    heads, lanes_ = call.query.shape[:2].numel(), call.key.shape[:2].numel()
    position = torch.arange(layout.n_exact, layout.n_query, dtype=torch.long)
    chunks = layout.chunks_seen(position)
    columns = layout.sinks + chunks * layout.nodes_per_chunk
    near = position + 1 - layout.sinks - chunks * layout.chunk
    strides = [max(1, (layout.chunk >> level) // FIT_SIZE) for level in range(layout.levels)]
    each = dim * both + sum(dim * (dim / stride + 1) for stride in strides)
    return {
        EXACT: heads * both * _triangle(layout.n_query),
        "beginning": heads * both * _triangle(layout.n_exact),
        "nodes": lanes_ * layout.n_chunks * layout.chunk * each,
        "near": heads * both * float(near.sum()),
        "tables": 0.0,
        "stand-ins": heads * both * float(columns.sum()),
        "search": float(laps.searched) * dim,
        "rows": float(laps.rows) * both,
    }


def _triangle(n: int) -> float:
    return n * (n + 1) / 2
