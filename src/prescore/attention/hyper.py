"""HyperAttention over given keys: one LSH block per query, plus a sampled residual.

All columns a query sees (its block, the residual samples, keys that are always kept, stand-ins) go into one
call of the operator, so there is one softmax and nothing to merge.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.attention.kernels import accumulation_dtype
from prescore.attention.parts import Part
from prescore.attention.tiles import Tiles, hash_tiles, rank_tiles
from prescore.config import Coupling


@dataclass(frozen=True, eq=False)
class Columns:
    """Key rows that every query of a problem sees: `rows [P, H, c]`, `bias [P, H, c]` (0 or -inf or a weight)."""

    rows: Tensor
    bias: Tensor


@dataclass(frozen=True, eq=False)
class Problems:
    """Independent attention problems of one size: queries over selected keys.

    `P` problems (batch rows, or blocks of the causal recursion), `H` KV heads, `G` query heads for each.

    Attributes:
        query_rows: `[P, H, G, W]` flat rows of the queries.
        query_valid: `[P, W]`, False = filler; None = none.
        query_real: `[P, W]`, False = filler or padding, which moves no other query; None = none.
        key_rows: `[P, H, S]` flat rows of the selected keys.
        key_valid: `[P, H, S]`, False = filler; None = none.
        kept: Keys outside blocks and residual, seen exactly by every query.
        extra: Stand-ins, likewise.
        n_all: `[P]` real keys before selection.
        n_selected: `[P, H]` selected keys, where `key_rows` hold others too (`mask="zero"`); None = all of them.
    """

    query_rows: Tensor
    query_valid: Tensor | None
    query_real: Tensor | None
    key_rows: Tensor
    key_valid: Tensor | None
    kept: Columns | None
    extra: Columns | None
    n_all: Tensor
    n_selected: Tensor | None = None

    def counts(self) -> Tensor:
        """`[P, H]` keys that are not filler."""
        shape = self.key_rows.shape
        if self.key_valid is None:
            return torch.full(shape[:2], shape[2], device=self.key_rows.device)
        return self.key_valid.sum(-1)


def exact_part(problems: Problems, dtype: torch.dtype) -> Part:
    """Every query over all selected keys of its problem; `dtype` is the query's."""
    dtype = accumulation_dtype(dtype)
    n_problems, heads, group, width = problems.query_rows.shape
    columns = [Columns(problems.key_rows, _validity_bias(problems, dtype))]
    columns += [problems.kept] if problems.kept is not None else []
    filled = problems.query_valid
    if filled is not None:
        filled = filled[:, None, None, :].expand(problems.query_rows.shape).flatten(0, 1)
    shape = (n_problems * heads, group, width)
    biased = problems.key_valid is not None
    return _part(shape, problems.query_rows.flatten(0, 1), filled, columns, problems.extra, biased)


def hyper_part(
    problems: Problems,
    query_ranks: Tensor,
    key_ranks: Tensor,
    draws: Tensor,
    *,
    block_size: int,
    alignment: str,
    coupling: Coupling,
    dtype: torch.dtype,
) -> Part:
    """Each query over its LSH block and the residual samples.

    Args:
        problems: What to attend to.
        query_ranks: `[P, H, G, W]` Gray ranks.
        key_ranks: `[P, H, S]` Gray ranks of the selected keys.
        draws: `[sample_size]` uniforms in [0, 1), shared by all problems and heads.
        block_size: Keys in a block; 0 = no blocks.
        alignment: `rank` or `hash`.
        coupling: Weight of the residual and what happens to keys that are in block and sample.
        dtype: Of the queries; the bias holds logs of weights, which half precision would round by percents.
    """
    dtype = accumulation_dtype(dtype)
    n_problems, heads, n_keys = problems.key_rows.shape
    count = problems.counts()  # [P, H]
    most = -(-n_keys // block_size) if block_size else 1
    order, sorted_ranks, n_blocks = _sort_keys(problems, key_ranks, count, block_size)
    if most <= 1:
        tiles = _whole(problems)
    elif alignment == "rank":
        tiles = rank_tiles(query_ranks, n_blocks, most, problems.query_real, problems.query_valid)
    else:
        tiles = hash_tiles(query_ranks, sorted_ranks, block_size, n_blocks, problems.query_valid)
    columns = []
    if block_size:
        columns.append(_block_columns(problems, order, count, block_size, most, dtype))
    residual = (0, 0)
    if draws.numel():
        residual = (block_size, block_size + draws.numel())
        columns.append(_residual_columns(problems, order, count, draws, block_size, most, coupling, dtype))
    n_tiles = tiles.block.shape[-1]
    picked = [_pick(column, tiles.block, dtype) for column in columns]
    if problems.kept is not None:
        picked.append(_spread(problems.kept, n_tiles))
    extra = None if problems.extra is None else _spread(problems.extra, n_tiles)
    query_rows = problems.query_rows.flatten(2).gather(-1, tiles.places.flatten(2)).view(tiles.places.shape)
    shape = (n_problems * heads * n_tiles, *tiles.places.shape[3:])
    filled = None if tiles.filled is None else tiles.filled.flatten(0, 2)
    part = _part(shape, query_rows.flatten(0, 2), filled, picked, extra, True)
    return dataclasses.replace(part, residual=residual)


def _sort_keys(
    problems: Problems, key_ranks: Tensor, count: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor | int]:
    """Order `[P, H, S]` of the keys by rank, the sorted ranks, and each problem's number of blocks."""
    if problems.key_valid is not None:
        key_ranks = key_ranks.masked_fill(~problems.key_valid, torch.iinfo(key_ranks.dtype).max)
    sorted_ranks, order = torch.sort(key_ranks, dim=-1, stable=True)
    if not block_size:
        return order, sorted_ranks, 1
    if problems.key_valid is None:
        return order, sorted_ranks, -(-problems.key_rows.shape[-1] // block_size)
    return order, sorted_ranks, ((count + block_size - 1) // block_size).clamp_min(1)


def _whole(problems: Problems) -> Tiles:
    """One tile per problem and head holding all queries in order: nothing to sort."""
    n_problems, heads, group, width = problems.query_rows.shape
    places = torch.arange(group * width, device=problems.query_rows.device).view(1, 1, 1, group, width)
    places = places.expand(n_problems, heads, 1, group, width)
    filled = problems.query_valid
    if filled is not None:
        filled = filled[:, None, None, None, :].expand(places.shape)
    return Tiles(places, filled, places.new_zeros(n_problems, heads, 1))


def _block_columns(
    problems: Problems, order: Tensor, count: Tensor, block_size: int, most: int, dtype: torch.dtype
) -> Columns:
    """`[P, H, blocks, block_size]` rows of the sorted keys, -inf on filler."""
    n_keys = order.shape[-1]
    slot = torch.arange(most * block_size, device=order.device)
    rows = problems.key_rows.gather(-1, order)
    rows = rows.index_select(-1, slot.clamp_max(n_keys - 1)).unflatten(-1, (most, block_size))
    bias = torch.zeros((), dtype=dtype, device=order.device).where(slot < count[..., None], -torch.inf)
    return Columns(rows, bias.unflatten(-1, (most, block_size)))


def _residual_columns(
    problems: Problems,
    order: Tensor,
    count: Tensor,
    draws: Tensor,
    block_size: int,
    most: int,
    coupling: Coupling,
    dtype: torch.dtype,
) -> Columns:
    """`[P, H, blocks, samples]`: sampled keys weighted by (keys / samples), own block left out."""
    n_samples = draws.numel()
    sample = (draws * count[..., None]).floor().to(torch.int64)
    sample = torch.minimum(sample, (count[..., None] - 1).clamp_min(0))
    if problems.key_valid is not None:
        # the i-th *valid* key: filler may stand anywhere in a ragged list
        sample = torch.sort(~problems.key_valid, dim=-1, stable=True).indices.gather(-1, sample)
    rows = problems.key_rows.gather(-1, sample)
    size = count if problems.n_selected is None else problems.n_selected
    if coupling.residual_weight == "all":
        size = problems.n_all[:, None].expand_as(count)
    bias = torch.log(size.to(torch.float64) / n_samples).to(dtype)
    bias = bias.masked_fill(count == 0, -torch.inf)[..., None, None].expand(*count.shape, most, n_samples)
    if block_size and coupling.overlap == "exclude":
        place = torch.empty_like(order).scatter_(-1, order, _positions(order))
        block = torch.div(place.gather(-1, sample), block_size, rounding_mode="floor")
        own = block[:, :, None, :] == torch.arange(most, device=order.device)[:, None]
        bias = bias.masked_fill(own, -torch.inf)
    return Columns(rows[:, :, None].expand(-1, -1, most, -1), bias)


def _positions(order: Tensor) -> Tensor:
    return torch.arange(order.shape[-1], device=order.device).expand_as(order)


def _pick(columns: Columns, block: Tensor, dtype: torch.dtype) -> Columns:
    """Columns of the block each tile reads."""
    index = block[..., None].expand(*block.shape, columns.rows.shape[-1])
    return Columns(columns.rows.gather(2, index).flatten(0, 2), columns.bias.gather(2, index).flatten(0, 2))


def _spread(columns: Columns, n_tiles: int) -> Columns:
    rows, bias = (t[:, :, None].expand(-1, -1, n_tiles, -1).flatten(0, 2) for t in (columns.rows, columns.bias))
    return Columns(rows, bias)


def _validity_bias(problems: Problems, dtype: torch.dtype) -> Tensor:
    bias = torch.zeros(problems.key_rows.shape, dtype=dtype, device=problems.key_rows.device)
    return bias if problems.key_valid is None else bias.masked_fill_(~problems.key_valid, -torch.inf)


def _part(
    shape: tuple[int, ...],
    query_rows: Tensor,
    filled: Tensor | None,
    columns: list[Columns],
    extra: Columns | None,
    biased: bool,
) -> Part:
    tiles = shape[0]
    rows = [column.rows.reshape(tiles, -1) for column in columns]
    biases = [column.bias.reshape(tiles, -1) for column in columns]
    if not rows:
        rows, biases = [query_rows.new_zeros(tiles, 0)], [torch.zeros(tiles, 0, device=query_rows.device)]
    extra_rows = None
    if extra is not None:
        extra_rows = extra.rows.reshape(tiles, -1)
        biases.append(extra.bias.reshape(tiles, -1))
    needs_bias = biased or extra is not None or len(columns) > 1
    return Part(
        (tiles, shape[1], shape[2]),
        query_rows=query_rows,
        query_valid=filled,
        key_rows=torch.cat(rows, dim=1),
        extra_rows=extra_rows,
        bias=torch.cat(biases, dim=1) if needs_bias else None,
    )
