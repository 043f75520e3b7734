"""Language models of transformers: their causal self-attention, and caches that hold selections."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, DynamicSlidingWindowLayer

from prescore.config import Config, Exact
from prescore.errors import Unsupported
from prescore.integrations.attention import Attend, original_attention
from prescore.integrations.patch import Patch, Undo, check_numbers
from prescore.integrations.transformers.attention import UNSUPPORTED, attach_patches
from prescore.integrations.transformers.cache import (
    NAME,
    PrescoredCache,
    check_equal_lengths,
    find_cache,
    save_point,
    take_back,
    upgrade,
)
from prescore.integrations.transformers.parallel import ContextParallel, ContextParallelAttention
from prescore.parallel.comm import Group
from prescore.types import Values

_NO_LAYER = -1
_SAVE_POINT = "_prescore_save_point"
"""Of a cache whose forward is running: the module, and what goes back; None = the forward was interrupted."""
_RUNNING: WeakSet[Cache] = WeakSet()
"""Caches whose forward has begun and not ended."""
_ABOVE_APPLY = 5  # frames between a warning and the call of `prescore.apply`


def detect(model: nn.Module) -> bool:
    """Whether the model is one of transformers or wraps one."""
    return bool(_outermost(model))


def layers(model: nn.Module) -> dict[int, str]:
    """Names of the self-attention modules that go through transformers' attention interface, by number.

    The causal ones, or in an encoder, which has none, all of them. Numbers are the model's own where it has some.
    """
    modules = _interface_modules(model)
    names = [name for name, module in modules.items() if _is_causal(module)]
    names = names or [name for name, module in modules.items() if not _is_cross_attention(module)]
    if not names or not all(inner._can_set_attn_implementation() for inner in _outermost(model)):
        raise Unsupported(
            f"apply on {type(model).__name__}",
            ["its attention does not go through transformers' attention interface, so nothing would change"],
        )
    numbers: list[Any] = [getattr(modules[name], "layer_idx", None) for name in names]
    has_own = all(isinstance(number, int) for number in numbers) and len(set(numbers)) == len(names)
    return dict(sorted(zip(numbers if has_own else range(len(names)), names, strict=True)))


def obstacles(model: nn.Module) -> dict[int, list[str]]:
    """What layers ask for in every call that pre-scored attention cannot do, by number; local ones stay exact."""
    reasons: dict[int, list[str]] = {}
    local = _local_layers(model)
    for number, module_name in layers(model).items():
        if number in local:
            continue
        module = model.get_submodule(module_name)
        for name, reason in UNSUPPORTED.items():
            passed = re.search(rf"\b{name}=(?:self\.(\w+)|(?!None)\w+)", _forward_source(type(module)))
            if passed and (passed[1] is None or getattr(module, passed[1], None) is not None):
                reasons.setdefault(number, []).append(reason)
    return reasons


def replace_attention(model: nn.Module, functions: Mapping[int, Attend]) -> Undo:
    """Let layer `number` attend by `functions[number]`, and all others exactly; returns the undo."""
    numbers = {name: number for number, name in layers(model).items()}
    check_numbers(functions, numbers.values())
    attached = {}
    for name, module in _interface_modules(model).items():
        number = numbers.get(name, _NO_LAYER)
        attached[module] = Patch(functions.get(number, original_attention), number)

    def switch() -> None:
        for inner in _outermost(model):
            inner.set_attn_implementation(NAME)

    return attach_patches(attached, model.modules(), switch)


def prepare(model: nn.Module, configs: Mapping[int, Config]) -> Undo:
    """Let caches hold selections, and warn when no chosen layer would select anything; returns the undo."""
    chosen = [number for number, config in configs.items() if not isinstance(config, Exact)]
    _warn_if_all_local(model, chosen)
    hooked = [module for module in model.modules() if _is_pretrained(module)] if chosen else []
    with ExitStack() as undo:
        if hooked:
            undo.callback(_end_forwards, {id(module) for module in hooked})
        for module in hooked:
            undo.callback(module.register_forward_pre_hook(_before, with_kwargs=True).remove)
            hook = module.register_forward_hook(_after, with_kwargs=True, always_call=True)
            undo.callback(hook.remove)
        return undo.pop_all().close


def replace_context_parallel(
    model: nn.Module, functions: Mapping[int, Attend | Config], group: Group
) -> tuple[dict[int, Attend], Undo]:
    """Let every rank of a group run the model on its shard; returns the functions of the layers and the undo.

    A layer attends by its function or, on all ranks, by its configuration; others are exact.
    """
    parallel = ContextParallel(group)
    by_layer: dict[int, Attend] = {
        number: function if callable(function) else ContextParallelAttention(function, parallel)
        for number, function in functions.items()
    }
    exact = ContextParallelAttention(Exact(), parallel)
    with ExitStack() as undo:
        undo.callback(replace_attention(model, {**dict.fromkeys(layers(model), exact), **by_layer}))
        undo.callback(parallel.attach([module for module in model.modules() if _is_pretrained(module)]))
        return by_layer, undo.pop_all().close


def _local_layers(model: nn.Module) -> set[int]:
    """Numbers of the layers with a sliding window or chunk; one over all positions of the model is none."""
    config = _outermost(model)[0].config.get_text_config(decoder=True)
    cache_layers: list[Any] = DynamicCache(config=config).layers
    longest = getattr(config, "max_position_embeddings", None) or sys.maxsize
    return {
        number
        for number, layer in enumerate(cache_layers)
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.sliding_window < longest
    }


def _warn_if_all_local(model: nn.Module, chosen: list[int]) -> None:
    """Local layers stay exact; warn when no other layer was chosen."""
    if chosen and _local_layers(model).issuperset(chosen):
        warnings.warn(
            f"every chosen layer of {type(model).__name__} has a sliding window or chunk and stays exact",
            stacklevel=_ABOVE_APPLY,
        )


def _before(module: nn.Module, args: tuple[Any, ...], kwargs: Values) -> tuple[tuple[Any, ...], Values] | None:
    """Before a forward: let its cache, or a new one, hold selections, and remember what it holds."""
    if torch.compiler.is_compiling():
        return None
    config: Any = module.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    cache, own_caches = find_cache(args, kwargs), _own_caches(module)
    if isinstance(cache, DynamicCache) and not isinstance(cache, own_caches):
        upgrade(cache, max_length=getattr(config, "max_position_embeddings", None))
        owner, _ = vars(cache).get(_SAVE_POINT, (None, None))
        if owner == id(module):  # Ctrl-C ended its last forward without calling hooks
            vars(cache)[_SAVE_POINT] = owner, None
            check_equal_lengths(cache)
        if owner in (None, id(module)):  # else the forward of a model around this one is running
            vars(cache)[_SAVE_POINT] = id(module), save_point(cache)
            _RUNNING.add(cache)
    if cache is not None or own_caches or module.training or getattr(config, "is_encoder_decoder", False):
        return None
    use_cache = kwargs.get("use_cache")
    use_cache = getattr(config, "use_cache", False) if use_cache is None else use_cache
    if not use_cache or "past_key_values" not in inspect.signature(module.forward).parameters or len(args) > 1:
        return None
    return args, {**kwargs, "past_key_values": PrescoredCache(config)}


def _own_caches(module: nn.Module) -> tuple[type, ...]:
    """Cache classes of the model's file, such as MiniMax's: the model takes no other, so they stay."""
    file = sys.modules[type(module).__module__]
    classes = [kind for kind in vars(file).values() if isinstance(kind, type) and issubclass(kind, Cache)]
    return tuple(kind for kind in classes if kind.__module__ == file.__name__)


def _after(module: nn.Module, args: tuple[Any, ...], kwargs: Values, output: Any) -> None:
    """After a forward: if it raised, its cache goes back to what it held. Layers grow one by one."""
    if torch.compiler.is_compiling():
        return
    cache = find_cache(args, kwargs)
    if cache is None:
        return
    owner, go_back = vars(cache).get(_SAVE_POINT, (None, None))
    if owner == id(module) and go_back is not None:
        del vars(cache)[_SAVE_POINT]
        _RUNNING.discard(cache)
        if output is None:
            go_back()


def _end_forwards(modules: set[int]) -> None:
    """When hooks are removed, take back forwards that Ctrl-C ended: nothing checks their caches any more."""
    for cache in list(_RUNNING):
        owner, go_back = vars(cache).get(_SAVE_POINT, (None, None))
        if owner in modules:
            _RUNNING.discard(cache)
            del vars(cache)[_SAVE_POINT]
            if go_back is not None:
                take_back(cache, go_back)


def _outermost(model: nn.Module) -> list[Any]:
    """The outermost models of transformers: the model itself, or those inside a wrapper."""
    if _is_pretrained(model):
        return [model]
    return [inner for child in model.children() for inner in _outermost(child)]


def _is_pretrained(module: nn.Module) -> bool:
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers")
        for base in type(module).__mro__
    )


def _interface_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules whose forward looks its attention function up in transformers' attention interface, by name."""
    kinds = {type(module) for module in model.modules()}
    uses = {kind: "ALL_ATTENTION_FUNCTIONS" in _forward_source(kind) for kind in kinds}
    return {name: module for name, module in model.named_modules() if uses[type(module)]}


def _forward_source(kind: type[nn.Module]) -> str:
    try:
        return inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return ""


def _is_causal(module: nn.Module) -> bool:
    return bool(getattr(module, "is_causal", True)) and not _is_cross_attention(module)


def _is_cross_attention(module: nn.Module) -> bool:
    return bool(getattr(module, "is_cross_attention", False))
