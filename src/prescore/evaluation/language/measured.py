"""Any method in any causal model, measured: through the door by which `prescore.apply` enters a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from prescore.errors import Unsupported
from prescore.evaluation.language.cost import Meter, exact_rows
from prescore.evaluation.language.methods import CountedAttend, LanguageMethod
from prescore.integrations.apply import find_adapter, replace_attention
from prescore.integrations.attend import Situation, attend_exactly
from prescore.integrations.layers import Layers, pick_layers


@contextmanager
def measured_attention(
    model: nn.Module, method: LanguageMethod, *, layers: Layers | None = None, seed: int = 0
) -> Iterator[Meter]:
    """Let a model attend by `method` inside the block, and time it.

    Layers that are local by design (sliding windows) and layers not asked for stay exact. Only plain causal
    forwards without a cache are served.

    Args:
        model: A causal model of transformers, or a ChatGLM with `core_attention` modules.
        method: How the chosen layers attend.
        layers: Which layers, as in `prescore.apply`.
        seed: Every layer draws from a seed of its own, made from this one.
    """
    n_layers = len(find_adapter(model).layers(model))
    meter = Meter(replaced=frozenset(pick_layers(layers, n_layers)))
    undo = replace_attention(
        model, {number: _Measured(meter, method.attention(seed)) for number in range(n_layers)}
    )
    try:
        yield meter
    finally:
        undo()


@dataclass(frozen=True, eq=False)
class _Measured:
    """Stands in the place of a layer's attention: by the method where it can, else exactly; timed always."""

    meter: Meter
    attention: CountedAttend

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, situation: Situation) -> Tensor:
        meter, layer, form = self.meter, situation.layer, situation.form(query, key)
        _refuse(query, key, situation, situation.obstacles if layer in meter.replaced else ())
        is_causal = form.kind == "causal" and form.valid is None and not situation.is_local
        if layer in meter.replaced and is_causal:
            output, count_rows, _ = meter.timed(
                layer, lambda: self.attention(query, key, value, situation), key.device
            )
            meter.rows[layer] = count_rows()
            return output
        if is_causal:
            meter.exact_rows[layer] = exact_rows(query.shape[2])
        return meter.timed(layer, lambda: attend_exactly(query, key, value, situation), key.device)


def _refuse(query: Tensor, key: Tensor, situation: Situation, obstacles: Sequence[str]) -> None:
    reasons = list(obstacles)
    if query.shape[2] != key.shape[2]:
        reasons.append(f"it has {query.shape[2]} queries for {key.shape[2]} keys; measure without a cache")
    if situation.dropout > 0:
        reasons.append(f"it drops attention weights with probability {situation.dropout}; call model.eval() first")
    if reasons:
        raise Unsupported(f"measuring attention in layer {situation.layer} ({situation.owner})", reasons)
