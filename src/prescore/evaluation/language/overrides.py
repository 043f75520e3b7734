"""Fields of a configuration by name, dotted where they are nested: how experiments and `--set` change one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from prescore import checks
from prescore.config import Config, config_from_dict
from prescore.values import Values

Overrides = Mapping[str, Any]
"""New values by field name, such as `{"top_k": 64, "scorer.n_clusters": 32, "inner.block_size": 128}`."""

AnyConfig = TypeVar("AnyConfig", bound=Config)

_IDENTITY = ("type", "name")


def field_names(config: Config) -> list[str]:
    """All fields of a configuration, those of its scorer, `Lsh` and `Coupling` by their paths."""
    return list(_paths(config.to_dict()))


def changed(config: AnyConfig, overrides: Overrides) -> AnyConfig:
    """A copy with some fields changed.

    A word for a nested field names its type (`inner=Exact`, `scorer=leverage`), with that type's defaults.

    Raises:
        ValueError: The configuration has no such field; the nearest name is said.
    """
    # a whole part comes before the fields inside it
    config = _with(config, {name: value for name, value in overrides.items() if "." not in name})
    return _with(config, {name: value for name, value in overrides.items() if "." in name})


def fitting(config: Config, overrides: Overrides) -> Values:
    """Those overrides that a configuration has fields for, in a run of configurations of several types."""
    own = field_names(config)
    parts = {name: value for name, value in overrides.items() if "." not in name and name in own}
    inside = field_names(changed(config, parts))
    return {name: value for name, value in overrides.items() if name in parts or ("." in name and name in inside)}


def check_overrides(overrides: Overrides, configs: Sequence[Config]) -> None:
    """Refuse an override that none of a run's configurations has a field for."""
    for name in overrides:
        if not any(name in fitting(config, overrides) for config in configs):
            kinds = " or ".join(dict.fromkeys(type(config).__name__ for config in configs))
            known = dict.fromkeys(field for config in configs for field in field_names(config))
            checks.known_field(kinds or "a run without a configuration", name, [f for f in known if f != name])


def _with(config: AnyConfig, overrides: Overrides) -> AnyConfig:
    if not overrides:
        return config
    values, known = config.to_dict(), field_names(config)
    for path, value in overrides.items():
        checks.known_field(type(config).__name__, path, known)
        *parents, name = path.split(".")
        owner = values
        for parent in parents:
            owner = owner[parent]
        owner[name] = _plain(name, value, owner[name])
    return cast("AnyConfig", config_from_dict(values))  # its type is not among the fields


def _plain(name: str, value: Any, before: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    # a remainder that is no object is a word
    if isinstance(before, Mapping) and isinstance(value, str) and name != "remainder":
        return {"name" if "name" in before else "type": value}
    return value


def _paths(values: Mapping[str, Any], owner: str = "") -> Iterator[str]:
    for name, value in values.items():
        if name not in _IDENTITY:
            yield owner + name
            if isinstance(value, Mapping):
                yield from _paths(value, f"{owner}{name}.")
