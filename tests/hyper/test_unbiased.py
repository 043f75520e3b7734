"""Identity 4: the residual is unbiased, whichever block a query reads."""

import pytest
from attention_checks import check_unbiased

from prescore import Lsh, Selected

SEEDS = 2000


@pytest.mark.parametrize("alignment", ["rank", "hash"])
@pytest.mark.parametrize("selected", [False, True])
def test_mean_over_seeds_is_the_exact_sum(alignment, selected):
    lsh = Lsh(block_size=4, sample_size=3, n_projections=3, alignment=alignment)
    config = Selected.paper("key-norm", 12, min_seq_len=0, inner=lsh)
    check_unbiased(config, seeds=SEEDS, selected=selected)
