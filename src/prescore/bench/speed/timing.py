"""How attention calls are timed and checked.

Calls are timed in turn, round by round, so that other load on the machine hits all of them alike. No time is
reported before the output of the same call matched its reference on the same inputs: the same call on the plain
backend, in the same precision, because keys are selected by comparing numbers and a clustering in float64 would
select others. Long routed calls are compared in two chunks of queries, because the plain backend forms every
logit. Exact attention is compared with its definition in float64.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from prescore.attention import prescored_attention
from prescore.bench.records import Values
from prescore.config import Config, Exact, Routed
from prescore.routed.backends import auto_config

EXACT = "exact"

TOLERANCE = 2e-4  # float32 sums of up to 131,072 terms
TOLERANCE_HALF = 3e-2
MOST_MISMATCHED = 0.005
"""Share of the queries of a model that may differ: real keys lie at every threshold, and rounding decides."""
MOST_AT_THRESHOLD = 0.01
"""Share of random queries that may read a key at the threshold which the reference does not, or the reverse."""
CHECKED_QUERIES = 8
LONG_CALL, CHUNK = 8192, 512
"""Longer routed calls are checked in chunks of so many queries."""

Inputs = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""
Attention = Callable[[], Tensor]
Answer = TypeVar("Answer")


def random_inputs(
    n: int, heads: int, dim: int, *, kv_heads: int | None = None, dtype: str = "float32", seed: int = 0
) -> Inputs:
    """Normal query `[1, heads, n, dim]`, key and value `[1, kv_heads, n, dim]`."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads, kv_heads or heads, kv_heads or heads)
    query, key, value = (torch.randn(1, size, n, dim, generator=generator) for size in sizes)
    kind: torch.dtype = getattr(torch, dtype)
    return query.to(kind), key.to(kind), value.to(kind)


def timed(work: Callable[[], Answer]) -> tuple[float, Answer]:
    """Wall time in seconds, and the result; work that was started on a GPU is waited for."""
    _wait()
    begin = time.perf_counter()
    result = work()
    _wait()
    return time.perf_counter() - begin, result


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(call: Attention, *, backward: bool = False) -> float:
    """Wall time of an attention call, with its backward pass where asked for."""

    def run() -> None:
        with torch.set_grad_enabled(backward):
            output = call()
        if backward:
            output.backward(torch.ones_like(output))

    return timed(run)[0]


def time_calls(calls: Mapping[str, Attention], repeats: int, *, backward: bool = False) -> dict[str, Values]:
    """Time calls in turn: `seconds` (median), `spread` (slowest - fastest) and `speedup` over `exact` of each.

    Every call runs as often as exact attention does, on the same inputs. A first round is not counted: it takes
    memory from the system that later rounds reuse.

    Args:
        calls: By name; `exact` is one of them.
        repeats: Rounds.
        backward: Whether the backward pass counts.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            times[name].append(seconds(call, backward=backward))
    times = {name: spent[1:] for name, spent in times.items()}
    medians = {name: statistics.median(spent) for name, spent in times.items()}
    return {
        name: {
            "seconds": medians[name],
            "spread": max(spent) - min(spent),
            "speedup": medians[EXACT] / medians[name],
        }
        for name, spent in times.items()
    }


@torch.no_grad()
def check_method(
    name: str,
    inputs: Inputs,
    config: Config,
    output: Tensor,
    *,
    is_causal: bool,
    scale: float | None = None,
    from_model: bool = False,
) -> Values:
    """Compare the output of a timed call with its reference; see `check_output`.

    With inputs from a model a few queries may differ, by any amount. With random inputs a few routed queries may
    differ by the weight of keys at the threshold: two keys of about `min_weight`, whose values differ from the
    others by at most twice the largest.
    """
    if isinstance(config, Routed):
        config, _ = auto_config(*inputs, config, is_causal=is_causal)
    n, most, by, unit = inputs[0].shape[2], 0.0, float("inf"), torch.ones(())
    chunks = [slice(0, n)]
    if isinstance(config, Routed) and n > LONG_CALL:
        chunks = [slice(n // 2 - CHUNK // 2, n // 2 + CHUNK // 2), slice(n - CHUNK, n)]
    wanted = torch.cat([plain_output(inputs, config, queries, is_causal, scale) for queries in chunks], dim=2)
    compared = torch.cat([output[:, :, queries] for queries in chunks], dim=2)
    if from_model:
        unit = wanted.double().abs().amax((-1, -2), keepdim=True).squeeze(-1)
        most = MOST_MISMATCHED * compared[..., 0].numel()
    elif isinstance(config, Routed):
        most = max(1, MOST_AT_THRESHOLD * compared[..., 0].numel())
        by = 0.0 if config.min_weight == 1 else 4 * float(inputs[2].abs().max()) * config.min_weight
    return check_output(name, compared, wanted, unit=unit, most=most, by=by)


@torch.no_grad()
def check_exact(
    name: str, inputs: Inputs, output: Tensor, *, is_causal: bool, scale: float | None = None
) -> Values:
    """Compare the first and the last queries of exact attention with the plain backend in float64."""
    query, key, value = (tensor.detach().double() for tensor in inputs)
    n = query.shape[2]
    some = [slice(0, min(n, CHECKED_QUERIES)), slice(max(0, n - CHECKED_QUERIES), n)]
    wanted = [plain_output((query, key, value), Exact(), queries, is_causal, scale) for queries in some]
    return check_output(
        name, torch.cat([output[:, :, queries] for queries in some], dim=2), torch.cat(wanted, dim=2)
    )


def plain_output(
    inputs: Inputs, config: Config, queries: slice, is_causal: bool, scale: float | None = None
) -> Tensor:
    """Some queries of a call on the plain backend, which read what they read in the full call.

    Without a causal mask a call of at most `exact_until` queries is exact, which the full call need not be.
    """
    query, key, value = inputs
    stop = key.shape[2] - (query.shape[2] - queries.stop if is_causal else 0)
    if isinstance(config, Routed) and not is_causal and query.shape[2] > config.exact_until:
        config = config.replace(exact_until=0)
    call = (query[:, :, queries], key[:, :, :stop], value[:, :, :stop], config)
    return prescored_attention(*call, is_causal=is_causal, scale=scale, backend="plain")


def check_output(
    name: str,
    output: Tensor,
    wanted: Tensor,
    *,
    unit: Tensor | float = 1.0,
    most: float = 0.0,
    by: float = float("inf"),
) -> Values:
    """Refuse an output `[..., n, Dv]` that differs from its reference.

    Args:
        name: What the message calls it.
        output: Of the call.
        wanted: Of the reference.
        unit: What the tolerance is relative to, `[...]` or a number.
        most: Number of queries that may differ.
        by: Amount by which these may differ.

    Returns:
        `error`, the largest difference, and `mismatched_queries`, the share of queries that differ.
    """
    tolerance = TOLERANCE if output.dtype in (torch.float32, torch.float64) else TOLERANCE_HALF
    errors = (output.detach().double() - wanted.double()).abs().amax(-1)
    error, n_off = float(errors.max()), int((~(errors <= tolerance * unit)).sum())
    if n_off > most or (n_off and not error <= tolerance + by):
        raise RuntimeError(
            f"output of {name} must match its reference to {tolerance}, got {error} in {n_off} of "
            f"{errors.numel()} queries"
        )
    return {"error": error, "mismatched_queries": n_off / errors.numel()}
