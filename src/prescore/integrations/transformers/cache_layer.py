"""One layer of a transformers cache that remembers which of its keys matter."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from prescore import checks
from prescore.config import Config
from prescore.decoding.decoder import Decoder, Past, Request, Step, remembers
from prescore.decoding.rows import Rows
from prescore.decoding.state import SelectionState
from prescore.errors import Unsupported

_LAYER = "_prescore_layer"


class NewKeys(Tensor):
    """The newest keys of a layer whose past was evicted: all that is left is the selection, which we alone know.

    Any other attention that reads them would take them for everything there is.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to be read."""
        reason = "the model's attention does not go through prescore, and the unselected keys are gone"
        raise Unsupported("a cache with evicted keys", [reason])


def layer_of(key: Tensor) -> tuple[PrescoredLayer | None, Tensor]:
    """The cache layer that keys came out of, None when they came from elsewhere; and the keys, to be read."""
    layer: PrescoredLayer | None = getattr(key, _LAYER, None)
    if isinstance(key, NewKeys):
        with torch._C.DisableTorchFunctionSubclass():
            return layer, key.as_subclass(Tensor)
    return layer, key


@dataclass(frozen=True, eq=False)
class Content:
    """What a layer holds, as it is saved.

    Attributes:
        n_seen: Tokens so far, those evicted included.
        rows: All keys and values; None before the first token and after an eviction.
        state: The selection; None until it is made.
        valid: `[B, n_seen]`, True = a real key; None = all.
        request: What the attention function last asked for; None before it asked.
    """

    n_seen: int
    rows: Rows | None
    state: SelectionState | None
    valid: Tensor | None
    request: Request | None


class PrescoredLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, and from the first decode step on its selection.

    The keys that `update` returns know the layer they came from, because transformers does not hand the cache
    to the attention function. With any other attention function the layer is an ordinary dynamic one.

    Args:
        evict: Free the unselected keys and values as soon as the selection is made.
        refresh_every: Select anew after so many tokens; None = never.
        told: Warnings that were given already; layers that share it warn once together.
        **kwargs: Of transformers.

    Attributes:
        n_seen: Tokens so far, those evicted included.
        rows: All keys and values; None before the first token and after an eviction.
        valid: `[B, n_seen]`, True = a real key, as the attention function last saw it; None = all.
        request: What the attention function last asked for.
    """

    is_sliding = False

    def __init__(
        self,
        evict: bool = False,
        refresh_every: int | None = None,
        told: set[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.n_seen = 0
        self.rows: Rows | None = None
        self.valid: Tensor | None = None
        self.request: Request | None = None
        self._decoder = Decoder(evict=evict, refresh_every=refresh_every)
        self._unread: tuple[Tensor, Tensor] | None = None
        self._told = set() if told is None else told

    @classmethod
    def adopt(cls, layer: DynamicLayer, **options: Any) -> PrescoredLayer:
        """A layer that goes on from another one's keys and values."""
        adopted = cls(**options)
        if layer.keys is not None and layer.values is not None and layer.keys.numel():
            adopted.update(layer.keys, layer.values)
        return adopted

    @property
    def content(self) -> Content:
        """What is held now."""
        return Content(self.n_seen, self.rows, self.state, self.valid, self.request)

    def restore(self, content: Content) -> None:
        """Take over content that was saved."""
        self.n_seen, self.rows, self.valid = content.n_seen, content.rows, content.valid
        self.request = content.request
        self._decoder.state = content.state
        self._decoder.evicted = content.state is not None and content.rows is None
        held = self._held_rows()
        if held is not None:
            self.lazy_initialization(held.key, held.value)
            self._show()

    def mark(self) -> Callable[[], None]:
        """Remember what is held; the function that is returned goes back to it."""
        content = self.content

        def go_back() -> None:
            if content.rows is not None:
                content.rows.crop(content.n_seen)  # they grow in place, and so does the selection
            self.restore(content)
            self._decoder.crop(content.n_seen)
            self._unread = None

        return go_back

    @property
    def state(self) -> SelectionState | None:
        """The selection; None until it is made."""
        return self._decoder.state

    @property
    def evicted(self) -> bool:
        """Whether only the selection is left."""
        return self._decoder.evicted

    @property
    def n_bytes(self) -> int:
        """Memory of keys, values and selection."""
        return sum(held.n_bytes for held in (self.rows, self.state) if held is not None)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new keys and values; returns all that are held, or after an eviction the new ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self._held_rows()
        if held is not None and held.key.shape[:2] != key_states.shape[:2]:
            raise ValueError(
                f"past_key_values must be of as many sequences and heads as the inputs, "
                f"{tuple(key_states.shape[:2])}, got {tuple(held.key.shape[:2])}"
            )
        self.n_seen += key_states.shape[2]
        self._unread = (key_states, value_states)
        key: Tensor
        if self.evicted:
            key, value = key_states.view_as(key_states).as_subclass(NewKeys), value_states
        else:
            if self.rows is None:
                self.rows = Rows(key_states, value_states)
            else:
                self.rows.append(key_states, value_states)
            key, value = self.rows.key, self.rows.value
        self._show()
        setattr(key, _LAYER, self)
        return key, value

    def step(self, query: Tensor, past: Past, request: Request) -> Step:
        """Answer the newest tokens' queries, or say how they are to be answered; see `Decoder`."""
        self.valid, self.request = past.valid, request
        self._say_what_is_idle(request.config)
        step = self._decoder.step(query, self._past(past), request)
        self._unread = None
        self._drop_rows()
        return step

    def select(self) -> None:
        """Make the selection now instead of at the first step, once a prompt has been read."""
        if self.request is not None and self.rows is not None:
            key, value = self.rows.key, self.rows.value
            self._decoder.select(Past(key, value, self.valid, self.n_seen), self.request)
            self._drop_rows()

    def used_exactly(self) -> None:
        """Called when attention reads the keys as they are; refuses when some are gone."""
        self._decoder.needs_all()
        self._unread = None

    def get_seq_length(self) -> int:
        """Tokens so far, those evicted included."""
        return self.n_seen

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._decoder.reset()
        self.rows = self.valid = self.request = self._unread = None
        self.n_seen = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; a selection that saw none of them stays."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be at most 0, got {tokens_to_remove}")
        n_left = max(0, self.n_seen + tokens_to_remove)
        self._decoder.crop(n_left)
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
        held = self._held_rows()
        n_rows = 0 if held is None else held.key.shape[0]
        if held is not None and indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < n_rows:
            raise ValueError(f"indices must lie between 0 and {n_rows - 1}, got {indices.tolist()}")
        self._decoder.take(indices, n_rows)
        if self.rows is not None:
            self.rows.take(indices)
        if self.valid is not None:
            self.valid = self.valid.index_select(0, indices.to(self.valid.device))
        self._show()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row."""
        checks.integer("repeats", repeats, minimum=1)
        self._decoder.repeat(repeats)
        if self.rows is not None:
            self.rows.repeat(repeats)
        self.valid = None if self.valid is None else self.valid.repeat_interleave(repeats, dim=0)
        self._show()

    def _say_what_is_idle(self, config: Config) -> None:
        """Say once that settings about selections do nothing where none is made."""
        decoder = self._decoder
        asked = ["evict=True"] if decoder.evict else []
        asked += [] if decoder.refresh_every is None else [f"refresh_every={decoder.refresh_every}"]
        if not asked or remembers(config):
            return
        text = f"{asked[0]} of the cache does nothing under {type(config).__name__}, which keeps every key"
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, stacklevel=2)

    def _past(self, shown: Past) -> Past:
        """All that is held, whatever the attention function was shown of it."""
        rows = (self.rows.key, self.rows.value) if self.rows is not None else self._unread
        return shown if rows is None else replace(shown, key=rows[0], value=rows[1], n_keys=self.n_seen)

    def _drop_rows(self) -> None:
        if self.evicted:
            self.rows = None
            self._show()

    def _show(self) -> None:
        """Keep the attributes other code reads in step with what is held."""
        held = self._held_rows()
        if held is not None:
            self.keys, self.values = held.key, held.value

    def _held_rows(self) -> Rows | None:
        return self.state.rows if self.rows is None and self.state is not None else self.rows
