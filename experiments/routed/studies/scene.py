"""What a study looks at: queries of one chunk, everything they may see, and exact attention as the truth.

The geometry is that of the engine of leaves, which the studies measured: 4 sinks, then chunks of 512. A query
reads the sinks, its own chunk up to itself and the chunk before exactly; all keys between are *far*, and a study
decides what stands for them. Dense logits, float32: this is for measuring quality, not for speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SINKS = 4
CHUNK = 512


@dataclass(eq=False)
class Layer:
    """One attention layer on one window.

    Attributes:
        query: `[Hkv, G, N, D]`, scaled: logits are plain products with keys.
        key: `[Hkv, N, D]`.
        value: `[Hkv, N, D]`.
        book: The window this layer belongs to, None outside of one.
        memory: What was computed from this layer alone, by name (clusters of a run of chunks).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    book: Book | None = None
    memory: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, scale: float, book: Book | None = None) -> Layer:
        """From `[Hq, N, D]` and `[Hkv, N, D]`."""
        return cls(query.unflatten(0, (key.shape[0], -1)) * scale, key, value, book)


@dataclass(eq=False)
class Book:
    """The captured layers of one window, by number."""

    name: str
    digest: str
    layers: dict[int, Layer] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Book:
        """Read a file of `capture.py`."""
        stored = torch.load(path, weights_only=True)
        book = cls(stored["book"], stored["digest"])
        for number, tensors in stored["layers"].items():
            scale = tensors["key"].shape[-1] ** -0.5
            book.layers[number] = Layer.of(tensors["query"], tensors["key"], tensors["value"], scale, book)
        return book


@dataclass(eq=False)
class View:
    """Some queries of one chunk.

    Attributes:
        layer: Whose queries.
        chunk: Number of their chunk.
        positions: `[P]`, ascending, all in that chunk.
    """

    layer: Layer
    chunk: int
    positions: Tensor

    @property
    def n_pieces(self) -> int:
        """Chunks that are far."""
        return max(0, self.chunk - 1)

    @property
    def far(self) -> slice:
        """Far keys: neither sinks nor the own or the previous chunk."""
        return slice(SINKS, SINKS + self.n_pieces * CHUNK)

    @cached_property
    def query(self) -> Tensor:
        """`[Hkv, G, P, D]`."""
        return self.layer.query[:, :, self.positions]

    @cached_property
    def logits(self) -> Tensor:
        """`[Hkv, G, P, N]` over the keys up to the last position, -inf on what is later than a query."""
        stop = int(self.positions[-1]) + 1
        logits = self.query @ self.layer.key[:, None, :stop].transpose(-1, -2)
        return logits.masked_fill_(torch.arange(stop) > self.positions[:, None], -torch.inf)

    @cached_property
    def exact(self) -> Tensor:
        """`[Hkv, G, P, D]`: softmax over every key."""
        return self.logits.softmax(-1) @ self.layer.value[:, None, : self.logits.shape[-1]]


@dataclass(frozen=True, eq=False)
class Answer:
    """What a variant makes of a view.

    Attributes:
        output: `[Hkv, G, P, D]`.
        far_keys_read: Far keys read, on average over heads and queries.
        centroids: Centroids met, likewise.
        stand_in_share: `[Hkv, G, P]`, share of the softmax that centroids hold.
    """

    output: Tensor
    far_keys_read: float
    centroids: float
    stand_in_share: Tensor


def attend(
    view: View, far_bias: Tensor, stand_in_logits: Tensor | None = None, stand_in_values: Tensor | None = None
) -> Answer:
    """One softmax over sinks, local chunks, far keys and centroids.

    Args:
        view: The queries.
        far_bias: `[Hkv, G or 1, P or 1, F]` added to the logits of far keys: 0 = read, -inf = not.
        stand_in_logits: `[Hkv, G, P, M]`, -inf = absent.
        stand_in_values: `[Hkv, M, D]`, or `[Hkv, G, P, M, D]` where they depend on the query.
    """
    logits, n_keys = view.logits, view.logits.shape[-1]
    if stand_in_logits is None:
        stand_in_logits = logits[..., :0]
    combined = torch.cat((logits, stand_in_logits), dim=-1)
    combined[..., view.far] += far_bias
    weights = combined.softmax(-1)
    output = weights[..., :n_keys] @ view.layer.value[:, None, :n_keys]
    shares = weights[..., n_keys:]
    if stand_in_values is not None:
        if stand_in_values.ndim == 3:
            output = output + shares @ stand_in_values[:, None]
        else:
            output = output + (shares[..., None, :] @ stand_in_values).squeeze(-2)
    read = torch.isfinite(far_bias).float().sum(-1).mean()
    met = torch.isfinite(stand_in_logits).float().sum(-1).mean() if shares.shape[-1] else torch.zeros(())
    return Answer(output, float(read), float(met), shares.sum(-1))


def chunk_of(positions: Tensor) -> Tensor:
    """Numbers of the chunks that positions lie in; the sinks count as the first."""
    return (positions - SINKS).clamp_min(0) // CHUNK


def views(layer: Layer, positions: Tensor) -> Iterator[View]:
    """The chunks that hold some of the positions."""
    chunks = chunk_of(positions)
    for chunk in chunks.unique().tolist():
        yield View(layer, chunk, positions[chunks == chunk])


def even_positions(begin: int, stop: int, count: int) -> Tensor:
    """`count` positions at equal distances, the last just before `stop`."""
    return begin + torch.arange(1, count + 1) * (stop - begin) // count - 1
