"""Which layers of a model: patterns such as `first:8`, lists, and mappings with overrides per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from prescore.config import PrescoreConfig

Layers: TypeAlias = str | int | Sequence[int]
Overrides: TypeAlias = PrescoreConfig | Mapping[str, Any] | None

_RULE = '"all", "first:N", "last:N", "even", "odd", a layer number or a list of layer numbers'


def pick_layers(layers: Layers | None, n_layers: int) -> list[int]:
    """The layer numbers a pattern means, ascending; None = all.

    Example:
        >>> pick_layers("last:2", 6)
        [4, 5]
    """
    if layers is None:
        return list(range(n_layers))
    if isinstance(layers, str):
        return _pick_named(layers, n_layers)
    numbers: Any = [layers] if _is_number(layers) else layers
    if not isinstance(numbers, Sequence) or not all(_is_number(number) for number in numbers):
        raise TypeError(f"layers must be {_RULE}, got {layers!r}")
    for number in numbers:
        if not -n_layers <= number < n_layers:
            raise ValueError(f"layers must lie between {-n_layers} and {n_layers - 1}, got {number}")
    return sorted({number % n_layers for number in numbers})


def configs_by_layer(
    layers: Layers | Mapping[Any, Overrides] | None, config: PrescoreConfig, n_layers: int
) -> dict[int, PrescoreConfig]:
    """The configuration of every layer that is replaced.

    A mapping's keys are patterns, its values say what is different there: overrides of `config`, a whole
    `PrescoreConfig`, or None for "leave these layers alone". Later entries win.

    Example:
        >>> configs = configs_by_layer({"all": {}, "first:2": {"top_k": 64}}, PrescoreConfig(), 6)
    """
    if not isinstance(layers, Mapping):
        return dict.fromkeys(pick_layers(layers, n_layers), config)
    chosen: dict[int, PrescoreConfig] = {}
    for pattern, overrides in layers.items():
        for number in pick_layers(pattern, n_layers):
            if overrides is None:
                chosen.pop(number, None)
            else:
                chosen[number] = _override(chosen.get(number, config), overrides)
    return dict(sorted(chosen.items()))


def _override(config: PrescoreConfig, overrides: Overrides) -> PrescoreConfig:
    if isinstance(overrides, PrescoreConfig):
        return overrides
    if not isinstance(overrides, Mapping):
        raise TypeError(
            f"layers must map to a PrescoreConfig, a dict of its fields or None, got {type(overrides).__name__}"
        )
    return PrescoreConfig.from_dict({**config.to_dict(), **overrides})


def _pick_named(pattern: str, n_layers: int) -> list[int]:
    everything = list(range(n_layers))
    if pattern in ("all", "even", "odd"):
        return {"all": everything, "even": everything[::2], "odd": everything[1::2]}[pattern]
    side, colon, count = pattern.partition(":")
    if side not in ("first", "last") or not colon or not count.isdigit() or int(count) == 0:
        raise ValueError(f"layers must be {_RULE}, got {pattern!r}")
    if int(count) > n_layers:
        raise ValueError(f"layers must ask for at most the model's {n_layers} layers, got {pattern!r}")
    return everything[: int(count)] if side == "first" else everything[-int(count) :]


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
