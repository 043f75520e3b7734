"""Inference servers. `register_vllm` is the entry point of vLLM's plugin; nothing here imports a server."""

from __future__ import annotations

import json
import logging
import os

from prescore.config import Routed
from prescore.routed.native import library

VARIABLE = "PRESCORE_VLLM"


def vllm_config() -> Routed | None:
    """What `PRESCORE_VLLM` asks for: unset or 0 = nothing, 1 = the default, or a JSON object of its settings."""
    text = os.environ.get(VARIABLE, "").strip()
    if text in ("", "0"):
        return None
    if text == "1":
        return Routed()
    try:
        settings = json.loads(text)
    except json.JSONDecodeError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"{VARIABLE} must be 0, 1 or a JSON object with settings of Routed, got {text!r}")
    return Routed(**settings)


def register_vllm() -> None:
    """Replace vLLM's CPU attention backend, if `PRESCORE_VLLM` asks for it. vLLM calls this in every process."""
    config = vllm_config()
    if config is None:
        return
    logger = logging.getLogger("vllm.prescore")
    if library.loaded_level() == library.NO_LEVEL:
        logger.warning("prescore is not used: %s", library.describe_native())
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "prescore.serving.vllm.PrescoredBackend")
    logger.info("prescore: sequences longer than %d keys use %r", config.exact_until, config)
