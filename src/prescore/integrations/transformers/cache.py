"""`PrescoredCache`: a transformers cache that also holds the selection or the key index of each layer."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from prescore import checks
from prescore.config import config_from_dict
from prescore.errors import Unsupported
from prescore.integrations.decode import KVBuffer, LayerCache, SelectionState, keeps_selection
from prescore.ops.operators import accumulation_dtype
from prescore.rng import Streams
from prescore.routed.int8_rows import row_size
from prescore.types import Values

NAME = "prescored"
NAMES = {NAME}
"""Every name under which transformers calls our attention; a kernel has the name of the kernel's repository."""
CACHE_ARGUMENT = "prescore_cache"
"""The argument by which an attention module gets the cache a second time, and passes it to our function."""
_FORMAT = "prescore-cache-5"


class PrescoredCache(DynamicCache):
    """Keys and values of a generation, and the key index of a `Routed` or the selection of a `Selected`.

    Pass the cache as `past_key_values` to `generate` or to a model; inside `prescore.apply`, `generate` makes one.
    Under a `Routed`, prompt chunks and steps extend the key index. Under a `Selected`, the first step after a
    prompt selects among all keys so far, the key of the new token included (a first step of several tokens selects
    among the keys before these tokens). Later steps read the selection and the tokens since.

    Args:
        config: The model's configuration (`model.config`), which says which layers have sliding windows.
        evict: Free the unselected keys and values when the selection is made. The selection is then final. Refused
            are another chunk of the prompt, and a crop to fewer tokens than the selection was made from.
        refresh_every: Select again after so many tokens; None = keep the selection. Not together with `evict`.
        dtype: `torch.int8` keeps the sinks, the far keys and their values under a `Routed` as int8 numbers, with a
            bfloat16 unit for every 32 numbers: about half the memory of bfloat16. Local keys, layers that read
            every key, sliding windows, and layers that native code does not support keep the model's dtype.
            `report` says how many keys are int8. None = all keys and values in the model's dtype.

    Example:
        >>> cache = PrescoredCache(model.config)
        >>> with prescore.apply(model, prescore.Selected(top_k=1024)):
        ...     model.generate(**inputs, past_key_values=cache)
        >>> cache.save("prompt.safetensors")
    """

    def __init__(
        self,
        config: Any = None,
        *,
        evict: bool = False,
        refresh_every: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.boolean("evict", evict)
        if dtype not in (None, torch.int8):
            raise ValueError(f"dtype must be torch.int8 or None, got {checks.shown(dtype)}")
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
        self.dtype = dtype
        upgrade(self, {"evict": evict, "refresh_every": refresh_every, "dtype": dtype})

    def select(self) -> None:
        """Make all selections now, among the prompt's keys, instead of at the first step."""
        for layer in self.layers:
            if isinstance(layer, PrescoredLayer):
                layer.cache.select()
                layer.show()

    def report(self) -> Values:
        """What the cache holds: bytes, bytes of an exact cache of as many tokens, the selection of each layer."""
        return cache_report(self)

    def save(self, path: str | Path) -> None:
        """Write everything to a safetensors file; selections that are still to be made are made first."""
        self.select()
        tensors: dict[str, Tensor] = {}
        layers = [_save_layer(layer, f"{number}.", tensors) for number, layer in enumerate(self.layers)]
        facts = {"format": _FORMAT, "evict": self.evict, "refresh_every": self.refresh_every, "layers": layers}
        facts["int8"] = self.dtype is not None
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        # written next to the target and renamed, so that a crash leaves the old file, or none
        path = Path(path)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            working = Path(scratch) / path.name
            save_file(contiguous, working, metadata={"prescore": json.dumps(facts)})
            working.replace(path)

    @classmethod
    def load(cls, path: str | Path, *, device: str = "cpu") -> PrescoredCache:
        """Read what `save` wrote, in any process; raises ValueError for any other file.

        Everything that the file says about its tensors is compared with them.
        """
        refusal = f"path must be a file of PrescoredCache.save, got {str(path)!r}"
        try:
            facts, tensors = _read_file(str(path), device)
            settings = {name: facts[name] for name in ("evict", "refresh_every")}
            checks.boolean("int8", facts["int8"])
            settings["dtype"] = torch.int8 if facts["int8"] else None
            cache = cls(**settings)
            cache.layers = [
                _load_layer(entry, f"{number}.", tensors, settings) for number, entry in enumerate(facts["layers"])
            ]
            _require(not tensors, f"tensors without a layer: {', '.join(tensors)}")
        except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{refusal} ({error})") from error
        # a layer that the file does not have would have missed the prompt
        cache.layer_class_to_replicate = None
        return cache


class PrescoredLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer of a transformers cache around a `LayerCache`.

    With any other attention function the layer is an ordinary dynamic layer, unless keys were evicted.

    Args:
        settings: Arguments of the `LayerCache`.
        **kwargs: Arguments of transformers' layer.

    Attributes:
        cache: The keys and values, and the selection or the key index.
        is_expected: Whether the next `update` is followed by pre-scored attention.
    """

    is_sliding = False

    def __init__(self, settings: Values, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.cache = LayerCache(**settings)
        self.is_expected = False
        self._new_keys: Tensor | None = None
        self._new_values: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new keys and values; returns all keys and values.

        After an eviction, and before a step over int8 rows, only the new ones are returned.
        """
        expected, self.is_expected = self.is_expected, False
        if self.cache.evicted and not expected:
            # another attention function would take the new keys for all there are
            reason = "the model's attention does not go through prescore, and the unselected keys are gone"
            raise Unsupported("a cache with evicted keys", [reason])
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cache.append(key_states, value_states)
        self.show()
        is_step = expected and key_states.shape[2] == 1
        if self.cache.evicted or (is_step and self.cache.reads_int8_rows()):
            self._new_keys, self._new_values = key_states, value_states
            return key_states, value_states
        if self.cache.buffer is not None and self.cache.buffer.n_int8:
            self._new_keys, self._new_values = self.cache.buffer.key, self.cache.buffer.value
            return self._new_keys, self._new_values
        if self.keys is None or self.values is None:
            raise RuntimeError("a cache layer must hold keys after an update, got none")
        return self.keys, self.values

    def returned(self, key: Tensor, value: Tensor) -> bool:
        """Whether the last `update` returned these keys and values; DiffLlama makes other values of them."""
        return (key is self.keys and value is self.values) or (key is self._new_keys and value is self._new_values)

    def show(self) -> None:
        """Let `keys` and `values`, which other code reads, be what is held now, but for int8 rows."""
        held = self.cache.held
        if held is not None:
            self.keys, self.values = held.recent

    def settle(self) -> None:
        """After attention: let no keys live on that the cache does not hold."""
        self.cache.settle()
        buffer = self.cache.buffer
        if self.cache.evicted or (buffer is not None and buffer.n_int8):
            self.show()
            if buffer is not None and self._new_keys is not None and self._new_keys.shape[2] == buffer.length:
                self._new_keys = self._new_values = None

    def get_seq_length(self) -> int:
        """Tokens so far, those evicted included."""
        return self.cache.n_tokens

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.cache.clear()
        self._new_keys = self._new_values = None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; a selection that was made before them stays."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be at most 0, got {tokens_to_remove}")
        self.cache.crop(max(0, self.cache.n_tokens + tokens_to_remove))
        self.show()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences, in this order."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(1)
        held = self.cache.held
        if held is None:
            return
        batch = held.recent[0].shape[0]
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < batch:
            raise ValueError(f"indices must lie between 0 and {batch - 1}, got {indices.tolist()}")
        self.cache.take(indices)
        self.show()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        checks.integer("repeats", repeats, minimum=1)
        held = self.cache.held
        if held is not None:
            sequences = torch.arange(held.recent[0].shape[0], dtype=torch.int64, device=held.recent[0].device)
            self.batch_select_indices(sequences.repeat_interleave(repeats))


def pass_cache(module: nn.Module, args: tuple[Any, ...], kwargs: Values) -> tuple[tuple[Any, ...], Values] | None:
    """Before an attention module's forward: pass its cache once more, as an argument of the attention function.

    transformers hands the cache to the attention module alone. All attention modules that have a cache pass
    further keyword arguments on to the attention function.
    """
    if torch.compiler.is_compiling():
        return None  # a graph uses keys of our caches as those of any other
    cache = find_cache(args, kwargs)
    if isinstance(cache, EncoderDecoderCache):
        is_cross_attention = kwargs.get("key_value_states") is not None
        cache = None if is_cross_attention else cache.self_attention_cache
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if cache is None or name not in NAMES:
        return None
    if name != NAME and isinstance(cache, DynamicCache):
        upgrade(cache)  # a kernel has no other place for it; layers that are ours already stay
    number = getattr(module, "layer_idx", None)
    if isinstance(number, int) and number < len(cache.layers):
        layer = cache.layers[number]
        if isinstance(layer, PrescoredLayer):
            layer.is_expected = True
    return args, {**kwargs, CACHE_ARGUMENT: cache}


def find_cache(args: tuple[Any, ...], kwargs: Values) -> Cache | None:
    """The cache among the arguments of a forward, whatever its name."""
    return next((value for value in (*kwargs.values(), *args) if isinstance(value, Cache)), None)


def layer_of(module: nn.Module, key: Tensor, value: Tensor, cache: Cache | None) -> PrescoredLayer | None:
    """The layer of a cache that returned these keys and values; None = they come from elsewhere.

    Where modules share keys, this is the layer of another module.
    """
    layers = [] if cache is None else cache.layers
    number = getattr(module, "layer_idx", None)
    first = layers[number : number + 1] if isinstance(number, int) else []
    for layer in (*first, *layers):
        if isinstance(layer, PrescoredLayer) and layer.returned(key, value):
            return layer
    return None


def why_no_index(cache: Cache | None) -> str:
    """Why the steps of a layer find no key index in a cache; see `AttentionContext`."""
    if cache is None:
        return "no cache was passed"
    if any(isinstance(layer, PrescoredLayer) for layer in cache.layers):
        return "the model computes its keys or values from what its cache holds, as MLA does"
    return f"{type(cache).__name__} keeps none"


def upgrade(cache: Cache, settings: Values | None = None, *, max_length: int | None = None) -> None:
    """Turn the full-attention layers of a dynamic cache into pre-scored ones, in place, content included.

    A sliding window of at least `max_length` counts as full attention.
    """
    make: Any = partial(PrescoredLayer, {"warned": set(), **(settings or {})})
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = make
    layer: Any
    for number, layer in enumerate(cache.layers):
        wide = type(layer) is DynamicSlidingWindowLayer and max_length and layer.sliding_window >= max_length
        if type(layer) is DynamicLayer or wide:
            upgraded = make()
            if layer.keys is not None and layer.keys.numel():
                upgraded.update(layer.keys, layer.values)
            cache.layers[number] = upgraded


def save_point(cache: Cache) -> Callable[[], None]:
    """Remember what a dynamic cache holds; the returned function goes back to it.

    Attributes are enough for keys and values: layers of transformers replace them when they grow, and our buffers,
    which grow in place, are cropped. The states of convolutions and recurrences are written in place, and copied.
    """
    saved = [(layer, _attributes(layer)) for layer in cache.layers]
    of_ours = [(layer, dict(vars(layer.cache))) for layer in cache.layers if isinstance(layer, PrescoredLayer)]

    def go_back() -> None:
        del cache.layers[len(saved) :]
        for layer, attributes in saved:
            vars(layer).update(attributes)
        for layer, attributes in of_ours:
            vars(layer.cache).update(attributes)
            layer.cache.crop(layer.cache.n_tokens)
            layer.show()

    return go_back


def _attributes(layer: Any) -> Values:
    """What a cache layer holds; views of our buffers are made again, and would keep the smaller buffers before."""
    is_ours = isinstance(layer, PrescoredLayer)
    known = vars(layer).items()
    return {name: _copied(state) for name, state in known if not (is_ours and isinstance(state, Tensor))}


def _copied(state: Any) -> Any:
    """An attribute of a cache layer; what lies in a dictionary, as the states of hybrid layers do, as a copy."""
    if not isinstance(state, dict):
        return state
    return {key: part.clone() if isinstance(part, Tensor) else part for key, part in state.items()}


def check_equal_lengths(cache: Cache) -> None:
    """Refuse a cache whose last forward was interrupted: its first layers hold more tokens than the others."""
    lengths = _lengths(cache)
    if len(lengths) > 1:
        got = " and ".join(map(str, sorted(lengths)))
        raise ValueError(
            f"past_key_values must hold as many tokens in every layer, got {got} after an interrupted forward: "
            "make a new cache"
        )


def take_back(cache: Cache, go_back: Callable[[], None]) -> None:
    """Go back to what an interrupted cache held before its last forward, if layers miss tokens since."""
    if len(_lengths(cache)) > 1:
        go_back()


def _lengths(cache: Cache) -> set[int]:
    return {layer.cache.n_tokens for layer in cache.layers if isinstance(layer, PrescoredLayer)}


def cache_report(cache: Cache) -> Values:
    """Memory and selections of a cache, in plain numbers."""
    layers: list[Values] = []
    exact_bytes = 0
    layer: Any
    for number, layer in enumerate(cache.layers):
        if not layer.is_initialized or layer.keys is None:
            continue
        token_bytes = sum(
            t.element_size() * t.shape[0] * t.shape[1] * t.shape[3] for t in (layer.keys, layer.values)
        )
        entry: Values = {"layer": number, "tokens": layer.get_seq_length()}
        n_bytes = n_exact = layer.keys.shape[2] * token_bytes
        if isinstance(layer, PrescoredLayer):
            n_bytes, n_exact = layer.cache.n_bytes, entry["tokens"] * token_bytes
            if layer.cache.dtype is not None:
                entry["int8"] = 0 if layer.cache.buffer is None else layer.cache.buffer.n_int8
            selection = layer.cache.selection
            if selection is not None:
                entry["selected_from"] = selection.n_selected_from
                entry["selected"] = selection.n_entries - selection.n_centroids
                entry["centroids"] = selection.n_centroids
                entry["since"] = selection.n_since
                entry["evicted"] = layer.cache.evicted
        layers.append({**entry, "bytes": n_bytes})
        exact_bytes += n_exact
    return {"bytes": sum(entry["bytes"] for entry in layers), "exact_bytes": exact_bytes, "layers": layers}


def _read_file(path: str, device: str) -> tuple[Values, dict[str, Tensor]]:
    """What the file says about the cache, and its tensors."""
    with safe_open(path, framework="pt", device=device) as file:
        facts = json.loads((file.metadata() or {}).get("prescore", "{}"))
        _require(isinstance(facts, dict) and facts.get("format") == _FORMAT, f"its format is not {_FORMAT}")
        return facts, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _require(fact: bool, otherwise: str) -> None:
    if not fact:
        raise ValueError(otherwise)


def _save_layer(layer: Any, prefix: str, tensors: dict[str, Tensor]) -> Values:
    """What JSON can hold of a layer; its tensors go to `tensors`."""
    kind = type(layer)
    if kind is DynamicSlidingWindowLayer:
        if layer.is_initialized:
            _save_buffer(KVBuffer(layer.keys, layer.values), prefix, tensors)
        return {"n_tokens": layer.get_seq_length(), "window": layer.sliding_window}
    if not isinstance(layer, PrescoredLayer):
        raise TypeError(f"cache layers must be pre-scored or sliding to be saved, got {kind.__name__}")
    cache, selection = layer.cache, layer.cache.selection
    entry: Values = {"n_tokens": cache.n_tokens, "chosen_by": None, "selection": None}
    if cache.chosen_by is not None:
        config, streams = cache.chosen_by
        entry["chosen_by"] = {"config": config.to_dict(), "seed": streams.seed, "first_head": streams.first_head}
    if cache.valid is not None:
        tensors[f"{prefix}valid"] = cache.valid.clone()  # all layers share one
    if cache.buffer is not None:
        _save_buffer(cache.buffer, prefix, tensors)
    if selection is not None:
        _save_buffer(selection.buffer, f"{prefix}selection.", tensors)
        entry["selection"] = {**vars(selection), "config": selection.config.to_dict()}
        del entry["selection"]["buffer"]
    return entry


def _load_layer(entry: Values, prefix: str, tensors: dict[str, Tensor], settings: Values) -> Any:
    """A layer from what `_save_layer` returned; takes its tensors out of `tensors`."""
    n_tokens, buffer = entry["n_tokens"], _load_buffer(prefix, tensors)
    checks.integer("n_tokens", n_tokens, minimum=0)
    n_held = 0 if buffer is None else buffer.length
    if "window" in entry:
        checks.integer("window", entry["window"], minimum=1)
        layer: Any = DynamicSlidingWindowLayer(entry["window"])
        if buffer is not None:
            layer.update(buffer.key, buffer.value)
        _require(min(n_tokens, entry["window"] - 1) <= n_held <= n_tokens, f"{n_held} keys of {n_tokens} tokens")
        layer.cumulative_length = n_tokens
        return layer
    restored = PrescoredLayer(settings)
    cache = restored.cache
    cache.n_tokens, cache.buffer, cache.valid = n_tokens, buffer, tensors.pop(f"{prefix}valid", None)
    if entry["chosen_by"] is not None:
        chosen_by = entry["chosen_by"]
        for name in ("seed", "first_head"):
            _require(type(chosen_by[name]) is int, f"the {name} {chosen_by[name]!r}")
        streams = Streams(chosen_by["seed"], first_head=chosen_by["first_head"])
        cache.chosen_by = config_from_dict(chosen_by["config"]), streams
    selected = _load_buffer(f"{prefix}selection.", tensors)
    _require((selected is None) == (entry["selection"] is None), "half of a selection")
    if selected is not None:
        config: Any = config_from_dict(entry["selection"]["config"])
        cache.selection = SelectionState(**{**entry["selection"], "config": config, "buffer": selected})
        cache.evicted = buffer is None
        _check_selection(cache.selection, buffer, n_tokens)
    _require(cache.evicted or n_held == n_tokens, f"{n_held} keys of {n_tokens} tokens")
    _require(not cache.evicted or cache.evict, "keys are missing without evict=True")
    held = cache.held
    if held is not None:
        valid, batch = cache.valid, held.recent[0].shape[0]
        _require(
            valid is None or (valid.dtype, *valid.shape) == (torch.bool, batch, n_tokens),
            f"the mask of padding is not [{batch}, {n_tokens}] bool",
        )
        restored.lazy_initialization(*held.recent)
        restored.show()
    return restored


def _check_selection(selection: SelectionState, buffer: KVBuffer | None, n_tokens: int) -> None:
    """A selection stands for the first tokens; the tokens since, and none else, follow its entries."""
    first, n_entries, n_centroids = selection.n_selected_from, selection.n_entries, selection.n_centroids
    are_counts = all(type(count) is int and count >= 0 for count in (first, n_entries, n_centroids))
    _require(are_counts and keeps_selection(selection.config), "no selection")
    n_selected, bias = n_entries - n_centroids, selection.buffer.bias
    if bias is not None and n_selected > 0:  # heads that selected fewer keys have hidden entries
        n_selected = int((~torch.isneginf(bias[:, :, :n_selected])).sum(-1).max()) if bias.numel() else 0
    _require(
        0 <= n_selected <= first and first + selection.n_since == n_tokens,
        f"{n_entries} entries from {first} keys and {selection.n_since} later ones of {n_tokens} tokens",
    )
    _require(
        bias is None or bias.dtype == accumulation_dtype(selection.buffer.key.dtype),
        f"a bias of {bias.dtype if bias is not None else None} beside keys of {selection.buffer.key.dtype}",
    )
    if buffer is None:
        return
    for name in ("key", "value"):
        selected, held = getattr(selection.buffer, name), getattr(buffer, name)
        sizes, wanted = ((*t.shape[:2], t.shape[3], t.dtype) for t in (selected, held))
        _require(sizes == wanted, "a selection of another batch, or of keys and values of other sizes or dtypes")
        since, later = selected[:, :, n_entries:], held[:, :, first:]
        if bias is not None:  # padding among the later tokens is zeroed
            hidden = torch.isneginf(bias[:, :, n_entries:, None])
            since, later = since.masked_fill(hidden, 0), later.masked_fill(hidden, 0)
        _require(torch.equal(since, later), f"a selection followed by other {name}s")


def _save_buffer(buffer: KVBuffer, prefix: str, tensors: dict[str, Tensor]) -> None:
    tensors[f"{prefix}key"], tensors[f"{prefix}value"] = buffer.recent
    if buffer.n_int8:
        tensors[f"{prefix}int8_key"], tensors[f"{prefix}int8_value"] = buffer.int8_rows
    if buffer.bias is not None:
        tensors[f"{prefix}bias"] = buffer.bias


def _load_buffer(prefix: str, tensors: dict[str, Tensor]) -> KVBuffer | None:
    parts: list[Any] = [tensors.pop(f"{prefix}{name}", None) for name in ("key", "value", "bias")]
    key, value, bias = parts
    if key is None and value is None and bias is None:
        return None
    _require(key is not None and value is not None, f"half of the tensors {prefix}key and {prefix}value")
    is_whole = key.ndim == value.ndim == 4 and key.shape[:3] == value.shape[:3] and key.dtype == value.dtype
    is_whole = is_whole and key.is_floating_point() and (bias is None or bias.shape == key.shape[:3])
    _require(is_whole, f"the tensors {prefix}key, value and bias do not belong together")
    rows = [tensors.pop(f"{prefix}int8_{name}", key[..., :0]) for name in ("key", "value")]
    if all(part.dtype == key.dtype for part in rows):
        return KVBuffer(key, value, bias)
    for part, table in zip(rows, (key, value), strict=True):
        wanted = (*table.shape[:2], rows[0].shape[2], row_size(table.shape[3]))
        is_one = part.dtype == torch.uint8 and tuple(part.shape) == wanted and bias is None
        _require(is_one, f"the int8 rows of {prefix}key and value do not belong to them")
    return KVBuffer(key, value, int8_rows=rows)
