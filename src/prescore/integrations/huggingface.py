"""Hugging Face transformers: importing this module registers `attn_implementation="prescored"`.

Both the attention function and the mask function are registered, because transformers gives a name without a
mask function no mask at all: padding would be ignored in silence.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from prescore.config import PrescoreConfig
from prescore.errors import PrescoreError, Unsupported

NAME = "prescored"


def detect(model: nn.Module) -> bool:
    """Whether the model is one of transformers or wraps one, looked up without importing the library."""
    return bool(_roots(model))


def layers(model: nn.Module) -> list[str]:
    """Names of the causal self-attention modules that go through transformers' attention interface."""
    names = [name for name, module in _interface_modules(model).items() if _causal(module)]
    if not names or not all(root._can_set_attn_implementation() for root in _roots(model)):
        raise Unsupported(
            f"apply on {type(model).__name__}",
            ["its attention does not go through transformers' attention interface, so nothing would change"],
        )
    return names


def attach(model: nn.Module, configs: dict[int, PrescoreConfig]) -> Callable[[], None]:
    """Switch the model to `prescored`, give every attention module its plan; returns the undo."""
    from prescore.integrations.huggingface_attention import LayerPlan, set_plan

    register()
    _warn_if_all_local(model, configs)
    chosen = {name: configs.get(number) for number, name in enumerate(layers(model))}
    modules = _interface_modules(model)
    implementations = [(config, config._attn_implementation) for config in _model_configs(model)]
    before = {name: set_plan(module, LayerPlan(chosen.get(name))) for name, module in modules.items()}
    hooks: list[Any] = []

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for name, module in modules.items():
            set_plan(module, before[name])
        for config, implementation in implementations:
            config._attn_implementation_internal = implementation

    try:
        for root in _roots(model):
            root.set_attn_implementation(NAME)
        hooks += [
            module.register_forward_pre_hook(_with_selections, with_kwargs=True)
            for module in model.modules()
            if _is_pretrained(module)
        ]
    except BaseException:
        undo()
        raise
    return undo


def stats(model: nn.Module) -> dict[int, dict[str, Any]]:
    """What each layer did in its last call: path taken, mask, queries, keys."""
    from prescore.integrations.huggingface_attention import plan_of

    found = {}
    for number, name in enumerate(layers(model)):
        plan = plan_of(model.get_submodule(name))
        if plan.config is not None and plan.stats:
            found[number] = dict(plan.stats)
    return found


def register() -> None:
    """Make `attn_implementation="prescored"` known to transformers, and check that it honours padding."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from prescore.integrations.huggingface_attention import prescored_attention_forward, prescored_mask

    if AttentionInterface._global_mapping.get(NAME) is prescored_attention_forward:
        return
    _check_padding(prescored_attention_forward, prescored_mask)
    AttentionInterface.register(NAME, prescored_attention_forward)
    AttentionMaskInterface.register(NAME, prescored_mask)


def _check_padding(attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """A tiny call whose padded key would change the result if it were seen."""
    module = nn.Module()
    real = torch.tensor([[False, True, True]])
    seen = mask(batch_size=1, q_length=3, kv_length=3, attention_mask=real, device="cpu")
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, 3, 4, generator=generator) for _ in range(3))
    other = value.clone()
    other[:, :, 0] += 100.0
    first, second = (attention(module, query, key, v, seen)[0][:, 1:] for v in (value, other))
    if not torch.equal(first, second):
        raise PrescoreError("the registered mask function does not hide padding")


def _warn_if_all_local(model: nn.Module, configs: dict[int, PrescoreConfig]) -> None:
    """Sliding-window layers stay exact; say so when no other layer was chosen."""
    from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

    config = _roots(model)[0].config.get_text_config(decoder=True)
    kinds: list[Any] = DynamicCache(config=config).layers
    longest = getattr(config, "max_position_embeddings", None) or sys.maxsize
    local = [
        isinstance(kinds[number], DynamicSlidingWindowLayer) and kinds[number].sliding_window < longest
        for number in configs
        if number < len(kinds)
    ]
    if local and all(local):
        warnings.warn(
            f"every chosen layer of {type(model).__name__} has a sliding window and stays exact", stacklevel=5
        )


def _with_selections(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a forward: let the cache, the caller's or a new one, carry selections."""
    from transformers.cache_utils import DynamicCache

    from prescore.integrations.huggingface_cache import PrescoredCache, upgrade

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


def _model_configs(model: nn.Module) -> list[Any]:
    """Every configuration object that names an attention implementation, once each."""
    found: dict[int, Any] = {id(m.config): m.config for m in model.modules() if _is_pretrained(m)}
    waiting = list(found.values())
    while waiting:
        config = waiting.pop()
        for name in getattr(config, "sub_configs", {}):
            inner = getattr(config, name, None)
            if inner is not None and id(inner) not in found:
                found[id(inner)] = inner
                waiting.append(inner)
    return list(found.values())


if importlib.util.find_spec("transformers") is not None:
    register()
