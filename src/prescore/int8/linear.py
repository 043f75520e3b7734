"""int8 weights and int8 activations in the linear layers of a model, on CPUs.

Weights have one scale per output, activations one per token, from the largest magnitude. A token's result depends
on that token alone: chunks of a prompt give what one forward gives, and later tokens change nothing.
The products are torch's (`torch._int_mm`), which use VNNI or AMX where the processor has them. Rounding and
scaling take one pass of native code for bfloat16, and several of plain torch, with the same result, elsewhere.

torchao quantises in the same way. Its tensors cost more time on CPUs than bfloat16 does in decode steps; see
docs/serving.md.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, nn

from prescore.autograd import records_gradients
from prescore.errors import Unsupported
from prescore.routed.native import library
from prescore.routed.native.library import Expected, call_library, check_tensors, empty

_MOST = 127
_SMALLEST = 1e-12
_BLOCK = 2**20
"""Numbers that are rounded or multiplied at a time: what is made of them stays in the processor's cache."""
_LIBRARY = torch.library.Library("prescore", "FRAGMENT")


class _LinearCall(ctypes.Structure):
    """What is read and made, as `LinearCall` in linear.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "rounded", "by_row", "product", "by_output", "output")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs")),
        *((name, ctypes.c_float) for name in ("smallest", "inverse")),
    )


class Int8Linear(nn.Linear):
    """A linear layer whose weight is int8, with a float32 scale per output; for inference.

    Args:
        linear: The layer to convert; it is not changed.
    """

    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        blocks = linear.weight.detach().split(max(1, _BLOCK // self.in_features))
        weights, scales = zip(*map(_rounded, blocks), strict=True)
        self.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
        self.register_buffer("scale", torch.cat(scales)[:, 0])
        self.bias = linear.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        """Move the layer; a cast of the model leaves its scales in float32."""
        scale = self.scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scale.dtype != torch.float32:
            self.scale = scale.to(self.scale.device)
        return self

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output, in the dtype of its input."""
        if input.shape[-1:] != (self.in_features,) or not input.is_floating_point():
            got = f"{tuple(input.shape)} {input.dtype}"
            raise ValueError(
                f"input must be floating with {self.in_features} features in the last dimension, got {got}"
            )
        if records_gradients(input):
            raise Unsupported("gradients through int8 weights", ["their products are rounded"])
        # an operator of torch: native code never meets a fake, traced, negated or zero tensor, and inductor, which
        # computes products of a single row in int8 where they overflow, does not see inside
        rows = input.reshape(-1, self.in_features)
        output: Tensor = torch.ops.prescore.int8_linear(rows, self.weight, self.scale)
        output = output.view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


def use_int8_weights(model: nn.Module) -> nn.Module:
    """Give the linear layers of a model int8 weights, in place; returns the model.

    Layers with at least twice as many inputs as outputs keep their dtype: activations between the two halves of
    an MLP have single large entries, and one scale per token would round all others away. So does everything
    else: load the model in bfloat16. An output layer that shares its weight with the input embedding gets an int8
    copy. The model can no longer be trained.

    Args:
        model: On a CPU, with weights in a floating dtype.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        >>> applied = prescore.apply(use_int8_weights(model))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {model!r}")
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and 1 < child.in_features < 2 * child.out_features
    ]
    for _, name, child in found:
        weight = child.weight
        if weight.device.type != "cpu" or not weight.is_floating_point():
            raise Unsupported(
                "int8 weights",
                [f"weights must be floating and on a CPU, got {name} {weight.dtype} on {weight.device}"],
            )
    for parent, name, child in found:
        setattr(parent, name, Int8Linear(child))
    return model


def _int8_linear(input: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """`input [M, K]` times `weight [N, K]`."""
    output = input.new_empty(input.shape[0], weight.shape[0])
    is_native = input.dtype == torch.bfloat16 and input.device.type == "cpu"
    multiply = _multiply_native if is_native and library.loaded_level() != library.NO_LEVEL else _multiply
    size = max(1, _BLOCK // max(weight.shape))
    for rows, to in zip(input.split(size), output.split(size), strict=True):
        multiply(rows, weight, scale, to)
    return output


def _multiply(input: Tensor, weight: Tensor, scale: Tensor, output: Tensor) -> None:
    rounded, by_row = _rounded(input)
    output.copy_(torch._int_mm(rounded, weight.t()).float().mul_(by_row).mul_(scale))


def _multiply_native(input: Tensor, weight: Tensor, scale: Tensor, output: Tensor) -> None:
    """As `_multiply`, with the same result."""
    (n_rows, n_in), n_out, input = input.shape, weight.shape[0], input.contiguous()
    rounded, by_row = empty(n_rows, n_in, dtype=torch.int8), empty(n_rows)
    check_tensors(
        [
            Expected("input", input, (n_rows, n_in), torch.bfloat16),
            Expected("scale", scale, (n_out,)),
            Expected("output", output, (n_rows, n_out), torch.bfloat16),
        ]
    )
    call = _LinearCall(input.data_ptr(), rounded.data_ptr(), by_row.data_ptr())
    call.rows, call.inputs, call.outputs, call.smallest, call.inverse = n_rows, n_in, n_out, _SMALLEST, 1 / _MOST
    call_library("prescore_round_rows", call)
    product = torch._int_mm(rounded, weight.t())
    check_tensors([Expected("product", product, (n_rows, n_out), torch.int32)])
    call.product, call.by_output, call.output = product.data_ptr(), scale.data_ptr(), output.data_ptr()
    call_library("prescore_scale_products", call)


def _rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as int8, and the scale `[M, 1]` of each."""
    wide = matrix.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_(min=_SMALLEST).mul_(1 / _MOST)
    return (wide / scale).round_().to(torch.int8), scale


def _shapes(input: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return input.new_empty((input.shape[0], weight.shape[0]))


_LIBRARY.define("int8_linear(Tensor input, Tensor weight, Tensor scale) -> Tensor")
_LIBRARY.impl("int8_linear", _int8_linear, "CompositeExplicitAutograd")
torch.library.register_fake("prescore::int8_linear", _shapes, lib=_LIBRARY)
