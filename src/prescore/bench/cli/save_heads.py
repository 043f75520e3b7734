"""`prescore save-heads`: attention inputs of a model over a text, as files that `prescore speed --heads` times."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from prescore.bench.cli.options import Layers, Model, folder, read_layers


def command(
    out: Annotated[Path, typer.Option(parser=folder("--out"), metavar="DIRECTORY", help="Receives the files.")],
    document: Annotated[str, typer.Option("--document", "-d", help="The text: a file or a name of the corpus.")],
    length: Annotated[
        int | None,
        typer.Option("--length", "-n", min=16, help="Tokens read.  [default: all, up to the trained length]"),
    ] = None,
    model: Model = "smollm2",
    layers: Layers = "all",
) -> None:
    """Read a text with exact attention, and save queries, keys and values of some layers.

    Positions past the trained length are scaled (YaRN).

    Example: prescore save-heads --out heads -d book.txt -n 8192 --layers 0,12,24
    """
    for path in out.glob("layer-*.safetensors"):
        raise ValueError(f"--out must name a directory without saved heads, got {path}")
    chosen = read_layers(layers)
    from prescore.bench.language.documents import load_documents
    from prescore.bench.language.model import load_language_model
    from prescore.bench.speed.heads import save_heads

    text = load_documents([document], limit=1)[0]
    loaded = load_language_model(model, check_head=False)
    tokens = loaded.encode(text.text)
    n_tokens = length or min(len(tokens), loaded.trained_length or len(tokens))
    if n_tokens > len(tokens):
        raise ValueError(f"-n must be at most the {len(tokens)} tokens of {text.name}, got {n_tokens}")
    print(f"reading {n_tokens} tokens", file=sys.stderr, flush=True)
    with loaded.extended(n_tokens):
        for path in save_heads(loaded.model, tokens[None, :n_tokens], out, layers=chosen):
            print(path)
