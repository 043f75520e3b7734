"""Any attention in any causal model, measured: the door through which all methods are compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from prescore.errors import Unsupported
from prescore.evaluation.attention_cost import Meter, exact_rows
from prescore.evaluation.methods import Method
from prescore.integrations import chatglm
from prescore.integrations.layers import Layers, pick_layers
from prescore.integrations.masked import attend_exactly
from prescore.integrations.masks import MaskForm, read_mask
from prescore.rng import Streams

Observe = Callable[[int, Tensor, Tensor, Tensor], None]

_FOREIGN = ("softcap", "s_aux", "position_bias")
_NUMBERS = itertools.count()


@dataclass(eq=False)
class Door:
    """What every attention layer of the model calls while it is measured."""

    method: Method
    seed: int
    count_rows: bool
    observe: Observe | None
    meter: Meter = field(default_factory=Meter)

    def attend(
        self, number: int, query: Tensor, key: Tensor, value: Tensor, form: MaskForm, scale: float | None
    ) -> Tensor:
        """`[B, Hq, N, D] -> [B, Hq, N, Dv]`: by the method in chosen layers under a causal mask, else exactly."""
        if query.shape[2] != key.shape[2]:
            reason = f"it has {query.shape[2]} queries for {key.shape[2]} keys; measure without a cache"
            raise Unsupported(f"measuring attention in layer {number}", [reason])
        meter, method = self.meter, self.method
        if number not in meter.replaced or form.kind != "causal" or form.valid is not None:
            if form.kind == "causal":
                meter.exact_rows[number] = exact_rows(query.shape[2])
            return meter.timed(number, lambda: attend_exactly(query, key, value, form, scale=scale), key.device)
        if self.observe is not None:
            self.observe(number, query, key, value)
        seed = Streams(self.seed).child(f"layer {number}").seed
        output, rows = meter.timed(
            number, lambda: method.attend_counting(query, key, value, scale=scale, seed=seed), key.device
        )
        if rows is None and self.count_rows and not meter.rows:
            rows = method.rows_per_query(query, key, value, scale=scale, seed=seed)
        if rows is not None:
            meter.rows[number] = rows
        return output


@contextmanager
def measured_attention(
    model: nn.Module,
    method: Method,
    *,
    layers: Layers | None = None,
    seed: int = 0,
    count_rows: bool = True,
    observe: Observe | None = None,
) -> Iterator[Meter]:
    """Let a model attend by `method` inside the block, and time it.

    Layers that are local by design (sliding windows) and layers not asked for stay exact. Only plain causal
    forwards without a cache are served: it is a measuring door, `prescore.apply` is the one for use.

    Args:
        model: A causal model of transformers, or a ChatGLM with `core_attention` modules.
        method: How the chosen layers attend.
        layers: Which layers, as in `prescore.apply`.
        seed: Every layer draws from a seed of its own, made from this one.
        count_rows: Count key rows per query outside the timer too, where the call itself does not tell.
        observe: Called with (layer, query, key, value) before the attention of each replaced layer.
    """
    door = Door(method, seed, count_rows, observe)
    through = _through_core_attention if chatglm.detect(model) else _through_transformers
    with through(model, door, layers):
        yield door.meter


@contextmanager
def _through_transformers(model: nn.Module, door: Door, layers: Layers | None) -> Iterator[None]:
    """Register an attention function of its own for the time of the block."""
    from prescore.integrations.timm_import import mend_torchvision

    mend_torchvision()
    from transformers import AttentionInterface, AttentionMaskInterface

    from prescore.integrations import huggingface
    from prescore.integrations.huggingface_attention import prescored_mask

    names = huggingface.layers(model)
    door.meter.replaced = frozenset(pick_layers(layers, len(names)))
    numbers = {id(model.get_submodule(name)): number for number, name in enumerate(names)}

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **features: Any,
    ) -> tuple[Tensor, None]:
        _refuse(module, dropout, features)
        form = read_mask(attention_mask, n_query=query.shape[2], n_keys=key.shape[2], is_causal=True)
        output = door.attend(numbers[id(module)], query, key, value, form, scaling)
        return output.transpose(1, 2).contiguous(), None

    name = f"prescore-measured-{next(_NUMBERS)}"
    before = model.config._attn_implementation  # type: ignore[union-attr]
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, prescored_mask)
    try:
        model.set_attn_implementation(name)  # type: ignore[operator]
        yield
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(name, None)


@contextmanager
def _through_core_attention(model: nn.Module, door: Door, layers: Layers | None) -> Iterator[None]:
    """Stand in for every `core_attention` module for the time of the block."""
    names = chatglm.layers(model)
    door.meter.replaced = frozenset(pick_layers(layers, len(names)))
    owners: list[Any] = [model.get_submodule(name.rpartition(".")[0]) for name in names]
    originals = [owner.core_attention for owner in owners]
    for original in originals:
        dropout = getattr(getattr(original, "attention_dropout", None), "p", 0.0)
        _refuse(original, dropout if model.training else 0.0, {})
    for number, owner in enumerate(owners):
        owner.core_attention = _MeasuredCore(door, number, _repeats(model))
    try:
        yield
    finally:
        for owner, original in zip(owners, originals, strict=True):
            owner.core_attention = original


class _MeasuredCore(nn.Module):
    def __init__(self, door: Door, number: int, repeats: int) -> None:
        super().__init__()
        self.door, self.number, self.repeats = door, number, repeats

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Tensor:
        """`[N, B, H, D]` three times -> `[N, B, H * D]`; a mask is True where nothing may be seen."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        key, value = key[:, :: self.repeats], value[:, :: self.repeats]
        seen = None if attention_mask is None else ~attention_mask
        form = read_mask(seen, n_query=query.shape[2], n_keys=key.shape[2], is_causal=True)
        output = self.door.attend(self.number, query, key, value, form, query.shape[-1] ** -0.5)
        return output.permute(2, 0, 1, 3).flatten(2)


def _repeats(model: nn.Module) -> int:
    config: Any = model.config
    grouped = getattr(config, "multi_query_attention", False)
    return int(config.num_attention_heads // config.multi_query_group_num) if grouped else 1


def _refuse(module: nn.Module, dropout: float, features: dict[str, Any]) -> None:
    reasons = [f"it uses {name}" for name in _FOREIGN if features.get(name) is not None]
    if dropout > 0:
        reasons.append(f"it drops attention weights with probability {dropout}; call model.eval() first")
    if reasons:
        raise Unsupported(f"measuring attention in {type(module).__name__}", reasons)
