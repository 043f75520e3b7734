"""prescore as a kernel: `transformers serve --attn-implementation prescore/attention`. See docs/serving.md."""

from prescore.serving.transformers import flash_attn_forward, supports_flash_attn

__all__ = ["flash_attn_forward", "supports_flash_attn"]
