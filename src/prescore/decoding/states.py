"""Which kind of state a configuration decodes with."""

from __future__ import annotations

from torch import Tensor

from prescore.config import PrescoreConfig
from prescore.decoding.state import DecodeState, SelectionState


def remembers(config: PrescoreConfig) -> bool:
    """Whether decoding keeps a state; if not, a step reads every key exactly.

    There is nothing to remember when nothing is filtered out. `inner="routed"` lets every query choose among
    all keys; until it has a state of its own, its steps are exact, which is what routing approaches.
    """
    return bool(config.top_k) and config.top_k != 1.0 and config.inner != "routed"


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
