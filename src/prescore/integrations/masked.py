"""Attention under a mask's structure: exactly, or pre-scored."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from prescore.api.run import Counted, Options, attend_counting
from prescore.config import Exact
from prescore.decoding.decoder import Request
from prescore.errors import Unsupported
from prescore.integrations.dropout import dropout_seed
from prescore.integrations.masks import MaskForm, full_mask, rebuild

_LEAST_WINDOW_BLOCK = 256


def prescored_under_mask(query: Tensor, key: Tensor, value: Tensor, form: MaskForm, request: Request) -> Counted:
    """Pre-scored attention under a causal, full or packed mask; `Unsupported` under any other.

    Queries that see on to the end of a block, such as an image, are exact; all others are as under a causal mask.

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`.
        value: `[B, Hkv, Nk, Dv]`.
        form: What each query may see.
        request: How to attend.
    """
    reasons = inexpressible(form)
    if reasons:
        raise Unsupported("pre-scored attention", reasons)
    key, value = key[:, :, : form.n_keys], value[:, :, : form.n_keys]
    if form.kind == "packed":
        return _per_segment(query, key, value, form, request)
    if form.reach is not None:
        return _looking_ahead(query, key, value, form, form.reach, request)
    options = Options(
        is_causal=form.kind == "causal",
        key_padding_mask=form.valid,
        scale=request.scale,
        generator=request.seed,
        dropout_p=request.dropout,
        dropout_generator=dropout_seed() if request.dropout else None,
    )
    return attend_counting(query, key, value, request.config, options)


def inexpressible(form: MaskForm) -> list[str]:
    """Reasons why pre-scored attention cannot follow a mask; empty = it can."""
    if form.kind == "other":
        return ["the attention mask is neither causal, full, packed nor a sliding window beside padding"]
    return []


def exact_under_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    form: MaskForm,
    *,
    scale: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """Exact attention under any mask; work and memory follow the structure where there is one."""
    key, value = key[:, :, : form.n_keys], value[:, :, : form.n_keys]
    if form.kind == "window":
        return _windowed(query, key, value, form, scale, dropout)
    plain = form.kind in ("causal", "full")
    if (form.kind == "full" or query.shape[2] == 1) and (form.valid is None or bool(form.valid.all())):
        # every query sees all keys: nothing to check or to copy, a step must cost no more than reading them
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    if plain and dropout == 0.0:
        options = Options(is_causal=form.kind == "causal", key_padding_mask=form.valid, scale=scale)
        return attend_counting(query, key, value, Exact(), options).output
    mask = full_mask(form, query.shape[2], query.device)
    return _sdpa(query, key, value, mask, scale, dropout)


def keys_in_sight(form: MaskForm, n_query: int) -> float | None:
    """Real keys that a real query may see, on average; None under a mask that is neither full nor causal."""
    if form.kind not in ("full", "causal"):
        return None
    causal = form.kind == "causal"
    if form.valid is None:
        return form.n_keys - ((n_query - 1) / 2 if causal else 0.0)
    seen = form.valid.cumsum(1)
    seen = seen[:, form.n_keys - n_query :] if causal else seen[:, -1:].expand(-1, n_query)
    # with as many queries as keys, padded queries are those of padded keys
    real = form.valid if n_query == form.n_keys else torch.ones_like(seen, dtype=torch.bool)
    return float(seen[real].double().mean()) if bool(real.any()) else 0.0


def _windowed(
    query: Tensor, key: Tensor, value: Tensor, form: MaskForm, scale: float | None, dropout: float
) -> Tensor:
    """A sliding window, one block of queries at a time against the keys its windows reach."""
    n_query, window = query.shape[2], form.window or form.n_keys
    past = form.n_keys - n_query
    size = max(window, _LEAST_WINDOW_BLOCK)
    outputs = []
    for first in range(0, n_query, size):
        last = min(first + size, n_query)
        low, high = max(0, past + first - window + 1), past + last
        mask = rebuild(form, first, last, n_query, query.device)[:, None, :, low:high]
        keys, values = key[:, :, low:high], value[:, :, low:high]
        outputs.append(_sdpa(query[:, :, first:last], keys, values, mask, scale, dropout))
    return torch.cat(outputs, dim=2)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, dropout: float
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        # masked grouped-query attention has no fused kernel: repeat what is at hand, a block at most
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale
    )


def _per_segment(query: Tensor, key: Tensor, value: Tensor, form: MaskForm, request: Request) -> Counted:
    """Packed sequences become a right-padded batch of sequences, and come back."""
    rows, valid = _segment_rows(form)

    def apart(tensor: Tensor) -> Tensor:  # [B, H, N, D] -> [segments, H, longest, D]
        return tensor.transpose(1, 2).flatten(0, 1)[rows].transpose(1, 2)

    alone = MaskForm("causal", rows.shape[1], valid=None if bool(valid.all()) else valid)
    attended = prescored_under_mask(apart(query), apart(key), apart(value), alone, request)
    output = attended.output.transpose(1, 2)[valid]
    batch, n_heads, n_query, _ = query.shape
    together = output.new_zeros(batch * n_query, n_heads, value.shape[-1])
    together = together.index_put((rows[valid],), output)
    return attended._replace(output=together.view(batch, n_query, n_heads, -1).transpose(1, 2))


def _looking_ahead(
    query: Tensor, key: Tensor, value: Tensor, form: MaskForm, reach: Tensor, request: Request
) -> Counted:
    """Causal attention, and exact attention in the rows of queries that see later keys."""
    n_query = query.shape[2]
    causal = prescored_under_mask(query, key, value, replace(form, kind="causal", reach=None), request)
    ahead = reach > torch.arange(form.n_keys - n_query, form.n_keys, device=query.device)
    output = causal.output
    for first in range(0, n_query, _LEAST_WINDOW_BLOCK):
        own = ahead[:, first : first + _LEAST_WINDOW_BLOCK]
        some = own.any(0).nonzero().squeeze(1) + first
        if not len(some):
            continue
        mask = rebuild(form, first, first + own.shape[1], n_query, query.device)[:, None, some - first]
        exact = _sdpa(query[:, :, some], key, value, mask, request.scale, request.dropout)
        chosen = torch.where(ahead[:, None, some, None], exact, output[:, :, some])
        output = output.index_copy(2, some, chosen)
    return causal._replace(output=output)


def _segment_rows(form: MaskForm) -> tuple[Tensor, Tensor]:
    """`[segments, longest]` flat positions of each segment's real tokens, and which of them are not filler."""
    if form.starts is None:
        raise ValueError(f"form must be packed, got {form.kind!r}")
    batch, length = form.starts.shape
    offset = torch.arange(batch, device=form.starts.device)[:, None] * length
    segment = (form.starts + offset).flatten()
    positions = torch.arange(batch * length, device=segment.device)
    if form.valid is not None:
        positions = positions[form.valid.flatten()]
        segment = segment[form.valid.flatten()]
    _, number, counts = torch.unique_consecutive(segment, return_inverse=True, return_counts=True)
    first = counts.cumsum(0) - counts
    place = torch.arange(len(positions), device=segment.device) - first[number]
    longest = int(counts.max()) if len(counts) else 0
    rows = positions.new_zeros(len(counts), longest)
    valid = torch.zeros_like(rows, dtype=torch.bool)
    rows[number, place] = positions
    valid[number, place] = True
    return rows, valid
