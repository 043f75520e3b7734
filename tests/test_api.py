"""The public functions: dtypes, randomness, degenerate inputs, padding, exact calls, `Aux`, stats and guards."""

import math
import re

import pytest
import torch
from attention_checks import CONFIGS, attend
from oracles.budgets import assert_within, error_budget
from oracles.inputs import attention_tensors
from torch.autograd import forward_ad

import prescore
from prescore import (
    Coupling,
    Exact,
    Hyper,
    KMeans,
    Lsh,
    Routed,
    Selected,
    attention,
    exact_attention,
    prescored_attention,
)
from prescore.errors import Unsupported
from prescore.routed.decode import StepAttention

TENSORS = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=45, seed=1)
causal_or_not = pytest.mark.parametrize("is_causal", [False, True])
each_config = pytest.mark.parametrize("name", CONFIGS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@causal_or_not
@pytest.mark.parametrize("way", ["centroids", "residual"])  # the fuzzer has exact attention
def test_low_precision_is_within_its_budget(way, is_causal, dtype):
    inputs = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=61, dim=16, seed=4, spread=1.0)
    # the selection and the block of a query are fixed, so that only arithmetic differs
    indices = torch.arange(0, 61, 3).expand(2, 2, -1)
    selection = prescore.Selection(indices, torch.ones_like(indices, dtype=torch.bool))

    config, given = {
        "centroids": (Selected(KMeans(n_clusters=1), min_seq_len=8), selection),
        "residual": (Hyper(Lsh(block_size=0, sample_size=16), min_seq_len=8), None),
    }[way]
    run = lambda *tensors: attend(tensors, config, is_causal=is_causal, selection=given)[0]  # noqa: E731

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
    assert_within(result.lse, exact_attention(*tensors).lse, 2e-3, "lse")


def test_seeds_and_generators():
    run = lambda seed: prescore.hyper_attention(*TENSORS, CONFIGS["hyper full"], generator=seed).output  # noqa: E731
    assert torch.equal(run(None), run(None))
    assert not torch.equal(run(3), run(4))
    generator = torch.Generator().manual_seed(9)
    first, second = run(generator), run(generator)
    assert not torch.equal(first, second)  # it advanced
    assert torch.equal(first, run(torch.Generator().manual_seed(9)))
    before = generator.get_state()
    prescored_attention(*TENSORS, Exact(), generator=generator)
    assert not torch.equal(generator.get_state(), before)


def test_score_and_select_advance_a_generator_and_agree():
    key, generator = TENSORS[1], torch.Generator().manual_seed(2)
    first = prescore.score(key, "uniform", generator=generator)
    assert not torch.equal(first, prescore.score(key, "uniform", generator=generator))
    again = prescore.select(key, "uniform", top_k=9, sinks=0, generator=torch.Generator().manual_seed(2))
    assert torch.equal(again.indices, first.topk(9).indices.sort().values)


@each_config
@causal_or_not
def test_degenerate_inputs_work(name, is_causal):
    one = attention_tensors(batch=1, heads=2, kv_heads=1, n_keys=1, seed=3)
    empty = attention_tensors(batch=0, heads=2, kv_heads=1, n_keys=7)
    cases = {
        "a single key": one,
        "an empty batch": empty,
        "equal keys": tuple(t.expand(1, t.shape[1], 40, 4).contiguous() for t in one),
        "no queries": (empty[0].new_zeros(1, 2, 0, 4), *(t.new_zeros(1, 1, 7, 4) for t in empty[1:])),
        "no heads": (TENSORS[0][:, :0], *TENSORS[1:]),
    }
    for case, tensors in cases.items():
        (output, lse), _ = attend(tensors, CONFIGS[name], is_causal=is_causal)
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
    assert prescore.score(key).shape == prescore.select(key, top_k=3).indices.shape == (1, 1, 0)


DIRECT = {
    "exact": (Exact(), False),
    "exact causal": (Exact(), True),
    "selected in one leaf": (Selected.paper("key-norm", 64, min_seq_len=200), True),
    "zeroed in one leaf": (Selected.early("key-norm", 64, min_seq_len=200), True),
    "hyper in one leaf": (Hyper(Lsh(16, 16), min_seq_len=200), True),
    "routed, short": (Routed(), False),
    "routed, short and causal": (Routed(), True),
    "routed, two chunks": (Routed(chunk_size=100, exact_until=0), True),
}


@pytest.mark.parametrize("name", DIRECT)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_call_that_is_exact_runs_no_engine(name, kv_heads, monkeypatch):
    config, is_causal = DIRECT[name]
    inputs = [t.requires_grad_() for t in attention_tensors(heads=2, kv_heads=kv_heads, n_keys=200, dim=8)]
    wanted = exact_attention(*inputs, is_causal=is_causal).output
    wanted_grads = torch.autograd.grad(wanted.square().sum(), inputs)
    for engine in ("attend_parts", "routed.attend_routed", "selected.attend_selected"):
        monkeypatch.setattr(f"prescore.engines.{engine}", lambda *_, **__: pytest.fail("no engine is needed"))
    got = prescored_attention(*inputs, config=config, is_causal=is_causal)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    for grad, right in zip(torch.autograd.grad(got.square().sum(), inputs), wanted_grads, strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-10, atol=1e-12)


def test_no_configuration_is_the_default():
    default, routed = (prescored_attention(*TENSORS, config, is_causal=True) for config in (None, Routed()))
    assert torch.equal(default, routed)


def test_submodules_are_found_from_the_package():
    assert issubclass(prescore.errors.Unsupported, ValueError)
    for module in (prescore, prescore.integrations):
        with pytest.raises(AttributeError, match="nothing_here"):
            module.nothing_here  # noqa: B018


def stats_of(config, tensors, **options):
    return prescored_attention(*tensors, config=config, return_aux=True, **options)[1].stats


@each_config
def test_stats_are_fields_and_a_mapping(name):
    config = CONFIGS[name]
    stats = stats_of(config, TENSORS, is_causal=True)
    assert isinstance(stats, prescore.Stats)
    assert stats.backend == stats["backend"] == ("plain" if name == "routed" else "cpu-flash")
    assert stats.keys_per_query == stats["keys_per_query"] > 0
    assert sum(stats.seconds.values()) > 0
    assert (stats.mass_read is None) == isinstance(config, Routed)
    assert (stats.keys_compared is None) == (not isinstance(config, Routed))
    assert len(stats) == len(list(stats))
    assert f"keys_per_query={stats.keys_per_query!r}" in repr(stats)
    # numbers without a field describe the layout of routed attention
    assert not stats.details or isinstance(config, Routed)
    assert all(stats[name] == value for name, value in stats.details.items())
    with pytest.raises(KeyError, match="nothing"):
        stats["nothing"]


def test_aux_reports_the_selection_and_stats():
    _, aux = attend(TENSORS, CONFIGS["paper"])
    assert aux.selection.indices.shape == (2, 2, 9)
    assert (aux.stats["keys_selected"], aux.stats["depth"], aux.stats["fallbacks"]) == (9, 0, 0)
    assert 0 < aux.stats["mass_read"] < 1
    assert {"scoring", "hashing", "attending"} <= set(aux.stats["seconds"])
    _, causal = attend(TENSORS, CONFIGS["paper"], is_causal=True)
    assert causal.stats["depth"] == 3  # blocks of 8, 16 and 32
    assert [len(s.indices[0, 0]) for s in causal.selection] == [8, 8, 8, 9, 9]
    blocks = [(0, 8), (16, 24), (32, 40), (0, 16), (0, 32)]  # of keys, level by level
    for selection, (first, end) in zip(causal.selection, blocks, strict=True):
        assert ((selection.indices >= first) & (selection.indices < end)).all()
    assert stats_of(CONFIGS["selected"], TENSORS).mass_read == 1.0
    exact = stats_of(Exact(), TENSORS, is_causal=True)
    assert (exact.mass_read, exact.keys_per_query, exact.centroids_per_query) == (1.0, 23.0, 0.0)
    for config in (CONFIGS["paper"].replace(top_k=1.0), CONFIGS["paper"].replace(top_k=100), Exact()):
        _, aux = attend(TENSORS, config)
        assert aux.selection.indices[0, 0].tolist() == list(range(45))
        assert aux.stats["keys_selected"] == 45


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("name", ["uniform", "kmeans"])
def test_the_keys_of_a_causal_selection_are_counted(name, sinks):
    # every key has a value of its own, so a weight that is not 0 is a key that was read
    query, key = torch.randn(2, 1, 1, 256, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    config = Selected(name, 16, min_seq_len=32, remainder="none", sinks=sinks)
    value = torch.eye(256, dtype=torch.float64)[None, None]
    (output, _), aux = attend((query, key, value), config, is_causal=True)
    assert aux.stats.keys_per_query == float((output > 0).sum(-1).double().mean())


def test_keys_and_centroids_are_counted_apart_and_masked_keys_not_at_all():
    tensors = attention_tensors(batch=1, heads=2, kv_heads=1, n_keys=32, seed=1)
    centroids = Selected("key-norm", 6, sinks=2, remainder=KMeans(n_clusters=3), min_seq_len=0)
    stats = stats_of(centroids, tensors)
    assert (stats.keys_per_query, stats.centroids_per_query, stats.keys_selected) == (6, 3, 6)
    # one block of all keys, of which the selected ones are read; no residual
    blocks = centroids.replace(remainder="none", inner=Lsh(64, 0), coupling=Coupling(blocks="all"))
    stats = stats_of(blocks, tensors)
    assert (stats.keys_per_query, stats.centroids_per_query, stats.mass_read) == (6, 0, 1)


def test_padding_is_never_counted():
    tensors = [torch.randn(2, 1, 8, 4) for _ in range(3)]
    mask = torch.arange(8) < torch.tensor([[8], [4]])
    # eight queries see 8 keys, four see 4; causal: 1 to 8, and 1 to 4
    for config, is_causal, keys in ((Exact(), False, 20 / 3), (Exact(), True, 46 / 12), (Routed(), False, None)):
        stats = stats_of(config, tensors, is_causal=is_causal, key_padding_mask=mask)
        assert stats.keys_selected == 6
        assert keys is None or stats.keys_per_query == pytest.approx(keys)


# Autograd and autocast guards: autocast, function transforms, second derivatives, the scale, NaN queries.

GUARDED = ("exact", "default", "routed", "selected", "hyper full")
every_config = pytest.mark.parametrize("config", [CONFIGS[name] for name in GUARDED], ids=GUARDED)


def tensors(dtype=torch.float32, n_keys=40):
    return attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=n_keys, dim=8, dtype=dtype)


@every_config
@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_autocast_casts_the_inputs_and_nothing_inside(config, dtype, lower):
    inputs = [t.requires_grad_() for t in tensors(dtype)]
    kept = dtype if dtype == torch.float64 else lower
    cast = [t.detach().to(kept).requires_grad_() for t in inputs]
    expected = prescored_attention(*cast, config, is_causal=True)
    with torch.autocast("cpu", dtype=lower):
        output = prescored_attention(*inputs, config, is_causal=True)
        query, key, _ = inputs
        like_torch = torch.nn.functional.scaled_dot_product_attention(query, key.repeat(1, 2, 1, 1), query)
    assert output.dtype == expected.dtype == like_torch.dtype == kept
    assert torch.equal(output, expected)
    grads, wanted = (torch.autograd.grad(o.float().sum(), t) for o, t in ((output, inputs), (expected, cast)))
    for ours, theirs in zip(grads, wanted, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs.to(dtype))


def test_autocast_brings_mixed_inputs_to_one_dtype():
    query, key, value = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = prescored_attention(query, key.bfloat16(), value.half(), Routed())
        attended = exact_attention(query, key.bfloat16(), value.half())
    assert output.dtype == attended.output.dtype == torch.bfloat16


@pytest.mark.parametrize("scorer", prescore.list_scorers())
def test_autocast_changes_no_choice(scorer):
    key = tensors()[1]
    scores, chosen = prescore.score(key, scorer), prescore.select(key, scorer, top_k=5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(prescore.score(key, scorer), scores)
        assert torch.equal(prescore.select(key, scorer, top_k=5).indices, chosen.indices)


@every_config
def test_function_transforms_and_tangents_are_refused(config):
    query, key, value = tensors(n_keys=16)

    def attend(query):
        return prescored_attention(query, key[: len(query)], value[: len(query)], config)

    for transform in (
        lambda: torch.func.grad(lambda q: attend(q).sum())(query),
        lambda: torch.func.vmap(lambda q: attend(q[None]))(query),
        lambda: torch.func.jvp(attend, (query,), (query,)),
        lambda: torch.func.jacrev(attend)(query),
    ):
        with pytest.raises(Unsupported, match=r"attention cannot run: torch\.func transforms"):
            transform()
    plain = attend(query)
    with forward_ad.dual_level():
        assert torch.equal(attend(query), plain)  # no input has a tangent
        dual = forward_ad.make_dual(key, torch.ones_like(key))
        with pytest.raises(Unsupported, match="forward-mode derivatives are not defined"):
            prescored_attention(query, dual, value, config)


@every_config
@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_a_second_derivative_is_refused_and_a_first_one_in_its_graph_is_right(config, place):
    inputs = list(tensors(torch.float64))
    leaf = inputs[place].requires_grad_()
    output = prescored_attention(*inputs, config, is_causal=True)
    (expected,) = torch.autograd.grad(output.square().sum(), leaf, retain_graph=True)
    (first,) = torch.autograd.grad(output.square().sum(), leaf, create_graph=True)
    assert_within(first, expected, 1e-12, "first derivative")
    with pytest.raises(Unsupported, match="second derivatives are not defined"):
        torch.autograd.grad(first.square().sum(), leaf)


@every_config
@causal_or_not
def test_the_scale_is_a_factor_of_the_queries(config, is_causal):
    query, key, value = tensors(torch.float64)
    run = lambda q, scale: prescored_attention(q, key, value, config, scale=scale, is_causal=is_causal)  # noqa: E731
    for scale, other, positive in ((-0.4, -query, 0.4), (0, query * 0, 1.0), (0.25, query / 2, 0.5)):
        assert torch.equal(run(query, scale), run(other, positive))


@every_config
def test_a_nan_query_spoils_its_row_alone(config):
    query, key, value = tensors()
    clean = prescored_attention(query, key, value, config, is_causal=True)
    query[1, 2, 17] = math.nan
    output = prescored_attention(query, key, value, config, is_causal=True)
    spoilt = torch.isnan(output).any(-1)
    assert spoilt.nonzero().tolist() == [[1, 2, 17]]
    assert torch.equal(output[~spoilt], clean[~spoilt])


@pytest.mark.parametrize("name", CONFIGS)
def test_efficient_zero_tensors_are_read_as_zeros(name):
    """They have a shape and no memory, which C would read."""
    zeros, shape = torch.zeros(1, 2, 40, 8), (1, 2, 40, 8)
    other = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    config = Routed(exact_until=0, chunk_size=8, cluster_size=4) if name == "routed" else CONFIGS[name]
    for place in range(3):
        given, wanted = [
            [other] * place + [each] + [other] * (2 - place) for each in (torch._efficientzerotensor(shape), zeros)
        ]
        found, expected = (prescore.prescored_attention(*t, config, is_causal=True) for t in (given, wanted))
        assert torch.equal(found, expected)


def test_efficient_zero_tensors_are_read_by_key_lists():
    zeros, other = torch._efficientzerotensor((1, 2, 40, 16)), torch.randn(1, 2, 40, 16)
    every, first = torch.arange(40).expand(1, 2, 40, 40), torch.zeros(1, 2, 40, 1, dtype=torch.int64)
    for given in ((zeros, other, other), (other, zeros, other), (other, other, zeros)):
        wanted = prescore.exact_attention(*(tensor.clone() for tensor in given))
        torch.testing.assert_close(prescore.attend_keys(*given, every), wanted)
    no_memory = torch._efficientzerotensor(tuple(first.shape), dtype=torch.int64)
    wanted = prescore.attend_keys(other, other, other, first)
    assert torch.equal(prescore.attend_keys(other, other, other, no_memory).output, wanted.output)


@pytest.mark.parametrize("scale", [1e-50, -1e-46])
def test_a_scale_that_float32_rounds_to_zero_counts_as_zero(scale):
    """Operators would multiply the -inf of a mask with it."""
    query, key, value = attention_tensors(n_keys=40, dim=16, dtype=torch.float32)
    for config in (prescore.Exact(), prescore.Selected("key-norm", top_k=5, min_seq_len=8), Routed(exact_until=0)):
        found, wanted = (
            prescore.prescored_attention(query, key, value, config, is_causal=True, scale=some)
            for some in (scale, 0.0)
        )
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_decode_steps_do_not_depend_on_the_defaults_of_torch(default):
    """Native code writes float32 into buffers, which the default dtype would make too small."""
    config = Routed(min_weight=1 / 16, cluster_size=16, chunk_size=32, sinks=3, exact_until=0)
    query, key, value = attention_tensors(n_keys=120, dim=16, dtype=torch.float32)

    def steps():
        index = StepAttention(config, scale=0.3)
        return [index.attend(query[:, :, n - 1 : n], key[:, :, :n], value[:, :, :n]) for n in range(90, 121)]

    expected = steps()
    try:
        torch.set_default_dtype(default)
        with torch.device("meta"):
            found = steps()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(
        torch.equal(*both) for pair in zip(found, expected, strict=True) for both in zip(*pair, strict=True)
    )


def test_a_long_call_that_gains_nothing_is_logged_once(caplog):
    attention._log_once.cache_clear()
    query, key, value = attention_tensors(heads=1, n_keys=2100, dim=4, dtype=torch.float64)
    for n_keys in (100, 2100, 2100):
        prescored_attention(query[:, :, :n_keys], key[:, :, :n_keys], value[:, :, :n_keys], is_causal=True)
    prescored_attention(query, key, value, Exact(), is_causal=True)
    (record,) = caplog.records
    assert record.name == "prescore"
    assert re.match(r"a long call of Routed runs exactly, without a gain: native code: .", record.getMessage())
