"""`prescore.apply`: one call that puts pre-scored attention into any supported model.

Each foreign library has one adapter, a module beside this one with three functions:

    detect(model) -> bool
        True when the model is this adapter's. It must not import a library that the model itself does not
        need (look at `type(model).__mro__` module names, or at the structure).
    layers(model) -> list[str]
        Names of the attention layers in order; `layers=` patterns count in this list. Raises `Unsupported`
        with reasons when the model is recognised but cannot be served.
    attach(model, configs) -> Callable[[], None]
        Replace the attention of the layers whose numbers are in `configs: dict[int, PrescoreConfig]`; the
        other layers stay exact. Returns the undo. If it raises, the model must be as it was.

and, where it has something to tell, `stats(model) -> dict[int, dict[str, Any]]`: what each replaced layer did
in its last call.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from types import ModuleType, TracebackType
from typing import Any

from torch import nn

from prescore.config import PrescoreConfig
from prescore.errors import Unsupported
from prescore.integrations.layers import Layers, Overrides, configs_by_layer

_PACKAGE = "prescore.integrations"
ADAPTERS = ("timm", "huggingface_vision", "chatglm", "huggingface")
"""Asked in this order; the general one comes last."""


class Applied:
    """A model whose attention is replaced; use it as a context manager, or call `undo` when done.

    Attributes:
        model: The model that was given.
        adapter: The library it came from, such as `huggingface`.
        layers: Names of the replaced layers, by layer number.
        configs: Their configurations, by layer number.
    """

    def __init__(
        self, model: nn.Module, adapter: ModuleType, names: list[str], configs: dict[int, PrescoreConfig]
    ) -> None:
        self.model = model
        self.adapter = adapter.__name__.removeprefix(f"{_PACKAGE}.")
        self.configs = configs
        self.layers = {number: names[number] for number in configs}
        self._module = adapter
        self._undo: Callable[[], None] | None = adapter.attach(model, configs)

    def undo(self) -> None:
        """Give the model its own attention back; a second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def stats(self) -> dict[int, dict[str, Any]]:
        """What each replaced layer did in its last call, by layer number; empty before the first call."""
        read = getattr(self._module, "stats", None)
        return {} if read is None or self._undo is None else read(self.model)

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = "undone" if self._undo is None else f"{len(self.layers)} layers"
        return f"Applied({type(self.model).__name__}, {self.adapter}, {state})"


def apply(
    model: nn.Module,
    config: PrescoreConfig | None = None,
    *,
    layers: Layers | Mapping[Any, Overrides] | None = None,
    **overrides: Any,
) -> Applied:
    """Replace a model's attention by pre-scored attention, until `undo` or the end of the `with` block.

    Args:
        model: A causal model of transformers, a ChatGLM2/3, or a ViT of timm or transformers.
        config: How keys are scored, selected and attended to; None = the measured default.
        layers: Which layers: `all`, `first:N`, `last:N`, `even`, `odd`, a list of numbers, or a mapping from
            these to overrides (a dict of config fields, a `PrescoreConfig`, or None = leave exact).
        **overrides: Fields of the config to change, such as `top_k=1024`.

    Example:
        >>> with prescore.apply(model, top_k=1024, layers="last:8"):
        ...     model.generate(**inputs)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if config is not None and not isinstance(config, PrescoreConfig):
        raise TypeError(f"config must be a PrescoreConfig or None, got {type(config).__name__}")
    base = config or PrescoreConfig()
    base = PrescoreConfig.from_dict({**base.to_dict(), **overrides}) if overrides else base
    adapter = find_adapter(model)
    names: list[str] = adapter.layers(model)
    return Applied(model, adapter, names, configs_by_layer(layers, base, len(names)))


def find_adapter(model: nn.Module) -> ModuleType:
    """The adapter that knows the model; raises `Unsupported` when none does."""
    for name in ADAPTERS:
        if importlib.util.find_spec(f"{_PACKAGE}.{name}") is None:
            continue
        adapter = importlib.import_module(f"{_PACKAGE}.{name}")
        if adapter.detect(model):
            return adapter
    raise Unsupported(
        f"apply on {type(model).__name__}",
        [
            "it is neither a model of transformers or timm nor a ChatGLM with core_attention modules; "
            "call prescore.prescored_attention in its forward instead"
        ],
    )
