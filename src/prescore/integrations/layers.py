"""Which layers of a model: patterns such as `first:8`, lists, and mappings from these to configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from prescore.config import Config, check_config

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
