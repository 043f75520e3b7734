"""What is compared: exact attention, local-only attention, pre-scored configurations and baselines, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from prescore import checks
from prescore.attention.exact import resolve_scale
from prescore.attention.grid import Queries, leaf_parts
from prescore.attention.parts import attend_parts
from prescore.baselines import BASELINES
from prescore.config import PrescoreConfig
from prescore.evaluation.attention_cost import baseline_rows, exact_rows, leaf_rows
from prescore.pipeline import attend_counting, prescored_attention
from prescore.registry import list_scorers
from prescore.types import Aux

KINDS = ("exact", "local", "prescored", "baseline")
SINKS = 4
"""First tokens that a "+ sinks" method keeps."""


@dataclass(frozen=True)
class Method:
    """One way to compute causal attention, in JSON values.

    Attributes:
        label: What tables call it.
        kind: `exact`, `local` (causal leaves, far context dropped), `prescored` or `baseline`.
        settings: `local`: `leaf`; `prescored`: the fields of a `PrescoreConfig`; `baseline`: `name` and its
            arguments.
        axes: What the method is in the terms of an experiment (top_k, sample size, ...), for its table.
    """

    label: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.one_of("kind", self.kind, KINDS)

    def describe(self) -> dict[str, Any]:
        """Everything that identifies the method, for a record."""
        return {
            "label": self.label,
            "kind": self.kind,
            "settings": dict(self.settings),
            "axes": dict(self.axes),
        }

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, seed: int) -> Tensor:
        """Causal attention `[B, Hq, N, D] -> [B, Hq, N, Dv]`, nothing computed beside the output."""
        if self.kind == "exact":
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
            )
        if self.kind == "baseline":
            return self._baseline()(query, key, value, is_causal=True, scale=scale, generator=seed).output  # type: ignore[no-any-return]
        if self.kind == "local":
            return leaves_alone(query, key, value, leaf=self.settings["leaf"], scale=scale)
        return self._prescored(query, key, value, scale, seed, with_aux=False)  # type: ignore[no-any-return]

    def attend_counting(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, seed: int
    ) -> tuple[Tensor, float | None]:
        """`attend`, and rows per query where only the call can tell: heads of routed attention differ."""
        if self.kind != "prescored":
            return self.attend(query, key, value, scale=scale, seed=seed), None
        config = PrescoreConfig.from_dict(dict(self.settings))
        return attend_counting(query, key, value, config, is_causal=True, scale=scale, generator=seed)

    def rows_per_query(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, seed: int
    ) -> float | None:
        """Key and stand-in rows that a query meets, on average over positions; None where not counted."""
        length = query.shape[2]
        if self.kind == "exact":
            return exact_rows(length)
        if self.kind == "baseline":
            settings = dict(self.settings)
            return baseline_rows(settings.pop("name"), length, settings)
        if self.kind == "local":
            return leaf_rows(length, self.settings["leaf"])
        aux: Aux = self._prescored(query, key, value, scale, seed, with_aux=True)[1]
        return float(aux.stats["rows_per_query"])

    def _prescored(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, seed: int, *, with_aux: bool
    ) -> Any:
        return prescored_attention(
            query,
            key,
            value,
            config=PrescoreConfig.from_dict(dict(self.settings)),
            is_causal=True,
            scale=scale,
            generator=seed,
            return_aux=with_aux,
        )

    def _baseline(self) -> Callable[..., Any]:
        settings = dict(self.settings)
        run = BASELINES[settings.pop("name")]
        return lambda *tensors, **keywords: run(*tensors, **settings, **keywords)


def exact() -> Method:
    """The reference: softmax over every key."""
    return Method("exact", "exact")


def local(leaf: int) -> Method:
    """The floor: the same exact leaves, far context dropped."""
    checks.integer("leaf", leaf, minimum=1)
    return Method("local only", "local", {"leaf": leaf})


def prescored(label: str, config: PrescoreConfig, **axes: Any) -> Method:
    """Pre-scored attention or HyperAttention."""
    return Method(label, "prescored", config.to_dict(), axes)


def baseline(label: str, name: str, settings: Mapping[str, Any], **axes: Any) -> Method:
    """One of `prescore.baselines`."""
    checks.one_of("baseline", name, tuple(BASELINES))
    return Method(label, "baseline", {"name": name, **settings}, axes)


def method_names() -> list[str]:
    """Names that `named` understands."""
    return ["exact", "local", "default", "hyper", "random", *list_scorers(), *BASELINES]


def named(
    name: str,
    *,
    leaf: int,
    top_k: int | float | None = 256,
    overrides: Mapping[str, Any] | None = None,
    window: int | None = None,
) -> Method:
    """A method by the name used on the command line, at a budget.

    `default` is `PrescoreConfig()` with the given leaves; `hyper` and scorer names are the paper's algorithms;
    `random` is uniform selection with the first tokens kept; the rest are baselines at the same far budget.

    Args:
        name: One of `method_names()`.
        leaf: Exact causal leaves, chunks and the local part of baselines.
        top_k: Far keys kept by scorers and baselines; `default` and `hyper` do not use it.
        overrides: Fields of the configuration to change (`default`, `hyper`, `random`, scorers).
        window: `streaming`: keys in the window; None = leaf / 2 + top_k, the same rows per query.
    """
    checks.one_of("method", name, method_names())
    changes = {"min_seq_len": leaf, **(overrides or {})}
    if name in ("exact", "local"):
        return exact() if name == "exact" else local(leaf)
    if name in BASELINES:
        return baseline(name, name, _baseline_settings(name, leaf, top_k, window), top_k=top_k)
    if name == "default":
        config = PrescoreConfig.from_dict({**PrescoreConfig().to_dict(), **{"chunk_size": leaf, **changes}})
        return prescored("default", config)
    if name == "hyper":
        return prescored("HyperAttention", PrescoreConfig.hyper(**changes), top_k=0)
    if name == "random":
        config = PrescoreConfig.paper("uniform", top_k, **{"sinks": SINKS, "inner": "exact", **changes})
        return prescored("random + sinks", config, top_k=top_k)
    return prescored(name, PrescoreConfig.paper(name, top_k, **changes), scorer=name, top_k=top_k)


def _baseline_settings(name: str, leaf: int, top_k: int | float | None, window: int | None) -> dict[str, Any]:
    if not isinstance(top_k, int) or isinstance(top_k, bool):
        raise ValueError(f"top_k must be a count of keys for the baseline {name!r}, got {top_k!r}")
    checks.integer("top_k", top_k, minimum=0)
    if name == "streaming":
        return {"window": window or leaf // 2 + max(1, top_k - SINKS), "sinks": SINKS}
    if name == "performer":
        return {"n_features": max(1, top_k)}
    if name == "reformer":
        return {"chunk_size": max(1, top_k // 8), "n_rounds": 4}
    return {"budget": top_k, "chunk_size": leaf}


def leaves_alone(query: Tensor, key: Tensor, value: Tensor, *, leaf: int, scale: float | None) -> Tensor:
    """Exact causal attention inside the leaves of the recursion, and nothing beyond them."""
    batch, heads, length = key.shape[:3]
    queries = Queries(batch, heads, query.shape[1] // heads, length, 0, query.device)
    parts = leaf_parts(leaf, queries, length, None, query.dtype)
    return attend_parts(query, key, value, parts, scale=resolve_scale(scale, query)).output
