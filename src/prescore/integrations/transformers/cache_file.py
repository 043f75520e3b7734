"""A prefilled cache as one safetensors file: a long prompt is read once and continued anywhere."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from prescore.config import Selected, config_from_dict
from prescore.decoding.decoder import Request
from prescore.decoding.rows import Rows
from prescore.decoding.state import SelectionState
from prescore.integrations.transformers.cache_layer import Content, PrescoredLayer
from prescore.values import Values

if TYPE_CHECKING:
    from prescore.integrations.transformers.cache import PrescoredCache

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
    from prescore.integrations.transformers.cache import PrescoredCache

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
