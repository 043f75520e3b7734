"""Routed attention from its definition, in loops over sequences, heads and queries, in float64.

The oracle of `prescore.routed`, which shares the configuration and the tree with it and nothing else. Each query
tells which keys it counts and what its stand-ins are; one dense softmax does the rest. Autograd goes through all
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
from prescore.testing.routed_far import Anyway, Far, Sizes, coded_query
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
        together = n_query == n_keys  # then a query is padding where its key is
        n_real_query = int(mask.sum()) if together else n_query
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
        stand_ins: `[Nq, M]` what is added to the logits of the nodes' means; -inf = no stand-in.
        move: `[Nq, M]` how many drifts a stand-in's value lies from its node's mean.
        drift: `[Nq, Dv]`.
        nodes: `[Nq]` how many nodes each query sees.
        found: `[Nq]` how many of their keys it reads.
    """

    shift: int
    rows: Tensor
    keys: Tensor
    compared: Tensor
    stand_ins: Tensor
    move: Tensor
    drift: Tensor
    nodes: Tensor
    found: Tensor

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Attended:
        """One softmax over keys and stand-ins; `query [Nq, D]` is scaled, `key [Nk, D]` has padding before."""
        key, value = key[self.shift :], value[self.shift :]
        logits = torch.cat(
            (
                (query @ key.T).masked_fill(~self.keys, -math.inf),
                query @ key[self.rows].mean(1).T + self.stand_ins,
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
        look = seen.look(scaled[i], coded[i], Anyway(logits[i, anyway], is_sink), sequence.config.rows)
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
        table([look.stand_ins for look in looks], n_nodes, -math.inf),
        table([look.move for look in looks], n_nodes),
        table([look.drift for look in looks], far.beside.shape[-1]),
        torch.tensor([float(len(look.compared)) for look in looks]),
        torch.tensor([float(look.read.sum()) for look in looks]),
    )
