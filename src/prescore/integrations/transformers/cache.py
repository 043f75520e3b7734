"""A transformers cache whose layers remember their selections, as a value the caller owns."""

from __future__ import annotations

import functools
import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from prescore import checks
from prescore.config import Config, Selected, config_from_dict
from prescore.errors import Unsupported
from prescore.integrations.decode import CachedKeys, Decoder, Request, Step, remembers
from prescore.integrations.state import Rows, SelectionState
from prescore.types import Values

if TYPE_CHECKING:
    pass  # dropped import


class PrescoredCache(DynamicCache):
    """Keys, values and selections of a generation.

    Pass it as `past_key_values` to `generate` or to a model; `prescore.apply` makes one by itself. At the first
    step after a prompt every pre-scored layer selects among all keys so far, the new token's included (several
    tokens at once: those before them); later steps read the selection and the tokens since.

    Args:
        config: The model's configuration (`model.config`); tells which layers have sliding windows.
        evict: Free the unselected keys and values when the selection is made. The selection is then final:
            more prompt and a crop behind it are refused.
        refresh_every: Select anew after so many tokens; None = keep the selection. Not together with `evict`.

    Example:
        >>> cache = PrescoredCache(model.config)
        >>> with prescore.apply(model, prescore.Selected(top_k=1024)):
        ...     model.generate(**inputs, past_key_values=cache)
        >>> cache.save("prompt.safetensors")
    """

    def __init__(self, config: Any = None, *, evict: bool = False, refresh_every: int | None = None) -> None:
        checks.boolean("evict", evict)
        if refresh_every is not None:
            checks.integer("refresh_every", refresh_every, minimum=1)
        if evict and refresh_every is not None:
            raise ValueError(
                f"refresh_every must be None with evict=True, whose selection is final, got {refresh_every}"
            )
        if config is not None and not hasattr(config, "get_text_config"):
            raise TypeError(f"config must be a model's configuration or None, got {type(config).__name__}")
        super().__init__(config=config)
        self.evict = evict
        self.refresh_every = refresh_every
        upgrade(self, evict=evict, refresh_every=refresh_every)

    def select(self) -> None:
        """Make all selections now, among the prompt's keys, instead of at the first step."""
        for layer in prescored_layers(self).values():
            layer.select()

    def report(self) -> Values:
        """What the cache holds: bytes, bytes that an exact cache of the same tokens would hold, rows per layer."""
        return cache_report(self)

    def save(self, path: str | Path) -> None:
        """Write everything to a safetensors file; `PrescoredCache.load` reads it in any process."""
        pass  # dropped import

        save_cache(self, path)

    @classmethod
    def load(cls, path: str | Path, *, device: str = "cpu") -> PrescoredCache:
        """Read what `save` wrote."""
        pass  # dropped import

        return load_cache(path, device=device)


def upgrade(
    cache: Cache, *, evict: bool = False, refresh_every: int | None = None, max_length: int | None = None
) -> None:
    """Turn the full-attention layers of a dynamic cache into pre-scored ones, in place, content included.

    A window of at least `max_length` is no window.
    """
    options: Values = {"evict": evict, "refresh_every": refresh_every, "told": set()}
    if cache.layer_class_to_replicate is DynamicLayer:
        make: Any = functools.partial(PrescoredLayer, **options)
        cache.layer_class_to_replicate = make
    layer: Any
    for number, layer in enumerate(cache.layers):
        wide = type(layer) is DynamicSlidingWindowLayer and max_length and layer.sliding_window >= max_length
        if type(layer) is DynamicLayer or wide:
            cache.layers[number] = PrescoredLayer.adopt(layer, **options)


def mark(cache: Cache) -> Callable[[], None]:
    """Remember what a dynamic cache holds; the function that is returned goes back to it.

    Layers of transformers replace what they hold when they grow, so that their attributes are enough.
    """
    n_layers, back = len(cache.layers), []
    for layer in cache.layers:
        if isinstance(layer, PrescoredLayer):
            back.append(layer.mark())
        else:
            back.append(functools.partial(layer.__dict__.update, dict(layer.__dict__)))

    def go_back() -> None:
        del cache.layers[n_layers:]
        for own in back:
            own()

    return go_back


def prescored_layers(cache: Cache) -> dict[int, PrescoredLayer]:
    """The layers that can hold a selection, by number."""
    return {number: layer for number, layer in enumerate(cache.layers) if isinstance(layer, PrescoredLayer)}


def cache_report(cache: Cache) -> Values:
    """Memory and selection sizes, in plain numbers."""
    layers, held, exact = [], 0, 0
    layer: Any
    for number, layer in enumerate(cache.layers):
        if not layer.is_initialized or layer.keys is None:
            continue
        row_bytes = _row_bytes(layer.keys) + _row_bytes(layer.values)
        n_seen = layer.get_seq_length()
        entry: Values = {"layer": number, "tokens": n_seen}
        if isinstance(layer, PrescoredLayer):
            own = layer.n_bytes
            exact += n_seen * row_bytes
            if layer.state is not None:
                entry.update(selected_from=layer.state.n_selected_from, rows=layer.state.n_rows)
                entry.update(since=layer.state.n_since, evicted=layer.evicted)
        else:
            own = layer.keys.shape[2] * row_bytes
            exact += own
        entry["bytes"] = own
        held += own
        layers.append(entry)
    return {"bytes": held, "exact_bytes": exact, "layers": layers}


def _row_bytes(rows: Tensor) -> int:
    """Bytes of one position over batch and heads."""
    return rows.shape[0] * rows.shape[1] * rows.shape[3] * rows.element_size()


# One layer of a transformers cache that remembers which of its keys matter.

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

    def step(self, query: Tensor, past: CachedKeys, request: Request) -> Step:
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
            self._decoder.select(CachedKeys(key, value, self.valid, self.n_seen), self.request)
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

    def _past(self, shown: CachedKeys) -> CachedKeys:
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


# A prefilled cache as one safetensors file: a long prompt is read once and continued anywhere.

_FORMAT = "prescore-cache-2"


def save_cache(cache: PrescoredCache, path: str | Path) -> None:
    """Write keys, values, padding and selections; selections that are still to be made are made first."""
    cache.select()
    tensors: dict[str, Tensor] = {}
    layers = [_describe(layer, f"{number}.", tensors) for number, layer in enumerate(cache.layers)]
    facts = {"format": _FORMAT, "evict": cache.evict, "refresh_every": cache.refresh_every, "layers": layers}
    # written beside the target and renamed, so that a crash leaves the file that was there, or none
    path = Path(path)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        working = Path(scratch) / path.name
        save_file(
            {name: t.contiguous() for name, t in tensors.items()},
            working,
            metadata={"prescore": json.dumps(facts)},
        )
        working.replace(path)


def load_cache(path: str | Path, *, device: str = "cpu") -> PrescoredCache:
    """Read what `save_cache` wrote; raises ValueError for any other file."""
    pass  # dropped import

    facts, tensors = _read(str(path), device)
    options = {"evict": facts["evict"], "refresh_every": facts["refresh_every"]}
    cache = PrescoredCache(**options)
    cache.layers = [
        _restore(entry, f"{number}.", tensors, options) for number, entry in enumerate(facts["layers"])
    ]
    # a layer the file does not know would have missed the prompt
    cache.layer_class_to_replicate = None
    return cache


def _read(path: str, device: str) -> tuple[Values, dict[str, Tensor]]:
    """What the file says about the cache, and its tensors."""
    refusal = ValueError(f"path must be a file of PrescoredCache.save, got {path!r}")
    try:
        with safe_open(path, framework="pt", device=device) as file:
            facts = json.loads((file.metadata() or {}).get("prescore", "{}"))
            if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
                raise refusal
            return facts, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError) as error:  # no such file at all, or not a whole one
        raise refusal from error


def _describe(layer: Any, prefix: str, tensors: dict[str, Tensor]) -> Values:
    if not isinstance(layer, PrescoredLayer):
        return _describe_foreign(layer, prefix, tensors)
    content = layer.content
    entry: Values = {"kind": "prescored", "n_seen": content.n_seen}
    if content.request is not None:
        request = content.request
        entry["request"] = {**request._asdict(), "config": request.config.to_dict()}
    if content.valid is not None:
        tensors[f"{prefix}valid"] = content.valid.clone()  # all layers share one
    if content.rows is not None:
        _put_rows(content.rows, prefix, tensors)
    if content.state is not None:
        state = content.state
        entry["state"] = {
            "config": state.config.to_dict(),
            "n_selected_from": state.n_selected_from,
            "n_rows": state.n_rows,
        }
        _put_rows(state.rows, f"{prefix}state.", tensors)
    return entry


def _describe_foreign(layer: Any, prefix: str, tensors: dict[str, Tensor]) -> Values:
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise TypeError(f"cache layers must be dynamic or sliding to be saved, got {type(layer).__name__}")
    entry: Values = {"kind": "dynamic", "n_seen": layer.get_seq_length()}
    if isinstance(layer, DynamicSlidingWindowLayer):
        entry.update(kind="sliding", window=layer.sliding_window)
    if layer.is_initialized and layer.keys is not None:
        tensors[f"{prefix}key"], tensors[f"{prefix}value"] = layer.keys, layer.values
    return entry


def _restore(entry: Values, prefix: str, tensors: dict[str, Tensor], options: Values) -> Any:
    if entry["kind"] != "prescored":
        return _restore_foreign(entry, tensors.get(f"{prefix}key"), tensors.get(f"{prefix}value"))
    request, state = None, None
    if "request" in entry:
        kept = entry["request"]
        request = Request(**{**kept, "config": config_from_dict(kept["config"])})
    if "state" in entry:
        kept = entry["state"]
        config = config_from_dict(kept["config"])
        if not isinstance(config, Selected):
            raise ValueError(f"path must hold selections of a Selected, got {type(config).__name__}")
        rows = _get_rows(f"{prefix}state.", tensors)
        state = SelectionState(config, rows, kept["n_selected_from"], kept["n_rows"])
    all_rows = _get_rows(prefix, tensors) if f"{prefix}key" in tensors else None
    restored = PrescoredLayer(**options)
    restored.restore(Content(entry["n_seen"], all_rows, state, tensors.get(f"{prefix}valid"), request))
    return restored


def _restore_foreign(entry: Values, key: Tensor | None, value: Tensor | None) -> Any:
    layer: Any = DynamicLayer() if entry["kind"] == "dynamic" else DynamicSlidingWindowLayer(entry["window"])  # type: ignore[no-untyped-call]
    if key is not None:
        layer.update(key, value)
    if entry["kind"] == "sliding":
        layer.cumulative_length = entry["n_seen"]
    return layer


def _put_rows(rows: Rows, prefix: str, tensors: dict[str, Tensor]) -> None:
    tensors[f"{prefix}key"], tensors[f"{prefix}value"] = rows.key, rows.value
    if rows.bias is not None:
        tensors[f"{prefix}bias"] = rows.bias


def _get_rows(prefix: str, tensors: dict[str, Tensor]) -> Rows:
    return Rows(tensors[f"{prefix}key"], tensors[f"{prefix}value"], tensors.get(f"{prefix}bias"))
