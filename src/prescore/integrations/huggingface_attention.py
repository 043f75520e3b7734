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
from prescore.errors import Unsupported
from prescore.integrations.huggingface_layer import PrescoredLayer, layer_of
from prescore.integrations.masked import attend_exactly, attend_prescored, inexpressible
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
    """What one attention module does: pre-scored with `config`, or exact when that is None."""

    config: PrescoreConfig | None
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
        dropout: Of the attention weights; cannot be honoured by a sparse softmax.
        scaling: Factor of the logits.
        is_causal: Overrides the module's own flag.
        **kwargs: Features of single models.

    Returns:
        `[B, Nq, Hq, Dv]`, and the weights where a model's own eager attention had to run.
    """
    plan = plan_of(module)
    layer = layer_of(key)
    n_keys = key.shape[2] if layer is None else layer.get_seq_length()
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    form = read_mask(attention_mask, n_query=query.shape[2], n_keys=n_keys, is_causal=causal)
    foreign = _foreign_features(kwargs)
    window = _local_window(module, kwargs.get("sliding_window"))
    plan.stats = {"mask": form.kind, "queries": query.shape[2], "keys": n_keys}
    if plan.config is None or window is not None or form.kind == "window":
        plan.stats["path"] = "exact: not selected" if plan.config is None else "exact: sliding window"
        output = _exact(module, query, key, value, form, dropout, scaling, kwargs, foreign, layer)
    else:
        reasons = [*foreign.values(), *inexpressible(form), *_training_reasons(dropout)]
        if reasons:
            _refuse_or_warn(module, plan, reasons)
            plan.stats["path"] = f"exact: {'; '.join(reasons)}"
            output = _exact(module, query, key, value, form, dropout, scaling, kwargs, foreign, layer)
        elif layer is not None:
            output = layer.attend(query, form, config=plan.config, scale=scaling, stats=plan.stats), None
        else:
            plan.stats["path"] = "prescored" if query.shape[2] > 1 else "prescored: selected for this step"
            output = attend_prescored(query, key, value, form, config=plan.config, scale=scaling), None
    if foreign and plan.stats["path"].startswith("exact"):
        return output
    return output[0].transpose(1, 2).contiguous(), output[1]


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


def _exact(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    form: MaskForm,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
    foreign: dict[str, str],
    layer: PrescoredLayer | None,
) -> tuple[Tensor, Tensor | None]:
    if layer is not None:
        layer.used_exactly()
    if not foreign:
        return attend_exactly(query, key, value, form, scale=scaling, dropout=dropout), None
    # the model's own file knows its own features
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise Unsupported(f"exact attention of {type(module).__name__}", list(foreign.values()))
    seen = full_mask(form, query.shape[2], query.device)
    mask = seen
    if seen is not None and seen.dtype == torch.bool:
        mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
        mask = mask.masked_fill(~seen, torch.finfo(query.dtype).min)
    output: tuple[Tensor, Tensor | None] = eager(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return output


def _foreign_features(kwargs: dict[str, Any]) -> dict[str, str]:
    return {name: reason for name, reason in _FOREIGN.items() if kwargs.get(name) is not None}


def _training_reasons(dropout: float) -> list[str]:
    if dropout > 0:
        return [f"attention dropout {dropout} needs every attention weight; set it to 0 to train"]
    return []


def _local_window(module: nn.Module, sliding_window: int | None) -> int | None:
    """The window of a layer that is local by design; None when it spans all the model can hold."""
    if sliding_window is None:
        return None
    longest = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    return None if longest is not None and sliding_window >= longest else sliding_window


def _refuse_or_warn(module: nn.Module, plan: LayerPlan, reasons: list[str]) -> None:
    name = f"pre-scored attention in {type(module).__name__}"
    if plan.config is None or plan.config.on_unsupported == "raise":
        raise Unsupported(name, [*reasons, 'on_unsupported="exact" would run such layers exactly'])
    text = "; ".join(reasons)
    if text not in plan.warned:
        plan.warned.add(text)
        warnings.warn(f"{name} runs exactly: {text}", stacklevel=4)
