"""`Selected.paper` beside the published formulas: the same error, within the spread of seeds."""

import pytest
import torch
from oracles.inputs import attention_tensors
from oracles.published import Published

from prescore import Coupling, Lsh, Selected, exact_attention, prescored_attention

SEEDS = 24
QUERY, KEY, VALUE = attention_tensors(
    batch=1, heads=4, kv_heads=4, n_query=512, n_keys=512, dim=16, seed=3, spread=1.0
)
EXACT = exact_attention(QUERY, KEY, VALUE, is_causal=True).output[0]


def error(output):
    return float((output - EXACT).norm() / EXACT.norm())


def errors(leaf, top_k, inclusive, blocks="all"):
    """Relative errors of the library and of the published formulas, one of each for every seed."""
    lsh = Lsh(block_size=16, sample_size=16, n_projections=5, alignment="rank")
    options = {"min_seq_len": leaf, "leaf_inclusive": inclusive, "coupling": Coupling(blocks=blocks)}
    config = Selected.paper("key-norm", top_k, inner=lsh, **options)
    ours, theirs = [], []
    for seed in range(SEEDS):
        ours.append(error(prescored_attention(QUERY, KEY, VALUE, config, is_causal=True, generator=seed)[0]))
        published = Published(top_k, leaf, inclusive, 16, 16, 5, seed)
        theirs.append(error(published(QUERY[0] * QUERY.shape[-1] ** -0.5, KEY[0], VALUE[0])))
    return torch.tensor(ours), torch.tensor(theirs)


@pytest.mark.parametrize("inclusive", [False, True], ids=["flag off", "flag on"])
@pytest.mark.parametrize("top_k", [8, 48])
def test_the_error_is_that_of_the_published_formulas(top_k, inclusive):
    ours, theirs = errors(64, top_k, inclusive)
    # four standard errors of the difference of two means
    allowed = 4 * ((ours.var() + theirs.var()) / SEEDS).sqrt()
    assert abs(ours.mean() - theirs.mean()) < allowed
    assert allowed < 0.1 * theirs.mean()
    # draws of every head: one set for all heads would spread about twice as much
    assert 0.5 < ours.std() / theirs.std() < 2


@pytest.mark.parametrize("top_k", [4, 64, 256])
def test_with_the_flag_blocks_of_the_leaf_size_are_exact(top_k):
    """One block pair of 256 queries: exact over all its keys with the flag, far from it without."""
    ours, theirs = errors(256, top_k, inclusive=True)
    assert max(ours.max(), theirs.max()) < 1e-6
    assert min(*errors(256, 4, inclusive=False)[0]) > 0.1
