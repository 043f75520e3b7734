"""A selection for models whose cache is not ours: it follows the keys it is shown, and checks that they go on."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.config import PrescoreConfig
from prescore.decoding.refresh import refresh_due
from prescore.decoding.state import SelectionState

_PROBES = 16


class FollowedSelection:
    """Reuses one selection as long as each call's keys continue those of the call before.

    A model that hands over all keys at every step, but no cache object, leaves no place for a state that its
    caller owns. So this one believes nothing: before every step it compares some of the keys it selected from,
    and all keys since, with what it is shown. Other keys mean another selection, reordered recent keys (beams
    of one prompt) are read again.
    """

    def __init__(self) -> None:
        self._state: SelectionState | None = None
        self._probe: Tensor | None = None

    def forget(self) -> None:
        """Start anew with the next step."""
        self._state = self._probe = None

    def state_for(
        self, key: Tensor, value: Tensor, valid: Tensor | None, n_new: int, config: PrescoreConfig
    ) -> SelectionState:
        """The selection, up to date with all keys.

        Args:
            key: `[B, Hkv, N, D]`, all keys so far.
            value: `[B, Hkv, N, Dv]`.
            valid: `[B, N]`, True = a real key; None = all.
            n_new: How many of them came with this step.
            config: How to select.
        """
        n_keys, state = key.shape[2], self._state
        if state is None or state.config != config or not self._goes_on(state, key):
            state = self._select(key, value, valid, n_keys - n_new, config)
        if refresh_due(n_keys - state.n_selected_from, config.refresh_every):
            state = self._select(key, value, valid, n_keys if n_new == 1 else n_keys - n_new, config)
        known = key[:, :, state.n_selected_from : state.n_selected_from + state.n_since]
        held = state.rows.key[:, :, state.n_rows :]
        if known.shape != held.shape or not torch.equal(known, held):
            state.crop(0)
        first = state.n_selected_from + state.n_since
        if first < n_keys:
            state.append(key[:, :, first:], value[:, :, first:], None if valid is None else valid[:, first:])
        return state

    def _goes_on(self, state: SelectionState, key: Tensor) -> bool:
        if self._probe is None or key.shape[2] < state.n_selected_from:
            return False
        shown = _probe(key[:, :, : state.n_selected_from])
        return shown.shape == self._probe.shape and torch.equal(shown, self._probe)

    def _select(
        self, key: Tensor, value: Tensor, valid: Tensor | None, n_keys: int, config: PrescoreConfig
    ) -> SelectionState:
        past = key[:, :, :n_keys]
        self._state = SelectionState.select(
            past, value[:, :, :n_keys], None if valid is None else valid[:, :n_keys], config
        )
        self._probe = _probe(past).clone()
        return self._state


def _probe(key: Tensor) -> Tensor:
    """A few rows spread over the keys; the last is always among them."""
    n_keys = key.shape[2]
    places = torch.linspace(0, n_keys - 1, min(_PROBES, n_keys), device=key.device).round().long()
    return key.detach()[:, :, places]
