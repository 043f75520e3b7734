"""Routed attention from its definition, in loops over sequences, heads and queries, in float64.

The oracle of `prescore.routed`, which shares the configuration and the tree with it and nothing else. Each query
tells which keys it counts and what its centroids are; one dense softmax does the rest. Autograd goes through all
of it but the choices: the tree, codes, and which keys are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.config import Routed
from prescore.routed.tree import bisection_tree
from prescore.types import Attended


def routed_oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Routed,
    *,
    is_causal: bool,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
) -> Attended:
    """What `prescored_attention` must give with this configuration, in float64 and differentiable by autograd.

    Trees and codes are made in the precision of the inputs. Causal queries that are padding themselves are not
    specified behind the last real key: they see nothing here.
    """
    arguments = (query, key, value, config)
    tables = routed_tables(*arguments, is_causal=is_causal, key_padding_mask=key_padding_mask, scale=scale)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    group = query.shape[1] // key.shape[1]
    if key_padding_mask is not None:  # padding may hold anything, and 0 * NaN is NaN
        key, value = (t.masked_fill(~key_padding_mask[:, None, :, None], 0.0) for t in (key, value))
    query, key, value = (t.double() for t in (query, key, value))
    outputs, lses = query.new_zeros(*query.shape[:3], value.shape[-1]), query.new_zeros(query.shape[:3])
    for (row, head), table in tables.items():
        kind = head // group
        found = table.attend(query[row, head] * scale, key[row, kind], value[row, kind])
        place = (torch.tensor(row), torch.tensor(head))
        outputs, lses = outputs.index_put(place, found.output), lses.index_put(place, found.lse)
    return Attended(outputs, lses)


def routed_tables(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Routed,
    *,
    is_causal: bool,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
) -> dict[tuple[int, int], HeadTable]:
    """What the queries of each sequence and query head count."""
    if config.tolerance is not None:
        raise ValueError(f"tolerance must be None for the oracle, which bounds nothing, got {config.tolerance}")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    group, n_keys = query.shape[1] // key.shape[1], key.shape[2]
    tables = {}
    for row in range(query.shape[0]):
        mask = torch.ones(n_keys, dtype=torch.bool) if key_padding_mask is None else key_padding_mask[row]
        sequence = Sequence.of(mask, query.shape[2], is_causal, config)
        own = slice(sequence.shift, sequence.shift + len(sequence.real))
        for kind in range(key.shape[1]):
            keys, values = (t[row, kind, own].masked_fill(~sequence.real[:, None], 0.0) for t in (key, value))
            far = Far.of(keys, values, sequence.sizes, sequence.most_chunks())
            for head in range(kind * group, (kind + 1) * group):
                tables[row, head] = make_table(sequence, query[row, head], keys, far, scale)
    return tables


@dataclass(frozen=True, eq=False)
class Sequence:
    """Where the queries of one sequence stand; positions count from its first real key.

    Attributes:
        real: `[n]` which positions hold real keys.
        shift: Padding before position 0.
        start: Position of the first query; negative = before the first real key. Causal only.
        n_query: Queries.
        n_real_query: Those that are not padding themselves.
        is_causal: Whether a query sees no later key.
        config: The configuration.
    """

    real: Tensor
    shift: int
    start: int
    n_query: int
    n_real_query: int
    is_causal: bool
    config: Routed

    @classmethod
    def of(cls, mask: Tensor, n_query: int, is_causal: bool, config: Routed) -> Sequence:
        """The sequence with these real keys, `mask [Nk]`."""
        n_keys = len(mask)
        shift = int(mask.nonzero()[0]) if bool(mask.any()) else 0
        parallel_group = n_query == n_keys  # then a query is padding where its key is
        n_real_query = int(mask.sum()) if parallel_group else n_query
        return cls(mask[shift:], shift, n_keys - n_query - shift, n_query, n_real_query, is_causal, config)

    @cached_property
    def sizes(self) -> Sizes:
        """The configured sizes, rounded."""
        return Sizes.of(self.config)

    @cached_property
    def n_real(self) -> int:
        """Real keys."""
        return int(self.real.sum())

    @cached_property
    def reads_all(self) -> bool:
        """Whether every query reads all keys that it may see."""
        if not bool(self.real[: self.n_real].all()):
            return True  # padding between real keys
        if self.is_causal:
            beside = self.n_query == len(self.real) + self.shift
            return not beside and self.n_real < len(self.real)  # padding behind real keys, but before real queries
        return self.n_real_query < self.config.exact_until or self.n_real < self.sizes.sinks + self.sizes.chunk

    def chunks_seen(self, i: int) -> int:
        """How many chunks are nodes for query `i`."""
        if self.reads_all:
            return 0
        if not self.is_causal:
            return (self.n_real - self.sizes.sinks) // self.sizes.chunk
        position, exact = self.start + i, max(self.sizes.sinks + 2 * self.sizes.chunk, self.config.exact_until)
        if position < exact or position >= self.n_real:
            return 0
        return (position - self.sizes.sinks) // self.sizes.chunk - 1

    def most_chunks(self) -> int:
        """Chunks that some query sees as nodes."""
        return max((self.chunks_seen(i) for i in range(self.n_query)), default=0)

    def read_anyway(self, i: int) -> Tensor:
        """`[n]` keys that query `i` reads whatever it looks for."""
        position = torch.arange(len(self.real))
        begin, chunks = self.sizes.sinks, self.chunks_seen(i)
        nodes = (position >= begin) & (position < begin + chunks * self.sizes.chunk)
        read = self.real & ~nodes
        if not self.is_causal:
            return read
        padding = not self.reads_all and self.start + i >= self.n_real
        return read & (position <= self.start + i) & (not padding)


class HeadTable(NamedTuple):
    """What the queries of one head count; `n` positions with `shift` of padding before, `M` nodes of `L` keys.

    Attributes:
        shift: Padding before position 0.
        rows: `[M, L]` positions of the nodes' keys.
        keys: `[Nq, n]` keys that count by themselves.
        compared: `[Nq]` of how many keys it looked at the codes.
        centroids: `[Nq, M]` what is added to the logits of the nodes' means; -inf = no centroid.
        move: `[Nq, M]` how many drifts a centroid's value lies from its node's mean.
        drift: `[Nq, Dv]`.
        nodes: `[Nq]` how many nodes each query sees.
        found: `[Nq]` how many of their keys it reads.
    """

    shift: int
    rows: Tensor
    keys: Tensor
    compared: Tensor
    centroids: Tensor
    move: Tensor
    drift: Tensor
    nodes: Tensor
    found: Tensor

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Attended:
        """One softmax over keys and centroids; `query [Nq, D]` is scaled, `key [Nk, D]` has padding before."""
        key, value = key[self.shift :], value[self.shift :]
        logits = torch.cat(
            (
                (query @ key.T).masked_fill(~self.keys, -math.inf),
                query @ key[self.rows].mean(1).T + self.centroids,
            ),
            dim=1,
        )
        # rows that see nothing are computed as if flat and then cleared: autograd through -inf - -inf is NaN
        blind = torch.isneginf(logits).all(1)
        logits = logits.masked_fill(blind[:, None], 0.0)
        weights = logits.softmax(1)
        moved = (weights[:, len(key) :] * self.move).sum(1, keepdim=True) * self.drift
        output = weights @ torch.cat((value, value[self.rows].mean(1))) + moved
        lse = logits.logsumexp(1).masked_fill(blind, -math.inf)
        return Attended(output.masked_fill(blind[:, None], 0.0), lse)


def make_table(sequence: Sequence, query: Tensor, key: Tensor, far: Far, scale: float) -> HeadTable:
    """Let every query of one head look; `query [Nq, D]` and `key [n, D]` as they were given."""
    n_query, n_nodes = sequence.n_query, far.rows.shape[0]
    scaled = query.double() * scale
    own = query.detach()
    coded = coded_query((own if own.dtype == torch.float64 else own.float()) * scale)
    logits = scaled @ key.double().T
    keys = torch.zeros(n_query, len(key), dtype=torch.bool)
    looks = []
    for i in range(n_query):
        anyway = sequence.read_anyway(i)
        seen = far.first(sequence.chunks_seen(i) * 2**sequence.sizes.levels)
        is_sink = anyway.nonzero().squeeze(1) < sequence.sizes.sinks
        look = seen.look(scaled[i], coded[i], Anyway(logits[i, anyway], is_sink), sequence.config.min_weight)
        keys[i] = anyway
        keys[i, seen.rows[look.read]] = True
        looks.append(look)

    def table(parts: list[Tensor], width: int, fill: float = 0.0) -> Tensor:
        rows = [torch.cat((part, part.new_full((width - len(part),), fill))) for part in parts]
        return torch.stack(rows) if rows else torch.zeros(0, width)

    return HeadTable(
        sequence.shift,
        far.rows,
        keys,
        torch.tensor([float(look.compared.sum()) for look in looks]),
        table([look.centroids for look in looks], n_nodes, -math.inf),
        table([look.move for look in looks], n_nodes),
        table([look.drift for look in looks], far.beside.shape[-1]),
        torch.tensor([float(len(look.compared)) for look in looks]),
        torch.tensor([float(look.read.sum()) for look in looks]),
    )


# What one query makes of the chunks that it sees as nodes, from the definition and without any table.
#
# A part of the oracle in `oracles.routed`. It shares the tree with the engine and nothing else: spread and
# drift are sums over single keys, codes are whole numbers beside their scales.


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
        while config.cluster_size * 2**levels < config.chunk_size:
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
        centroids: `[M]` what the centroids' logits are above those of the means; -inf = all keys were read.
        move: `[M]` how many drifts the centroids' values lie from the means.
        drift: `[Dv]`.
    """

    compared: Tensor
    read: Tensor
    centroids: Tensor
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

    def look(self, query: Tensor, coded: Tensor, exact: Anyway, min_weight: float) -> Look:
        """What a query reads.

        Args:
            query: `[D]` in float64, times the scale of the logits.
            coded: `[D']` the same as it is compared.
            exact: What it reads in any case.
            min_weight: Of the configuration.
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
        limit = known - math.log(1 / min_weight) if min_weight < 1 else torch.full_like(known, math.inf)
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
