"""One sequence of a routed call, and which of its heads copy, from the definition and one query at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prescore.config import Routed
from prescore.testing.routed_pieces import JOINED, Sizes, make_piece, round_sizes

FINE_LEAF = 8
"""Keys of a leaf of heads that copy."""
POINTED = 0.25
"""Share of the oldest piece's mass that must lie on keys that stand out, or nothing more is asked."""
TOO_FAR_OFF = 0.008
"""Relative squared error behind coarse leaves from which on a head may copy."""
HELPFUL = 0.5
"""Share of it that may be left behind fine leaves."""
SPARE = 0.5
"""Share of their rows that other heads give up."""
N_ASKED = 64
"""Queries that are asked."""


@dataclass(eq=False)
class Sequence:
    """What lies before the first real key is cut off from `key`, `value` and `real`.

    Attributes:
        query: `[Hkv, G, Nq, D]`.
        key: `[Hkv, Nk, D]`.
        value: `[Hkv, Nk, Dv]`.
        real: `[Nk]`, False = padding.
        is_causal: Whether the queries are the last positions and see no later key.
        config: The configuration.
        scale: Factor of the logits.
        shift: What was cut off.
        start: Position of the first query, where positions of queries mean something.
        fine: Which key heads read fine leaves.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    real: Tensor
    is_causal: bool
    config: Routed
    scale: float
    shift: int = field(init=False)
    start: int = field(init=False)
    fine: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        places: list[int] = self.real.nonzero()[:, 0].tolist()
        self.n_query, self.n_keys, self.n_real = self.query.shape[2], len(self.real), len(places)
        self.shift = places[0] if places else 0
        self.start = self.n_keys - self.n_query - self.shift
        self.key, self.value = self.key[:, self.shift :], self.value[:, self.shift :]
        self.real = self.real[self.shift :]
        self.is_real: list[bool] = self.real.tolist()
        self.fine = [False] * len(self.key)
        if self.is_causal and not self.reads_all():
            self.fine = self.heads_that_copy()

    def reads_all(self) -> bool:
        """Whether all queries read all keys: few queries, or, with a causal mask, padding behind some of them."""
        together = self.n_query == self.n_keys
        if not self.is_causal:
            return (self.n_real if together else self.n_query) < self.config.exact_until
        gaps = not bool(self.real[: self.n_real].all()) or self.n_real == 0
        return gaps or (not together and self.n_real < self.start + self.n_query)

    def sizes_of(self, head: int) -> Sizes:
        """Coarse leaves, or fine ones and the rows that the other heads of the layer give up."""
        config, n_fine = self.config, sum(self.fine)
        spare = int(config.rows * SPARE) if n_fine else 0
        if self.fine[head]:
            more = min(config.rows, spare * (len(self.fine) - n_fine) // n_fine)
            return self._sizes(FINE_LEAF, config.rows + more)
        return self._sizes(config.leaf_size, max(min(config.rows, config.leaf_size), config.rows - spare))

    def _sizes(self, leaf_size: int, rows: int) -> Sizes:
        singles = leaf_size == self.config.leaf_size  # so small a leaf hides little
        return round_sizes(self.config.sinks, self.config.chunk_size, leaf_size, rows, with_singles=singles)

    def heads_that_copy(self) -> list[bool]:
        """Key heads whose last exact queries would be far off behind coarse leaves, and not behind fine ones."""
        config = self.config
        coarse, fine = self._sizes(config.leaf_size, config.rows), self._sizes(FINE_LEAF, config.rows)
        chunk, until = coarse.chunk, config.exact_until
        known = until >= config.sinks + (JOINED + 2) * chunk and self.start <= until - 2 * chunk
        if not known or fine.chunk != chunk or config.leaf_size <= FINE_LEAF or self.n_real <= until:
            return [False] * len(self.key)
        step = max(1, 2 * chunk // N_ASKED)
        asked = list(range(until - 2 * chunk + step - 1, until, step))
        found = []
        for head in range(len(self.key)):
            needs = any(self._stands_out(head, group, asked, chunk) for group in range(self.query.shape[1]))
            if needs:
                error = self._error_behind(head, asked, coarse, 1)
                less = self._error_behind(head, asked, fine, config.leaf_size // FINE_LEAF)
                needs = error > TOO_FAR_OFF and less < HELPFUL * error
            found.append(needs)
        return found

    def _logits(self, head: int, group: int, position: int) -> Tensor:
        query = self.query[head, group, position - self.start]
        logits: Tensor = self.scale * self.key[head, : position + 1] @ query
        return logits

    def _stands_out(self, head: int, group: int, asked: list[int], chunk: int) -> bool:
        """Whether much of the mass on the oldest large piece lies on keys of over four times the mean weight."""
        high = mass = 0.0
        for position in asked:
            weights = self._logits(head, group, position).softmax(0)
            own = weights[self.config.sinks : self.config.sinks + JOINED * chunk]
            high += float(own[own > 4 * own.mean()].sum())
            mass += float(own.sum())
        return high > POINTED * mass

    def _error_behind(self, head: int, asked: list[int], sizes: Sizes, n_read: int) -> float:
        """Relative squared error with `n_read` leaves of the oldest large piece read; of the worst query head."""
        leaves = [leaf.keys for leaf in make_piece(self.key[head], self.real, 0, sizes, large=True).leaves]
        key_means = torch.stack([self.key[head, own].mean(0) for own in leaves])
        value_means = torch.stack([self.value[head, own].mean(0) for own in leaves])
        errors = []
        for group in range(self.query.shape[1]):
            wrong = right = 0.0
            for position in asked:
                logits = self._logits(head, group, position)
                values = self.value[head, : position + 1]
                exact = logits.softmax(0) @ values
                query = self.query[head, group, position - self.start]
                stand_ins = self.scale * key_means @ query + math.log(sizes.leaf)
                for number in stand_ins.topk(min(n_read, len(leaves))).indices.tolist():
                    stand_ins[number] = -math.inf
                for number, own in enumerate(leaves):
                    if stand_ins[number] > -math.inf:
                        logits[own] = -math.inf
                weights = torch.cat((logits, stand_ins)).softmax(0)
                wrong += float((weights @ torch.cat((values, value_means)) - exact).square().sum())
                right += float(exact.square().sum())
            errors.append(wrong / right if right else 0.0)
        return max(errors)
