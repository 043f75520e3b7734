"""Wrong calls: the right exception, and a sentence that names the argument and the value that was got."""

import math

import pytest
import torch

import prescore
from prescore import Coupling, PrescoreConfig, Selection
from prescore.testing.inputs import attention_tensors

QUERY, KEY, VALUE = attention_tensors(batch=2, heads=4, kv_heads=2, n_query=5, n_keys=9, dim=4, value_dim=3)
WITH_NAN = KEY.clone()
WITH_NAN[1, 0, 7, 2] = math.nan
WITH_INF = KEY.clone()
WITH_INF[0, 1, 3, 0] = -math.inf
MASK = torch.ones(2, 9, dtype=torch.bool)


def _call(**changes):
    arguments = {"query": QUERY, "key": KEY, "value": VALUE, **changes}
    tensors = [arguments.pop(name) for name in ("query", "key", "value")]
    return tensors, arguments


TENSORS = {
    "query of rank 3": (_call(query=QUERY[0]), ValueError, r"query must have 4 dimensions .* got \(4, 5, 4\)"),
    "key of rank 5": (_call(key=KEY[None]), ValueError, r"key must have 4 dimensions .* got \(1, 2, 2, 9, 4\)"),
    "value is a list": (_call(value=[1.0]), TypeError, "value must be a torch.Tensor, got list"),
    "integer query": (_call(query=QUERY.long()), TypeError, "query must be .* got torch.int64"),
    "complex key": (_call(key=KEY + 0j), TypeError, "key must be .* got torch.complex128"),
    "mixed dtypes": (_call(key=KEY.float()), TypeError, "key must have the query's dtype .* got torch.float32"),
    "value dtype": (
        _call(value=VALUE.half()),
        TypeError,
        "value must have the query's dtype .* got torch.float16",
    ),
    "batch differs": (_call(key=KEY[:1], value=VALUE[:1]), ValueError, "key must have .* batch size 2, got 1"),
    "value batch": (_call(value=VALUE[:1]), ValueError, "value must have the query's batch size 2, got 1"),
    "head dimension": (_call(key=KEY[..., :3]), ValueError, "key must have the query's head dimension 4, got 3"),
    "no head dimension": (_call(query=QUERY[..., :0], key=KEY[..., :0]), ValueError, r"got \(2, 4, 5, 0\)"),
    "value length": (_call(value=VALUE[:, :, :7]), ValueError, r"value must have .* got \(2, 7\)"),
    "value heads": (_call(value=VALUE[:, :1]), ValueError, r"value must have .* got \(1, 9\)"),
    "heads not a multiple": (_call(query=QUERY[:, :3]), ValueError, "multiple of the key's 2 heads, got 3"),
    "no kv heads": (_call(key=KEY[:, :0], value=VALUE[:, :0]), ValueError, "multiple of the key's 0 heads, got 4"),
    "NaN in a real key": (_call(key=WITH_NAN), ValueError, r"key must be finite .* got nan at \(1, 0, 7, 2\)"),
    "inf in a real key": (_call(key=WITH_INF), ValueError, r"key must be finite .* got -inf at \(0, 1, 3, 0\)"),
    "mask of wrong shape": (
        _call(key_padding_mask=MASK[:, :8]),
        ValueError,
        r"key_padding_mask must have shape \(2, 9\) .* got \(2, 8\)",
    ),
    "mask of numbers": (
        _call(key_padding_mask=MASK.float()),
        TypeError,
        "must be bool .*, got torch.float32",
    ),
    "mask is a list": (_call(key_padding_mask=[True]), TypeError, "key_padding_mask must be .* got list"),
    "causal is a string": (_call(is_causal="yes"), TypeError, "is_causal must be True or False, got str 'yes'"),
    "more causal queries than keys": (
        _call(key=KEY[:, :, :4], value=VALUE[:, :, :4], is_causal=True),
        ValueError,
        "query length must be at most the key length 4 .* got 5",
    ),
    "negative scale": (_call(scale=-0.5), ValueError, "scale must be finite and at least 0.0, got -0.5"),
    "infinite scale": (_call(scale=math.inf), ValueError, "scale must be finite .* got inf"),
    "scale is a string": (_call(scale="1"), TypeError, "scale must be a number, got str '1'"),
    "unknown backend": (_call(backend="flash9"), ValueError, "backend must be one of .* got 'flash9'"),
}
OF_PLAN = {
    "config is a dict": (_call(config={"top_k": 3}), TypeError, "config must be .* got dict"),
    "generator is a float": (_call(generator=0.5), TypeError, "generator must be .* got float 0.5"),
    "generator is a bool": (_call(generator=True), TypeError, "generator must be .* got bool True"),
}
CHOSEN = Selection(torch.zeros(2, 2, 3, dtype=torch.int64), torch.ones(2, 2, 3, dtype=torch.bool))
SELECTIONS = {
    "selection is a tensor": (
        torch.zeros(2, 2, 3),
        TypeError,
        "selection must be a prescore.Selection, got Tensor",
    ),
    "selection of other heads": (
        Selection(CHOSEN.indices[:, :1], CHOSEN.valid[:, :1]),
        ValueError,
        r"selection must have .* got \(2, 1, 3\)",
    ),
    "valid of another shape": (
        Selection(CHOSEN.indices, CHOSEN.valid[..., :2]),
        ValueError,
        r"selection must have .* got \(2, 2, 3\) and \(2, 2, 2\)",
    ),
    "index too large": (Selection(CHOSEN.indices + 9, CHOSEN.valid), ValueError, r"indices in 0\.\.8, got 9"),
    "negative index": (Selection(CHOSEN.indices - 1, CHOSEN.valid), ValueError, r"indices in 0\.\.8, got -1"),
}
FIELDS = {
    "method": ("kmeens", ValueError, "method must be one of .* got 'kmeens'"),
    "top_k": (-3, ValueError, "top_k must be .* got -3"),
    "top_k ": (1.5, ValueError, "top_k must be a fraction .* got 1.5"),
    "top_k  ": ("all", TypeError, "top_k must be .* got str 'all'"),
    "top_k   ": (math.nan, ValueError, "top_k must be .* got nan"),
    "rule": ("closest", ValueError, "rule must be one of .* got 'closest'"),
    "n_clusters": (0, ValueError, "n_clusters must be at least 1, got 0"),
    "max_iter": (-1, ValueError, "max_iter must be at least 0, got -1"),
    "max_iter ": (2.0, TypeError, "max_iter must be an int, got float 2.0"),
    "normalize": (1, TypeError, "normalize must be True or False, got int 1"),
    "noise": (-0.1, ValueError, "noise must be finite and at least 0.0, got -0.1"),
    "p": (0.0, ValueError, "p must be finite and above 0.0, got 0.0"),
    "sketch_size": (0, ValueError, "sketch_size must be at least 1, got 0"),
    "seeding": ("farthest", ValueError, "seeding must be one of .* got 'farthest'"),
    "fit_size": (-2, ValueError, "fit_size must be at least 0, got -2"),
    "selector": ("best", ValueError, "selector must be one of .* got 'best'"),
    "sinks": (-4, ValueError, "sinks must be at least 0, got -4"),
    "recent": (True, TypeError, "recent must be an int, got bool True"),
    "min_fraction": (math.inf, ValueError, "min_fraction must be finite .* got inf"),
    "inner": ("dense", ValueError, "inner must be one of .* got 'dense'"),
    "block_size": (-256, ValueError, "block_size must be at least 0, got -256"),
    "sample_size": (2.5, TypeError, "sample_size must be an int, got float 2.5"),
    "n_projections": (0, ValueError, "n_projections must be at least 1, got 0"),
    "n_projections ": (31, ValueError, "n_projections must be at most 30, got 31"),
    "alignment": ("block", ValueError, "alignment must be one of .* got 'block'"),
    "min_seq_len": (-1, ValueError, "min_seq_len must be at least 0, got -1"),
    "leaf_inclusive": ("no", TypeError, "leaf_inclusive must be True or False, got str 'no'"),
    "remainder": ("mean", ValueError, "remainder must be one of .* got 'mean'"),
    "coupling": ("glm2", TypeError, "coupling must be a prescore.Coupling, got str"),
    "rows": (-1, ValueError, "rows must be at least 0, got -1"),
    "leaf_size": (0, ValueError, "leaf_size must be at least 1, got 0"),
    "chunk_size": (0, ValueError, "chunk_size must be at least 1, got 0"),
    "tolerance": (-0.5, ValueError, "tolerance must be finite .* got -0.5"),
    "refresh_every": (0, ValueError, "refresh_every must be at least 1, got 0"),
    "on_unsupported": ("warn", ValueError, "on_unsupported must be one of .* got 'warn'"),
}
FUNCTIONS = (prescore.exact_attention, prescore.hyper_attention, prescore.prescored_attention)


def assert_refused(function, case):
    (tensors, arguments), error, message = case
    before = [t.clone() for t in tensors if isinstance(t, torch.Tensor)]
    state = torch.random.get_rng_state()
    with pytest.raises(error, match=message) as caught:
        function(*tensors, **arguments)
    assert "\n" not in str(caught.value)
    after = [t for t in tensors if isinstance(t, torch.Tensor)]
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(after, before, strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", TENSORS)
def test_wrong_tensors(name, function):
    assert_refused(function, TENSORS[name])


@pytest.mark.parametrize("function", FUNCTIONS[1:], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", OF_PLAN)
def test_wrong_config_or_generator(name, function):
    assert_refused(function, OF_PLAN[name])


@pytest.mark.parametrize("name", SELECTIONS)
def test_wrong_selection(name):
    selection, error, message = SELECTIONS[name]
    assert_refused(prescore.prescored_attention, (_call(selection=selection), error, message))


@pytest.mark.parametrize("name", FIELDS)
def test_wrong_field(name):
    value, error, message = FIELDS[name]
    with pytest.raises(error, match=message):
        PrescoreConfig(**{name.strip(): value})
    with pytest.raises(error, match=message):
        PrescoreConfig().replace(**{name.strip(): value})


@pytest.mark.parametrize(
    ("field", "value"), [("mask", "drop"), ("residual_weight", "n"), ("overlap", "ignore"), ("mask", None)]
)
def test_wrong_coupling(field, value):
    with pytest.raises(ValueError, match=f"coupling.{field} must be one of .* got {value!r}"):
        Coupling(**{field: value})


@pytest.mark.parametrize("function", [prescore.score, prescore.select], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"key": KEY[0]}, ValueError, r"key must have 4 dimensions .* got \(2, 9, 4\)"),
        ({"key": "keys"}, TypeError, "key must be a torch.Tensor, got str"),
        ({"key": KEY.int()}, TypeError, "key must be .* got torch.int32"),
        ({"key": WITH_NAN}, ValueError, "key must be finite .* got nan"),
        ({"key": KEY, "key_padding_mask": MASK[0]}, ValueError, r"key_padding_mask must have .* got \(9,\)"),
        ({"key": KEY, "config": "paper"}, TypeError, "config must be .* got str"),
        ({"key": KEY, "generator": "seed"}, TypeError, "generator must be .* got str 'seed'"),
    ],
)
def test_wrong_keys(function, arguments, error, message):
    arguments = dict(arguments)
    with pytest.raises(error, match=message):
        function(arguments.pop("key"), **arguments)


def test_wrong_merges():
    part = prescore.exact_attention(QUERY, KEY, VALUE)
    with pytest.raises(ValueError, match="at least one Attended, got none"):
        prescore.merge()
    with pytest.raises(TypeError, match="parts must be Attended, got Tensor at 1"):
        prescore.merge(part, part.output)
    with pytest.raises(ValueError, match=r"one shape \(2, 4, 5, 3\), got \(2, 4, 4, 3\) at 1"):
        prescore.merge(part, prescore.Attended(part.output[:, :, :4], part.lse[:, :, :4]))
    with pytest.raises(ValueError, match=r"lse of shape \(2, 4, 5\), got \(2, 4, 4\) at 0"):
        prescore.merge(prescore.Attended(part.output, part.lse[:, :, :4]), part)


def test_wrong_registrations():
    with pytest.raises(TypeError, match="name must be a non-empty str, got ''"):
        prescore.register_scorer("")
    with pytest.raises(ValueError, match="name must be new, got 'kmeans'"):
        prescore.register_scorer("kmeans")(type("Impostor", (prescore.Scorer,), {}))


def test_wrong_dictionaries():
    with pytest.raises(ValueError, match=r"config fields must be among .* got 'topk'"):
        PrescoreConfig.from_dict({"topk": 3})
    config = PrescoreConfig.glm2(top_k=0.25)
    assert PrescoreConfig.from_dict(config.to_dict()) == config


def test_a_generator_does_not_advance_when_the_call_isassert_refused():
    generator = torch.Generator().manual_seed(1)
    state = generator.get_state()
    with pytest.raises(ValueError, match="multiple"):
        prescore.prescored_attention(QUERY[:, :3], KEY, VALUE, generator=generator)
    with pytest.raises(TypeError, match="selection"):
        prescore.prescored_attention(QUERY, KEY, VALUE, generator=generator, selection=3)
    with pytest.raises(ValueError, match="backend"):
        prescore.hyper_attention(QUERY, KEY, VALUE, generator=generator, backend="flash9")
    assert torch.equal(generator.get_state(), state)


def test_padding_may_hold_anything():
    mask = MASK.clone()
    mask[1, 7] = False
    for function in FUNCTIONS:
        result = function(QUERY, WITH_NAN, VALUE, key_padding_mask=mask)
        output = result if isinstance(result, torch.Tensor) else result.output
        assert torch.isfinite(output).all()
