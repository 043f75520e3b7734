"""Routed attention against exact attention (SDPA) in the same run, and where its time goes.

    python experiments/routed/speed.py --n 8192 32768 --threads 2
    python experiments/routed/speed.py --n 32768 --backward --heads 1

Wall time is the measure on a quiet machine. `--cpu` takes processor time instead, which with one thread is fair
on a busy one (with several threads it counts waiting at barriers as work).
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

import prescore.routed.lanes as lanes
import prescore.routed.softmax as softmax
from prescore import Routed, prescored_attention

STAGES = [(lanes, name) for name in ("build_clusters", "_beginning")]
STAGES += [(softmax, name) for name in ("attend_columns", "attend_local", "dispatch", "attend_pairs", "sum_pairs")]


def best(run: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    """The shortest of several runs."""
    times = []
    for _ in range(repeats):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)


def watch(clock: Callable[[], float]) -> Counter[str]:
    """Add up the time of every stage from now on."""
    spent: Counter[str] = Counter()
    for module, name in STAGES:
        original = getattr(module, name)

        def timed(*arguments, _original=original, _name=name, **options):  # noqa: ANN001, ANN002, ANN003, ANN202
            start = clock()
            try:
                return _original(*arguments, **options)
            finally:
                spent[_name] += clock() - start

        setattr(module, name, timed)
    return spent


def main() -> None:
    """Time every length and leaf size asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--leaf-size", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--skip-exact", action="store_true", help="exact attention at 131072 takes minutes")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu else time.perf_counter
    spent = watch(clock)
    for n in options.n:
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(1, options.heads, n, 64, generator=generator) for _ in range(3)]
        for tensor in tensors:
            tensor.requires_grad_(options.backward)

        def both(run: Callable[[], torch.Tensor], tensors: list[torch.Tensor] = tensors) -> None:
            output = run()
            if options.backward:
                torch.autograd.grad(output.sum(), tensors)

        def exact(tensors: list[torch.Tensor] = tensors) -> torch.Tensor:
            return scaled_dot_product_attention(*tensors, is_causal=True)

        slow = float("nan")
        if not options.skip_exact:
            slow = best(lambda: both(exact), options.repeats, clock)
        for leaf_size in options.leaf_size:
            config = Routed(rows=options.rows, leaf_size=leaf_size)

            def ours(config: Routed = config, tensors: list[torch.Tensor] = tensors) -> torch.Tensor:
                return prescored_attention(*tensors, config, is_causal=True)

            both(ours)
            spent.clear()
            fast = best(lambda: both(ours), options.repeats, clock)
            stages = {name: round(seconds / options.repeats, 4) for name, seconds in spent.items()}
            print(f"n={n} leaf={leaf_size}: {fast:.3f} s, exact {slow:.3f} s, {slow / fast:.2f}x  {stages}")  # noqa: T201


if __name__ == "__main__":
    main()
