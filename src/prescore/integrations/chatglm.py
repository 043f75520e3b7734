"""ChatGLM2 and ChatGLM3: remote-code models with a `core_attention` module in every layer.

Their layout is `[sequence, batch, heads, dim]`, the caller repeats the keys and values of a multi-query group, and
a mask is True where a key is hidden. The modules are recognised by their structure; none of the model's code is
imported here, and transformers loads it only if the user passes `trust_remote_code=True`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from prescore.errors import Unsupported
from prescore.integrations.attention import Attend, AttentionContext
from prescore.integrations.compile import attention_of
from prescore.integrations.patch import Undo, original_forward, patches, replace_forwards


def detect(model: nn.Module) -> bool:
    """Whether the model has layers with `self_attention.core_attention`."""
    return bool(layers(model))


def layers(model: nn.Module) -> dict[int, str]:
    """Names of the `core_attention` modules, in order."""
    names = [
        f"{name}.core_attention"
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "self_attention"
        and isinstance(getattr(module, "core_attention", None), nn.Module)
    ]
    return dict(enumerate(names))


def replace_attention(model: nn.Module, functions: Mapping[int, Attend]) -> Undo:
    """Let layer `number` attend by `functions[number]`; returns the undo."""
    modules = [model.get_submodule(name) for name in layers(model).values()]
    return replace_forwards(modules, functions, partial(_forward, *_heads(model)))


def _forward(
    n_heads: int,
    repeats: int,
    module: nn.Module,
    query_layer: Tensor,
    key_layer: Tensor,
    value_layer: Tensor,
    attention_mask: Tensor | None,
) -> Tensor:
    """The forward of a core attention: `[Nq, B, H, D]` and `[Nk, B, H, D]` twice -> `[Nq, B, H * D]`.

    Args:
        n_heads: Query heads of the model.
        repeats: How often the caller repeats each KV head.
        module: The core attention.
        query_layer: Queries of the newest positions.
        key_layer: All keys so far, heads repeated.
        value_layer: All values so far, heads repeated.
        attention_mask: None, or bool `[B, 1, Nq, Nk]`, True = hidden.
    """
    if query_layer.shape[2] != n_heads:
        raise Unsupported(
            "pre-scored attention in ChatGLM",
            [f"queries must be [sequence, batch, {n_heads} heads, dim], got {tuple(query_layer.shape)}"],
        )

    def original(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeated = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        inputs = (t.permute(2, 0, 1, 3) for t in (query, *repeated))
        result: Tensor = original_forward(module)(*inputs, attention_mask)
        return result.reshape(*result.shape[:2], n_heads, -1).permute(1, 2, 0, 3)

    patch = patches(module)[-1]
    query, key, value = (layer.permute(1, 2, 0, 3) for layer in (query_layer, key_layer, value_layer))
    # one of the repeated heads each, so that every KV head is scored once
    key, value = key[:, ::repeats], value[:, ::repeats]
    dropout = getattr(getattr(module, "attention_dropout", None), "p", 0.0) if module.training else 0.0
    context = AttentionContext(
        layer=patch.layer,
        scale=query.shape[-1] ** -0.5,
        mask=_visible(attention_mask),
        is_causal=True,
        dropout=dropout,
        owner="ChatGLM",
        original=original,
    )
    return attention_of(patch)(query, key, value, context).permute(2, 0, 1, 3).flatten(2)


def _heads(model: nn.Module) -> tuple[int, int]:
    """Query heads, and how often each KV head is repeated, as the model's configuration says."""
    config: Any = getattr(model, "config", None)
    n_heads = getattr(config, "num_attention_heads", None)
    if n_heads is None:
        raise Unsupported(f"apply on {type(model).__name__}", ["its config does not say num_attention_heads"])
    if not getattr(config, "multi_query_attention", False):
        return n_heads, 1
    n_groups = config.multi_query_group_num
    if n_groups < 1 or n_heads % n_groups:
        raise ValueError(f"config.multi_query_group_num must divide the {n_heads} heads, got {n_groups}")
    return n_heads, n_heads // n_groups


def _visible(attention_mask: Tensor | None) -> Tensor | None:
    """The mask with True = attend, and nothing for padding queries.

    ChatGLM lets padding queries see all keys, later ones included, to keep their softmax defined. Such a query
    sees the last key although it is not the last query. Its output is not used.
    """
    if attention_mask is None:
        return None
    visible = ~attention_mask.bool()
    if visible.shape[-2] > 1:
        padding = visible[..., -1:].clone()
        padding[..., -1, :] = False
        visible = visible & ~padding
    return visible
