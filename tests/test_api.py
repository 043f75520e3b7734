"""The public functions: dtypes, randomness, degenerate inputs, `Aux`, rules of Algorithm 2."""

import pytest
import torch
from attention_checks import attend
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
EACH = [(name, is_causal) for name in CONFIGS for is_causal in (False, True)]
TENSORS = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=45, seed=1)

each_call = pytest.mark.parametrize(("name", "is_causal"), EACH)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("way", ["exact", "centroids", "residual"])
def test_low_precision_is_within_its_budget(way, is_causal, dtype):
    inputs = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=61, dim=16, seed=4, spread=1.0)
    # the selection and the block of a query are fixed, so that only arithmetic differs
    indices = torch.arange(0, 61, 3).expand(2, 2, -1)
    selection = prescore.Selection(indices, torch.ones_like(indices, dtype=torch.bool))

    def run(*tensors):
        if way == "centroids":
            config = Selected(KMeans(n_clusters=1), min_seq_len=8)
            return attend(tensors, config, is_causal=is_causal, selection=selection)[0]
        config = Hyper(Lsh(block_size=0, sample_size=16), min_seq_len=8) if way == "residual" else Exact()
        return attend(tensors, config, is_causal=is_causal)[0]

    result = run(*(t.to(dtype) for t in inputs))
    assert result.output.dtype == dtype
    assert result.lse.dtype == torch.float32
    for number, name in enumerate(("output", "lse")):
        budget = error_budget(lambda *t, number=number: run(*t)[number], inputs, dtype)
        assert budget < 0.5
        assert_within(result[number], run(*inputs)[number], budget, name)


def test_log_weights_are_not_rounded_to_half_precision():
    # 985 equal keys, one selected: the centroid's log weight log(984) = 6.8916 is between 6.875 and 6.90625
    query, key, value = attention_tensors(heads=1, n_query=3, n_keys=1, dim=8, dtype=torch.bfloat16)
    tensors = query, key.expand(1, 1, 985, 8).contiguous(), value.expand(1, 1, 985, 8).contiguous()
    result, _ = attend(tensors, Selected(KMeans(n_clusters=1), 1, sinks=0))
    # sums of 985 equal bfloat16 numbers in float32: far below
    assert_within(result.lse, prescore.exact_attention(*tensors).lse, 2e-3, "lse")


@each_call
def test_same_seed_same_bits_and_no_global_randomness(name, is_causal):
    tensors = [t.float() for t in TENSORS]
    options = {"config": CONFIGS[name], "is_causal": is_causal, "generator": 11}
    state = torch.random.get_rng_state()
    first = prescore.prescored_attention(*tensors, **options)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(5)  # a moved global generator must not matter
    second = prescore.prescored_attention(*tensors, **options)
    torch.random.set_rng_state(state)
    assert torch.equal(first, second)
    assert first.shape == tensors[0].shape


def test_seeds_and_generators():
    def run(generator):
        return prescore.hyper_attention(*TENSORS, CONFIGS["hyper full"], generator=generator).output

    assert torch.equal(run(None), run(None))
    assert torch.equal(run(3), run(3))
    assert not torch.equal(run(3), run(4))
    generator = torch.Generator().manual_seed(9)
    first, second = run(generator), run(generator)
    assert not torch.equal(first, second)  # it advanced
    assert torch.equal(first, run(torch.Generator().manual_seed(9)))


def test_score_and_select_advance_a_generator_and_agree_with_attention():
    key = TENSORS[1]
    generator = torch.Generator().manual_seed(2)
    first = prescore.score(key, "uniform", generator=generator)
    assert not torch.equal(first, prescore.score(key, "uniform", generator=generator))
    again = prescore.select(key, "uniform", top_k=9, sinks=0, generator=torch.Generator().manual_seed(2))
    assert torch.equal(again.indices, first.topk(9).indices.sort().values)
    _, aux = attend(TENSORS, Selected("uniform", 9, sinks=0), generator=torch.Generator().manual_seed(2))
    assert torch.equal(aux.selection.indices, again.indices)


@each_call
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
        (output, lse), _ = attend(tensors, config, is_causal=is_causal)
        assert output.shape == tensors[0].shape, case
        assert lse.shape == tensors[0].shape[:3], case
        assert torch.isfinite(output).all(), case
        if case == "a single key" or (case == "equal keys" and name != "early"):
            # the early integration's zeroed keys have mass, and values of 0
            assert_within(output, tensors[2].expand_as(output), 1e-12, case)


def test_no_keys_at_all():
    query, key, value = attention_tensors(n_query=3, n_keys=0)
    for config in CONFIGS.values():
        (output, lse), _ = attend((query, key, value), config)
        assert not output.any()
        assert torch.isneginf(lse).all()
    assert prescore.score(key).shape == (1, 1, 0)
    assert prescore.select(key, top_k=3).indices.shape == (1, 1, 0)


@each_call
def test_strides_do_not_matter_and_inputs_are_not_written_to(name, is_causal):
    options = {"config": CONFIGS[name], "is_causal": is_causal}
    mask = torch.arange(45) >= torch.tensor([[5], [0]])
    before = [t.clone() for t in (*TENSORS, mask)]
    prescore.prescored_attention(*TENSORS, key_padding_mask=mask, **options)
    assert all(torch.equal(a, b) for a, b in zip((*TENSORS, mask), before, strict=True))
    expected = prescore.prescored_attention(*TENSORS, **options)
    for layout in (
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: torch.cat((t, t), dim=-1)[..., : t.shape[-1]],
    ):
        assert torch.equal(prescore.prescored_attention(*map(layout, TENSORS), **options), expected)
    expanded = [t[:1].expand(2, -1, -1, -1) for t in TENSORS]
    copied = prescore.prescored_attention(*(t.contiguous() for t in expanded), **options)
    assert torch.equal(prescore.prescored_attention(*expanded, **options), copied)


@pytest.mark.parametrize("is_causal", [False, True])
def test_fallback_is_unfiltered_hyper_attention(is_causal):
    config = Selected.paper(top_k=3, min_fraction=0.99, min_seq_len=8, inner=LSH)
    result, aux = attend(TENSORS, config, is_causal=is_causal, generator=2)
    plain = prescore.hyper_attention(*TENSORS, Hyper(LSH, min_seq_len=8), is_causal=is_causal, generator=2)
    assert_within(result.output, plain.output, 1e-12)
    assert_within(result.lse, plain.lse, 1e-12)
    assert aux.stats["fallbacks"] > 0
    filtered, aux = attend(TENSORS, config.replace(min_fraction=0.05), is_causal=is_causal, generator=2)
    assert aux.stats["fallbacks"] == 0
    assert not torch.allclose(filtered.output, result.output)


@pytest.mark.parametrize("is_causal", [False, True])
def test_selecting_every_key_is_hyper_attention(is_causal):
    options = {"is_causal": is_causal, "generator": 2}
    shared = {"min_seq_len": 8, "leaf_inclusive": True, "sinks": 2}
    hyper = Hyper(LSH, **shared)
    plain = prescore.hyper_attention(*TENSORS, hyper, **options)
    assert torch.equal(prescore.prescored_attention(*TENSORS, hyper, **options), plain.output)
    for scorer, top_k in (("leverage", 1.0), ("kmeans", 45)):
        result, _ = attend(TENSORS, Selected.paper(scorer, top_k, inner=LSH, **shared), **options)
        assert torch.equal(result.output, plain.output)
        assert torch.equal(result.lse, plain.lse)


def test_sinks_and_recent_are_selected_inside_the_budget_and_read_exactly():
    query, key, _ = attention_tensors(batch=2, heads=2, kv_heads=1, n_query=3, n_keys=45, seed=1)
    mask = torch.arange(45) >= torch.tensor([[7], [0]])
    chosen = prescore.select(key, "key-norm", top_k=6, sinks=2, recent=1, key_padding_mask=mask)
    assert chosen.indices.shape == (2, 1, 6)
    assert chosen.indices[:, 0, :2].tolist() == [[7, 8], [0, 1]]
    assert chosen.indices[:, 0, -1].tolist() == [44, 44]
    # every key has a value of its own, so weights can be read off: those positions, and a block of one key
    config = Selected.paper("key-norm", 6, sinks=2, recent=1, inner=Lsh(1, 0), min_seq_len=0)
    value = torch.eye(45, dtype=torch.float64).expand(2, 1, 45, 45)
    (weights, lse), _ = attend((query, key, value), config, mask)
    assert (weights > 0).sum(-1).unique().tolist() == [4]
    assert (weights[0, ..., [7, 8, 44]] > 0).all()
    assert (weights[1, ..., [0, 1, 44]] > 0).all()
    truth = torch.exp(query @ key.transpose(-1, -2) / 2 - lse[..., None])
    assert_within(weights, truth * (weights > 0), 1e-12, "weights")


def test_aux_reports_the_selection_and_stats():
    result, aux = attend(TENSORS, CONFIGS["paper"])
    assert torch.equal(result.output, prescore.prescored_attention(*TENSORS, config=CONFIGS["paper"]))
    assert aux.selection.indices.shape == (2, 2, 9)
    assert (aux.stats["keys_selected"], aux.stats["depth"], aux.stats["fallbacks"]) == (9, 0, 0)
    assert 0 < aux.stats["mass_read"] < 1
    assert {"scoring", "hashing", "attending"} <= set(aux.stats["seconds"])
    _, causal = attend(TENSORS, CONFIGS["paper"], is_causal=True)
    assert causal.stats["depth"] == 3  # blocks of 8, 16 and 32
    assert [len(s.indices[0, 0]) for s in causal.selection] == [8, 8, 8, 9, 9]
    assert attend(TENSORS, CONFIGS["selected"])[1].stats.mass_read == 1.0
    exact = attend(TENSORS, CONFIGS["exact"], is_causal=True)[1].stats
    assert (exact.mass_read, exact.keys_per_query, exact.centroids_per_query) == (1.0, 23.0, 0.0)


def test_scale_is_a_factor_of_the_logits():
    query, key, value = TENSORS
    for config in CONFIGS.values():
        scaled = prescore.prescored_attention(query, key, value, config=config, scale=0.25)
        assert_within(scaled, prescore.prescored_attention(query / 2, key, value, config=config), 1e-12)


def test_no_configuration_is_the_default_and_a_selection_alone_is_read_exactly():
    query, key, value = TENSORS
    default, routed = (
        prescore.prescored_attention(*TENSORS, config, is_causal=True) for config in (None, Routed())
    )
    assert torch.equal(default, routed)
    chosen = prescore.select(key, "key-norm", top_k=7)
    index = chosen.indices[..., None].expand(-1, -1, -1, 4)
    exact = prescore.exact_attention(query, key.gather(2, index), value.gather(2, index))
    assert_within(prescore.prescored_attention(query, key, value, selection=chosen), exact.output, 1e-12)


def test_submodules_are_found_from_the_package():
    assert prescore.testing is not None
    assert issubclass(prescore.errors.Unsupported, ValueError)
    for module in (prescore, prescore.integrations):
        with pytest.raises(AttributeError, match="nothing_here"):
            module.nothing_here  # noqa: B018
