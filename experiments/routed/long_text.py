"""A model reads a long text whole, in chunks: first token, attention by layer, memory, keys read, error.

    python experiments/routed/long_text.py BOOK --model MODEL --length 131072 --audit 0.0005 --out long.jsonl

Prints and records a line for every chunk, and at the end a line for the whole text. Positions past the trained
length are scaled (YaRN). The error is that of `prescore.apply(audit=...)`: a random share of the queries is
compared with exact attention, layer by layer; its time counts in the seconds of a chunk, not in the seconds of
attention. The loss is that of the default over the last chunk.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import prescore
from prescore.bench.language.documents import load_documents
from prescore.bench.language.model import load_language_model
from prescore.bench.memory import peak_megabytes
from prescore.bench.records import versions
from prescore.integrations.transformers import PrescoredCache


def read(options: argparse.Namespace) -> None:
    """Read the text and record every chunk."""
    torch.set_num_threads(options.threads)
    loaded = load_language_model(options.model, dtype=options.dtype, check_head=False)
    (document,) = load_documents([options.text])
    tokens = loaded.encode(document.text, special=False)[options.offset :][: options.length]
    if len(tokens) < options.length:
        raise SystemExit(f"--length must be at most the tokens of the text, {len(tokens)}, got {options.length}")
    base, cache = loaded.model.base_model, PrescoredCache(loaded.model.config)
    rows = {
        "text": document.name,
        "offset": options.offset,
        "length": options.length,
        "dtype": options.dtype,
        "threads": options.threads,
    }
    wall, processor = time.perf_counter(), time.process_time()
    with (
        loaded.extended(options.length) as scaling,
        prescore.apply(loaded.model, audit=options.audit or None) as applied,
        torch.no_grad(),
    ):
        for begin in range(0, options.length, options.chunk):
            chunk = tokens[begin : begin + options.chunk]
            hidden = base(input_ids=chunk[None], past_key_values=cache, use_cache=True).last_hidden_state[0]
            write(options.out, {**rows, "read": begin + len(chunk), **costs(applied, wall, processor)})
        loss = float(cross_entropy(loaded.logits(hidden[:-1]), chunk[1:]))
        first = time.perf_counter() - wall
    layers = [layer.phases["prefill"] for layer in applied.report().layers]
    whole = {
        "scaling": scaling,
        "first_token_seconds": first,
        "loss_of_last_chunk": loss,
        "layer_seconds": [round(phase.seconds, 2) for phase in layers],
        "layer_keys_read": [
            None if phase.last.reads is None else round(phase.last.reads.keys) for phase in layers
        ],
        "layer_error": [phase.errors.mean for phase in layers],
        "layer_audited": [phase.errors.n for phase in layers],
        "cache": cache.report(),
    }
    write(options.out, {**rows, **costs(applied, wall, processor), **whole, **versions()})


def costs(applied: Any, wall: float, processor: float) -> dict[str, Any]:
    """Seconds so far, those of attention, and peak memory."""
    layers = [layer.phases["prefill"].seconds for layer in applied.report().layers]
    return {
        "seconds": round(time.perf_counter() - wall, 1),
        "processor_seconds": round(time.process_time() - processor, 1),
        "attention_seconds": round(sum(layers), 1),
        "peak_megabytes": peak_megabytes(),
    }


def write(path: Path, row: dict[str, Any]) -> None:
    """One line into the file and on the screen."""
    line = json.dumps(row, default=str)
    with path.open("a") as file:
        file.write(line + "\n")
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Read one text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--audit", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("long.jsonl"))
    read(parser.parse_args())


if __name__ == "__main__":
    main()
