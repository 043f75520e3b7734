"""`Selected(min_score=...)`, the universal set: every key that scores at least this is kept."""

import pytest
import torch
from oracles.budgets import assert_within
from oracles.inputs import attention_tensors, random_mask

import prescore
from prescore import Coupling, Exact, KMeans, Leverage, Lsh, Selected, prescored_attention

FLOAT64 = 1e-10
LEAF = 16
SCORES = {"key-norm": 3.0, "key-diff": 0.1, "leverage": 0.05}
"""Scorers without randomness, and a score that about half of the keys of a block reach."""


def tensors(n_keys=80, **sizes):
    return attention_tensors(**{"batch": 2, "heads": 4, "kv_heads": 2, "n_keys": n_keys, "seed": 3, **sizes})


def kept_by_definition(key, scorer, min_score, *, sinks=0, recent=0, min_fraction=0.0):
    """`[B, H, n]`: one block of keys without padding."""
    kept = prescore.score(key, scorer) >= min_score
    kept[:, :, :sinks] = True
    kept[:, :, key.shape[2] - recent :] = True
    return kept | (kept.sum(2, keepdim=True) < min_fraction * key.shape[2])


def visible_by_definition(key, config, is_causal):
    """`[B, H, N, N]`: what a query sees: its own leaf, and what every earlier block of the grid keeps."""
    n_keys, fields = key.shape[2], {"recent": config.recent, "min_fraction": config.min_fraction}
    if not is_causal:
        kept = kept_by_definition(key, config.scorer, config.min_score, sinks=config.sinks, **fields)
        return kept[:, :, None].expand(-1, -1, n_keys, -1)
    position = torch.arange(n_keys)
    own_leaf = (position[:, None] // LEAF == position // LEAF) & (position <= position[:, None])
    visible = own_leaf.expand(*key.shape[:2], n_keys, n_keys).clone()
    width = LEAF
    while width < n_keys:
        for begin in range(0, n_keys - width, 2 * width):
            keys, queries = slice(begin, begin + width), slice(begin + width, begin + 2 * width)
            sinks = max(0, config.sinks - begin)
            kept = kept_by_definition(key[:, :, keys], config.scorer, config.min_score, sinks=sinks, **fields)
            visible[:, :, queries, keys] = kept[:, :, None]
        width *= 2
    return visible


def dense(query, key, value, visible):
    group = query.shape[1] // key.shape[1]
    key, value, visible = (t.repeat_interleave(group, dim=1) for t in (key, value, visible))
    logits = (query @ key.transpose(2, 3) * query.shape[3] ** -0.5).masked_fill(~visible, -torch.inf)
    lse = logits.logsumexp(-1)
    return torch.nan_to_num(logits.softmax(-1)) @ value, lse


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["plain", "protected", "fallback"])
@pytest.mark.parametrize("scorer", SCORES)
def test_against_the_definition(scorer, name, is_causal):
    inputs, min_score = tensors(), SCORES[scorer]
    shares = (prescore.score(inputs[1], scorer) >= min_score).double().mean(-1)
    some_fall_back = float(shares.min() + shares.max()) / 2
    fields = {"protected": {"sinks": 5, "recent": 3}, "fallback": {"min_fraction": some_fall_back}}.get(name, {})
    fields = {"min_score": min_score, "sinks": 0, "remainder": "none", "min_seq_len": LEAF, **fields}
    config = Selected(scorer, **fields)
    visible = visible_by_definition(inputs[1], config, is_causal)
    assert len(visible[:, :, -1].sum(-1).unique()) > 1  # heads keep different numbers of keys
    output, aux = prescored_attention(*inputs, config, is_causal=is_causal, return_aux=True)
    wanted, lse = dense(*inputs, visible)
    assert_within(output, wanted, FLOAT64, "output")
    assert_within(aux.lse, lse, FLOAT64, "lse")
    if not is_causal:
        member = torch.zeros_like(visible[:, :, 0])
        for row, head, slot in aux.selection.valid.nonzero().tolist():
            member[row, head, aux.selection.indices[row, head, slot]] = True
        assert torch.equal(member, visible[:, :, 0])
        assert (aux.selection.indices.diff(dim=-1) >= 0).all()
        assert aux.stats.keys_selected == pytest.approx(float(visible[:, :, 0].sum(-1).double().mean()))
    if scorer != "leverage":  # whose scores are higher in the blocks, which have fewer keys
        assert (aux.stats.fallbacks > 0) == (name == "fallback")


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("inner", [Exact(), Lsh(8, 8), Lsh(8, 8, alignment="rank")], ids=["exact", "hash", "rank"])
@pytest.mark.parametrize("remainder", ["none", "centroids"])
def test_every_key_above_is_no_filter(inner, remainder, is_causal):
    inputs = tensors()
    options = {"sinks": 0, "inner": inner, "min_seq_len": LEAF, "remainder": remainder}
    all_above = prescored_attention(*inputs, Selected("key-norm", min_score=0, **options), is_causal=is_causal)
    all_kept = prescored_attention(*inputs, Selected("key-norm", top_k=1.0, **options), is_causal=is_causal)
    assert torch.equal(all_above, all_kept)


@pytest.mark.parametrize("inner", [Exact(), Lsh(8, 8)], ids=["exact", "hash"])
def test_no_key_above(inner):
    inputs = tensors()
    config = Selected("key-norm", min_score=1e6, sinks=0, remainder="none", inner=inner, min_seq_len=LEAF)
    output, aux = prescored_attention(*inputs, config, return_aux=True)
    assert (output == 0).all()
    assert (aux.lse == -torch.inf).all()
    assert aux.selection.indices.shape == (2, 2, 0)
    causal = prescored_attention(*inputs, config, is_causal=True)  # the leaves are left
    assert_within(causal, dense(*inputs, visible_by_definition(inputs[1], config, True))[0], FLOAT64, "output")
    for kept in (config.replace(sinks=2), config.replace(remainder="centroids"), config.replace(min_fraction=0.1)):
        assert (prescored_attention(*inputs, kept) != 0).any()


def test_a_head_without_keys_beside_one_with_all():
    query, key, value = tensors()
    key[:, 0] *= 1e-3
    config = Selected("key-norm", min_score=0.1, sinks=0, remainder="none", min_seq_len=LEAF)
    for inner in (Exact(), Lsh(8, 8), Lsh(0, 8)):
        output, aux = prescored_attention(query, key, value, config.replace(inner=inner), return_aux=True)
        assert aux.selection.valid.sum(-1).tolist() == [[0, 80], [0, 80]]
        assert (output[:, :2] == 0).all()
        assert (aux.lse[:, :2] == -torch.inf).all()
        assert torch.isfinite(aux.lse[:, 2:]).all()


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["centroids", "hash", "zero", "clusters"])
def test_min_score_is_the_given_selection_of_its_keys(name, is_causal):
    """Everything behind the selection does not know how it was made."""
    fields = {
        "centroids": {"sinks": 0},
        "hash": {"inner": Lsh(8, 8), "sinks": 3, "remainder": "none"},
        "zero": {"coupling": Coupling(mask="zero"), "sinks": 0, "remainder": "none"},
        "clusters": {"scorer": KMeans(n_clusters=3), "min_score": -0.5, "sinks": 0},
    }[name]
    query, key, value = tensors()
    config = Selected(**{"scorer": Leverage(), "min_score": 0.1, "min_seq_len": 2 * LEAF, **fields})
    output, aux = prescored_attention(query, key, value, config, is_causal=is_causal, return_aux=True)
    selections = aux.selection if is_causal else [aux.selection]
    member = torch.zeros(key.shape[:3], dtype=torch.bool)
    for selection in selections[:1] if is_causal else selections:
        for row, head, slot in selection.valid.nonzero().tolist():
            member[row, head, selection.indices[row, head, slot]] = True
    assert 0 < int(member.sum()) < member.numel()
    indices = torch.arange(80).expand(2, 2, 80)
    given = prescored_attention(
        query, key, value, config, is_causal=is_causal, selection=prescore.Selection(indices, member)
    )
    # in causal mode the first block alone is compared: blocks score their keys apart
    rows = slice(0, 4 * LEAF if is_causal else None)
    assert_within(output[:, :, rows], given[:, :, rows], FLOAT64, "output")


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_padding_changes_nothing(kind, is_causal):
    query, key, value = tensors(n_keys=60)
    mask = random_mask(kind, 2, 60, seed=2)
    config = Selected("leverage", min_score=0.1, min_seq_len=LEAF, min_fraction=0.2, sinks=1)
    options = {"config": config, "is_causal": is_causal}
    padded = prescored_attention(query, key, value, key_padding_mask=mask, **options)
    for row in range(2):
        if kind == "holes" and is_causal:
            continue  # positions count holes
        real = mask[row]
        alone = prescored_attention(*(t[row : row + 1, :, real] for t in (query, key, value)), **options)
        assert_within(padded[row : row + 1, :, real], alone, FLOAT64, "output")


def test_a_key_of_exactly_the_score_is_kept():
    key = torch.tensor([3.0, 1.0, 2.0, 4.0])[None, None, :, None]
    config = Selected("key-norm", min_score=2, sinks=0, remainder="none")
    _, aux = prescored_attention(key, key, key, config, return_aux=True)
    assert aux.selection.indices.tolist() == [[[0, 2, 3]]]


def test_leverage_keeps_at_most_rank_over_epsilon_keys():
    """The universal set of the paper: scores sum to the rank, so that few keys reach epsilon."""
    _, key, value = tensors()
    for epsilon in (0.01, 0.05, 0.2):
        config = Selected("leverage", min_score=epsilon, sinks=0, remainder="none")
        _, aux = prescored_attention(key, key, value, config, return_aux=True)
        kept = aux.selection.valid.sum(-1)
        assert torch.equal(kept, (prescore.score(key, "leverage") >= epsilon).sum(-1))
        assert (kept <= key.shape[3] / epsilon).all()


def test_gradients_reach_the_kept_keys_only():
    query, key, value = (t.requires_grad_() for t in tensors(heads=2))
    config = Selected("key-norm", min_score=3.0, sinks=0, remainder="none")
    prescored_attention(query, key, value, config).sum().backward()
    kept = key.detach().norm(dim=-1) >= 3.0
    assert (value.grad[kept].abs().amax(-1) > 0).all()
    assert (value.grad[~kept] == 0).all()
    assert (key.grad[~kept] == 0).all()
