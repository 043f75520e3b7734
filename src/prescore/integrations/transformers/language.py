"""Language models of transformers: their causal self-attention, and caches that carry selections."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from prescore.config import Config, Exact
from prescore.errors import Unsupported
from prescore.integrations.attention import Attend, attend_exactly
from prescore.integrations.parallel import ContextParallel
from prescore.integrations.patch import Patch, Undo, check_numbers
from prescore.integrations.transformers.attention import NAME, register, replace_at
from prescore.integrations.transformers.cache import PrescoredCache, mark, upgrade
from prescore.integrations.transformers.parallel import prepare_shards
from prescore.types import Values

_NO_LAYER = -1
_MARK = "_prescore_mark"  # of a cache whose forward is running
_ABOVE_APPLY = 5  # frames between the warning and whoever called `prescore.apply`


def detect(model: nn.Module) -> bool:
    """Whether the model is one of transformers or wraps one."""
    return bool(_roots(model))


def layers(model: nn.Module) -> list[str]:
    """Names of the self-attention modules that go through transformers' attention interface.

    Those of a decoder are causal; only a model that has none of these is an encoder, all of whose layers count.
    """
    found = _interface_modules(model)
    names = [name for name, module in found.items() if _causal(module)]
    names = names or [name for name, module in found.items() if not getattr(module, "is_cross_attention", False)]
    if not names or not all(root._can_set_attn_implementation() for root in _roots(model)):
        raise Unsupported(
            f"apply on {type(model).__name__}",
            ["its attention does not go through transformers' attention interface, so nothing would change"],
        )
    return names


def replace_attention(model: nn.Module, functions: Mapping[int, Attend]) -> Undo:
    """Let `functions[number]` be the attention of layer `number`, all others being exact; returns the undo."""
    register()
    numbers = {name: number for number, name in enumerate(layers(model))}
    check_numbers(functions, len(numbers))
    places = {}
    for name, module in _interface_modules(model).items():
        number = numbers.get(name, _NO_LAYER)
        places[module] = Patch(functions.get(number, attend_exactly), number)

    def switch() -> None:
        for root in _roots(model):
            root.set_attn_implementation(NAME)

    return replace_at(places, model.modules(), switch)


def prepare(model: nn.Module, configs: Mapping[int, Config]) -> Undo:
    """Let caches carry selections, and say when no chosen layer would select anything; returns the undo."""
    chosen = [number for number, config in configs.items() if not isinstance(config, Exact)]
    _warn_if_all_local(model, chosen)
    models = [module for module in model.modules() if chosen and _is_pretrained(module)]
    hooks = [
        module.register_forward_pre_hook(before, with_kwargs=True)
        for before in (_with_selections, _remember)
        for module in models
    ]
    hooks += [module.register_forward_hook(_go_back, with_kwargs=True, always_call=True) for module in models]

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


def prepare_context_parallel(model: nn.Module, parallel_group: ContextParallel) -> Undo:
    """Let every rank of a mesh run the model on its piece; returns the undo."""
    return prepare_shards([module for module in model.modules() if _is_pretrained(module)], parallel_group)


def _warn_if_all_local(model: nn.Module, chosen: list[int]) -> None:
    """Sliding-window layers stay exact; say so when no other layer was chosen."""
    config = _roots(model)[0].config.get_text_config(decoder=True)
    kinds: list[Any] = DynamicCache(config=config).layers
    longest = getattr(config, "max_position_embeddings", None) or sys.maxsize
    local = [
        isinstance(kinds[number], DynamicSlidingWindowLayer) and kinds[number].sliding_window < longest
        for number in chosen
        if number < len(kinds)
    ]
    if local and all(local):
        warnings.warn(
            f"every chosen layer of {type(model).__name__} has a sliding window and stays exact",
            stacklevel=_ABOVE_APPLY,
        )


def _with_selections(
    module: nn.Module, args: tuple[Any, ...], kwargs: Values
) -> tuple[tuple[Any, ...], Values] | None:
    """Before a forward: let the cache, the caller's or a new one, carry selections."""
    if torch.compiler.is_compiling():
        return None  # a graph knows nothing of our caches; keys are followed as those of any other
    config: Any = module.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    cache = kwargs.get("past_key_values")
    if isinstance(cache, DynamicCache):
        upgrade(cache, max_length=getattr(config, "max_position_embeddings", None))
        return None
    if cache is not None or module.training or getattr(config, "is_encoder_decoder", False):
        return None
    use_cache = kwargs.get("use_cache")
    wanted = getattr(config, "use_cache", False) if use_cache is None else use_cache
    if not wanted or "past_key_values" not in inspect.signature(module.forward).parameters or len(args) > 1:
        return None
    return args, {**kwargs, "past_key_values": PrescoredCache(config)}


def _remember(module: nn.Module, args: tuple[Any, ...], kwargs: Values) -> None:
    """Before a forward: mark what its cache holds; layers grow one by one, and a later one may refuse."""
    if torch.compiler.is_compiling():
        return
    cache = kwargs.get("past_key_values")
    if isinstance(cache, DynamicCache):
        outermost = cache.__dict__.get(_MARK, (module,))[0] is module
        if outermost:
            cache.__dict__[_MARK] = module, mark(cache)


def _go_back(module: nn.Module, args: tuple[Any, ...], kwargs: Values, output: Any) -> None:
    """After a forward, also one that was broken off: its cache is then as it was before."""
    if torch.compiler.is_compiling():
        return
    cache = kwargs.get("past_key_values")
    marked = cache.__dict__.get(_MARK) if isinstance(cache, DynamicCache) else None
    if marked is not None and marked[0] is module:
        del cache.__dict__[_MARK]
        if output is None:
            marked[1]()


def _roots(model: nn.Module) -> list[Any]:
    """The outermost models of transformers: the model itself, or those inside a wrapper."""
    if _is_pretrained(model):
        return [model]
    return [root for child in model.children() for root in _roots(child)]


def _is_pretrained(module: nn.Module) -> bool:
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers")
        for base in type(module).__mro__
    )


def _interface_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules whose forward asks transformers' attention interface what to run, by name."""
    asks: dict[str, bool] = {}
    found = {}
    for name, module in model.named_modules():
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        if kind not in asks:
            asks[kind] = _mentions_interface(type(module))
        if asks[kind]:
            found[name] = module
    return found


def _mentions_interface(kind: type[nn.Module]) -> bool:
    try:
        return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False


def _causal(module: nn.Module) -> bool:
    return bool(getattr(module, "is_causal", True)) and not getattr(module, "is_cross_attention", False)
