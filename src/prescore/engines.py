"""The one place where the type of a configuration chooses an engine; and the engine of `Exact`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from prescore.autograd import records_gradients
from prescore.call import Call, mean_visible_keys
from prescore.config import Config, Hyper, Routed, Selected
from prescore.ops.operators import pick_operator, rounds_weights
from prescore.ops.parts import exact_output
from prescore.routed import attention as routed
from prescore.routed.layout import why_exact
from prescore.scoring.select import selection_of
from prescore.selected import attention as selected
from prescore.types import Reads, Result


def run_engine(
    call: Call, config: Config, *, members: Tensor | None = None, explain: bool = False, need_lse: bool = True
) -> Result:
    """Run a call by the engine of its configuration.

    `members [B, Hkv, Nk]` is a given selection in aligned positions, for `Selected` only. `explain` also returns
    selections and all stats. Without `need_lse`, exact calls run torch's fused operator alone; lse is then empty.
    """
    if not need_lse and not explain and members is None and (reason := _why_exact(call, config)) is not None:
        # short inputs feel every copy, so nothing is split or merged here
        output = exact_output(
            call.query, call.key, call.value, is_causal=call.is_causal, scale=call.scale, operator=call.operator
        )
        return Result(output, call.query.new_empty(0), visible_keys(call), why_exact=reason)
    if not call.query.shape[1]:
        return attend_exact(call, explain=explain)  # no heads: there is nothing to choose for
    if isinstance(config, Routed):
        result = routed.attend_routed(call, config, explain=explain)
        is_recorded = records_gradients(call.query, call.key, call.value)
        if is_recorded and rounds_weights(result.lse, result.output.dtype, backward=True):
            wide = run_engine(_in_float64(call), config, explain=explain)
            output, lse = wide.output.to(result.output.dtype), wide.lse.to(result.lse.dtype)
            return replace(wide, output=output, lse=lse)
        return result
    if isinstance(config, Selected | Hyper):
        return selected.attend_selected(call, config, members, explain=explain)
    return attend_exact(call, explain=explain)


def _in_float64(call: Call) -> Call:
    query, key, value = (tensor.to(torch.float64) for tensor in (call.query, call.key, call.value))
    operator = pick_operator(query) if call.operator.unsupported(query) else call.operator
    return replace(call, query=query, key=key, value=value, operator=operator, backend="plain")


def _why_exact(call: Call, config: Config) -> str | None:
    """Why a call is exact attention without padding, which the operator can run as it is; None = it is not."""
    if call.valid is not None or call.operator.dropout is not None:
        return None
    if isinstance(config, Routed):
        return why_exact(config, call.n_query, call.n_keys, is_causal=call.is_causal) or None
    if isinstance(config, Selected | Hyper):
        return "" if selected.reads_every_key(call, config) else None
    return ""


def attend_exact(call: Call, *, explain: bool = False) -> Result:
    """Every query reads every key it may see."""
    begin = time.perf_counter()
    attended, count_reads = call.exactly(), visible_keys(call)
    if not explain:
        return Result(*attended, count_reads)
    shape = call.key.shape[:3]
    if call.valid is None:
        real = torch.ones(shape, dtype=torch.bool, device=call.key.device)
    else:
        real = call.valid[:, None].expand(shape)
    stats = {
        "keys_selected": call.mean_keys(),
        "keys_per_query": count_reads().keys,
        "mass_read": 1.0,
        "seconds": {"attending": time.perf_counter() - begin},
        "backend": call.operator.name,
    }
    return Result(*attended, count_reads, stats, [selection_of(real)])


def visible_keys(call: Call) -> Callable[[], Reads]:
    """Counts the real keys that a real query may see, on average; holds no keys or values of the call."""
    n_query, n_keys, is_causal, valid = call.n_query, call.n_keys, call.is_causal, call.valid
    return lambda: Reads(mean_visible_keys(n_query, n_keys, valid, is_causal=is_causal))
