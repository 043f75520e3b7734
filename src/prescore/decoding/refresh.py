"""When a selection is made again."""

from __future__ import annotations


def refresh_due(n_since: int, refresh_every: int | None) -> bool:
    """Whether a step that brings the number of tokens since the selection to `n_since` selects anew."""
    return refresh_every is not None and n_since >= refresh_every
