"""The untouched default on another model than it was chosen on, beside random keys + sinks at no fewer rows.

    python experiments/routed/second_model.py MODEL.gguf BOOK.txt --length 8192 --windows 2

A beginning-of-text token is put before every window where the tokenizer has one: Gemma is lost without it. Layers
with a sliding window stay as they are. One JSON line per method and window.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from prescore import Exact, Routed, Selected
from prescore.bench.language.documents import Document, decode
from prescore.bench.language.methods import EXACT, SINKS, Method, local_only
from prescore.bench.language.model import load_language_model
from prescore.bench.language.perplexity import Window, make_windows, measure_loss


def main() -> None:
    """Measure every method on every window."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("book", type=Path)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--counted", type=int, default=1024, help="last positions that count in the loss")
    parser.add_argument("--top-k", type=int, default=520, help="keys that random selection keeps in each block")
    parser.add_argument("--only", nargs="+", help="labels of the methods to measure (default: all)")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load_language_model(options.model)
    text = decode(options.book.read_bytes(), options.book.name)
    first = options.length - options.counted
    windows = make_windows(
        loaded, [Document(options.book.name, text)], options.length, first=first, per_document=options.windows
    )
    begin = loaded.tokenizer.bos_token_id
    if begin is not None:
        windows = [Window(w.document, torch.cat((torch.tensor([begin]), w.tokens[1:])), w.first) for w in windows]
    random = Selected.paper("uniform", options.top_k, sinks=SINKS, inner=Exact(), min_seq_len=512)
    methods = [EXACT, local_only(512), Method("default", Routed()), Method("random + sinks", random)]
    methods = [method for method in methods if not options.only or method.label in options.only]
    for window in windows:
        for method in methods:
            results = measure_loss(loaded, window, method)
            print(json.dumps({"method": method.label, "window": window.document, **results}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
