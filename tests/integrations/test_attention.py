"""`PrescoredAttention` in place of a layer's attention: paths, masks, refusals, seeds, what it keeps."""

import copy
import gc
import pickle
import weakref
from dataclasses import replace

import pytest
import torch
from tiny_models import COARSE, ROUTED

import prescore
from prescore import Exact, Hyper, Lsh
from prescore.integrations.attention import AttentionContext, PrescoredAttention, layer_seed

ENGINES = {"selected": COARSE, "routed": ROUTED.replace(exact_until=0), "hyper": Hyper(Lsh(8, 8), min_seq_len=8)}
CAUSAL = AttentionContext(layer=3, is_causal=True)


def qkv(n_query=40, n_keys=40, batch=2):
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(batch, 4, n_keys, 8, generator=draw)[:, :, n_keys - n_query :]
    return query, *(torch.randn(batch, 2, n_keys, 8, generator=draw) for _ in range(2))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", ENGINES)
def test_a_prompt_is_prescored_attention_with_a_seed_of_the_layer(name, is_causal):
    attend, (query, key, value) = PrescoredAttention(ENGINES[name], seed=7), qkv()
    context = AttentionContext(layer=3, is_causal=is_causal, scale=0.3)
    options = {"scale": 0.3, "generator": layer_seed(7, 3)}
    expected, aux = prescore.prescored_attention(
        query, key, value, ENGINES[name], is_causal=is_causal, return_aux=True, **options
    )
    assert torch.equal(attend(query, key, value, context), expected)
    last, kind = attend.last, "causal" if is_causal else "full"
    assert (last.path, last.mask, last.n_query, last.n_keys) == ("prescored", kind, 40, 40)
    assert last.reads == pytest.approx((aux.stats.keys_per_query, aux.stats.centroids_per_query))
    assert last.visible_keys == (20.5 if is_causal else 40)
    assert len({layer_seed(seed, layer) for seed in range(10) for layer in range(10)}) == 100
    step = query[:, :, -1:], key, value  # identity 10
    expected = prescore.prescored_attention(*step, ENGINES[name] if name == "selected" else Exact(), **options)
    torch.testing.assert_close(attend(*step, context), expected, atol=1e-6, rtol=1e-5)
    assert attend.last.path == f"step over {'the selection' if name == 'selected' else 'all keys'}"


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("n_query", [40, 3, 1])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_counted(is_causal, n_query, side):
    """Exact attention reads the real keys that real queries see, counted one by one."""
    real = torch.ones(2, 40, dtype=torch.bool)
    real[0, slice(9) if side == "left" else slice(-9, None)] = False
    visible = real[:, None, :].expand(2, n_query, 40)
    if is_causal:
        visible = visible & torch.ones(40, 40, dtype=torch.bool).tril()[-n_query:]
    counted = real if n_query == 40 else torch.ones(2, n_query, dtype=torch.bool)
    attend = PrescoredAttention(Exact())
    attend(*qkv(n_query), AttentionContext(layer=0, mask=real, is_causal=is_causal))
    assert attend.last.reads.keys == pytest.approx(float(visible.sum(-1)[counted].double().mean()))


@pytest.mark.parametrize("name", ENGINES)
def test_keys_are_counted_on_demand_and_nothing_is_kept_for_it(name, monkeypatch):
    counted, run = [], prescore.attention.attend

    def spy(*inputs):
        result = run(*inputs)
        return replace(result, count_reads=lambda: counted.append(1) or result.count_reads())

    monkeypatch.setattr("prescore.integrations.masks.attend", spy)
    attend = PrescoredAttention(ENGINES[name])

    def call():
        query, key, value = qkv()
        output = attend(query, key, value, CAUSAL)
        return [weakref.ref(t) for t in (query, key, value, output)]

    kept = call()
    assert not counted
    assert attend.last.reads.keys == attend.last.reads.keys > 0
    assert counted == [1]
    monkeypatch.undo()
    for use in (call, lambda: attend.last.reads):  # the next call begins, or it is counted
        gc.collect()
        assert [ref() for ref in kept] == [None] * 4
        kept = call()
        use()
    gc.collect()
    assert [ref() for ref in kept] == [None] * 4


def test_several_queries_that_see_everything_are_no_step():
    """Without a causal mask they have no order that a step could follow."""
    inputs, attend = qkv(n_query=5), PrescoredAttention(COARSE)
    expected = prescore.prescored_attention(*inputs, COARSE, generator=layer_seed(0, 0))
    assert torch.equal(attend(*inputs, AttentionContext(layer=0)), expected)
    assert attend.last.path == "prescored"


@pytest.mark.parametrize("config", [COARSE, Exact()], ids=["selected", "exact"])
def test_a_mask_given_once_serves_the_whole_batch(config):
    padded = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    padded[..., :5] = False
    segments = torch.tensor([0] * 17 + [1] * 23)
    for mask in (padded, (segments[:, None] == segments).tril()[None, None]):
        once, each = (
            PrescoredAttention(config)(*qkv(), AttentionContext(layer=0, mask=own, is_causal=True))
            for own in (mask, mask.repeat(2, 1, 1, 1))
        )
        real = mask.any(-1)[0, 0]  # outputs of padding queries are not used
        assert torch.equal(once[:, :, real], each[:, :, real])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda attend: pickle.loads(pickle.dumps(attend))])
def test_a_copy_begins_without_state(copied):
    inputs, attend = qkv(n_query=1, n_keys=41), PrescoredAttention(COARSE)
    expected = attend(*inputs, CAUSAL)
    twin = copied(attend)
    assert attend._external.selection is not None
    assert twin._external.selection is None
    assert twin.last.reads == attend.last.reads
    assert torch.equal(twin(*inputs, CAUSAL), expected)
