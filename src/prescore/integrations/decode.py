"""How each call of one layer is answered during a generation, and what later calls reuse.

A layer is called with chunks of a prompt, then with a few new tokens at a time. A `LayerCache` decides how each
call is answered. A `PrescoredLayer`, the layer of a `PrescoredCache`, has a `LayerCache` with the keys. An
`ExternalCache`, for models that pass all keys at every step, has a `LayerCache` without keys.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.autograd import records_gradients, without_autocast
from prescore.call import Options, first_real, make_call
from prescore.config import Config, Coupling, Exact, Hyper, Routed, Selected
from prescore.errors import Unsupported
from prescore.ops.operators import accumulation_dtype, pick_operator
from prescore.rng import Streams, as_streams
from prescore.routed import native
from prescore.routed.backends import auto_config, build_index
from prescore.routed.decode import StepAttention
from prescore.routed.index import GrowingIndex
from prescore.routed.int8_rows import from_int8_rows, to_int8_rows
from prescore.routed.layout import make_layout, why_exact
from prescore.selected.plan import make_plan
from prescore.types import Reads, Result

STEP_AT_MOST = 32
"""Queries of one decode step; more at once are another chunk of the prompt."""

PROMPT = "prescored"
OVER_SELECTION = "step over the selection"
OVER_CLUSTERS = "routed step"
OVER_ALL = "step over all keys"

_WITHOUT_INDEX = "a step without a key index: "
_WHY_ALL: dict[type[Config], str] = {Hyper: "a step reads every key so far", Selected: "top_k keeps every key"}
NO_INDEX = "the model's own cache keeps none"
"""Why steps of a `Routed` find no key index where the cache is not one of ours."""

_MIN_ROOM = 64
_PROBES = 16


class CachedKeys(NamedTuple):
    """The keys a call may read, those of the new tokens included.

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

    def until(self, end: int) -> CachedKeys:
        """The keys before position `end`."""
        valid = None if self.valid is None else self.valid[:, :end]
        return self._replace(key=self.key[:, :, :end], value=self.value[:, :, :end], valid=valid, n_keys=end)


class Step(NamedTuple):
    """How a call is answered.

    Attributes:
        path: `PROMPT`, `OVER_SELECTION`, `OVER_CLUSTERS` or `OVER_ALL`.
        result: The answer; None = the caller attends: as for a prompt under `PROMPT`, else exactly.
        why_exact: Why a step reads every key.
    """

    path: str
    result: Result | None = None
    why_exact: str = ""


def keeps_selection(config: Config) -> bool:
    """Whether decode steps reuse a selection; other configurations choose at every step, or read all keys."""
    return isinstance(config, Selected) and not (isinstance(config.top_k, float) and config.top_k == 1.0)


class LayerCache:
    """What one layer keeps between calls: keys and values, and a selection or a key index.

    Args:
        evict: Free the keys and values once a selection is made; the selection is then final.
        refresh_every: Select again after so many tokens; None = never.
        no_index: Why the key index of a `Routed` is not kept; empty = the key index is kept, because keys change
            only through this object.
        warned: Warnings already given; layers that share the set warn once.
        dtype: `torch.int8`: sinks, far keys and their values under a `Routed` become int8 rows, where native steps
            can read them; None = all keys and values stay in the model's dtype.

    Attributes:
        n_tokens: Tokens so far, those evicted included.
        buffer: All keys and values; None before the first token, after an eviction, and for external caches.
        selection: The selection; None until it is made.
        evicted: Whether only the selection and later tokens are left.
        valid: `[B, n_tokens]`, True = a real key, as of the last call; None = all are.
        chosen_by: Configuration and randomness of the last call, by which selections are made; None before
            the first.
    """

    def __init__(
        self,
        *,
        evict: bool = False,
        refresh_every: int | None = None,
        no_index: str = "",
        warned: set[str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.evict = evict
        self.dtype = dtype
        self.refresh_every = refresh_every
        self.no_index = no_index
        self._warned = set() if warned is None else warned
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.n_tokens = 0
        self.buffer: KVBuffer | None = None
        self.selection: SelectionState | None = None
        self.evicted = False
        self.valid: Tensor | None = None
        self.chosen_by: tuple[Config, Streams] | None = None
        self._index = GrowingIndex(build_index)
        self._steps: tuple[tuple[Config, str, float | None], StepAttention] | None = None

    @property
    def held(self) -> KVBuffer | None:
        """The buffer of all keys, or after an eviction that of the selection."""
        if self.buffer is None and self.selection is not None:
            return self.selection.buffer
        return self.buffer

    @property
    def n_bytes(self) -> int:
        """Memory of keys, values and selection."""
        buffers = (self.buffer, None if self.selection is None else self.selection.buffer)
        return sum(buffer.n_bytes for buffer in buffers if buffer is not None)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add the keys and values of new tokens; after an eviction the next step adds them to the selection."""
        held = self.held
        if held is not None:
            sizes, wanted = (
                [(*part.shape[:2], part.shape[3]) for part in parts] for parts in (held.recent, (key, value))
            )
            if sizes != wanted:
                raise ValueError(
                    "past_key_values must be of as many sequences and heads as the inputs, and of their sizes, "
                    f"{wanted} for keys and values, got {sizes}"
                )
        self.n_tokens += key.shape[2]
        if self.buffer is not None:
            self.buffer.append(key, value)
        elif not self.evicted:
            self.buffer = KVBuffer(key, value)

    def settle(self) -> None:
        """After a call, with `dtype=torch.int8`: keys that no later query reads as local keys become int8 rows."""
        config = None if self.chosen_by is None else self.chosen_by[0]
        if self.dtype is None or self.buffer is None or not isinstance(config, Routed):
            return
        layout, (key, value) = make_layout(1, self.n_tokens, causal=True, config=config), self.buffer.recent
        if native.can_run(key, value.shape[-1], layout.cluster_size):
            # in a padded batch, local keys may begin up to a chunk earlier
            self.buffer.pack(layout.far_end - (0 if self.valid is None else layout.chunk_size))

    def reads_int8_rows(self) -> bool:
        """Whether the next call, a step of one query, can read int8 rows; then it is given the new key alone."""
        if self.buffer is None or not self.buffer.n_int8 or self._steps is None or self.valid is not None:
            return False
        return self._steps[1].reads_int8_rows(self.n_tokens, self.buffer.n_int8)

    def all_keys(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values; `key` and `value` may be the new ones alone, given to a step over int8 rows."""
        if self.buffer is None or key.shape[2] >= self.n_tokens:
            return key, value
        return self.buffer.key, self.buffer.value

    def step(self, query: Tensor, keys: CachedKeys, config: Config, options: Options) -> Step:
        """Answer the newest queries `[B, Hq, Nq, D]`, or say how to answer them.

        Of the options, `scale`, `dropout_p`, `backend`, and an int as `generator` count.
        """
        n_query = query.shape[2]
        n_earlier = keys.n_keys - n_query
        result = self._int8_step(query, keys, config, options)
        if result is not None:
            return Step(OVER_CLUSTERS, result)
        all_keys = self.all_keys(keys.key, keys.value)
        keys = keys._replace(key=all_keys[0], value=all_keys[1])
        if self.selection is not None:
            n_earlier = min(n_earlier, self.selection.n_selected_from + self.selection.n_since)
        if _masks_differ(self.valid, keys.valid, n_earlier):  # the selection and the key index are of other keys
            self.drop_selection("the attention mask of earlier tokens changed")
            self._steps, self._index = None, GrowingIndex(build_index)
        self.valid, self.chosen_by = keys.valid, (config, as_streams(options.generator))
        if (self.evict or self.refresh_every) and not keeps_selection(config):
            setting = "evict=True" if self.evict else f"refresh_every={self.refresh_every}"
            name = type(config).__name__
            warn_once(f"{setting} of the cache does nothing under {name}, which keeps every key", self._warned)
        if n_query == keys.n_keys or n_query > STEP_AT_MOST or not keys.in_order:
            self.drop_selection(
                f"{n_query} new tokens at once need all keys; read them in steps of at most {STEP_AT_MOST}, as "
                f"generate does with prefill_chunk_size={STEP_AT_MOST}, or use a cache without evict=True"
            )
            return Step(PROMPT)
        if keeps_selection(config):
            selection = self._updated_selection(keys, n_query, *self.chosen_by)
            output = selection.attend(query, options.scale, options.dropout_p)
            return Step(OVER_SELECTION, Result(output, output.new_empty(0), selection.count_reads(n_query)))
        self.require_all_keys()
        if not isinstance(config, Routed):
            return Step(OVER_ALL, None, _WHY_ALL.get(type(config), ""))
        steps = self._routed_steps(query, keys, config, options)
        if isinstance(steps, str):
            return Step(OVER_ALL, None, steps)
        with without_autocast(query, keys.key, keys.value) as tensors:
            attended = steps.attend(*tensors, backend=options.backend)
        reads = steps.reads
        return Step(OVER_CLUSTERS, Result(*attended, lambda: reads, steps.stats))

    def prompt_index(self, keys: CachedKeys, config: Config, options: Options) -> GrowingIndex | None:
        """The key index of the tokens so far, which the next chunk of the prompt extends, as steps do.

        None with padding, gradients or dropout, under another configuration, and where no key index is kept.
        """
        if not isinstance(config, Routed) or self.no_index or not keys.in_order:
            return None
        if keys.valid is not None or options.dropout_p or records_gradients(keys.key, keys.value):
            return None
        return self._index

    def select(self, keys: CachedKeys | None = None) -> None:
        """Make the selection now instead of at the first step, where steps will need one; or complete it.

        Args:
            keys: The keys to select from; None = all that are held.
        """
        if keys is None and self.buffer is not None:
            if self.valid is not None:  # tokens since the last call of `step` are real
                n_since = self.n_tokens - self.valid.shape[1]
                self.valid = torch.nn.functional.pad(self.valid, (0, n_since), value=True)
            keys = CachedKeys(self.buffer.key, self.buffer.value, self.valid, self.n_tokens)
        if keys is None:
            return
        if self.selection is not None:
            self.selection.append_missing(keys)
        elif self.chosen_by is not None and keeps_selection(self.chosen_by[0]):
            self._select(keys, *self.chosen_by)

    def require_all_keys(self) -> None:
        """Refuse when some keys were evicted."""
        if self.evicted:
            raise Unsupported("attention over all keys", ["the cache has evicted the unselected ones"])

    def drop_selection(self, reason: str) -> None:
        """Drop the selection; refused when the keys were evicted."""
        if self.evicted:
            raise Unsupported("a cache with evicted keys", [reason])
        self.selection = None

    def crop(self, n_tokens: int) -> None:
        """Forget the tokens after the first `n_tokens`; a selection made before them stays."""
        if self.selection is not None and n_tokens < self.selection.n_selected_from:
            self.drop_selection(f"a crop to {n_tokens} tokens removes keys that were selected from")
        self.n_tokens = min(self.n_tokens, n_tokens)
        self.valid = None if self.valid is None else self.valid[:, :n_tokens]
        if self.buffer is not None:
            self.buffer.crop(n_tokens)
        if self.selection is not None:
            self.selection.crop(n_tokens - self.selection.n_selected_from)
        (self._index if self._steps is None else self._steps[1]).crop(n_tokens)

    def take(self, sequences: Tensor) -> None:
        """Keep these sequences of the batch, in this order; an index may occur several times."""
        (self._index if self._steps is None else self._steps[1]).reorder(sequences)
        if self.selection is not None:
            self.selection.buffer.take(sequences)
        if self.buffer is not None:
            self.buffer.take(sequences)
        if self.valid is not None:
            self.valid = self.valid.index_select(0, sequences.to(self.valid.device))

    def _updated_selection(
        self, keys: CachedKeys, n_query: int, config: Config, streams: Streams
    ) -> SelectionState:
        """The selection with the newest tokens appended; made where there is none, or where it is due again."""
        if self.selection is not None:
            n_since = keys.n_keys - self.selection.n_selected_from
            if self.selection.config != config:
                self.drop_selection("the configuration changed")
            elif self.refresh_every is not None and n_since >= self.refresh_every:
                self.drop_selection("refresh_every selects among all keys again")
        earlier = keys.until(_n_selectable(keys.n_keys, n_query))
        selection = self.selection or self._select(earlier, config, streams)
        selection.append_missing(keys)
        return selection

    def _select(self, keys: CachedKeys, config: Config, streams: Streams) -> SelectionState:
        self.require_all_keys()
        self.selection = SelectionState.select(keys.key, keys.value, keys.valid, config, streams)
        self.evicted = self.evict
        if self.evict:
            self.buffer = None
        return self.selection

    def _int8_step(self, query: Tensor, keys: CachedKeys, config: Config, options: Options) -> Result | None:
        """The answer to a step that reads int8 rows; None = it needs all keys, in the model's dtype."""
        same = self._steps is not None and self._steps[0] == (config, options.backend, options.scale)
        if keys.key.shape[2] >= keys.n_keys or not same or keys.valid is not None or not self.reads_int8_rows():
            return None
        if self._steps is None or self.buffer is None or options.dropout_p or records_gradients(query):
            return None
        steps = self._steps[1]
        with without_autocast(query, *self.buffer.recent) as (query, key, value):
            attended = steps.attend_int8_rows(query, key, value, self.buffer.int8_rows)
        reads = steps.reads
        return Result(*attended, lambda: reads, steps.stats)

    def _routed_steps(
        self, query: Tensor, keys: CachedKeys, config: Routed, options: Options
    ) -> StepAttention | str:
        """What attends for new queries, or why they read every key instead."""
        made_for = (config, options.backend, options.scale)
        if reason := why_exact(config, 1, keys.n_keys, is_causal=True):
            return reason
        if self.no_index:
            return f"{_WITHOUT_INDEX}{self.no_index}"
        if options.dropout_p or records_gradients(query, keys.key, keys.value):
            return f"{_WITHOUT_INDEX}the key index has neither dropout nor gradients"
        if self._steps is not None and self._steps[0] == made_for and keys.valid is None:
            return self._steps[1]
        if options.backend == "auto":
            effective, reason = auto_config(query, keys.key, keys.value, config, is_causal=True)
            if isinstance(effective, Exact):
                return f"{_WITHOUT_INDEX}{reason}"
            config = effective
        start = None
        if keys.valid is not None and not bool(keys.valid.all()):
            start = first_real(keys.valid)
            position = torch.arange(keys.n_keys, dtype=torch.int64, device=start.device)
            if not torch.equal(keys.valid, position >= start[:, None]):
                # positions are not those of the clusters
                return f"{_WITHOUT_INDEX}there is padding after or between real keys"
        starts = [] if start is None else start.tolist()
        if self._steps is None or self._steps[0] != made_for or self._steps[1].starts != starts:
            scale = float(query.shape[-1] ** -0.5 if options.scale is None else options.scale)
            index = self._index if start is None else None
            self._steps = (made_for, StepAttention(config, scale=scale, start=start, index=index))
        return self._steps[1]


def warn_once(text: str, warned: set[str]) -> None:
    """Warn, unless the text is among those already given."""
    if text not in warned:
        warned.add(text)
        warnings.warn(text, stacklevel=5)


def _masks_differ(first: Tensor | None, second: Tensor | None, n_keys: int) -> bool:
    """Whether two masks of real keys differ among the first `n_keys` that both know; None = all keys are real."""
    if first is None or second is None:
        mask = second if first is None else first
        return mask is not None and not bool(mask[:, :n_keys].all())
    n_keys = min(n_keys, first.shape[1], second.shape[1])
    return not torch.equal(first[:, :n_keys], second[:, :n_keys])


def _n_selectable(n_keys: int, n_query: int) -> int:
    """How many of the first keys the newest queries may select from; several would see each other's future."""
    return n_keys if n_query == 1 else n_keys - n_query


class ExternalCache(threading.local):
    """Reuses one selection for a model whose cache is no `PrescoredCache`, while each call continues the last.

    Such a model passes all keys at every step, and no object that could hold a state. So every step compares some
    keys of the prompt, and all keys after the prompt, with those of the step before:

    - another prompt: a new selection is made;
    - only later keys differ (reordered beams): the selection stays, and recent keys are read again;
    - keys differ that the selection was made from: the selection is made again, from as many keys.

    An `ExternalCache` follows one generation at a time, so it has one state per thread. A copy has no state.
    """

    def __init__(self) -> None:
        self._cache = LayerCache(no_index=NO_INDEX)
        self._n_prompt = 0  # 0 = unknown
        self._compared_to: SelectionState | None = None

    def __reduce__(self) -> tuple[type[ExternalCache], tuple[()]]:
        return ExternalCache, ()

    @property
    def selection(self) -> SelectionState | None:
        """The selection of the last step; None where it made none."""
        return self._cache.selection

    def step(
        self, query: Tensor, keys: CachedKeys, config: Config, options: Options, no_index: str = NO_INDEX
    ) -> Step:
        """Answer a call, or say how to answer it; `keys` holds all keys so far, perhaps with unused room."""
        self._cache.no_index = no_index
        n_query = query.shape[2]
        if n_query == 1 and keys.valid is not None:  # leave out the unused room of a static cache
            real = keys.valid.any(dim=0).nonzero()
            keys = keys.until(int(real.max()) + 1 if len(real) else keys.n_keys)
        if self.selection is not self._compared_to:  # the last step failed
            self._cache.clear()
        elif self.selection is not None:
            self._follow(self.selection, keys, n_query)
        step = self._cache.step(query, keys, config, options)
        if step.path == PROMPT:
            self._n_prompt = keys.n_keys
        elif not 0 < self._n_prompt <= keys.n_keys - n_query:
            self._n_prompt = keys.n_keys - n_query  # the prompt was read elsewhere
        if self.selection is not None and self.selection is not self._compared_to:
            self._remember(self.selection, keys)
        self._compared_to = self.selection
        return step

    def _follow(self, selection: SelectionState, keys: CachedKeys, n_query: int) -> None:
        """Keep what the call continues: the selection if it was made from keys that the queries may see."""
        n_selected_from, n_selectable = selection.n_selected_from, _n_selectable(keys.n_keys, n_query)
        same_prompt = self._equal(keys, self._n_probes)
        if n_selected_from <= n_selectable and same_prompt and self._equal(keys, len(self._compared)):
            since, held = slice(n_selected_from, n_selected_from + selection.n_since), selection.buffer
            pairs = ((keys.key, held.key), (keys.value, held.value))
            if not all(torch.equal(new[:, :, since], old[:, :, selection.n_entries :]) for new, old in pairs):
                selection.crop(0)
            return
        chosen_by = self._cache.chosen_by
        self._cache.clear()
        if not same_prompt:
            self._n_prompt = 0
        elif n_selected_from <= n_selectable:
            self._cache.chosen_by = chosen_by
            self._cache.select(keys.until(n_selected_from))

    def _remember(self, selection: SelectionState, keys: CachedKeys) -> None:
        """Keep keys and values that identify the text: a few of its prompt, and all later ones selected from."""
        key = keys.key
        n_prompt = min(self._n_prompt, selection.n_selected_from)
        size = min(_PROBES, n_prompt)
        probes = torch.linspace(0, n_prompt - 1, size, dtype=torch.float64, device=key.device).round().long()
        later = torch.arange(n_prompt, selection.n_selected_from, dtype=torch.int64, device=key.device)
        self._n_probes, self._compared = size, torch.cat((probes, later))
        self._known = [tensor.detach()[:, :, self._compared] for tensor in (key, keys.value)]

    def _equal(self, keys: CachedKeys, n_compared: int) -> bool:
        """Whether the first `n_compared` of the compared keys and values are those of the step before."""
        compared = self._compared[:n_compared]
        if n_compared and keys.key.shape[2] <= int(compared[-1]):
            return False
        pairs = zip((keys.key, keys.value), self._known, strict=True)
        return all(torch.equal(tensor[:, :, compared], known[:, :, :n_compared]) for tensor, known in pairs)


@dataclass(eq=False)
class SelectionState:
    """Selected keys, centroids of the others, and every token since, in one buffer.

    A step is one exact attention over `n_entries + n_since` entries, however many keys there were.

    Attributes:
        config: The configuration of the selection.
        buffer: The entries and the tokens since.
        n_selected_from: How many keys there were when the selection was made.
        n_entries: Entries that represent these keys: selected keys, then centroids.
        n_centroids: How many of the entries are centroids.
    """

    config: Selected
    buffer: KVBuffer
    n_selected_from: int
    n_entries: int
    n_centroids: int

    @classmethod
    def select(
        cls, key: Tensor, value: Tensor, valid: Tensor | None, config: Config, streams: Streams
    ) -> SelectionState:
        """Select among keys `[B, Hkv, N, D]`; `valid [B, N]` is False for padding, `streams` are of the scorer.

        The entries are those that `prescored_attention` of one query over the same keys would read, with exact
        attention over the selection, so that a fresh selection gives the same output.
        """
        if not isinstance(config, Selected):
            raise TypeError(f"config must be a Selected to keep a selection, got {type(config).__name__}")
        query = key[:, :, -1:]
        options = Options(key_padding_mask=valid)
        call = make_call(query, key, value, options, operator=pick_operator(query), streams=streams)
        plan = make_plan(call, _with_exact_inner(config))
        if not plan.parts:  # nothing but padding so far
            return cls(config, KVBuffer(key[:, :, :0], value[:, :, :0]), key.shape[2], 0, 0)
        (part,) = plan.parts
        entries = []
        for table in plan.tables.joined():
            columns = table if part.key_rows is None else table[part.key_rows]
            entries.append(columns.view(*key.shape[:2], -1, table.shape[-1]))
        bias = None
        if part.bias is not None and bool(part.bias.any()):
            bias = part.bias.reshape(entries[0].shape[:3])
        buffer = KVBuffer(entries[0], entries[1], bias)
        return cls(config, buffer, key.shape[2], buffer.length, part.n_centroids)

    @property
    def n_since(self) -> int:
        """Tokens appended since the selection."""
        return self.buffer.length - self.n_entries

    def append_missing(self, keys: CachedKeys) -> None:
        """Add the tokens that came since."""
        first = self.n_selected_from + self.n_since
        if first < keys.n_keys:
            offset = first - (keys.n_keys - keys.key.shape[2])
            valid = None if keys.valid is None else keys.valid[:, first:]
            self.append(keys.key[:, :, offset:], keys.value[:, :, offset:], valid)

    def append(self, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """Add new tokens; `valid [B, n]` marks padding among them."""
        bias = None
        if valid is not None and not bool(valid.all()):
            dtype = accumulation_dtype(key.dtype)
            hidden = torch.zeros(valid.shape, dtype=dtype, device=key.device).masked_fill_(~valid, -torch.inf)
            bias = hidden[:, None, :].expand(key.shape[:3])
            key, value = (t.masked_fill(~valid[:, None, :, None], 0) for t in (key, value))
        self.buffer.append(key, value, bias)

    def attend(self, query: Tensor, scale: float | None, dropout: float = 0.0) -> Tensor:
        """Exact attention of the last tokens, `query [B, Hq, Nq, D]`, each over all entries up to its own."""
        batch, n_heads, n_query, dim = query.shape
        n_kv_heads, length = self.buffer.key.shape[1:3]
        # the queries of a group become queries of one head, so that no key is repeated
        grouped = query.reshape(batch, n_kv_heads, -1, dim)
        mask = None if self.buffer.bias is None else self.buffer.bias[:, :, None, :]
        if mask is not None and query.device.type != "cpu":
            # elsewhere torch takes the mask in the queries' dtype only, which rounds the logs of counts
            mask = mask.to(query.dtype)
        if n_query > 1:
            later = torch.ones(n_query, length, dtype=torch.bool, device=query.device).triu(length - n_query + 1)
            hidden = torch.zeros(n_query, length, dtype=query.dtype, device=query.device)
            hidden = hidden.masked_fill_(later, -torch.inf).repeat(n_heads // n_kv_heads, 1)
            mask = hidden if mask is None else hidden + mask
        output = torch.nn.functional.scaled_dot_product_attention(
            grouped, self.buffer.key, self.buffer.value, attn_mask=mask, dropout_p=dropout, scale=scale
        )
        return output.reshape(batch, n_heads, n_query, -1)

    def count_reads(self, n_query: int) -> Callable[[], Reads]:
        """Counts what the last `n_query` tokens read; padding and empty clusters do not count."""
        length, bias = self.buffer.length, self.buffer.bias  # of this step, without its keys and values
        stop, n_centroids = self.n_entries, self.n_centroids

        def count() -> Reads:
            if bias is None:
                return Reads(length - (n_query - 1) / 2 - n_centroids, float(n_centroids))
            real = ~torch.isneginf(bias)
            entries = float(real.cumsum(-1)[..., length - n_query :].double().mean())
            centroids = float(real[..., stop - n_centroids : stop].sum(-1).double().mean())
            return Reads(entries - centroids, centroids)

        return count

    def crop(self, n_since: int) -> None:
        """Forget the tokens after the first `n_since`."""
        self.buffer.crop(self.n_entries + n_since)


def _with_exact_inner(config: Selected) -> Selected:
    """One query over its selection is exact, also where `min_fraction` makes attention run unfiltered."""
    return config.replace(
        inner=Exact(),
        min_seq_len=max(2, config.min_seq_len),
        # a step has one query, so with the flag it reads every key
        leaf_inclusive=config.leaf_inclusive and config.min_seq_len > 0,
        coupling=Coupling(mask=config.coupling.mask),  # its other fields need an Lsh inside
    )


class KVBuffer:
    """Keys `[B, H, n, D]`, values `[B, H, n, Dv]` and a bias `[B, H, n]` that grow along the sequence.

    They lie in larger tensors, so that appending writes new positions only. When gradients are recorded, or the
    room is used up, everything is copied once. The bias keeps its own dtype: it holds logs of counts, which half
    precision would round by percents. The first keys and values may be int8 rows.

    Attributes:
        length: Positions in use.
        n_int8: How many of the first positions are int8 rows.
    """

    def __init__(
        self, key: Tensor, value: Tensor, bias: Tensor | None = None, *, int8_rows: Sequence[Tensor] = ()
    ) -> None:
        self._tables = [key, value] if bias is None else [key, value, bias[..., None]]
        self._owned = False  # the caller's tensors are never written to
        self._rows = list(int8_rows)
        self.n_int8 = self._rows[0].shape[2] if self._rows else 0
        self.length = self.n_int8 + key.shape[2]

    @property
    def key(self) -> Tensor:
        """The keys in use: a view, or a copy where some are int8 rows."""
        return self._all(0)

    @property
    def value(self) -> Tensor:
        """The values in use: a view, or a copy where some are int8 rows."""
        return self._all(1)

    @property
    def recent(self) -> tuple[Tensor, Tensor]:
        """Keys and values that are not int8 rows, views."""
        return self._in_use(0), self._in_use(1)

    @property
    def int8_rows(self) -> tuple[Tensor, Tensor]:
        """The first keys and values as int8 rows, views."""
        return self._rows[0][:, :, : self.n_int8], self._rows[1][:, :, : self.n_int8]

    @property
    def bias(self) -> Tensor | None:
        """What is added to each logit, a view; None = nothing."""
        return self._tables[2][:, :, : self.length, 0] if len(self._tables) > 2 else None

    @property
    def n_bytes(self) -> int:
        """Memory held, the room for later positions included."""
        return sum(table.numel() * table.element_size() for table in (*self._tables, *self._rows))

    def append(self, key: Tensor, value: Tensor, bias: Tensor | None = None) -> None:
        """Add positions at the end; `bias` is 0 where none is given."""
        if bias is not None and len(self._tables) == 2:
            self._tables.append(torch.zeros_like(self._tables[0][..., :1], dtype=bias.dtype))
        new = [key, value]
        if len(self._tables) > 2:
            more = torch.zeros_like(key[..., :1]) if bias is None else bias[..., None]
            new.append(more.to(self._tables[2].dtype))
        start, self.length = self.length - self.n_int8, self.length + key.shape[2]
        stop = self.length - self.n_int8
        if records_gradients(*new, *self._tables):
            self._tables = [
                torch.cat((table[:, :, :start], more), dim=2)
                for table, more in zip(self._tables, new, strict=True)
            ]
            return
        if not self._owned or stop > self._tables[0].shape[2]:
            self._owned = True
            self._tables = [_roomy(table[:, :, :start], stop) for table in self._tables]
        for table, more in zip(self._tables, new, strict=True):
            table[:, :, start:stop] = more

    def pack(self, stop: int) -> None:
        """Turn the positions before `stop` into int8 rows, except those that are int8 rows already."""
        n_new = min(stop, self.length) - self.n_int8
        if n_new <= 0 or len(self._tables) > 2 or records_gradients(*self._tables):
            return
        new = [to_int8_rows(table[:, :, :n_new]) for table in self._tables]
        if not self._rows or self.n_int8 + n_new > self._rows[0].shape[2]:
            held = self.int8_rows if self._rows else [rows[:, :, :0] for rows in new]
            self._rows = [_roomy(rows, self.n_int8 + n_new) for rows in held]
        for rows, more in zip(self._rows, new, strict=True):
            rows[:, :, self.n_int8 : self.n_int8 + n_new] = more
        left = self.length - self.n_int8
        self._tables = [_roomy(table[:, :, n_new:left], left - n_new) for table in self._tables]
        self._owned, self.n_int8 = True, self.n_int8 + n_new

    def crop(self, length: int) -> None:
        """Forget the positions from `length` on."""
        self.length = min(self.length, length)
        self.n_int8 = min(self.n_int8, self.length)

    def take(self, sequences: Tensor) -> None:
        """Keep these sequences of the batch, in this order; only positions in use are copied."""
        sequences = sequences.to(self._tables[0].device)
        self._tables = [
            table[:, :, : self.length - self.n_int8].index_select(0, sequences) for table in self._tables
        ]
        self._rows = [rows[:, :, : self.n_int8].index_select(0, sequences) for rows in self._rows]
        self._owned = True

    def _in_use(self, number: int) -> Tensor:
        return self._tables[number][:, :, : self.length - self.n_int8]

    def _all(self, number: int) -> Tensor:
        recent = self._in_use(number)
        if not self.n_int8:
            return recent
        return torch.cat((from_int8_rows(self.int8_rows[number], recent.shape[-1], recent.dtype), recent), dim=2)


def _roomy(table: Tensor, n_used: int) -> Tensor:
    """A copy of `[B, H, n, D]` with room for later positions after the `n_used` that are used now."""
    room = table.new_empty(*table.shape[:2], n_used + max(_MIN_ROOM, n_used // 8), table.shape[3])
    room[:, :, : table.shape[2]] = table
    return room
