"""The speed table on saved heads of a real model: causal forward, with the error beside the time.

What random tensors cannot show is both how many keys real queries look for and how well the rest is guessed, so a
row has the time, the relative squared error of the layer's output against exact attention, the rows read and the
keys searched per query.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prescore.api.attention import prescored_attention
from prescore.config import Config, Routed
from prescore.evaluation.speed.check import Inputs, check_rows, middle_and_end, plain_piece
from prescore.evaluation.speed.saved_heads import SavedHeads
from prescore.evaluation.speed.timing import EXACT, METHODS, Setting, seconds
from prescore.records import Row
from prescore.values import Values


@dataclass(frozen=True)
class HeadsSetting:
    """One file at one length; every field goes into the record.

    Attributes:
        heads: Name of the file.
        digest: What identifies it.
        n: The first positions that are used.
        methods: As in `Setting`.
        dtype: That all run in.
        repeats: Timed rounds.
        top_k: Keys kept by the paper's preset.
        min_seq_len: Its exact causal leaves.
        memory: See `freed_memory.py`.
    """

    heads: str
    digest: str
    n: int
    methods: tuple[str, ...] = METHODS
    dtype: str = "float32"
    repeats: int = 3
    top_k: int = 2048
    min_seq_len: int = 2048
    memory: str = "system"

    def config(self, method: str) -> Config:
        """The configuration that a method name stands for."""
        base = Setting(self.n, causal=True, backward=False, top_k=self.top_k, min_seq_len=self.min_seq_len)
        return base.config(method)


def heads_row(saved: SavedHeads, setting: HeadsSetting, seed: int) -> Row:
    """A row that times every method on a file."""
    config = {"study": "heads", **asdict(setting), "methods": list(setting.methods)}
    cost = 0.5 * setting.n**2 * saved.shapes[0][1] * (setting.repeats + 2)
    return Row(config, seed, partial(measure_heads, saved, setting), cost)


@torch.no_grad()
def measure_heads(saved: SavedHeads, setting: HeadsSetting) -> Values:
    """Times of exact attention and every method, in turn; errors, rows and searched keys of the methods."""
    inputs = saved.inputs(setting.n, getattr(torch, setting.dtype))
    calls = {EXACT: exact_call(inputs, saved.scale)}
    calls |= {name: _call(inputs, setting.config(name), saved.scale) for name in setting.methods}
    exact = calls[EXACT]()
    methods: dict[str, Values] = {EXACT: {}}
    for name in setting.methods:
        output = calls[name]()
        methods[name] = {
            **_checked(f"{name} on {saved.name}", inputs, setting.config(name), output, saved.scale),
            "error": relative_error(output, exact),
            "head_errors": [relative_error(output[:, head], exact[:, head]) for head in range(output.shape[1])],
            **_read(inputs, setting.config(name), saved.scale),
        }
    times = _in_turn(calls, setting.repeats)
    median = {name: statistics.median(spent) for name, spent in times.items()}
    for name, spent in times.items():
        methods[name] |= {
            "seconds": median[name],
            "spread": max(spent) - min(spent),
            "speedup": median[EXACT] / median[name],
        }
    return {"shape": [list(t.shape) for t in inputs], "exact_scaled": False, "methods": methods}


def relative_error(output: Tensor, wanted: Tensor) -> float:
    """`|output - wanted|^2 / |wanted|^2`."""
    wide = wanted.double()
    return float((output.double() - wide).square().sum() / wide.square().sum().clamp_min(1e-300))


def exact_call(inputs: Inputs, scale: float | None) -> Callable[[], Tensor]:
    """Exact attention over grouped heads, causal."""
    return lambda: scaled_dot_product_attention(*inputs, is_causal=True, scale=scale, enable_gqa=True)


def _call(inputs: Inputs, config: Config, scale: float | None) -> Callable[[], Tensor]:
    return lambda: prescored_attention(*inputs, config, is_causal=True, scale=scale)


def _checked(name: str, inputs: Inputs, config: Config, output: Tensor, scale: float | None) -> Values:
    """How many rows differ from the same call in plain torch; an output that is off is refused by name."""
    if not isinstance(config, Routed):
        wanted = prescored_attention(*inputs, config, is_causal=True, scale=scale, backend="plain")
        return {"rows_off": check_rows(name, output, wanted)}
    pieces = middle_and_end(output.shape[2])
    wanted = torch.cat([plain_piece(inputs, config, rows, True, scale) for rows in pieces], dim=2)
    return {"rows_off": check_rows(name, torch.cat([output[:, :, rows] for rows in pieces], dim=2), wanted)}


def _read(inputs: Inputs, config: Config, scale: float | None) -> Values:
    """Rows read and keys searched by a query, on average over all of them."""
    stats = prescored_attention(*inputs, config, is_causal=True, scale=scale, return_aux=True)[1].stats
    searched = 0.0
    if isinstance(config, Routed):
        searched = stats["searched_keys"] * (1 - stats["exact_queries"] / inputs[0].shape[2])
    return {"rows_per_query": float(stats["rows_per_query"]), "searched_per_query": float(searched)}


def _in_turn(calls: dict[str, Callable[[], Tensor]], repeats: int) -> dict[str, list[float]]:
    """Every call once per round; each has run before, so the memory that it needs is there."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds(call))
    return times


def lengths_of(saved: Sequence[SavedHeads], lengths: Sequence[int] | None) -> list[tuple[SavedHeads, int]]:
    """Each file at each of its lengths: those asked for that it has, None = the whole of it."""
    found = []
    for heads in saved:
        own = [heads.length] if lengths is None else [n for n in lengths if n <= heads.length]
        if not own:
            raise ValueError(f"--n must be at most the {heads.length} positions of {heads.name}, got {lengths}")
        found += [(heads, n) for n in own]
    return found
