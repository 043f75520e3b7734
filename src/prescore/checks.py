"""Argument checks with one message shape: the argument, the rule, the value got."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from prescore.devices import all_finite

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LONG_BITS = 1024
_LONG_TEXT = 40
_LONG_LINE = 300
LARGEST = 2**31 - 1
"""The largest count that any argument accepts: longer than any sequence, and without overflow."""


def one_of(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Refuse a value outside a fixed list."""
    # arrays compare their numbers
    if not isinstance(value, tuple({type(item) for item in allowed})) or value not in allowed:
        listed = ", ".join(repr(item) for item in allowed)
        raise ValueError(f"{name} must be one of {listed}, got {shown(value)}{nearest(value, allowed)}")


def known_field(
    owner: str, name: Any, known: Collection[str], error: type[ValueError | TypeError] = ValueError
) -> None:
    """Refuse a field that a configuration does not have, and name the nearest one."""
    if name not in known:
        listed = ", ".join(known) or "none"
        raise error(f"{owner} must have fields among {listed}, got {name!r}{nearest(name, known)}")


def known_argument(kind: type, given: Collection[str]) -> None:
    """The same for keywords of a dataclass: a TypeError, as Python raises."""
    known = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(given)
    for name in given:
        known_field(kind.__name__, name, known, TypeError)


def nearest(value: Any, known: Collection[Any]) -> str:
    """A hint at the nearest of the known words; empty = none is near."""
    words = [word for word in known if isinstance(word, str)]
    close = difflib.get_close_matches(value, words, n=1) if isinstance(value, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""


def instance(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    """Refuse anything but an object of one of some classes."""
    if not isinstance(value, kinds):
        listed = " or ".join(f"prescore.{kind.__name__}" for kind in kinds)
        raise TypeError(f"{name} must be a {listed} object, got {type(value).__name__} {shown(value)}")


def integer(name: str, value: Any, *, minimum: int, maximum: int = LARGEST) -> None:
    """Refuse anything but an int of at least `minimum` and at most `maximum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {shown(value)}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {shown(value)}")
    if value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {shown(value)}")


def number(
    name: str, value: Any, *, minimum: float = -math.inf, exclusive: bool = False, maximum: float | None = None
) -> None:
    """Refuse anything but a finite number of at least (or above) `minimum` and at most `maximum`."""
    _refuse_non_numbers(name, value)
    if not _is_finite(value) or value < minimum or (exclusive and value == minimum):
        rule = "" if minimum == -math.inf else f" and above {minimum}" if exclusive else f" and at least {minimum}"
        raise ValueError(f"{name} must be finite{rule}, got {shown(value)}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {shown(value)}")


def _refuse_non_numbers(name: str, value: Any, rule: str = "a number") -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be {rule}, got {type(value).__name__} {shown(value)}")


def sdpa_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse keywords of torch's `scaled_dot_product_attention`, unless they mean what happens anyway."""
    for name, value in given.items():
        if name == "attn_mask" and value is not None:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"{function.__name__} takes no attn_mask: pass is_causal=True for a causal mask, and "
                f"key_padding_mask [batch, keys], True = a real key, for padding, got attn_mask {got}"
            )
        if name not in ("attn_mask", "enable_gqa"):
            hint = nearest(name, list(inspect.signature(function).parameters))
            raise TypeError(f"{function.__name__} got an unexpected argument {name!r}{hint}")


def probability(name: str, value: Any) -> None:
    """Refuse anything but a number in [0, 1)."""
    _refuse_non_numbers(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {shown(value)}")


def device(name: str, value: str) -> None:
    """Refuse a device that this torch cannot use."""
    try:
        torch.empty(0, dtype=torch.float32, device=value)
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        raise ValueError(f"{name} must be usable, got {value!r} ({str(error).splitlines()[0]})") from error


def boolean(name: str, value: Any) -> None:
    """Refuse anything but True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__} {shown(value)}")


def budget(name: str, value: Any) -> None:
    """Refuse a budget that is neither a count of at least 1 nor a fraction in (0, 1]."""
    _refuse_non_numbers(name, value, "an int or a float")
    if isinstance(value, int) and not 1 <= value <= LARGEST:
        rule = "at least 1" if value < 1 else f"at most {LARGEST}"
        raise ValueError(f"{name} must be a count of {rule}, got {shown(value)}")
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError(f"{name} must be a fraction in (0, 1] when it is a float, got {value}")


def shown(value: Any) -> str:
    """A value as text of one line for a message: of a tensor or an array shape and dtype; long texts are cut."""
    if isinstance(value, Tensor) and value.is_nested:
        text = "nested"
    elif getattr(value, "shape", ()) and hasattr(value, "dtype"):
        text = f"{tuple(value.shape)} {value.dtype}"
    else:
        long_number = isinstance(value, int) and value.bit_length() >= _LONG_BITS
        text = hex(value) if long_number else " ".join(repr(value).split())
    longest = _LONG_TEXT if isinstance(value, int | float) else _LONG_LINE
    return text if len(text) <= longest else f"{text[:longest]}..."


def dense(name: str, value: Any, rule: str = "a torch.Tensor") -> Tensor:
    """The value; refuses anything but a dense tensor that holds its numbers."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be {rule}, got {type(value).__name__}")
    if value.is_nested or value.layout != torch.strided:
        layout = "a nested tensor" if value.is_nested else str(value.layout)
        raise ValueError(f"{name} must be a dense tensor, got {layout}")
    if value.is_meta:
        raise ValueError(f"{name} must be on a device that holds numbers, got {value.device}")
    if isinstance(value, FakeTensor):
        raise ValueError(f"{name} must hold numbers, got a fake tensor")
    return value


def floating(name: str, value: Any) -> None:
    """Refuse anything but a dense tensor of one of the dtypes that attention takes."""
    dense(name, value)
    if value.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {value.dtype}")


def tensor4(name: str, value: Any) -> None:
    """Refuse anything but a floating [batch, heads, sequence, dim] tensor that holds its numbers."""
    floating(name, value)
    if value.ndim != 4:
        raise ValueError(f"{name} must have 4 dimensions [batch, heads, sequence, dim], got {tuple(value.shape)}")
    if value.shape[-1] == 0:
        raise ValueError(f"{name} must have a head dimension of at least 1, got {tuple(value.shape)}")


def keys(key: Tensor, key_padding_mask: Tensor | None) -> None:
    """Refuse malformed keys, malformed masks, and real keys that hold NaN or inf."""
    tensor4("key", key)
    if key_padding_mask is not None:
        padding_mask(key, key_padding_mask)
    _finite(key_padding_mask, key=key)


def padding_mask(key: Tensor, mask: Any) -> None:
    """Refuse a mask that is not bool [batch, sequence] on the keys' device."""
    dense("key_padding_mask", mask, "a torch.Tensor or None")
    if mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask must be bool (True = a real key), got {mask.dtype}")
    expected = (key.shape[0], key.shape[2])
    if tuple(mask.shape) != expected:
        raise ValueError(f"key_padding_mask must have shape {expected} [batch, keys], got {tuple(mask.shape)}")
    if mask.device != key.device:
        raise ValueError(f"key_padding_mask must be on the keys' device {key.device}, got {mask.device}")


def attention_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    key_padding_mask: Tensor | None,
    scale: float | None,
) -> None:
    """Refuse malformed inputs of an attention function; runs once, at the public entry point."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        tensor4(name, tensor)
    boolean("is_causal", is_causal)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have the query's dtype {query.dtype}, got {tensor.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"{name} must be on the query's device {query.device}, got {tensor.device}")
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(f"{name} must have the query's batch size {query.shape[0]}, got {tensor.shape[0]}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key must have the query's head dimension {query.shape[-1]}, got {key.shape[-1]}")
    if value.shape[1:3] != key.shape[1:3]:
        raise ValueError(
            f"value must have the key's heads and length {tuple(key.shape[1:3])}, got {tuple(value.shape[1:3])}"
        )
    n_heads, n_kv_heads = query.shape[1], key.shape[1]
    hint = ""
    if n_heads > query.shape[2] and n_kv_heads > key.shape[2]:
        hint = ": inputs are [batch, heads, sequence, dim]; transpose(1, 2) swaps heads and sequence"
    if n_kv_heads == 0 or n_heads % n_kv_heads:
        raise ValueError(f"query heads must be a multiple of the key's {n_kv_heads} heads, got {n_heads}{hint}")
    if is_causal and query.shape[2] > key.shape[2]:
        rule = f"at most the key length {key.shape[2]} when is_causal=True"
        raise ValueError(f"query length must be {rule}, got {query.shape[2]}{hint}")
    if scale is not None:
        number("scale", scale)
    if key_padding_mask is not None:
        padding_mask(key, key_padding_mask)
    # a weight of zero does not help: 0 * NaN is NaN, also for queries that may not see the key
    _finite(key_padding_mask, key=key, value=value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


def _finite(mask: Tensor | None, **tensors: Tensor) -> None:
    """Refuse NaN and infinity where the mask is True; the one number that a call reads from a device."""
    hidden = None if mask is None else ~mask[:, None, :, None]
    given = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    real = {name: t.detach() if hidden is None else t.detach().masked_fill(hidden, 0) for name, t in given.items()}
    # aminmax is one pass without a temporary, and NaN propagates through it
    if all_finite([bound for tensor in real.values() for bound in torch.aminmax(tensor)]):
        return
    for name, tensor in real.items():
        bad = (~torch.isfinite(tensor)).nonzero()
        if len(bad):
            index = tuple(bad[0].tolist())
            raise ValueError(
                f"{name} must be finite where it is not padding, got {tensor[index].item()} at {index}"
            )
