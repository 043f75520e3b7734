"""Inputs of a layer some of whose heads copy: each of their queries wants one key of the far past."""

import torch

from prescore import Routed

SCALE, DIM, UNTIL = 0.25, 16, 400
CONFIG = Routed(rows=128, leaf_size=32, chunk_size=64, sinks=2, exact_until=UNTIL)


def copying(n=700, *, heads=(True, False), batch=1, group=2, seed=0, dtype=torch.float64):
    """Queries of a copying head want one key of the far past each; those of another head look nowhere much."""
    generator = torch.Generator().manual_seed(seed)
    n_heads = len(heads)
    key, value = (torch.randn(batch, n_heads, n, DIM, generator=generator, dtype=dtype) for _ in range(2))
    # sixteen kinds of keys, each in every part of the text: what small leaves can hold and large ones mix
    kinds = torch.randn(16, DIM, generator=generator, dtype=dtype)
    key = 0.3 * key + kinds[torch.randint(16, (n,), generator=generator)]
    query = 0.05 * torch.randn(batch, n_heads * group, n, DIM, generator=generator, dtype=dtype)
    wanted = (torch.rand(n, generator=generator) * torch.arange(n)).long()
    for head, copies in enumerate(heads):
        if copies:
            own = slice(head * group, (head + 1) * group)
            query[:, own] += 3 * key[:, head : head + 1].index_select(2, wanted)
    return [tensor.requires_grad_() for tensor in (query, key, value)]
