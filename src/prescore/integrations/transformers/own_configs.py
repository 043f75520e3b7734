"""Configurations of transformers that belong to one model alone while its attention is replaced.

A configuration names the attention that modules ask for, and several models may share one object. So the modules
of a replaced model get copies; what is changed on these meanwhile goes back to the shared ones at the end, but for
the name of the attention, which is as before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from prescore.integrations.adapter import Undo
from prescore.values import Values

_OWN = "_prescore_own_config"
_NAMED = "_attn_implementation_internal"
_MISSING = object()


@dataclass(eq=False)
class _Pair:
    """A shared configuration and the copy that stands in its place.

    Attributes:
        shared: What the modules held.
        own: What they hold meanwhile.
        first: What the copy held at first.
        holders: The modules.
        n_users: Replacements that need the copy.
    """

    shared: Any
    own: Any
    first: Values
    holders: list[nn.Module] = field(default_factory=list)
    n_users: int = 0

    def hold(self, module: nn.Module) -> None:
        """Give a module the copy."""
        vars(module)[_OWN], vars(module)["config"] = self, self.own
        self.holders.append(module)

    def release(self) -> None:
        """One user less; the last one puts everything back."""
        self.n_users -= 1
        if self.n_users:
            return
        for module in self.holders:
            del vars(module)[_OWN]
            if vars(module).get("config") is self.own:  # else somebody gave it another one
                vars(module)["config"] = self.shared
        self._give_back()

    def _give_back(self) -> None:
        """Let the shared one have what was changed on the copy."""
        for name in {*self.first, *vars(self.own)} - {_NAMED}:
            first, now = self.first.get(name, _MISSING), vars(self.own).get(name, _MISSING)
            if now is _MISSING:
                vars(self.shared).pop(name, None)
            elif now is not first:
                vars(self.shared)[name] = now


def take_own_configs(modules: Iterable[nn.Module]) -> Undo:
    """Give modules configurations of their own, with those inside of them; returns the undo."""
    holders = [module for module in modules if _is_config(vars(module).get("config"))]
    known = [pair for module in holders if (pair := vars(module).get(_OWN)) is not None]
    pairs: dict[int, _Pair] = {id(pair.shared): pair for pair in known}
    used = {id(pair): pair for pair in known}
    for module in holders:
        if _OWN not in vars(module):
            pair = _copied(vars(module)["config"], pairs)
            pair.hold(module)
            used[id(pair)] = pair
    waiting = list(used.values())
    for pair in waiting:
        pair.n_users += 1

    def undo() -> None:
        for pair in waiting:
            pair.release()
        waiting.clear()

    return undo


def _copied(config: Any, pairs: dict[int, _Pair]) -> _Pair:
    """The pair of a configuration, made where it is not there yet; configurations inside become copies too."""
    if id(config) not in pairs:
        own = copy.copy(config)
        for name in getattr(config, "sub_configs", {}):
            inner = vars(config).get(name)
            if _is_config(inner):
                vars(own)[name] = _copied(inner, pairs).own
        pairs[id(config)] = _Pair(config, own, dict(vars(own)))
    return pairs[id(config)]


def _is_config(value: object) -> bool:
    return hasattr(type(value), "sub_configs") and hasattr(value, _NAMED)
