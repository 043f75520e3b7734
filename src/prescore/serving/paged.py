"""Routed attention over a paged KV cache: the keys of a sequence lie in blocks anywhere in memory.

`PagedIndex` keeps, for every long sequence and layer, its keys and values as rows and its key index. Both grow
with the sequence. The paged cache stays the truth: what is kept is known by physical block ids, is forgotten when
a block is overwritten, and can be made again from the cache at any time. The key index of a chunk is kept for as
long as its blocks hold the same keys, so that sequences with a cached prefix use it again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.config import Routed
from prescore.integrations.decode import KVBuffer
from prescore.routed.backends import build_index
from prescore.routed.decode import StepAttention
from prescore.routed.index import Build, GrowingIndex, KeyIndex
from prescore.routed.layout import Layout, make_layout, why_exact

IDLE_STEPS = 8
"""Steps after which the rows of a sequence that is not in the batch are dropped."""


class ChunkKey(NamedTuple):
    """A chunk of keys: its number in the sequence and the blocks that hold it."""

    number: int
    blocks: tuple[int, ...]


@dataclass(eq=False)
class PagedSequence:
    """A sequence longer than `exact_until`.

    Attributes:
        blocks: Physical blocks of its keys.
        n_tokens: Its keys, those of the last step included.
        last_step: When it was in a batch.
        layers: Rows and steps, with their key index, by layer.
    """

    blocks: list[int]
    n_tokens: int
    last_step: int
    layers: dict[str, tuple[KVBuffer, StepAttention]] = field(default_factory=dict)

    def crop(self, n_tokens: int) -> None:
        """Forget the keys from `n_tokens` on."""
        self.n_tokens = min(self.n_tokens, n_tokens)
        for buffer, steps in self.layers.values():
            buffer.crop(n_tokens)
            steps.crop(n_tokens)


class PagedRequest(NamedTuple):
    """A sequence in a batch: its new tokens are the rows `queries` of the batch, the last of `n_keys` keys."""

    sequence: PagedSequence
    queries: slice
    n_keys: int


class PagedIndex:
    """Rows and key indexes of all long sequences whose layers share a block table.

    Args:
        config: The configuration.
        block_size: Keys of a block.
        reuse: Whether sequences may share blocks (prefix caching): chunks are kept after a sequence ends.
    """

    def __init__(self, config: Routed, block_size: int, *, reuse: bool) -> None:
        self.config, self._block_size, self._reuse = config, block_size, reuse
        self.sequences: list[PagedSequence] = []
        self.chunks: dict[ChunkKey, dict[str, KeyIndex]] = {}
        self._chunks_of: defaultdict[int, set[ChunkKey]] = defaultdict(set)
        self._step = 0

    def begin(
        self, tables: Sequence[Sequence[int]], n_keys: Sequence[int], n_new: Sequence[int]
    ) -> list[PagedRequest | None]:
        """What each request of a step uses, before any layer runs; None = it reads every key.

        Args:
            tables: Physical blocks of each request, at least as many as its keys fill.
            n_keys: Keys of each request, those of this step included.
            n_new: How many of them this step writes: its queries.
        """
        self._step += 1
        size, first, requests = self._block_size, 0, list[PagedRequest | None]()
        written = dict[int, tuple[int, int]]()  # the slots of a block that this step writes
        for table, total, new in zip(tables, n_keys, n_new, strict=True):
            blocks = list(table[: -(-total // size)])
            for number in range((total - new) // size, len(blocks)):
                written[blocks[number]] = max(0, total - new - number * size), min(size, total - number * size)
            request = None
            # the dummy batches of a server repeat one block
            if not why_exact(self.config, new, total, is_causal=True) and len(set(blocks)) == len(blocks):
                request = PagedRequest(self._sequence(blocks, total, new), slice(first, first + new), total)
            requests.append(request)
            first += new
        self._forget(written)
        return requests

    def attend(
        self, layer: str, request: PagedRequest, query: Tensor, cache: tuple[Tensor, Tensor], scale: float
    ) -> Tensor:
        """Attend for the new tokens of a request, whose keys are in the cache already.

        Args:
            layer: Name of the layer.
            request: From `begin`.
            query: `[n, Hq, D]` of the new tokens.
            cache: Keys and values of the layer, as views `[blocks, Hkv, block_size, D]`.
            scale: Factor of the logits.

        Returns:
            `[n, Hq, Dv]`.
        """
        sequence, state = request.sequence, request.sequence.layers.get(layer)
        if state is None:
            index = GrowingIndex(self._reusing(layer, sequence) if self._reuse else build_index)
            rows = self._rows(cache, sequence.blocks, 0, request.n_keys)
            state = KVBuffer(*rows), StepAttention(self.config, scale=scale, index=index)
            sequence.layers[layer] = state
        buffer, steps = state
        if buffer.length < request.n_keys:
            buffer.append(*self._rows(cache, sequence.blocks, buffer.length, request.n_keys))
        attended = steps.attend(query.transpose(0, 1)[None], buffer.key, buffer.value)
        return attended.output[0].transpose(0, 1)

    def chunk_key(self, number: int, blocks: Sequence[int]) -> ChunkKey:
        """Which blocks of a sequence hold a chunk."""
        begin, stop = self._chunk_span(number)
        return ChunkKey(number, tuple(blocks[begin // self._block_size : (stop - 1) // self._block_size + 1]))

    def _reusing(self, layer: str, sequence: PagedSequence) -> Build:
        """Builds a key index of chunks that are kept until one of their keys is overwritten, and of new ones."""

        def build(key: Tensor, value: Tensor, layout: Layout, n_done: int, backend: str) -> KeyIndex:
            keys = [self.chunk_key(number, sequence.blocks) for number in range(n_done, layout.n_chunks)]
            is_kept = [layer in self.chunks.get(chunk, {}) for chunk in keys]
            n_kept = [*is_kept, False].index(False)
            parts = [self.chunks[chunk][layer] for chunk in keys[:n_kept]]
            if n_kept < len(keys):
                built = build_index(key, value, layout, n_done + n_kept, backend)
                parts.append(built)
                for number, chunk in enumerate(keys[n_kept:]):
                    one = built.chunks(slice(number, number + 1), layout.clusters_per_chunk)
                    self.chunks.setdefault(chunk, {})[layer] = one.map(Tensor.clone)
                    for block in chunk.blocks:
                        self._chunks_of[block].add(chunk)
            return KeyIndex.cat(parts)

        return build

    def _chunk_span(self, number: int) -> tuple[int, int]:
        """The positions of a chunk; it is far only for sequences that hold all sinks."""
        layout = make_layout(1, self.config.sinks + 1, causal=True, config=self.config)
        begin = layout.sinks + number * layout.chunk_size
        return begin, begin + layout.chunk_size

    def _rows(
        self, cache: tuple[Tensor, Tensor], blocks: Sequence[int], begin: int, end: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of some positions, `[1, Hkv, n, D]`, through the block table."""
        first, last = begin // self._block_size, (end - 1) // self._block_size
        spanned = torch.tensor(blocks[first : last + 1], dtype=torch.int64, device=cache[0].device)
        offset = first * self._block_size
        key, value = (
            table.index_select(0, spanned).transpose(0, 1).flatten(1, 2)[None, :, begin - offset : end - offset]
            for table in cache
        )
        return key, value

    def _sequence(self, blocks: list[int], total: int, new: int) -> PagedSequence:
        """The sequence that these blocks continue, up to date for this step; or a new one."""
        best: PagedSequence | None = None
        for sequence in self.sequences:
            both = min(len(blocks), len(sequence.blocks))
            fits = sequence.last_step < self._step and sequence.blocks[:both] == blocks[:both]
            if fits and (best is None or sequence.n_tokens > best.n_tokens):
                best = sequence
        if best is None:
            best = PagedSequence(blocks, total, self._step)
            self.sequences.append(best)
        if best.n_tokens > total - new:
            best.crop(total - new)  # tokens were taken back, and are written again
        best.blocks, best.n_tokens, best.last_step = blocks, total, self._step
        return best

    def _forget(self, written: dict[int, tuple[int, int]]) -> None:
        """Drop what was made from keys that this step overwrites, and the rows of idle sequences."""
        kept = []
        for sequence in self.sequences:
            if sequence.last_step == self._step:
                kept.append(sequence)
                continue
            for number, block in enumerate(sequence.blocks):
                if block in written:
                    sequence.crop(number * self._block_size + written[block][0])
                    del sequence.blocks[number + 1 :]
                    break
            if self._step - sequence.last_step <= IDLE_STEPS and sequence.n_tokens > self.config.exact_until:
                kept.append(sequence)
        self.sequences = kept
        for block in written.keys() & self._chunks_of.keys():
            for key in [key for key in self._chunks_of[block] if self._overlaps(key, block, *written[block])]:
                del self.chunks[key]
                for other in key.blocks:
                    self._chunks_of[other].discard(key)

    def _overlaps(self, key: ChunkKey, block: int, begin: int, stop: int) -> bool:
        """Whether slots of a block, from `begin` to `stop`, belong to a chunk."""
        first, last = self._chunk_span(key.number)
        offset = (first // self._block_size + key.blocks.index(block)) * self._block_size
        return offset + begin < last and offset + stop > first
