"""Dropped attention weights: which ones is seen from outside, with one-hot values.

With the identity as values an output row is the row of weights itself, so what was dropped can be read off and
handed to a dense reference.
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import prescore
from prescore import Exact, KMeans, Lsh, Routed, Selected
from prescore.errors import Unsupported
from prescore.ops.dropout import Dropout
from prescore.rng import Streams

P = 0.3
ROUTED = Routed(min_weight=1 / 16, cluster_size=4, chunk_size=16, sinks=3, exact_until=0)
SELECTED = Selected("key-norm", 10, sinks=2, remainder="none", min_seq_len=12)
CONFIGS = {
    "exact": Exact(),
    "every key": SELECTED.replace(top_k=1.0),
    "selected": SELECTED,
    "centroids": SELECTED.replace(scorer=KMeans(n_clusters=4), remainder="centroids"),
    "hyper": SELECTED.replace(top_k=24, inner=Lsh(block_size=8, sample_size=8, n_projections=3)),
    "routed": ROUTED,
}
ONE_COLUMN_PER_KEY = [name for name in CONFIGS if name != "hyper"]  # a sampled residual may hold a key twice


def tensors(n_query=90, n_key=90, *, batch=2, dim=6, one_hot=False, alike=False):
    """Random inputs; `alike`: every four neighbours behind the sinks of `ROUTED` have one key and one value."""
    generator = torch.Generator().manual_seed(4)
    sizes = ((batch, 4, n_query, dim), (batch, 2, n_key, dim), (batch, 2, n_key, 5))
    made = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    if alike:
        place = torch.arange(n_key)
        place = torch.where(place < 3, place, (place - 3) // 4 * 4 + 3)
        made[1:] = [t[:, :, place] for t in made[1:]]
    if one_hot:
        made[2] = torch.eye(n_key, dtype=torch.float64).expand(batch, 2, n_key, n_key)
    return [t.contiguous().requires_grad_() for t in made]


def attend(inputs, name, is_causal, *, dropout_p=P, seed=7, mask=None):
    output, aux = prescore.prescored_attention(
        *inputs, config=CONFIGS[name], is_causal=is_causal, generator=seed, dropout_p=dropout_p, return_aux=True,
        key_padding_mask=mask,
    )  # fmt: skip
    return output, aux.lse


def padding():
    return torch.arange(90) >= torch.tensor([0, 24])[:, None]


def seen_factors(name, is_causal, mask=None):
    """What each weight was multiplied by, NaN where the key has no weight anyway."""
    # centroids of equal keys spread their weight evenly, and no value moves
    inputs = tensors(one_hot=True, alike=name == "routed")
    dropped, whole = (attend(inputs, name, is_causal, dropout_p=p, mask=mask)[0].detach() for p in (P, 0.0))
    assert bool((dropped[whole == 0] == 0).all())
    return dropped / whole


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ONE_COLUMN_PER_KEY)
def test_a_weight_is_dropped_or_scaled_up_and_p_of_them_are_dropped(name, is_causal, padded):
    factors = seen_factors(name, is_causal, padding() if padded else None)
    factors = factors[~factors.isnan()]
    gone = factors.abs() < 1e-9
    torch.testing.assert_close(factors[~gone], torch.full_like(factors[~gone], 1 / (1 - P)), rtol=1e-9, atol=0)
    # centroids drop all their keys at once: leaves hold 4, centroids up to all 90 keys; 5 standard deviations
    spread = math.sqrt(P * (1 - P) / factors.numel() * (20 if name == "centroids" else 4))
    assert abs(float(gone.double().mean()) - P) < 5 * spread


@pytest.mark.parametrize("is_causal", [False, True])
def test_forward_and_backward_equal_a_dense_softmax_with_the_same_weights_dropped(is_causal):
    factors = seen_factors("every key", is_causal).nan_to_num(0.0)
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


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradcheck(name, is_causal):
    inputs = tensors(50, 50, batch=1, alike=name == "routed")
    assert torch.autograd.gradcheck(lambda *t: attend(t, name, is_causal), inputs, fast_mode=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_lse_is_unchanged_and_the_same_seed_drops_the_same(name, is_causal):
    inputs = tensors()
    whole, lse = attend(inputs, name, is_causal, dropout_p=0.0)
    dropped, same_lse = attend(inputs, name, is_causal)
    torch.testing.assert_close(same_lse, lse, rtol=0, atol=1e-12)
    assert torch.equal(dropped, attend(inputs, name, is_causal)[0])
    assert not torch.allclose(dropped, whole)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["selected", "centroids", "routed"])
def test_the_mean_over_seeds_is_the_undropped_output(name, is_causal):
    inputs = [t.detach() for t in tensors(40, 40, batch=1)]
    whole = attend(inputs, name, is_causal, dropout_p=0.0, seed=0)[0]
    seeds = 200
    config = CONFIGS[name]
    if name == "centroids":  # k-means draws its first centres, one cluster does not: only what is dropped may vary
        config = config.replace(scorer="key-norm", remainder=KMeans(n_clusters=1))
        whole = prescore.prescored_attention(*inputs, config=config, is_causal=is_causal)
    drawn = torch.stack([
        prescore.prescored_attention(*inputs, config=config, is_causal=is_causal, generator=seed, dropout_p=P)
        for seed in range(seeds)
    ])  # fmt: skip
    off = drawn.mean(0) - whole
    error = drawn.std(0) / math.sqrt(seeds)
    varied = error > 1e-12
    assert bool(varied.float().mean() > 0.9)
    # the mean of squares of (800 dependent) standard scores is 1 when unbiased, and each below 5.5 deviations
    scores = off[varied] / error[varied]
    assert float(scores.abs().max()) < 5.5
    assert 0.5 < float(scores.square().mean()) < 1.6


def test_seeds_heads_sequences_and_places_drop_differently():
    factors = seen_factors("every key", False)
    flat = (factors > 0).flatten(0, 1).flatten(1).double()
    # two independent rows of 8100 agree in 1 - 2 p (1 - p) of the places, give or take 5 deviations of 0.0055
    agree = 1 - 2 * P * (1 - P)
    for first in range(8):
        for second in range(first):
            assert abs(float((flat[first] == flat[second]).double().mean()) - agree) < 5 * 0.0055
    inputs = tensors()
    assert not torch.equal(attend(inputs, "every key", False)[0], attend(inputs, "every key", False, seed=8)[0])


def test_routed_sequences_and_heads_drop_differently(monkeypatch):
    monkeypatch.setattr(
        "prescore.routed.attention.KEY_NUMBERS_AT_ONCE", 1
    )  # a lane for every sequence and key head
    flat = (seen_factors("routed", False) > 0).flatten(0, 1).flatten(1).double()
    for first in range(8):
        for second in range(first):
            # independent rows agree in 0.58 of the places; keys behind one centroid drop together
            assert abs(float((flat[first] == flat[second]).double().mean()) - 0.58) < 0.1


def test_no_dropout_is_the_path_without_and_reads_no_global_seed():
    inputs = tensors()
    config = CONFIGS["routed"]
    plain = prescore.prescored_attention(*inputs, config=config, is_causal=True)
    before = torch.random.get_rng_state()
    assert torch.equal(plain, prescore.prescored_attention(*inputs, config=config, is_causal=True, dropout_p=0.0))
    prescore.prescored_attention(*inputs, config=config, is_causal=True, dropout_p=0.5, generator=3)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_generator_passed_in_advances_by_one_draw_with_and_without_dropout():
    inputs = tensors()
    states = []
    for p in (0.0, P):
        generator = torch.Generator().manual_seed(5)
        prescore.prescored_attention(
            *inputs, config=CONFIGS["routed"], is_causal=True, generator=generator, dropout_p=p
        )
        states.append(generator.get_state())
    assert torch.equal(*states)


def test_low_precision_drops_the_same_weights():
    inputs = [t.detach() for t in tensors()]
    exact = attend(inputs, "every key", True)[0]
    got = attend([t.bfloat16() for t in inputs], "every key", True)[0]
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=0.1)  # another mask would be off by about 1


def test_blocks_of_queries_and_tiles_drop_independently_and_agree_backward(monkeypatch):
    monkeypatch.setattr("prescore.ops.plain.LOGITS_AT_ONCE", 1000)
    factors = seen_factors("every key", False)
    rows = (factors > 0).flatten(0, 2)
    assert rows.unique(dim=0).shape[0] == rows.shape[0]  # no row of weights is another's copy
    inputs = tensors(40, 40, batch=1)
    assert torch.autograd.gradcheck(lambda *t: attend(t, "every key", True), inputs, fast_mode=True)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (1.0, ValueError, r"dropout_p must be at least 0 and below 1, got 1\.0"),
        (-0.1, ValueError, r"dropout_p must be at least 0 and below 1, got -0\.1"),
        (float("nan"), ValueError, "dropout_p must be at least 0 and below 1, got nan"),
        (True, TypeError, "dropout_p must be a number, got bool True"),
        ("0.1", TypeError, "dropout_p must be a number, got str '0.1'"),
    ],
)
def test_bad_probabilities(value, error, message):
    with pytest.raises(error, match=message):
        prescore.prescored_attention(*tensors(), dropout_p=value)


@pytest.mark.parametrize("name", ["routed", "selected"])
def test_a_fused_operator_refuses_to_drop_and_the_generator_stays(name):
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    with pytest.raises(Unsupported, match="cpu-flash: it cannot drop attention weights"):
        prescore.prescored_attention(
            *tensors(), config=CONFIGS[name], generator=generator, dropout_p=0.1, backend="cpu-flash"
        )
    assert torch.equal(before, generator.get_state())


def test_a_generator_of_its_own_leaves_the_selection_alone():
    """Scoring draws from `generator`: with the dropout's own seed only what is dropped changes."""
    inputs, config = tensors(), CONFIGS["centroids"]

    def run(seed, own):
        output, aux = prescore.prescored_attention(
            *inputs, config=config, generator=seed, dropout_p=P, dropout_generator=own, return_aux=True
        )
        return output.detach(), aux.lse.detach()

    (first, lse), (other, same_lse), (same, _) = run(3, 1), run(3, 2), run(3, 1)
    assert torch.equal(lse, same_lse)
    assert torch.equal(first, same)
    assert not torch.allclose(first, other)
    assert not torch.allclose(run(4, 1)[1], lse)
    message = "dropout_generator must be an int, a torch.Generator or None, got str 'x'"
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    with pytest.raises(TypeError, match=message):
        prescore.prescored_attention(*inputs, generator=generator, dropout_p=P, dropout_generator="x")
    assert torch.equal(before, generator.get_state())


def test_factors_do_not_depend_on_dtype():
    dropout = Dropout(0.25, Streams(1)).at("here")
    first = dropout.factors((50, 50), torch.empty(0, dtype=torch.float64))
    assert set(first.unique().tolist()) == {0.0, 1 / 0.75}
    assert torch.equal(first.float(), dropout.factors((50, 50), torch.empty(0)))
    assert not torch.equal(first, dropout.at("there").factors((50, 50), first))


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("name", ["every key", "selected", "routed"])
def test_memory_is_linear_in_the_length_forward_and_backward(name, monkeypatch):
    monkeypatch.setattr("prescore.ops.plain.LOGITS_AT_ONCE", 2**12)
    largest = []
    for length in (300, 600):
        inputs = tensors(length, length, batch=1)
        config = CONFIGS[name]
        if name == "routed":
            config = config.replace(exact_until=64)
        else:
            config = config.replace(min_seq_len=length if name == "every key" else 64)
        with LargestTensor() as seen:
            prescore.prescored_attention(*inputs, config=config, is_causal=True, dropout_p=P).sum().backward()
        largest.append(seen.numel)
    assert largest[1] <= 2.2 * largest[0]  # squares would be four times as large
