"""The pieces of routed attention from their definition, one node at a time: sizes, single keys, trees, levels.

What `prescore.testing.routed` looks at. Keys are counted from the first real one of their sequence. Written again,
from the words of `prescore/routed` and `prescore/clustering/tree.py`, and sharing nothing with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KEYS_PER_SINGLE = 128
JOINED = 4
"""Chunks of a large piece."""
FAN = 8
"""Neighbours that make a node of the next level."""
WIDTH = 64
"""Stand-ins of each level that a causal query sees, at least."""
FIT_SIZE = 120
POWER_ITERATIONS = 3


@dataclass(frozen=True)
class Sizes:
    """How the keys of one head lie in clusters.

    Attributes:
        sinks: First keys, read by everyone.
        chunk: Keys of a chunk, rounded so that it is a full tree with its singles.
        levels: Bisections of a chunk.
        singles: Keys of a chunk that everyone reads.
        leaf: Keys of a leaf.
        n_chosen: Stand-ins a query chooses.
        width: Stand-ins of each level that it sees.
    """

    sinks: int
    chunk: int
    levels: int
    singles: int
    leaf: int
    n_chosen: int
    width: int

    @property
    def large_leaves(self) -> int:
        """Leaves of a large piece."""
        return JOINED << self.levels

    @property
    def kept(self) -> int:
        """Most unlike singles of a large piece, which stay single where its leaves are seen as nodes."""
        return JOINED * self.singles // FAN


def round_sizes(sinks: int, chunk_size: int, leaf_size: int, rows: int, *, with_singles: bool = True) -> Sizes:
    """Sizes as configured, rounded so that every piece is a full binary tree."""
    levels = 0
    while leaf_size * 2**levels < chunk_size:
        levels += 1
    chunk = max(1, chunk_size // 2**levels) * 2**levels
    singles = max(1, round(chunk / KEYS_PER_SINGLE / 2**levels)) * 2**levels
    if chunk == 2**levels or not with_singles:
        singles = 0
    n_chosen = rows // leaf_size
    leaf = (chunk - singles) // 2**levels
    return Sizes(sinks, chunk, levels, singles, leaf, n_chosen, max(WIDTH, FAN * n_chosen))


@dataclass(eq=False)
class Cluster:
    """A leaf, or a node of a higher level: its keys, their mean, and the nodes below it."""

    keys: list[int]
    mean: Tensor
    children: list[Cluster]


@dataclass(eq=False)
class Piece:
    """A stretch of keys: single ones, most unlike first, and leaves in tree order."""

    singles: list[int]
    leaves: list[Cluster]


def make_piece(key: Tensor, real: Tensor, number: int, sizes: Sizes, *, large: bool) -> Piece:
    """Piece `number` of its kind: `JOINED` chunks, or one.

    Args:
        key: `[n, D]` of one head.
        real: `[n]`, False = padding.
        number: Which one, counted behind the sinks.
        sizes: The sizes.
        large: Which kind.
    """
    n_chunks = JOINED if large else 1
    first, size = sizes.sinks + number * n_chunks * sizes.chunk, n_chunks * sizes.chunk
    points = torch.zeros(size, key.shape[1], dtype=torch.float64)
    alive = torch.zeros(size, dtype=torch.bool)
    for place in range(size):
        if first + place < len(key) and real[first + place]:
            points[place], alive[place] = key[first + place], True
    by_unlikeness = sorted(range(size), key=_unlikeness(points, alive).__getitem__, reverse=True)
    singles = by_unlikeness[: n_chunks * sizes.singles]
    others = [place for place in range(size) if place not in singles]
    levels = sizes.levels + (n_chunks.bit_length() - 1)
    leaves = bisect(points, alive, others, levels)

    def there(places: list[int]) -> list[int]:
        return [first + place for place in places if alive[place]]

    return Piece(there(singles), [_cluster(key, there(leaf), []) for leaf in leaves])


def _cluster(key: Tensor, keys: list[int], children: list[Cluster]) -> Cluster:
    return Cluster(keys, key[keys].sum(0) / max(1, len(keys)), children)


def _unlikeness(points: Tensor, alive: Tensor) -> list[float]:
    """Minus the cosine of each point to the mean of the living; -inf for the dead, which come last."""
    mean = points.sum(0)
    unlike = -torch.nn.functional.cosine_similarity(points, mean[None], dim=1, eps=1e-30)
    values: list[float] = unlike.masked_fill(~alive, -torch.inf).tolist()
    return values


def bisect(points: Tensor, alive: Tensor, places: list[int], levels: int) -> list[list[int]]:
    """Cut a node at the median along its main direction, and each half again, `levels` times."""
    if levels == 0:
        return [places]
    along = _along_main_direction(points[places], alive[places])
    # equal points keep their order
    in_order = [places[i] for i in sorted(range(len(places)), key=along.__getitem__)]
    half = len(places) // 2
    lower, upper = in_order[:half], in_order[half:]
    return bisect(points, alive, lower, levels - 1) + bisect(points, alive, upper, levels - 1)


def _along_main_direction(points: Tensor, alive: Tensor) -> list[float]:
    """Place of every point on the axis of largest variance, found by a few power steps; the dead are last.

    The axis is that of evenly spaced points, at least `FIT_SIZE` of them; the steps begin with the covariances of
    the coordinate that varies most.
    """
    step = max(1, len(points) // FIT_SIZE)
    sample = points[::step][alive[::step]]
    direction = points.new_zeros(points.shape[1])
    if len(sample):
        centred = sample - sample.mean(0)
        covariance = centred.T @ centred
        direction = covariance[int(covariance.diagonal().argmax())]
        for _ in range(POWER_ITERATIONS):
            direction = covariance @ _unit(direction)
    along: list[float] = (points @ _unit(direction)).masked_fill(~alive, torch.inf).tolist()
    return along


def _unit(vector: Tensor) -> Tensor:
    length = float(vector.norm())
    return vector / length if length else vector


def make_levels(key: Tensor, large: list[Piece], sizes: Sizes) -> list[list[Cluster]]:
    """Leaves of the large pieces one after the other, `FAN` neighbours of those, `FAN` neighbours of those, ...

    In level 1 a node stands for the singles of its pieces too, but for the kept ones, which join in level 2; each
    node gets equally many, in order.
    """
    levels = [[leaf for piece in large for leaf in piece.leaves]]
    joining = {
        1: [single for piece in large for single in piece.singles[sizes.kept :]],
        2: [single for piece in large for single in piece.singles[: sizes.kept]],
    }
    while len(levels[-1]) >= FAN:
        below, level = levels[-1], len(levels)
        singles = joining.get(level, [])
        share = len(singles) * FAN**level // len(levels[0])
        nodes = []
        for number in range(len(below) // FAN):
            children = below[number * FAN : (number + 1) * FAN]
            keys = [place for child in children for place in child.keys]
            nodes.append(_cluster(key, keys + singles[number * share : (number + 1) * share], children))
        levels.append(nodes)
    return levels


@dataclass(eq=False)
class Behind:
    """What a query sees behind its local part: stand-ins of clusters, and single keys."""

    clusters: list[Cluster]
    singles: list[int]


class Pieces:
    """All pieces of one head of a sequence: the large ones, and every chunk by itself."""

    def __init__(self, key: Tensor, real: Tensor, sizes: Sizes, n_pieces: int) -> None:
        self.real, self.sizes, self.n_pieces = real, sizes, n_pieces
        large = range(n_pieces // JOINED)
        self.large = [make_piece(key, real, number, sizes, large=True) for number in large]
        self.chunks = [make_piece(key, real, number, sizes, large=False) for number in range(n_pieces)]
        self.levels = make_levels(key, self.large, sizes)

    def behind(self, n_seen: int) -> Behind:
        """Of the first `n_seen` chunks: newest leaves, coarser nodes before them, chunks that are not joined."""
        sizes, n_large = self.sizes, n_seen // JOINED
        clusters: list[Cluster] = []
        singles: list[int] = []
        stop, first_piece = n_large * sizes.large_leaves, n_large
        for level, nodes in enumerate(self.levels):
            unit = max(FAN, sizes.large_leaves // FAN**level)
            cut = max(0, stop - sizes.width) // unit * unit
            clusters += nodes[cut:stop]
            own = self.large[cut * FAN**level // sizes.large_leaves : first_piece]
            first_piece -= len(own)
            most = {0: None, 1: sizes.kept}.get(level, 0)  # all are single, the kept ones, none
            singles += [single for piece in own for single in piece.singles[:most]]
            stop = cut // FAN
        return self._with_chunks(Behind(clusters, singles), range(n_large * JOINED, n_seen))

    def everything(self) -> Behind:
        """Without a causal mask: whole large pieces of the sequence, and the chunks behind them."""
        whole = max(0, (int(self.real.sum()) - self.sizes.sinks) // (JOINED * self.sizes.chunk))
        clusters = [leaf for piece in self.large[:whole] for leaf in piece.leaves]
        singles = [single for piece in self.large[:whole] for single in piece.singles]
        return self._with_chunks(Behind(clusters, singles), range(whole * JOINED, self.n_pieces))

    def _with_chunks(self, behind: Behind, numbers: range) -> Behind:
        for number in numbers:
            behind.clusters += self.chunks[number].leaves
            behind.singles += self.chunks[number].singles
        return Behind([cluster for cluster in behind.clusters if cluster.keys], behind.singles)
