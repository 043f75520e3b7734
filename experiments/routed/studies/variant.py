"""One thing to be measured, as a value, and its error against exact attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from clusters import Clustering
from scene import Answer, Book, View, even_positions, views

from prescore.bench.records import Row
from routed import ROWS, routed

N_POSITIONS = 96


@dataclass(frozen=True)
class Variant:
    """A way to attend.

    Attributes:
        study: Which table it stands in.
        label: Its line there.
        run: What it makes of a view, given a seed.
        settings: Everything else that identifies it, in JSON values.
        n_seeds: Seeds whose errors are averaged, where it draws at random.
    """

    study: str
    label: str
    run: Callable[[View, int], Answer]
    settings: Mapping[str, Any] = field(default_factory=dict)
    n_seeds: int = 1


def routed_variant(study: str, label: str, clustering: Clustering, rows: int = ROWS) -> Variant:
    """Routed attention as it is, cut in some way."""
    return Variant(
        study, label, lambda view, _: routed(view, clustering, rows), {**asdict(clustering), "rows": rows}
    )


def study_row(variant: Variant, books: Sequence[Book]) -> Row:
    """A variant on all captured layers as a row to be measured and resumed."""
    config = {
        "study": variant.study,
        "label": variant.label,
        "settings": dict(variant.settings),
        "seeds": variant.n_seeds,
        "positions": N_POSITIONS,
        "books": {book.name: book.digest for book in books},
        "layers": list(books[0].layers),
    }
    return Row(config, None, lambda: errors(variant, books))


@torch.no_grad()
def errors(variant: Variant, books: Sequence[Book]) -> dict[str, Any]:
    """Relative squared error of every head: squared error over squared length, each summed over positions."""
    table, rows, centroids, begin = [], [], [], time.process_time()
    for book in books:
        for layer in book.layers.values():
            length = layer.key.shape[1]
            wrong = right = torch.zeros(layer.query.shape[:2])
            for view in remembered_views(layer, length):
                for seed in range(variant.n_seeds):
                    answer = variant.run(view, seed)
                    share = len(view.positions) / N_POSITIONS / variant.n_seeds
                    wrong = wrong + (answer.output - view.exact).square().sum((2, 3)) / variant.n_seeds
                    rows.append(answer.far_keys_read * share)
                    centroids.append(answer.centroids * share)
                right = right + view.exact.square().sum((2, 3))
            table.append([float(f"{error:.4g}") for error in (wrong / right).flatten().tolist()])
    n_layers = len(table)
    return {
        "error": sum(map(sum, table)) / n_layers / len(table[0]),
        "far_keys_read": round(sum(rows) / n_layers, 1),
        "centroids": round(sum(centroids) / n_layers, 1),
        "cpu_seconds": round(time.process_time() - begin, 2),
        "heads": table,
    }


def remembered_views(layer: Any, length: int) -> list[View]:
    """The studied positions of a layer, with their logits and exact outputs kept for the next variant."""
    name = ("views", length)
    if name not in layer.memory:
        layer.memory[name] = list(views(layer, even_positions(length // 2, length, N_POSITIONS)))
    found: list[View] = layer.memory[name]
    return found
