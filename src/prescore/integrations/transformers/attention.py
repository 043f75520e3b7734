"""The attention and mask functions that transformers calls under the name `prescored`.

Every call runs the newest patch of its module (see `prescore.integrations.patch`). A module without a patch
attends with the default configuration, so that `attn_implementation="prescored"` works by itself. Attention and
mask are registered together: transformers passes no mask at all to an attention function whose name has no mask
function, and padding would be ignored silently.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from prescore.config import Config
from prescore.errors import Unsupported
from prescore.integrations.attention import AttentionContext, PrescoredAttention
from prescore.integrations.compile import attention_of
from prescore.integrations.masks import full_mask
from prescore.integrations.patch import Patch, Undo, attach_patch, detach_patch, patches
from prescore.integrations.transformers.cache import CACHE_ARGUMENT, NAME, layer_of, pass_cache, why_no_index
from prescore.types import Values

PREFIX_TOKENS = {
    "ViTAttention": 1,
    "DeiTAttention": 2,
    "Dinov2Attention": 1,
    "Dinov2WithRegistersAttention": 1,
    "CLIPAttention": 1,
    "SiglipAttention": 0,
    "ViTMSNAttention": 1,
    "IJepaAttention": 0,
    "DINOv3ViTAttention": 1,
}
"""Attention classes that read image patches -> tokens before the patches, registers not counted."""

UNSUPPORTED = {
    "softcap": "its logits are soft-capped",
    "s_aux": "it has learned attention sinks",
    "position_bias": "it adds a position bias to the logits",
}
"""Arguments of transformers' attention functions -> why pre-scored attention cannot honour them."""
_TESTED = {"torch": ((2, 13), (2, 13)), "transformers": ((5, 18), (5, 23))}
"""The oldest and newest minor versions that were tested, docs/start.md."""
_DEFAULT = "_prescore_default_patch"
_CONFIG = "_prescore_config_copy"
_IMPLEMENTATION = "_attn_implementation_internal"


def prescored_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **features: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer in transformers' calling convention; keys and values include those of the cache.

    The mask is what `prescored_mask` made, or one of the user; `features` are of single models, and the cache (see
    `pass_cache`). Returns `[B, Nq, Hq, Dv]`, and the weights where the model's own eager attention ran.
    """
    cache = features.pop(CACHE_ARGUMENT, None)
    layer = layer_of(module, key, value, cache)
    stack = patches(module)
    patch = stack[-1] if stack else default_patch(module)
    obstacles = [reason for name, reason in UNSUPPORTED.items() if features.get(name) is not None]
    if features.get("cache") is not None:
        obstacles.append("the paged cache keeps keys in pages")
    if features.get("output_attentions"):
        obstacles.append("output_attentions=True asks for weights that are never formed")
    context = AttentionContext(
        layer=patch.layer,
        n_prefix=patch.n_prefix,
        scale=scaling,
        mask=attention_mask,
        is_causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        dropout=dropout,
        owner=type(module).__name__,
        obstacles=tuple(obstacles),
        is_local=_is_local(module, features.get("sliding_window")),
        cache=None if layer is None else layer.cache,
        no_index=why_no_index(cache) if layer is None else "",
        first_head=_first_head(module, key),
    )
    weights: list[Tensor] = []
    if obstacles:
        original = partial(_eager_attention, module, context, features, weights)
        context = dataclasses.replace(context, original=original)
    output = attention_of(patch)(query, key, value, context)
    if layer is not None:
        layer.settle()
    return output.transpose(1, 2).contiguous(), weights[0] if weights else None


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
    """The mask for `prescored_attention_forward`, not square where causality and padding describe it.

    That is None for causal attention whose queries are the last positions, `[B, 1, 1, Nk]` for the same with
    padding, and otherwise sdpa's `[B, 1, Nq, Nk]`.
    """
    at_the_end = not isinstance(q_offset, Tensor) and kv_offset + kv_length == q_offset + q_length
    if at_the_end and mask_function is causal_mask_function and local_size is None and allow_is_causal_skip:
        if attention_mask is None:
            return None
        real = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        real = torch.nn.functional.pad(real, (0, kv_length - real.shape[1]))
        # while a graph is traced, the content of the mask is unknown
        all_real = not torch.compiler.is_compiling() and bool(real.all())
        return None if all_real else real[:, None, None, :]
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


def register() -> None:
    """Register `attn_implementation="prescored"` with transformers; a second call does nothing."""
    for name, version in (("torch", torch.__version__), ("transformers", transformers.__version__)):
        oldest, newest = _TESTED[name]
        minor = tuple(int(part) for part in version.split(".")[:2])
        tested = " to ".join(dict.fromkeys(".".join(map(str, bound)) for bound in (oldest, newest)))
        if name == "transformers" and minor < oldest:
            raise ImportError(f"transformers must be at least {'.'.join(map(str, oldest))}, got {version}")
        if not oldest <= minor <= newest:
            warnings.warn(f"prescore was tested with {name} {tested}, got {version}", stacklevel=2)
    AttentionInterface.register(NAME, prescored_attention_forward)
    AttentionMaskInterface.register(NAME, prescored_mask)


def attach_patches(
    attached: Mapping[nn.Module, Patch], owners: Iterable[nn.Module], switch: Callable[[], None]
) -> Undo:
    """Let modules that call transformers' attention interface attend by patches; returns the undo.

    `owners` are all modules whose configurations name the attention implementation; `switch` makes these
    configurations, by then copies, name `prescored`.
    """
    register()
    with ExitStack() as undo:
        undo.callback(copy_configs(owners))
        for module, patch in attached.items():
            attach_patch(module, patch)
            undo.callback(detach_patch, module, patch)
            undo.callback(module.register_forward_pre_hook(pass_cache, with_kwargs=True).remove)
        switch()
        return undo.pop_all().close


def default_patch(module: nn.Module, config: Config | None = None, on_unsupported: str = "raise") -> Patch:
    """The patch of a module that was never replaced, made at its first call."""
    if _DEFAULT not in module.__dict__:
        _attach_default(module, config, on_unsupported)
    patch: Patch = getattr(module, _DEFAULT)
    return patch


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _attach_default(module: nn.Module, config: Config | None, on_unsupported: str) -> None:
    """A graph cannot make a patch, so it is made once, while the graph is traced."""
    layer = getattr(module, "layer_idx", None)
    number = layer if isinstance(layer, int) else 0
    patch = Patch(PrescoredAttention(config, on_unsupported), number, n_prefix_tokens(module))
    if module.__dict__.setdefault(_DEFAULT, patch) is patch:  # another thread may have been faster
        module.register_forward_pre_hook(pass_cache, with_kwargs=True)


def n_prefix_tokens(module: nn.Module) -> int:
    """Tokens before the image patches that a module reads; 0 where it reads none."""
    if type(module).__name__ not in PREFIX_TOKENS:
        return 0
    return PREFIX_TOKENS[type(module).__name__] + int(getattr(module.config, "num_register_tokens", 0))


def _eager_attention(
    module: nn.Module,
    context: AttentionContext,
    features: Values,
    weights: list[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """The eager attention of the model's own file, which knows the model's features; adds to `weights`."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise Unsupported(f"exact attention of {context.owner}", context.obstacles)
    form = context.form(query, key)
    key, value = key[:, :, : form.n_keys], value[:, :, : form.n_keys]
    mask = full_mask(form, query.shape[2], query.device)
    if mask is not None and mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
        mask = bias.masked_fill_(~mask, torch.finfo(query.dtype).min)
    options = {"dropout": context.dropout, "scaling": context.scale, **features}
    output, of_layer = eager(module, query, key, value, mask, **options)
    weights.append(of_layer)
    attended: Tensor = output.transpose(1, 2)
    return attended


def _first_head(module: nn.Module, key: Tensor) -> int:
    """The number of the first KV head of this rank, where tensor parallelism spread the heads over ranks."""
    config, n_heads = getattr(module, "config", None), key.shape[1]
    names = ("num_key_value_heads", "num_attention_heads")
    if n_heads >= next(filter(None, (getattr(config, name, None) for name in names)), 0):
        return 0
    meshes = (getattr(parameter, "device_mesh", None) for parameter in module.parameters())
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    if mesh is None:
        return 0
    return n_heads * int(mesh.get_local_rank("tp" if "tp" in (mesh.mesh_dim_names or ()) else None))


def _is_local(module: nn.Module, sliding_window: int | None) -> bool:
    """Whether a layer is local by design; a window or chunk over all positions of the model is none."""
    config, number = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None) or ()
    size = sliding_window
    if size is None and isinstance(number, int) and kinds[number : number + 1] == ["chunked_attention"]:
        size = getattr(config, "attention_chunk_size", None)
    longest = getattr(config, "max_position_embeddings", None)
    return size is not None and (longest is None or size < longest)


class _ConfigCopy(NamedTuple):
    """A configuration that several models may share, and the copy that one model uses while it is replaced."""

    shared: Any
    copy: Any
    before: Values  # the attributes of the copy at first


def copy_configs(modules: Iterable[nn.Module]) -> Undo:
    """Give modules copies of their configurations, nested ones included; returns the undo.

    A configuration names the attention implementation, and models may share one object. What is changed on a copy
    meanwhile goes back to the shared configuration at the end, except for that name. A module has a stack with an
    entry per replacement.
    """
    holders = [module for module in modules if _is_config(vars(module).get("config"))]
    stacks: list[list[_ConfigCopy]] = [vars(module).setdefault(_CONFIG, []) for module in holders]
    by_shared = {id(stack[-1].shared): stack[-1] for stack in stacks if stack}
    for module, stack in zip(holders, stacks, strict=True):
        stack.append(stack[-1] if stack else _copy_config(vars(module)["config"], by_shared))
        if len(stack) == 1:
            vars(module)["config"] = stack[0].copy

    def undo() -> None:
        while holders:
            module = holders.pop()
            copied = vars(module)[_CONFIG].pop()
            if not vars(module)[_CONFIG]:
                del vars(module)[_CONFIG]
                _restore_config(module, copied)

    return undo


def _copy_config(config: Any, by_shared: dict[int, _ConfigCopy]) -> _ConfigCopy:
    """The copy of a configuration, made where there is none yet; nested configurations are copied too."""
    if id(config) not in by_shared:
        made = copy.copy(config)
        for name in getattr(config, "sub_configs", {}):
            nested = vars(config).get(name)
            if _is_config(nested):
                vars(made)[name] = _copy_config(nested, by_shared).copy
        by_shared[id(config)] = _ConfigCopy(config, made, dict(vars(made)))
    return by_shared[id(config)]


def _restore_config(module: nn.Module, copied: _ConfigCopy) -> None:
    """Give a module its shared configuration back, with what was changed meanwhile."""
    if vars(module).get("config") is copied.copy:  # else the user has set another one
        vars(module)["config"] = copied.shared
    for name in {*copied.before, *vars(copied.copy)} - {_IMPLEMENTATION}:
        if name not in vars(copied.copy):
            vars(copied.shared).pop(name, None)
        elif name not in copied.before or vars(copied.copy)[name] is not copied.before[name]:
            vars(copied.shared)[name] = vars(copied.copy)[name]


def _is_config(value: object) -> bool:
    return hasattr(type(value), "sub_configs") and hasattr(value, _IMPLEMENTATION)
