"""The largest block of the recursion, against the blocks that a call really has."""

import pytest
import torch

from prescore import Lsh, Selected, prescored_attention
from prescore.bench.language.experiments import largest_block


@pytest.mark.parametrize(("n", "leaf"), [(64, 8), (65, 8), (63, 8), (100, 12), (16, 16), (10, 16), (17, 16)])
def test_largest_block_is_that_of_a_call(n, leaf):
    query, key = torch.randn(2, 1, 1, n, 8, generator=torch.Generator().manual_seed(0))
    config = Selected.paper("key-norm", n, min_seq_len=leaf, inner=Lsh(4, 0, alignment="rank"))
    blocks = prescored_attention(query, key, key, config=config, is_causal=True, return_aux=True)[1].selection
    assert largest_block(n, leaf) == max((int(block.valid.sum(-1).max()) for block in blocks), default=0)
