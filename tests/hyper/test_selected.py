"""`Selected` as a whole: rows that decide for themselves, the delta test, centroids, and the unbiased residual."""

import pytest
import torch
from attention_checks import call_of, check_unbiased

from prescore import Exact, KMeans, KMedian, Lsh, Selected, Selection, exact_attention, prescored_attention
from prescore.selected.plan import make_plan

LSH = Lsh(block_size=16, sample_size=16)
PAPER = Selected.paper("key-norm", 64, inner=LSH, min_seq_len=64)
causal_or_not = pytest.mark.parametrize("is_causal", [False, True])


def draw(n, *, batch=1):
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(batch, 2, n, 8, generator=generator, dtype=torch.float64) for _ in range(3)]


def assert_exact(output, *tensors, **options):
    expected = exact_attention(*tensors, **options).output
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("inner", [LSH, Exact()], ids=["lsh", "exact"])
def test_a_causal_call_within_one_leaf_is_one_exact_part(inner):
    tensors = draw(60)
    plan = make_plan(call_of(*tensors, is_causal=True), PAPER.replace(inner=inner))
    assert len(plan.parts) == 1
    for output in (plan.run().output, prescored_attention(*tensors, PAPER.replace(inner=inner), is_causal=True)):
        assert torch.equal(output, exact_attention(*tensors, is_causal=True).output)


def test_every_key_is_reported_as_selected_when_every_key_is_read():
    for config in (PAPER.replace(top_k=1.0), PAPER.replace(top_k=100), Exact()):
        _, aux = prescored_attention(*draw(100), config, return_aux=True)
        assert aux.selection.indices[0, 0].tolist() == list(range(100))
        assert aux.stats["keys_selected"] == 100


def test_rows_of_a_batch_decide_for_themselves():
    tensors = draw(500, batch=2)
    mask = torch.arange(500) < torch.tensor([[500], [120]])
    config = PAPER.replace(top_k=1.0, min_seq_len=200)
    both = prescored_attention(*tensors, config, key_padding_mask=mask)
    short, long = [t[1:, :, :120] for t in tensors], [t[:1] for t in tensors]
    assert_exact(both[1:, :, :120], *short)
    assert_exact(prescored_attention(*short, config), *short)
    alone = prescored_attention(*long, config)
    torch.testing.assert_close(both[:1], alone, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(alone, exact_attention(*long).output)


@causal_or_not
def test_a_failed_delta_test_runs_unfiltered(is_causal):
    """Over all keys: exactly with `inner=Exact()`, and otherwise as HyperAttention (tests/test_api.py)."""
    tensors = draw(300)
    config = Selected("key-norm", 10, min_fraction=0.5, min_seq_len=64)
    output, aux = prescored_attention(*tensors, config, is_causal=is_causal, return_aux=True)
    assert_exact(output, *tensors, is_causal=is_causal)
    assert aux.stats["fallbacks"] == (4 if is_causal else 1)  # two blocks of 64, one of 128 and one of 256 keys


@causal_or_not
def test_centroids_have_the_clusters_of_the_scorer_or_those_of_kmeans(is_causal):
    tensors = draw(300)

    def attend(scorer, remainder):
        config = Selected(scorer, 20, min_seq_len=64, remainder=remainder)
        return prescored_attention(*tensors, config, is_causal=is_causal, generator=3)

    assert torch.equal(attend("key-diff", "centroids"), attend("key-diff", KMeans()))
    three = KMeans(n_clusters=3)
    assert torch.equal(attend(three, "centroids"), attend(three, three))
    for other in (KMeans(n_clusters=4), KMedian(n_clusters=3), "none"):
        assert not torch.allclose(attend(three, "centroids"), attend(three, other))


@pytest.mark.parametrize(("is_causal", "inner"), [(False, Exact()), (True, Exact()), (True, Lsh(4, 4))])
def test_centroids_stay_when_a_given_selection_is_empty(is_causal, inner):
    tensors = draw(64)
    empty = Selection(torch.zeros(1, 2, 0, dtype=torch.int64), torch.zeros(1, 2, 0, dtype=torch.bool))
    config = Selected(top_k=8, sinks=0, remainder="centroids", min_seq_len=4, inner=inner)
    exact = exact_attention(*tensors, is_causal=is_causal).output
    output = prescored_attention(*tensors, config, is_causal=is_causal, selection=empty)
    assert (output - exact).norm() < 0.9 * exact.norm()


@pytest.mark.parametrize("alignment", ["rank", "hash"])
@pytest.mark.parametrize("selected", [False, True])
def test_identity_4_the_residual_is_unbiased_over_seeds(alignment, selected):
    lsh = Lsh(block_size=4, sample_size=3, n_projections=3, alignment=alignment)
    config = Selected.paper("key-norm", 12, min_seq_len=0, inner=lsh)
    check_unbiased(config, seeds=2000, selected=selected)
