"""The one door into transformers: the attention and mask functions that it calls under the name `prescored`.

Who sits on a module (see `prescore.integrations.patch`) is asked at every call. A module without a seat attends
with the default configuration, so that `attn_implementation="prescored"` means something by itself. Attention and
mask are registered together, because transformers gives a name without a mask function no mask at all: padding
would be ignored in silence.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from prescore.config import Config
from prescore.errors import PrescoreError, Unsupported
from prescore.integrations.attention import AttentionContext, PrescoredAttention
from prescore.integrations.compile import attend_by
from prescore.integrations.masks import full_mask
from prescore.integrations.patch import Patch, Undo, attach_patch, detach_patch, patches
from prescore.integrations.transformers.cache import layer_of
from prescore.types import Values

NAME = "prescored"
_DEFAULT = "_prescore_default_seat"
_FOREIGN = {
    "softcap": "its logits are soft-capped",
    "s_aux": "it has learned attention sinks",
    "position_bias": "it adds a position bias to the logits",
    "cache": "the paged cache keeps keys in pages",
}


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
    """Attention of one layer in transformers' calling convention.

    Args:
        module: The attention module.
        query: `[B, Hq, Nq, D]`, after rotation.
        key: `[B, Hkv, Nk, D]`, the cache's content included.
        value: `[B, Hkv, Nk, Dv]`.
        attention_mask: What `prescored_mask` made, or a mask of the caller's.
        dropout: Probability of dropping an attention weight; transformers passes 0 outside training.
        scaling: Factor of the logits.
        is_causal: Overrides the module's own flag.
        **features: Of single models.

    Returns:
        `[B, Nq, Hq, Dv]`, and the weights where a model's own eager attention had to run.
    """
    cache, key = layer_of(key)
    sitting = patches(module)
    patch = sitting[-1] if sitting else default_patch(module)
    obstacles = [reason for name, reason in _FOREIGN.items() if features.get(name) is not None]
    context = AttentionContext(
        layer=patch.layer,
        n_prefix=patch.n_prefix,
        scale=scaling,
        mask=attention_mask,
        is_causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        dropout=dropout,
        owner=type(module).__name__,
        is_local=_is_local(module, features.get("sliding_window")),
        cache=cache,
    )
    if features.get("output_attentions"):
        obstacles.append("output_attentions=True asks for weights that are never formed")
    eager = _Eager(module, context, features, obstacles) if obstacles else None
    context = dataclasses.replace(context, obstacles=tuple(obstacles), own=eager)
    output = attend_by(patch, query, key, value, context)
    return output.transpose(1, 2).contiguous(), None if eager is None else eager.weights


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
        # a graph that is being traced cannot ask what the mask holds
        known = not torch.compiler.is_compiling() and bool(real.all())
        return None if known else real[:, None, None, :]
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
    """Make `attn_implementation="prescored"` known to transformers, and check that it honours padding."""
    if AttentionInterface._global_mapping.get(NAME) is prescored_attention_forward:
        return
    _check_padding(prescored_attention_forward, prescored_mask)
    AttentionInterface.register(NAME, prescored_attention_forward)
    AttentionMaskInterface.register(NAME, prescored_mask)


def replace_at(places: Mapping[nn.Module, Patch], around: Iterable[nn.Module], switch: Callable[[], None]) -> Undo:
    """Let modules attend by what sits on them; returns the undo.

    Args:
        places: The new seats of modules that ask transformers' attention interface what to run.
        around: All modules whose configurations name what to run.
        switch: Makes these configurations, which are the model's own by then, name ours.
    """
    taken = list(places.items())
    undo_configs = take_own_configs(around)
    for module, patch in taken:
        attach_patch(module, patch)

    def undo() -> None:
        for module, patch in taken:
            detach_patch(module, patch)
        taken.clear()
        undo_configs()

    try:
        switch()
    except BaseException:
        undo()
        raise
    return undo


def default_patch(module: nn.Module, config: Config | None = None, on_unsupported: str = "raise") -> Patch:
    """Of a module that was never replaced, made at its first call and kept for its memory."""
    _attach_default(module, config, on_unsupported)
    patch: Patch = getattr(module, _DEFAULT)
    return patch


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _attach_default(module: nn.Module, config: Config | None, on_unsupported: str) -> None:
    """No graph can make a seat, so that it is made once, while the graph is traced."""
    if _DEFAULT not in module.__dict__:
        layer = getattr(module, "layer_idx", None)
        number = layer if isinstance(layer, int) else 0
        patch = Patch(PrescoredAttention(config, on_unsupported), number, n_prefix_tokens(module))
        module.__dict__.setdefault(_DEFAULT, patch)  # another thread may have been faster


@dataclass(eq=False)
class _Eager:
    """The attention of the model's own file, which knows the model's own features."""

    module: nn.Module
    context: AttentionContext
    features: Values
    obstacles: Sequence[str]
    weights: Tensor | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionContext.own`; keeps the weights."""
        eager = getattr(sys.modules[type(self.module).__module__], "eager_attention_forward", None)
        if eager is None:
            raise Unsupported(f"exact attention of {self.context.owner}", self.obstacles)
        form = self.context.form(query, key)
        key, value = key[:, :, : form.n_keys], value[:, :, : form.n_keys]
        mask = full_mask(form, query.shape[2], query.device)
        if mask is not None and mask.dtype == torch.bool:
            shown = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
            mask = shown.masked_fill_(~mask, torch.finfo(query.dtype).min)
        options = {"dropout": self.context.dropout, "scaling": self.context.scale, **self.features}
        output: Tensor
        output, self.weights = eager(self.module, query, key, value, mask, **options)
        return output.transpose(1, 2)


def _is_local(module: nn.Module, sliding_window: int | None) -> bool:
    """Whether a layer is local by design; a window that spans all the model can hold is none."""
    longest = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    return sliding_window is not None and (longest is None or sliding_window < longest)


def _check_padding(attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """A tiny call whose padded key would change the result if it were seen."""
    module = nn.Module()
    real = torch.tensor([[False, True, True]])
    seen = mask(batch_size=1, q_length=3, kv_length=3, attention_mask=real, device="cpu")
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, 3, 4, generator=generator) for _ in range(3))
    other = value.clone()
    other[:, :, 0] += 100.0
    first, second = (attention(module, query, key, v, seen)[0][:, 1:] for v in (value, other))
    if not torch.equal(first, second):
        raise PrescoreError("the registered mask function does not hide padding")


# Configurations of transformers that belong to one model alone while its attention is replaced.
#
# A configuration names the attention that modules ask for, and several models may share one object. So the modules
# of a replaced model get copies; what is changed on these meanwhile goes back to the shared ones at the end,
# but for
# the name of the attention, which is as before.

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


# Which attention classes of transformers read patches, and how many tokens come before those.

PREFIX: dict[str, Callable[[Any], int]] = {
    "ViTAttention": lambda config: 1,
    "DeiTAttention": lambda config: 2,
    "Dinov2Attention": lambda config: 1,
    "Dinov2WithRegistersAttention": lambda config: 1 + int(config.num_register_tokens),
    "CLIPAttention": lambda config: 1,
    "SiglipAttention": lambda config: 0,
    "ViTMSNAttention": lambda config: 1,
    "IJepaAttention": lambda config: 0,
    "DINOv3ViTAttention": lambda config: 1 + int(config.num_register_tokens),
}
"""Attention class -> tokens before the patches; all call transformers' attention interface."""


def n_prefix_tokens(module: nn.Module) -> int:
    """Tokens before the patches that a module reads; 0 where it reads none."""
    count = PREFIX.get(type(module).__name__)
    return 0 if count is None else count(module.config)
