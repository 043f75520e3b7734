"""timm: every architecture whose blocks use timm's plain attention class (ViT, DeiT, DINOv2, SigLIP, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from prescore.integrations.attention import Attend, AttentionContext
from prescore.integrations.compile import attention_of
from prescore.integrations.patch import Undo, patches, refuse, replace_forwards

# by name, so that this file can be imported without timm
_PLAIN = "timm.layers.attention.Attention"
# pooling heads read the patches once, with a query of their own, and stay exact
_POOLING = ("AttentionPoolLatent", "AttentionPool2d", "RotAttentionPool2d", "AttentionPoolPrr")


def detect(model: nn.Module) -> bool:
    """Whether the model comes from timm."""
    return any(base.__module__.split(".")[0] == "timm" for base in type(model).__mro__)


def layers(model: nn.Module) -> dict[int, str]:
    """Names of the model's plain attention layers; refuses models that also mix tokens in another way."""
    names = [name for name, module in model.named_modules() if _class_name(module) == _PLAIN]
    others = [_class_name(module) for module in model.modules() if _mixes_tokens(module)]
    others = [name for name in others if name != _PLAIN]
    if others:
        raise refuse(model, others, "its token mixing must be timm's plain Attention class")
    if not names:
        blocks = [type(module).__name__ for module in model.children()]
        raise refuse(model, blocks, "it must have blocks that use timm's plain Attention class")
    return dict(enumerate(names))


def replace_attention(model: nn.Module, functions: Mapping[int, Attend]) -> Undo:
    """Let layer `number` attend by `functions[number]`; returns the undo."""
    names = layers(model)
    modules = [model.get_submodule(name) for name in names.values()]
    return replace_forwards(
        modules, functions, _forward, lambda number: tokens_before_patches(model, names[number])
    )


def tokens_before_patches(model: nn.Module, name: str) -> int:
    """Tokens before the image patches, as the nearest module around the layer says."""
    parts = name.split(".")
    for depth in range(len(parts), -1, -1):
        around = model.get_submodule(".".join(parts[:depth]))
        count = getattr(around, "num_prefix_tokens", None)
        if isinstance(count, int):
            return count
        # PiT has no attribute for their number
        tokens = getattr(around, "cls_token", None)
        if isinstance(tokens, nn.Parameter):
            return int(tokens.shape[1])
    return 0


def _forward(self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """The forward of timm with another attention function; norms, gate, projection and dropout stay."""
    patch = patches(self)[-1]
    gate = None if self.gate is None else self.gate(x).sigmoid()
    packed = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, self.head_dim)
    query, key, value = packed.permute(2, 0, 3, 1, 4)
    context = AttentionContext(
        layer=patch.layer,
        n_prefix=patch.n_prefix,
        scale=self.scale,
        # as in torch, a mask of two dimensions is [queries, keys] for the whole batch
        mask=attn_mask[None, None] if attn_mask is not None and attn_mask.ndim == 2 else attn_mask,
        is_causal=is_causal,
        dropout=self.attn_drop.p if self.training else 0.0,
        owner=type(self).__name__,
    )
    attended = attention_of(patch)(self.q_norm(query), self.k_norm(key), value, context)
    output = self.norm(attended.transpose(1, 2).flatten(2))
    output = output if gate is None else output * gate
    projected: Tensor = self.proj_drop(self.proj(output))
    return projected


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _mixes_tokens(module: nn.Module) -> bool:
    name = type(module).__name__
    return ("Attention" in name or "Attn" in name) and name not in _POOLING
