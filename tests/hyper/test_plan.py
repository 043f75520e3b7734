"""Plans: one exact part where nothing else pays, rows of a batch that decide for themselves, the delta test."""

import pytest
import torch
from attention_checks import call_of

from prescore import Exact, KMeans, KMedian, Lsh, Selected, Selection, exact_attention, prescored_attention
from prescore.ops.parts import exact_parts
from prescore.selected.plan import make_plan

LSH = Lsh(block_size=16, sample_size=16)
PAPER = Selected.paper("key-norm", 64, inner=LSH, min_seq_len=64)


def draw(n, *, batch=1, dim=8):
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(batch, 2, n, dim, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("inner", [LSH, Exact()], ids=["lsh", "exact"])
def test_a_causal_call_within_one_leaf_is_one_exact_part(inner):
    query, key, value = draw(60)
    call = call_of(query, key, value, is_causal=True)
    plan = make_plan(call, PAPER.replace(inner=inner))
    wanted = exact_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(plan.run(call).output, wanted.output, rtol=0, atol=0)
    assert len(plan.parts) == len(exact_parts(query, key, is_causal=True, valid=None)) == 1
    got = prescored_attention(query, key, value, PAPER.replace(inner=inner), is_causal=True)
    torch.testing.assert_close(got, wanted.output, rtol=0, atol=0)


def test_everything_is_reported_as_selected_when_everything_is_read():
    query, key, value = draw(100)
    for config in (PAPER.replace(top_k=1.0), PAPER.replace(top_k=100), Exact()):
        _, aux = prescored_attention(query, key, value, config, return_aux=True)
        assert aux.selection.indices[0, 0].tolist() == list(range(100))
        assert aux.stats["keys_selected"] == 100


def test_rows_of_a_batch_decide_for_themselves():
    query, key, value = draw(500, batch=2)
    mask = torch.ones(2, 500, dtype=torch.bool)
    mask[1, 120:] = False
    config = PAPER.replace(top_k=1.0, min_seq_len=200)
    both = prescored_attention(query, key, value, config, key_padding_mask=mask)
    short = [tensor[1:, :, :120] for tensor in (query, key, value)]
    alone = prescored_attention(*short, config)
    torch.testing.assert_close(both[1:, :, :120], alone, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(alone, exact_attention(*short).output, rtol=1e-10, atol=1e-12)
    long = prescored_attention(*(tensor[:1] for tensor in (query, key, value)), config)
    torch.testing.assert_close(both[:1], long, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(long, exact_attention(query[:1], key[:1], value[:1]).output)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_failed_delta_test_runs_unfiltered(is_causal):
    """Over all keys: exactly with `inner=Exact()`, and otherwise as HyperAttention (tests/test_api.py)."""
    query, key, value = draw(300)
    config = Selected("key-norm", 10, min_fraction=0.5, min_seq_len=64)
    got, aux = prescored_attention(query, key, value, config, is_causal=is_causal, return_aux=True)
    wanted = exact_attention(query, key, value, is_causal=is_causal)
    torch.testing.assert_close(got, wanted.output, rtol=1e-10, atol=1e-12)
    assert aux.stats["fallbacks"] == (4 if is_causal else 1)  # two blocks of 64, one of 128 and one of 256 keys


@pytest.mark.parametrize("is_causal", [False, True])
def test_stand_ins_have_the_scorers_clusters_or_those_of_kmeans(is_causal):
    tensors = draw(300)

    def attend(**fields):
        config = Selected(top_k=20, min_seq_len=64, **fields)
        return prescored_attention(*tensors, config, is_causal=is_causal, generator=3)

    plain = attend(scorer="key-diff", remainder="centroids")
    assert torch.equal(plain, attend(scorer="key-diff", remainder=KMeans()))
    own = attend(scorer=KMeans(n_clusters=3), remainder="centroids")
    assert torch.equal(own, attend(scorer=KMeans(n_clusters=3), remainder=KMeans(n_clusters=3)))
    for other in (KMeans(n_clusters=4), KMedian(n_clusters=3), "none"):
        assert not torch.allclose(own, attend(scorer=KMeans(n_clusters=3), remainder=other))


def test_stand_ins_stay_when_a_given_selection_lies_elsewhere():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 64, 8, generator=generator) for _ in range(3))
    empty = Selection(torch.zeros(1, 2, 0, dtype=torch.int64), torch.zeros(1, 2, 0, dtype=torch.bool))
    config = Selected(top_k=8, sinks=0, remainder="centroids", min_seq_len=4)
    exact = exact_attention(query, key, value).output
    output = prescored_attention(query, key, value, config, selection=empty)
    assert (output - exact).norm() < 0.9 * exact.norm()
    for changes in ({}, {"inner": Lsh(block_size=4, sample_size=4)}):
        own = exact_attention(query, key, value, is_causal=True).output
        causal = prescored_attention(query, key, value, config.replace(**changes), is_causal=True, selection=empty)
        assert torch.isfinite(causal).all()
        assert (causal - own).norm() < 0.9 * own.norm()
