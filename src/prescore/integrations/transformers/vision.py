"""Vision transformers of transformers: ViT, DeiT, DINOv2 (with registers or not), CLIP, SigLIP and their kin.

They look their attention up by name at every call; while a model is replaced, the configuration of its vision
tower names ours, and that of a text tower beside it stays what it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from prescore.integrations.attention import Attend, attend_exactly
from prescore.integrations.patch import Patch, Undo, check_numbers, refuse
from prescore.integrations.transformers.attention import NAME, PREFIX, n_prefix_tokens, register, replace_at

_JOINT = ("clip", "siglip")


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
        if kind in PREFIX and not _inside(model, name, "Text"):
            found.append(name)
        # a pooling head reads the patches once, with a query of its own, and stays exact
        elif "Attention" in kind and not _inside(model, name, "Text", "Pooling"):
            others.append(kind)
    if others or not found:
        kinds = others or [type(module).__name__ for module in model.children()]
        raise refuse(model, kinds, f"its attention must be one of {', '.join(PREFIX)}")
    return found


def replace_attention(model: nn.Module, functions: Mapping[int, Attend]) -> Undo:
    """Let `functions[number]` be the attention of layer `number`, all others being exact; returns the undo."""
    register()
    modules = [model.get_submodule(name) for name in layers(model)]
    check_numbers(functions, len(modules))
    places = {
        module: Patch(functions.get(number, attend_exactly), number, n_prefix_tokens(module))
        for number, module in enumerate(modules)
    }
    named = {id(module.config) for module in modules}
    # the tower's other modules hold its configuration too; a text tower has another
    tower = [module for module in model.modules() if id(getattr(module, "config", None)) in named]

    def switch() -> None:
        for module in modules:
            config: Any = module.config
            config._attn_implementation_internal = NAME

    return replace_at(places, tower, switch)


def _inside(model: nn.Module, name: str, *kinds: str) -> bool:
    """Whether the module or one around it has a class name with one of the words in it."""
    parts = name.split(".")
    around = [type(model.get_submodule(".".join(parts[: depth + 1]))).__name__ for depth in range(len(parts))]
    return any(kind in name for kind in kinds for name in around)
