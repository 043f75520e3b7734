"""Pre-scored attention as a function in the place of a layer's: paths, masks, refusals, seeds, memory."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch

import prescore
from prescore import Exact, Hyper, KMeans, Lsh, Routed, Selected
from prescore.errors import Unsupported
from prescore.integrations.attention import AttentionContext, PrescoredAttention, attend_exactly, layer_seed

COARSE = Selected(KMeans(n_clusters=3), top_k=8, min_seq_len=8, sinks=2)
ROUTED = Routed(min_weight=1 / 16, cluster_size=4, chunk_size=8, sinks=2, exact_until=8)
HYPER = Hyper(Lsh(8, 8), min_seq_len=8)
CAUSAL = AttentionContext(layer=3, is_causal=True)


def qkv(n_query=40, n_keys=40, batch=2):
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(batch, 4, n_keys, 8, generator=draw)[:, :, n_keys - n_query :]
    return query, *(torch.randn(batch, 2, n_keys, 8, generator=draw) for _ in range(2))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "config", [COARSE, ROUTED.replace(exact_until=0), HYPER], ids=["selected", "routed", "hyper"]
)
def test_a_prompt_is_prescored_attention_with_a_seed_of_the_layers_own(config, is_causal):
    inputs = qkv()
    attend = PrescoredAttention(config, seed=7)
    context = AttentionContext(layer=3, is_causal=is_causal, scale=0.3)
    expected, aux = prescore.prescored_attention(
        *inputs, config, is_causal=is_causal, scale=0.3, generator=layer_seed(7, 3), return_aux=True
    )
    assert torch.equal(attend(*inputs, context), expected)
    assert attend.last.path == "prescored"
    assert attend.last.reads.keys == pytest.approx(aux.stats["keys_per_query"])
    assert (attend.last.n_query, attend.last.n_keys) == (40, 40)
    assert attend.last.mask == ("causal" if is_causal else "full")


def test_layers_and_seeds_draw_apart():
    inputs = qkv()
    uniform = Selected("uniform", top_k=8, min_seq_len=8, remainder="none")
    results = [
        PrescoredAttention(uniform, seed=seed)(*inputs, AttentionContext(layer=layer, is_causal=True))
        for seed, layer in ((0, 0), (0, 0), (0, 1), (1, 0))
    ]
    assert torch.equal(results[0], results[1])
    assert not torch.allclose(results[0], results[2])
    assert not torch.allclose(results[0], results[3])


@pytest.mark.parametrize("config", [COARSE, ROUTED, HYPER, Exact(), Selected(top_k=1.0)], ids=str)
def test_a_step_of_everything_else_reads_all_keys(config):
    query, key, value = qkv(n_query=1)
    attend = PrescoredAttention(config)
    output = attend(query, key, value, CAUSAL)
    exact = attend_exactly(query, key, value, CAUSAL)
    if config is COARSE:
        assert attend.last.path == "step over the selection"
        assert not torch.allclose(output, exact, atol=1e-3)
    else:
        assert torch.equal(output, exact)
        assert attend.last.path == ("exact" if config == Exact() else "step over all keys")
        assert attend.last.reads.keys == 40


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("n_query", [40, 3, 1])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_counted(is_causal, n_query, side):
    """KVBuffer of exact attention are the real keys that real queries see, counted one by one."""
    query, key, value = qkv(n_query=n_query)
    real = torch.ones(2, 40, dtype=torch.bool)
    real[0, slice(9) if side == "left" else slice(-9, None)] = False
    seen = real[:, None, :].expand(2, n_query, 40)
    if is_causal:
        seen = seen & torch.ones(40, 40, dtype=torch.bool).tril()[-n_query:]
    counted = real if n_query == 40 else torch.ones(2, n_query, dtype=torch.bool)
    expected = seen.sum(-1)[counted].double().mean()
    attend = PrescoredAttention(Exact())
    attend(query, key, value, AttentionContext(layer=0, mask=real, is_causal=is_causal))
    assert attend.last.reads.keys == pytest.approx(float(expected))


@pytest.mark.parametrize("config", [COARSE, HYPER], ids=["selected", "hyper"])
def test_rows_are_counted_when_somebody_asks(config, monkeypatch):
    counted = []
    real = prescore.attention.attend

    def spy(*inputs):
        attended = real(*inputs)
        return attended._replace(count_keys=lambda: counted.append(1) or attended.result.count_reads())

    monkeypatch.setattr("prescore.integrations.masks.attend", spy)
    attend = PrescoredAttention(config)
    attend(*qkv(), CAUSAL)
    assert not counted
    rows = attend.last.reads.keys
    assert rows == attend.last.reads.keys == attend.last.counted().rows > 0
    assert counted == [1]


@pytest.mark.parametrize(
    "config", [COARSE, HYPER, ROUTED.replace(exact_until=0)], ids=["selected", "hyper", "routed"]
)
def test_counting_keeps_nothing_once_it_is_done_or_the_next_call_begins(config):
    attend = PrescoredAttention(config)

    def call():
        query, key, value = qkv()
        output = attend(query, key, value, CAUSAL)
        return [weakref.ref(t) for t in (query, key, value, output)]

    kept = call()
    assert attend.last.reads.keys > 0
    gc.collect()
    assert [ref() for ref in kept] == [None] * 4
    kept = call()
    call()
    gc.collect()
    assert [ref() for ref in kept] == [None] * 4
    if isinstance(config, Routed):
        kept = call()
        gc.collect()
        assert [ref() for ref in kept] == [None] * 4


def test_several_queries_that_see_everything_are_no_step():
    """Without a causal mask there is no order among them that a step could follow."""
    query, key, value = qkv(n_query=5)
    attend = PrescoredAttention(COARSE)
    got = attend(query, key, value, AttentionContext(layer=0))
    assert attend.last.path == "prescored"
    expected = prescore.prescored_attention(query, key, value, COARSE, generator=layer_seed(0, 0))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("config", [COARSE, Exact()], ids=["selected", "exact"])
def test_a_mask_given_once_serves_the_whole_batch(config):
    inputs = qkv()
    real = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    real[..., :5] = False
    segments = torch.tensor([0] * 17 + [1] * 23)
    packed = (segments[:, None] == segments).tril()[None, None]
    for mask in (real, packed):
        once = PrescoredAttention(config)(*inputs, AttentionContext(layer=0, mask=mask, is_causal=True))
        each = AttentionContext(layer=0, mask=mask.repeat(2, 1, 1, 1), is_causal=True)
        seen = mask.any(-1)[0, 0]  # what padded queries get is nobody's business
        assert torch.equal(once[:, :, seen], PrescoredAttention(config)(*inputs, each)[:, :, seen])


def test_obstacles_are_refused_or_run_by_the_model_itself():
    inputs = qkv()
    asked = []

    def own(query, key, value):
        asked.append(query.shape)
        return query

    context = AttentionContext(
        layer=3, is_causal=True, owner="GemmaAttention", obstacles=("its logits are soft-capped",), own=own
    )
    with pytest.raises(Unsupported) as refused:
        PrescoredAttention(COARSE)(*inputs, context)
    assert str(refused.value) == (
        "pre-scored attention in layer 3 (GemmaAttention) cannot run: its logits are soft-capped; "
        'on_unsupported="exact" would run such layers exactly'
    )
    assert not asked
    attend = PrescoredAttention(COARSE, "exact")
    with pytest.warns(UserWarning, match="GemmaAttention runs exactly: its logits are soft-capped"):
        assert attend(*inputs, context) is inputs[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(*inputs, context)
    assert attend.last.path == "exact: unsupported because its logits are soft-capped"
    assert PrescoredAttention(Exact())(*inputs, context) is inputs[0]  # exact attention needs no leave
    assert len(asked) == 3


def test_local_layers_stay_exact():
    inputs = qkv()
    attend = PrescoredAttention(COARSE)
    context = AttentionContext(layer=0, is_causal=True, is_local=True)
    assert torch.equal(attend(*inputs, context), attend_exactly(*inputs, context))
    assert attend.last.path == "exact: a sliding window is local already"


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (("routed",), TypeError, "config must be a prescore.Routed"),
        ((None, "ignore"), ValueError, "on_unsupported must be one of 'raise', 'exact', got 'ignore'"),
    ],
    ids=["config", "on_unsupported"],
)
def test_wrong_arguments_are_named(arguments, error, said):
    with pytest.raises(error, match=said):
        PrescoredAttention(*arguments)


def test_the_default_is_the_default():
    assert PrescoredAttention().config == Routed()
    assert repr(PrescoredAttention(Exact(), "exact")) == "PrescoredAttention(Exact(), 'exact')"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda attend: pickle.loads(pickle.dumps(attend))])
def test_a_copy_begins_without_memories(copied):
    query, key, value = qkv(n_query=1, n_keys=41)
    attend = PrescoredAttention(COARSE)
    expected = attend(query, key, value, CAUSAL)
    twin = copied(attend)
    assert attend._external.cache.selection is not None
    assert twin._external.cache.selection is None
    assert twin.last.reads.keys == attend.last.reads.keys
    assert torch.equal(twin(query, key, value, CAUSAL), expected)
