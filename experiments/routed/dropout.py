"""What dropout of attention weights costs, forward and backward, in processor time and memory.

    python experiments/routed/dropout.py --n 8192 --p 0.0
    python experiments/routed/dropout.py --n 8192 --p 0.1

One thread, so processor time is fair on a busy machine; one setting per run, because peak memory never falls.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch

import prescore


def main() -> None:
    """Measure one setting: shapes of SmolLM2-135M, causal, the default configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=8192)
    parser.add_argument("--p", type=float, default=0.1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    sizes = ((1, heads, options.n, 64) for heads in (9, 3, 3))
    query, key, value = (torch.randn(size, generator=generator, requires_grad=True) for size in sizes)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    output = prescore.prescored_attention(query, key, value, is_causal=True, dropout_p=options.p)
    middle = time.process_time()
    output.sum().backward()
    end = time.process_time()
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024
    seconds = f"forward {middle - begin:.2f} s, backward {end - middle:.2f} s"
    print(f"n {options.n}, p {options.p}: {seconds}, +{peak:.0f} MiB")


if __name__ == "__main__":
    main()
