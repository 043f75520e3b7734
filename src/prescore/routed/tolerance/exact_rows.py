"""Exact attention for some queries of a call: those that an error bar asks for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prescore.call import Call
from prescore.ops.exact import padding_bias
from prescore.ops.parts import Part, attend_parts
from prescore.types import Attended

ROWS_AT_ONCE = 256


def exact_for(call: Call, wanted: Tensor) -> Attended:
    """Exact attention for the `wanted [B, Hq, Nq]` queries only; all others have output 0 and lse -inf."""
    n_query, n_key, n_kv_heads = call.n_query, call.n_keys, call.key.shape[1]
    n_trees, device = call.key.shape[0] * n_kv_heads, call.query.device
    keys = torch.arange(n_trees * n_key, device=device).view(n_trees, 1, n_key)
    padding = None if call.valid is None else padding_bias(call.valid, n_kv_heads, call.query.dtype)[:, None]
    parts = []
    for tree, own in enumerate(wanted.reshape(n_trees, call.group, n_query)):
        # by position, so that rows of one part see almost the same keys, and masks stay small
        position, head = own.t().nonzero(as_tuple=True)
        for rows in (slice(start, start + ROWS_AT_ONCE) for start in range(0, len(position), ROWS_AT_ONCE)):
            query_rows = ((tree * call.group + head[rows]) * n_query + position[rows])[None, None]
            last = position[rows] + (n_key - n_query)
            if not call.is_causal:
                last = torch.full_like(position[rows], n_key - 1)
            cut, stop = int(last[0]) + 1, int(last[-1]) + 1
            bias = None if padding is None else padding[tree, :, :cut]
            parts.append(Part(query_rows.shape, query_rows, key_rows=keys[tree, :, :cut], bias=bias))
            if stop > cut:
                later = torch.arange(cut, stop, device=device) > last[:, None]
                mask = torch.zeros(later.shape, dtype=call.query.dtype, device=device)
                mask = mask.masked_fill_(later, -math.inf)[None, None]
                if padding is not None:
                    mask = mask + padding[tree, :, cut:stop]
                parts.append(Part(query_rows.shape, query_rows, key_rows=keys[tree, :, cut:stop], bias=mask))
    return attend_parts(call.query, call.key, call.value, parts, scale=call.scale, backend=call.backend)
