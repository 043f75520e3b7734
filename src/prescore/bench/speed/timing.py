"""How attention calls are timed and checked.

Calls are timed in turn, round by round, so that other load on the machine hits all of them alike. No time is
reported before the output of the same call matched its reference on the same inputs.

An output is compared with the same call on the plain backend, in the same precision: keys are selected by
comparing numbers, and a clustering in float64 would select others. Long routed calls are compared in two chunks
of queries, because the plain backend forms every logit. Short ones, and exact attention at every length, are also
compared with their definition in float64.
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
from prescore.config import Config, Routed
from prescore.routed.reference import reference_attention

EXACT = "exact"
MOST_ROUNDS = 200

TOLERANCE = 2e-4  # float32 sums of up to 131,072 terms
TOLERANCE_HALF = 3e-2
MOST_MISMATCHED = 0.005
"""Share of the queries of a model that may differ: real keys lie at every threshold, and rounding decides."""
MOST_AT_THRESHOLD = 0.01
"""Share of random queries that may read a key at the threshold which the reference does not, or the reverse."""
CHECKED_QUERIES = 8
ORACLE_LENGTH = 8192
CHUNK = 512
"""Queries of each chunk of a routed call longer than `ORACLE_LENGTH`."""

Inputs = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""
Attention = Callable[[], Tensor]
Answer = TypeVar("Answer")
AnyConfig = TypeVar("AnyConfig", bound=Config)


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
    """Wall time in seconds, and the result."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def seconds(call: Attention, *, backward: bool = False) -> float:
    """Wall time of an attention call, with its backward pass where asked for."""

    def run() -> None:
        with torch.set_grad_enabled(backward):
            output = call()
        if backward:
            output.backward(torch.ones_like(output))

    return timed(run)[0]


def time_calls(
    calls: Mapping[str, Attention], repeats: int, *, backward: bool = False, min_seconds: float = 0.0
) -> dict[str, Values]:
    """Time calls in turn: `seconds` (median), `spread` (slowest - fastest) and `speedup` over `exact` of each.

    Every call runs as often as exact attention does, on the same inputs. A first round is not counted: it takes
    memory from the system that later rounds reuse.

    Args:
        calls: By name; `exact` is one of them.
        repeats: Rounds.
        backward: Whether the backward pass counts.
        min_seconds: Add rounds until exact attention has run this long.
    """
    first = {name: seconds(call, backward=backward) for name, call in calls.items()}
    rounds = max(repeats, min(MOST_ROUNDS, int(min_seconds / first[EXACT])))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, backward=backward))
    exact = statistics.median(times[EXACT])
    return {
        name: {
            "seconds": statistics.median(spent),
            "spread": max(spent) - min(spent),
            "speedup": exact / statistics.median(spent),
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
    """Compare the output of a timed call with its references; see `check_output`.

    Args:
        name: What messages call the method.
        inputs: Of the call.
        config: Of the call.
        output: Of the call.
        is_causal: Of the call.
        scale: Of the call.
        from_model: Whether the inputs come from a model: a few queries may differ then, by any amount.
    """
    n = inputs[0].shape[2]
    chunks = [slice(0, n)]
    if isinstance(config, Routed) and n > ORACLE_LENGTH:
        chunks = [slice(n // 2 - CHUNK // 2, n // 2 + CHUNK // 2), slice(n - CHUNK, n)]
    wanted = torch.cat([plain_output(inputs, config, queries, is_causal, scale) for queries in chunks], dim=2)
    compared = torch.cat([output[:, :, queries] for queries in chunks], dim=2)
    n_compared = compared[..., 0].numel()
    if from_model:
        largest = wanted.double().abs().amax((-1, -2), keepdim=True).squeeze(-1)
        return check_output(name, compared, wanted, unit=largest, most=MOST_MISMATCHED * n_compared)
    if not isinstance(config, Routed):
        return check_output(name, compared, wanted)
    at_threshold = weight_at_threshold(config, inputs[2])
    checked = check_output(name, compared, wanted, most=max(1, MOST_AT_THRESHOLD * n_compared), by=at_threshold)
    if n <= ORACLE_LENGTH and output.dtype in (torch.float32, torch.float64):
        last = slice(n - min(n, CHECKED_QUERIES), n)
        wanted = oracle_output(inputs, config, last, is_causal)
        defined = check_output(name, output[:, :, last], wanted, most=1, by=at_threshold)
        checked["error"] = max(checked["error"], defined["error"])
    return checked


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


def weight_at_threshold(config: Routed, value: Tensor) -> float:
    """Error of a query that reads two keys at the threshold which the reference does not.

    Such a key has about `min_weight` of the weight, and its value differs from the others by at most twice the
    largest.
    """
    return 0.0 if config.min_weight == 1 else 4 * float(value.detach().abs().max()) * config.min_weight


def plain_output(
    inputs: Inputs, config: Config, queries: slice, is_causal: bool, scale: float | None = None
) -> Tensor:
    """Some queries of a call on the plain backend."""
    query, key, value = inputs
    stop = key.shape[2] - (query.shape[2] - queries.stop if is_causal else 0)
    call = (query[:, :, queries], key[:, :, :stop], value[:, :, :stop], part_config(config, query, is_causal))
    return prescored_attention(*call, is_causal=is_causal, scale=scale, backend="plain")


def oracle_output(inputs: Inputs, config: Routed, queries: slice, is_causal: bool) -> Tensor:
    """The last queries of a routed call by its definition, head by head."""
    query, key, value = inputs
    part, group = part_config(config, query, is_causal), query.shape[1] // key.shape[1]
    heads = (
        (some, key[0, head // group], value[0, head // group]) for head, some in enumerate(query[0, :, queries])
    )
    return torch.stack([reference_attention(*own, part, is_causal=is_causal).output for own in heads])[None]


def part_config(config: AnyConfig, query: Tensor, is_causal: bool) -> AnyConfig:
    """The configuration under which some queries of a call read what they read in the full call.

    Without a causal mask a call of fewer queries than `exact_until` is exact, which the full call need not be.
    """
    if is_causal or not isinstance(config, Routed) or query.shape[2] < config.exact_until:
        return config
    return config.replace(exact_until=0)


@torch.no_grad()
def check_exact(
    name: str, inputs: Inputs, output: Tensor, *, is_causal: bool, scale: float | None = None
) -> Values:
    """Compare some queries of exact attention with the definition in float64."""
    n = output.shape[2]
    positions = torch.linspace(0, n - 1, min(n, CHECKED_QUERIES), dtype=torch.float64).long()
    return check_output(name, output[:, :, positions], softmax_queries(inputs, positions, is_causal, scale))


def softmax_queries(inputs: Inputs, positions: Tensor, is_causal: bool, scale: float | None = None) -> Tensor:
    """Exact attention of the queries at `positions`, `[B, Hq, len(positions), Dv]` in float64; `Nq = Nk`."""
    query, key, value = (tensor.detach().double() for tensor in inputs)
    query = query.unflatten(1, (key.shape[1], -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    outputs = []
    for position in positions.tolist():
        stop = position + 1 if is_causal else key.shape[2]
        logits = query[:, :, :, position] @ key[:, :, :stop].mT
        outputs.append((logits.softmax(-1) @ value[:, :, :stop]).flatten(1, 2))
    return torch.stack(outputs, dim=2)
