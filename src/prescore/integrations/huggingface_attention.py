"""The attention and mask functions that transformers calls under the name `prescored`."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function, sdpa_mask

from prescore.config import PrescoreConfig
from prescore.decoding.follow import FollowedSelection
from prescore.errors import Unsupported
from prescore.integrations.following import attend_following
from prescore.integrations.huggingface_layer import layer_of
from prescore.integrations.masked import attend_exactly, inexpressible
from prescore.integrations.masks import MaskForm, full_mask, read_mask

_PLAN = "_prescore_plan"
_FOREIGN = {
    "softcap": "its logits are soft-capped",
    "s_aux": "it has learned attention sinks",
    "position_bias": "it adds a position bias to the logits",
    "cache": "the paged cache keeps keys in pages",
}


@dataclass(eq=False)
class LayerPlan:
    """What one attention module does: pre-scored with `config`, or exact when that is None.

    `selection` serves decode steps whose keys come from a cache that cannot hold one.
    """

    config: PrescoreConfig | None
    selection: FollowedSelection = field(default_factory=FollowedSelection)
    stats: dict[str, Any] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)


def plan_of(module: nn.Module) -> LayerPlan:
    """A module's plan; a module that was never applied to gets the default configuration."""
    plan = module.__dict__.get(_PLAN)
    if plan is None:
        plan = LayerPlan(PrescoreConfig())
        set_plan(module, plan)
    return plan


def set_plan(module: nn.Module, plan: LayerPlan | None) -> LayerPlan | None:
    """Give a module a plan, or take it away; returns the one it had."""
    before: LayerPlan | None = module.__dict__.pop(_PLAN, None)
    if plan is not None:
        module.__dict__[_PLAN] = plan
    return before


def prescored_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer in transformers' calling convention.

    Args:
        module: The attention module; carries its plan.
        query: `[B, Hq, Nq, D]`, after rotation.
        key: `[B, Hkv, Nk, D]`, the cache's content included.
        value: `[B, Hkv, Nk, Dv]`.
        attention_mask: What `prescored_mask` made, or a mask of the caller's.
        dropout: Probability of dropping an attention weight; transformers passes 0 outside training.
        scaling: Factor of the logits.
        is_causal: Overrides the module's own flag.
        **kwargs: Features of single models.

    Returns:
        `[B, Nq, Hq, Dv]`, and the weights where a model's own eager attention had to run.
    """
    plan, layer = plan_of(module), layer_of(key)
    n_query, n_keys = query.shape[2], key.shape[2] if layer is None else layer.get_seq_length()
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    form = read_mask(attention_mask, n_query=n_query, n_keys=n_keys, is_causal=causal)
    plan.stats = {"mask": form.kind, "queries": n_query, "keys": n_keys}
    config, why_exact = plan.config, _why_exact(module, plan, form, kwargs)
    if config is None or why_exact is not None:
        plan.stats["path"] = f"exact: {why_exact}"
        if layer is not None:
            layer.used_exactly()
        if _foreign_features(kwargs):
            return _eager(module, query, key, value, form, dropout, scaling, kwargs)
        output = attend_exactly(query, key, value, form, scale=scaling, dropout=dropout)
    elif layer is not None:
        output = layer.attend(query, form, config=config, scale=scaling, stats=plan.stats, dropout=dropout)
    else:
        output = attend_following(
            plan.selection, query, key, value, form, config=config, scale=scaling, stats=plan.stats,
            dropout=dropout,
        )  # fmt: skip
    return output.transpose(1, 2).contiguous(), None


def prescored_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask for `prescored_attention_forward`, never square where causality and padding say it all.

    Returns:
        None for plain causal attention whose queries are the last positions, `[B, 1, 1, Nk]` for the same
        beside padding, and otherwise sdpa's `[B, 1, Nq, Nk]`.
    """
    at_the_end = not isinstance(q_offset, Tensor) and kv_offset + kv_length == q_offset + q_length
    if at_the_end and mask_function is causal_mask_function and local_size is None and allow_is_causal_skip:
        if attention_mask is None:
            return None
        real = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        real = torch.nn.functional.pad(real, (0, kv_length - real.shape[1]))
        return None if bool(real.all()) else real[:, None, None, :]
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip and at_the_end,
        **kwargs,
    )
    return mask


def _why_exact(module: nn.Module, plan: LayerPlan, form: MaskForm, kwargs: dict[str, Any]) -> str | None:
    """Why a layer is not pre-scored, or None; raises when it should be and cannot."""
    if plan.config is None:
        return "this layer was not asked for"
    if form.kind == "window" or _local_window(module, kwargs.get("sliding_window")) is not None:
        return "a sliding window is local already"
    reasons = [*_foreign_features(kwargs).values(), *inexpressible(form)]
    if kwargs.get("output_attentions"):
        reasons.append("output_attentions=True asks for weights that are never formed")
    if not reasons:
        return None
    name = f"pre-scored attention in {type(module).__name__}"
    if plan.config.on_unsupported == "raise":
        raise Unsupported(name, [*reasons, 'on_unsupported="exact" would run such layers exactly'])
    text = "; ".join(reasons)
    if text not in plan.warned:
        plan.warned.add(text)
        warnings.warn(f"{name} runs exactly: {text}", stacklevel=3)
    return text


def _eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    form: MaskForm,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """The attention of the model's own file, which knows the model's own features."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        reasons = list(_foreign_features(kwargs).values())
        raise Unsupported(f"exact attention of {type(module).__name__}", reasons)
    mask = full_mask(form, query.shape[2], query.device)
    if mask is not None and mask.dtype == torch.bool:
        shown = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
        mask = shown.masked_fill_(~mask, torch.finfo(query.dtype).min)
    result: tuple[Tensor, Tensor | None] = eager(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return result


def _foreign_features(kwargs: dict[str, Any]) -> dict[str, str]:
    return {name: reason for name, reason in _FOREIGN.items() if kwargs.get(name) is not None}


def _local_window(module: nn.Module, sliding_window: int | None) -> int | None:
    """The window of a layer that is local by design; None when it spans all the model can hold."""
    if sliding_window is None:
        return None
    longest = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    return None if longest is not None and sliding_window >= longest else sliding_window
