"""Which backend runs the far keys of a `Routed`: `native`, `triton` or `plain`."""

from __future__ import annotations

from torch import Tensor

from prescore.config import Routed
from prescore.ops.native import library
from prescore.routed import native, triton
from prescore.routed.layout import make_layout, routes


def pick_far_backend(name: str, query: Tensor, value_dim: int, cluster_size: int) -> str:
    """What runs under `backend=name` with such queries (or keys); `auto` takes native code or plain torch."""
    if name in ("auto", "native") and native.can_run(query, value_dim, cluster_size):
        return "native"
    if name == "triton" and not triton.unsupported(query, value_dim, cluster_size):
        return "triton"
    return "plain"


def unsupported(name: str, query: Tensor, value_dim: int, config: Routed) -> list[str]:
    """Reasons why the backend of this name, `native` or `triton`, cannot run a call; empty means it can."""
    if name == "native":
        return native.unsupported(query, value_dim, config)
    return triton.unsupported(query, value_dim, make_layout(1, 1, causal=True, config=config).cluster_size)


def exact_reason(
    query: Tensor, key: Tensor, value: Tensor, config: Routed, *, is_causal: bool, ranks: int = 1
) -> str:
    """Why `auto` runs a call without dropout exactly that could route: routing would be slower. Empty = it routes.

    Plain torch routes more slowly than exact attention. It runs where it is named, with dropout, where exact
    attention is slower still, and for configurations that route short texts, where time does not matter. The
    Triton backend runs where it is named: it has not been run on a GPU, and docs/gpu.md predicts that exact
    attention is mostly faster there. Each of the `ranks` has as many queries and keys.
    """
    n_query, n_keys = query.shape[2] * ranks, key.shape[2] * ranks
    if config.exact_until < Routed.exact_until or not routes(config, n_query, n_keys, is_causal=is_causal):
        return ""
    if query.device.type == "cuda":
        return "on GPUs backend='triton' must be named: it has not been measured there"
    reasons = native.unsupported(query, value.shape[-1], config)
    if not reasons:
        return ""
    return f"native code: {reasons[-1] if library.loaded_level() == library.NO_LEVEL else reasons[0]}"
