"""One layer of a transformers cache that remembers which of its keys matter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from prescore.attention.exact import resolve_scale
from prescore.attention.routed_decode import RoutedIndex
from prescore.config import PrescoreConfig
from prescore.decoding.refresh import refresh_due
from prescore.decoding.rows import Rows
from prescore.decoding.state import DecodeState, SelectionState
from prescore.decoding.states import make_state, remembers, routes_steps
from prescore.errors import Unsupported
from prescore.integrations.following import STEP_AT_MOST
from prescore.integrations.masked import attend_exactly, attend_prescored
from prescore.integrations.masks import MaskForm
from prescore.layout import first_real
from prescore.route import build_tree

_LAYER = "_prescore_layer"

ROUTED_STEPS_FROM = 32768
"""Keys from which a decode step chooses its clusters; before, reading all of them is faster, and exact."""


def layer_of(key: Tensor) -> PrescoredLayer | None:
    """The cache layer that keys came out of; None when they came from elsewhere."""
    layer: PrescoredLayer | None = getattr(key, _LAYER, None)
    return layer


class PrescoredLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, and from the first decode step on its selection.

    The keys that `update` returns know the layer they came from, because transformers does not hand the cache
    to the attention function. With any other attention function the layer is an ordinary dynamic one.

    Attributes:
        evict: Free the unselected keys and values as soon as the selection is made.
        n_seen: Tokens so far, those evicted included.
        rows: All keys and values; None before the first token and after an eviction.
        state: The selection; None until it is made.
        valid: `[B, n_seen]`, True = a real key, as the attention function last saw it; None = all.
        config: The configuration the attention function last came with.
    """

    is_sliding = False

    def __init__(self, evict: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.evict = evict
        self.n_seen = 0
        self.rows: Rows | None = None
        self.state: DecodeState | None = None
        self.valid: Tensor | None = None
        self.config: PrescoreConfig | None = None
        self._unread: tuple[Tensor, Tensor] | None = None
        self._index: tuple[tuple[PrescoreConfig, float], RoutedIndex] | None = None

    @classmethod
    def adopt(cls, layer: DynamicLayer, evict: bool = False) -> PrescoredLayer:
        """A layer that goes on from another one's keys and values."""
        adopted = cls(evict=evict)
        if layer.keys is not None and layer.values is not None and layer.keys.numel():
            adopted.update(layer.keys, layer.values)
        return adopted

    def restore(
        self,
        *,
        rows: Rows | None,
        state: DecodeState | None,
        valid: Tensor | None,
        config: PrescoreConfig | None,
        n_seen: int,
    ) -> None:
        """Take over content that was saved."""
        self.rows, self.state, self.valid, self.config, self.n_seen = rows, state, valid, config, n_seen
        held = self._held_rows()
        if held is not None:
            self.lazy_initialization(held.key, held.value)
            self._show()

    @property
    def evicted(self) -> bool:
        """Whether only the selection is left."""
        return self.rows is None and self.state is not None

    @property
    def n_bytes(self) -> int:
        """Memory of keys, values and selection."""
        return sum(held.n_bytes for held in (self.rows, self.state) if held is not None)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new keys and values; returns all that are held, or after an eviction the new ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.evicted and self._unread is not None:
            raise Unsupported(
                "a cache with evicted keys", ["the model's attention did not go through prescore in the last step"]
            )
        self.n_seen += key_states.shape[2]
        self._unread = (key_states, value_states)
        if self.evicted:
            key, value = key_states.view_as(key_states), value_states
        else:
            if self.rows is None:
                self.rows = Rows(key_states, value_states)
            else:
                self.rows.append(key_states, value_states)
            key, value = self.rows.key, self.rows.value
        self._show()
        setattr(key, _LAYER, self)
        return key, value

    def attend(
        self,
        query: Tensor,
        form: MaskForm,
        *,
        config: PrescoreConfig,
        scale: float | None,
        stats: dict[str, Any],
        dropout: float = 0.0,
    ) -> Tensor:
        """Attention of the newest tokens: pre-scored for a prompt, over the selection for a decode step.

        Args:
            query: `[B, Hq, Nq, D]`, of the last `Nq` tokens.
            form: The mask over all `n_seen` keys.
            config: How to score, select and attend.
            scale: Factor of the logits.
            stats: Receives what was done.
            dropout: Probability of dropping a weight.
        """
        self.valid, self.config = form.valid, config
        n_query = query.shape[2]
        if n_query == self.n_seen or n_query > STEP_AT_MOST:
            self._forget_selection("a further piece of the prompt needs all keys")
            rows = self._all_rows()
            self._unread = None
            stats["path"] = "prescored"
            return attend_prescored(query, rows.key, rows.value, form, config=config, scale=scale, dropout=dropout)
        if not remembers(config):
            rows = self._all_rows()
            self._unread = None
            index = None if dropout else self._routed_index(query, form, config, scale)
            if index is not None:
                stats["path"] = "routed step"
                return index.attend(query, rows.key, rows.value).output
            stats["path"] = "step over all keys"
            return attend_exactly(query, rows.key, rows.value, form, scale=scale, dropout=dropout)
        state = self._state_for(n_query, config)
        stats.update(path="step over the selection", rows=state.n_rows, since=state.n_since)
        return state.attend(query, scale, dropout)

    def _routed_index(
        self, query: Tensor, form: MaskForm, config: PrescoreConfig, scale: float | None
    ) -> RoutedIndex | None:
        """The clusters a single new query chooses from; None where steps are exact instead."""
        if query.shape[2] != 1 or not routes_steps(config) or self.n_seen < ROUTED_STEPS_FROM:
            return None
        if config.tolerance is not None or (torch.is_grad_enabled() and query.requires_grad):
            return None  # a step has neither an error bar nor gradients
        start = None
        if form.valid is not None and not bool(form.valid.all()):
            start = first_real(form.valid)
            padding = torch.arange(self.n_seen, device=start.device) < start[:, None]
            if not torch.equal(form.valid, ~padding):
                return None  # padding behind or between real keys: positions would not be those of the trees
        made = (config, resolve_scale(scale, query))
        if self._index is None or self._index[0] != made:
            index = RoutedIndex(config, scale=made[1], tree_builder=build_tree, start=start)
            self._index = (made, index)
        return self._index[1]

    def select(self) -> None:
        """Make the selection now instead of at the first step, once a prompt has been read."""
        if self.config is not None and self.state is None and remembers(self.config):
            self.state = self._selected(self.n_seen, self.config)
            self._drop_rows()

    def used_exactly(self) -> None:
        """Called when attention reads the keys as they are; refuses when some are gone."""
        self._all_rows()
        self._unread = None

    def get_seq_length(self) -> int:
        """Tokens so far, those evicted included."""
        return self.n_seen

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.rows = self.state = self.valid = self._unread = self._index = None
        self.n_seen = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; a selection that saw none of them stays."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be at most 0, got {tokens_to_remove}")
        n_left = max(0, self.n_seen + tokens_to_remove)
        self._index = None  # its last pieces may hold tokens that are gone
        if self.state is not None and n_left < self.state.n_selected_from:
            self._forget_selection(f"a crop to {n_left} tokens goes behind the selection")
        elif self.state is not None:
            self.state.crop(n_left - self.state.n_selected_from)
        if self.rows is not None:
            self.rows.crop(n_left)
        self.n_seen = n_left
        self.valid = None if self.valid is None else self.valid[:, :n_left]
        self._show()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these batch rows, in this order."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(1)
        if self._index is not None and self.rows is not None and indices.numel() == self.rows.key.shape[0]:
            self._index[1].reorder(indices)
        else:
            self._index = None
        for held in (self.rows, self.state):
            if held is not None:
                held.take(indices)
        if self.valid is not None:
            self.valid = self.valid.index_select(0, indices.to(self.valid.device))
        self._show()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row."""
        for held in (self.rows, self.state):
            if held is not None:
                held.repeat(repeats)
        self._index = None
        self.valid = None if self.valid is None else self.valid.repeat_interleave(repeats, dim=0)
        self._show()

    def _state_for(self, n_query: int, config: PrescoreConfig) -> DecodeState:
        """The selection, up to date with the newest tokens; made, or made anew, where that is due."""
        if self.state is not None and self.state.config != config:
            self._forget_selection("the configuration changed")
        state = self.state or self._selected(self.n_seen - n_query, config)
        if refresh_due(self.n_seen - state.n_selected_from, config.refresh_every):
            self._forget_selection("refresh_every selects among all keys again")
            # one token may be among the keys it chooses from; several would see one another's future
            state = self._selected(self.n_seen if n_query == 1 else self.n_seen - n_query, config)
        self._bring_up_to_date(state)
        self.state = state
        self._drop_rows()
        return state

    def _selected(self, n_keys: int, config: PrescoreConfig) -> DecodeState:
        rows = self._all_rows()
        valid = None if self.valid is None else self.valid[:, :n_keys]
        return make_state(rows.key[:, :, :n_keys], rows.value[:, :, :n_keys], valid, config)

    def _bring_up_to_date(self, state: DecodeState) -> None:
        first = state.n_selected_from + state.n_since
        if first < self.n_seen:
            if self.rows is not None:
                key, value = self.rows.key[:, :, first:], self.rows.value[:, :, first:]
            elif self._unread is not None:
                key, value = self._unread
            state.append(key, value, None if self.valid is None else self.valid[:, first:])
        self._unread = None

    def _all_rows(self) -> Rows:
        if self.rows is None:
            raise Unsupported("attention over all keys", ["the cache has evicted the unselected ones"])
        return self.rows

    def _forget_selection(self, reason: str) -> None:
        if self.evicted:
            raise Unsupported("a cache with evicted keys", [reason])
        self.state = None

    def _drop_rows(self) -> None:
        if self.evict and isinstance(self.state, SelectionState):
            self.rows = None
            self._show()

    def _show(self) -> None:
        """Keep the attributes other code reads in step with what is held."""
        held = self._held_rows()
        if held is not None:
            self.keys, self.values = held.key, held.value

    def _held_rows(self) -> Rows | None:
        if self.rows is None and isinstance(self.state, SelectionState):
            return self.state.rows
        return self.rows
