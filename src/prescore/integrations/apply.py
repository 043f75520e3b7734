"""`prescore.apply`: put pre-scored attention into any supported model.

Each model library has one adapter in this folder (see `prescore.integrations.patch.Adapter`). Whatever replaces
a model's attention, in `apply`, in observers and in studies, goes through the adapter's `replace_attention`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Never, TypeAlias, cast

from torch import Tensor, nn

from prescore import checks
from prescore.config import TYPES, Config, Exact, check_config
from prescore.errors import Unsupported
from prescore.integrations.attention import (
    ON_UNSUPPORTED,
    Attend,
    AttentionContext,
    PrescoredAttention,
    original_attention,
    refusal,
)
from prescore.integrations.patch import Adapter, Undo, span
from prescore.integrations.report import LayerReport, Report, describe, totals_of
from prescore.ops.operators import BACKENDS
from prescore.parallel.comm import Group, as_group
from prescore.types import Values

_PACKAGE = "prescore.integrations"
ADAPTERS = {
    "timm": "timm",
    "transformers.vision": "transformers",
    "chatglm": None,
    "transformers.language": "transformers",
}
"""Adapter -> the library it needs. Tried in this order; the general one comes last."""

Layers: TypeAlias = str | int | Sequence[int]
ConfigByLayers: TypeAlias = Mapping[str | int | tuple[int, ...], Config | None]
Observer: TypeAlias = Callable[[Tensor, Tensor, AttentionContext], None]
"""Receives `query [B, Hq, N, D]`, `key [B, Hkv, N, D]` and the context of an attention call."""

_LAYERS_RULE = '"all", "first:N", "last:N", "even", "odd", a layer number or a list of layer numbers'


class Applied:
    """A model whose attention is replaced; use it as a context manager, or call `undo`.

    Attributes:
        model: The model.
        adapter: The adapter of its library, such as `transformers.language`.
        layers: Names of the replaced layers, by number.
        configs: Their configurations, by number.
    """

    def __init__(
        self,
        model: nn.Module,
        configs: Mapping[int, Config],
        on_unsupported: str,
        group: Group | None = None,
        audit: float | None = None,
        backend: str = "auto",
    ) -> None:
        adapter = find_adapter(model)
        names = adapter.layers(model)
        warned: set[str] = set()
        self.model = model
        self.adapter = _name(adapter)
        self.configs = dict(configs)
        self.layers = {number: names[number] for number in configs}
        self._n_layers = len(names)
        self._functions: dict[int, Any]
        self._undo: Undo | None
        if group is not None:
            self._functions, self._undo = replace_context_parallel(model, configs, group)
            return
        self._functions = {
            number: PrescoredAttention(config, on_unsupported, warned=warned, audit=audit, backend=backend)
            for number, config in configs.items()
        }
        with ExitStack() as undo:
            undo.callback(adapter.replace_attention(model, self._functions))
            prepare = getattr(adapter, "prepare", None)
            if prepare is not None:
                undo.callback(prepare(model, self.configs))
            self._undo = undo.pop_all().close

    def undo(self) -> None:
        """Restore the model, whatever else was applied to it; a second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def report(self) -> Report:
        """What each replaced layer did since its last prompt began; print it to see a table."""
        return Report(
            tuple(
                LayerReport(number, self.layers[number], function.config, function.last, function.trace.phases)
                for number, function in self._functions.items()
            )
        )

    def stats(self) -> Values:
        """Counts since the model was replaced, of all prompts and threads, as plain values for a server's metrics.

        Returns:
            `calls` of all layers; how many of them ran as `routed`, `selected`, `hyper` or `exact` (an `Exact`), 0
            included, for the configurations in use; `exact_because`: how many ran exactly instead, by reason;
            `audit`: queries, mean error, its 95 % interval and the largest error, where `apply` has `audit=`, else
            None.
        """
        return totals_of((function.trace for function in self._functions.values()), self.configs.values())

    def __enter__(self) -> Applied:
        if self._undo is None:
            raise ValueError("an Applied must not be undone before it is entered, got one that was: apply again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __deepcopy__(self, memo: object) -> Applied:
        reason = "it belongs to one model; copy the model, whose copy stays replaced, or apply to the copy"
        raise Unsupported("a copy of an Applied", [reason])

    def __str__(self) -> str:
        return f"{self._describe()}\n{self.report()}"

    def __repr__(self) -> str:
        return f"<Applied to {self._describe()}>"

    def _describe(self) -> str:
        configs = ", ".join(dict.fromkeys(describe(config) for config in self.configs.values())) or "all exact"
        where = f"{configs} in {len(self.layers)} of {self._n_layers} layers"
        undone = ", undone" if self._undo is None else ""
        return f"{type(self.model).__name__} ({self.adapter}{undone}): {where}"


def apply(
    model: nn.Module,
    config: Config | ConfigByLayers | None = None,
    *,
    layers: Layers = "all",
    on_unsupported: str = "raise",
    mesh: object = None,
    audit: float | None = None,
    backend: str = "auto",
    **fields: Never,
) -> Applied:
    """Replace a model's attention by pre-scored attention, until `undo` or the end of the `with` block.

    Args:
        model: A causal model of transformers, a ChatGLM2/3, or a ViT of timm or transformers.
        config: How to attend: a `Routed`, `Selected`, `Hyper` or `Exact`, None = `Routed()`; or a mapping from
            layers (`"all"`, `"first:N"`, a number, a tuple of numbers, ...) to such configurations, None there =
            leave these layers alone. Later entries win.
        layers: Which layers: `all`, `first:N`, `last:N`, `even`, `odd`, a number or a list of numbers.
        on_unsupported: Where a layer asks for what pre-scored attention cannot do: raise (`raise`), or run the
            layer exactly with one warning (`exact`).
        mesh: Context parallel: a one-dimensional `DeviceMesh` or process group whose ranks hold consecutive shards
            of the sequence. Every rank calls the model with its shard, see docs/parallel.md. Only for language
            models of transformers.
        audit: Measure the error: for this share of the queries of each call, at least one, exact attention is
            computed too, and `report()` has the relative errors by layer. Outputs do not change. None = no audit.
        backend: As in `prescored_attention`: `auto`, or one that every call of the chosen layers must take.
        **fields: None: the fields of a configuration are refused with the cure.

    Example:
        >>> with prescore.apply(model, prescore.Selected(top_k=1024), layers="last:8") as applied:
        ...     model.generate(**inputs)
        ...     print(applied)
    """
    for name, setting in dict[str, Any](fields).items():
        kinds = [kind for kind, made in TYPES.items() if name in vars(made())]
        cure = f": pass a configuration, such as prescore.{kinds[0]}({name}={setting!r})" if kinds else ""
        raise TypeError(f"apply got an unexpected argument {name!r}{cure}")
    if not isinstance(model, nn.Module):
        got = f"str {model!r}: load the model first" if isinstance(model, str) else type(model).__name__
        raise TypeError(f"model must be a torch.nn.Module, got {got}")
    checks.one_of("on_unsupported", on_unsupported, ON_UNSUPPORTED)
    checks.one_of("backend", backend, BACKENDS)
    if audit is not None:
        checks.number("audit", audit, minimum=0.0, exclusive=True, maximum=1.0)
    adapter = find_adapter(model)
    configs = configs_by_layer(config, list(adapter.layers(model)), layers)
    if on_unsupported == "raise":
        _refuse_obstacles(adapter, model, configs)
    if mesh is None:
        return Applied(model, configs, on_unsupported, audit=audit, backend=backend)
    if backend != "auto":
        raise ValueError(f"backend must be 'auto' with a mesh, got {backend!r}")
    if on_unsupported != "raise":
        raise ValueError(f"on_unsupported must be 'raise' with a mesh, got {on_unsupported!r}")
    if audit is not None:
        raise ValueError(f"audit must be None with a mesh, whose ranks hold other keys, got {audit}")
    return Applied(model, configs, on_unsupported, as_group(mesh, "mesh"))


def _refuse_obstacles(adapter: Adapter, model: nn.Module, configs: Mapping[int, Config]) -> None:
    """Refuse a model some of whose chosen layers can never be served."""
    obstacles: Callable[[nn.Module], dict[int, list[str]]] | None = getattr(adapter, "obstacles", None)
    reasons = {} if obstacles is None else obstacles(model)
    for number in sorted(reasons):
        if not isinstance(configs.get(number, Exact()), Exact):
            raise refusal(number, type(model).__name__, reasons[number])


def replace_attention(model: nn.Module, functions: Mapping[int, Attend]) -> Undo:
    """Let layer `number` attend by `functions[number]`, and all others exactly; returns the undo."""
    return find_adapter(model).replace_attention(model, functions)


def replace_context_parallel(
    model: nn.Module, functions: Mapping[int, Attend | Config], group: Group
) -> tuple[dict[int, Any], Undo]:
    """The same for a model whose sequences lie on several ranks; returns the functions and the undo.

    A layer attends by its function or, on all ranks, by its configuration.
    """
    adapter = find_adapter(model)
    replace: Any = getattr(adapter, "replace_context_parallel", None)
    if replace is None:
        reason = f"{_name(adapter)} models run on one rank"
        raise Unsupported(f"apply with a mesh on {type(model).__name__}", [reason])
    replaced: tuple[dict[int, Any], Undo] = replace(model, functions, group)
    return replaced


@contextmanager
def observe(model: nn.Module, observer: Observer) -> Iterator[int]:
    """Show the queries and keys of every attention call to `observer`; yields the number of layers.

    Attention stays exact, and the model is restored afterwards.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        observer(query, key, context)
        return original_attention(query, key, value, context)

    numbers = find_adapter(model).layers(model)
    undo = replace_attention(model, dict.fromkeys(numbers, attend))
    try:
        yield len(numbers)
    finally:
        undo()


def find_adapter(model: nn.Module) -> Adapter:
    """The adapter of the model's library; raises `Unsupported` when there is none."""
    for name, library in ADAPTERS.items():
        if library is not None and library not in sys.modules:
            continue  # a model of this library would have imported it
        adapter = cast(Adapter, importlib.import_module(f"{_PACKAGE}.{name}"))
        if adapter.detect(model):
            return adapter
    reason = (
        "it is neither a model of transformers or timm nor a ChatGLM with core_attention modules; "
        "call prescore.prescored_attention in its forward instead"
    )
    raise Unsupported(f"apply on {type(model).__name__}", [reason])


def _name(adapter: Adapter) -> str:
    return adapter.__name__.removeprefix(f"{_PACKAGE}.")


def pick_layers(layers: Layers | None, numbers: Sequence[int], name: str = "layers") -> list[int]:
    """The layer numbers that a pattern means, ascending; None = all. `name` is the argument's name in errors.

    `numbers` are those of the model's attention layers, ascending. -1 is the last of them.

    Example:
        >>> pick_layers("last:2", range(6))
        [4, 5]
    """
    n_layers = len(numbers)
    even = [number for number in numbers if number % 2 == 0]
    named = {"all": numbers, "even": even, "odd": [number for number in numbers if number % 2]}
    layers = "all" if layers is None else layers
    if isinstance(layers, str):
        if layers in named:
            return list(named[layers])
        side, _, count = layers.partition(":")
        if side not in ("first", "last") or not count.isdigit() or int(count) == 0:
            raise ValueError(f"{name} must be {_LAYERS_RULE}, got {checks.shown(layers)}")
        if int(count) > n_layers:
            raise ValueError(f"{name} must ask for at most the model's {n_layers} layers, got {layers!r}")
        return list(numbers[: int(count)] if side == "first" else numbers[-int(count) :])
    chosen = [layers] if isinstance(layers, int) else layers
    if not isinstance(chosen, Sequence) or not all(type(number) is int for number in chosen):
        raise TypeError(f"{name} must be {_LAYERS_RULE}, got {checks.shown(layers)}")
    for number in chosen:
        if number not in numbers and not -n_layers <= number < 0:
            rule = f"{name} must be among the model's attention layers, {span(numbers)}, or {-n_layers} to -1"
            raise ValueError(f"{rule}, got {number}")
    return sorted({numbers[number] if number < 0 else number for number in chosen})


def configs_by_layer(
    config: Config | ConfigByLayers | None, numbers: Sequence[int], layers: Layers | None = None
) -> dict[int, Config]:
    """The configuration of every layer that is replaced, of a model whose attention layers have these numbers.

    The keys of a mapping are patterns, its values the configurations of these layers, None = leave them alone.
    Later entries win, and layers that no entry names are left alone.

    Example:
        >>> configs = configs_by_layer({"all": Routed(), "first:2": None, -1: Exact()}, range(6))
    """
    chosen = pick_layers(layers, numbers)
    if not isinstance(config, Mapping):
        return dict.fromkeys(chosen, check_config(config))
    configs: dict[int, Config | None] = {}
    for pattern, entry in config.items():
        places = pick_layers(pattern, numbers, "layers of config")
        checked = None if entry is None else check_config(entry, f"config[{pattern!r}]")
        configs.update(dict.fromkeys(places, checked))
    return {number: entry for number in chosen if (entry := configs.get(number)) is not None}
