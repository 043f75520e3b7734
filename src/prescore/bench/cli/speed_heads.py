"""`prescore speed --save-heads`: what reaches a model's attention, saved for `prescore speed --heads`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from prescore.bench.cli.settings import quiet_loading, read_layers

Heads = Annotated[
    Path | None,
    typer.Option(
        file_okay=False,
        exists=True,
        help="Directory of saved attention inputs (--save-heads), used instead of random tensors, or by --study "
        "lengths beside them; --n positions of those that have as many.  [default: all]",
    ),
]
SaveHeads = Annotated[
    Path | None,
    typer.Option(
        file_okay=False, help="Save the attention inputs of --model over the first --n tokens of --text-file here."
    ),
]
TextFile = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="The text that --save-heads reads.")
]


def save(
    directory: Path, model: str, text_file: Path | None, lengths: Sequence[int] | None, layers: str
) -> list[Path]:
    """Save the heads of a model; positions past its trained length are scaled (YaRN)."""
    if text_file is None:
        raise ValueError("--save-heads must come with a --text-file, got none")
    chosen = read_layers(layers)
    from prescore.bench.language.documents import decode
    from prescore.bench.language.model import load_language_model
    from prescore.bench.speed.heads import save_heads

    quiet_loading()
    loaded = load_language_model(model)
    tokens = loaded.encode(decode(text_file.read_bytes(), str(text_file)))
    n_tokens = max(lengths) if lengths else min(len(tokens), loaded.trained_length or len(tokens))
    if n_tokens > len(tokens):
        raise ValueError(f"--n must be at most the {len(tokens)} tokens of {text_file.name}, got {n_tokens}")
    print(f"reading {n_tokens} tokens", file=sys.stderr, flush=True)
    with loaded.extended(n_tokens):
        return save_heads(loaded.model, tokens[None, :n_tokens], directory, layers=chosen)
