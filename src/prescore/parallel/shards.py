"""The whole sequence as the ranks hold it: consecutive, equal pieces."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.config import Selected
from prescore.ops.backend import Backend
from prescore.parallel.comm import Group
from prescore.rng import Streams
from prescore.scoring.select import budget_count
from prescore.selected.causal_grid import FULL


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's piece of a call, checked on every rank.

    Attributes:
        group: The ranks.
        query, key, value: `[B, Hq, nq, D]`, `[B, Hkv, nk, D]`, `[B, Hkv, nk, Dv]`.
        mask: `[B, size * nk]` of the whole sequence, True = a real key; None = all are.
        is_causal: The queries of all ranks are the last positions and see no later key.
        scale: Factor of the logits, above 0.
        backend: The operator.
        streams: Randomness, the same on every rank.
        native: Whether native code may run where it can.
    """

    group: Group
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    backend: Backend
    streams: Streams
    native: bool = True

    @property
    def n_query(self) -> int:
        """Queries of all ranks."""
        return self.query.shape[2] * self.group.size

    @property
    def n_keys(self) -> int:
        """Keys of all ranks."""
        return self.key.shape[2] * self.group.size

    @property
    def first_query(self) -> int:
        """Position of this rank's first query; without causality positions of queries mean nothing."""
        before = self.n_keys - self.n_query if self.is_causal else 0
        return before + self.group.rank * self.query.shape[2]

    @property
    def end_query(self) -> int:
        """Position behind this rank's last query."""
        return self.first_query + self.query.shape[2]


def whole_mask(group: Group, mask: Tensor | None) -> Tensor | None:
    """The masks of all ranks as one `[B, N]`; None where every key is real.

    Raises:
        ValueError: A sequence has padding between real keys; every rank raises it.
    """
    if mask is None:
        return None
    whole = group.gather(mask.to(torch.uint8)).bool().transpose(0, 1).flatten(1)
    if bool(whole.all()):
        return None
    position = torch.arange(whole.shape[1], device=whole.device)
    first = torch.where(whole, position, whole.shape[1]).amin(1, keepdim=True)
    last = torch.where(whole, position, -1).amax(1, keepdim=True)
    holes = ~whole & (position > first) & (position < last)
    if bool(holes.any()):
        row, place = holes.nonzero()[0].tolist()
        raise ValueError(
            f"key_padding_mask must have no padding between the real keys of a sequence on several ranks, "
            f"got some at position {place} of sequence {row}"
        )
    return whole


# Which ranks hold the keys of a block, and which ranks have queries that meet it.
#
# A block is the whole problem without causality, or an off-diagonal block of the causal grid, see
# `prescore.selected.causal_grid`; all of this follows from lengths alone, so every rank knows it of every other
# rank.


@dataclass(frozen=True)
class Span:
    """Positions `begin .. end`."""

    begin: int
    end: int

    @property
    def length(self) -> int:
        """How many."""
        return max(0, self.end - self.begin)

    def within(self, other: Span) -> Span:
        """The part that lies in another span; of length 0 where they do not meet."""
        begin = max(self.begin, other.begin)
        return Span(begin, max(begin, min(self.end, other.end)))

    def behind(self, first: int) -> Span:
        """The same, counted from `first`."""
        return Span(self.begin - first, self.end - first)


@dataclass(frozen=True)
class Block:
    """Keys that are scored and selected together, and the queries that meet them.

    Attributes:
        name: Of its random streams.
        keys: Positions of its keys.
        queries: Positions of its queries.
        n_kept: Keys to keep, of every sequence and head.
        first: Columns of protected keys at its beginning, which are kept and seen exactly.
        last: Columns of protected keys towards its end, likewise.
        fell_back: Whether so few keys were asked for that all are kept.
        is_exact: Whether so few queries meet it that they read its selection exactly.
    """

    name: str
    keys: Span
    queries: Span
    n_kept: int
    first: Span
    last: Span
    fell_back: bool
    is_exact: bool

    @property
    def n_free(self) -> int:
        """Keys to keep that are not protected."""
        return self.n_kept - self.first.length - self.last.length

    @property
    def keeps_all(self) -> bool:
        """Whether nothing need be scored."""
        return self.n_kept == self.keys.length


class Map:
    """Where everything lies: pieces of keys and queries by rank, and the blocks of a call.

    Attributes:
        keys: Positions of each rank's keys.
        queries: Positions of each rank's queries.
        blocks: All blocks, in an order that every rank shares.
        near: In causal mode: the positions whose keys each rank reads exactly, beginning with a leaf; else empty.
    """

    def __init__(self, piece: Shard, config: Selected) -> None:
        n_own_keys, n_own = piece.key.shape[2], piece.query.shape[2]
        ranks = range(piece.group.size)
        first = piece.n_keys - piece.n_query if piece.is_causal else 0
        self.keys = [Span(r * n_own_keys, (r + 1) * n_own_keys) for r in ranks]
        self.queries = [Span(first + r * n_own, first + (r + 1) * n_own) for r in ranks]
        self.leaf = max(1, config.min_seq_len)
        if piece.is_causal:
            self.blocks = _causal_blocks(Span(first, piece.n_keys), config, self.leaf)
            self.near = [Span(own.begin // self.leaf * self.leaf, own.end) for own in self.queries]
        else:
            self.blocks = [_full_block(piece, config)]
            self.near = [Span(0, 0) for _ in ranks]

    def holders(self, block: Block) -> list[int]:
        """Ranks with keys of a block, in the order of their positions."""
        return [rank for rank, own in enumerate(self.keys) if own.within(block.keys).length]

    def needers(self, block: Block) -> list[int]:
        """Ranks with queries that meet a block."""
        return [rank for rank, own in enumerate(self.queries) if own.within(block.queries).length]

    def columns(self, block: Block, rank: int) -> Span:
        """The keys of a rank in a block, counted from the block's first."""
        return self.keys[rank].within(block.keys).behind(block.keys.begin)


def count_blocks(n_keys: int, n_query: int, leaf: int) -> int:
    """Off-diagonal blocks of the causal grid, at most."""
    return 0 if n_query == 0 else -(-n_keys // leaf)


def _full_block(piece: Shard, config: Selected) -> Block:
    n_query = piece.n_query
    few = n_query <= config.min_seq_len if config.leaf_inclusive else n_query < config.min_seq_len
    keys = Span(0, piece.n_keys)
    return Block(FULL, keys, Span(0, n_query), *_kept(keys, config), is_exact=few)


def _causal_blocks(queries: Span, config: Selected, leaf: int) -> list[Block]:
    found, width = [], leaf
    while width < queries.end:
        name = f"level{(width // max(1, config.min_seq_len)).bit_length() - 1}"
        exact = config.leaf_inclusive and width <= config.min_seq_len
        for odd in range(1, -(-queries.end // width), 2):
            keys = Span((odd - 1) * width, odd * width)
            own = Span(odd * width, (odd + 1) * width).within(queries)
            if own.length:
                found.append(Block(name, keys, own, *_kept(keys, config), is_exact=exact))
        width *= 2
    return found


def _kept(keys: Span, config: Selected) -> tuple[int, Span, Span, bool]:
    """Keys to keep of a block, and columns of the protected ones among them; too many are cut off at the end."""
    n_kept = budget_count(config.budget, keys.length)
    fell_back = n_kept < config.min_fraction * keys.length
    n_kept = keys.length if fell_back else n_kept
    n_first = min(Span(0, config.sinks).within(keys).length, n_kept)
    begin = max(n_first, keys.length - config.recent)
    return n_kept, Span(0, n_first), Span(begin, min(keys.length, begin + n_kept - n_first)), fell_back
