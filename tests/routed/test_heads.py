"""Heads that need fine leaves: who they are, what they read, and that nothing leaks."""

import math

import pytest
import torch
from attention_checks import call_of, lanes
from copying_heads import CONFIG, DIM, SCALE, UNTIL, copying

from prescore import exact_attention
from prescore.routed import heads as routed_heads
from prescore.routed.clusters import place_pieces
from prescore.routed.heads import FINE_LEAF, asked_queries, error_of_leaves, head_layouts
from prescore.routed.layout import make_layout
from prescore.testing.routed_pieces import bisect


def run(*tensors, config=CONFIG, valid=None, explain=False):
    return lanes(*tensors, config, valid=valid, scale=SCALE, explain=explain)


def seen_by(query, key, value, until=UNTIL):
    first = (tensor[:, :, :until] for tensor in (query, key, value))
    return exact_attention(*first, is_causal=True, scale=SCALE)


def layouts(query, key, value, config=CONFIG):
    layout = make_layout(query.shape[2], key.shape[2], causal=True, config=config)
    call = call_of(query, key, value, is_causal=True, scale=SCALE)
    return head_layouts(call, seen_by(query, key, value), layout, config)


def test_a_copying_head_is_found_and_gets_the_rows_of_the_other():
    found = layouts(*(tensor.detach() for tensor in copying()))
    read = [(own.sequences.tolist(), own.layout.leaf, own.fine) for own in found]
    assert read == [([1], 31, False), ([0], FINE_LEAF, True)]
    other, own = (own.layout for own in found)
    assert (other.n_chosen * 32, own.n_chosen * FINE_LEAF, own.singles) == (64, 192, 0)
    _, stats = run(*copying())
    assert stats["fine_heads"] == 1
    # rows on average: what one head gives up the other reads
    assert stats["far_rows"] == (2 * 31 + 12 * 16) / 2


@pytest.mark.parametrize("rows", [32, 64, 512])
def test_no_number_of_rows_hides_a_copying_head(rows):
    """One coarse leaf is compared with as many keys in fine leaves, however many rows there are."""
    config = CONFIG.replace(rows=rows)
    _, stats = run(*copying(), config=config)
    assert stats["fine_heads"] == 1


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"heads": (False, False)}, id="no head copies"),
        pytest.param({"n": UNTIL}, id="every query is exact"),
    ],
)
def test_without_need_all_heads_read_alike(case):
    tensors = copying(**case)
    _, stats = run(*tensors)
    assert stats["fine_heads"] == 0


@pytest.mark.parametrize("pointed", [0.0, routed_heads.POINTED])
def test_random_keys_gain_nothing_by_fine_leaves(pointed, monkeypatch):
    """Every head is far off there, and stays so: fine leaves would cost time for nothing.

    One look at the weights tells, before any tree is made, and so would the errors.
    """
    trees = []
    monkeypatch.setattr(routed_heads, "place_pieces", lambda *a: trees.append(a) or place_pieces(*a))
    monkeypatch.setattr(routed_heads, "POINTED", pointed)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, 700, DIM, generator=generator) for _ in range(3)]
    _, stats = run(*tensors)
    assert (stats["fine_heads"], len(trees)) == (0, 0 if pointed else 2)


def test_short_exact_part_or_small_leaves_leave_nothing_to_ask():
    tensors = copying()
    for config in (
        CONFIG.replace(exact_until=300),
        CONFIG.replace(leaf_size=FINE_LEAF),
        CONFIG.replace(chunk_size=72),
    ):
        _, stats = run(*tensors, config=config)
        assert stats["fine_heads"] == 0


def test_a_call_without_the_asked_queries_reads_by_coarse_leaves():
    query, key, value = copying()
    _, stats = run(query[:, :, -200:], key, value)
    assert stats["fine_heads"] == 0
    _, stats = run(query[:, :, -430:], key, value)
    assert stats["fine_heads"] == 1


def test_fine_leaves_bring_a_copying_head_nearer_to_exact_attention(monkeypatch):
    tensors = copying()
    exact = exact_attention(*tensors, is_causal=True, scale=SCALE).output

    def error():
        output = run(*tensors)[0].output
        return float(((output - exact)[:, :2].square().sum() / exact[:, :2].square().sum()).detach())

    with_fine = error()
    monkeypatch.setattr(routed_heads, "TOO_FAR_OFF", float("inf"))
    assert with_fine < 0.5 * error()


def test_nothing_later_changes_what_is_earlier():
    """Neither later queries, keys and values nor the mere length move a row, whatever they make of the heads."""
    tensors = copying()
    before = run(*tensors)[0].output
    for cut in (UNTIL, 500, 640):
        shorter = [tensor[:, :, :cut] for tensor in tensors]
        output = run(*shorter)[0].output
        torch.testing.assert_close(output, before[:, :, :cut], rtol=0, atol=1e-12)
        changed = [torch.cat((tensor[:, :, :cut], 3 * tensor[:, :, cut:].flip(2)), dim=2) for tensor in tensors]
        output = run(*changed)[0].output
        torch.testing.assert_close(output[:, :, :cut], before[:, :, :cut], rtol=0, atol=1e-12)


def test_sequences_of_a_batch_are_decided_one_by_one():
    one, other = copying(heads=(True, False)), copying(heads=(False, False), seed=1)
    both = [torch.cat(pair) for pair in zip(one, other, strict=True)]
    output, stats = run(*both)
    assert stats["fine_heads"] == 1
    for place, alone in enumerate((one, other)):
        expected = run(*alone)[0].output
        torch.testing.assert_close(output.output[place : place + 1], expected, rtol=0, atol=1e-12)


def test_error_of_leaves_is_that_of_the_piece_behind_leaves():
    """Against a plain computation, query by query."""
    query, key, value = (tensor.detach() for tensor in copying())
    seen = seen_by(query, key, value)
    layout = make_layout(700, 700, causal=True, config=CONFIG)
    call = call_of(query, key, value, is_causal=True, scale=SCALE)
    got = error_of_leaves(asked_queries(call, seen, layout), call, layout, 2)
    single = -torch.nn.functional.cosine_similarity(
        key[0, :, 2:258], key[0, :, 2:258].mean(1, keepdim=True), dim=-1
    )
    for head in range(2):
        apart = single[head].topk(8).indices
        rest = [row for row in range(256) if row not in apart.tolist()]
        leaves = torch.tensor(bisect(key[0, head, 2:258], torch.ones(256, dtype=torch.bool), rest, 3)) + 2
        errors = []
        for place in (2 * head, 2 * head + 1):
            wrong = right = 0.0
            for position in range(UNTIL - 128 + 1, UNTIL, 2):
                logits = SCALE * key[0, head, : position + 1] @ query[0, place, position]
                means = SCALE * key[0, head][leaves].mean(1) @ query[0, place, position] + math.log(31)
                read = means.topk(2).indices
                behind = torch.tensor([leaf for leaf in range(8) if leaf not in read.tolist()])
                logits[leaves[behind].flatten()] = -torch.inf
                weights = torch.cat((logits, means[behind])).softmax(0)
                values = torch.cat((value[0, head, : position + 1], value[0, head][leaves[behind]].mean(1)))
                exact = seen.output[0, place, position]
                wrong, right = wrong + (weights @ values - exact).square().sum(), right + exact.square().sum()
            errors.append(wrong / right)
        torch.testing.assert_close(got[0, head], torch.stack(errors).max(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_precisions_find_the_same_head(dtype):
    _, stats = run(*(t.detach() for t in copying(dtype=torch.float64)))
    low = [tensor.detach().to(dtype) for tensor in copying()]
    output, again = run(*low)
    assert again["fine_heads"] == stats["fine_heads"] == 1
    assert output.output.dtype == dtype
    assert torch.isfinite(output.output).all()


def test_bounds_hold_for_fine_heads_too():
    tensors = [tensor.detach() for tensor in copying()]
    output, stats = run(*tensors, config=CONFIG.replace(tolerance=0.05), explain=True)
    exact = exact_attention(*tensors, is_causal=True, scale=SCALE).output
    assert stats["fine_heads"] == 1
    largest = tensors[2].norm(dim=-1).max()
    assert float((output.output - exact).norm(dim=-1).max()) <= 2 * 0.05 * float(largest)
