"""Selections for keys that are only shown: believed as long as they go on."""

import pytest
import torch

from prescore import KMeans, Selected
from prescore.integrations.decode import OVER_ALL, OVER_SELECTION, PROMPT, CachedKeys, ExternalCache, Request

CONFIG = Selected(KMeans(n_clusters=4), top_k=12)


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 60, 8, generator=generator)
    key, value = (torch.randn(2, 2, 60, 8, generator=generator) for _ in range(2))
    return query, key, value


def step(follower, query, key, value, n_keys, n_query=1, config=CONFIG, valid=None):
    past = CachedKeys(key[:, :, :n_keys], value[:, :, :n_keys], valid, n_keys)
    return follower.step(query[:, :, n_keys - n_query : n_keys], past, Request(config))


def test_other_keys_are_noticed(qkv):
    query, key, value = qkv
    follower = ExternalCache()
    step(follower, query, key, value, 51)
    first = follower.state
    step(follower, query, key, value, 52)
    assert follower.state is first
    assert (first.n_selected_from, first.n_since) == (51, 1)
    other = key.clone()
    other[:, :, 49] += 1
    step(follower, query, other, value, 53)
    fresh = follower.state
    assert fresh is not first
    assert fresh.n_selected_from == 53
    step(follower, query, other, value, 54)
    recent = other.clone()
    recent[:, :, 53] += 1
    step(follower, query, recent, value, 55)
    assert follower.state is fresh
    assert torch.equal(fresh.rows.key[:, :, -2:], recent[:, :, 53:55])
    assert step(follower, query, recent, value, 54, 54).path == PROMPT
    assert follower.state is None
    step(follower, query, recent, value, 54)
    assert follower.state is not fresh


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("changed", [50, 51, 52, 53])
def test_other_tokens_behind_the_same_prompt_are_all_noticed(qkv, changed, prompted):
    """Reordered beams go on as if each had been fed alone, whether the selection saw the change or not."""
    query, key, value = qkv
    other = key.clone()
    other[:, :, changed] += 1
    follower, alone = ExternalCache(), ExternalCache()
    if prompted:
        for each in (follower, alone):
            step(each, query, key, value, 50, 50)
    step(follower, query, key, value, 51)
    step(alone, query, other, value, 51)
    for n_keys in (52, 53, 54):
        step(follower, query, key, value, n_keys)
        step(alone, query, other, value, n_keys)
    got, expected = (step(each, query, other, value, 55) for each in (follower, alone))
    torch.testing.assert_close(got.output, expected.output, atol=1e-6, rtol=1e-5)  # float32
    assert follower.state.n_selected_from == 51


def test_a_change_between_the_probes_of_a_late_selection_is_noticed(qkv):
    """Of what came behind a prompt every key is compared, however many of them a selection saw."""
    query, key, value = qkv
    follower = ExternalCache()
    step(follower, query, key, value, 10, 10)
    step(follower, query, key, value, 58)
    first = follower.state
    step(follower, query, key, value, 59)
    assert follower.state is first
    for changed in range(10, 58):
        other = key.clone()
        other[:, :, changed] += 1
        step(follower, query, other, value, 59)
        assert follower.state is not first
        step(follower, query, key, value, 59)
        first = follower.state


def test_a_step_back_behind_the_selection_selects_anew(qkv):
    """Queries must not meet a selection among keys that come after them."""
    query, key, value = qkv
    follower = ExternalCache()
    step(follower, query, key, value, 51)
    step(follower, query, key, value, 52, 5)
    assert follower.state.n_selected_from == 47
    again = ExternalCache()
    step(again, query, key, value, 52, 5)
    step(follower, query, key, value, 49)
    assert follower.state.n_selected_from == 47
    assert again.state.n_selected_from == 47


def test_the_same_step_again_keeps_its_selection(qkv):
    query, key, value = qkv
    follower = ExternalCache()
    first = step(follower, query, key, value, 51)
    state = follower.state
    assert torch.equal(step(follower, query, key, value, 51).output, first.output)
    assert follower.state is state


def test_another_batch_is_another_text(qkv):
    query, key, value = qkv
    follower = ExternalCache()
    step(follower, query, key, value, 51)
    alone = step(follower, query[:1], key[:1], value[:1], 52)
    expected = step(ExternalCache(), query[:1], key[:1], value[:1], 52)
    assert torch.equal(alone.output, expected.output)


def test_unused_room_behind_the_keys_is_not_read(qkv):
    query, key, value = qkv
    valid = torch.zeros(2, 60, dtype=torch.bool)
    valid[:, :51] = True
    past = CachedKeys(key, value, valid, 60)
    follower = ExternalCache()
    got = follower.step(query[:, :, 50:51], past, Request(CONFIG))
    assert follower.state.n_selected_from == 51
    assert torch.equal(got.output, step(ExternalCache(), query, key, value, 51).output)


def test_what_keeps_no_selection_reads_everything(qkv):
    follower = ExternalCache()
    taken = step(follower, *qkv, 51, config=Selected(top_k=1.0))
    assert (taken.path, taken.output) == (OVER_ALL, None)
    assert step(follower, *qkv, 52).path == OVER_SELECTION
