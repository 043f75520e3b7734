"""Selections for keys that are only shown: believed as long as they go on."""

import pytest
import torch

from prescore import KMeans, Selected
from prescore.decoding.decoder import OVER_ALL, OVER_SELECTION, PROMPT, Past, Request
from prescore.decoding.follow import Follower

CONFIG = Selected(KMeans(n_clusters=4), top_k=12)


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 60, 8, generator=generator)
    key, value = (torch.randn(2, 2, 60, 8, generator=generator) for _ in range(2))
    return query, key, value


def step(follower, query, key, value, n_keys, n_query=1, config=CONFIG, valid=None):
    past = Past(key[:, :, :n_keys], value[:, :, :n_keys], valid, n_keys)
    return follower.step(query[:, :, n_keys - n_query : n_keys], past, Request(config))


def test_other_keys_are_noticed(qkv):
    query, key, value = qkv
    follower = Follower()
    step(follower, query, key, value, 51)
    first = follower.state
    step(follower, query, key, value, 52)
    assert follower.state is first
    assert (first.n_selected_from, first.n_since) == (50, 2)
    other = key.clone()
    other[:, :, 49] += 1
    step(follower, query, other, value, 53)
    fresh = follower.state
    assert fresh is not first
    assert fresh.n_selected_from == 52
    recent = other.clone()
    recent[:, :, 52] += 1
    step(follower, query, recent, value, 54)
    assert follower.state is fresh
    assert torch.equal(fresh.rows.key[:, :, -2:], recent[:, :, 52:54])
    assert step(follower, query, recent, value, 54, 54).path == PROMPT
    assert follower.state is None
    step(follower, query, recent, value, 54)
    assert follower.state is not fresh


def test_a_step_back_behind_the_selection_selects_anew(qkv):
    """Queries must not meet a selection among keys that come after them."""
    query, key, value = qkv
    follower = Follower()
    step(follower, query, key, value, 51)
    step(follower, query, key, value, 52, 5)
    assert follower.state.n_selected_from == 47
    again = Follower()
    step(again, query, key, value, 52, 5)
    step(follower, query, key, value, 49)
    assert follower.state.n_selected_from == 47
    assert again.state.n_selected_from == 47


def test_another_batch_is_another_text(qkv):
    query, key, value = qkv
    follower = Follower()
    step(follower, query, key, value, 51)
    alone = step(follower, query[:1], key[:1], value[:1], 52)
    expected = step(Follower(), query[:1], key[:1], value[:1], 52)
    assert torch.equal(alone.output, expected.output)


def test_unused_room_behind_the_keys_is_not_read(qkv):
    query, key, value = qkv
    valid = torch.zeros(2, 60, dtype=torch.bool)
    valid[:, :51] = True
    past = Past(key, value, valid, 60)
    follower = Follower()
    got = follower.step(query[:, :, 50:51], past, Request(CONFIG))
    assert follower.state.n_selected_from == 50
    assert torch.equal(got.output, step(Follower(), query, key, value, 51).output)


def test_what_keeps_no_selection_reads_everything(qkv):
    follower = Follower()
    taken = step(follower, *qkv, 51, config=Selected(top_k=1.0))
    assert (taken.path, taken.output) == (OVER_ALL, None)
    assert step(follower, *qkv, 52).path == OVER_SELECTION
