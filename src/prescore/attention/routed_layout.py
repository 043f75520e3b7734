"""Where routed attention reads exactly, and what its clusters are.

The keys behind the sinks are cut into *chunks* of fixed length. A causal query reads the sinks, its own chunk up
to itself and the chunk before exactly; every earlier chunk is a *piece* for it. Without a causal mask there is
no local part and every chunk is a piece for every query. A piece consists of a few *single* keys, those least
like the rest, which everyone reads exactly, and of equal leaves of a tree over the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from prescore.attention.kernels import accumulation_dtype
from prescore.config import PrescoreConfig

TreeBuilder = Callable[[Tensor, int, Tensor | None], Tensor]
"""`(points [P, N, D], levels, valid [P, N] or None) -> order [P, N]`: leaves as runs of equal length."""

SINGLES_PER_KEY = 1 / 64


@dataclass(frozen=True)
class Layout:
    """The fixed geometry of one call; all lengths in keys.

    Attributes:
        n_query: Queries.
        n_key: Keys.
        causal: Whether queries are the last `n_query` positions and see no later key.
        sinks: First positions, read exactly by everyone.
        chunk: Keys of one chunk, `singles + 2 ** levels * leaf`.
        levels: Bisections of one piece.
        leaf: Keys of one cluster, at most the size asked for.
        singles: Keys of one piece that everyone reads exactly.
        n_pieces: Chunks that some query sees as clusters.
        n_chosen: Leaves a query reads exactly.
    """

    n_query: int
    n_key: int
    causal: bool
    sinks: int
    chunk: int
    levels: int
    leaf: int
    singles: int
    n_pieces: int
    n_chosen: int

    @property
    def leaves_per_piece(self) -> int:
        """Leaves of one piece."""
        return 1 << self.levels

    @property
    def n_leaves(self) -> int:
        """Leaves in all pieces."""
        return self.n_pieces * self.leaves_per_piece

    @property
    def first(self) -> int:
        """Position of the first query."""
        return self.n_key - self.n_query if self.causal else 0

    @property
    def head(self) -> int:
        """Causal: queries before this position read everything exactly."""
        return self.sinks + 2 * self.chunk if self.causal else 0

    def pieces_seen(self, position: Tensor) -> Tensor:
        """How many pieces a query at this position sees as clusters."""
        if not self.causal:
            return torch.full_like(position, self.n_pieces)
        return ((position - self.sinks) // self.chunk - 1).clamp_min(0)


def make_layout(n_query: int, n_key: int, *, causal: bool, config: PrescoreConfig) -> Layout:
    """Round the configured sizes so that every piece is a full binary tree; depends on no sequence length."""
    sinks = min(config.sinks, n_key)
    levels = max(0, -(-config.chunk_size // config.leaf_size) - 1).bit_length()
    chunk = max(1, config.chunk_size >> levels) << levels
    # as many singles as keep the leaves equal
    singles = max(1, round(chunk * SINGLES_PER_KEY / 2**levels)) << levels if chunk > 2**levels else 0
    leaf = (chunk - singles) >> levels
    behind = n_key - sinks
    n_pieces = max(0, (behind - 1) // chunk - 1) if causal else -(-behind // chunk)
    n_chosen = min(config.rows // config.leaf_size, n_pieces << levels)
    return Layout(n_query, n_key, causal, sinks, chunk, levels, leaf, singles, n_pieces, n_chosen)


@dataclass(frozen=True, eq=False)
class Clusters:
    """What queries see of the pieces; `T = B * Hkv` trees, `M` leaves of `L` keys, `S` single keys.

    Attributes:
        rows: `[T, M, L]` positions of the leaves' members in their sequence.
        alive: `[T, M, L]`, False on filler; None = no filler.
        leaf_key: `[T, M, L, D]` members; gradients reach the keys.
        leaf_value: `[T, M, L, Dv]`.
        mean_key: `[T, M, D]` stand-ins; gradients reach the members.
        mean_value: `[T, M, Dv]`.
        log_count: `[T, M]` log of the members, -inf for none.
        single_rows: `[T, S]` positions: the sinks, then every piece's singles.
        single_key: `[T, S, D]`.
        single_value: `[T, S, Dv]`.
        single_bias: `[T, S]` of 0, or -inf on filler.
    """

    rows: Tensor
    alive: Tensor | None
    leaf_key: Tensor
    leaf_value: Tensor
    mean_key: Tensor
    mean_value: Tensor
    log_count: Tensor
    single_rows: Tensor
    single_key: Tensor
    single_value: Tensor
    single_bias: Tensor


def build_clusters(
    key: Tensor, value: Tensor, layout: Layout, valid: Tensor | None, tree_builder: TreeBuilder
) -> Clusters:
    """Singles, trees over the other keys of each piece, and the stand-ins of their leaves.

    Args:
        key: `[B, Hkv, Nk, D]`, left-aligned.
        value: `[B, Hkv, Nk, Dv]`.
        layout: The geometry.
        valid: `[B, Nk]`, or None. Causal calls need none: what lies behind a real query is real.
        tree_builder: See `TreeBuilder`.
    """
    n_trees = key.shape[0] * key.shape[1]
    with torch.no_grad():
        alive = None if layout.causal else _alive(layout, valid, key)
        rows, single_rows = _place(key, layout, alive, tree_builder)
        single_bias = _single_bias(layout, single_rows, valid, key)
    alive_leaf = None
    if alive is not None:
        padded = pad(alive, (layout.sinks, 0)).repeat_interleave(key.shape[1], dim=0)
        alive_leaf = padded.gather(1, rows.view(n_trees, -1)).view(rows.shape)
        rows, single_rows = rows.clamp_max(layout.n_key - 1), single_rows.clamp_max(layout.n_key - 1)
    leaf_key, leaf_value = take_rows(key, rows), take_rows(value, rows)
    means, log_count = _stand_ins(leaf_key, leaf_value, alive_leaf)
    return Clusters(
        rows, alive_leaf, leaf_key, leaf_value, *means, log_count, single_rows,
        take_rows(key, single_rows), take_rows(value, single_rows), single_bias,
    )  # fmt: skip


def take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """`[B, H, N, D]` and positions `[B * H, ...]` -> `[B * H, ..., D]`."""
    length, dim = tensor.shape[2:]
    start = torch.arange(0, rows.shape[0] * length, length, device=rows.device)
    flat = rows + start.view(-1, *[1] * (rows.ndim - 1))
    return tensor.reshape(-1, dim).index_select(0, flat.reshape(-1)).view(*rows.shape, dim)


def unlikeness(points: Tensor) -> Tensor:
    """`[P, N, D] -> [P, N]`: how little a key resembles the mean of its piece, minus their cosine."""
    return -(normalize(points, dim=-1) @ normalize(points.mean(1), dim=-1)[..., None]).squeeze(-1)


def _alive(layout: Layout, valid: Tensor | None, key: Tensor) -> Tensor | None:
    """`[B, pieces * chunk]`: which places behind the sinks hold a real key; None = all."""
    behind = layout.n_key - layout.sinks
    filler = layout.n_pieces * layout.chunk - behind
    if valid is None:
        if filler == 0:
            return None
        valid = torch.ones(key.shape[0], layout.n_key, dtype=torch.bool, device=key.device)
    return pad(valid[:, layout.sinks :], (0, filler))


def _place(key: Tensor, layout: Layout, alive: Tensor | None, tree_builder: TreeBuilder) -> tuple[Tensor, Tensor]:
    """Positions of leaf members `[T, M, L]` and of single keys `[T, S]`, possibly behind the last key."""
    n_trees, n_pieces, chunk = key.shape[0] * key.shape[1], layout.n_pieces, layout.chunk
    span = n_pieces * chunk
    keys = key[:, :, layout.sinks : layout.sinks + span]
    points = pad(keys, (0, 0, 0, span - keys.shape[2])).reshape(n_trees * n_pieces, chunk, -1)
    points = points.to(accumulation_dtype(key.dtype))
    if alive is not None:
        alive = alive.repeat_interleave(key.shape[1], dim=0).view(n_trees * n_pieces, chunk)
        points = points.masked_fill(~alive[..., None], 0)
    score = unlikeness(points)
    if alive is not None:
        score = score.masked_fill(~alive, -torch.inf)
    ranked = score.argsort(dim=1, descending=True, stable=True)
    single, rest = ranked.split([layout.singles, chunk - layout.singles], dim=1)
    rest = rest.sort(dim=1).values
    points = points.gather(1, rest[..., None].expand(-1, -1, points.shape[-1]))
    order = tree_builder(points, layout.levels, None if alive is None else alive.gather(1, rest))
    start = (torch.arange(n_pieces, device=key.device) * chunk + layout.sinks)[None, :, None]
    rows = rest.gather(1, order).view(n_trees, n_pieces, -1) + start
    singles = (single.view(n_trees, n_pieces, -1) + start).flatten(1)
    sinks = torch.arange(layout.sinks, device=key.device).expand(n_trees, -1)
    return rows.view(n_trees, layout.n_leaves, layout.leaf), torch.cat((sinks, singles), dim=1)


def _single_bias(layout: Layout, rows: Tensor, valid: Tensor | None, key: Tensor) -> Tensor:
    dead = rows >= layout.n_key
    if valid is not None and not layout.causal:
        real = valid.repeat_interleave(key.shape[1], dim=0)
        dead = dead | ~real.gather(1, rows.clamp_max(layout.n_key - 1))
    bias = torch.zeros(rows.shape, dtype=accumulation_dtype(key.dtype), device=key.device)
    return bias.masked_fill_(dead, -torch.inf)


def _stand_ins(key: Tensor, value: Tensor, alive: Tensor | None) -> tuple[tuple[Tensor, Tensor], Tensor]:
    wide = accumulation_dtype(key.dtype)
    if alive is None:
        count = torch.full(key.shape[:2], key.shape[2], dtype=wide, device=key.device)
        return (key.mean(2), value.mean(2)), count.log()
    count = alive.sum(-1)
    safe = count.clamp_min(1)[..., None]
    dead = ~alive[..., None]  # filler repeats some other row: it must not count
    mean_key, mean_value = (tensor.masked_fill(dead, 0).sum(2) / safe for tensor in (key, value))
    return (mean_key.to(key.dtype), mean_value.to(value.dtype)), count.to(wide).log()
