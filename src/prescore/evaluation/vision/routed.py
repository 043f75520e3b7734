"""The default, routed attention, at a given number of key rows in all on the short sequences of vision models."""

from __future__ import annotations

from prescore.config import Routed
from prescore.routed.layout import make_layout


def routed_config(rows: int, *, n_tokens: int, n_prefix: int) -> Routed:
    """Routed attention that reads about `rows` key rows per query: prefix, stand-ins, and rows it finds.

    All patches are one chunk, and at most half of the rows are stand-ins. How many rows are found depends on the
    queries; tables report what was read. `exact_until` is 0, because the untouched default runs such short
    sequences exactly.
    """
    behind = n_tokens - n_prefix
    fitting: list[Routed] = []
    for levels in range(1, max(2, behind.bit_length())):
        leaf_size = behind >> levels
        if leaf_size < 1:
            break
        config = Routed(rows=0, leaf_size=leaf_size, chunk_size=leaf_size << levels, sinks=n_prefix, exact_until=0)
        always = rows_in_any_case(config, n_tokens)
        if always <= rows and (not fitting or 1 << levels <= rows // 2):
            fitting.append(config.replace(rows=(rows - always) // 2))
    if not fitting:
        raise ValueError(f"rows must leave room for {n_prefix} prefix tokens and stand-ins, got {rows}")
    return fitting[-1]


def rows_in_any_case(config: Routed, n_tokens: int) -> int:
    """Key rows that a query of a full call reads, whatever it looks for."""
    layout = make_layout(n_tokens, n_tokens, causal=False, config=config)
    return int(layout.rows_in_any_case()[0])


def rows_read(config: Routed, n_tokens: int) -> int:
    """Key rows that a query of a full call reads, at most, where as many are found as there are shares."""
    if n_tokens < config.exact_until:
        return n_tokens
    return min(n_tokens, rows_in_any_case(config, n_tokens) + 2 * config.rows)
