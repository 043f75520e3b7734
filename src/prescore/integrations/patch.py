"""What an adapter of a foreign library is, and what all of them share.

A replaced module carries a stack of seats, newest last: the last one acts. An undo takes its own seats away, so
that several replacements of one model may be undone in any order, and the model is as it was when none is left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MethodType
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor, nn

from prescore.errors import Unsupported
from prescore.integrations.attention import Attend, attend_exactly
from prescore.types import Values

_PATCHES = "_prescore_seats"
_FORWARD = "_prescore_own_forward"

Undo = Callable[[], None]


class Adapter(Protocol):
    """A module of `prescore.integrations` that knows one foreign library.

    Where it has more to do for users than to replace attention, it also has
    `prepare(model, configs: Mapping[int, Config]) -> Undo`, which `prescore.apply` calls.
    """

    __name__: str

    def detect(self, model: nn.Module) -> bool:
        """Whether the model is this adapter's, found out without importing what the model does not need."""

    def layers(self, model: nn.Module) -> list[str]:
        """Names of the attention layers in order; raises `Unsupported` when the model cannot be served."""

    def replace_attention(self, model: nn.Module, functions: Mapping[int, Attend]) -> Undo:
        """Let `functions[number]` be the attention of layer `number`, and all others exact; returns the undo.

        If it raises, the model is as it was.
        """


@dataclass(frozen=True, eq=False)
class Patch:
    """A function in the place of a module's attention.

    Attributes:
        attend: The function.
        layer: The layer's number.
        n_prefix: Tokens before the patches.
        handle: Its number in this process, by which a compiled graph calls it.
    """

    attend: Attend
    layer: int
    n_prefix: int = 0
    handle: int = field(default_factory=itertools.count().__next__, repr=False)

    def __post_init__(self) -> None:
        _BY_HANDLE[self.handle] = self

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy is another seat, with a handle of its own
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "handle"}
        return _unpickle_patch, (type(self), own)


def _unpickle_patch(kind: type[Patch], values: Values) -> Patch:
    return kind(**values)


_BY_HANDLE: WeakValueDictionary[int, Patch] = WeakValueDictionary()


def patch_of(handle: int) -> Patch | None:
    """The seat of a handle, as compiled graphs know it; None when nobody holds it any more."""
    return _BY_HANDLE.get(handle)


def patches(module: nn.Module) -> list[Patch]:
    """Who sits on a module, newest last."""
    found: list[Patch] = module.__dict__.get(_PATCHES, [])
    return found


def attach_patch(module: nn.Module, patch: Patch) -> None:
    """Sit down above all others."""
    module.__dict__.setdefault(_PATCHES, []).append(patch)


def detach_patch(module: nn.Module, patch: Patch) -> None:
    """Stand up, wherever in the stack; nothing is left behind by the last one."""
    left = [other for other in patches(module) if other is not patch]
    if left:
        module.__dict__[_PATCHES] = left
    else:
        module.__dict__.pop(_PATCHES, None)


def replace_forwards(
    modules: Sequence[nn.Module],
    functions: Mapping[int, Attend],
    forward: Callable[..., Tensor],
    n_prefix: Callable[[int], int] = lambda number: 0,
) -> Undo:
    """Replace the attention of modules by a `forward` of ours, which asks `seats` what to call.

    Args:
        modules: All attention modules in order.
        functions: What is to stand in their place.
        forward: Becomes the modules' method; reaches their own as `own_forward(module)`.
        n_prefix: Tokens before the patches, by number.
    """
    check_numbers(functions, len(modules))
    taken = []
    for number, module in enumerate(modules):
        # layers left alone keep their own forward, unless somebody else sits there already
        if number in functions or patches(module):
            taken.append((module, Patch(functions.get(number, attend_exactly), number, n_prefix(number))))
    for module, patch in taken:
        if not patches(module):
            module.__dict__[_FORWARD] = module.__dict__.get("forward")
            # bound to the module, so that a deep copy of the model runs on its own weights
            module.forward = MethodType(forward, module)
        attach_patch(module, patch)

    def undo() -> None:
        for module, patch in taken:
            if patch not in patches(module):
                continue
            detach_patch(module, patch)
            if not patches(module):
                del module.forward
                own = module.__dict__.pop(_FORWARD)
                if own is not None:
                    module.forward = own

    return undo


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that a module had before it was replaced."""
    own: Callable[..., Any] | None = module.__dict__.get(_FORWARD)
    return MethodType(type(module).forward, module) if own is None else own


def check_numbers(functions: Mapping[int, Attend], n_layers: int) -> None:
    """Refuse numbers of layers that the model does not have."""
    for number in functions:
        if number not in range(n_layers):
            raise ValueError(f"functions must be for layers 0 to {n_layers - 1}, got one for layer {number!r}")


def refuse(model: nn.Module, names: Iterable[str], reason: str) -> Unsupported:
    """The refusal of an architecture, by its name and the names of what is in the way."""
    return Unsupported(f"apply on {type(model).__name__}", [f"{reason}, got {', '.join(sorted(set(names)))}"])
