"""Looking at a model's true queries and keys while it runs as it always does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from torch import Tensor, nn

from prescore.integrations.apply import find_adapter
from prescore.integrations.attend import Situation, attend_exactly

Look: TypeAlias = Callable[[Tensor, Tensor, Situation], None]
"""Receives `query [B, Hq, N, D]`, `key [B, Hkv, N, D]` and the situation of every attention layer."""


@contextmanager
def observe(model: nn.Module, look: Look) -> Iterator[int]:
    """Show every attention call of a model to `look`; yields the number of layers.

    Attention itself stays exact, and the model is as before afterwards.
    """
    adapter = find_adapter(model)
    n_layers = len(adapter.layers(model))

    def attend(query: Tensor, key: Tensor, value: Tensor, situation: Situation) -> Tensor:
        look(query, key, situation)
        return attend_exactly(query, key, value, situation)

    undo = adapter.replace_attention(model, dict.fromkeys(range(n_layers), attend))
    try:
        yield n_layers
    finally:
        undo()
