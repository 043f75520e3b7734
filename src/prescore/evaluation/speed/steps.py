"""One routed decode step against exact attention's, token after token, as a cache sees them.

Both read the same keys where they lie. Exact attention is timed twice: as a call with grouped heads, and with the
heads of a group folded into the queries of one key head, which reads every key once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prescore.api.attention import prescored_attention
from prescore.config import Routed
from prescore.decoding.decoder import Decoder, Past, Request
from prescore.evaluation.speed.check import Inputs, check_rows
from prescore.evaluation.speed.heads import relative_error
from prescore.evaluation.speed.layer_inputs import LayerInputs, LayerSetting
from prescore.evaluation.speed.timing import EXACT
from prescore.values import Values

FOLDED, ROUTED = "folded", "routed"
Result = TypeVar("Result")


@torch.no_grad()
def measure_steps(setting: LayerSetting, inputs: LayerInputs) -> Values:
    """Seconds of a step over the last positions of a layer; the first one, which makes the index, apart."""
    decoder, config = Decoder(), Routed()
    first = setting.n - setting.repeats
    if first < 1:
        raise ValueError(f"n must be more than the {setting.repeats} steps, got {setting.n}")
    index_seconds, _ = _timed(partial(_routed_step, decoder, _at(inputs, first), config, inputs.scale))
    times: dict[str, list[float]] = {EXACT: [], FOLDED: [], ROUTED: []}
    outputs: dict[str, list[Tensor]] = {EXACT: [], ROUTED: []}
    rows, paths = [], set()
    for position in range(first, setting.n):
        now = _at(inputs, position + 1)
        spent, exact = _timed(partial(_exact_step, now, inputs.scale))
        times[EXACT].append(spent)
        times[FOLDED].append(_timed(partial(_folded_step, now, inputs.scale))[0])
        spent, step = _timed(partial(_routed_step, decoder, now, config, inputs.scale))
        times[ROUTED].append(spent)
        outputs[EXACT].append(exact)
        outputs[ROUTED].append(step[0])
        rows.append(step[1])
        paths.add(step[2])
    off = _check_last(setting, inputs, outputs[ROUTED][-1], config)
    medians = {name: statistics.median(spent) for name, spent in times.items()}
    return {
        "seconds": medians,
        "mean_seconds": {name: statistics.fmean(spent) for name, spent in times.items()},
        "spread": {name: max(spent) - min(spent) for name, spent in times.items()},
        "index_seconds": index_seconds,
        "path": sorted(paths),
        "rows": statistics.fmean(rows),
        "speedup": medians[EXACT] / medians[ROUTED],
        "speedup_folded": medians[FOLDED] / medians[ROUTED],
        "error": relative_error(torch.cat(outputs[ROUTED], 2), torch.cat(outputs[EXACT], 2)),
        "rows_off": off,
    }


def _check_last(setting: LayerSetting, inputs: LayerInputs, output: Tensor, config: Routed) -> float:
    """A step is the row of a whole call (in plain torch); one that is not is refused by name."""
    wanted = prescored_attention(
        *_at(inputs, setting.n), config, is_causal=True, scale=inputs.scale, backend="plain"
    )
    return check_rows(f"a routed step at n = {setting.n}", output, wanted)


def _timed(work: Callable[[], Result]) -> tuple[float, Result]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def _at(inputs: LayerInputs, n_keys: int) -> Inputs:
    """The newest query of `n_keys` positions, and views of their keys and values."""
    query, key, value = inputs.tensors
    return query[:, :, n_keys - 1 : n_keys], key[:, :, :n_keys], value[:, :, :n_keys]


def _exact_step(now: Inputs, scale: float) -> Tensor:
    return scaled_dot_product_attention(*now, scale=scale, enable_gqa=True)


def _folded_step(now: Inputs, scale: float) -> Tensor:
    query, key, value = now
    folded = query.unflatten(1, (key.shape[1], -1)).squeeze(3)
    return scaled_dot_product_attention(folded, key, value, scale=scale).flatten(1, 2)[:, :, None]


def _routed_step(decoder: Decoder, now: Inputs, config: Routed, scale: float) -> tuple[Tensor, float, str]:
    """Output, rows met and the path of a step, as a layer with a cache of ours takes it."""
    query, key, value = now
    step = decoder.step(query, Past(key, value, None, key.shape[2]), Request(config, scale))
    if step.output is None or step.count_rows is None:
        return _exact_step(now, scale), float(key.shape[2]), step.path
    return step.output, step.count_rows(), step.path
