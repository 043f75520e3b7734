"""ChatGLM2 and ChatGLM3: remote-code models with a `core_attention` module in every layer.

Their layout is `[sequence, batch, heads, dim]`, keys and values of a multi-query group are repeated by the caller,
and a mask is True where nothing may be seen. The model's code is loaded by transformers only if its user passes
`trust_remote_code=True`; here nothing of it is imported, the modules are recognised by their structure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from prescore.config import PrescoreConfig
from prescore.decoding.follow import FollowedSelection
from prescore.errors import Unsupported
from prescore.integrations.following import attend_following
from prescore.integrations.masked import inexpressible
from prescore.integrations.masks import read_mask


def detect(model: nn.Module) -> bool:
    """Whether the model has layers with `self_attention.core_attention`."""
    return bool(_owners(model))


def layers(model: nn.Module) -> list[str]:
    """Names of the `core_attention` modules, in order."""
    return [f"{name}.core_attention" for name in _owners(model)]


def attach(model: nn.Module, configs: dict[int, PrescoreConfig]) -> Callable[[], None]:
    """Replace the chosen `core_attention` modules; returns the undo."""
    owners = list(_owners(model).values())
    n_heads, n_groups = _heads(model)
    before: dict[int, Any] = {number: owners[number].core_attention for number in configs}
    for number, config in configs.items():
        owners[number].core_attention = PrescoredCoreAttention(before[number], config, n_heads, n_groups)

    def undo() -> None:
        for number, module in before.items():
            owners[number].core_attention = module

    return undo


def stats(model: nn.Module) -> dict[int, dict[str, Any]]:
    """What each replaced layer did in its last call."""
    found = {}
    for number, owner in enumerate(_owners(model).values()):
        core = owner.core_attention
        if isinstance(core, PrescoredCoreAttention) and core.stats:
            found[number] = dict(core.stats)
    return found


class PrescoredCoreAttention(nn.Module):
    """Stands where a ChatGLM layer has its `core_attention`.

    Args:
        original: The module it replaces; runs what cannot be honoured, when the config allows that.
        config: How keys are scored, selected and attended to.
        n_heads: Query heads; the caller repeats key heads to as many.
        n_groups: Key heads before that.
    """

    def __init__(self, original: nn.Module, config: PrescoreConfig, n_heads: int, n_groups: int) -> None:
        super().__init__()
        self.original = original
        self.config = config
        self.n_heads = n_heads
        self.n_groups = n_groups
        self.stats: dict[str, Any] = {}
        self.selection = FollowedSelection()
        self.train(original.training)  # a new module is in training mode, whatever its model is in

    def forward(
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Tensor | None
    ) -> Tensor:
        """`[Nq, B, H, D]` and `[Nk, B, H, D]` twice -> `[Nq, B, H * D]`.

        Args:
            query_layer: Queries of the newest positions.
            key_layer: All keys so far, heads repeated.
            value_layer: All values so far, likewise.
            attention_mask: None, or bool `[B, 1, Nq, Nk]`, True = hidden.
        """
        if query_layer.shape[2] != self.n_heads:
            raise Unsupported(
                "pre-scored attention in ChatGLM",
                [f"queries must be [sequence, batch, {self.n_heads} heads, dim], got {tuple(query_layer.shape)}"],
            )
        query, key, value = (layer.permute(1, 2, 0, 3) for layer in (query_layer, key_layer, value_layer))
        key, value = self._own_heads(key), self._own_heads(value)
        n_query, n_keys = query.shape[2], key.shape[2]
        form = read_mask(_seen(attention_mask), n_query=n_query, n_keys=n_keys, is_causal=True)
        reasons = inexpressible(form)
        self.stats = {"mask": form.kind, "queries": n_query, "keys": n_keys}
        if reasons and self.config.on_unsupported == "raise":
            raise Unsupported("pre-scored attention in ChatGLM", reasons)
        if reasons:
            self.stats["path"] = f"exact: {'; '.join(reasons)}"
            exact: Tensor = self.original(query_layer, key_layer, value_layer, attention_mask)
            return exact
        output = attend_following(
            self.selection,
            query,
            key,
            value,
            form,
            config=self.config,
            scale=query.shape[-1] ** -0.5,
            stats=self.stats,
            dropout=self._dropout(),
        )
        return output.permute(2, 0, 1, 3).flatten(2)

    def _own_heads(self, tensor: Tensor) -> Tensor:
        """Undo the caller's repetition of key heads, so that each is scored once."""
        return tensor[:, :: max(1, tensor.shape[1] // self.n_groups)]

    def _dropout(self) -> float:
        return getattr(getattr(self.original, "attention_dropout", None), "p", 0.0) if self.training else 0.0


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold a `core_attention`, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "self_attention"
        and isinstance(getattr(module, "core_attention", None), nn.Module)
    }


def _heads(model: nn.Module) -> tuple[int, int]:
    """Query heads and key heads, from the model's configuration."""
    config: Any = getattr(model, "config", None)
    n_heads = getattr(config, "num_attention_heads", None)
    if n_heads is None:
        raise Unsupported(f"apply on {type(model).__name__}", ["its config does not say num_attention_heads"])
    if not getattr(config, "multi_query_attention", False):
        return n_heads, n_heads
    n_groups = config.multi_query_group_num
    if n_groups < 1 or n_heads % n_groups:
        raise ValueError(f"config.multi_query_group_num must divide the {n_heads} heads, got {n_groups}")
    return n_heads, n_groups


def _seen(attention_mask: Tensor | None) -> Tensor | None:
    """True = attend, and nothing for padded queries.

    ChatGLM lets padded queries see everything, the future included, to keep their softmax defined. Such a row is
    known by seeing the last key although it is not the last; nobody reads its output.
    """
    if attention_mask is None:
        return None
    seen = ~attention_mask.bool()
    n_query = seen.shape[-2]
    if n_query > 1:
        padded = seen[..., -1:].clone()
        padded[..., -1, :] = False
        seen = seen & ~padded
    return seen
