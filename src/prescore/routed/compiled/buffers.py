"""What the backward and the sampled function read and write besides a call's own, and what it must look like."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.routed.compiled.checked import POINTER, REAL, SIZE, WIDTH, Expected, check_tensors
from prescore.routed.tolerance.draws import AIMS, BELOW, MARGIN, MOST_OFF, MOST_ROWS, SHADOWS, STEP


class CallSizes(NamedTuple):
    """Of one call."""

    lanes: int
    n_query: int
    dim: int
    value_dim: int
    leaf: int
    room: int
    node_room: int
    pools: int
    n_keys: int
    more: int


_LEARNED = ("key", "value", "column_key", "column_value", "spread", "drift")
_GIVEN = ("grad", "product", "column_keys", "value_columns", "turned_drift", "query", "limit")


class FarGradients(ctypes.Structure):
    """What the backward function reads and adds to, as ops/native/backward.c has it."""

    _fields_ = (
        *((name, POINTER) for name in (*_GIVEN, *_LEARNED)),
        ("parts", SIZE),
        ("n_keys", SIZE),
    )


class Samples(ctypes.Structure):
    """What the sampled function reads and writes besides, as ops/native/sampled.h has it."""

    _fields_ = (
        *((name, POINTER) for name in ("active", "aim", "place", "columns", "values", "apart", "usual")),
        *((name, POINTER) for name in ("coarse", "signs", "shadows")),
        *((name, SIZE) for name in ("each", "stride", "aims")),
        *((name, REAL) for name in ("step", "allowed", "most_rows", "most_off", "margin", "below")),
        *((name, POINTER) for name in ("variance", "fourth", "overlap", "further")),
    )


@dataclass(frozen=True, eq=False)
class GradientBuffers:
    """Tensors of the backward function; `learned` are sums that are kept apart, the first dimension counts them.

    Attributes:
        grad, product: Of the output, and its product with the output.
        column_keys, value_columns, turned_drift: Tables, the other way round.
        query, limit: Gradients, added to and written.
        learned: Gradients of keys, values, columns' keys and values, spread and drift, added to.
    """

    grad: Tensor
    product: Tensor
    column_keys: Tensor
    value_columns: Tensor
    turned_drift: Tensor
    query: Tensor
    limit: Tensor
    learned: tuple[Tensor, ...]

    def checked(self, sizes: CallSizes) -> FarGradients:
        """As compiled code takes it; refused where it could read or write outside."""
        lanes, n_query, dim, wide, _, room, _, pools, n_keys, _ = sizes
        each, n_parts = (lanes, n_query), self.learned[0].shape[0]
        shapes = (
            (*each, wide),
            each,
            (lanes, room, dim),
            (lanes, room // WIDTH, wide, WIDTH),
            (lanes, pools, wide, dim),
            (*each, dim),
            each,
        )
        sums = ((n_keys, dim), (n_keys, wide), (room, dim), (room, wide), (pools, dim, dim), (pools, dim, wide))
        expected = [
            *(Expected(name, getattr(self, name), shape) for name, shape in zip(_GIVEN, shapes, strict=True)),
            *(
                Expected(f"sums of {name}", tensor, (n_parts, lanes, *shape))
                for name, tensor, shape in zip(_LEARNED, self.learned, sums, strict=True)
            ),
        ]
        check_tensors(expected)
        pointers = {name: own.tensor.data_ptr() for name, own in zip((*_GIVEN, *_LEARNED), expected, strict=True)}
        return FarGradients(**pointers, parts=n_parts, n_keys=n_keys)


@dataclass(frozen=True, eq=False)
class SampleBuffers:
    """Tensors of the sampled function: who takes part, which keys are drawn, and the spread of their terms.

    Attributes:
        active, aim: Queries that take part, and the limits they search with.
        place, columns, values: Which keys are drawn, and those in the layouts of tables.
        apart, usual: Squares of their values' distances from their node's mean, and the mean up to each node.
        coarse: What a unit of the codes is worth.
        signs, shadows: Random projections, and what values differ from their node's mean, and the mean, in them.
        variance, fourth, overlap, further: Written.
        allowed: Square of the relative error that is aimed at.
    """

    active: Tensor
    aim: Tensor
    place: Tensor
    columns: Tensor
    values: Tensor
    apart: Tensor
    usual: Tensor
    coarse: Tensor
    signs: Tensor
    shadows: Tensor
    variance: Tensor
    fourth: Tensor
    overlap: Tensor
    further: Tensor
    allowed: float

    @property
    def more(self) -> int:
        """Columns behind those of the tables."""
        return self.values.shape[1]

    def checked(self, sizes: CallSizes) -> Samples:
        """As compiled code takes it; refused where it could read or write outside."""
        lanes, more, each = sizes.lanes, sizes.more, sizes.leaf // WIDTH
        rows, blocks = (lanes, sizes.n_query), (lanes, more // WIDTH)
        expected = [
            Expected("active", self.active, rows, torch.uint8),
            Expected("aim", self.aim, rows),
            Expected("place", self.place, (sizes.node_room,), torch.int32),
            Expected("columns", self.columns, (*blocks, sizes.dim, WIDTH)),
            Expected("values", self.values, (lanes, more, sizes.value_dim)),
            Expected("apart", self.apart, (lanes, more)),
            Expected("usual", self.usual, (lanes, sizes.node_room)),
            Expected("coarse", self.coarse, (lanes, sizes.node_room, 2)),
            Expected("signs", self.signs, (SHADOWS, sizes.value_dim)),
            Expected("shadows", self.shadows, (*blocks, 2 * SHADOWS, WIDTH)),
            *(Expected(name, getattr(self, name), rows) for name in ("variance", "fourth", "overlap")),
            Expected("further", self.further, rows, torch.uint8),
        ]
        check_tensors(expected)
        if more % WIDTH or more < sizes.node_room * each:
            raise ValueError(f"samples must have {sizes.node_room} times {each} columns, got {more}")
        if self.place.numel() and not 0 <= int(self.place.min()) <= int(self.place.max()) < WIDTH:
            raise ValueError(f"place must lie between 0 and {WIDTH - 1}, got up to {int(self.place.max())}")
        pointers = {own.name: own.tensor.data_ptr() for own in expected}
        chosen = {"aims": AIMS, "step": STEP, "most_rows": MOST_ROWS, "most_off": MOST_OFF, "below": BELOW}
        return Samples(**pointers, each=each, stride=WIDTH, allowed=self.allowed, margin=MARGIN, **chosen)
