"""How others choose keys in long prompts: Quest, SnapKV, MInference, FlexPrefill and XAttention.

Written from their papers, for quality alone: choices are masks in plain torch, and most take quadratic time. All
of them read the chunk of a query exactly up to the query, and choose about `budget` of the keys before that chunk,
so that they can be compared at equal keys read. They need `is_causal=True`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from prescore import checks
from prescore.bench.baselines.tiles import Placed, baseline, best_places
from prescore.ops.operators import accumulation_dtype
from prescore.ops.parts import Part
from prescore.types import Attended


@baseline
def quest_attention(
    placed: Placed, *, budget: int = 256, page_size: int = 16, keep_first: bool = True, chunk_size: int = 512
) -> list[Part] | Attended:
    """Every query and head reads the pages of earlier keys that could hold the largest logits.

    A page is `page_size` neighbouring keys, known by the least and the largest value of every coordinate. Its
    score is the largest logit that a key within these bounds could have. The `budget // page_size` best pages are
    read. Nothing later acts on a choice. The published method does this in decode steps, over all pages.

    Args:
        placed: The call.
        budget: Keys read before the query's chunk.
        page_size: Keys of a page.
        keep_first: Whether the first page is always among the best, which is not in the paper: without the
            first tokens many models lose more than a far context is worth.
        chunk_size: Positions of a chunk.
    """
    _check(placed, budget, chunk_size=chunk_size, page_size=page_size)

    def choose(chunk: _Chunk) -> Tensor:
        key, there = _cut(chunk.key[:, : chunk.first], page_size), _cut(chunk.earlier[..., None], page_size)
        some = there.any(2)
        low, high = (
            extreme.where(some, 0.0)[:, None].mT
            for extreme in (key.where(there, torch.inf).amin(2), key.where(there, -torch.inf).amax(2))
        )
        scores = chunk.query.clamp_min(0) @ high + chunk.query.clamp_max(0) @ low
        scores = _first(scores, keep_first).masked_fill(~some[:, None, None, :, 0], -torch.inf)
        pages = _best(scores, budget // page_size)
        return pages.repeat_interleave(page_size, -1)

    return _attend_chunks(placed, chunk_size, choose)


@baseline
def snapkv_attention(
    placed: Placed, *, budget: int = 256, window: int = 64, kernel_size: int = 7, chunk_size: int = 512
) -> list[Part]:
    """Before every chunk the earlier keys are compressed to those that the last `window` queries weigh most.

    Softmax weights of these queries are summed over the window and the heads of a KV head, and the largest sum
    among `kernel_size` neighbours counts. The window's own keys are kept first. The published method does this
    once, behind the prompt, which it reads exactly; decode steps read what was kept.

    Args:
        placed: The call.
        budget: Keys kept, the window's own included.
        window: Queries that vote.
        kernel_size: Neighbours that share a vote, an odd number.
        chunk_size: Positions of a chunk.
    """
    _check(placed, budget, chunk_size=chunk_size, window=window, kernel_size=kernel_size)
    if kernel_size % 2 == 0:
        raise ValueError(f"kernel_size must be odd, got {kernel_size}")

    @torch.no_grad()
    def choose(_: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        first = past.shape[1]
        voters = past[:, max(0, first - window) :]
        sums = placed.column_sums(voters, past, n_local=voters.shape[1])
        pooled = max_pool1d(sums, kernel_size, stride=1, padding=kernel_size // 2)
        pooled = pooled.masked_fill(past[0] >= first - window, torch.inf)
        return best_places(pooled.where(sums > -torch.inf, -torch.inf), budget, latest=True)

    return [] if placed.empty else placed.chunk_parts(chunk_size, choose)


@baseline
def minference_attention(
    placed: Placed, *, budget: int = 256, window: int = 64, sinks: int = 30, chunk_size: int = 512
) -> list[Part] | Attended:
    """The vertical-slash pattern: the last `window` queries choose columns and diagonals for all queries.

    For every head their softmax weights are summed by key and by distance. Half of `budget` goes to the columns,
    the first `sinks` always among them, half to the diagonals. **Later tokens change what earlier queries read**,
    as in the published method; a prompt in chunks has other lines for every chunk. Lines that cross count once, so
    that a query reads at most `budget` keys before its chunk.

    Args:
        placed: The call.
        budget: Columns and diagonals.
        window: Queries that choose.
        sinks: First keys that are always columns.
        chunk_size: Positions of a chunk.
    """
    _check(placed, budget, chunk_size=chunk_size, window=window)
    checks.integer("sinks", sinks, minimum=0)
    if placed.empty:
        return []
    columns, diagonals = _sums_of_lines(placed, window)
    columns[..., :sinks] = columns[..., :sinks].where(torch.isneginf(columns[..., :sinks]), torch.inf)
    vertical, slash = _best(columns, budget - budget // 2), _best(diagonals, budget // 2)

    def choose(chunk: _Chunk) -> Tensor:
        position = placed.arange(chunk.first + chunk.query.shape[2])
        distance = position[chunk.first :, None] - position[: chunk.first]
        # the last chunk may end behind the last key, where there are no queries
        return vertical[:, :, None, : chunk.first] | slash[:, :, distance.clamp_max(placed.call.n_keys - 1)]

    return _attend_chunks(placed, chunk_size, choose)


@baseline
def flexprefill_attention(
    placed: Placed, *, budget: int = 256, tau: float = 0.1, block_size: int = 128, chunk_size: int = 512
) -> list[Part] | Attended:
    """Every head reads the blocks that hold a share of its weight, found in one of two ways.

    The last `block_size` queries give weights to blocks of keys. Means of blocks estimate these weights. A head
    whose estimate has a Jensen-Shannon distance below `tau` to them is query-aware: means of blocks of queries and
    of keys weigh every block. In other heads the last queries weigh columns and diagonals of blocks. The heaviest
    are read, up to the share gamma of the weight. The published method is given gamma; here gamma is the share at
    which the heads of a sequence read `budget` keys before their chunk on average. The first block is always read.
    **Later tokens change what earlier queries read**, as in the published method.

    Args:
        placed: The call.
        budget: Keys read before the query's chunk, on average over heads and queries.
        tau: Largest distance of a query-aware head.
        block_size: Queries and keys of a block; its greatest common divisor with `chunk_size` is taken.
        chunk_size: Positions of a chunk.
    """
    _check(placed, budget, chunk_size=chunk_size, block_size=block_size)
    checks.number("tau", tau, minimum=0)
    block_size = math.gcd(block_size, chunk_size)
    if placed.empty:
        return []
    share, seen = _heavier_shares(placed, block_size, tau)
    block, per_chunk = placed.arange(share.shape[-1]), chunk_size // block_size
    earlier = (seen & (block < block[:, None] // per_chunk * per_chunk))[:, None].expand_as(share)
    n_read = earlier.sum(-1).clamp_max(budget // block_size)
    scores = share.masked_fill(block == 0, -1.0).masked_fill(~earlier, torch.inf)
    # one gamma for all heads of a sequence: [B, everything else]
    scores, n_read = (tensor.reshape(len(placed.valid), -1) for tensor in (scores, n_read))
    ranks = scores.argsort(dim=-1, stable=True).argsort(-1)
    read = (ranks < n_read.sum(-1, keepdim=True)).view_as(share)

    def choose(chunk: _Chunk) -> Tensor:
        position = placed.arange(chunk.first + chunk.query.shape[2]) // block_size
        # the last chunk may end behind the last key, where there are no queries
        rows = read[:, :, position[chunk.first :].clamp_max(len(block) - 1)]
        return rows[..., position[: chunk.first]]

    return _attend_chunks(placed, chunk_size, choose)


@baseline
def xattention(
    placed: Placed,
    *,
    budget: int = 256,
    block_size: int = 128,
    stride: int = 8,
    keep_first: bool = True,
    chunk_size: int = 512,
) -> list[Part] | Attended:
    """Blocks of queries read the blocks of earlier keys whose antidiagonals have the largest sums.

    Tiles of `stride` queries and `stride` keys are known by the sum of the logits on their antidiagonal, divided
    by `stride`. A softmax over the tiles of a row of tiles makes weights; a block of keys has the sum of its
    tiles'. Each head and block of `block_size` queries reads the `budget // block_size` best. The published method
    takes blocks up to a share of the weight instead of a number. Later queries of a block act on what earlier ones
    read.

    Args:
        placed: The call.
        budget: Keys read before the query's chunk.
        block_size: Queries and keys of a block, a multiple of `stride`.
        stride: Width of a tile.
        keep_first: Whether the first block is always among the best, see `quest_attention`.
        chunk_size: Positions of a chunk.
    """
    _check(placed, budget, chunk_size=chunk_size, block_size=block_size, stride=stride)
    if block_size % stride:
        raise ValueError(f"block_size must be a multiple of the stride {stride}, got {block_size}")

    def choose(chunk: _Chunk) -> Tensor:
        earlier, local = chunk.key[:, : chunk.first], chunk.key[:, chunk.first :]
        rows = _tiles(chunk.query, block_size, stride, reverse=True)  # [b, G, T, stride * D]
        keys = torch.cat([_tiles(part, block_size, stride) for part in (earlier, local)], 1)
        some, counted = (_some(there, block_size, stride) for there in (chunk.earlier, chunk.counted))
        causal = torch.ones(counted.shape[1], counted.shape[1], dtype=torch.bool, device=keys.device).tril()
        seen = torch.cat((some[:, None].expand(-1, len(causal), -1), causal & counted[:, None]), -1)
        logits = (rows @ keys[:, None].mT) * (placed.call.scale / stride)
        weights = logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1)[..., : some.shape[1]]
        weights = weights.where(counted[:, None, :, None], 0.0)
        per_block = block_size // stride
        sums = weights.unflatten(3, (-1, per_block)).sum(4).unflatten(2, (-1, per_block)).sum(3)
        sums = _first(sums, keep_first).masked_fill(
            ~some.unflatten(1, (-1, per_block)).any(2)[:, None, None], -torch.inf
        )
        blocks = _best(sums, budget // block_size).repeat_interleave(block_size, -1)
        return blocks.repeat_interleave(block_size, -2)[:, :, : chunk.query.shape[2]]

    return _attend_chunks(placed, chunk_size, choose)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Queries of a chunk and all keys up to its end; what is padding is zero.

    Attributes:
        query: `[B * Hkv, G, t, D]`.
        key: `[B * Hkv, first + t, D]`.
        visible: `[B * Hkv, first + t]` real keys.
        counted: `[B * Hkv, t]` real queries.
        first: Position of the first query.
    """

    query: Tensor
    key: Tensor
    visible: Tensor
    counted: Tensor
    first: int

    @property
    def earlier(self) -> Tensor:
        """Real keys before the chunk."""
        return self.visible[:, : self.first]


def _check(placed: Placed, budget: int, **sizes: int) -> None:
    checks.integer("budget", budget, minimum=0)
    for name, size in sizes.items():
        checks.integer(name, size, minimum=1)
    if not placed.call.is_causal:
        raise ValueError("is_causal must be True for a rule that chooses among earlier keys, got False")


def _attend_chunks(placed: Placed, size: int, choose: Callable[[_Chunk], Tensor]) -> list[Part] | Attended:
    """Every chunk reads itself, and the earlier keys that `choose` marks: `[B * Hkv, G, t, first or more]`."""
    if placed.empty:
        return []
    call, rows, outputs, lses = placed.call, [], [], []
    for positions in placed.chunks(min(size, call.n_keys)):
        first, width = int(positions[0]), len(positions)
        query_rows, there = placed.query_tiles(positions[None])
        key_rows, visible = placed.key_tiles(placed.arange(first + width)[None])
        query = _rows(call.query, query_rows, there)
        key, value = (_rows(tensor, key_rows, visible) for tensor in (call.key, call.value))
        counted = there[:, 0] & visible[:, first:]
        mask = torch.ones(width, width, dtype=torch.bool, device=key.device).tril().expand(*query.shape[:3], width)
        if first:
            with torch.no_grad():
                chosen = choose(_Chunk(query.where(counted[:, None, :, None], 0.0), key, visible, counted, first))
            mask = torch.cat((chosen[..., :first], mask), -1)
        mask = mask & visible[:, None, None]
        some = mask.any(-1, keepdim=True)
        # a row that sees nothing has finite logits, so that its gradient is zero and not NaN
        logits = ((query @ key[:, None].mT) * call.scale).masked_fill(~mask & some, -torch.inf)
        outputs.append((logits.softmax(-1) @ value[:, None]).where(some, 0.0)[there])
        lses.append(logits.logsumexp(-1).where(some[..., 0], -torch.inf)[there])
        rows.append(query_rows[there])
    index, shape = torch.cat(rows), call.query.shape[:3]
    value, lse = torch.cat(outputs), torch.cat(lses)
    output = value.new_zeros(shape.numel(), value.shape[1]).index_copy(0, index, value)
    lse = lse.new_full((shape.numel(),), -torch.inf).index_copy(0, index, lse)
    return Attended(output.view(*shape, -1).to(call.query.dtype), lse.view(shape))


def _rows(tensor: Tensor, rows: Tensor, there: Tensor) -> Tensor:
    """Rows of `[B, H, N, D]` in at least float32, zero where there is none: padding may hold anything."""
    picked = tensor.reshape(-1, tensor.shape[-1])[rows].to(accumulation_dtype(tensor.dtype))
    return picked.where(there[..., None], 0.0)


def _first(scores: Tensor, keep: bool) -> Tensor:
    """Scores of pages or blocks, the first one's above all others where it is kept."""
    return torch.cat((torch.full_like(scores[..., :1], torch.inf), scores[..., 1:]), -1) if keep else scores


def _best(scores: Tensor, count: int) -> Tensor:
    """The `count` highest scores of the last axis as a mask."""
    places, there = best_places(scores, count)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, places, there)


def _cut(tensor: Tensor, size: int) -> Tensor:
    """`[b, n, D]` as `[b, pages, size, D]`, the last page filled up with zeros."""
    padded = pad(tensor, (0, 0, 0, -tensor.shape[1] % size))
    return padded.view(len(tensor), -1, size, tensor.shape[2])


def _tiles(tensor: Tensor, block_size: int, stride: int, *, reverse: bool = False) -> Tensor:
    """`[..., n, D]` as `[..., tiles, stride * D]`, in whole blocks; the rows of a tile may be reversed."""
    padded = pad(tensor, (0, 0, 0, -tensor.shape[-2] % block_size))
    tiles = padded.view(*tensor.shape[:-2], padded.shape[-2] // stride, stride, tensor.shape[-1])
    return (tiles.flip(-2) if reverse else tiles).flatten(-2)


def _some(there: Tensor, block_size: int, stride: int) -> Tensor:
    """Which tiles of `[b, n]` hold anything."""
    return _tiles(there[..., None], block_size, stride).any(-1)


@torch.no_grad()
def _sums_of_lines(placed: Placed, window: int) -> tuple[Tensor, Tensor]:
    """Softmax weights of the last `window` real queries, by position of the key and by distance.

    Both are `[B * Hkv, G, Nk]`; -inf = no real key.
    """
    every = placed.arange(placed.call.n_keys)
    query, voting, position = _last_queries(placed, window)
    key_rows, visible = placed.key_tiles(every[None])
    key = _rows(placed.call.key, key_rows, visible)
    logits = (query @ key[:, None].mT) * placed.call.scale
    distance = (position[:, None, :, None] - every).repeat_interleave(placed.call.key.shape[1], 0)
    seen = (distance >= 0) & visible[:, None, None]  # [B * Hkv, 1, w, Nk]
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    weights = weights.where(voting & seen.any(-1, keepdim=True), 0.0)
    by_distance = torch.zeros_like(weights).scatter_add_(-1, distance.clamp_min(0).expand_as(weights), weights)
    return weights.sum(2).masked_fill(~visible[:, None], -torch.inf), by_distance.sum(2)


def _last_queries(placed: Placed, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """The last `window` real queries `[B * Hkv, G, w, D]`, whether one is there, and their positions `[B, w]`."""
    call = placed.call
    end = (placed.valid * (placed.arange(call.n_keys) + 1)).amax(1) - placed.shift  # real positions [B]
    position = end[:, None] - window + placed.arange(window)
    batch, heads, n_query, dim = call.query.shape
    row = position + placed.shift[:, None] - (call.n_keys - n_query)
    there = ((position >= 0) & (row >= 0))[:, None, :, None].expand(batch, heads, window, 1)
    index = row.clamp(0, n_query - 1)[:, None, :, None].expand(-1, heads, -1, dim)
    query = call.query.gather(2, index).to(accumulation_dtype(call.query.dtype)).where(there, 0.0)
    shape = (batch * call.key.shape[1], -1, window)
    return query.view(*shape, dim), there.reshape(*shape, 1), position


@torch.no_grad()
def _heavier_shares(placed: Placed, size: int, tau: float) -> tuple[Tensor, Tensor]:
    """What share of a head's weight is heavier than each block, `[B * Hkv, G, query blocks, key blocks]`.

    Also whether a block has a real query and a real key, `[B * Hkv, query blocks, key blocks]`. See
    `flexprefill_attention`.
    """
    scale, every = placed.call.scale, placed.arange(placed.call.n_keys)[None]
    (query_rows, there), (key_rows, visible) = placed.query_tiles(every), placed.key_tiles(every)
    key, has_key = _block_means(_rows(placed.call.key, key_rows, visible)[:, None], visible, size)
    query, has_query = _block_means(_rows(placed.call.query, query_rows, there), there[:, 0] & visible, size)
    last, voting, _ = _last_queries(placed, size)
    mean = last.sum(2, keepdim=True) / voting.sum(2, keepdim=True).clamp_min(1)
    estimate = ((mean @ key.mT) * scale).masked_fill(~has_key[:, None, None], -torch.inf).softmax(-1)[:, :, 0]
    columns, diagonals = (
        _cut(line.clamp_min(0.0).mT, size).sum(2).mT / voting.sum(2).clamp_min(1)
        for line in _sums_of_lines(placed, size)
    )
    block = placed.arange(columns.shape[-1])
    offset = block[:, None] - block
    lines = torch.minimum(_heavier(columns)[:, :, None], _heavier(diagonals)[:, :, offset.clamp_min(0)])
    seen = (offset >= 0) & has_key[:, None] & has_query[:, :, None]
    logits = ((query @ key.mT) * scale).masked_fill(~seen[:, None], -torch.inf)
    weights = logits.softmax(-1).where(seen[:, None], 0.0)
    blocks = _heavier(weights.flatten(-2)).view_as(weights)
    middle = ((estimate + columns) / 2).clamp_min(torch.finfo(columns.dtype).tiny)
    divergence = (estimate.xlogy(estimate / middle) + columns.xlogy(columns / middle)).sum(-1) / 2
    return blocks.where((divergence.clamp_min(0.0).sqrt() < tau)[..., None, None], lines), seen


def _block_means(tensor: Tensor, there: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Means of the rows `[b, G, n, D]` of a block that are `there [b, n]`, and whether a block has any."""
    count = _cut(there[..., None].to(tensor.dtype), size).sum(2)  # [b, blocks, 1]
    sums = _cut(tensor.where(there[:, None, :, None], 0.0).flatten(0, 1), size).sum(2)
    return sums.unflatten(0, tensor.shape[:2]) / count.clamp_min(1.0)[:, None], count[..., 0] > 0


def _heavier(weights: Tensor) -> Tensor:
    """What share of the last axis is above each of its weights, or equal and before it."""
    shares = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    ordered, places = shares.sort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(shares).scatter(-1, places, ordered.cumsum(-1) - ordered)
