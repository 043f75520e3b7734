"""How each call of a layer is answered, and what is kept for the next; also for caches that are not ours."""

import pytest
import torch

from prescore import Exact, Hyper, KMeans, Lsh, Routed, Selected, exact_attention, prescored_attention
from prescore.attention import Options, attend
from prescore.errors import Unsupported
from prescore.integrations.decode import (
    OVER_ALL,
    OVER_CLUSTERS,
    OVER_SELECTION,
    PROMPT,
    STEP_AT_MOST,
    CachedKeys,
    ExternalCache,
    LayerCache,
    Request,
    SelectionState,
    keeps_selection,
)

SELECTED = Selected(KMeans(n_clusters=4), top_k=12)
ROUTED = Routed(min_weight=1 / 16, cluster_size=4, chunk_size=8, sinks=2, exact_until=8)
FLOAT32 = {"atol": 1e-6, "rtol": 1e-5}  # another order of summing


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 60, 8, generator=generator)
    key, value = (torch.randn(2, 2, 60, 8, generator=generator) for _ in range(2))
    return query, key, value


def step(cache, qkv, n_keys, n_query=1, config=SELECTED, valid=None, **request):
    query, key, value = (t[:, :, :n_keys] for t in qkv)
    keys = CachedKeys(key, value, valid, n_keys)
    return cache.step(query[:, :, n_keys - n_query :], keys, Request(config, **request))


def output(cache, *args, **options):
    return step(cache, *args, **options).result.output


def made_from(cache):
    return cache.selection.n_selected_from, cache.selection.n_since


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (SELECTED, OVER_SELECTION),
        (Selected(top_k=0.5), OVER_SELECTION),
        (Selected(top_k=1), OVER_SELECTION),
        (Selected("key-norm", min_score=2.0), OVER_SELECTION),
        (Selected.paper(), OVER_SELECTION),
        (Selected.early(top_k=12), OVER_SELECTION),
        (Selected(top_k=1.0), OVER_ALL),
        (Hyper(lsh=Lsh(8, 8)), OVER_ALL),
        (Exact(), OVER_ALL),
        (ROUTED, OVER_CLUSTERS),
        (ROUTED.replace(tolerance=0.1), OVER_CLUSTERS),
    ],
    ids=str,
)
def test_the_configuration_decides_how_a_step_is_answered(qkv, config, path):
    cache = LayerCache()
    assert step(cache, qkv, 50, 50, config).path == PROMPT
    answer = step(cache, qkv, 51, 1, config)
    assert answer.path == path
    assert (answer.result is None) == (path == OVER_ALL)
    assert keeps_selection(config) == (path == OVER_SELECTION) == (cache.selection is not None)


def test_clusters_are_used_only_where_they_save_keys_and_are_valid(qkv):
    def path(inputs=qkv, n_query=1, config=ROUTED, valid=None, cache=None, **request):
        return step(cache or LayerCache(), inputs, 51, n_query, config, valid, **request).path

    left, gap = torch.ones(2, 51, dtype=torch.bool), torch.ones(2, 51, dtype=torch.bool)
    left[0, :9], gap[0, 20:23] = False, False
    assert path(config=ROUTED.replace(exact_until=50)) == path(n_query=2) == path(valid=left) == OVER_CLUSTERS
    assert path(config=ROUTED.replace(exact_until=51)) == path(config=ROUTED.replace(chunk_size=32)) == OVER_ALL
    assert path(dropout=0.1) == path(valid=gap) == path(cache=LayerCache(owned=False)) == OVER_ALL
    assert path((qkv[0].clone().requires_grad_(), *qkv[1:])) == OVER_ALL


def test_chunks_of_a_prompt(qkv):
    cache = LayerCache()
    assert step(cache, qkv, 50, 50).path == PROMPT
    assert step(cache, qkv, 51).path == step(cache, qkv, 55, 4).path == OVER_SELECTION
    assert made_from(cache) == (51, 4)
    assert step(cache, qkv, 55, STEP_AT_MOST + 1).path == PROMPT
    assert cache.selection is None  # the next step selects among the new keys too
    query, key, value = (t[:, :, :56] for t in qkv)
    unordered = CachedKeys(key, value, None, 56, in_order=False)
    assert cache.step(query[:, :, -2:], unordered, Request(SELECTED)).path == PROMPT


def test_when_a_selection_is_made(qkv, monkeypatch):
    made, select = [], SelectionState.select
    monkeypatch.setattr(SelectionState, "select", lambda *args: made.append(args[0].shape[2]) or select(*args))
    cache = LayerCache(refresh_every=3)
    for n_keys in range(51, 58):
        step(cache, qkv, n_keys)
    assert made == [51, 54, 57]
    step(cache, qkv, 58, config=SELECTED.replace(top_k=5))  # another configuration selects again
    assert (cache.selection.config.top_k, *made_from(cache)) == (5, 58, 0)
    made.clear()
    several = LayerCache(refresh_every=3)
    step(several, qkv, 54, 4)  # several queries must not choose among one another's future
    assert made_from(several) == (50, 4)
    step(several, qkv, 55)
    assert made_from(several) == (55, 0)
    assert made == [50, 55]  # nothing is selected twice


@pytest.mark.parametrize("refresh_every", [None, 1])
@pytest.mark.parametrize("changes", [{}, {"remainder": "none"}, {"top_k": 0.2, "recent": 3}], ids=str)
def test_a_first_step_is_prescored_attention_over_all_keys(qkv, changes, refresh_every):
    """Identity 10: the new token is among the keys it chooses from."""
    query, key, value = (t[:, :, :51] for t in qkv)
    config = SELECTED.replace(**changes)
    expected = prescored_attention(query[:, :, -1:], key, value, config, generator=3)
    got = output(LayerCache(refresh_every=refresh_every), qkv, 51, 1, config, seed=3)
    torch.testing.assert_close(got, expected, **FLOAT32)


def test_several_first_tokens_choose_among_the_keys_before_them(qkv):
    """What a query reads does not depend on later tokens of the same call."""
    changed = tuple(t.clone() for t in qkv)
    for t in changed:
        t[:, :, 52:] += 3
    got, other = (output(LayerCache(), inputs, 54, 4) for inputs in (qkv, changed))
    assert torch.equal(got[:, :, :2], other[:, :, :2])
    assert not torch.allclose(got[:, :, 2:], other[:, :, 2:])
    # a selection that keeps every key is exact attention
    got = output(LayerCache(), qkv, 55, 3, Selected(top_k=1000, remainder="none"))
    query, key, value = (t[:, :, :55] for t in qkv)
    expected = exact_attention(query[:, :, -3:], key, value, is_causal=True).output
    torch.testing.assert_close(got, expected, **FLOAT32)


@pytest.mark.parametrize("config", [SELECTED, SELECTED.replace(remainder="none"), Selected(top_k=48)], ids=str)
def test_a_step_reads_what_the_call_reads(qkv, config):
    """Padding, and clusters without unselected keys, do not count."""
    query, key, value = (t[:, :, :51] for t in qkv)
    valid = torch.ones(2, 51, dtype=torch.bool)
    valid[0, :44] = False
    reads = step(LayerCache(), qkv, 51, 1, config, valid).result.count_reads()
    whole = attend(query[:, :, -1:], key, value, config, Options(key_padding_mask=valid)).count_reads()
    assert sum(reads) == pytest.approx(sum(whole))
    assert reads.keys < 48
    reads = step(LayerCache(), qkv, 55, 4, SELECTED).result.count_reads()
    assert reads == (12 + (1 + 2 + 3 + 4) / 4, 4)


@pytest.mark.parametrize("start", [0, 9])
def test_a_routed_step_reads_what_the_call_reads(start):
    query, key, value = (torch.randn(1, 2, 400, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    valid = torch.ones(1, 400, dtype=torch.bool)
    valid[:, :start] = False
    answer = LayerCache().step(query[:, :, -1:], CachedKeys(key, value, valid, 400), Request(ROUTED))
    alone = (query[:, :, -1:], key[:, :, start:], value[:, :, start:])
    whole = attend(*alone, ROUTED, Options(is_causal=True))
    torch.testing.assert_close(answer.result.output, whole.output)
    assert sum(answer.result.count_reads()) == sum(whole.count_reads())


def test_eviction_is_final(qkv):
    query, key, value = qkv
    cache, other = LayerCache(evict=True), LayerCache()
    for each in (cache, other):
        each.append(key[:, :, :51], value[:, :, :51])
        step(each, qkv, 51)
    assert (cache.evicted, cache.buffer, other.evicted) == (True, None, False)
    newest = CachedKeys(key[:, :, 51:52], value[:, :, 51:52], None, 52)  # all that is left beside the selection
    got = cache.step(query[:, :, 51:52], newest, Request(SELECTED)).result.output
    assert torch.equal(got, output(other, qkv, 52))
    for reason, use in {
        "evicted the unselected": lambda: step(cache, qkv, 53, config=Exact()),
        "configuration changed": lambda: step(cache, qkv, 53, config=SELECTED.replace(top_k=5)),
        "further chunk of the prompt": lambda: step(cache, qkv, 60, 60),
        "a crop to 40 tokens removes keys that were selected from": lambda: cache.crop(40),
        "the cache has evicted the unselected ones": cache.require_all_keys,
    }.items():
        with pytest.raises(Unsupported, match=reason):
            use()
    cache.clear()
    assert (cache.selection, cache.evicted) == (None, False)


def test_selecting_before_the_first_step(qkv):
    _, key, value = (t[:, :, :50] for t in qkv)
    early, at_once, nothing = LayerCache(), LayerCache(), LayerCache()
    early.select(CachedKeys(key, value, None, 50), Request(SELECTED))
    one_by_one = torch.cat([output(early, qkv, n_keys) for n_keys in (51, 52)], dim=2)
    assert made_from(early) == (50, 2)
    torch.testing.assert_close(output(at_once, qkv, 52, 2), one_by_one, **FLOAT32)
    nothing.select(CachedKeys(key, value, None, 50), Request(ROUTED))
    assert nothing.selection is None


def test_seeds_reach_the_selection(qkv):
    config = Selected("uniform", top_k=12, remainder="none")
    first, again, other = (output(LayerCache(), qkv, 51, config=config, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


@pytest.mark.parametrize("sequences", [[1, 0], [1, 1], [0, 0, 1, 1]], ids=str)
def test_a_routed_step_follows_reordered_and_repeated_sequences(qkv, sequences):
    _, key, value = qkv
    cache = LayerCache()
    cache.append(key[:, :, :56], value[:, :, :56])
    step(cache, qkv, 56, config=ROUTED)
    cache.take(torch.tensor(sequences))
    changed = tuple(t[sequences] for t in qkv)
    expected = output(LayerCache(), changed, 57, config=ROUTED)
    torch.testing.assert_close(output(cache, changed, 57, config=ROUTED), expected)


# Caches that are not ours: keys are compared with those of the step before.


def shown(cache, qkv, n_keys, n_query=1, key=None):
    """A step in which the model shows these keys."""
    return step(cache, (qkv[0], qkv[1] if key is None else key, qkv[2]), n_keys, n_query)


def changed_at(qkv, position):
    key = qkv[1].clone()
    key[:, :, position] += 1
    return key


def test_other_keys_are_noticed(qkv):
    cache = ExternalCache()
    shown(cache, qkv, 51)
    first = cache.selection
    again = shown(cache, qkv, 51)  # the same step keeps its selection
    assert torch.equal(again.result.output, shown(ExternalCache(), qkv, 51).result.output)
    shown(cache, qkv, 52)
    assert cache.selection is first
    assert made_from(cache) == (51, 1)
    other = changed_at(qkv, 49)
    shown(cache, qkv, 53, key=other)
    fresh = cache.selection
    assert fresh is not first
    assert fresh.n_selected_from == 53
    shown(cache, qkv, 54, key=other)
    recent = other.clone()
    recent[:, :, 53] += 1
    shown(cache, qkv, 55, key=recent)
    assert cache.selection is fresh
    assert torch.equal(fresh.buffer.key[:, :, -2:], recent[:, :, 53:55])
    assert shown(cache, qkv, 54, 54, key=recent).path == PROMPT
    assert cache.selection is None
    shown(cache, qkv, 54, key=recent)
    assert cache.selection is not fresh


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("changed", [50, 51, 52, 53])
def test_other_tokens_behind_the_same_prompt_are_all_noticed(qkv, changed, prompted):
    """Reordered beams go on as if each had been fed alone, whether the selection saw the change or not."""
    other, cache, alone = changed_at(qkv, changed), ExternalCache(), ExternalCache()
    for n_keys, n_query in (((50, 50),) if prompted else ()) + ((51, 1), (52, 1), (53, 1), (54, 1)):
        shown(cache, qkv, n_keys, n_query)
        shown(alone, qkv, n_keys, n_query, qkv[1] if n_query == 50 else other)
    got, expected = (shown(each, qkv, 55, key=other).result.output for each in (cache, alone))
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


def test_another_batch_is_another_text(qkv):
    cache = ExternalCache()
    shown(cache, qkv, 51)
    got, expected = (step(each, tuple(t[:1] for t in qkv), 52) for each in (cache, ExternalCache()))
    assert torch.equal(got.result.output, expected.result.output)


def test_unused_room_behind_the_keys_is_not_read(qkv):
    query, key, value = qkv
    valid = torch.zeros(2, 60, dtype=torch.bool)
    valid[:, :51] = True
    cache = ExternalCache()
    got = cache.step(query[:, :, 50:51], CachedKeys(key, value, valid, 60), Request(SELECTED))
    assert cache.selection.n_selected_from == 51
    assert torch.equal(got.result.output, output(ExternalCache(), qkv, 51))


def test_without_a_selection_every_key_is_read(qkv):
    cache = ExternalCache()
    assert step(cache, qkv, 51, config=Selected(top_k=1.0)) == (OVER_ALL, None)
    assert step(cache, qkv, 52).path == OVER_SELECTION
