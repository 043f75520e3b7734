"""What an attention costs: key rows met per query, and seconds spent in the attention function itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from prescore.baselines import third_party_baselines
from prescore.values import Values

Result = TypeVar("Result")


@dataclass(eq=False)
class Meter:
    """Time and rows of one forward, by layer number.

    Attributes:
        seconds: Time inside the attention function, scoring included.
        processor_seconds: The same as processor time summed over threads, which a busy machine does not stretch;
            empty where the work is done by another device.
        rows: Rows per query of replaced layers, counted beside the time.
        exact_rows: Rows per query of the other layers, where they read everything before them.
        replaced: Layers that ran the method; the others were exact.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    processor_seconds: dict[int, float] = field(default_factory=dict)
    rows: dict[int, float] = field(default_factory=dict)
    exact_rows: dict[int, float] = field(default_factory=dict)
    replaced: frozenset[int] = frozenset()

    def timed(self, layer: int, work: Callable[[], Result], device: torch.device) -> Result:
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

    def figures(self) -> Values:
        """The sums that a record carries."""
        replaced = [seconds for layer, seconds in self.seconds.items() if layer in self.replaced]
        processor = self.processor_seconds.values()
        own = sum(self.rows.values()) / len(self.rows) if self.rows else None
        mean = None
        if own is not None:
            counted = [*self.rows.values(), *self.exact_rows.values()]
            mean = sum(counted) / len(counted)
        return {
            "attention_seconds": round(sum(self.seconds.values()), 4),
            "attention_processor_seconds": round(sum(processor), 4) if processor else None,
            "replaced_seconds": round(sum(replaced), 4),
            "layers_replaced": len(replaced),
            "rows_per_query": None if mean is None else round(mean, 2),
            "replaced_rows_per_query": None if own is None else round(own, 2),
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


def near_rows(length: int, chunk: int, sinks: int) -> float:
    """Keys that a query meets in its own chunk, the one before and the first positions."""
    position = torch.arange(length, dtype=torch.float64)
    begin = position - position % chunk
    first = (begin - chunk).clamp_min(0)
    return float((position + 1 - first + first.clamp_max(sinks)).mean())


def baseline_rows(name: str, length: int, settings: Mapping[str, Any]) -> float:
    """Keys that a query meets in a baseline, from its settings; what choosing them cost is in the time alone.

    For `performer` it is the number of features, which take the place of rows; for `reformer` an upper bound.
    """
    third_party = third_party_baselines()
    if name in third_party:
        return float(third_party[name].rows(length, settings))
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
