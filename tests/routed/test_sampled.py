"""A tolerance: sampled rests, error bars, and who reads on."""

import pytest
import torch

from prescore import exact_attention, prescored_attention
from prescore.config import Routed
from prescore.errors import Unsupported
from prescore.routed.decode import RoutedIndex
from prescore.routed.draws import STRIDE, sample_places, sample_rows

CONFIG = Routed(min_weight=1 / 64, cluster_size=32, chunk_size=64, sinks=4, exact_until=128, tolerance=0.1)
LENGTH = 900


def clustered(seed=0, length=LENGTH, dim=32):
    """Keys around a few centres, queries that look for some of them."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(12, dim, generator=generator)
    label = torch.randint(12, (1, 2, length), generator=generator)
    key = centres[label] + 0.5 * torch.randn(1, 2, length, dim, generator=generator)
    query = 2 * (
        centres[torch.randint(12, (1, 4, length), generator=generator)]
        + torch.randn(1, 4, length, dim, generator=generator)
    )
    return query, key, torch.randn(1, 2, length, dim, generator=generator)


def relative_error(output, qkv):
    exact = exact_attention(*qkv, is_causal=True).output
    return (output - exact).norm(dim=-1) / exact.norm(dim=-1)


@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("tolerance", [0.02, 0.1, 0.3])
def test_nearly_all_queries_are_within_the_tolerance(tolerance, backend):
    qkv = clustered()
    config = CONFIG.replace(tolerance=tolerance)
    output, aux = prescored_attention(*qkv, config, is_causal=True, backend=backend, return_aux=True)
    error = relative_error(output, qkv)[:, :, CONFIG.exact_until :]
    assert (error > tolerance).double().mean() <= 0.05
    assert aux.stats["error_bound_max"] <= tolerance
    assert 0 <= aux.stats["read_all"] <= 1


def test_a_wide_tolerance_reads_less_than_a_narrow_one():
    qkv = clustered()
    rows = []
    for tolerance in (0.02, 0.2, 1.0):
        config = CONFIG.replace(tolerance=tolerance)
        rows.append(prescored_attention(*qkv, config, is_causal=True, return_aux=True)[1].stats["keys_per_query"])
    assert rows[0] > rows[1] > rows[2]


def test_no_tolerance_at_all_is_exact_attention():
    qkv = clustered(length=400)
    output = prescored_attention(*qkv, CONFIG.replace(tolerance=0.0), is_causal=True)
    assert relative_error(output, qkv).max() < 1e-5


def test_compiled_code_samples_as_plain_torch_does():
    qkv = clustered(seed=1)
    fast, plain = (prescored_attention(*qkv, CONFIG, is_causal=True, backend=b) for b in ("auto", "plain"))
    apart = (fast - plain).norm(dim=-1) / plain.norm(dim=-1)
    # a key at the limit is read by one and sampled by the other
    assert (apart > 1e-3).double().mean() <= 0.01


@pytest.mark.parametrize("leaf", [512, 528])
def test_nodes_of_many_samples(leaf):
    """Larger nodes than compiled code knows are left to plain torch."""
    config = CONFIG.replace(rows=4, leaf_size=leaf, chunk_size=leaf, exact_until=0, tolerance=0.3)
    query, key, value = clustered(seed=6, length=4 * leaf, dim=16)
    query = query[:, :, -40:]
    fast, plain = (
        prescored_attention(query, key, value, config, is_causal=True, backend=b) for b in ("auto", "plain")
    )
    assert ((fast - plain).abs().amax(-1) > 1e-4).double().mean() <= 0.02


def test_the_seed_moves_samples_and_nothing_else():
    qkv = clustered(seed=2)
    one, again, other = (
        prescored_attention(*qkv, CONFIG, is_causal=True, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(one[:, :, : CONFIG.exact_until], other[:, :, : CONFIG.exact_until])


def test_pieces_steps_and_padding_draw_the_same():
    query, key, value = clustered(seed=3)
    whole = prescored_attention(query, key, value, CONFIG, is_causal=True)
    piece = prescored_attention(query[:, :, 500:], key, value, CONFIG, is_causal=True)
    torch.testing.assert_close(piece, whole[:, :, 500:], rtol=1e-4, atol=1e-5)
    index = RoutedIndex(CONFIG, scale=query.shape[-1] ** -0.5)
    for place in (300, 301, 700, LENGTH - 1):
        asked = query[:, :, place : place + 1]
        step = index.attend(asked, key[:, :, : place + 1], value[:, :, : place + 1])
        # a head may have a key at the limit, which rounding moves across it
        apart = (step.output - whole[:, :, place : place + 1]).abs().amax((0, 2, 3))
        assert (apart < 1e-4).sum() >= 3
        assert apart.max() < 0.1
    padded = [torch.cat((torch.randn(1, t.shape[1], 37, t.shape[3]), t), dim=2) for t in (query, key, value)]
    mask = torch.arange(LENGTH + 37)[None] >= 37
    shifted = prescored_attention(*padded, CONFIG, is_causal=True, key_padding_mask=mask)
    assert ((shifted[:, :, 37:] - whole).abs().amax(-1) > 1e-4).double().mean() <= 0.005


@pytest.mark.parametrize("cut", [200, 600])
def test_later_tokens_change_nothing(cut):
    query, key, value = clustered(seed=4)
    before = prescored_attention(query, key, value, CONFIG, is_causal=True)
    for tensor in (query, key, value):
        tensor[:, :, cut:] = 30 * torch.randn(tensor[:, :, cut:].shape, generator=torch.Generator().manual_seed(5))
    after = prescored_attention(query, key, value, CONFIG, is_causal=True)
    torch.testing.assert_close(after[:, :, :cut], before[:, :, :cut], rtol=1e-4, atol=1e-5)


def hostile(kind):
    """Inputs that a mean, a sample or a code could be fooled by."""
    generator = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(1, 1, LENGTH, 32, generator=generator) for _ in range(3))
    if kind == "a needle that late queries want":
        query[:, :, 600:] += 12 * key[:, :, 77:78] / key[:, :, 77:78].norm()
        value[:, :, 77] *= 20
    elif kind == "outlier norms":
        key[:, :, 50::97] *= 30
    elif kind == "all keys equal":
        key[:] = key[:, :, :1].clone()
    elif kind == "one dense cluster":
        key[:, :, : LENGTH // 2] = key[:, :, :1] + 0.01 * key[:, :, : LENGTH // 2]
    elif kind == "a needle among opposite keys":
        direction = torch.nn.functional.normalize(torch.randn(32, generator=generator), dim=0)
        key[:, :, 64:192] = -4 * direction + 0.1 * key[:, :, 64:192]
        key[:, :, 100] = 40 * direction
        query[:, :, 600:] += 4 * direction
    elif kind == "values that follow the keys":
        value = key @ torch.randn(32, 32, generator=generator) + 0.1 * value
    elif kind == "broad, and a node of its own":
        query *= 0.3
        key[:, :, 64:96] = 2 * key[:, :, 64:65] + 0.1 * key[:, :, 64:96]
        value[:, :, 64:96] += 5
    elif kind == "values on a line":
        value = value[..., :1] * torch.randn(32, generator=generator)
    elif kind == "a few huge values":
        value[:, :, 40::211] *= 50
    elif kind == "logits beyond any code":
        query *= 40
    return query, key, value


@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize(
    "kind",
    [
        "a needle that late queries want",
        "outlier norms",
        "all keys equal",
        "one dense cluster",
        "a needle among opposite keys",
        "values that follow the keys",
        "broad, and a node of its own",
        "values on a line",
        "a few huge values",
        "logits beyond any code",
    ],
)
def test_hostile_inputs_are_never_small_and_wrong(kind, backend):
    qkv = hostile(kind)
    output = prescored_attention(*qkv, CONFIG.replace(tolerance=0.05), is_causal=True, backend=backend)
    over = relative_error(output, qkv) > 0.05
    assert over[:, :, CONFIG.exact_until :].double().mean() <= 0.05
    assert over[:, :, 600:].double().mean() <= 0.05  # those who want the needle are not drowned by the others


def test_a_batch_changes_nothing():
    """Alone, or beside another sequence and padded at either end."""
    one, other = clustered(seed=7, length=500), clustered(seed=8, length=700)
    alone = [prescored_attention(*qkv, CONFIG, is_causal=True) for qkv in (one, other)]
    for before, after in ((200, 0), (0, 200)):
        padded = [torch.nn.functional.pad(t, (0, 0, before, after)) for t in one]
        both = [torch.cat(pair) for pair in zip(padded, other, strict=True)]
        mask = torch.ones(2, 700, dtype=torch.bool)
        mask[0, :before] = mask[0, 700 - after :] = False
        parallel_group = prescored_attention(*both, CONFIG, is_causal=True, key_padding_mask=mask)
        for row, whole, place in ((0, alone[0], slice(before, before + 500)), (1, alone[1], slice(0, 700))):
            apart = (parallel_group[row : row + 1, :, place] - whole).abs().amax(-1)
            assert (apart > 1e-4).double().mean() <= 0.005


def test_training_is_refused():
    query, key, value = clustered(length=300)
    with pytest.raises(Unsupported, match="tolerance"):
        prescored_attention(query.requires_grad_(), key, value, CONFIG, is_causal=True)


def test_confidence_needs_a_tolerance():
    with pytest.raises(ValueError, match="confidence"):
        Routed(confidence=0.9)
    assert Routed(tolerance=0.1, confidence=0.9).confidence == 0.9


def test_more_confidence_reads_more():
    qkv = clustered(seed=6)
    rows = []
    for confidence in (0.5, 0.95, 0.999):
        config = CONFIG.replace(confidence=confidence)
        rows.append(prescored_attention(*qkv, config, is_causal=True, return_aux=True)[1].stats["keys_per_query"])
    assert rows[0] < rows[1] < rows[2]


def test_every_place_is_drawn_as_often():
    places = sample_places(16000, 128, 7, torch.device("cpu"))
    counts = torch.bincount(places, minlength=STRIDE)
    assert counts.min() > 850
    assert counts.max() < 1150
    assert torch.equal(places[:50], sample_places(50, 128, 7, torch.device("cpu")))
    drawn, exists = sample_rows(torch.tensor([0, 15]), 24)
    assert drawn.tolist() == [[0, 16], [15, 23]]
    assert exists.tolist() == [[True, True], [True, False]]
