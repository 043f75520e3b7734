r"""True queries, keys and values of a few layers of SmolLM2, taken once from one window of each book.

    python experiments/routed/studies/capture.py BOOK.txt BOOK.txt --cache DIR

One forward per book (60 to 90 seconds of one core) and 160 MB for each; a file that exists is left as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from prescore.bench.language.documents import load_documents
from prescore.bench.language.model import load_language_model
from prescore.bench.language.perplexity import make_windows
from prescore.integrations.apply import replace_attention
from prescore.integrations.attention import AttentionContext, attend_exactly

LAYERS = (2, 8, 14, 20, 26)
LENGTH = 8192
OFFSET = 40_000
"""Tokens passed over at the start of a book: past front matter, well inside the story."""


def capture(book: Path, cache: Path) -> Path:
    """Queries `[Hq, N, D]`, keys and values `[Hkv, N, D]` behind RoPE, by layer, in a file of the cache."""
    path = cache / f"{book.stem}-{OFFSET}-{LENGTH}.pt"
    if path.exists():
        return path
    language_model = load_language_model()
    window = make_windows(language_model, load_documents([book]), LENGTH, offset=OFFSET)[0]
    layers: dict[int, dict[str, Tensor]] = {}

    def keep(query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        named = zip(("query", "key", "value"), (query, key, value), strict=True)
        layers[context.layer] = {name: tensor[0].float().clone() for name, tensor in named}
        return attend_exactly(query, key, value, context)

    undo = replace_attention(language_model.model, dict.fromkeys(LAYERS, keep))
    try:
        language_model.hidden(window.tokens)
    finally:
        undo()
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    torch.save({"book": book.stem, "digest": window.digest, "layers": layers}, unfinished)
    unfinished.rename(path)  # an interrupted run leaves no half file behind
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Capture every book that is not in the cache yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path, nargs="+")
    parser.add_argument("--cache", type=Path, required=True, help="directory outside the repository")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for book in options.books:
        print(capture(book, options.cache))  # noqa: T201


if __name__ == "__main__":
    main()
