"""Nodes of chunks in compiled code, their codes already in its layout."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from prescore.clustering.tree import FIT_SIZE
from prescore.ops.backend import Backend
from prescore.ops.native.library import NO_LEVEL
from prescore.routed.codes import Codes
from prescore.routed.compiled.checked import (
    POINTER,
    SIZE,
    WIDTH,
    RowsStruct,
    call_library,
    check_lanes,
    real_numbers,
    rows_struct,
)
from prescore.routed.compiled.far import level_for
from prescore.routed.layout import Layout
from prescore.routed.tables import Nodes


class NodeCall(ctypes.Structure):
    """What is read and made, as ops/native/nodes.c has it."""

    _fields_ = (
        ("key", RowsStruct),
        ("value", RowsStruct),
        *((name, SIZE) for name in ("lanes", "begin", "chunks", "chunk", "levels", "leaf", "dim", "value_dim")),
        ("fit_size", SIZE),
        *((name, POINTER) for name in ("rows", "node_key", "node_value", "codes", "scales", "spread", "drift")),
    )


def can_build(key: Tensor, value: Tensor, layout: Layout, backend: Backend) -> bool:
    """Whether compiled code makes the same nodes, and no gradient is to reach them."""
    learned = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
    # the tree takes another way for a few points of many dimensions
    few = layout.levels > 0 and 2 * (layout.chunk >> (layout.levels - 1)) <= key.shape[-1]
    return not learned and not few and level_for(key, value.shape[-1], layout.leaf, backend) != NO_LEVEL


def build_nodes_compiled(key: Tensor, value: Tensor, layout: Layout, begin: int, n_chunks: int) -> Nodes:
    """Nodes of `n_chunks` chunks from `begin` on, as `build_nodes`; keys `[T, N, D]` or `[B, Hkv, N, D]`."""
    n_lanes, n_keys, dim, wide = key.shape[:-2].numel(), key.shape[-2], key.shape[-1], value.shape[-1]
    n_nodes, leaf = n_chunks * layout.nodes_per_chunk, layout.leaf
    check_lanes(key, value, n_lanes, leaf)
    if begin < 0 or begin + n_chunks * layout.chunk > n_keys or layout.chunk != leaf << layout.levels:
        raise ValueError(f"chunks must lie within {n_keys} keys, got {n_chunks} from {begin} on")
    rows = torch.empty(n_lanes, n_nodes, leaf, dtype=torch.int32, device="cpu")
    means = [real_numbers(n_lanes, n_nodes, size) for size in (dim, wide)]
    codes = torch.empty(n_lanes, n_nodes, leaf // WIDTH, dim // 8, WIDTH, 4, dtype=torch.uint8, device="cpu")
    scales = real_numbers(n_lanes, n_nodes, leaf // WIDTH, 2, WIDTH)
    spread, drift = (real_numbers(n_lanes, n_chunks, dim, size) for size in (dim, wide))
    where = [rows_struct(t) for t in (key, value)]
    made = (rows, *means, codes, scales, spread, drift)
    names = ("rows", "node_key", "node_value", "codes", "scales", "spread", "drift")
    call = NodeCall(
        key=where[0],
        value=where[1],
        lanes=n_lanes,
        begin=begin,
        chunks=n_chunks,
        chunk=layout.chunk,
        levels=layout.levels,
        leaf=leaf,
        dim=dim,
        value_dim=wide,
        fit_size=FIT_SIZE,
        **{name: t.data_ptr() for name, t in zip(names, made, strict=True)},
    )
    call_library("prescore_build_nodes", call)
    return Nodes(rows, means[0], means[1], Codes(codes, scales), spread, drift)
