"""Any attention in any model of transformers, measured: the door through which all methods are compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from prescore.errors import Unsupported
from prescore.evaluation.attention_cost import Meter
from prescore.evaluation.methods import Method
from prescore.integrations.layers import Layers, pick_layers
from prescore.integrations.masked import attend_exactly
from prescore.integrations.masks import read_mask
from prescore.rng import Streams

Observe = Callable[[int, Tensor, Tensor, Tensor], None]

_FOREIGN = ("softcap", "s_aux", "position_bias")
_NUMBERS = itertools.count()


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
        model: A causal model of transformers.
        method: How the chosen layers attend.
        layers: Which layers, as in `prescore.apply`.
        seed: Every layer draws from a seed of its own, made from this one.
        count_rows: Count key rows per query in the first replaced layer, outside the timer.
        observe: Called with (layer, query, key, value) before the attention of each replaced layer.
    """
    from prescore.integrations.timm_import import mend_torchvision

    mend_torchvision()
    from transformers import AttentionInterface, AttentionMaskInterface

    from prescore.integrations import huggingface
    from prescore.integrations.huggingface_attention import prescored_mask

    names = huggingface.layers(model)
    chosen = pick_layers(layers, len(names))
    numbers = {id(model.get_submodule(name)): number for number, name in enumerate(names)}
    meter = Meter(replaced=frozenset(chosen))

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
        _refuse(module, query, key, dropout, features)
        number = numbers[id(module)]
        form = read_mask(attention_mask, n_query=query.shape[2], n_keys=key.shape[2], is_causal=True)
        own_seed = Streams(seed).child(f"layer {number}").seed
        if number in meter.replaced and form.kind == "causal" and form.valid is None:
            if observe is not None:
                observe(number, query, key, value)
            output = meter.timed(number, lambda: method.attend(query, key, value, scale=scaling, seed=own_seed))
            if count_rows and not meter.rows:
                meter.rows[number] = method.rows_per_query(query, key, value, scale=scaling, seed=own_seed)
        else:
            output = meter.timed(number, lambda: attend_exactly(query, key, value, form, scale=scaling))
        return output.transpose(1, 2).contiguous(), None

    name = f"prescore-measured-{next(_NUMBERS)}"
    before = model.config._attn_implementation  # type: ignore[union-attr]
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, prescored_mask)
    try:
        model.set_attn_implementation(name)  # type: ignore[operator]
        yield meter
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(name, None)


def _refuse(module: nn.Module, query: Tensor, key: Tensor, dropout: float, features: dict[str, Any]) -> None:
    reasons = [f"it uses {name}" for name in _FOREIGN if features.get(name) is not None]
    if dropout > 0:
        reasons.append(f"it drops attention weights with probability {dropout}; call model.eval() first")
    if query.shape[2] != key.shape[2]:
        reasons.append(f"it has {query.shape[2]} queries for {key.shape[2]} keys; measure without a cache")
    if reasons:
        raise Unsupported(f"measuring attention in {type(module).__name__}", reasons)
