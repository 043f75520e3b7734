"""What a vision transformer's attention layer does with its queries, keys and values, whatever library it is from.

Prefix tokens (class, distillation, registers) are the first tokens of the sequence, so they are kept by asking
for at least as many sinks. Both libraries come through here with the same seeds, so they give the same logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from prescore.config import PrescoreConfig
from prescore.errors import Unsupported
from prescore.integrations.apply import find_adapter
from prescore.integrations.dropout import dropping
from prescore.integrations.layers import Layers, Overrides, configs_by_layer
from prescore.integrations.masks import MaskForm, full_mask, read_mask
from prescore.rng import Streams


@dataclass(frozen=True, eq=False)
class Situation:
    """What a layer knows beside its queries, keys and values.

    Attributes:
        layer: The layer's number.
        n_prefix: Tokens at the front that are no patches.
        scale: Factor of the logits; None = `D ** -0.5`.
        mask: The model's own mask, as `read_mask` takes it.
        is_causal: Whether the layer asked for causal attention.
        dropout: Probability of dropping an attention weight, 0 outside training.
    """

    layer: int
    n_prefix: int = 0
    scale: float | None = None
    mask: Tensor | None = None
    is_causal: bool = False
    dropout: float = 0.0


Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Situation], Tensor]
"""`[B, H, N, D]` three times and the situation in, output `[B, H, N, D]` out."""


class VisionAdapter(Protocol):
    """An adapter that lets any function take the place of a layer's attention."""

    def layers(self, model: nn.Module) -> list[str]:
        """Names of the attention layers in order."""

    def replace_attention(self, model: nn.Module, functions: Mapping[int, Attend]) -> Callable[[], None]:
        """Let `functions[number]` be the attention of layer `number`; returns the undo."""


@dataclass(frozen=True)
class PrescoredLayer:
    """Pre-scored attention as one layer runs it.

    `protect_prefix=False` leaves the class token and its like to their scores, for comparison only.
    """

    config: PrescoreConfig
    protect_prefix: bool = True
    seed: int = 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, situation: Situation) -> Tensor:
        """Attend; what cannot be honoured raises, or runs exactly with `on_unsupported="exact"`."""
        from prescore.pipeline import prescored_attention

        form = read_mask(
            situation.mask, n_query=query.shape[2], n_keys=key.shape[2], is_causal=situation.is_causal
        )
        valid = form.valid
        if form.kind == "other":
            valid = padded_both_ways(form.mask)
            form = form if valid is None else MaskForm("full", form.n_keys)
        reasons = []
        if form.kind not in ("full", "causal"):
            reasons.append(f"its attention mask is of the kind {form.kind!r}; only padding and causal masks work")
        if reasons and self.config.on_unsupported == "raise":
            raise Unsupported(f"pre-scored attention in layer {situation.layer}", reasons)
        if reasons:
            return attend_exactly(query, key, value, situation)
        attended = prescored_attention(
            query,
            key,
            value,
            config=self.for_prefix(situation.n_prefix),
            is_causal=form.kind == "causal",
            key_padding_mask=None if valid is None else valid.expand(key.shape[0], -1),
            scale=situation.scale,
            generator=layer_seed(self.seed, situation.layer),
            **dropping(situation.dropout),
        )
        return attended if isinstance(attended, Tensor) else attended[0]

    def for_prefix(self, n_prefix: int) -> PrescoreConfig:
        """The configuration with room for the prefix tokens among the sinks."""
        if not self.protect_prefix or self.config.sinks >= n_prefix:
            return self.config
        return self.config.replace(sinks=n_prefix)


def padded_both_ways(mask: Tensor | None) -> Tensor | None:
    """Real tokens `[B, N]` of a mask that also blinds padded queries, as NaFlex makes it; None for another mask.

    What a padded query reads is nobody's business: its output is seen by padded queries alone.
    """
    if mask is None or mask.dtype != torch.bool or mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        return None
    seen = mask[:, 0]
    real = seen.any(dim=1)
    return real if torch.equal(seen, real[:, None, :] & real[:, :, None]) else None


def attend_exactly(query: Tensor, key: Tensor, value: Tensor, situation: Situation) -> Tensor:
    """The attention the layer would have run by itself."""
    form = read_mask(situation.mask, n_query=query.shape[2], n_keys=key.shape[2], is_causal=situation.is_causal)
    mask = situation.mask if form.kind == "other" else full_mask(form, query.shape[2], query.device)
    return nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=situation.dropout, scale=situation.scale
    )


def layer_seed(seed: int, layer: int) -> int:
    """A seed of its own for every layer: the same keys drawn everywhere would lose the same patches everywhere."""
    return Streams(seed).child(f"layer {layer}").seed


def prescored_layers(
    configs: Mapping[int, PrescoreConfig], *, protect_prefix: bool = True, seed: int = 0
) -> dict[int, Attend]:
    """The functions that `replace_attention` wants."""
    return {number: PrescoredLayer(config, protect_prefix, seed) for number, config in configs.items()}


def replace_vision_attention(
    model: nn.Module,
    config: PrescoreConfig,
    *,
    layers: Layers | Mapping[Any, Overrides] | None = None,
    protect_prefix: bool = True,
    seed: int = 0,
) -> Callable[[], None]:
    """`prescore.apply` for a ViT with the two switches that studies need; returns the undo."""
    adapter = vision_adapter(model)
    configs = configs_by_layer(layers, config, len(adapter.layers(model)))
    functions = prescored_layers(configs, protect_prefix=protect_prefix, seed=seed)
    return adapter.replace_attention(model, functions)


def vision_adapter(model: nn.Module) -> VisionAdapter:
    """The adapter of a ViT; raises `Unsupported` for other models."""
    adapter: Any = find_adapter(model)
    if not hasattr(adapter, "replace_attention"):
        raise Unsupported(f"a vision study of {type(model).__name__}", ["it is not a vision transformer"])
    return adapter  # type: ignore[no-any-return]


def refuse(model: nn.Module, names: list[str], reason: str) -> Unsupported:
    """The refusal of an architecture, by its name and the names of what is in the way."""
    return Unsupported(f"apply on {type(model).__name__}", [f"{reason}, got {', '.join(sorted(set(names)))}"])
