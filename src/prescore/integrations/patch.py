"""`Patch`: what replaces the attention of a module; and the protocol of an adapter.

A module carries a stack of patches, and the newest one acts. An undo removes its own patch, so that several
replacements of one model can be undone in any order. When none is left, the module is as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor, nn

from prescore.errors import Unsupported
from prescore.integrations.attention import Attend, original_attention

_PATCHES = "_prescore_patches"
_FORWARD = "_prescore_original_forward"

Undo = Callable[[], None]


class Adapter(Protocol):
    """A module of `prescore.integrations` that knows one model library.

    Three functions are optional: `obstacles(model) -> dict[int, list[str]]`, why layers can never be served;
    `prepare(model, configs: Mapping[int, Config]) -> Undo`, which `prescore.apply` calls after replacing
    attention; `replace_context_parallel`, as in `prescore.integrations.apply`.
    """

    __name__: str

    def detect(self, model: nn.Module) -> bool:
        """Whether the model belongs to this library; imports nothing that the model does not need."""

    def layers(self, model: nn.Module) -> dict[int, str]:
        """Names of the attention layers by number, ascending; `Unsupported` where a model cannot be served."""

    def replace_attention(self, model: nn.Module, functions: Mapping[int, Attend]) -> Undo:
        """Let layer `number` attend by `functions[number]`, and all others exactly; returns the undo.

        If it raises, the model is as it was.
        """


@dataclass(frozen=True, eq=False)
class Patch:
    """A function in place of a module's attention.

    Attributes:
        attend: The function.
        layer: The layer's number.
        n_prefix: Tokens before the image patches.
        handle: A number by which compiled graphs find the patch.
    """

    attend: Attend
    layer: int
    n_prefix: int = 0
    handle: int = field(default_factory=itertools.count().__next__, repr=False)

    def __post_init__(self) -> None:
        PATCHES_BY_HANDLE[self.handle] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return Patch, (self.attend, self.layer, self.n_prefix)  # a copy has its own handle


PATCHES_BY_HANDLE: WeakValueDictionary[int, Patch] = WeakValueDictionary()
"""Patches that were not undone yet."""


def patches(module: nn.Module) -> list[Patch]:
    """The patches of a module, newest last."""
    stack: list[Patch] = module.__dict__.get(_PATCHES, [])
    return stack


def attach_patch(module: nn.Module, patch: Patch) -> None:
    """Put a patch on top of the module's stack."""
    module.__dict__.setdefault(_PATCHES, []).append(patch)


def detach_patch(module: nn.Module, patch: Patch) -> None:
    """Remove a patch, wherever it is in the stack."""
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
    """Replace the `forward` of attention modules by one that calls the newest patch.

    Args:
        modules: All attention modules in order.
        functions: Attention functions, by the modules' numbers.
        forward: The new method; it calls the replaced one as `original_forward(module)`.
        n_prefix: Tokens before the image patches, by the modules' numbers.
    """
    check_numbers(functions, range(len(modules)))
    attached = []
    for number, module in enumerate(modules):
        # modules without a function keep their forward, unless an earlier replacement acts there
        if number in functions or patches(module):
            attached.append((module, Patch(functions.get(number, original_attention), number, n_prefix(number))))
    for module, patch in attached:
        if not patches(module):
            module.__dict__[_FORWARD] = module.__dict__.get("forward")
            # bound to the module, so that a deep copy of the model runs on its own weights
            module.forward = MethodType(forward, module)
        attach_patch(module, patch)

    def undo() -> None:
        for module, patch in attached:
            if patch not in patches(module):
                continue
            detach_patch(module, patch)
            if not patches(module):
                del module.forward
                original = module.__dict__.pop(_FORWARD)
                if original is not None:
                    module.forward = original

    return undo


def original_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that a module had before it was replaced."""
    original: Callable[..., Any] | None = module.__dict__.get(_FORWARD)
    return MethodType(type(module).forward, module) if original is None else original


def check_numbers(functions: Mapping[int, Attend], numbers: Collection[int]) -> None:
    """Refuse numbers of layers that the model does not have."""
    for number in functions:
        if number not in numbers:
            raise ValueError(f"functions must be for layers {span(numbers)}, got one for layer {number!r}")


def span(numbers: Collection[int]) -> str:
    """Layer numbers in a message."""
    if list(numbers) == list(range(len(numbers))):
        return f"0 to {len(numbers) - 1}"
    return ", ".join(map(str, numbers))


def refuse(model: nn.Module, names: Iterable[str], reason: str) -> Unsupported:
    """The refusal of an architecture, with the names of the modules that cannot be served."""
    return Unsupported(f"apply on {type(model).__name__}", [f"{reason}, got {', '.join(sorted(set(names)))}"])
