"""Decoding for models whose cache is not ours: it follows the keys it is shown, and checks that they go on."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from prescore.decoding.decoder import Decoder, Past, Request, Step
from prescore.decoding.state import SelectionState

_PROBES = 16


class Follower:
    """Reuses one selection as long as each call's keys continue those of the call before.

    A model that hands over all keys at every step, but no cache object, leaves no place for a state that its
    caller owns. So this one believes nothing: before every step it compares some of the keys it selected from,
    and all keys since, with what it is shown. Other keys mean another selection, reordered recent keys (beams
    of one prompt) are read again.
    """

    def __init__(self) -> None:
        self._decoder = Decoder(owned=False)
        self._probed: tuple[SelectionState, Tensor] | None = None

    @property
    def state(self) -> SelectionState | None:
        """The selection of the last step; None where it made none."""
        return self._decoder.state

    def step(self, query: Tensor, past: Past, request: Request) -> Step:
        """Answer a call, or say how it is to be answered; `past` holds all keys so far, perhaps unused room."""
        past = _used(past, query.shape[2])
        state = self._decoder.state
        if state is not None and not self._goes_on(state, past, query.shape[2]):
            self._decoder.reset()
        step = self._decoder.step(query, past, request)
        made = self._decoder.state
        if made is None:
            self._probed = None
        elif self._probed is None or self._probed[0] is not made:
            self._probed = (made, _probe(past.key[:, :, : made.n_selected_from]).clone())
        return step

    def _goes_on(self, state: SelectionState, past: Past, n_query: int) -> bool:
        """Whether the selection stands for keys before the queries; recent tokens that differ are dropped."""
        if self._probed is None or past.n_keys - n_query < state.n_selected_from:
            return False
        shown, probe = _probe(past.key[:, :, : state.n_selected_from]), self._probed[1]
        if shown.shape != probe.shape or not torch.equal(shown, probe):
            return False
        known = past.key[:, :, state.n_selected_from : state.n_selected_from + state.n_since]
        held = state.rows.key[:, :, state.n_rows :]
        if known.shape != held.shape or not torch.equal(known, held):
            state.crop(0)
        return True


def _used(past: Past, n_query: int) -> Past:
    """Without what lies behind the newest key: a static cache has room there, which no sequence has reached."""
    if n_query > 1 or past.valid is None:
        return past
    reached = past.valid.any(dim=0).nonzero()
    n_keys = int(reached.max()) + 1 if len(reached) else past.n_keys
    key, value, valid = past.until(n_keys)
    return replace(past, key=key, value=value, valid=valid, n_keys=n_keys)


def _probe(key: Tensor) -> Tensor:
    """A few rows spread over the keys; the last is always among them."""
    n_keys = key.shape[2]
    places = torch.linspace(0, n_keys - 1, min(_PROBES, n_keys), device=key.device).round().long()
    return key.detach()[:, :, places]
