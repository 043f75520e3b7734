"""`Selected` and `Hyper`: rows that decide for themselves, the delta test, centroids, the residual, sortLSH."""

import pytest
import torch
from attention_checks import assert_equal, attend, check_gray_neighbours, check_unbiased
from oracles.inputs import attention_tensors
from oracles.naive import gray_position

from prescore import Exact, Hyper, KMeans, KMedian, Lsh, Selected, Selection, exact_attention, hyper_attention
from prescore.attention import prescored_attention
from prescore.rng import Streams
from prescore.scoring.hashing import gray_rank, hash_ranks, projections

LSH = Lsh(block_size=16, sample_size=16)
PAPER = Selected.paper("key-norm", 64, inner=LSH, min_seq_len=64)
causal_or_not = pytest.mark.parametrize("is_causal", [False, True])


def draw(n, *, batch=1):
    return attention_tensors(batch=batch, heads=2, kv_heads=2, n_keys=n, dim=8, seed=n, spread=1.0)


def test_rows_of_a_batch_decide_for_themselves():
    tensors = draw(500, batch=2)
    mask = torch.arange(500) < torch.tensor([[500], [120]])
    config = PAPER.replace(top_k=1.0, min_seq_len=200)
    both = prescored_attention(*tensors, config, key_padding_mask=mask)
    short, long = [t[1:, :, :120] for t in tensors], [t[:1] for t in tensors]
    exact, alone = exact_attention(*short).output, prescored_attention(*long, config)
    for found, expected in (
        (both[1:, :, :120], exact),
        (prescored_attention(*short, config), exact),
        (both[:1], alone),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(alone, exact_attention(*long).output)


@causal_or_not
def test_a_failed_delta_test_reads_all_keys_as_hyper_attention_or_exactly(is_causal):
    tensors, options = draw(300), {"is_causal": is_causal, "generator": 2}
    config = Selected("key-norm", 10, sinks=0, min_fraction=0.5, min_seq_len=64)
    result, aux = attend(tensors, config, **options)
    assert_equal(result, exact_attention(*tensors, is_causal=is_causal))
    assert aux.stats["fallbacks"] == (4 if is_causal else 1)  # two blocks of 64, one of 128 and one of 256 keys
    result, _ = attend(tensors, config.replace(inner=LSH), **options)
    assert_equal(result, hyper_attention(*tensors, Hyper(LSH, min_seq_len=64), **options))
    filtered, aux = attend(tensors, config.replace(inner=LSH, min_fraction=0.01), **options)
    assert aux.stats["fallbacks"] == 0
    assert not torch.allclose(filtered.output, result.output)


@causal_or_not
@pytest.mark.parametrize(("scorer", "budget"), [("leverage", 1.0), ("kmeans", 300)])
def test_selecting_every_key_is_hyper_attention(scorer, budget, is_causal):
    tensors, options = draw(300), {"is_causal": is_causal, "generator": 2}
    shared = {"min_seq_len": 64, "leaf_inclusive": True, "sinks": 2}
    plain = hyper_attention(*tensors, Hyper(LSH, **shared), **options)
    assert torch.equal(prescored_attention(*tensors, Hyper(LSH, **shared), **options), plain.output)
    result, _ = attend(tensors, Selected.paper(scorer, budget, inner=LSH, **shared), **options)
    assert torch.equal(result.output, plain.output)
    assert torch.equal(result.lse, plain.lse)


@causal_or_not
def test_centroids_have_the_clusters_of_the_scorer_or_those_of_kmeans(is_causal):
    tensors = draw(300)

    def run(scorer, remainder):
        config = Selected(scorer, 20, min_seq_len=64, remainder=remainder)
        return prescored_attention(*tensors, config, is_causal=is_causal, generator=3)

    assert torch.equal(run("key-diff", "centroids"), run("key-diff", KMeans()))
    three = KMeans(n_clusters=3)
    assert torch.equal(run(three, "centroids"), run(three, three))
    for other in (KMeans(n_clusters=4), KMedian(n_clusters=3), "none"):
        assert not torch.allclose(run(three, "centroids"), run(three, other))


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


@pytest.mark.parametrize("n_bits", range(1, 31))
def test_identity_8_neighbouring_buckets_differ_in_one_bit(n_bits):
    if n_bits < 13:
        check_gray_neighbours(n_bits)
    ranks = torch.randint(2**n_bits, (500,), generator=torch.Generator().manual_seed(n_bits))
    assert torch.equal(gray_rank(ranks ^ (ranks >> 1), n_bits), ranks)  # the inverse of the Gray code


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_bits", [1, 3, 7, 12])
def test_the_hash_by_its_definition(n_bits, dtype):
    vectors = torch.cat((draw(40)[1][0, 0], torch.zeros(1, 8))).to(dtype)
    directions = projections(n_bits, vectors, Streams(3))
    assert directions.shape == (8, n_bits)
    assert torch.equal(directions, projections(n_bits, vectors, Streams(3)))
    assert not torch.equal(directions, projections(n_bits, vectors, Streams(2)))
    ranks = hash_ranks(vectors, directions)
    assert torch.equal(ranks, hash_ranks(vectors * 4, directions))  # a power of two rounds nothing
    if dtype == torch.float64:
        assert ranks.tolist() == [gray_position(vector @ directions >= 0) for vector in vectors]
    codes, others = (r ^ (r >> 1) for r in (ranks[:-1], hash_ranks(-vectors[:-1], directions)))
    assert torch.equal(codes ^ others, torch.full_like(codes, 2**n_bits - 1))
