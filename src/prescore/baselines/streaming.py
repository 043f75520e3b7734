"""Local window plus sinks: what StreamingLLM keeps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prescore import checks
from prescore.baselines.tiles import Placed, chunk_positions, place
from prescore.ops.parts import Part
from prescore.types import Attended


def streaming_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int = 1024,
    sinks: int = 4,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    generator: torch.Generator | int | None = None,
) -> Attended:
    """Exact attention to nearby keys and to the first ones.

    Causal: query i sees the last `window` positions up to itself and the first `sinks`. Otherwise it sees
    `|i - j| <= window` and the first `sinks`. Time and memory are linear in the length: the band is cut into
    squares and triangles of side `window`, none of which needs a mask of its own.

    Args:
        query: `[B, Hq, Nq, D]`, the last `Nq` positions (also without causality, where `Nq <= Nk` too).
        key: `[B, Hkv, Nk, D]`.
        value: `[B, Hkv, Nk, Dv]`.
        window: Keys in the window, at least 1.
        sinks: First positions of the sequence that every query sees, beside the window.
        is_causal: Queries see no later key.
        key_padding_mask: `[B, Nk]`, True = a real key.
        scale: Factor of the logits, `D ** -0.5` by default.
        generator: Not used; part of the common call shape.
    """
    checks.integer("window", window, minimum=1)
    checks.integer("sinks", sinks, minimum=0)
    placed = place(query, key, value, is_causal=is_causal, key_padding_mask=key_padding_mask, scale=scale)
    if query.shape[2] > key.shape[2]:
        raise ValueError(
            f"query length must be at most the key length {key.shape[2]} for a window, got {query.shape[2]}"
        )
    parts = [] if placed.empty else _parts(placed, window, min(sinks, key.shape[2]))
    return placed.attend(parts)


def _parts(placed: Placed, window: int, sinks: int) -> list[Part]:
    length, is_causal = placed.call.n_keys, placed.call.is_causal
    # one further off than the window reaches is where a chunk's neighbour begins to matter
    size = min(window if is_causal else window + 1, length)
    first, last = placed.first_position // size, math.ceil(length / size)
    chunks = chunk_positions(first, last, size, placed.call.key)  # [T, size]
    parts = [placed.part(chunks, chunks, hidden=chunks < sinks, causal=is_causal)]
    if size > 1 and last > 1:
        # Query i of a chunk sees keys j > i of the chunk before. Read backwards and without the last query,
        # that is a causal triangle.
        before = chunks.flip(1) - size
        parts.append(placed.part(chunks[:, :-1].flip(1), before, hidden=before < sinks, causal=True))
        if not is_causal:
            after = chunks + size  # of which query i sees keys j < i
            parts.append(placed.part(chunks[:, 1:], after, hidden=after < sinks, causal=True))
    return parts + _sink_parts(placed, sinks)


def _sink_parts(placed: Placed, sinks: int) -> list[Part]:
    positions = torch.arange(placed.call.n_keys, device=placed.call.key.device)
    anchors = positions[None, :sinks]
    if not placed.call.is_causal:
        return [placed.part(positions[None, placed.first_position :], anchors)] if sinks else []
    pieces = []
    if placed.first_position < sinks:
        pieces.append(placed.part(anchors, anchors, causal=True))
    if 0 < sinks < len(positions):
        pieces.append(placed.part(positions[None, max(sinks, placed.first_position) :], anchors))
    return pieces
