"""Which keys are sampled, and how light the keys are that a query with samples may look for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

STRIDE = 16
"""Keys that a sample stands for."""
AIMS = 16
"""Limits that the samples choose from."""
STEP = math.log(2) / 2
"""From one to the next: two steps for keys of half the weight."""
MOST_ROWS = 1 / 3
"""Share of the keys in nodes from which on reading everything is faster than reading single rows."""
MOST_OFF = 2.0
"""Deviation of coded logits from their true values up to which a search is trusted.

A key is looked for with `MARGIN` deviations to spare. The chance that it is missed all the same falls faster with
what it weighs than its part of the error grows, but only up to here.
"""
MARGIN = 2.0
"""Deviations by which codes may be off before a key is missed."""
BELOW = 0.6
"""How much less the weights below a limit vary than those of normal logits would, for a guess."""
SHADOWS = 8
"""Random projections of values that say in how many directions errors point."""


def projection(value_dim: int, device: torch.device) -> Tensor:
    """`[SHADOWS, Dv]` of random signs, the same in every call."""
    drawn = torch.randint(2, (SHADOWS, value_dim), generator=torch.Generator().manual_seed(0))
    return (2 * drawn - 1).to(device, torch.float32)


def sample_places(n_nodes: int, leaf: int, seed: int, device: torch.device) -> Tensor:
    """`[M]`: which key of every sixteen is drawn in each node, by a hash of the node's number."""
    mixed = torch.arange(1, n_nodes + 1) * 0x9E3779B1 + (seed % 2**31) * 0x85EBCA6B
    for factor in (0x2C1B3C6D, 0x297A2D39):
        mixed = ((mixed ^ (mixed >> 15)) * factor) % 2**32
    return ((mixed ^ (mixed >> 15)) % min(STRIDE, leaf)).to(device)


def sample_rows(places: Tensor, leaf: int) -> tuple[Tensor, Tensor]:
    """`[M, m]` places of the samples in their nodes, and which of them exist."""
    each = -(-leaf // STRIDE)
    place = places[:, None] + torch.arange(each, device=places.device) * STRIDE
    return place.clamp_max(leaf - 1), place < leaf


def code_units(scales: Tensor) -> Tensor:
    """`[T, M, 2]` what a unit of the codes up to each node is worth; `scales [T, M, L, 2]`, or in blocks."""
    flat = scales if scales.ndim == 4 else scales.transpose(3, 4).flatten(2, 3)
    squares = flat.square().mean(2).cumsum(1)
    counts = torch.arange(1, squares.shape[1] + 1, device=squares.device)[:, None]
    return (squares / counts).sqrt()


def usual_distance(apart: Tensor) -> Tensor:
    """`[T, M]` the mean of `apart [T, M, m]` over the nodes up to each: how far values lie from their means."""
    counts = torch.arange(1, apart.shape[1] + 1, device=apart.device)
    return (apart.mean(2).cumsum(1) / counts).contiguous()
