"""Causal windows with sinks by native code: what a sliding window costs where somebody made it fast."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.attention import exact_attention
from prescore.autograd import records_gradients
from prescore.ops.operators import readable
from prescore.ops.parts import merge
from prescore.routed import native


def attend_window(
    query: Tensor, key: Tensor, value: Tensor, start: Tensor, *, sinks: int, scale: float | None
) -> Tensor | None:
    """Position i reads the keys from `start[i]` to its own, and the first `sinks`; None = no native code can run.

    Args:
        query: `[B, Hq, N, D]`.
        key: `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        start: `[N]` int32, ascending, on the CPU.
        sinks: First positions that every query reads too.
        scale: Factor of the logits; None = `D ** -0.5`.
    """
    if records_gradients(query, key, value) or not native.can_run(query, value.shape[-1], native.WIDTH):
        return None
    query, key, value = map(readable, (query, key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    start = start.masked_fill(start <= sinks, 0)  # the window touches the sinks
    stop = torch.arange(1, query.shape[2] + 1, dtype=torch.int32, device="cpu")
    window = native.attend_ranges(query, key, value, start[None], stop[None], factor)
    begin = int((start == 0).sum())
    if not sinks or begin == query.shape[2]:
        return window.output
    first = exact_attention(query[:, :, begin:], key[:, :, :sinks], value[:, :, :sinks], scale=scale)
    rest = type(window)(window.output[:, :, begin:], window.lse[:, :, begin:])
    return torch.cat((window.output[:, :, :begin], merge(rest, first).output), dim=2)
