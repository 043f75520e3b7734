"""Vision transformers of transformers: ViT, DeiT, DINOv2, DINOv3, CLIP, SigLIP and others.

They look their attention function up by name at every call. While a model is replaced, the configuration of its
vision tower names ours; that of its text tower stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from prescore.integrations.attention import Attend, original_attention
from prescore.integrations.patch import Patch, Undo, check_numbers, refuse
from prescore.integrations.transformers.attention import PREFIX_TOKENS, attach_patches, n_prefix_tokens
from prescore.integrations.transformers.cache import NAME

_WITH_TEXT = ("clip", "siglip")


def detect(model: nn.Module) -> bool:
    """Whether the model is a transformers model that reads images (and, at most, short captions)."""
    if not any(base.__module__.split(".")[0] == "transformers" for base in type(model).__mro__):
        return False
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return getattr(model, "main_input_name", None) == "pixel_values" or kind in _WITH_TEXT


def layers(model: nn.Module) -> dict[int, str]:
    """Names of the attention layers of the vision tower; refuses other architectures by name."""
    names, others = [], []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in PREFIX_TOKENS and not _inside(model, name, "Text"):
            names.append(name)
        # a pooling head reads the patches once, with a query of its own, and stays exact
        elif "Attention" in kind and not _inside(model, name, "Text", "Pooling"):
            others.append(kind)
    if others or not names:
        kinds = others or [type(module).__name__ for module in model.children()]
        raise refuse(model, kinds, f"its attention must be one of {', '.join(PREFIX_TOKENS)}")
    return dict(enumerate(names))


def replace_attention(model: nn.Module, functions: Mapping[int, Attend]) -> Undo:
    """Let layer `number` attend by `functions[number]`, and all others exactly; returns the undo."""
    modules = [model.get_submodule(name) for name in layers(model).values()]
    check_numbers(functions, range(len(modules)))
    attached = {
        module: Patch(functions.get(number, original_attention), number, n_prefix_tokens(module))
        for number, module in enumerate(modules)
    }
    configs = {id(module.config) for module in modules}
    # the tower's other modules hold its configuration too; a text tower has another
    tower = [module for module in model.modules() if id(getattr(module, "config", None)) in configs]

    def switch() -> None:
        for module in modules:
            config: Any = module.config
            config._attn_implementation_internal = NAME

    return attach_patches(attached, tower, switch)


def _inside(model: nn.Module, name: str, *words: str) -> bool:
    """Whether the class name of the module, or of one around it, contains one of the words."""
    parts = name.split(".")
    kinds = [type(model.get_submodule(".".join(parts[: depth + 1]))).__name__ for depth in range(len(parts))]
    return any(word in kind for word in words for kind in kinds)
