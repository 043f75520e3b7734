"""The default as a kernel of the `kernels` library, for `transformers serve` and `transformers chat`.

These refuse unknown attention names, but load kernels. Of a kernel that exports `flash_attn_forward` and
`supports_flash_attn`, transformers calls the first as it calls any attention function of its own. The folder
`kernels/` of the repository holds the layout that the library wants; it imports this module.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from prescore.integrations.transformers.attention import default_patch, prescored_attention_forward
from prescore.integrations.transformers.cache import NAMES


def supports_flash_attn(*_: Any, **__: Any) -> bool:
    """Whether `flash_attn_forward` can be called; where it cannot route, it attends exactly."""
    return True


def flash_attn_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer in transformers' calling convention.

    Decode steps route where the model's cache is a `DynamicCache`: it gets a key index, at the second call of a
    layer at the latest. What `Routed` cannot honour, as sliding windows, runs exactly.
    """
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if isinstance(name, str):
        NAMES.add(name)
    default_patch(module, on_unsupported="exact")
    return prescored_attention_forward(module, query, key, value, attention_mask, **options)
