"""The default, routed attention, at a given number of key rows in all on the short sequences of vision models."""

from __future__ import annotations

from prescore.attention.routed_layout import make_layout
from prescore.config import PrescoreConfig


def routed_config(rows: int, *, n_tokens: int, n_prefix: int) -> PrescoreConfig:
    """Routed attention that reads at most `rows` key rows per query: prefix, singles, stand-ins and chosen leaves.

    All patches are one piece; of the numbers of leaves, the one that uses most of the rows. `min_seq_len` is 0,
    because the untouched default runs such short sequences exactly.
    """
    behind = n_tokens - n_prefix
    fitting = []
    for levels in range(1, max(2, behind.bit_length())):
        leaf_size = -(-behind // 2**levels)
        config = PrescoreConfig(
            min_seq_len=0,
            sinks=n_prefix,
            leaf_size=leaf_size,
            chunk_size=leaf_size << levels,
            rows=0,
        )
        always = rows_read(config, n_tokens)
        if always <= rows:
            layout = make_layout(n_tokens, n_tokens, causal=False, config=config)
            n_chosen = min(layout.leaves, (rows - always) // max(1, layout.leaf))
            fitting.append(config.replace(rows=n_chosen * leaf_size))
    if not fitting:
        raise ValueError(f"rows must leave room for {n_prefix} prefix tokens, singles and stand-ins, got {rows}")
    return max(fitting, key=lambda config: rows_read(config, n_tokens))


def rows_read(config: PrescoreConfig, n_tokens: int) -> int:
    """Key rows that a query of a full call reads, at most, stand-ins of chosen leaves counted too."""
    if n_tokens < config.min_seq_len:
        return n_tokens
    layout = make_layout(n_tokens, n_tokens, causal=False, config=config)
    per_piece = layout.singles + layout.leaves
    return layout.sinks + layout.n_pieces * per_piece + layout.n_chosen * layout.leaf
