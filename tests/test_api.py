"""The public functions as a user meets them: dtypes, randomness, degenerate inputs, Aux, Algorithm 2's rules."""

import pytest
import torch
from oracles.budgets import assert_within, error_budget
from oracles.inputs import attention_tensors

import prescore
from prescore import Exact, Hyper, KMeans, Lsh, Routed, Selected

LSH = Lsh(block_size=4, sample_size=5, n_projections=3, alignment="rank")
CONFIGS = {
    "paper": Selected.paper(top_k=9, min_seq_len=8, inner=LSH),
    "hyper": Hyper(LSH, min_seq_len=8),
    "hyper full": Hyper(LSH.replace(alignment="hash"), min_seq_len=0),
    "early": Selected.early(top_k=9, min_seq_len=8, inner=LSH),
    "selected": Selected(top_k=9, min_seq_len=8),
    "default": Routed(),
    "routed": Routed(min_weight=1 / 8, cluster_size=2, chunk_size=4, sinks=2, exact_until=0),
    "exact": Exact(),
    "centroids": Selected.paper("kmeans", 9, remainder="centroids", min_seq_len=0, inner=LSH),
    "sampled": Selected(KMeans(noise=0.1), 9, selector="sample", min_seq_len=8),
}


def _fixed_selection(n_keys=61, every=3):
    indices = torch.arange(0, n_keys, every).expand(2, 2, -1)
    return prescore.Selection(indices, torch.ones_like(indices, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("way", ["exact", "centroids", "residual"])
def test_low_precision_is_within_its_budget(way, is_causal, dtype):
    inputs = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=61, dim=16, seed=4, spread=1.0)
    # what is kept and which block is read is fixed, so that only arithmetic differs
    config = Selected(KMeans(n_clusters=1), min_seq_len=8)
    if way == "residual":
        config = Hyper(Lsh(block_size=0, sample_size=16), min_seq_len=8)

    def run(*tensors):
        if way == "exact":
            return prescore.exact_attention(*tensors, is_causal=is_causal)
        if way == "residual":
            return prescore.hyper_attention(*tensors, config=config, is_causal=is_causal)
        output, aux = prescore.prescored_attention(
            *tensors, config=config, is_causal=is_causal, selection=_fixed_selection(), return_aux=True
        )
        return prescore.Attended(output, aux.lse)

    result = run(*(t.to(dtype) for t in inputs))
    assert result.output.dtype == dtype
    assert result.lse.dtype == torch.float32
    for number, name in enumerate(("output", "lse")):
        budget = error_budget(lambda *t, number=number: run(*t)[number], inputs, dtype)
        assert budget < 0.5
        assert_within(result[number], run(*inputs)[number], budget, name)


def test_log_weights_are_not_rounded_to_half_precision():
    # 985 equal keys, one of them kept: the centroid's log weight log(984) = 6.8916 lies between 6.875 and 6.90625
    query, key, value = attention_tensors(heads=1, n_query=3, n_keys=1, dim=8, dtype=torch.bfloat16)
    key, value = key.expand(1, 1, 985, 8).contiguous(), value.expand(1, 1, 985, 8).contiguous()
    config = Selected(KMeans(n_clusters=1), 1, sinks=0)
    _, aux = prescore.prescored_attention(query, key, value, config=config, return_aux=True)
    exact = prescore.exact_attention(query, key, value)
    assert_within(aux.lse, exact.lse, 2e-3, "lse")  # sums of 985 equal bfloat16 numbers in float32: far below


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_same_seed_same_bits_and_no_global_randomness(name, is_causal):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=45, dtype=torch.float32, seed=1)
    state = torch.random.get_rng_state()
    first = prescore.prescored_attention(*tensors, config=CONFIGS[name], is_causal=is_causal, generator=11)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(5)  # a moved global generator must not be felt
    second = prescore.prescored_attention(*tensors, config=CONFIGS[name], is_causal=is_causal, generator=11)
    torch.random.set_rng_state(state)
    assert torch.equal(first, second)
    assert first.shape == tensors[0].shape


def test_seeds_and_generators():
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=45, seed=1)
    config = CONFIGS["hyper full"]

    def run(generator):
        return prescore.hyper_attention(*tensors, config=config, generator=generator).output

    assert torch.equal(run(None), run(None))
    assert torch.equal(run(3), run(3))
    assert not torch.equal(run(3), run(4))
    generator = torch.Generator().manual_seed(9)
    first, second = run(generator), run(generator)
    assert not torch.equal(first, second)  # it advanced
    assert torch.equal(first, run(torch.Generator().manual_seed(9)))


def test_score_and_select_advance_a_generator_and_agree_with_attention():
    query, key, value = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=45, seed=1)
    config = Selected("uniform", 9, sinks=0)
    generator = torch.Generator().manual_seed(2)
    first = prescore.score(key, "uniform", generator=generator)
    assert not torch.equal(first, prescore.score(key, "uniform", generator=generator))
    again = prescore.select(key, "uniform", top_k=9, sinks=0, generator=torch.Generator().manual_seed(2))
    assert torch.equal(again.indices, first.topk(9).indices.sort().values)
    _, aux = prescore.prescored_attention(
        query, key, value, config=config, generator=torch.Generator().manual_seed(2), return_aux=True
    )
    assert torch.equal(aux.selection.indices, again.indices)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_degenerate_inputs_work(name, is_causal):
    config = CONFIGS[name]
    one = attention_tensors(batch=1, heads=2, kv_heads=1, n_keys=1, seed=3)
    empty = attention_tensors(batch=0, heads=2, kv_heads=1, n_keys=7)
    cases = {
        "a single key": one,
        "an empty batch": empty,
        "fewer keys than clusters": attention_tensors(heads=2, kv_heads=1, n_keys=3, dim=8),
        "equal keys": tuple(t.expand(1, t.shape[1], 40, 4).contiguous() for t in one),
        "zero keys": tuple(t * f for t, f in zip(attention_tensors(n_keys=40), (1.0, 0.0, 1.0), strict=True)),
        "no queries": (empty[0].new_zeros(1, 2, 0, 4), *(t.new_zeros(1, 1, 7, 4) for t in empty[1:])),
    }
    for case, tensors in cases.items():
        output, aux = prescore.prescored_attention(*tensors, config=config, is_causal=is_causal, return_aux=True)
        assert output.shape == tensors[0].shape, case
        assert aux.lse.shape == tensors[0].shape[:3], case
        assert torch.isfinite(output).all(), case
    alone = prescore.prescored_attention(*one, config=config, is_causal=is_causal)
    assert_within(alone, one[2].expand_as(alone), 1e-12, "attention to a single key")
    if name != "early":  # zeroed keys draw mass, and their values are 0
        tensors = cases["equal keys"]
        output = prescore.prescored_attention(*tensors, config=config, is_causal=is_causal)
        assert_within(output, tensors[2].expand_as(output), 1e-12, "attention to equal values")


def test_no_keys_at_all():
    query, key, value = attention_tensors(n_query=3, n_keys=0)
    for config in CONFIGS.values():
        output, aux = prescore.prescored_attention(query, key, value, config=config, return_aux=True)
        assert not output.any()
        assert torch.isneginf(aux.lse).all()
    assert prescore.score(key).shape == (1, 1, 0)
    assert prescore.select(key, top_k=3).indices.shape == (1, 1, 0)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced"])
def test_strides_do_not_matter(layout):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=45, seed=1)
    if layout == "transposed":
        odd = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    elif layout == "sliced":
        odd = [torch.cat((t, t), dim=-1)[..., : t.shape[-1]] for t in tensors]
    else:
        tensors = [t[:1].expand(2, -1, -1, -1).contiguous() for t in tensors]
        odd = [t[:1].expand(2, -1, -1, -1) for t in tensors]
    for config in CONFIGS.values():
        for is_causal in (False, True):
            expected = prescore.prescored_attention(*tensors, config=config, is_causal=is_causal)
            assert torch.equal(prescore.prescored_attention(*odd, config=config, is_causal=is_causal), expected)


def test_inputs_are_not_written_to():
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=45, seed=1)
    mask = torch.arange(45) >= torch.tensor([[5], [0]])
    before = [t.clone() for t in (*tensors, mask)]
    for config in CONFIGS.values():
        for is_causal in (False, True):
            prescore.prescored_attention(*tensors, config=config, is_causal=is_causal, key_padding_mask=mask)
    assert all(torch.equal(a, b) for a, b in zip((*tensors, mask), before, strict=True))


@pytest.mark.parametrize("is_causal", [False, True])
def test_fallback_is_unfiltered_hyper_attention(is_causal):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=45, seed=1)
    config = Selected.paper(top_k=3, min_fraction=0.99, min_seq_len=8, inner=LSH)
    output, aux = prescore.prescored_attention(
        *tensors, config=config, is_causal=is_causal, generator=2, return_aux=True
    )
    plain = prescore.hyper_attention(*tensors, Hyper(LSH, min_seq_len=8), is_causal=is_causal, generator=2)
    assert_within(output, plain.output, 1e-12)
    assert_within(aux.lse, plain.lse, 1e-12)
    assert aux.stats["fallbacks"] > 0
    kept = prescore.prescored_attention(
        *tensors, config=config.replace(min_fraction=0.05), is_causal=is_causal, generator=2, return_aux=True
    )
    assert kept[1].stats["fallbacks"] == 0
    assert not torch.allclose(kept[0], output)


@pytest.mark.parametrize("is_causal", [False, True])
def test_selecting_every_key_is_hyper_attention(is_causal):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=45, seed=1)
    config = CONFIGS["hyper"].replace(sinks=2, leaf_inclusive=True)
    plain = prescore.hyper_attention(*tensors, config, is_causal=is_causal, generator=2)
    shared = {"min_seq_len": 8, "leaf_inclusive": True, "sinks": 2, "inner": LSH}
    for whole in (Selected.paper("leverage", 1.0, **shared), Selected.paper("kmeans", 45, **shared)):
        options = {"is_causal": is_causal, "generator": 2}
        output, aux = prescore.prescored_attention(*tensors, whole, return_aux=True, **options)
        assert torch.equal(output, plain.output)
        assert torch.equal(aux.lse, plain.lse)
        assert torch.equal(prescore.prescored_attention(*tensors, config, **options), plain.output)


def test_sinks_and_recent_are_kept_inside_the_budget_and_seen_exactly():
    query, key, _ = attention_tensors(batch=2, heads=2, kv_heads=1, n_query=3, n_keys=45, seed=1)
    mask = torch.arange(45) >= torch.tensor([[7], [0]])
    chosen = prescore.select(key, "key-norm", top_k=6, sinks=2, recent=1, key_padding_mask=mask)
    assert chosen.indices.shape == (2, 1, 6)
    assert chosen.indices[0, 0, :2].tolist() == [7, 8]
    assert chosen.indices[1, 0, :2].tolist() == [0, 1]
    assert chosen.indices[:, 0, -1].tolist() == [44, 44]
    # every key has a value of its own, so that weights can be read off: those positions, and a block of one key
    config = Selected.paper("key-norm", 6, sinks=2, recent=1, inner=Lsh(1, 0), min_seq_len=0)
    value = torch.eye(45, dtype=torch.float64).expand(2, 1, 45, 45)
    weights, aux = prescore.prescored_attention(query, key, value, config, key_padding_mask=mask, return_aux=True)
    assert (weights > 0).sum(-1).unique().tolist() == [4]
    assert (weights[0, ..., [7, 8, 44]] > 0).all()
    assert (weights[1, ..., [0, 1, 44]] > 0).all()
    truth = torch.exp(query @ key.transpose(-1, -2) / 2 - aux.lse[..., None])
    assert_within(weights, truth * (weights > 0), 1e-12, "weights")


def test_aux_tells_what_happened():
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=45, seed=1)
    output, aux = prescore.prescored_attention(*tensors, config=CONFIGS["paper"], return_aux=True)
    assert torch.equal(output, prescore.prescored_attention(*tensors, config=CONFIGS["paper"]))
    assert aux.selection.indices.shape == (2, 2, 9)
    assert aux.stats["keys_selected"] == 9
    assert aux.stats["depth"] == 0
    assert aux.stats["fallbacks"] == 0
    assert 0 < aux.stats["mass_read"] < 1
    assert {"scoring", "hashing", "attending"} <= set(aux.stats["seconds"])
    _, causal = prescore.prescored_attention(*tensors, config=CONFIGS["paper"], is_causal=True, return_aux=True)
    assert causal.stats["depth"] == 3  # blocks of 8, 16 and 32
    assert [len(s.indices[0, 0]) for s in causal.selection] == [8, 8, 8, 9, 9]
    for name in ("selected", "exact"):
        _, exact = prescore.prescored_attention(*tensors, config=CONFIGS[name], return_aux=True)
        assert exact.stats["mass_read"] == 1.0


def test_scale_is_a_factor_of_the_logits():
    query, key, value = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=45, seed=1)
    for config in CONFIGS.values():
        scaled = prescore.prescored_attention(query, key, value, config=config, scale=0.25)
        assert_within(scaled, prescore.prescored_attention(query / 2, key, value, config=config), 1e-12)


def test_no_configuration_is_the_default_and_a_selection_alone_is_read_exactly():
    query, key, value = attention_tensors(batch=2, heads=2, kv_heads=1, n_keys=45, seed=1)
    assert torch.equal(
        prescore.prescored_attention(query, key, value, is_causal=True),
        prescore.prescored_attention(query, key, value, Routed(), is_causal=True),
    )
    chosen = prescore.select(key, "key-norm", top_k=7)
    rows = chosen.indices[..., None].expand(-1, -1, -1, 4)
    exact = prescore.exact_attention(query, key.gather(2, rows), value.gather(2, rows))
    assert_within(prescore.prescored_attention(query, key, value, selection=chosen), exact.output, 1e-12)


def test_submodules_are_found_from_the_package():
    assert prescore.bench.offline is not None
    assert prescore.testing is not None
    assert issubclass(prescore.errors.Unsupported, ValueError)
    for module in (prescore, prescore.integrations):
        with pytest.raises(AttributeError, match="nothing_here"):
            module.nothing_here  # noqa: B018
