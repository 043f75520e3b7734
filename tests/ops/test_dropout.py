"""Dropout of attention weights, observed from outside with one-hot values.

With the identity as values an output row is the row of weights itself, so what was dropped can be read off and
handed to a dense reference.
"""

import math

import pytest
import torch
from routed_checks import LargestTensor

import prescore
from prescore import Exact, KMeans, Lsh, Routed, Selected
from prescore.errors import Unsupported
from prescore.ops.dropout import Dropout
from prescore.rng import Streams

P = 0.3
SELECTED = Selected("key-norm", 10, sinks=2, remainder="none", min_seq_len=12)
CONFIGS = {
    "exact": Exact(),
    "every key": SELECTED.replace(top_k=1.0),
    "selected": SELECTED,
    "centroids": SELECTED.replace(scorer=KMeans(n_clusters=4), remainder="centroids"),
    "hyper": SELECTED.replace(top_k=24, inner=Lsh(block_size=8, sample_size=8, n_projections=3)),
    "routed": Routed(min_weight=1 / 16, cluster_size=4, chunk_size=16, sinks=3, exact_until=0),
}
ONE_COLUMN_PER_KEY = [name for name in CONFIGS if name != "hyper"]  # a sampled residual may hold a key twice
causal_or_not = pytest.mark.parametrize("is_causal", [False, True])


def tensors(length=90, *, batch=2, one_hot=False, alike=False):
    """Random inputs; `alike`: every four neighbours after the sinks of "routed" have one key and one value."""
    generator = torch.Generator().manual_seed(4)
    sizes = ((batch, 4, length, 6), (batch, 2, length, 6), (batch, 2, length, 5))
    made = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    if alike:
        place = torch.arange(length)
        place = torch.where(place < 3, place, (place - 3) // 4 * 4 + 3)
        made[1:] = [t[:, :, place] for t in made[1:]]
    if one_hot:
        made[2] = torch.eye(length, dtype=torch.float64).expand(batch, 2, length, length)
    return [t.contiguous().requires_grad_() for t in made]


def attend(inputs, config, is_causal, *, dropout_p=P, seed=7, **options):
    config = CONFIGS[config] if isinstance(config, str) else config
    output, aux = prescore.prescored_attention(
        *inputs, config, is_causal=is_causal, generator=seed, dropout_p=dropout_p, return_aux=True, **options
    )
    return output, aux.lse


def factors_of(name, is_causal, mask=None):
    """What each weight was multiplied by, NaN where the key has no weight."""
    # centroids of equal keys spread their weight evenly, and no value moves
    inputs = tensors(one_hot=True, alike=name == "routed")
    dropped, full = (
        attend(inputs, name, is_causal, dropout_p=p, key_padding_mask=mask)[0].detach() for p in (P, 0.0)
    )
    assert bool((dropped[full == 0] == 0).all())
    return dropped / full


def assert_independent(factors, error):
    """Two rows of weights agree in 1 - 2 p (1 - p) of the places, give or take `error`."""
    flat = (factors > 0).flatten(0, 1).flatten(1).double()
    for first in range(len(flat)):
        for second in range(first):
            agreement = float((flat[first] == flat[second]).double().mean())
            assert abs(agreement - (1 - 2 * P * (1 - P))) < error


@causal_or_not
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ONE_COLUMN_PER_KEY)
def test_a_weight_is_dropped_or_scaled_up_and_p_of_them_are_dropped(name, is_causal, padded):
    mask = torch.arange(90) >= torch.tensor([0, 24])[:, None] if padded else None
    factors = factors_of(name, is_causal, mask)
    factors = factors[~factors.isnan()]
    gone = factors.abs() < 1e-9
    torch.testing.assert_close(factors[~gone], torch.full_like(factors[~gone], 1 / (1 - P)), rtol=1e-9, atol=0)
    # a centroid drops all its keys at once: 4 of a routed cluster, up to all 90 of a block; 5 standard deviations
    spread = math.sqrt(P * (1 - P) / factors.numel() * (20 if name == "centroids" else 4))
    assert abs(float(gone.double().mean()) - P) < 5 * spread


@causal_or_not
def test_forward_and_backward_equal_a_dense_softmax_with_the_same_weights_dropped(is_causal):
    factors = factors_of("every key", is_causal).nan_to_num(0.0)
    inputs = tensors()
    output, lse = attend(inputs, "every key", is_causal)
    query, key, value = (t.repeat_interleave(4 // t.shape[1], dim=1) for t in inputs)
    logits = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if is_causal:
        logits = logits.masked_fill(torch.ones(90, 90, dtype=torch.bool).triu(1), -torch.inf)
    expected = (logits.softmax(-1) * factors) @ value
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    weights = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((output * weights).sum() + lse.sin().sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum() + logits.logsumexp(-1).sin().sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@causal_or_not
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_lse_and_seeds(name, is_causal):
    inputs = tensors(50, batch=1, alike=name == "routed")
    assert torch.autograd.gradcheck(lambda *t: attend(t, name, is_causal), inputs, fast_mode=True)
    full, lse = attend(inputs, name, is_causal, dropout_p=0.0)
    dropped, same_lse = attend(inputs, name, is_causal)
    torch.testing.assert_close(same_lse, lse, rtol=0, atol=1e-12)
    assert torch.equal(dropped, attend(inputs, name, is_causal)[0])
    assert not torch.allclose(dropped, full)


@causal_or_not
@pytest.mark.parametrize("name", ["selected", "centroids", "routed"])
def test_the_mean_over_seeds_is_the_undropped_output(name, is_causal):
    inputs = [t.detach() for t in tensors(40, batch=1)]
    seeds, config = 200, CONFIGS[name]
    if name == "centroids":  # k-means draws its first centres, one cluster does not: only what is dropped may vary
        config = config.replace(scorer="key-norm", remainder=KMeans(n_clusters=1))
    full = attend(inputs, config, is_causal, dropout_p=0.0, seed=0)[0]
    drawn = torch.stack([attend(inputs, config, is_causal, seed=seed)[0] for seed in range(seeds)])
    error = drawn.std(0) / math.sqrt(seeds)
    varied = error > 1e-12
    assert bool(varied.float().mean() > 0.9)
    # the mean of squares of (800 dependent) standard scores is 1 when unbiased, and each below 5.5 deviations
    scores = (drawn.mean(0) - full)[varied] / error[varied]
    assert float(scores.abs().max()) < 5.5
    assert 0.5 < float(scores.square().mean()) < 1.6


def test_heads_sequences_and_blocks_of_the_work_drop_independently(monkeypatch):
    assert_independent(factors_of("every key", False), 5 * 0.0055)  # 5 deviations of 8100 weights
    monkeypatch.setattr("prescore.ops.plain.LOGITS_AT_ONCE", 1000)
    rows = (factors_of("every key", False) > 0).flatten(0, 2)
    assert rows.unique(dim=0).shape[0] == rows.shape[0]  # no row of weights is another's copy
    inputs = tensors(40, batch=1)
    assert torch.autograd.gradcheck(lambda *t: attend(t, "every key", True), inputs, fast_mode=True)


def test_routed_sequences_and_heads_drop_independently(monkeypatch):
    monkeypatch.setattr("prescore.routed.attention.KEY_NUMBERS_AT_ONCE", 1)  # one KV head at a time
    assert_independent(factors_of("routed", False), 0.1)  # keys of one centroid drop together


def test_randomness_comes_from_the_generators_alone():
    inputs = tensors()
    before, states = torch.random.get_rng_state(), []
    for p in (0.0, P):  # a passed generator advances by one draw with and without dropout
        generator = torch.Generator().manual_seed(5)
        attend(inputs, "routed", True, dropout_p=p, seed=generator)
        states.append(generator.get_state())
    assert torch.equal(*states)
    assert torch.equal(before, torch.random.get_rng_state())
    plain = prescore.prescored_attention(*inputs, CONFIGS["routed"], is_causal=True)
    assert torch.equal(
        plain, prescore.prescored_attention(*inputs, CONFIGS["routed"], is_causal=True, dropout_p=0.0)
    )


def test_the_dropout_generator_leaves_the_selection_alone():
    """Scoring draws from `generator`: with a seed for the dropout only what is dropped changes."""
    inputs = [t.detach() for t in tensors()]
    (first, lse), (other, same_lse), (same, _) = (
        attend(inputs, "centroids", False, seed=3, dropout_generator=seed) for seed in (1, 2, 1)
    )
    assert torch.equal(lse, same_lse)
    assert torch.equal(first, same)
    assert not torch.allclose(first, other)
    assert not torch.allclose(attend(inputs, "centroids", False, seed=4, dropout_generator=1)[1], lse)


def test_the_dtype_does_not_change_what_is_dropped():
    inputs = [t.detach() for t in tensors()]
    exact = attend(inputs, "every key", True)[0]
    got = attend([t.bfloat16() for t in inputs], "every key", True)[0]
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=0.1)  # another mask would be off by about 1
    dropout = Dropout(0.25, Streams(1)).at("here")
    first = dropout.factors((50, 50), torch.empty(0, dtype=torch.float64))
    assert set(first.unique().tolist()) == {0.0, 1 / 0.75}
    assert torch.equal(first.float(), dropout.factors((50, 50), torch.empty(0)))
    assert not torch.equal(first, dropout.at("there").factors((50, 50), first))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout_p": 1.0}, ValueError, r"dropout_p must be at least 0 and below 1, got 1\.0"),
        ({"dropout_p": -0.1}, ValueError, r"dropout_p must be at least 0 and below 1, got -0\.1"),
        ({"dropout_p": float("nan")}, ValueError, "dropout_p must be at least 0 and below 1, got nan"),
        ({"dropout_p": True}, TypeError, "dropout_p must be a number, got bool True"),
        ({"dropout_p": "0.1"}, TypeError, "dropout_p must be a number, got str '0.1'"),
        (
            {"dropout_generator": "x"},
            TypeError,
            r"dropout_generator must be an int, a torch\.Generator or None, got str",
        ),
        ({"backend": "cpu-flash"}, Unsupported, "cpu-flash: it cannot drop attention weights"),
    ],
)
@pytest.mark.parametrize("name", ["routed", "selected"])
def test_a_refused_call_does_not_advance_the_generator(name, options, error, message):
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    with pytest.raises(error, match=message):
        attend(tensors(), name, False, seed=generator, **options)
    assert torch.equal(before, generator.get_state())


@pytest.mark.parametrize("name", ["every key", "selected", "routed"])
def test_memory_is_linear_in_the_length_forward_and_backward(name, monkeypatch):
    monkeypatch.setattr("prescore.ops.plain.LOGITS_AT_ONCE", 2**12)
    largest = []
    for length in (300, 600):
        exact = {"exact_until": 64} if name == "routed" else {"min_seq_len": length if name == "every key" else 64}
        with LargestTensor() as seen:
            attend(tensors(length, batch=1), CONFIGS[name].replace(**exact), True)[0].sum().backward()
        largest.append(seen.size)
    assert largest[1] <= 2.2 * largest[0]  # squares would be four times as large
