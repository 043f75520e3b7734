"""A sliding window plus sinks: the keys that StreamingLLM keeps."""

from __future__ import annotations

from prescore import checks
from prescore.bench.baselines.tiles import Placed, baseline
from prescore.ops.parts import Part


@baseline
def streaming_attention(placed: Placed, *, window: int = 1024, sinks: int = 4) -> list[Part]:
    """Exact attention to nearby keys and to the first ones.

    Queries are the last `Nq` positions, also without causality, where `Nq <= Nk` too.

    Causal: query i sees the last `window` positions up to itself and the first `sinks`. Otherwise it sees
    `|i - j| <= window` and the first `sinks`. Time and memory are linear in the length: the band is cut into
    squares and triangles of side `window`, none of which needs a mask of its own.

    Args:
        placed: The call.
        window: Keys in the window, at least 1.
        sinks: First positions of the sequence that every query sees, in addition to the window.
    """
    checks.integer("window", window, minimum=1)
    checks.integer("sinks", sinks, minimum=0)
    n_query, n_keys = placed.call.n_query, placed.call.n_keys
    if n_query > n_keys:
        raise ValueError(f"query length must be at most the key length {n_keys} for a window, got {n_query}")
    sinks = min(sinks, n_keys)
    return [] if placed.empty else _window_parts(placed, window, sinks) + _sink_parts(placed, sinks)


def _window_parts(placed: Placed, window: int, sinks: int) -> list[Part]:
    is_causal = placed.call.is_causal
    # the first key outside the window is where a chunk's neighbour begins to matter
    size = min(window if is_causal else window + 1, placed.call.n_keys)
    chunks = placed.chunks(size)
    parts = [placed.part(chunks, chunks, hidden=chunks < sinks, causal=is_causal)]
    if size > 1 and size < placed.call.n_keys:
        # Query i of a chunk sees keys j > i of the chunk before. Read backwards and without the last query,
        # that is a causal triangle.
        before = chunks.flip(1) - size
        parts.append(placed.part(chunks[:, :-1].flip(1), before, hidden=before < sinks, causal=True))
        if not is_causal:
            after = chunks + size  # of which query i sees keys j < i
            parts.append(placed.part(chunks[:, 1:], after, hidden=after < sinks, causal=True))
    return parts


def _sink_parts(placed: Placed, sinks: int) -> list[Part]:
    if not sinks:
        return []
    first, length, keys = placed.first_position, placed.call.n_keys, placed.arange(sinks)[None]
    if not placed.call.is_causal:
        return [placed.part(placed.arange(first, length)[None], keys)]
    parts = [placed.part(keys, keys, causal=True)] if first < sinks else []
    if sinks < length:
        parts.append(placed.part(placed.arange(max(sinks, first), length)[None], keys))
    return parts
