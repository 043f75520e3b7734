"""Where routed attention reads exactly, and what its clusters are.

Causal: position p lies in chunk `(p - sinks) // chunk`. It reads the sinks, its own chunk up to itself and the
chunk before exactly; every earlier chunk is a *piece*: a tree of equal leaves. Without a causal mask there is
no local part, and all keys behind the sinks are one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.attention.kernels import accumulation_dtype
from prescore.config import PrescoreConfig

TreeBuilder = Callable[[Tensor, int, Tensor | None], Tensor]
"""`(points [P, N, D], levels, valid [P, N] or None) -> order [P, N]`: leaves as runs of equal length."""


@dataclass(frozen=True)
class Layout:
    """The fixed geometry of one call; all lengths in keys.

    Attributes:
        n_query: Queries.
        n_key: Keys.
        causal: Whether queries are the last `n_query` positions and see no later key.
        sinks: First positions, read exactly by everyone.
        chunk: Keys of one piece (and of the local chunks), a multiple of `leaf`.
        leaf: Keys of one cluster, at most the size asked for.
        n_pieces: Pieces that some query sees as clusters.
        n_chosen: Leaves a query reads exactly.
    """

    n_query: int
    n_key: int
    causal: bool
    sinks: int
    chunk: int
    leaf: int
    n_pieces: int
    n_chosen: int

    @property
    def levels(self) -> int:
        """Bisections of one piece."""
        return (self.chunk // self.leaf).bit_length() - 1

    @property
    def leaves_per_piece(self) -> int:
        """Leaves of one piece."""
        return self.chunk // self.leaf

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
        return self.sinks + 2 * self.chunk

    def pieces_seen(self, position: Tensor) -> Tensor:
        """How many pieces a query at this position sees as clusters."""
        if not self.causal:
            return torch.full_like(position, self.n_pieces)
        return ((position - self.sinks) // self.chunk - 1).clamp_min(0)


def make_layout(n_query: int, n_key: int, *, causal: bool, config: PrescoreConfig) -> Layout:
    """Round the configured sizes so that every piece is a full binary tree."""
    sinks = min(config.sinks, n_key)
    span = config.chunk_size if causal else max(1, n_key - sinks)
    levels = max(0, -(-span // config.leaf_size) - 1).bit_length()
    chunk = -(-span // 2**levels) * 2**levels
    leaf = chunk >> levels
    n_pieces = max(0, (n_key - 1 - sinks) // chunk - 1) if causal else int(n_key > sinks)
    n_leaves = n_pieces * 2**levels
    return Layout(
        n_query, n_key, causal, sinks, chunk, leaf, n_pieces, min(config.rows // leaf, n_leaves)
    )


@dataclass(frozen=True, eq=False)
class Clusters:
    """Keys and values in tree order with one stand-in per leaf; `T = B * Hkv` trees, `M` leaves of `L` keys.

    Attributes:
        rows: `[T, M, L]` positions of the members in their sequence.
        alive: `[T, M, L]`, False on filler; None = no filler.
        mean_key: `[T, M, D]`; gradients reach the members.
        mean_value: `[T, M, Dv]`.
        log_count: `[T, M]`, -inf for a leaf without members; None = all leaves full.
    """

    rows: Tensor
    alive: Tensor | None
    mean_key: Tensor
    mean_value: Tensor
    log_count: Tensor | None


def build_clusters(
    key: Tensor, value: Tensor, layout: Layout, valid: Tensor | None, tree_builder: TreeBuilder
) -> Clusters:
    """Trees over the pieces and the stand-ins of their leaves.

    Args:
        key: `[B, Hkv, Nk, D]`, left-aligned.
        value: `[B, Hkv, Nk, Dv]`.
        layout: The geometry.
        valid: `[B, Nk]`, or None. Causal calls need none: what lies behind a real query is real.
        tree_builder: See `TreeBuilder`.
    """
    n_trees, span = key.shape[0] * key.shape[1], layout.n_pieces * layout.chunk
    stop = min(layout.sinks + span, layout.n_key)
    own = stop - layout.sinks
    alive = None
    if not layout.causal and (valid is not None or own < span):
        alive = torch.zeros(key.shape[0], span, dtype=torch.bool, device=key.device)
        alive[:, :own] = True if valid is None else valid[:, layout.sinks : stop]
        alive = alive.repeat_interleave(key.shape[1], dim=0).view(n_trees * layout.n_pieces, layout.chunk)
    points = torch.nn.functional.pad(key.detach()[:, :, layout.sinks : stop], (0, 0, 0, span - own))
    order = tree_builder(points.reshape(n_trees * layout.n_pieces, layout.chunk, -1), layout.levels, alive)
    start = torch.arange(layout.n_pieces, device=key.device) * layout.chunk + layout.sinks
    rows = order.view(n_trees, layout.n_pieces, layout.chunk) + start[None, :, None]
    rows = rows.view(n_trees, layout.n_leaves, layout.leaf)
    if alive is not None:
        alive = alive.gather(1, order).view(rows.shape)
        rows = rows.clamp_max(layout.n_key - 1)
    return Clusters(rows, alive, *_stand_ins(key, value, rows, alive))


def _stand_ins(
    key: Tensor, value: Tensor, rows: Tensor, alive: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    members = [_members(tensor, rows) for tensor in (key, value)]
    if alive is None:
        return members[0].mean(2), members[1].mean(2), None
    count = alive.sum(-1)
    safe = count.clamp_min(1)[..., None]
    # filler repeats a real row, which may be padding: it must not even be multiplied
    means = [tensor.masked_fill(~alive[..., None], 0).sum(2) / safe for tensor in members]
    return means[0], means[1], count.to(accumulation_dtype(key.dtype)).log()


def _members(tensor: Tensor, rows: Tensor) -> Tensor:
    """`[B, H, N, D]` -> `[T, M, L, D]`."""
    n_trees, length, dim = rows.shape[0], tensor.shape[2], tensor.shape[3]
    flat = rows + torch.arange(0, n_trees * length, length, device=rows.device)[:, None, None]
    return tensor.reshape(-1, dim).index_select(0, flat.reshape(-1)).view(*rows.shape, dim)
