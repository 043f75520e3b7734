"""int8 weights and int8 activations in the linear layers of a model, on CPUs.

Weights have one scale per output, activations one per token and group of inputs, from the largest magnitude. A
token's result depends on that token alone: chunks of a prompt give what one forward gives, and later tokens change
nothing. Rounding, products, scales and bias are one native call; plain torch does the same where nothing could be
compiled.

An int8 layer shows its weight as what the numbers stand for: models are saved, loaded and tied as before, and
nothing meets raw int8 numbers.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from prescore import checks
from prescore.autograd import records_gradients
from prescore.errors import Unsupported
from prescore.routed.native import library
from prescore.routed.native.library import Expected, call_library, check_tensors
from prescore.types import Values

GROUP = 128
"""Inputs that share a scale in a token: activations inside an MLP have single large entries."""
_FEWEST = 16
"""From so many inputs per output on, a layer keeps its dtype: a router decides by small differences."""
_MOST, _ZERO = 127, 128
SMALLEST, INVERSE = 1e-12, 1 / _MOST
"""The least largest magnitude of a group, and what 1 stands for where the largest magnitude is 1."""
_PANEL, _QUARTER = 16, 4
_BLOCK = 2**20
"""Weights that are converted at a time."""
_LIBRARY = torch.library.Library("prescore", "FRAGMENT")


class _LinearCall(ctypes.Structure):
    """What is read and made, as `LinearCall` in linear.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "weight", "scale", "bias", "output")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "group", "is_float32")),
        *((name, ctypes.c_float) for name in ("smallest", "inverse")),
    )


class Int8Linear(nn.Linear):
    """A linear layer whose weight is int8, with a float32 scale per output; for inference.

    `weight` is a copy of what the numbers stand for, in the dtype of the converted layer, and cannot be written
    to; a new weight can be assigned. A state dict holds this weight, and loading one rounds it again.

    Args:
        linear: The layer to convert; it is not changed, and its hooks go on with the new layer.

    Attributes:
        numbers: `[panels, quarters, 16, 4]` uint8: sixteen outputs side by side, four inputs together; 128 = 0.
        scale: `[panels, 16]`: what 1 stands for in an output.
    """

    numbers: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        if "forward" in vars(linear):
            raise Unsupported(
                "int8 weights", ["the forward of a layer was replaced, as accelerate does to offload it"]
            )
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.training = linear.training
        vars(self).update({name: value for name, value in vars(linear).items() if "_hooks" in name})
        self.bias = linear.bias
        self._store(linear.weight)

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output, in the dtype of its input."""
        if input.shape[-1:] != (self.in_features,) or not input.is_floating_point():
            got = f"{tuple(input.shape)} {input.dtype}"
            raise ValueError(
                f"input must be floating with {self.in_features} features in the last dimension, got {got}"
            )
        if records_gradients(input):
            raise Unsupported("gradients through int8 weights", ["their products are rounded"])
        # an operator of torch: native code never meets a fake, traced, negated or zero tensor
        rows, bias = input.reshape(-1, self.in_features), None if self.bias is None else self.bias.detach()
        output: Tensor = _OPERATOR(rows, self.numbers, self.scale, bias, self.out_features)
        return output.view(*input.shape[:-1], self.out_features)

    # --- the weight, as others see it

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """What the numbers stand for, a copy."""
        return self._dequantised().as_subclass(_ReadOnly)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self._store(value)
        else:
            super().__setattr__(name, value)

    def _store(self, weight: Tensor) -> None:
        if weight.ndim != 2 or weight.shape[1] != self.in_features or not weight.is_floating_point():
            got = f"{tuple(weight.shape)} {weight.dtype}"
            raise ValueError(f"weight must be floating [outputs, {self.in_features}], got {got}")
        if weight.device.type != "cpu":
            raise Unsupported("int8 weights", [f"weights must be on a CPU, got {weight.device}"])
        self.out_features, self._dtype = weight.shape[0], weight.dtype
        panels, quarters = -(-weight.shape[0] // _PANEL), -(-weight.shape[1] // _QUARTER)
        numbers = torch.empty(panels, quarters, _PANEL, _QUARTER, dtype=torch.uint8, device="cpu")
        scale = torch.ones(panels, _PANEL, dtype=torch.float32, device="cpu")
        size = max(1, _BLOCK // (_PANEL * self.in_features))
        with torch.no_grad():
            for first in range(0, panels, size):
                rounded, unit = _rounded(weight.detach()[first * _PANEL : (first + size) * _PANEL])
                some = slice(first, first + size)
                numbers[some] = _packed(rounded)
                scale[some].view(-1)[: len(unit)] = unit[:, 0]
        self.register_buffer("numbers", numbers, persistent=False)
        self.register_buffer("scale", scale, persistent=False)

    def _dequantised(self) -> Tensor:
        size = max(1, _BLOCK // (_PANEL * self.in_features))
        blocks = zip(self.numbers.split(size), self.scale.split(size), strict=True)
        parts = [(_unpacked(some) * scale.view(-1, 1)).to(self._dtype) for some, scale in blocks]
        return torch.cat(parts)[: self.out_features, : self.in_features].contiguous()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        """Move the layer; a cast of the model leaves its scales in float32."""
        scale = self.scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scale.dtype != torch.float32:
            self.scale = scale.to(self.scale.device)
        self._dtype = fn(torch.empty(0, dtype=self._dtype, device=scale.device)).dtype
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self._dequantised()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, *messages: list[str]
    ) -> None:
        missing, _, errors = messages
        name = f"{prefix}weight"
        others = {key: value for key, value in state_dict.items() if key != name}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, *messages)
        weight = state_dict.get(name)
        if weight is None:
            missing.extend([name] if strict else [])
        elif weight.shape != (self.out_features, self.in_features):
            wanted = (self.out_features, self.in_features)
            errors.append(f"{name} must be {wanted}, got {tuple(weight.shape)}")
        else:
            dtype = self._dtype
            self._store(weight)
            self._dtype = dtype


class _ReadOnly(Tensor):
    """The weight that an int8 layer shows: writing to it, or to a view of it, is refused and not lost."""

    _is_param = True  # what asks for a parameter gets one

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Values | None = None) -> Any:
        name, first = func.__name__, next(iter((*args, *(kwargs or {}).values())), None)
        source = first if isinstance(first, _ReadOnly) else None
        writes = name in ("__set__", "__setitem__") or name.startswith("__i") or name == f"{name.rstrip('_')}_"
        if (writes and source is not None) or isinstance((kwargs or {}).get("out"), _ReadOnly):
            cure = "convert to int8 after the change, or assign a new weight"
            raise Unsupported("writing to an int8 weight", [f"it is a copy of what the layer holds; {cure}"])
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if source is None or not isinstance(result, Tensor) or result is source:
                return result
            is_view = result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
            return result.as_subclass(_ReadOnly if is_view else Tensor)


def use_int8_weights(model: nn.Module) -> nn.Module:
    """Give the linear layers of a model int8 weights, in place; returns the model.

    Layers with at least 16 times as many inputs as outputs keep their dtype: routers and classifiers. So does
    everything else: load the model in bfloat16. An output layer that shares its weight with the input embedding
    gets an int8 copy. Layers are converted one after the other, so that no more memory is needed than for the
    model and one layer. The model can no longer be trained; it is saved with the weights that its numbers stand
    for.

    Args:
        model: On a CPU, with weights in a floating dtype.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        >>> applied = prescore.apply(use_int8_weights(model))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {checks.shown(model)}")
    if _suits(model):
        raise ValueError("model must hold linear layers, got a Linear alone, which Int8Linear(layer) converts")
    for parent, name in _places(model):
        layer = parent._modules[name]
        if layer is not None and "weight" not in layer._parameters:
            cure = "remove weight normalisation and pruning before"
            raise Unsupported("int8 weights", [f"the weight of {name} is computed at every call: {cure}"])
        if layer is not None and (layer.weight.device.type != "cpu" or not layer.weight.is_floating_point()):
            got = f"{name} {layer.weight.dtype} on {layer.weight.device}"
            raise Unsupported("int8 weights", [f"weights must be floating and on a CPU, got {got}"])
    made: dict[int, Int8Linear] = {}  # by the identity of layers, which live until their last name is replaced
    for parent, name in _places(model):
        layer = parent._modules[name]
        if isinstance(layer, nn.Linear):
            made[id(layer)] = converted = made.get(id(layer)) or Int8Linear(layer)
            setattr(parent, name, converted)
    kept = [*model.parameters()]
    places = [parameter.data_ptr() for parameter in kept]
    for parameter, place in zip(kept, places, strict=True):
        if places.count(place) == 1:  # else another parameter is a view of it
            parameter.data = parameter.data.clone()  # in the mapped file of safetensors, it would keep all of that
    if "transformers" in sys.modules:  # else no layer is one of its
        from prescore.integrations.transformers.layers import use_native_layers

        use_native_layers(model)
    return model


def _suits(module: nn.Module | None) -> bool:
    return type(module) is nn.Linear and 1 < module.in_features < _FEWEST * module.out_features


def _places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every name of a layer to convert, and the module that holds it."""
    return [
        (parent, name) for parent in model.modules() for name, child in parent._modules.items() if _suits(child)
    ]


# --- products


def _int8_linear(input: Tensor, numbers: Tensor, scale: Tensor, bias: Tensor | None, n_out: int) -> Tensor:
    """`input [M, K]` times the weight of an `Int8Linear`."""
    wide = None if bias is None else bias.float()
    is_native = input.device.type == "cpu" and library.loaded_level() != library.NO_LEVEL
    multiply = _multiply_native if is_native else _multiply
    if input.dtype in (torch.bfloat16, torch.float32):
        return multiply(input, numbers, scale, wide, n_out)
    return multiply(input.float(), numbers, scale, wide, n_out).to(input.dtype)


def _multiply(input: Tensor, numbers: Tensor, scale: Tensor, bias: Tensor | None, n_out: int) -> Tensor:
    weight = _unpacked(numbers).t()
    inputs = nn.functional.pad(input.float(), (0, len(weight) - input.shape[1]))
    total = torch.zeros(len(input), weight.shape[1], dtype=torch.float32, device=input.device)
    for some, columns in zip(inputs.split(GROUP, 1), weight.split(GROUP), strict=True):
        rounded, unit = _rounded(some)
        total += torch._int_mm(rounded, columns).float() * unit
    total = (total * scale.view(-1))[:, :n_out]
    return (total if bias is None else total + bias).to(input.dtype)


def _multiply_native(input: Tensor, numbers: Tensor, scale: Tensor, bias: Tensor | None, n_out: int) -> Tensor:
    """As `_multiply`, up to rounding."""
    (n_rows, n_in), input = input.shape, input.contiguous()
    output = torch.empty(n_rows, n_out, dtype=input.dtype, device="cpu")
    expected = expected_weight(numbers, scale, n_in, n_out)
    check_tensors(expected if bias is None else [*expected, Expected("bias", bias, (n_out,))])
    pointers = (input.data_ptr(), numbers.data_ptr(), scale.data_ptr(), None if bias is None else bias.data_ptr())
    sizes = (n_rows, n_in, n_out, GROUP, input.dtype == torch.float32)
    call_library("prescore_int8_linear", _LinearCall(*pointers, output.data_ptr(), *sizes, SMALLEST, INVERSE))
    return output


def expected_weight(numbers: Tensor, scale: Tensor, n_in: int, n_out: int) -> list[Expected]:
    """What native code expects of the weight of an `Int8Linear`."""
    panels, quarters = -(-n_out // _PANEL), -(-n_in // _QUARTER)
    return [
        Expected("numbers", numbers, (panels, quarters, _PANEL, _QUARTER), torch.uint8),
        Expected("scale", scale, (panels, _PANEL)),
    ]


def _rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as int8, and the scale `[M, 1]` of each."""
    wide = matrix.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_(min=SMALLEST).mul_(INVERSE)
    return (wide * scale.reciprocal()).round_().to(torch.int8), scale


def _packed(rounded: Tensor) -> Tensor:
    """int8 `[N, K]` as `numbers` of an `Int8Linear`."""
    n_out, n_in = rounded.shape
    whole = nn.functional.pad(rounded, (0, -n_in % _QUARTER, 0, -n_out % _PANEL))
    quarters = whole.view(torch.int32).unflatten(0, (-1, _PANEL))
    return torch.bitwise_xor(_transposed(quarters).view(torch.uint8).unflatten(-1, (_PANEL, _QUARTER)), _ZERO)


def _unpacked(numbers: Tensor) -> Tensor:
    """`numbers` of an `Int8Linear` as int8 `[N, K]`, rounded up to whole panels and quarters."""
    quarters = torch.bitwise_xor(numbers, _ZERO).flatten(-2).view(torch.int32)
    return _transposed(quarters).view(torch.int8).flatten(0, 1)


def _transposed(quarters: Tensor) -> Tensor:
    return quarters.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _shapes(input: Tensor, numbers: Tensor, scale: Tensor, bias: Tensor | None, n_out: int) -> Tensor:
    return input.new_empty((input.shape[0], n_out))


_LIBRARY.define("int8_linear(Tensor input, Tensor numbers, Tensor scale, Tensor? bias, int n_out) -> Tensor")
_LIBRARY.impl("int8_linear", _int8_linear, "CompositeExplicitAutograd")
torch.library.register_fake("prescore::int8_linear", _shapes, lib=_LIBRARY)
_OPERATOR = torch.ops.prescore.int8_linear.default
