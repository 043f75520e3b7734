"""Whether kernels compute on a device what plain torch computes there: asked once, before `auto` takes them."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from prescore.call import Call
from prescore.config import Routed
from prescore.ops.operators import pick_operator
from prescore.routed.attention import attend_routed
from prescore.types import Attended

N_KEYS = 1300
CALLS = {"a prompt": N_KEYS, "a chunk of a prompt": 100, "a step": 1}
"""The newest queries of the calls."""
MAX_FLIPPED = 0.02
"""Share of queries that may read another key: int8 logits at the threshold are rounded in another order."""


@cache
def disagreement(
    device: torch.device, dtype: torch.dtype, dim: int, value_dim: int, heads_per_kv: int, cluster_size: int
) -> str:
    """How the kernels err on a device, in words; empty = they agree with plain torch in three small calls.

    The first call with such sizes compiles the kernels. A disagreement is warned of once.
    """
    query, key, value = _inputs(device, dtype, dim, value_dim, heads_per_kv)
    config = Routed(min_weight=1 / 64, cluster_size=cluster_size, chunk_size=2 * cluster_size, exact_until=0)
    for name, n_query in CALLS.items():
        newest = query[:, :, -n_query:]
        try:
            error = _difference(*(_attend(newest, key, value, config, backend) for backend in ("triton", "plain")))
        except RuntimeError as failure:  # a kernel that does not compile or start
            error = str(failure).partition("\n")[0]
        if error:
            reason = f"the kernels differ from plain torch on {device} in {name}: {error}"
            warnings.warn(
                f"attention runs exactly: {reason}. Please report this with the output of `prescore info`.",
                RuntimeWarning,
                stacklevel=2,
            )
            return reason
    return ""


def _inputs(
    device: torch.device, dtype: torch.dtype, dim: int, value_dim: int, heads_per_kv: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys in groups, of which queries look for single ones; drawn on the CPU, so that devices get the same."""
    draw = torch.Generator("cpu").manual_seed(0)
    options: dict[str, Any] = {"generator": draw, "dtype": torch.float32, "device": "cpu"}
    key, value = (torch.randn(1, 2, N_KEYS, size, **options) for size in (dim, value_dim))
    group = torch.arange(N_KEYS, dtype=torch.int64, device="cpu") * 16 // N_KEYS
    key = key + 2 * torch.randn(16, dim, **options)[group]
    target = key.repeat_interleave(heads_per_kv, dim=1)
    looked_for = torch.randint(N_KEYS, (N_KEYS,), generator=draw, dtype=torch.int64, device="cpu")
    query = 0.5 * target[:, :, looked_for] + torch.randn(target.shape, **options)
    return query.to(device, dtype), key.to(device, dtype), value.to(device, dtype)


def _attend(query: Tensor, key: Tensor, value: Tensor, config: Routed, backend: str) -> tuple[Attended, float]:
    """Output and lse of the newest queries, and the keys that they read on average."""
    call = Call(
        query, key, value, True, query.shape[-1] ** -0.5, pick_operator(query, "plain"),
        query_start=N_KEYS - query.shape[2], backend=backend,
    )  # fmt: skip
    with torch.no_grad():
        result = attend_routed(call, config)
    return result.attended, result.count_reads().keys


def _difference(got: tuple[Attended, float], wanted: tuple[Attended, float]) -> str:
    """What differs beyond rounding; empty = nothing."""
    eps = torch.finfo(wanted[0].output.dtype).eps
    budget = max(8 * eps, 1e-4)  # products of float32 may run as three of TF32
    for name in ("output", "lse"):
        tensor, right = (getattr(attended, name).double().cpu() for attended, _ in (got, wanted))
        errors = (tensor - right).abs() / right.abs().amax().clamp_min(1.0)
        wrong = ~(errors <= budget)  # NaN is wrong
        wrong = wrong.flatten(3).any(-1) if wrong.ndim == 4 else wrong
        if wrong.double().mean() > MAX_FLIPPED:
            return f"the {name} of {int(wrong.sum())} of {wrong.numel()} queries, largest error {errors.max():.2g}"
    if abs(got[1] - wanted[1]) > 0.01 * wanted[1]:
        return f"{got[1]:.1f} keys read in place of {wanted[1]:.1f}"
    return ""
