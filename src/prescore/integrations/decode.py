"""How each call of one layer is answered during a generation, and what later calls reuse of it.

A layer is asked again and again while its keys grow: for pieces of a prompt, then for a few new tokens at a time.
`Decoder` decides which way each call goes, whoever owns the keys: a cache of ours (`PrescoredLayer`), or a model
that shows all of them at every step (`ExternalCache`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from prescore.autograd import without_autocast
from prescore.call import first_real
from prescore.config import Config, Routed, Selected
from prescore.errors import Unsupported
from prescore.integrations.state import SelectionState
from prescore.rng import DEFAULT_SEED
from prescore.routed.decode import RoutedIndex
from prescore.routed.layout import make_layout

STEP_AT_MOST = 32
"""Queries of one decode step; more at once are another piece of the prompt."""

PROMPT = "prescored"
OVER_SELECTION = "step over the selection"
OVER_CLUSTERS = "routed step"
OVER_ALL = "step over all keys"


class Request(NamedTuple):
    """How a layer wants to attend.

    Attributes:
        config: Its configuration.
        scale: Factor of the logits; None = `D ** -0.5`.
        dropout: Probability of dropping a weight.
        seed: Of everything that is drawn.
    """

    config: Config
    scale: float | None = None
    dropout: float = 0.0
    seed: int = DEFAULT_SEED


@dataclass(frozen=True, eq=False)
class CachedKeys:
    """The keys a call may read, its own newest ones included.

    Attributes:
        key: `[B, Hkv, n, D]`, the last `n` keys: all of them, unless earlier ones were evicted.
        value: `[B, Hkv, n, Dv]`.
        valid: `[B, n_keys]`, True = a real key; None = all are.
        n_keys: Keys so far, those evicted included.
        in_order: Whether the queries are the last positions and each sees no later key.
    """

    key: Tensor
    value: Tensor
    valid: Tensor | None
    n_keys: int
    in_order: bool = True

    def until(self, end: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and validity of the positions before `end`."""
        valid = None if self.valid is None else self.valid[:, :end]
        return self.key[:, :, :end], self.value[:, :, :end], valid

    def since(self, first: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and validity from position `first` on."""
        held = first - (self.n_keys - self.key.shape[2])
        valid = None if self.valid is None else self.valid[:, first:]
        return self.key[:, :, held:], self.value[:, :, held:], valid


class Step(NamedTuple):
    """Which way a call goes.

    Attributes:
        path: In words.
        output: `[B, Hq, Nq, Dv]`; None = the caller attends, pre-scored to a `PROMPT`, exactly `OVER_ALL`.
        count_keys: Counts the key and centroid rows that a query met, on average; None = the caller knows.
        figures: What is known of it beside that, by the names of `Stats`.
    """

    path: str
    output: Tensor | None = None
    count_keys: Callable[[], float] | None = None
    figures: Mapping[str, Any] = MappingProxyType({})


class LayerCache(Protocol):
    """Remembers for a layer from one call to the next."""

    def step(self, query: Tensor, past: CachedKeys, request: Request) -> Step:
        """Answer a call, or say how it is to be answered; `past` is what the model showed."""


def remembers(config: Config) -> bool:
    """Whether decoding keeps a selection; if not, a step chooses among all keys, or reads them all.

    There is nothing to remember when nothing is filtered out.
    """
    return isinstance(config, Selected) and not (isinstance(config.top_k, float) and config.top_k == 1.0)


def selectable(n_keys: int, n_query: int) -> int:
    """The first keys among which the newest queries may choose.

    One token chooses among all keys, its own included, as in `prescored_attention`; several would see one
    another's future there, and choose among those before them.
    """
    return n_keys if n_query == 1 else n_keys - n_query


def routes(config: Routed, n_query: int, n_keys: int, *, is_causal: bool) -> bool:
    """Whether some query of a call without padding reads less than it sees."""
    layout = make_layout(n_query, n_keys, causal=is_causal, config=config)
    if is_causal:
        return layout.n_chunks > 0
    return n_query >= config.exact_until and n_keys >= layout.sinks + layout.chunk


class Decoder:
    """The state of one layer between calls.

    Args:
        evict: Let the owner of the keys free them once a selection is made, which is then final.
        refresh_every: Select anew after so many tokens; None = never.
        owned: Whether keys change only in ways that this decoder is told of. Clusters are kept through steps only
            then: whoever merely shows keys may have exchanged some.

    Attributes:
        state: The selection; None until it is made.
        evicted: Whether only the selection and later tokens are left.
    """

    def __init__(self, *, evict: bool = False, refresh_every: int | None = None, owned: bool = True) -> None:
        self.evict = evict
        self.refresh_every = refresh_every
        self.owned = owned
        self.state: SelectionState | None = None
        self.evicted = False
        self._index: tuple[tuple[Routed, float], RoutedIndex] | None = None

    def step(self, query: Tensor, past: CachedKeys, request: Request) -> Step:
        """Answer the newest queries `[B, Hq, Nq, D]`, or say how they are to be answered."""
        n_query = query.shape[2]
        if n_query == past.n_keys or n_query > STEP_AT_MOST or not past.in_order:
            self.forget("a further piece of the prompt needs all keys")
            return Step(PROMPT)
        if remembers(request.config):
            state = self._up_to_date(past, n_query, request)
            output = state.attend(query, request.scale, request.dropout)
            return Step(OVER_SELECTION, output, state.keys_read(n_query))
        self.needs_all()
        index = self._clusters(query, past, request)
        if index is None:
            return Step(OVER_ALL)
        with without_autocast(query, past.key, past.value) as tensors:
            output, rows = index.attend(*tensors).output, index.keys_read
        return Step(OVER_CLUSTERS, output, lambda: rows, index.figures)

    def select(self, past: CachedKeys, request: Request) -> None:
        """Make the selection now instead of at the first step, where one will be needed and there is none."""
        if self.state is None and remembers(request.config):
            self._keep(self._selected(past, past.n_keys, request))

    def needs_all(self) -> None:
        """Refuse when some keys are gone."""
        if self.evicted:
            raise Unsupported("attention over all keys", ["the cache has evicted the unselected ones"])

    def forget(self, reason: str) -> None:
        """Give the selection up; refused when nothing else is left."""
        if self.evicted:
            raise Unsupported("a cache with evicted keys", [reason])
        self.state = None

    def reset(self) -> None:
        """Start anew."""
        self.state = self._index = None
        self.evicted = False

    def crop(self, n_keys: int) -> None:
        """Forget the keys after the first `n_keys`; a selection that saw none of them stays."""
        if self._index is not None:
            self._index[1].crop(n_keys)
        if self.state is not None and n_keys < self.state.n_selected_from:
            self.forget(f"a crop to {n_keys} tokens goes behind the selection")
        elif self.state is not None:
            self.state.crop(n_keys - self.state.n_selected_from)

    def take(self, index: Tensor, n_before: int) -> None:
        """Keep these of `n_before` batch rows, in this order."""
        if self.state is not None:
            self.state.take(index)
        if self._index is not None and index.numel() == n_before:
            self._index[1].reorder(index)
        else:
            self._index = None

    def repeat(self, repeats: int) -> None:
        """Repeat every batch row."""
        self._index = None
        if self.state is not None:
            self.state.repeat(repeats)

    def _up_to_date(self, past: CachedKeys, n_query: int, request: Request) -> SelectionState:
        """The selection with the newest tokens behind it; made, or made anew, where that is due."""
        if self.state is not None and self.state.config != request.config:
            self.forget("the configuration changed")
        if self.state is not None and self._is_old(self.state, past.n_keys):
            self.forget("refresh_every selects among all keys again")
        state = self.state or self._selected(past, selectable(past.n_keys, n_query), request)
        first = state.n_selected_from + state.n_since
        if first < past.n_keys:
            state.append(*past.since(first))
        self._keep(state)
        return state

    def _is_old(self, state: SelectionState, n_keys: int) -> bool:
        return self.refresh_every is not None and n_keys - state.n_selected_from >= self.refresh_every

    def _selected(self, past: CachedKeys, n_keys: int, request: Request) -> SelectionState:
        self.needs_all()
        return SelectionState.select(*past.until(n_keys), request.config, request.seed)

    def _keep(self, state: SelectionState) -> None:
        self.state, self.evicted = state, self.evict

    def _clusters(self, query: Tensor, past: CachedKeys, request: Request) -> RoutedIndex | None:
        """The nodes that new queries choose from; None where they read everything instead."""
        config = request.config
        if not isinstance(config, Routed) or not self.owned:
            return None
        if past.n_keys <= config.exact_until:
            return None
        learned = torch.is_grad_enabled() and query.requires_grad
        if request.dropout or learned:
            return None  # a step has neither dropout nor gradients
        start = None
        if past.valid is not None and not bool(past.valid.all()):
            start = first_real(past.valid)
            padding = torch.arange(past.n_keys, device=start.device) < start[:, None]
            if not torch.equal(past.valid, ~padding):
                return None  # padding behind or between real keys: positions would not be those of the trees
        made = (config, float(query.shape[-1] ** -0.5 if request.scale is None else request.scale))
        if self._index is None or self._index[0] != made:
            self._index = (made, RoutedIndex(config, scale=made[1], start=start, seed=request.seed))
        return self._index[1]


# Decoding for models whose cache is not ours: it follows the keys it is shown, and checks that they go on.

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


class ExternalCache:
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

    def step(self, query: Tensor, past: CachedKeys, request: Request) -> Step:
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

    def _goes_on(self, seen: _Seen, past: CachedKeys, n_query: int) -> bool:
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

    def _begin_again(self, seen: _Seen, past: CachedKeys, n_query: int, request: Request) -> None:
        """Give the selection up; in the same text, make it again where it was made."""
        self._decoder.reset()
        self._seen, n_keys = None, seen.state.n_selected_from
        if not seen.same_prompt(past.key):
            self._n_prompt = 0
        elif n_keys <= selectable(past.n_keys, n_query):
            self._decoder.select(CachedKeys(*past.until(n_keys), n_keys), request)


def _used(past: CachedKeys, n_query: int) -> CachedKeys:
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
