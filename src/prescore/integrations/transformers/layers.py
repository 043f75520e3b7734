"""Decoder layers with int8 weights: two native calls, before and after attention.

transformers runs a layer as some twenty operators. For one row, calling them takes longer than their work; for
many rows, norms, rotations and activations pass through memory many times. `use_native_layers` takes a layer whose
modules are those of `_parts`, and only where a trial shows that both ways do the same.
"""

from __future__ import annotations

import copy
import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from prescore.int8.linear import GROUP, INVERSE, SMALLEST, Int8Linear, expected_weight
from prescore.integrations.transformers.cache import pass_cache
from prescore.ops.operators import readable
from prescore.routed.native import library
from prescore.routed.native.library import call_library, check_tensors
from prescore.types import Values

_PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_TWO_NORMS = {0: "input_layernorm", 4: "post_attention_layernorm"}
_FOUR_NORMS = {**_TWO_NORMS, 3: "post_attention_layernorm", 4: "pre_feedforward_layernorm"}
_FOUR_NORMS[5] = "post_feedforward_layernorm"
"""Norms by their numbers in C; those of queries and keys are 1 and 2."""
_N_NORMS = 6
_MULTIPLE, _MOST_DIM = 32, 512
_FORMULAS = ((0.0, 1.0, 0.0), (1.0, math.sqrt(8 / math.pi), 0.044715))
"""What is added to the weights of norms, and a and b of the activation x / (1 + exp(-a * (x + b * x**3)))."""
_made: dict[type[nn.Module], type[nn.Module]] = {}
_TRIAL = "prescore-trial"
_ERRORS = (0.02, 0.1)
"""The largest relative errors of a trial, to attention and after it: rounding gives less, another formula more."""


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scale", "bias")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs")),
    )


class _LayerCall(ctypes.Structure):
    """What is read and made, as `LayerCall` in linear.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "attended", "cosine", "sine", "projected", "output")),
        ("norms", ctypes.c_void_p * _N_NORMS),
        ("eps", ctypes.c_float * _N_NORMS),
        ("products", _Product * len(_PRODUCTS)),
        *((name, ctypes.c_int64) for name in ("rows", "width", "heads", "kv_heads", "dim", "group", "is_float32")),
        *((name, ctypes.c_float) for name in ("plus", "steep", "cubic", "smallest", "inverse")),
    )


class _Parts(NamedTuple):
    """The modules of a decoder layer."""

    attention: Any
    mlp: Any
    norms: dict[int, Any]
    products: list[Any]

    def tensors(self) -> list[Tensor | None]:
        """All weights, in a fixed order."""
        of_products = [
            (layer._buffers["numbers"], layer._buffers["scale"], layer._parameters.get("bias"))
            for layer in self.products
        ]
        return [*(norm._parameters["weight"] for norm in self.norms.values()), *sum(of_products, ())]


class _Prepared(NamedTuple):
    """The call of a layer, and the weights that it points to, which live as long."""

    call: _LayerCall
    pointers: list[int]
    tensors: list[Tensor | None]


class NativeLayer(nn.Module):
    """The first base of a layer that native code runs where it can."""

    _formula: tuple[float, float, float]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer's own forward, up to rounding."""
        parts = None if args else _parts(self)
        prepared = None if parts is None else _prepare(self, parts, hidden_states, kwargs)
        if parts is None or prepared is None:
            return super().forward(hidden_states, *args, **kwargs)
        return _run(parts, prepared.call, hidden_states, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a layer of the original class, which can be named in a file, and is made one of this again."""
        state = {name: value for name, value in vars(self).items() if name != "_prepared"}
        return _new_layer, (type(self).__mro__[2],), state


def use_native_layers(model: nn.Module) -> list[nn.Module]:
    """Let native code run decoder layers of a model, in place; returns these layers."""
    layers = [module for module in model.modules() if not isinstance(module, NativeLayer)]
    taken = []
    for layer in layers:
        parts = _parts(layer)
        if (
            parts is not None
            and not layer.training
            and any(_agrees(layer, parts, formula) for formula in _FORMULAS)
        ):
            taken.append(layer)
    return taken


def _native_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The same class, run by native code; made once."""
    if kind not in _made:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        _made[kind] = type(kind.__name__, (NativeLayer, kind), names)
    return _made[kind]


def _new_layer(kind: type[nn.Module]) -> nn.Module:
    made = _native_class(kind)
    layer: nn.Module = made.__new__(made)
    return layer


def _parts(layer: nn.Module) -> _Parts | None:
    """The modules of a layer with norms, attention and a gated MLP of int8 layers; None = another kind."""
    attention, mlp = layer._modules.get("self_attn"), layer._modules.get("mlp")
    if attention is None or mlp is None:
        return None
    names = _FOUR_NORMS if len(layer._modules) == len(_FOUR_NORMS) + 2 else _TWO_NORMS
    norms: dict[int, Any] = {number: layer._modules.get(name) for number, name in names.items()}
    if _HEAD_NORMS[0] in attention._modules:
        norms |= {number: attention._modules.get(name) for number, name in enumerate(_HEAD_NORMS, 1)}
    products = [(attention if name in _PRODUCTS[:4] else mlp)._modules.get(name) for name in _PRODUCTS]
    # beside norms and products there are attention, the MLP and its activation, and nothing else
    n_modules = len(layer._modules) + len(attention._modules) + len(mlp._modules)
    is_whole = (
        n_modules == len(norms) + len(products) + 3 and None not in norms.values() and "act_fn" in mlp._modules
    )
    is_int8 = all(type(product) is Int8Linear for product in products)
    return _Parts(attention, mlp, norms, products) if is_whole and is_int8 else None


def _can_run(layer: nn.Module, parts: _Parts, hidden: Tensor, kwargs: Values) -> bool:
    """Whether native code can answer a call: one sequence, without gradients, where nobody looks inside."""
    if (
        hidden.ndim != 3
        or hidden.shape[0] != 1
        or not hidden.shape[1]
        or type(hidden) is not Tensor
        or hidden.device.type != "cpu"
    ):
        return False
    if layer.training or hidden.dtype not in (torch.bfloat16, torch.float32) or torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.maybe_current_level() is not None:
        return False
    if kwargs.get("output_attentions"):
        return False
    inner = (parts.attention, parts.mlp, parts.mlp.act_fn, *parts.norms.values(), *parts.products)
    for module in inner:
        if module._forward_hooks or "forward" in module.__dict__ or module._compiled_call_impl is not None:
            return False
        if module._forward_pre_hooks and {*module._forward_pre_hooks.values()} != {pass_cache}:
            return False
    return library.loaded_level() != library.NO_LEVEL


def _prepare(layer: NativeLayer, parts: _Parts, hidden: Tensor, kwargs: Values) -> _Prepared | None:
    """The call of a layer, which is kept for the next; None = native code cannot answer it."""
    if not _can_run(layer, parts, hidden, kwargs):
        return None
    rotation, wanted = (
        kwargs.get("position_embeddings"),
        (*hidden.shape[:2], parts.attention.head_dim, hidden.dtype),
    )
    if not isinstance(rotation, tuple) or any((*part.shape, part.dtype) != wanted for part in rotation):
        return None
    tensors = parts.tensors()
    pointers = [hidden.shape[-1], hidden.element_size(), *(0 if t is None else t.data_ptr() for t in tensors)]
    known: _Prepared | None = vars(layer).get("_prepared")
    if known is None or known.pointers != pointers:
        call = _call(parts, hidden, layer._formula)
        known = None if call is None else _Prepared(call, pointers, tensors)
        vars(layer)["_prepared"] = known
    return known


def _call(parts: _Parts, hidden: Tensor, formula: tuple[float, float, float]) -> _LayerCall | None:
    """The call of a layer, without its rows; None = a size or a dtype that native code does not know."""
    dim, width, products = parts.attention.head_dim, hidden.shape[-1], parts.products
    n_query, n_key, inner = (products[number].out_features for number in (0, 1, 4))
    sizes = [(width, n_query), (width, n_key), (width, n_key), (n_query, width)]
    sizes += [(width, inner), (width, inner), (inner, width)]
    weights = {number: norm._parameters["weight"] for number, norm in parts.norms.items()}
    rows = [(weight, dim if number in (1, 2) else width) for number, weight in weights.items()]
    rows += [(p.bias, size) for p, (_, size) in zip(products, sizes, strict=True) if p.bias is not None]
    fits = [(product.in_features, product.out_features) for product in products] == sizes
    if (
        not fits
        or n_query % dim
        or n_key % dim
        or dim > _MOST_DIM
        or any(size % _MULTIPLE for size in (dim, width, inner))
    ):
        return None
    if any(t.shape != (size,) or t.dtype != hidden.dtype or not t.is_contiguous() for t, size in rows):
        return None
    plus, steep, cubic = formula
    call = _LayerCall(
        width=width, heads=n_query // dim, kv_heads=n_key // dim, dim=dim, group=GROUP,
        is_float32=hidden.dtype == torch.float32, plus=plus, steep=steep, cubic=cubic, smallest=SMALLEST,
        inverse=INVERSE,
    )  # fmt: skip
    for number, norm in parts.norms.items():
        call.norms[number], call.eps[number] = weights[number].data_ptr(), _eps(norm)
    for number, product in enumerate(products):
        check_tensors(expected_weight(product.numbers, product.scale, product.in_features, product.out_features))
        bias = None if product.bias is None else product.bias.data_ptr()
        pointers = (product.numbers.data_ptr(), product.scale.data_ptr(), bias)
        call.products[number] = _Product(*pointers, product.in_features, product.out_features)
    return call


def _eps(norm: nn.Module) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", math.nan)))


def _run(
    parts: _Parts,
    call: _LayerCall,
    hidden: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Tokens through a layer, whose attention is called as the layer itself calls it."""
    attention, dim, n = parts.attention, call.dim, hidden.shape[1]
    hidden, cosine, sine = (readable(part.contiguous()) for part in (hidden, *position_embeddings))
    projected = hidden.new_empty(1, n, call.heads + 2 * call.kv_heads, dim)
    output = torch.empty_like(hidden)
    rows = _LayerCall.from_buffer_copy(call)
    rows.rows = n
    rows.hidden, rows.cosine, rows.sine = hidden.data_ptr(), cosine.data_ptr(), sine.data_ptr()
    rows.projected, rows.output = projected.data_ptr(), output.data_ptr()
    call_library("prescore_layer_before", rows)
    if attention._forward_pre_hooks:
        given = {**kwargs, "past_key_values": past_key_values}
        kwargs = (pass_cache(attention, (), given) or ((), given))[1]
        del kwargs["past_key_values"]
    counts = (call.heads, call.kv_heads, call.kv_heads)
    query, key, value = (part.transpose(1, 2) for part in projected.split(counts, dim=2))
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, attention.layer_idx)
    config = attention.config
    window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    if window is not None:
        kwargs["sliding_window"] = window
    attend = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
    options = {"dropout": 0.0, "scaling": attention.scaling, **kwargs}
    attended = attend(attention, query, key, value, attention_mask, **options)[0]
    attended = readable(attended.contiguous())
    if attended.numel() != n * call.heads * dim or attended.dtype != hidden.dtype:
        got = f"{tuple(attended.shape)} {attended.dtype}"
        raise ValueError(f"attention must give {n} x {call.heads * dim} {hidden.dtype}, got {got}")
    rows.attended = attended.data_ptr()
    call_library("prescore_layer_after", rows)
    return output


def _agrees(layer: Any, parts: _Parts, formula: tuple[float, float, float]) -> bool:
    """Take a layer if random rows give the same by native code: to attention, and after it."""
    kind, attention = type(layer), parts.attention
    config, dim = attention.config, getattr(attention, "head_dim", 0)
    if attention._parameters or getattr(attention, "attn_logit_softcapping", None) or dim <= 0:
        return False
    if not all(math.isfinite(_eps(norm)) for norm in parts.norms.values()):
        return False
    AttentionInterface.register(_TRIAL, _trial)
    dtype = parts.norms[0].weight.dtype
    options: Values = {"dtype": torch.float32, "device": "cpu"}
    generator: Any = torch.Generator().manual_seed(0)
    width = parts.products[0].in_features
    angles = torch.empty(1, 3, dim // 2, **options).normal_(generator=generator).repeat(1, 1, 2)
    row = torch.empty(1, 3, width, **options).normal_(std=0.1, generator=generator).to(dtype)
    rotation = (angles.cos().to(dtype), angles.sin().to(dtype))
    if _call(parts, row, formula) is None:
        return False
    results: list[tuple[Tensor, Values]] = []
    vars(attention)["config"] = copy.copy(config)
    attention.config._attn_implementation_internal = _TRIAL
    try:
        with torch.no_grad():
            for made in (kind, _native_class(kind)):
                layer.__class__, layer._formula = made, formula
                seen: list[tuple[Tensor, Values]] = []
                given = {"past_key_values": DynamicCache(), "position_embeddings": rotation, "use_cache": True}
                output = layer.forward(row, attention_mask=None, trial=seen, **given)
                if not isinstance(output, Tensor) or len(seen) != 1:
                    break
                results.append((torch.cat((seen[0][0], (output - row).flatten())).float(), seen[0][1]))
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError):
        results.clear()  # a forward that takes other arguments
    finally:
        vars(attention)["config"] = config
    agrees = len(results) == 2 and vars(layer).get("_prepared") is not None and results[0][1] == results[1][1]
    if agrees:
        first, second = results[0][0], results[1][0]
        size = first.shape[0] - row.numel()  # of what attention gets
        pairs = ((first[:size], second[:size]), (first[size:], second[size:]))
        agrees = all(
            float((a - b).norm()) <= most * float(a.norm()) for (a, b), most in zip(pairs, _ERRORS, strict=True)
        )
    if not agrees:
        layer.__class__ = kind
        vars(layer).pop("_prepared", None)
        del layer._formula
    return agrees


def _trial(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, trial: Any, **options: Any
) -> tuple[Tensor, None]:
    """An attention function that notes what it gets, and gives the queries."""
    known = {name: value for name, value in options.items() if value is not None}
    trial.append((torch.cat((query, key, value), dim=1).flatten(), known))
    return query.transpose(1, 2).contiguous(), None
