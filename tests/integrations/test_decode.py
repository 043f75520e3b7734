"""How each call of a layer is answered, and what is kept for the next; also for caches that are not ours."""

import pytest
import torch
from routed_checks import needs_native
from tiny_models import ROUTED

from prescore import Coupling, Exact, Hyper, KMeans, Lsh, Routed, Selected, prescored_attention
from prescore.attention import Options, attend
from prescore.integrations import decode
from prescore.integrations.attention import AttentionContext, PrescoredAttention
from prescore.integrations.decode import CachedKeys, ExternalCache, LayerCache
from prescore.rng import Streams
from prescore.routed import native

SELECTED = Selected(KMeans(n_clusters=4), top_k=12)
ARTEFACTS = Coupling(mask="zero", residual_weight="all", overlap="count")
FLOAT32 = {"atol": 1e-6, "rtol": 1e-5}  # one softmax over the same keys, in another order of summing


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 60, 8, generator=generator)
    key, value = (torch.randn(2, 2, 60, 8, generator=generator) for _ in range(2))
    return query, key, value


def step(cache, qkv, n_keys, n_query=1, config=SELECTED, valid=None, **options):
    query, key, value = (t[:, :, :n_keys] for t in qkv)
    keys = CachedKeys(key, value, valid, n_keys)
    return cache.step(query[:, :, n_keys - n_query :], keys, config, Options(**options))


def output(cache, *args, **options):
    result = step(cache, *args, **options).result
    return None if result is None else result.output


def made_from(cache):
    return cache.selection.n_selected_from, cache.selection.n_since


def test_the_configuration_decides_how_a_step_is_answered(qkv):
    by_score = Selected("key-norm", min_score=2.0)
    for path, configs in {
        decode.OVER_SELECTION: (SELECTED, Selected(top_k=1), by_score, Selected.paper(), Selected.early(top_k=12)),
        decode.OVER_ALL: (Selected(top_k=1.0), Hyper(lsh=Lsh(8, 8)), Exact()),
        decode.OVER_CLUSTERS: (ROUTED,),
    }.items():
        for config in configs:
            cache = LayerCache()
            assert step(cache, qkv, 50, 50, config).path == decode.PROMPT
            answer = step(cache, qkv, 51, 1, config)
            assert answer.path == path, config
            assert (answer.result is None) == (path == decode.OVER_ALL)
            is_selection = path == decode.OVER_SELECTION
            assert decode.keeps_selection(config) == is_selection == (cache.selection is not None)


def test_clusters_are_used_only_where_they_save_keys_and_are_valid(qkv):
    def path(inputs=qkv, n_query=1, config=ROUTED, valid=None, no_index="", **options):
        return step(LayerCache(no_index=no_index), inputs, 51, n_query, config, valid, **options).path

    left, gap = torch.ones(2, 2, 51, dtype=torch.bool)
    left[0, :9], gap[0, 20:23] = False, False
    short, large = (ROUTED.replace(**change) for change in ({"exact_until": 50}, {"chunk_size": 32}))
    for options in ({"config": short}, {"n_query": 2}, {"valid": left}):
        assert path(**options) == decode.OVER_CLUSTERS
    for options in ({"config": large}, {"dropout_p": 0.1}, {"valid": gap}, {"no_index": "it keeps none"}):
        assert path(**options) == decode.OVER_ALL
    assert path(config=ROUTED.replace(exact_until=51)) == decode.OVER_ALL
    assert path((qkv[0].clone().requires_grad_(), *qkv[1:])) == decode.OVER_ALL


@pytest.mark.parametrize(
    "changes",
    [
        {"recent": 3, "top_k": 0.3},
        {"scorer": "key-norm", "min_score": 2.5, "top_k": None},
        {"inner": Lsh(), "remainder": "none", "leaf_inclusive": True, "coupling": ARTEFACTS},
        {"min_fraction": 0.9, "inner": Lsh()},
    ],
    ids=str,
)
def test_a_first_step_is_prescored_attention_over_all_keys(qkv, changes):
    """Identity 10, where the step may ignore settings: the new token is among the keys it chooses from."""
    query, key, value = (t[:, :, :51] for t in qkv)
    mask = torch.ones(2, 51, dtype=torch.bool)
    mask[0, :7] = False
    config = SELECTED.replace(**changes)
    got = output(LayerCache(refresh_every=1), qkv, 51, 1, config, mask, scale=0.4, generator=5)
    options = {"key_padding_mask": mask, "scale": 0.4, "generator": 5}
    expected = prescored_attention(query[:, :, -1:], key, value, config, **options)
    torch.testing.assert_close(got, expected, **FLOAT32)


def test_several_first_tokens_choose_among_the_keys_before_them(qkv):
    """What a query reads does not depend on later tokens of the same call."""
    changed = tuple(torch.cat((t[:, :, :52], t[:, :, 52:] + 3), dim=2) for t in qkv)
    got, other = (output(LayerCache(), inputs, 54, 4) for inputs in (qkv, changed))
    assert torch.equal(got[:, :, :2], other[:, :, :2])
    assert not torch.allclose(got[:, :, 2:], other[:, :, 2:])


@pytest.mark.parametrize("config", [SELECTED, SELECTED.replace(remainder="none"), Selected(top_k=48)], ids=str)
def test_a_step_reads_what_the_call_reads(qkv, config):
    """Padding, and clusters without unselected keys, do not count."""
    query, key, value = (t[:, :, :51] for t in qkv)
    valid = torch.ones(2, 51, dtype=torch.bool)
    valid[0, :44] = False
    reads = step(LayerCache(), qkv, 51, 1, config, valid).result.count_reads()
    expected = attend(query[:, :, -1:], key, value, config, Options(key_padding_mask=valid)).count_reads()
    assert sum(reads) == pytest.approx(sum(expected))
    assert reads.keys < 48
    reads = step(LayerCache(), qkv, 55, 4, SELECTED).result.count_reads()
    assert reads == (12 + (1 + 2 + 3 + 4) / 4, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_in_half_precision_is_as_good_as_the_call(dtype):
    """Centroids weigh as many keys as they represent: log(1001) is 6.9087, and 6.9062 in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, n, 16, generator=generator).to(dtype) for n in (1, 4000, 4000)]
    config = Selected(KMeans(n_clusters=4), top_k=4)
    exact = prescored_attention(*(t.double() for t in inputs), config, generator=0)
    called = prescored_attention(*inputs, config, generator=0)
    stepped = LayerCache().step(inputs[0], CachedKeys(*inputs[1:], None, 4000), config, Options()).result.output
    errors = [float((got.double() - exact).abs().max()) for got in (stepped, called)]
    assert errors[0] <= 1.5 * errors[1]


def test_padding_among_new_tokens_is_hidden(qkv):
    poisoned, kept = qkv[1].clone(), [*range(51), 52]
    poisoned[:, :, 51] = torch.nan
    valid = torch.ones(2, 53, dtype=torch.bool)
    valid[:, 51] = False
    padded, clean = LayerCache(), LayerCache()
    for cache in (padded, clean):
        cache.chosen_by = SELECTED, Streams(0)
        cache.select(CachedKeys(*(t[:, :, :50] for t in qkv[1:]), None, 50))
    got = output(padded, (qkv[0], poisoned, qkv[2]), 53, valid=valid)
    torch.testing.assert_close(got, output(clean, [t[:, :, kept] for t in qkv], 52), **FLOAT32)
    assert made_from(padded) == (50, 3)


def shown(cache, qkv, n_keys, n_query=1, key=None):
    """A step in which the model shows these keys."""
    return output(cache, (qkv[0], qkv[1] if key is None else key, qkv[2]), n_keys, n_query)


def changed_at(qkv, position):
    key = qkv[1].clone()
    key[:, :, position] += 1
    return key


def test_other_keys_are_noticed(qkv):
    cache = ExternalCache()
    assert step(cache, qkv, 51, config=Selected(top_k=1.0)) == (decode.OVER_ALL, None, "top_k keeps every key")
    shown(cache, qkv, 51)
    first = cache.selection
    again = shown(cache, qkv, 51)  # the same step keeps its selection
    assert torch.equal(again, shown(ExternalCache(), qkv, 51))
    shown(cache, qkv, 52)
    assert cache.selection is first
    assert made_from(cache) == (51, 1)
    other = changed_at(qkv, 49)
    shown(cache, qkv, 53, key=other)
    fresh = cache.selection
    assert made_from(cache) == (53, 0)
    shown(cache, qkv, 54, key=other)
    recent = other.clone()
    recent[:, :, 53] += 1
    shown(cache, qkv, 55, key=recent)
    assert cache.selection is fresh
    assert torch.equal(fresh.buffer.key[:, :, -2:], recent[:, :, 53:55])
    assert shown(cache, qkv, 54, 54, key=recent) is cache.selection is None  # a prompt
    shown(cache, qkv, 54, key=recent)
    got, expected = (output(each, tuple(t[:1] for t in qkv), 55) for each in (cache, ExternalCache()))
    assert torch.equal(got, expected)  # another batch is another text


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("changed", [50, 51, 52, 53])
def test_other_tokens_behind_the_same_prompt_are_all_noticed(qkv, changed, prompted):
    """Reordered beams go on as if each had been fed alone, whether the selection saw the change or not."""
    other, cache, alone = changed_at(qkv, changed), ExternalCache(), ExternalCache()
    for n_keys, n_query in (((50, 50),) if prompted else ()) + ((51, 1), (52, 1), (53, 1), (54, 1)):
        shown(cache, qkv, n_keys, n_query)
        shown(alone, qkv, n_keys, n_query, qkv[1] if n_query == 50 else other)
    got, expected = (shown(each, qkv, 55, key=other) for each in (cache, alone))
    torch.testing.assert_close(got, expected, **FLOAT32)
    assert cache.selection.n_selected_from == 51


def test_a_change_between_the_probes_of_a_late_selection_is_noticed(qkv):
    """Of what came behind a prompt every key is compared, however many of them a selection was made from."""
    cache = ExternalCache()
    shown(cache, qkv, 10, 10)
    for changed in range(10, 58):
        shown(cache, qkv, 58)
        shown(cache, qkv, 59)
        before = cache.selection
        shown(cache, qkv, 59)
        assert cache.selection is before
        shown(cache, qkv, 59, key=changed_at(qkv, changed))
        assert cache.selection is not before


def test_a_step_back_behind_the_selection_selects_again(qkv):
    """Queries must not read a selection among keys that come after them."""
    cache = ExternalCache()
    shown(cache, qkv, 51)
    for n_keys, n_query in ((52, 5), (49, 1)):
        shown(cache, qkv, n_keys, n_query)
        assert cache.selection.n_selected_from == 47


@needs_native
@torch.no_grad()
def test_chunks_of_a_prompt_build_each_key_index_once_and_the_first_step_takes_it_over(monkeypatch):
    """Against calls without a cache: same outputs, and no chunk is built twice."""
    config, built = Routed(chunk_size=64, cluster_size=16, exact_until=0), []
    build = native.build_index

    def counted(key, value, layout, begin, n_chunks):
        built.append((begin, n_chunks))
        return build(key, value, layout, begin, n_chunks)

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 700, 32, generator=generator) for heads in (4, 2, 2))
    attention, cache = PrescoredAttention(config), LayerCache()

    def read(start, stop):
        cache.append(key[:, :, start:stop], value[:, :, start:stop])
        context = AttentionContext(0, cache=cache, is_causal=True)
        new = query[:, :, start:stop]
        return attention(new, cache.buffer.key, cache.buffer.value, context)

    wanted = prescored_attention(query, key, value, config, is_causal=True)
    monkeypatch.setattr(native, "build_index", counted)
    outputs = [read(start, stop) for start, stop in ((0, 200), (200, 210), (210, 450), (450, 699), (699, 700))]
    assert torch.allclose(torch.cat(outputs, dim=2), wanted, atol=1e-5)
    # whatever comes next extends the index: chunks, then steps, then another chunk
    assert built == [(16, 1), (80, 1), (144, 3), (336, 4)]
    cache.crop(500)
    assert torch.allclose(read(500, 600), wanted[:, :, 500:600], atol=1e-5)
