"""Heads that need fine leaves: who they are, what they read, and that nothing leaks."""

import math

import pytest
import torch

import prescore.attention.routed_heads as routed_heads
from prescore.attention.exact import exact_attention
from prescore.attention.routed import routed_attention
from prescore.attention.routed_clusters import place_pieces
from prescore.attention.routed_heads import FINE_LEAF, _asked_queries, error_of_leaves, head_layouts
from prescore.attention.routed_layout import make_layout
from prescore.attention.routed_reference import routed_reference
from prescore.clustering.tree import bisection_tree
from prescore.config import PrescoreConfig
from prescore.types import Attended

SCALE, DIM, UNTIL = 0.25, 16, 400
CONFIG = PrescoreConfig(rows=128, leaf_size=32, chunk_size=64, sinks=2, min_seq_len=UNTIL)


def build(points, levels, valid):
    return bisection_tree(points, levels, valid=valid)


def options(config=CONFIG, valid=None):
    return {"is_causal": True, "valid": valid, "config": config, "scale": SCALE, "tree_builder": build}


def copying(n=700, *, heads=(True, False), batch=1, group=2, seed=0, dtype=torch.float64):
    """Queries of a copying head want one key of the far past each; those of another head look nowhere much."""
    generator = torch.Generator().manual_seed(seed)
    n_heads = len(heads)
    key, value = (torch.randn(batch, n_heads, n, DIM, generator=generator, dtype=dtype) for _ in range(2))
    # sixteen kinds of keys, each in every part of the text: what small leaves can hold and large ones mix
    kinds = torch.randn(16, DIM, generator=generator, dtype=dtype)
    key = 0.3 * key + kinds[torch.randint(16, (n,), generator=generator)]
    query = 0.05 * torch.randn(batch, n_heads * group, n, DIM, generator=generator, dtype=dtype)
    wanted = (torch.rand(n, generator=generator) * torch.arange(n)).long()
    for head, copies in enumerate(heads):
        if copies:
            own = slice(head * group, (head + 1) * group)
            query[:, own] += 3 * key[:, head : head + 1].index_select(2, wanted)
    return [tensor.requires_grad_() for tensor in (query, key, value)]


def seen_by(query, key, value, until=UNTIL):
    first = (tensor[:, :, :until] for tensor in (query, key, value))
    return exact_attention(*first, is_causal=True, scale=SCALE)


def layouts(query, key, value, config=CONFIG):
    layout = make_layout(query.shape[2], key.shape[2], causal=True, config=config)
    n_exact = min(max(0, layout.head - layout.first), layout.n_query)
    seen = None
    if n_exact:
        whole = routed_reference(query, key, value, **options(config))
        seen = Attended(*(part[:, :, :n_exact] for part in whole))
    return head_layouts(query, key, value, seen, layout=layout, config=config, scale=SCALE, tree_builder=build)


def test_a_copying_head_is_found_and_gets_the_rows_of_the_other():
    found = layouts(*copying())
    read = [(own.sequences.tolist(), own.layout.leaf, own.fine) for own in found]
    assert read == [([1], 31, False), ([0], FINE_LEAF, True)]
    other, own = (own.layout for own in found)
    assert (other.n_chosen * 32, own.n_chosen * FINE_LEAF, own.singles) == (64, 192, 0)
    _, stats = routed_attention(*copying(), **options())
    assert stats["fine_heads"] == 1
    # rows on average: what one head gives up the other reads
    assert stats["far_rows"] == (2 * 31 + 12 * 16) / 2


@pytest.mark.parametrize("rows", [32, 64, 512])
def test_no_number_of_rows_hides_a_copying_head(rows):
    """One coarse leaf is compared with as many keys in fine leaves, however many rows there are."""
    config = PrescoreConfig(**{**CONFIG.to_dict(), "rows": rows})
    _, stats = routed_attention(*copying(), **options(config))
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
    _, stats = routed_attention(*tensors, **options())
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
    _, stats = routed_attention(*tensors, **options())
    assert (stats["fine_heads"], len(trees)) == (0, 0 if pointed else 2)


def test_short_exact_part_or_small_leaves_leave_nothing_to_ask():
    tensors = copying()
    for config in (
        PrescoreConfig(**{**CONFIG.to_dict(), "min_seq_len": 300}),
        PrescoreConfig(**{**CONFIG.to_dict(), "leaf_size": FINE_LEAF}),
        PrescoreConfig(**{**CONFIG.to_dict(), "chunk_size": 72}),
    ):
        _, stats = routed_attention(*tensors, **options(config))
        assert stats["fine_heads"] == 0


def test_a_call_without_the_asked_queries_reads_by_coarse_leaves():
    query, key, value = copying()
    _, stats = routed_attention(query[:, :, -200:], key, value, **options())
    assert stats["fine_heads"] == 0
    _, stats = routed_attention(query[:, :, -430:], key, value, **options())
    assert stats["fine_heads"] == 1


def test_fine_leaves_bring_a_copying_head_nearer_to_exact_attention(monkeypatch):
    tensors = copying()
    exact = exact_attention(*tensors, is_causal=True, scale=SCALE).output

    def error():
        output = routed_attention(*tensors, **options())[0].output
        return float(((output - exact)[:, :2].square().sum() / exact[:, :2].square().sum()).detach())

    with_fine = error()
    monkeypatch.setattr(routed_heads, "TOO_FAR_OFF", float("inf"))
    assert with_fine < 0.5 * error()


@pytest.mark.parametrize("n_query", [700, 450])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_reference_forward_and_backward(n_query, padded):
    query, key, value = copying(batch=2, heads=(True, False, False))
    valid = torch.arange(700) < torch.tensor([700, 521])[:, None] if padded else None
    query = query[:, :, -n_query:]
    tensors = (query, key, value)
    expected, (got, stats) = (
        routed_reference(*tensors, **options(valid=valid)),
        routed_attention(*tensors, **options(valid=valid)),
    )
    assert stats["fine_heads"] >= 1
    real = torch.ones(2, 1, n_query, dtype=torch.bool)
    if padded:
        real = (torch.arange(700 - n_query, 700) < torch.tensor([700, 521])[:, None])[:, None]
    real = real.expand(expected.lse.shape)
    torch.testing.assert_close(got.output[real], expected.output[real], rtol=0, atol=1e-12)
    torch.testing.assert_close(got.lse[real], expected.lse[real], rtol=0, atol=1e-12)
    weights = torch.randn(*real.shape, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = [
        torch.autograd.grad(
            (result.output * weights)[real].sum() + result.lse[real].sum(), tensors, retain_graph=True
        )
        for result in (got, expected)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_nothing_later_changes_what_is_earlier():
    """Neither later queries, keys and values nor the mere length move a row, whatever they make of the heads."""
    tensors = copying()
    before = routed_attention(*tensors, **options())[0].output
    for cut in (UNTIL, 500, 640):
        shorter = [tensor[:, :, :cut] for tensor in tensors]
        output = routed_attention(*shorter, **options())[0].output
        torch.testing.assert_close(output, before[:, :, :cut], rtol=0, atol=1e-12)
        changed = [torch.cat((tensor[:, :, :cut], 3 * tensor[:, :, cut:].flip(2)), dim=2) for tensor in tensors]
        output = routed_attention(*changed, **options())[0].output
        torch.testing.assert_close(output[:, :, :cut], before[:, :, :cut], rtol=0, atol=1e-12)


def test_sequences_of_a_batch_are_decided_one_by_one():
    one, other = copying(heads=(True, False)), copying(heads=(False, False), seed=1)
    both = [torch.cat(pair) for pair in zip(one, other, strict=True)]
    output, stats = routed_attention(*both, **options())
    assert stats["fine_heads"] == 1
    for place, alone in enumerate((one, other)):
        expected = routed_attention(*alone, **options())[0].output
        torch.testing.assert_close(output.output[place : place + 1], expected, rtol=0, atol=1e-12)


def test_error_of_leaves_is_that_of_the_piece_behind_leaves():
    """Against a plain computation, query by query."""
    query, key, value = (tensor.detach() for tensor in copying())
    seen = seen_by(query, key, value)
    layout = make_layout(700, 700, causal=True, config=CONFIG)
    asked = _asked_queries(query, seen, layout, 2, SCALE)
    got = error_of_leaves(asked, key, value, layout, 2, build)
    single = -torch.nn.functional.cosine_similarity(
        key[0, :, 2:258], key[0, :, 2:258].mean(1, keepdim=True), dim=-1
    )
    for head in range(2):
        apart = single[head].topk(8).indices
        rest = torch.tensor([row for row in range(256) if row not in apart.tolist()])
        leaves = rest[build(key[0, head, 2:258][rest][None], 3, None)[0]].view(8, 31) + 2
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
    _, stats = routed_attention(*(t.detach() for t in copying(dtype=torch.float64)), **options())
    low = [tensor.detach().to(dtype) for tensor in copying()]
    output, again = routed_attention(*low, **options())
    assert again["fine_heads"] == stats["fine_heads"] == 1
    assert output.output.dtype == dtype
    assert torch.isfinite(output.output).all()


def test_bounds_hold_for_fine_heads_too():
    tensors = [tensor.detach() for tensor in copying()]
    config = PrescoreConfig(**{**CONFIG.to_dict(), "tolerance": 0.05})
    output, stats = routed_attention(*tensors, **options(config), error_bar=True)
    exact = exact_attention(*tensors, is_causal=True, scale=SCALE).output
    assert stats["fine_heads"] == 1
    largest = tensors[2].norm(dim=-1).max()
    assert float((output.output - exact).norm(dim=-1).max()) <= 2 * 0.05 * float(largest)
