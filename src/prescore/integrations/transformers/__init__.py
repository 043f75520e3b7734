"""Hugging Face transformers: importing this package registers `attn_implementation="prescored"`."""

from __future__ import annotations

from prescore.integrations.transformers.attention import register as register
from prescore.integrations.transformers.cache import PrescoredCache as PrescoredCache
from prescore.integrations.transformers.parallel import generate_context_parallel as generate_context_parallel

register()
