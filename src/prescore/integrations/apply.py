"""`prescore.apply`: one call that puts pre-scored attention into any supported model.

Each foreign library has one adapter beside this file (see `prescore.integrations.patch.Adapter`). All that takes
the place of a model's attention, in `apply`, in observers and in studies, goes through `replace_attention`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TypeAlias, cast

from torch import Tensor, nn

from prescore import checks
from prescore.config import Config, Exact, check_config
from prescore.errors import Unsupported
from prescore.integrations.attention import (
    ON_UNSUPPORTED,
    Attend,
    AttentionContext,
    PrescoredAttention,
    attend_exactly,
)
from prescore.integrations.parallel import ContextParallel, ContextParallelAttention
from prescore.integrations.patch import Adapter, Undo
from prescore.integrations.report import LayerReport, Report, describe
from prescore.parallel.comm import as_group

_PACKAGE = "prescore.integrations"
ADAPTERS = {
    "timm": "timm",
    "transformers.vision": "transformers",
    "chatglm": None,
    "transformers.language": "transformers",
}
"""Adapter -> the library it needs. Asked in this order; the general one comes last."""


class Applied:
    """A model whose attention is replaced; use it as a context manager, or call `undo` when done.

    Attributes:
        model: The model that was given.
        adapter: What knows its library, such as `transformers.language`.
        layers: Names of the replaced layers, by layer number.
        configs: Their configurations, by layer number.
    """

    def __init__(
        self,
        model: nn.Module,
        adapter: Adapter,
        configs: Mapping[int, Config],
        on_unsupported: str,
        parallel_group: ContextParallel | None = None,
    ) -> None:
        names = adapter.layers(model)
        told: set[str] = set()
        self.model = model
        self.adapter = adapter.__name__.removeprefix(f"{_PACKAGE}.")
        self.configs = dict(configs)
        self.layers = {number: names[number] for number in configs}
        self._n_layers = len(names)
        self._functions: dict[int, PrescoredAttention | ContextParallelAttention] = {
            number: PrescoredAttention(config, on_unsupported, told=told)
            if parallel_group is None
            else ContextParallelAttention(config, parallel_group)
            for number, config in configs.items()
        }
        self._undo: Undo | None
        if parallel_group is None:
            self._undo = _replace_and_prepare(model, adapter, self._functions, self.configs)
        else:
            self._undo = replace_context_parallel(model, self._functions, parallel_group)

    def undo(self) -> None:
        """Take back what this did to the model, whatever else was applied; a second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def report(self) -> Report:
        """What each replaced layer did since its last prompt began; print it to see a table."""
        entries = []
        for number, function in self._functions.items():
            did = None if function.last is None else function.last.counted()
            phases = function.history.phases
            entries.append(LayerReport(number, self.layers[number], function.config, did, phases))
        return Report(tuple(entries))

    def __enter__(self) -> Applied:
        if self._undo is None:
            raise ValueError("an Applied must not be undone before it is entered, got one that was: apply again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __deepcopy__(self, memo: object) -> Applied:
        reason = "it undoes what it did to one model; copy the model, which stays as it is, and apply to the copy"
        raise Unsupported("a copy of an Applied", [reason])

    def __str__(self) -> str:
        kinds = ", ".join(dict.fromkeys(describe(config) for config in self.configs.values())) or "all exact"
        state = "undone; it was " if self._undo is None else ""
        where = f"in {len(self.layers)} of {self._n_layers} layers"
        return f"{type(self.model).__name__} ({self.adapter}): {state}{kinds} {where}\n{self.report()}"

    def __repr__(self) -> str:
        state = "undone" if self._undo is None else f"{len(self.layers)} of {self._n_layers} layers"
        kinds = ", ".join(dict.fromkeys(describe(config) for config in self.configs.values()))
        return f"<Applied to {type(self.model).__name__} ({self.adapter}), {state}: {kinds or 'all exact'}>"


def apply(
    model: nn.Module,
    config: Config | ConfigByLayers | None = None,
    *,
    layers: Layers = "all",
    on_unsupported: str = "raise",
    mesh: object = None,
) -> Applied:
    """Replace a model's attention by pre-scored attention, until `undo` or the end of the `with` block.

    Args:
        model: A causal model of transformers, a ChatGLM2/3, or a ViT of timm or transformers.
        config: How to attend: a `Routed`, `Selected`, `Hyper` or `Exact`, None = `Routed()`; or a mapping from
            layers (`"all"`, `"first:N"`, a number, a tuple of numbers, ...) to such configurations, None there =
            leave these layers alone. Later entries win.
        layers: Which layers: `all`, `first:N`, `last:N`, `even`, `odd`, or a list of numbers.
        on_unsupported: What a layer asks for and pre-scored attention cannot do raises (`raise`), or makes the
            layer run exactly (`exact`), which is said once.
        mesh: A one-dimensional `DeviceMesh` or process group whose ranks hold consecutive pieces of the sequence:
            every rank calls the model with its piece, see docs/parallel.md. Only for language models of
            transformers.

    Example:
        >>> with prescore.apply(model, prescore.Selected(top_k=1024), layers="last:8") as applied:
        ...     model.generate(**inputs)
        ...     print(applied)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    checks.one_of("on_unsupported", on_unsupported, ON_UNSUPPORTED)
    adapter = find_adapter(model)
    configs = configs_by_layer(config, len(adapter.layers(model)), layers)
    if mesh is None:
        return Applied(model, adapter, configs, on_unsupported)
    if on_unsupported != "raise":
        raise ValueError(f"on_unsupported must be 'raise' with a mesh, got {on_unsupported!r}")
    return Applied(model, adapter, configs, on_unsupported, ContextParallel(as_group(mesh, "mesh")))


def replace_attention(model: nn.Module, functions: Mapping[int, Attend]) -> Undo:
    """Let `functions[number]` be the attention of layer `number`, all others being exact; returns the undo."""
    return find_adapter(model).replace_attention(model, functions)


def replace_context_parallel(
    model: nn.Module, functions: Mapping[int, Attend], parallel_group: ContextParallel
) -> Undo:
    """The same on several ranks, for which layers without a function are exact too; returns the undo."""
    adapter = find_adapter(model)
    prepare = getattr(adapter, "prepare_context_parallel", None)
    if prepare is None:
        name = adapter.__name__.removeprefix(f"{_PACKAGE}.")
        raise Unsupported(f"apply with a mesh on {type(model).__name__}", [f"{name} models run on one rank"])
    everywhere: dict[int, Attend] = {
        number: functions.get(number) or ContextParallelAttention(Exact(), parallel_group)
        for number in range(len(adapter.layers(model)))
    }
    return _both(adapter.replace_attention(model, everywhere), lambda: prepare(model, parallel_group))


def find_adapter(model: nn.Module) -> Adapter:
    """The adapter that knows the model; raises `Unsupported` when none does."""
    for name, library in ADAPTERS.items():
        if library is not None and library not in sys.modules:
            continue  # nobody has a model of a library that was never imported
        adapter = cast(Adapter, importlib.import_module(f"{_PACKAGE}.{name}"))
        if adapter.detect(model):
            return adapter
    raise Unsupported(
        f"apply on {type(model).__name__}",
        [
            "it is neither a model of transformers or timm nor a ChatGLM with core_attention modules; "
            "call prescore.prescored_attention in its forward instead"
        ],
    )


def _replace_and_prepare(
    model: nn.Module, adapter: Adapter, functions: Mapping[int, Attend], configs: Mapping[int, Config]
) -> Undo:
    undo = adapter.replace_attention(model, functions)
    prepare = getattr(adapter, "prepare", None)
    if prepare is None:
        return undo
    return _both(undo, lambda: prepare(model, configs))


def _both(undo: Undo, prepare: Callable[[], Undo]) -> Undo:
    """Prepare what was replaced; returns the undo of both. A preparation that fails undoes the replacement."""
    try:
        undo_preparations = prepare()
    except BaseException:
        undo()
        raise

    def undo_both() -> None:
        undo_preparations()
        undo()

    return undo_both


# Which layers of a model: patterns such as `first:8`, lists, and mappings from these to configurations.

Layers: TypeAlias = str | int | Sequence[int]
ConfigByLayers: TypeAlias = Mapping[str | int | tuple[int, ...], Config | None]

_RULE = '"all", "first:N", "last:N", "even", "odd", a layer number or a list of layer numbers'


def pick_layers(layers: Layers | None, n_layers: int, name: str = "layers") -> list[int]:
    """The layer numbers a pattern means, ascending; None = all. `name` is what errors call it.

    Example:
        >>> pick_layers("last:2", 6)
        [4, 5]
    """
    if layers is None:
        return list(range(n_layers))
    if isinstance(layers, str):
        return _pick_named(layers, n_layers, name)
    numbers = [layers] if isinstance(layers, int) else layers
    if not isinstance(numbers, Sequence) or not all(_is_number(number) for number in numbers):
        raise TypeError(f"{name} must be {_RULE}, got {layers!r}")
    for number in numbers:
        if not -n_layers <= number < n_layers:
            raise ValueError(f"{name} must lie between {-n_layers} and {n_layers - 1}, got {number}")
    return sorted({number % n_layers for number in numbers})


def configs_by_layer(
    config: Config | ConfigByLayers | None, n_layers: int, layers: Layers | None = None
) -> dict[int, Config]:
    """The configuration of every layer that is replaced.

    A mapping's keys are patterns, its values say how these layers attend: a configuration, or None to leave them
    alone. Later entries win, and layers that no entry names are left alone.

    Example:
        >>> configs = configs_by_layer({"all": Routed(), "first:2": None, -1: Exact()}, 6)
    """
    chosen = pick_layers(layers, n_layers)
    if not isinstance(config, Mapping):
        return dict.fromkeys(chosen, check_config(config))
    found: dict[int, Config | None] = {}
    for pattern, own in config.items():
        numbers = pick_layers(pattern, n_layers, "layers of config")
        checked = None if own is None else check_config(own, f"config[{pattern!r}]")
        found.update(dict.fromkeys(numbers, checked))
    return {number: own for number in chosen if (own := found.get(number)) is not None}


def _pick_named(pattern: str, n_layers: int, name: str) -> list[int]:
    everything = list(range(n_layers))
    if pattern in ("all", "even", "odd"):
        return {"all": everything, "even": everything[::2], "odd": everything[1::2]}[pattern]
    side, colon, count = pattern.partition(":")
    if side not in ("first", "last") or not colon or not count.isdigit() or int(count) == 0:
        raise ValueError(f"{name} must be {_RULE}, got {pattern!r}")
    if int(count) > n_layers:
        raise ValueError(f"{name} must ask for at most the model's {n_layers} layers, got {pattern!r}")
    return everything[: int(count)] if side == "first" else everything[-int(count) :]


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# Looking at a model's true queries and keys while it runs as it always does.

Look: TypeAlias = Callable[[Tensor, Tensor, AttentionContext], None]
"""Receives `query [B, Hq, N, D]`, `key [B, Hkv, N, D]` and the context of every attention layer."""


@contextmanager
def observe(model: nn.Module, look: Look) -> Iterator[int]:
    """Show every attention call of a model to `look`; yields the number of layers.

    Attention itself stays exact, and the model is as before afterwards.
    """
    adapter = find_adapter(model)
    n_layers = len(adapter.layers(model))

    def attend(query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        look(query, key, context)
        return attend_exactly(query, key, value, context)

    undo = adapter.replace_attention(model, dict.fromkeys(range(n_layers), attend))
    try:
        yield n_layers
    finally:
        undo()
