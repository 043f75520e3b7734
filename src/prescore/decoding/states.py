"""Which kind of state a configuration decodes with."""

from __future__ import annotations

from torch import Tensor

from prescore.config import PrescoreConfig
from prescore.decoding.state import DecodeState, SelectionState
from prescore.route import routes


def remembers(config: PrescoreConfig) -> bool:
    """Whether decoding keeps a selection; if not, a step chooses among all keys, or reads them all.

    There is nothing to remember when nothing is filtered out.
    """
    everything = not config.top_k or (isinstance(config.top_k, float) and config.top_k == 1.0)
    return not everything and not routes_steps(config)


def routes_steps(config: PrescoreConfig) -> bool:
    """Whether every decode step chooses its clusters among all keys (`inner="routed"`)."""
    return routes(config, config.chunk_size, is_causal=True)


def make_state(key: Tensor, value: Tensor, valid: Tensor | None, config: PrescoreConfig) -> DecodeState:
    """A state that stands for the keys so far.

    Args:
        key: `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        valid: `[B, N]`, True = a real key; None = all.
        config: For which `remembers` holds.
    """
    if not remembers(config):
        raise ValueError(f"config must filter keys to be decoded from a state, got top_k={config.top_k!r}")
    return SelectionState.select(key, value, valid, config)
