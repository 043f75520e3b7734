"""Your own scorer in one class: checked against the contract, used by name, also on the command line.

prescore --import examples/07_own_scorer.py generate -d book.txt --method surprise --top-k 64
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import prescore
from prescore.rng import Streams


@prescore.register_scorer("surprise")
@dataclass(frozen=True)
class Surprise(prescore.Scorer):
    """Keys unlike the keys around them."""

    width: int = 16

    def score(self, keys: Tensor, *, valid: Tensor | None, streams: Streams) -> Tensor:
        """`[B, H, N, D]` keys -> `[B, H, N]` scores, higher = kept."""
        before = keys.cumsum(dim=2)
        window = before - torch.nn.functional.pad(before, (0, 0, self.width, 0))[:, :, : keys.shape[2]]
        return -torch.cosine_similarity(keys, window, dim=-1)

    permutation_equivariant = False  # scores depend on neighbours


if __name__ == "__main__":
    from prescore.testing import check_scorer

    check_scorer("surprise")
    torch.manual_seed(0)
    key, value = torch.randn(1, 2, 2048, 32), torch.randn(1, 2, 2048, 32)
    exact = prescore.exact_attention(key, key, value, is_causal=True).output
    for scorer in ("surprise", Surprise(width=64), "key-diff", "uniform"):
        config = prescore.Selected(scorer, top_k=128, min_seq_len=256)
        output = prescore.prescored_attention(key, key, value, config, is_causal=True)
        print(f"{scorer!s:24} error {float((output - exact).norm() / exact.norm()):.3f}")
