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
from prescore.ops.operators import pick_operator, readable, rounds_weights
from prescore.ops.parts import attend_parts, exact_parts
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
    is_plain = not need_lse and not explain and members is None
    reason = _why_exact(call, config) if is_plain else None
    if reason is not None and (output := _fused_output(call)) is not None:
        return Result(output, call.query.new_empty(0), visible_keys(call), why_exact=reason)
    if reason is None and call.query.shape[1]:  # without heads there is nothing to choose for
        if isinstance(config, Routed):
            return _routed_result(call, config, explain)
        if isinstance(config, Selected | Hyper):
            return selected.attend_selected(call, config, members, explain=explain)
    begin, count_reads = time.perf_counter(), visible_keys(call)
    parts = exact_parts(call.query, call.key, is_causal=call.is_causal, valid=call.valid)
    operator = call.operator.at("exact")
    attended = attend_parts(call.query, call.key, call.value, parts, scale=call.scale, operator=operator)
    if not explain:
        return Result(*attended, count_reads, why_exact=reason or "")
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


def _routed_result(call: Call, config: Routed, explain: bool) -> Result:
    """The result of `Routed`; where gradients need it, in float64."""
    result = routed.attend_routed(call, config, explain=explain)
    is_recorded = records_gradients(call.query, call.key, call.value)
    if not (is_recorded and rounds_weights(result.lse, result.output.dtype, backward=True)):
        return result
    wide = routed.attend_routed(_in_float64(call), config, explain=explain)
    return replace(wide, output=wide.output.to(result.output.dtype), lse=wide.lse.to(result.lse.dtype))


def _in_float64(call: Call) -> Call:
    query, key, value = (tensor.to(torch.float64) for tensor in (call.query, call.key, call.value))
    operator = pick_operator(query) if call.operator.unsupported(query) else call.operator
    return replace(call, query=query, key=key, value=value, operator=operator, backend="plain")


def _why_exact(call: Call, config: Config) -> str | None:
    """Why a call is exact attention without padding, which the operator can run as it is; None = it is not."""
    if call.valid is not None or call.operator.dropout is not None:
        return None
    sizes = call.n_query, call.n_keys
    if isinstance(config, Routed):
        return why_exact(config, *sizes, is_causal=call.is_causal) or None
    if not isinstance(config, Selected | Hyper):
        return ""
    if not selected.is_one_leaf(config, *sizes, is_causal=call.is_causal):
        return None
    return selected.why_exact(config, *sizes, is_causal=call.is_causal)


def _fused_output(call: Call) -> Tensor | None:
    """Output of torch's fused operator, with its backward; None where the operator cannot take these inputs.

    Short inputs feel every copy, so nothing is split or merged.
    """
    query, key, value = call.query, call.key, call.value
    same_sizes = (not call.is_causal or call.n_query == call.n_keys) and value.shape[3] == query.shape[3]
    if call.operator.name != "cpu-flash" or not same_sizes or not query.numel() or not key.numel():
        return None
    output: Tensor
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        readable(query), readable(key), readable(value), 0.0, call.is_causal, scale=call.scale
    )
    is_recorded = records_gradients(query, key, value)
    return None if is_recorded and rounds_weights(lse, query.dtype, backward=True) else output


def visible_keys(call: Call) -> Callable[[], Reads]:
    """Counts the real keys that a real query may see, on average; holds no keys or values of the call."""
    n_query, n_keys, is_causal, valid = call.n_query, call.n_keys, call.is_causal, call.valid
    return lambda: Reads(mean_visible_keys(n_query, n_keys, valid, is_causal=is_causal))
