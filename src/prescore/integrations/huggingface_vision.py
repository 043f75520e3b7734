"""Hugging Face vision transformers: ViT, DeiT, DINOv2 (with registers or not), CLIP, SigLIP and their kin.

They look their attention up by name at every call; while a model is replaced its vision configuration names
ours, which serves the chosen layers and hands all others to transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from prescore.config import PrescoreConfig
from prescore.integrations.vision_attention import (
    Attend,
    Situation,
    attend_exactly,
    prescored_layers,
    refuse,
)

NAME = "prescored_vision"
_STATE = "_prescore_layer"
_JOINT = ("clip", "siglip")

# attention class -> tokens before the patches; all call transformers' attention interface
_PREFIX: dict[str, Callable[[Any], int]] = {
    "ViTAttention": lambda config: 1,
    "DeiTAttention": lambda config: 2,
    "Dinov2Attention": lambda config: 1,
    "Dinov2WithRegistersAttention": lambda config: 1 + int(config.num_register_tokens),
    "CLIPAttention": lambda config: 1,
    "SiglipAttention": lambda config: 0,
    "ViTMSNAttention": lambda config: 1,
    "IJepaAttention": lambda config: 0,
    "DINOv3ViTAttention": lambda config: 1 + int(config.num_register_tokens),
}


def detect(model: nn.Module) -> bool:
    """Whether the model is a transformers model that reads images (and, at most, short captions)."""
    if not any(base.__module__.split(".")[0] == "transformers" for base in type(model).__mro__):
        return False
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return getattr(model, "main_input_name", None) == "pixel_values" or kind in _JOINT


def layers(model: nn.Module) -> list[str]:
    """Names of the attention layers of the vision tower; refuses architectures by name."""
    found, others = [], []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in _PREFIX and not _inside(model, name, "Text"):
            found.append(name)
        # a pooling head reads the patches once, with a query of its own, and stays exact
        elif "Attention" in kind and not _inside(model, name, "Text", "Pooling"):
            others.append(kind)
    if others or not found:
        kinds = others or [type(module).__name__ for module in model.children()]
        raise refuse(model, kinds, f"its attention must be one of {', '.join(_PREFIX)}")
    return found


def attach(model: nn.Module, configs: dict[int, PrescoreConfig]) -> Callable[[], None]:
    """Replace the attention of the given layers; see `prescore.integrations.apply`."""
    return replace_attention(model, prescored_layers(configs))


def replace_attention(model: nn.Module, functions: Mapping[int, Attend]) -> Callable[[], None]:
    """Let `functions[number]` be the attention of layer `number`; returns the undo."""
    names = layers(model)
    modules = [model.get_submodule(name) for name in names]
    for name, module in zip(names, modules, strict=True):
        if _STATE in module.__dict__:
            raise ValueError(f"model must not be replaced already, got {name} that is; undo it first")
    _register()
    configs: list[Any] = list({id(module.config): module.config for module in modules}.values())
    before = [config._attn_implementation for config in configs]
    for number, module in enumerate(modules):
        n_prefix = _PREFIX[type(module).__name__](module.config)
        # layers left alone come through the same name, and go on to exact attention
        setattr(module, _STATE, (functions.get(number, attend_exactly), number, n_prefix))
    for config in configs:
        config._attn_implementation = NAME

    def undo() -> None:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation
        for module in modules:
            delattr(module, _STATE)

    return undo


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature transformers calls: `[B, H, N, D]` in, `[B, N, H, D]` out."""
    attend, layer, n_prefix = getattr(module, _STATE)
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    situation = Situation(
        layer=layer, n_prefix=n_prefix, scale=scaling, mask=attention_mask, is_causal=causal, dropout=dropout
    )
    attended = attend(query, key, value, situation)
    return attended.transpose(1, 2).contiguous(), None


def _register() -> None:
    # a name without a mask function silently gets no mask at all
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _inside(model: nn.Module, name: str, *kinds: str) -> bool:
    """Whether the module or one around it has a class name with one of the words in it."""
    parts = name.split(".")
    around = [type(model.get_submodule(".".join(parts[: depth + 1]))).__name__ for depth in range(len(parts))]
    return any(kind in name for kind in kinds for name in around)
