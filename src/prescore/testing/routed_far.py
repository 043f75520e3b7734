"""What one query makes of the chunks that it sees as nodes, from the definition and without any table.

A part of the oracle in `prescore.testing.routed`. It shares the tree with the engine and nothing else: spread and
drift are sums over single keys, codes are whole numbers beside their scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.clustering.tree import bisection_tree
from prescore.config import Routed


class Sizes(NamedTuple):
    """Lengths in keys; a chunk is `2 ** levels` nodes of `leaf` keys."""

    sinks: int
    levels: int
    leaf: int

    @property
    def chunk(self) -> int:
        """Keys of a chunk."""
        return self.leaf << self.levels

    @classmethod
    def of(cls, config: Routed) -> Sizes:
        """Halve the chunk until no piece is larger than asked for; what does not divide is left off."""
        levels = 0
        while config.leaf_size * 2**levels < config.chunk_size:
            levels += 1
        return cls(config.sinks, levels, max(1, config.chunk_size // 2**levels))


class Anyway(NamedTuple):
    """Logits of the keys that a query reads in any case, and which of them are sinks."""

    logits: Tensor
    is_sink: Tensor


class Look(NamedTuple):
    """What a query reads of `M` nodes of `L` keys, and how it counts the others.

    Attributes:
        compared: `[M, L]` keys whose codes were looked at; a choice without gradients.
        read: `[M, L]` keys that count by themselves; likewise.
        stand_ins: `[M]` what the stand-ins' logits are above those of the means; -inf = all keys were read.
        move: `[M]` how many drifts the stand-ins' values lie from the means.
        drift: `[Dv]`.
    """

    compared: Tensor
    read: Tensor
    stand_ins: Tensor
    move: Tensor
    drift: Tensor


@dataclass(frozen=True, eq=False)
class Far:
    """The first chunks of one key head as nodes, in float64; rows and codes are choices without gradients.

    Attributes:
        rows: `[M, L]` positions of the nodes' keys.
        mean: `[M, D]` of their keys.
        away: `[M, L, D]` keys less the mean of their node.
        beside: `[M, L, Dv]` values less the mean of their node.
        codes: `[M, L, D']` what the keys are above the mean, as it is compared: whole numbers times the scale of
            their half.
        odd: `[M, L]` the keys of each node that every query compares.
    """

    rows: Tensor
    mean: Tensor
    away: Tensor
    beside: Tensor
    codes: Tensor
    odd: Tensor

    @classmethod
    def of(cls, key: Tensor, value: Tensor, sizes: Sizes, n_chunks: int) -> Far:
        """Nodes of `key [N, D]` and `value [N, Dv]`, tree and codes in the precision that the keys come in."""
        rows = [torch.zeros(0, sizes.leaf, dtype=torch.int64)]
        for begin in range(sizes.sinks, sizes.sinks + n_chunks * sizes.chunk, sizes.chunk):
            order = bisection_tree(key.detach()[begin : begin + sizes.chunk], sizes.levels)
            rows.append(begin + order.view(-1, sizes.leaf))
        places = torch.cat(rows)
        keys, values = key[places], value[places].double()
        mean = keys.double().mean(1)
        away, beside = keys.double() - mean[:, None], values - values.mean(1, keepdim=True)
        own = keys.detach() if keys.dtype == torch.float64 else keys.detach().float()
        apart = own - own.mean(1, keepdim=True)
        return cls(places, mean, away, beside, coded_keys(apart), odd_keys(apart, places))

    def first(self, n_nodes: int) -> Far:
        """The first nodes alone."""
        return Far(*(t[:n_nodes] for t in (self.rows, self.mean, self.away, self.beside, self.codes, self.odd)))

    def look(self, query: Tensor, coded: Tensor, exact: Anyway, rows: int) -> Look:
        """What a query reads.

        Args:
            query: `[D]` in float64, times the scale of the logits.
            coded: `[D']` the same as it is compared.
            exact: What it reads in any case.
            rows: Of the configuration.
        """
        n_nodes, leaf = self.rows.shape
        if not n_nodes:
            nothing = query.new_zeros(0)
            none = self.rows > 0
            return Look(none, none, nothing, nothing, self.beside.new_zeros(self.beside.shape[-1]))
        apart = self.away @ query
        deviation = apart.square().mean().clamp_min(1e-3**2).sqrt()
        drift = (apart[..., None] * self.beside).mean((0, 1))
        logits = self.mean @ query
        nodes = logits + math.log(leaf) + (deviation**2 / 2).clamp_max(4.0)
        counted = exact.logits + exact.is_sink.double() * math.log(0.1)
        known = torch.cat((counted, nodes)).logsumexp(0)
        limit = known - math.log(2 * rows) if rows else torch.full_like(known, math.inf)
        compared = (logits + 3 * deviation >= limit)[:, None] | (self.odd & (limit < math.inf))
        read = compared & (logits[:, None] + self.codes @ coded >= limit)
        gain, move = normal_rest(limit - logits, deviation)
        left = leaf - read.sum(1).double()
        return Look(compared, read, left.log() + gain, move, drift)


def odd_keys(apart: Tensor, rows: Tensor) -> Tensor:
    """`[M, L]` the sixteen keys of each node that lie farthest from its mean, `apart [M, L, D]`.

    Squared distances are compared to eight binary digits; of equal ones the earliest key is taken.
    """
    odd = torch.zeros(apart.shape[:2], dtype=torch.bool)
    for node, squares in enumerate(apart.square().sum(-1).tolist()):
        ranks = [(_digits(square), -row) for square, row in zip(squares, rows[node].tolist(), strict=True)]
        first = sorted(range(len(ranks)), key=lambda place: ranks[place], reverse=True)
        odd[node, first[:16]] = True
    return odd


def _digits(number: float) -> tuple[float, int]:
    """Power and first eight binary digits; what float32 cannot hold is as large as anything."""
    part, power = math.frexp(number)
    if not number <= torch.finfo(torch.float32).max:
        return math.inf, 0
    return (power, int(part * 256)) if part else (-math.inf, 0)


def normal_rest(distance: Tensor, deviation: Tensor | float) -> tuple[Tensor, Tensor]:
    """What is left of normal logits below a limit: the gain over their mean, and the share of the drift."""
    far = distance.clamp_max(1e30) / deviation  # with no limit at all autograd would meet 0 * inf
    gain = deviation**2 / 2 + log_phi(far - deviation) - log_phi(far)
    move = 1 - log_phi_slope(far - deviation) / deviation
    return gain.clamp(-2, 2), move.clamp(-1, 1)


def log_phi(x: Tensor) -> Tensor:
    """About the log of the normal distribution function."""
    x = x.clamp(-4, 8)
    return -torch.log1p(torch.exp(-(1.5976 * x + 0.07056 * x**3)))


def log_phi_slope(x: Tensor) -> Tensor:
    """Its derivative."""
    x = x.clamp(-4, 8)
    return torch.sigmoid(-(1.5976 * x + 0.07056 * x**3)) * (1.5976 + 3 * 0.07056 * x**2)


def coded_keys(key: Tensor) -> Tensor:
    """Keys `[..., D]` rounded to four bits, as float64 `[..., D']`: each half of the dimensions has a scale."""
    halves: Tensor = _filled(key).unflatten(-1, (2, -1))
    scale: Tensor = halves.abs().amax(-1, keepdim=True) / 7.49
    numbers = (halves / scale.masked_fill(scale == 0, 1.0)).round().clamp(-8, 7)
    return (numbers.double() * scale.double()).flatten(-2)


def coded_query(query: Tensor) -> Tensor:
    """Queries `[..., D]`, already scaled, rounded to six bits, as float64 `[..., D']`."""
    query = _filled(query)
    scale = query.abs().amax(-1, keepdim=True) / 31
    return (query / scale.masked_fill(scale == 0, 1.0)).round().double() * scale.double()


def _filled(rows: Tensor) -> Tensor:
    """Zeros up to a multiple of 16 dimensions, at least in float32."""
    rows = rows if rows.dtype == torch.float64 else rows.float()
    n_fill = -rows.shape[-1] % 16
    return torch.cat((rows, rows.new_zeros(*rows.shape[:-1], n_fill)), dim=-1)
