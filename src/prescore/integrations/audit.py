"""The error of a layer's attention, measured on a random sample of its queries (`prescore.apply(audit=...)`).

Exact attention is a plain product over the visible keys, in float32 (float64 for float64). Only the
function of softmax is shared with the engines.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from prescore.integrations.masks import MaskForm, rebuild
from prescore.integrations.report import Errors
from prescore.ops.operators import accumulation_dtype, softmax_with_lse
from prescore.rng import Streams

_LOGITS_AT_ONCE = 2**22
"""Logits of exact attention that are in memory at once, at most."""


@torch.no_grad()
def measure_errors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    form: MaskForm,
    *,
    scale: float | None,
    share: float,
    seed: int,
) -> Errors:
    """Relative errors `|output - exact| / |exact|` of some queries, all heads of each.

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`.
        value: `[B, Hkv, Nk, Dv]`.
        output: `[B, Hq, Nq, Dv]`, what the layer returned.
        form: The mask, of known structure.
        scale: Factor of the logits; None = `D ** -0.5`.
        share: Share of the real queries that is measured; at least one is.
        seed: Of the sample.
    """
    n_query, n_keys, n_kv_heads = query.shape[2], form.n_keys, key.shape[1]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    size = max(1, _LOGITS_AT_ONCE // (query.shape[1] * max(1, n_keys)))
    errors = Errors()
    for row, sample in enumerate(_sample(query, form, share, seed)):
        valid, starts, reach = (
            None if t is None else t[row : row + 1] for t in (form.valid, form.starts, form.reach)
        )
        form_of_row = replace(form, valid=valid, starts=starts, reach=reach)
        keys, values = (t[row, :, None, :n_keys] for t in (key, value))
        for places in sample.split(size) if len(sample) else ():
            shown = [
                rebuild(form_of_row, position, position + 1, n_query, query.device)[0]
                for position in places.tolist()
            ]
            queries, outputs = (t[row, :, places].unflatten(0, (n_kv_heads, -1)) for t in (query, output))
            of_heads = _relative_errors(queries, outputs, keys, values, ~torch.cat(shown), factor)
            errors = errors + Errors.of(of_heads.flatten(0, 1))
    return errors


def _relative_errors(
    query: Tensor, output: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float
) -> Tensor:
    """`[Hkv, G, n]` of `query [Hkv, G, n, D]` and `key [Hkv, 1, Nk, D]`, with `hidden [n, Nk]` keys."""
    wide = accumulation_dtype(query.dtype)
    logits = (query.to(wide) @ key.to(wide).transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf)
    exact = softmax_with_lse(logits, -1)[0] @ value.to(wide)
    off = torch.linalg.vector_norm(output.to(wide) - exact, dim=-1)
    errors: Tensor = (off / torch.linalg.vector_norm(exact, dim=-1)).masked_fill(off == 0, 0.0)
    return errors


def _sample(query: Tensor, form: MaskForm, share: float, seed: int) -> list[Tensor]:
    """The sampled queries of each sequence, without padding queries."""
    batch, _, n_query, _ = query.shape
    real = torch.ones(batch, n_query, dtype=torch.bool, device=query.device)
    if form.valid is not None and (form.kind != "full" or n_query == form.n_keys):
        real = form.valid[:, form.n_keys - n_query :]
    pairs = real.nonzero()
    generator = Streams(seed).generator("audit")
    order = torch.randperm(len(pairs), generator=generator, dtype=torch.int64, device="cpu").to(query.device)
    row, position = pairs[order[: max(1, round(share * len(pairs)))]].unbind(1)
    return [position[row == number] for number in range(batch)]
