"""Decoding for models whose cache is not ours: it follows the keys it is shown, and checks that they go on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prescore.decoding.decoder import PROMPT, Decoder, Past, Request, Step, selectable
from prescore.decoding.state import SelectionState

_PROBES = 16


@dataclass(frozen=True, eq=False)
class _Seen:
    """Keys to recognise a text by: a few of its prompt, and all that a selection saw behind it.

    Attributes:
        state: The selection.
        n_prompt: Keys of the prompt.
        prompt: Some of its rows.
        later: `[B, Hkv, n_selected_from - n_prompt, D]`, every key behind it that was selected from.
    """

    state: SelectionState
    n_prompt: int
    prompt: Tensor
    later: Tensor

    @classmethod
    def of(cls, state: SelectionState, n_prompt: int, key: Tensor) -> _Seen:
        """What to remember of the keys that a selection was made from."""
        n_prompt = min(n_prompt, state.n_selected_from)
        later = key.detach()[:, :, n_prompt : state.n_selected_from].clone()
        return cls(state, n_prompt, _probe(key[:, :, :n_prompt]).clone(), later)

    def same_prompt(self, key: Tensor) -> bool:
        """Whether the keys begin with the prompt."""
        return _equal(_probe(key[:, :, : self.n_prompt]), self.prompt)

    def same_later(self, key: Tensor) -> bool:
        """Whether what was selected from behind the prompt is still there."""
        return _equal(key[:, :, self.n_prompt : self.n_prompt + self.later.shape[2]], self.later)


class Follower:
    """Reuses one selection as long as each call's keys continue those of the call before.

    A model that hands over all keys at every step, but no cache object, leaves no place for a state that its
    caller owns. So this one believes nothing: before every step it compares some of the prompt's keys, and all
    keys since, with what it is shown. Another prompt means another selection. Behind the same prompt (beams that
    were reordered) recent keys are read again, and where the selection saw some that changed, it is made again
    among as many keys, as if they had been there before.
    """

    def __init__(self) -> None:
        self._decoder = Decoder(owned=False)
        self._n_prompt = 0  # 0 = none was seen
        self._seen: _Seen | None = None

    @property
    def state(self) -> SelectionState | None:
        """The selection of the last step; None where it made none."""
        return self._decoder.state

    def step(self, query: Tensor, past: Past, request: Request) -> Step:
        """Answer a call, or say how it is to be answered; `past` holds all keys so far, perhaps unused room."""
        n_query = query.shape[2]
        past = _used(past, n_query)
        if self._seen is not None and not self._goes_on(self._seen, past, n_query):
            self._begin_again(self._seen, past, n_query, request)
        step = self._decoder.step(query, past, request)
        made = self._decoder.state
        if step.path == PROMPT:
            self._n_prompt = past.n_keys
        elif not 0 < self._n_prompt <= past.n_keys - n_query:
            self._n_prompt = past.n_keys - n_query  # it was shown to somebody else
        if made is None:
            self._seen = None
        elif self._seen is None or self._seen.state is not made:
            self._seen = _Seen.of(made, self._n_prompt, past.key)
        return step

    def _goes_on(self, seen: _Seen, past: Past, n_query: int) -> bool:
        """Whether the selection is of keys that the queries may see; recent tokens that differ are dropped."""
        state = seen.state
        if selectable(past.n_keys, n_query) < state.n_selected_from:
            return False
        if not seen.same_prompt(past.key) or not seen.same_later(past.key):
            return False
        known = past.key[:, :, state.n_selected_from : state.n_selected_from + state.n_since]
        if not _equal(known, state.rows.key[:, :, state.n_rows :]):
            state.crop(0)
        return True

    def _begin_again(self, seen: _Seen, past: Past, n_query: int, request: Request) -> None:
        """Give the selection up; in the same text, make it again where it was made."""
        self._decoder.reset()
        self._seen, n_keys = None, seen.state.n_selected_from
        if not seen.same_prompt(past.key):
            self._n_prompt = 0
        elif n_keys <= selectable(past.n_keys, n_query):
            self._decoder.select(Past(*past.until(n_keys), n_keys), request)


def _used(past: Past, n_query: int) -> Past:
    """Without what lies behind the newest key: a static cache has room there, which no sequence has reached."""
    if n_query > 1 or past.valid is None:
        return past
    reached = past.valid.any(dim=0).nonzero()
    n_keys = int(reached.max()) + 1 if len(reached) else past.n_keys
    key, value, valid = past.until(n_keys)
    return replace(past, key=key, value=value, valid=valid, n_keys=n_keys)


def _equal(shown: Tensor, known: Tensor) -> bool:
    return shown.shape == known.shape and torch.equal(shown, known)


def _probe(key: Tensor) -> Tensor:
    """A few rows spread over the keys; the last is always among them."""
    n_keys = key.shape[2]
    places = torch.linspace(0, n_keys - 1, min(_PROBES, n_keys), device=key.device).round().long()
    return key.detach()[:, :, places]
