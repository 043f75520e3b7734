"""The default, routed attention, at a given number of key rows in all on the short sequences of vision models."""

from __future__ import annotations

from prescore.config import Routed
from prescore.routed.layout import make_layout


def routed_config(rows: int, *, n_tokens: int, n_prefix: int) -> Routed:
    """Routed attention that reads at most `rows` key rows per query: prefix, singles, stand-ins and chosen leaves.

    All patches are one piece; of the numbers of leaves, the one that uses most of the rows. `exact_until` is 0,
    because the untouched default runs such short sequences exactly.
    """
    behind = n_tokens - n_prefix
    fitting = []
    for levels in range(1, max(2, behind.bit_length())):
        leaf_size = -(-behind // 2**levels)
        chunk_size = leaf_size << levels
        config = Routed(rows=0, leaf_size=leaf_size, chunk_size=chunk_size, sinks=n_prefix, exact_until=0)
        always = rows_read(config, n_tokens)
        if always <= rows:
            layout = make_layout(n_tokens, n_tokens, causal=False, config=config)
            n_chosen = min(layout.leaves, (rows - always) // max(1, layout.leaf))
            fitting.append(config.replace(rows=n_chosen * leaf_size))
    if not fitting:
        raise ValueError(f"rows must leave room for {n_prefix} prefix tokens, singles and stand-ins, got {rows}")
    return max(fitting, key=lambda config: rows_read(config, n_tokens))


def rows_read(config: Routed, n_tokens: int) -> int:
    """Key rows that a query of a full call reads, at most, stand-ins of chosen leaves counted too."""
    if n_tokens < config.exact_until:
        return n_tokens
    layout = make_layout(n_tokens, n_tokens, causal=False, config=config)
    per_piece = layout.singles + layout.leaves
    return layout.sinks + layout.n_pieces * per_piece + layout.n_chosen * layout.leaf
