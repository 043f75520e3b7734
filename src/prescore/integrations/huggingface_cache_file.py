"""A prefilled cache as one safetensors file: a long prompt is read once and continued anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from prescore.config import PrescoreConfig
from prescore.decoding.rows import Rows
from prescore.decoding.state import SelectionState
from prescore.integrations.huggingface_layer import PrescoredLayer

if TYPE_CHECKING:
    from prescore.integrations.huggingface_cache import PrescoredCache

_FORMAT = "prescore-cache-1"


def save_cache(cache: PrescoredCache, path: str | Path) -> None:
    """Write keys, values, padding and selections; selections that are still to be made are made first."""
    cache.select()
    tensors: dict[str, Tensor] = {}
    layers = [_describe(layer, f"{number}.", tensors) for number, layer in enumerate(cache.layers)]
    facts = {"format": _FORMAT, "evict": cache.evict, "layers": layers}
    save_file(
        {name: t.contiguous() for name, t in tensors.items()}, path, metadata={"prescore": json.dumps(facts)}
    )


def load_cache(path: str | Path, *, device: str = "cpu") -> PrescoredCache:
    """Read what `save_cache` wrote; raises ValueError for any other file."""
    from prescore.integrations.huggingface_cache import PrescoredCache

    with safe_open(str(path), framework="pt", device=device) as file:
        facts = json.loads((file.metadata() or {}).get("prescore", "{}"))
        if facts.get("format") != _FORMAT:
            raise ValueError(f"path must be a file of PrescoredCache.save, got {str(path)!r}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    cache = PrescoredCache(evict=facts["evict"])
    cache.layers = [_restore(entry, f"{number}.", tensors) for number, entry in enumerate(facts["layers"])]
    # a layer the file does not know would have missed the prompt
    cache.layer_class_to_replicate = None
    return cache


def _describe(layer: Any, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if not isinstance(layer, PrescoredLayer):
        return _describe_foreign(layer, prefix, tensors)
    entry: dict[str, Any] = {
        "kind": "prescored",
        "n_seen": layer.n_seen,
        "evict": layer.evict,
        "config": None if layer.config is None else layer.config.to_dict(),
    }
    if layer.valid is not None:
        tensors[f"{prefix}valid"] = layer.valid.clone()  # all layers share one
    if layer.rows is not None:
        _put_rows(layer.rows, prefix, tensors)
    if layer.state is not None:
        state = layer.state
        if not isinstance(state, SelectionState):
            raise TypeError(f"cache states must be selections to be saved, got {type(state).__name__}")
        entry["state"] = {
            "config": state.config.to_dict(),
            "n_selected_from": state.n_selected_from,
            "n_rows": state.n_rows,
        }
        _put_rows(state.rows, f"{prefix}state.", tensors)
    return entry


def _describe_foreign(layer: Any, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise TypeError(f"cache layers must be dynamic or sliding to be saved, got {type(layer).__name__}")
    entry: dict[str, Any] = {"kind": "dynamic", "n_seen": layer.get_seq_length()}
    if isinstance(layer, DynamicSlidingWindowLayer):
        entry.update(kind="sliding", window=layer.sliding_window)
    if layer.is_initialized and layer.keys is not None:
        tensors[f"{prefix}key"], tensors[f"{prefix}value"] = layer.keys, layer.values
    return entry


def _restore(entry: dict[str, Any], prefix: str, tensors: dict[str, Tensor]) -> Any:
    key, value = tensors.get(f"{prefix}key"), tensors.get(f"{prefix}value")
    if entry["kind"] != "prescored":
        layer: Any = DynamicLayer() if entry["kind"] == "dynamic" else DynamicSlidingWindowLayer(entry["window"])  # type: ignore[no-untyped-call]
        if key is not None:
            layer.update(key, value)
        if entry["kind"] == "sliding":
            layer.cumulative_length = entry["n_seen"]
        return layer
    config = None if entry["config"] is None else PrescoreConfig.from_dict(entry["config"])
    state = None
    if "state" in entry:
        kept = entry["state"]
        rows = _get_rows(f"{prefix}state.", tensors)
        state = SelectionState(
            PrescoreConfig.from_dict(kept["config"]), rows, kept["n_selected_from"], kept["n_rows"]
        )
    restored = PrescoredLayer(evict=entry["evict"])
    restored.restore(
        rows=None if key is None else _get_rows(prefix, tensors),
        state=state,
        valid=tensors.get(f"{prefix}valid"),
        config=config,
        n_seen=entry["n_seen"],
    )
    return restored


def _put_rows(rows: Rows, prefix: str, tensors: dict[str, Tensor]) -> None:
    tensors[f"{prefix}key"], tensors[f"{prefix}value"] = rows.key, rows.value
    if rows.bias is not None:
        tensors[f"{prefix}bias"] = rows.bias


def _get_rows(prefix: str, tensors: dict[str, Tensor]) -> Rows:
    return Rows(tensors[f"{prefix}key"], tensors[f"{prefix}value"], tensors.get(f"{prefix}bias"))
