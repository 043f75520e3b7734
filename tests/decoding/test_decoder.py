"""Which way each call of a layer goes, and what is kept for the next."""

import pytest
import torch

from prescore import Coupling, Exact, Hyper, KMeans, Lsh, Routed, Selected, exact_attention, prescored_attention
from prescore.attention import Options, attend_counting
from prescore.errors import Unsupported
from prescore.integrations.decode import (
    OVER_ALL,
    OVER_CLUSTERS,
    OVER_SELECTION,
    PROMPT,
    STEP_AT_MOST,
    CachedKeys,
    Decoder,
    Request,
    remembers,
)
from prescore.integrations.state import SelectionState

SELECTED = Selected(KMeans(n_clusters=4), top_k=12)
ROUTED = Routed(min_weight=1 / 16, cluster_size=4, chunk_size=8, sinks=2, exact_until=8)
N = 60


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, N, 8, generator=generator)
    key, value = (torch.randn(2, 2, N, 8, generator=generator) for _ in range(2))
    return query, key, value


def step(decoder, qkv, n_keys, n_query=1, config=SELECTED, valid=None, **asked):
    query, key, value = (t[:, :, :n_keys] for t in qkv)
    past = CachedKeys(key, value, valid, n_keys)
    return decoder.step(query[:, :, n_keys - n_query :], past, Request(config, **asked))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SELECTED, True),
        (Selected(top_k=0.5), True),
        (Selected(top_k=1.0), False),
        (Selected(top_k=1), True),
        (Selected.paper(), True),
        (Routed(), False),
        (Hyper(), False),
        (Exact(), False),
    ],
    ids=str,
)
def test_what_keeps_a_selection(config, expected):
    assert remembers(config) is expected


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (SELECTED, OVER_SELECTION),
        (Selected.early(top_k=12), OVER_SELECTION),
        (Selected(top_k=1.0), OVER_ALL),
        (Hyper(lsh=Lsh(8, 8)), OVER_ALL),
        (Exact(), OVER_ALL),
        (ROUTED, OVER_CLUSTERS),
        (ROUTED.replace(tolerance=0.1), OVER_CLUSTERS),
    ],
    ids=str,
)
def test_steps_go_the_way_of_their_configuration(qkv, config, path):
    decoder = Decoder()
    assert step(decoder, qkv, 50, 50, config).path == PROMPT
    taken = step(decoder, qkv, 51, 1, config)
    assert taken.path == path
    assert (taken.output is None) == (path == OVER_ALL)
    if path == OVER_SELECTION:
        assert taken.count_keys() <= decoder.state.rows.length


def test_clusters_are_chosen_only_where_they_pay_and_can_be_trusted(qkv):
    assert step(Decoder(), qkv, 51, 1, ROUTED.replace(exact_until=51)).path == OVER_ALL  # few keys
    assert step(Decoder(), qkv, 51, 1, ROUTED.replace(exact_until=50)).path == OVER_CLUSTERS
    assert step(Decoder(), qkv, 51, 2, ROUTED).path == OVER_CLUSTERS
    assert step(Decoder(), qkv, 51, 1, ROUTED, dropout=0.1).path == OVER_ALL
    assert step(Decoder(owned=False), qkv, 51, 1, ROUTED).path == OVER_ALL
    learned = (qkv[0].clone().requires_grad_(), *qkv[1:])
    assert step(Decoder(), learned, 51, 1, ROUTED).path == OVER_ALL
    left, gap = torch.ones(2, 51, dtype=torch.bool), torch.ones(2, 51, dtype=torch.bool)
    left[0, :9], gap[0, 20:23] = False, False
    assert step(Decoder(), qkv, 51, 1, ROUTED, left).path == OVER_CLUSTERS
    assert step(Decoder(), qkv, 51, 1, ROUTED, gap).path == OVER_ALL


def test_pieces_of_a_prompt(qkv):
    decoder = Decoder()
    assert step(decoder, qkv, 50, 50).path == PROMPT
    assert step(decoder, qkv, 51).path == OVER_SELECTION
    assert step(decoder, qkv, 55, 4).path == OVER_SELECTION
    assert decoder.state.n_selected_from == 51
    assert step(decoder, qkv, 55 + 0, STEP_AT_MOST + 1).path == PROMPT
    assert decoder.state is None  # the next step selects among the new keys too
    query, key, value = (t[:, :, :56] for t in qkv)
    shuffled = CachedKeys(key, value, None, 56, in_order=False)
    assert decoder.step(query[:, :, -2:], shuffled, Request(SELECTED)).path == PROMPT


def test_refreshing(qkv):
    decoder = Decoder(refresh_every=3)
    made = []
    for n_keys in range(51, 58):
        step(decoder, qkv, n_keys)
        made.append(decoder.state.n_selected_from)
    assert made == [51, 51, 51, 54, 54, 54, 57]
    several = Decoder(refresh_every=3)
    step(several, qkv, 54, 4)  # several queries must not choose among one another's future
    assert (several.state.n_selected_from, several.state.n_since) == (50, 4)
    step(several, qkv, 55)
    assert (several.state.n_selected_from, several.state.n_since) == (55, 0)


@pytest.mark.parametrize("refresh_every", [None, 1])
@pytest.mark.parametrize("changes", [{}, {"remainder": "none"}, {"top_k": 0.2, "recent": 3}], ids=str)
def test_a_first_step_is_prescored_attention_over_all_keys(qkv, changes, refresh_every):
    """Identity 10: the new token is among the keys it chooses from, whoever asks for refreshing."""
    query, key, value = (t[:, :, :51] for t in qkv)
    config = SELECTED.replace(**changes)
    expected = prescored_attention(query[:, :, -1:], key, value, config, generator=3)
    got = step(Decoder(refresh_every=refresh_every), qkv, 51, 1, config, seed=3).output
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)  # float32, another order of summing


def test_several_first_tokens_choose_among_the_keys_before_them(qkv):
    """What a query reads does not depend on the tokens that come with it, behind it."""
    query, key, value = qkv
    changed = tuple(t.clone() for t in (query, key, value))
    for t in changed:
        t[:, :, 52:] += 3
    got, other = (step(Decoder(), inputs, 54, 4).output for inputs in (qkv, changed))
    assert torch.equal(got[:, :, :2], other[:, :, :2])
    assert not torch.allclose(got[:, :, 2:], other[:, :, 2:])


def test_nothing_is_selected_twice(qkv, monkeypatch):
    made = []
    select = SelectionState.select
    monkeypatch.setattr(SelectionState, "select", lambda *args: made.append(args[0].shape[2]) or select(*args))
    for refresh_every, n_query, sizes in ((1, 1, [51]), (1, 3, [48]), (None, 1, [51]), (2, 1, [51])):
        made.clear()
        step(Decoder(refresh_every=refresh_every), qkv, 51, n_query)
        assert made == sizes


def test_rows_of_a_step_are_those_of_the_call(qkv):
    """Padding, and clusters without unselected keys, are no rows."""
    query, key, value = (t[:, :, :51] for t in qkv)
    valid = torch.ones(2, 51, dtype=torch.bool)
    valid[0, :44] = False
    for config in (SELECTED, SELECTED.replace(remainder="none"), Selected(top_k=48)):
        taken = step(Decoder(), qkv, 51, 1, config, valid)
        whole = attend_counting(query[:, :, -1:], key, value, config, Options(key_padding_mask=valid))
        assert taken.count_keys() == pytest.approx(whole.count_keys())
        assert taken.count_keys() < 48
    several = step(Decoder(), qkv, 55, 4, SELECTED.replace(remainder="none"))
    assert several.count_keys() == 12 + (1 + 2 + 3 + 4) / 4


def test_another_configuration_selects_anew(qkv):
    decoder = Decoder()
    step(decoder, qkv, 51)
    step(decoder, qkv, 52, config=SELECTED.replace(top_k=5))
    assert (decoder.state.config.top_k, decoder.state.n_selected_from) == (5, 52)


def test_eviction_is_final(qkv):
    decoder = Decoder(evict=True)
    query, key, value = qkv
    assert not decoder.evicted
    step(decoder, qkv, 51)
    assert decoder.evicted
    kept = Decoder()
    step(kept, qkv, 51)
    expected = step(kept, qkv, 52)
    newest = CachedKeys(key[:, :, 51:52], value[:, :, 51:52], None, 52)  # all the owner still has
    got = decoder.step(query[:, :, 51:52], newest, Request(SELECTED))
    assert torch.equal(got.output, expected.output)
    refused = {"evicted the unselected": Exact(), "configuration changed": SELECTED.replace(top_k=5)}
    for reason, config in refused.items():
        with pytest.raises(Unsupported, match=reason):
            step(decoder, qkv, 53, config=config)
    with pytest.raises(Unsupported, match="further piece of the prompt"):
        step(decoder, qkv, 60, 60)
    with pytest.raises(Unsupported, match="a crop to 40 tokens goes behind the selection"):
        decoder.crop(40)
    with pytest.raises(Unsupported, match="the cache has evicted the unselected ones"):
        decoder.needs_all()
    decoder.reset()
    assert decoder.state is None
    assert not decoder.evicted


def test_selecting_before_the_first_step(qkv):
    _, key, value = (t[:, :, :50] for t in qkv)
    early, at_once = Decoder(), Decoder()
    early.select(CachedKeys(key, value, None, 50), Request(SELECTED))
    assert early.state.n_selected_from == 50
    first = [step(early, qkv, n_keys).output for n_keys in (51, 52)]
    assert (early.state.n_selected_from, early.state.n_since) == (50, 2)  # what was asked for stays
    both = step(at_once, qkv, 52, 2).output
    torch.testing.assert_close(both, torch.cat(first, dim=2), atol=1e-6, rtol=1e-5)  # float32
    nothing = Decoder()
    nothing.select(CachedKeys(key, value, None, 50), Request(ROUTED))
    assert nothing.state is None


def test_seeds_reach_the_selection(qkv):
    config = Selected("uniform", top_k=12, remainder="none", coupling=Coupling())
    first, again, other = (step(Decoder(), qkv, 51, config=config, seed=seed).output for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_a_routed_step_follows_reordered_and_repeated_rows(qkv):
    decoder = Decoder()
    step(decoder, qkv, 56, config=ROUTED)
    swap = torch.tensor([1, 0])
    decoder.take(swap, 2)
    swapped = tuple(t[swap] for t in qkv)
    expected = step(Decoder(), swapped, 57, config=ROUTED).output
    torch.testing.assert_close(step(decoder, swapped, 57, config=ROUTED).output, expected)
    decoder.repeat(2)
    doubled = tuple(t.repeat_interleave(2, dim=0) for t in swapped)
    got = step(decoder, doubled, 57, config=ROUTED).output
    torch.testing.assert_close(got[::2], expected)


@pytest.mark.parametrize("start", [0, 9])
def test_a_routed_step_counts_its_rows_as_the_whole_call_does(start):
    query, key, value = (torch.randn(1, 2, 400, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    valid = torch.ones(1, 400, dtype=torch.bool)
    valid[:, :start] = False
    taken = Decoder().step(query[:, :, -1:], CachedKeys(key, value, valid, 400), Request(ROUTED))
    alone = (query[:, :, -1:], key[:, :, start:], value[:, :, start:])
    whole = attend_counting(*alone, ROUTED, Options(is_causal=True))
    torch.testing.assert_close(taken.output, whole.output)
    assert taken.count_keys() == whole.count_keys()


def test_every_row_read_is_exact(qkv):
    """A selection that keeps all it may is exact attention; so is what it adds later."""
    query, key, value = (t[:, :, :55] for t in qkv)
    config = Selected(top_k=1000, remainder="none")
    got = step(Decoder(), qkv, 55, 3, config).output
    expected = exact_attention(query[:, :, -3:], key, value, is_causal=True).output
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)  # float32, another order of summing
