"""Routed attention in plain torch, compared with exact attention: forward, and forward + backward.

    python experiments/routed/plain.py HEADS --n 16384 --threads 2

HEADS is a folder of saved heads (`prescore save-heads`). `random` is added: 4 heads of 64, normal numbers.
`dropout` and `float64` are random too. Each time is the shorter of two.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prescore import Config, Exact, Routed, prescored_attention
from prescore.bench.speed.heads import find_heads
from prescore.bench.speed.timing import random_inputs


def seconds(config: Config | None, inputs: Sequence[Tensor], backward: bool, **options: Any) -> float:
    """The shorter of two times; no configuration = torch's fused attention."""
    best = float("inf")
    for _ in range(2):
        query, key, value = (t.detach().requires_grad_(backward) for t in inputs)
        begin = time.perf_counter()
        if config is None:
            output: Any = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            output = prescored_attention(query, key, value, config, is_causal=True, **options)
        if backward:
            output.sum().backward()
        best = min(best, time.perf_counter() - begin)
    return best


def main() -> None:
    """Time every input, exact and plain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads")
    parser.add_argument("--n", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="names, with commas between them")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    named = {saved.name: saved for saved in find_heads(options.heads)}
    print(f"| {options.n} tokens | pass | exact s | plain s | exact / plain |")
    for name in options.only.split(",") if options.only else (*named, "random", "float64", "dropout"):
        given: dict[str, Any] = {"dropout_p": 0.1} if name == "dropout" else {}
        if name in named:
            inputs = named[name].inputs(options.n)
        else:
            inputs = random_inputs(options.n, 4, 64, dtype="float64" if name == "float64" else "float32")
        for backward in (False, True):
            exact = seconds(Exact() if given else None, inputs, backward, **given)
            plain = seconds(Routed(), inputs, backward, backend="plain", **given)
            kind = "forward + backward" if backward else "forward"
            print(f"| {name} | {kind} | {exact:.2f} | {plain:.2f} | {exact / plain:.2f} |", flush=True)


if __name__ == "__main__":
    main()
