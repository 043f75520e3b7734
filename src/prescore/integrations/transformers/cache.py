"""A transformers cache whose layers remember their selections, as a value the caller owns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from prescore import checks
from prescore.integrations.transformers.cache_layer import PrescoredLayer
from prescore.values import Values


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
        from prescore.integrations.transformers.cache_file import save_cache

        save_cache(self, path)

    @classmethod
    def load(cls, path: str | Path, *, device: str = "cpu") -> PrescoredCache:
        """Read what `save` wrote."""
        from prescore.integrations.transformers.cache_file import load_cache

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
