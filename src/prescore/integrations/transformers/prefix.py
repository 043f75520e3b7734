"""Which attention classes of transformers read patches, and how many tokens come before those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

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
