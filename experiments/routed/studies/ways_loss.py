r"""(b) Loss of SmolLM2 with all layers routed in each of the causal ways, by the slow masked implementation.

    python experiments/routed/studies/ways_loss.py BOOK.txt --out DIR

One window of 4096 tokens, loss over its second half; one to three minutes of one core for each line.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from capture import OFFSET
from clusters import Clustering
from scene import Answer, Layer, View, attend, views
from torch import Tensor
from two_levels import TwoLevels, attend_two_levels
from ways import Way, attend_way

from prescore.attention import Counted
from prescore.bench.language.documents import load_documents
from prescore.bench.language.methods import CountedAttend, LanguageMethod, exact
from prescore.bench.language.model import load_language_model
from prescore.bench.language.perplexity import loss_row, make_windows
from prescore.bench.records import RecordFile
from prescore.bench.records import measure, row_key

COMMAND = "routed-ways-loss"


def _nothing(view: View) -> Answer:
    return attend(view, torch.full((1, 1, 1, 1), -torch.inf))


@dataclass(frozen=True)
class Slow(LanguageMethod):
    """A study's variant as a method of the measuring door: every chunk is a view of all its queries."""

    run: Callable[[View], Answer] = field(default=_nothing, compare=False)

    def attention(self, seed: int) -> CountedAttend:
        """Causal attention of one sequence; rows are not counted here, `run.py` has them."""
        return lambda query, key, value, context: Counted(
            self._attend(query[0], key[0], value[0], context.scale or query.shape[-1] ** -0.5), lambda: math.nan
        )

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """`[Hq, N, D]` -> `[1, Hq, N, D]`."""
        layer = Layer.of(query, key, value, scale)
        outputs = []
        for view in views(layer, torch.arange(query.shape[1])):
            outputs.append(self.run(view).output if view.n_pieces else view.exact)
        return torch.cat(outputs, dim=2).flatten(0, 1)[None]


def methods() -> list[LanguageMethod]:
    """Exact attention, the local part alone, then every way at two budgets."""
    made: list[LanguageMethod] = [exact(), Slow("nothing far", "prescored", {})]
    for leaf, rows in ((64, 256), (128, 512)):
        for words, way in (
            ("every query for itself", Way()),
            ("query heads of a KV head", Way("heads")),
            ("groups of 32 past queries, each head", Way("groups", 32)),
        ):
            made.append(
                Slow(
                    f"leaf {leaf}, {rows} rows, {words}",
                    "prescored",
                    {**asdict(way), "leaf": leaf, "rows": rows},
                    run=lambda view, way=way, leaf=leaf, rows=rows: attend_way(
                        view, way, Clustering(leaf=leaf), rows
                    ),
                )
            )
    opened = TwoLevels(128, 16, 8)
    for rows in (256, 512):
        label = f"8 leaves of 128 opened into leaves of 16, {rows} rows"
        run = lambda view, rows=rows: attend_two_levels(view, opened, rows)  # noqa: E731
        made.append(Slow(label, "prescored", {**asdict(opened), "rows": rows}, run=run))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not in the record file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("book", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=4096)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    language_model = load_language_model()
    window = make_windows(language_model, load_documents([options.book]), options.length, offset=OFFSET)[0]
    records = RecordFile(options.out / "ways-loss.jsonl", resume=True)
    for method in methods():
        row = loss_row(language_model, window, method)
        if row_key(COMMAND, row.config, row.seed) in records:
            continue
        record = measure(COMMAND, row, threads=1)
        records.append(record)
        print(f"{method.label}: {record.results['loss']:.4f}, {record.seconds:.0f} s", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
