"""Looking at a model's true queries and keys while it runs as it always does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn

from prescore.errors import Unsupported
from prescore.integrations.apply import find_adapter
from prescore.integrations.vision_attention import Situation, attend_exactly

NAME = "prescore_observed"
_STATE = "_prescore_observer"

Look: TypeAlias = Callable[[Tensor, Tensor, Situation], None]
"""Receives `query [B, Hq, N, D]`, `key [B, Hkv, N, D]` and the situation of every attention layer."""


@contextmanager
def observe(model: nn.Module, look: Look) -> Iterator[int]:
    """Show every attention call of a ViT or a transformers model to `look`; yields the number of layers.

    Attention itself stays exact, and the model is as before afterwards.
    """
    adapter: Any = find_adapter(model)
    if hasattr(adapter, "replace_attention"):
        names = adapter.layers(model)

        def attend(query: Tensor, key: Tensor, value: Tensor, situation: Situation) -> Tensor:
            look(query, key, situation)
            return attend_exactly(query, key, value, situation)

        undo = adapter.replace_attention(model, dict.fromkeys(range(len(names)), attend))
        n_layers = len(names)
    elif adapter.__name__.endswith(".huggingface"):
        undo, n_layers = _observe_transformers(model, look)
    else:
        raise Unsupported(f"observing {type(model).__name__}", ["its attention is not reached by name"])
    try:
        yield n_layers
    finally:
        undo()


def _observe_transformers(model: Any, look: Look) -> tuple[Callable[[], None], int]:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    # transformers numbers the attention layers of a decoder; other modules with that name have no attention
    found = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")]
    if not found:
        raise Unsupported(f"observing {type(model).__name__}", ["it has no numbered attention layers"])
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = model.config._attn_implementation
    for number, module in enumerate(found):
        setattr(module, _STATE, (look, number))
    model.set_attn_implementation(NAME)

    def undo() -> None:
        model.set_attn_implementation(before)
        for module in found:
            delattr(module, _STATE)

    return undo, len(found)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    look, number = getattr(module, _STATE)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    look(query, key, Situation(layer=number, scale=scaling, mask=attention_mask, is_causal=causal))
    output, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
    )
    return output, None
