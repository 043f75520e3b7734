"""What an attention costs: key rows met per query, and seconds spent in the attention function itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from prescore.attention.routed_layout import Layout
from prescore.attention.routed_levels import columns_in, single_ranges, stand_in_ranges


@dataclass(eq=False)
class Meter:
    """Time and rows of one forward, by layer number.

    Attributes:
        seconds: Time inside the attention function, scoring included.
        processor_seconds: The same as processor time summed over threads, which a busy machine does not stretch;
            empty where the work is done by another device.
        rows: Rows per query of the replaced layers; counted once, beside the time.
        replaced: Layers that ran the method; the others were exact.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    processor_seconds: dict[int, float] = field(default_factory=dict)
    rows: dict[int, float] = field(default_factory=dict)
    replaced: frozenset[int] = frozenset()

    def timed(self, layer: int, work: Callable[[], Tensor], device: torch.device) -> Tensor:
        """Run a layer's attention and add its time to the books; work queued on a GPU before is not counted."""
        _wait(device)
        begin, processor = time.perf_counter(), time.process_time()
        output = work()
        _wait(device)
        self.seconds[layer] = self.seconds.get(layer, 0.0) + time.perf_counter() - begin
        if device.type == "cpu":
            spent = time.process_time() - processor
            self.processor_seconds[layer] = self.processor_seconds.get(layer, 0.0) + spent
        return output

    def figures(self) -> dict[str, Any]:
        """The sums that a record carries."""
        replaced = [seconds for layer, seconds in self.seconds.items() if layer in self.replaced]
        processor = self.processor_seconds.values()
        return {
            "attention_seconds": round(sum(self.seconds.values()), 4),
            "attention_processor_seconds": round(sum(processor), 4) if processor else None,
            "replaced_seconds": round(sum(replaced), 4),
            "layers_replaced": len(replaced),
            "rows_per_query": round(sum(self.rows.values()) / len(self.rows), 2) if self.rows else None,
        }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def exact_rows(length: int) -> float:
    """Keys that a query meets under plain causal attention."""
    return (length + 1) / 2


def leaf_rows(length: int, leaf: int) -> float:
    """Keys that a query meets inside its own leaf."""
    return float((torch.arange(length, dtype=torch.float64) % leaf + 1).mean())


def routed_rows(figures: Mapping[str, Any]) -> float:
    """Rows that a query meets in causal routed attention, on average; its own statistics tell the last query's.

    The first queries are exact. Behind them a query of chunk c meets the chunk before, its own chunk up to itself,
    the sinks, and of the c - 1 pieces further back their single keys, a stand-in per leaf, and the chosen leaves.
    Heads that copy are counted as the others: they read more rows by as many as the others read less, and meet
    more stand-ins and no single keys.

    Args:
        figures: Statistics of a routed call.
    """
    layout = Layout(**{each.name: figures[each.name] for each in fields(Layout)})
    position = torch.arange(layout.n_query, dtype=torch.float64)
    behind = position - layout.sinks
    chunk = torch.div(behind, layout.chunk, rounding_mode="floor")
    pieces = (chunk - 1).clamp_min(0).long()
    behind_pieces = range(int(pieces.max()) + 1)
    stand_ins, apart = (
        torch.tensor([columns_in(ranges(layout, seen)) for seen in behind_pieces], dtype=torch.float64)[pieces]
        for ranges in (stand_in_ranges, single_ranges)
    )
    local = layout.chunk + behind - chunk * layout.chunk + 1
    far = stand_ins.clamp_max(layout.n_chosen) * layout.leaf
    # never more than there are keys, beside the stand-ins
    met = torch.minimum(local + apart + far, position + 1) + stand_ins
    return float(torch.where(position < figures["exact_queries"], position + 1, met).mean())


def baseline_rows(name: str, length: int, settings: Mapping[str, Any]) -> float:
    """Keys that a query meets in a baseline, from its settings; what choosing them cost is in the time alone.

    For `performer` it is the number of features, which take the place of rows; for `reformer` an upper bound.
    """
    position = torch.arange(length, dtype=torch.float64)
    if name == "streaming":
        beyond = (position + 1 - settings["window"]).clamp_min(0)
        seen = (position + 1).clamp_max(settings["window"]) + beyond.clamp_max(settings["sinks"])
    elif name == "performer":
        seen = torch.full_like(position, settings["n_features"])
    elif name == "reformer":
        seen = (position + 1).clamp_max(2 * settings["chunk_size"] * settings["n_rounds"])
    else:
        own = position % settings["chunk_size"]
        seen = own + 1 + (position - own).clamp_max(settings["budget"])
    return float(seen.mean())
