"""Wrong calls: the right exception, and a sentence that names the argument and the value that was got."""

import math

import pytest
import torch
from oracles.inputs import attention_tensors

import prescore
from prescore import (
    Companions,
    Coupling,
    Exact,
    GaussianKMeans,
    Hyper,
    KeyNorm,
    KMeans,
    Leverage,
    Lsh,
    Minkowski,
    Routed,
    Selected,
    Selection,
    config_from_dict,
)
from prescore.config import check_config

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
    "infinite scale": (_call(scale=math.inf), ValueError, "scale must be finite, got inf"),
    "scale that no float holds": (
        _call(scale=-(10**400)),
        ValueError,
        r"scale must be finite, got -0x1b4.*\.\.\.",
    ),
    "NaN in a real value": (
        _call(value=VALUE.masked_fill(VALUE[0, 1, 2, 1] == VALUE, math.nan)),
        ValueError,
        r"value must be finite .* got nan at \(0, 1, 2, 1\)",
    ),
    "inf in a real value": (
        _call(value=VALUE.masked_fill(VALUE[1, 0, 8, 0] == VALUE, math.inf)),
        ValueError,
        r"value must be finite .* got inf at \(1, 0, 8, 0\)",
    ),
    "scale is a string": (_call(scale="1"), TypeError, "scale must be a number, got str '1'"),
    "unknown backend": (_call(backend="flash9"), ValueError, "backend must be one of .* got 'flash9'"),
}
OF_PLAN = {
    "config is a dict": (_call(config={"top_k": 3}), TypeError, "config must be .* got dict"),
    "config is a name": (_call(config="paper"), TypeError, "config must be .* got str"),
    "config is a class": (_call(config=Selected), TypeError, "config must be .* got (type|ABCMeta)"),
    "config is a part of one": (_call(config=Lsh()), TypeError, "config must be .* got Lsh"),
    "config is a scorer": (_call(config=KMeans()), TypeError, "config must be .* got KMeans"),
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
    "no tensors": (Selection(None, None), TypeError, "selection.indices must be a torch.Tensor, got NoneType"),
    "index too large": (Selection(CHOSEN.indices + 9, CHOSEN.valid), ValueError, r"indices in 0\.\.8, got 9"),
    "negative index": (Selection(CHOSEN.indices - 1, CHOSEN.valid), ValueError, r"indices in 0\.\.8, got -1"),
}
FIELDS = [
    (Selected, "scorer", "kmeens", ValueError, "scorer must be one of .* got 'kmeens'"),
    (Selected, "scorer", ["kmeans"], TypeError, r"scorer must be a name or .* got list \['kmeans'\]"),
    (Selected, "scorer", KMeans, TypeError, "scorer must be a name or a prescore.Scorer object, got ABCMeta"),
    (Selected, "top_k", None, TypeError, "top_k must be an int or a float, got NoneType None"),
    (Selected, "top_k", 0, ValueError, "top_k must be a count of at least 1, got 0"),
    (Selected, "top_k", -3, ValueError, "top_k must be .* got -3"),
    (Selected, "top_k", 1.5, ValueError, r"top_k must be a fraction .* got 1\.5"),
    (Selected, "top_k", 0.0, ValueError, r"top_k must be a fraction .* got 0\.0"),
    (Selected, "top_k", "all", TypeError, "top_k must be .* got str 'all'"),
    (Selected, "top_k", True, TypeError, "top_k must be .* got bool True"),
    (Selected, "top_k", math.nan, ValueError, "top_k must be .* got nan"),
    (Selected, "top_k", 2**70, ValueError, f"top_k must be a count of at most {2**31 - 1}, got {2**70}"),
    (Selected, "sinks", 2**70, ValueError, f"sinks must be at most {2**31 - 1}, got {2**70}"),
    (KMeans, "n_clusters", 2**40, ValueError, f"n_clusters must be at most {2**31 - 1}, got {2**40}"),
    (KMeans, "noise", 10**400, ValueError, r"noise must be finite and at least 0\.0, got 0x1b4.*\.\.\."),
    (Routed, "leaf_size", 2**64, ValueError, f"leaf_size must be at most {2**31 - 1}, got {2**64}"),
    (Lsh, "sample_size", 10**400, ValueError, r"sample_size must be at most 2147483647, got 0x1b4.*\.\.\."),
    (Selected, "selector", "best", ValueError, "selector must be one of .* got 'best'"),
    (Selected, "sinks", -4, ValueError, "sinks must be at least 0, got -4"),
    (Selected, "recent", True, TypeError, "recent must be an int, got bool True"),
    (Selected, "min_fraction", math.inf, ValueError, "min_fraction must be finite .* got inf"),
    (Selected, "min_fraction", 1.5, ValueError, r"min_fraction must be at most 1\.0, got 1\.5"),
    (Selected, "remainder", "mean", ValueError, "remainder must be one of .* got 'mean'"),
    (Selected, "remainder", KeyNorm(), ValueError, r"remainder must be one of .* got KeyNorm\(\)"),
    (Selected, "remainder", KMeans(rule="farthest"), ValueError, "remainder.rule must be .* got 'farthest'"),
    (
        Selected,
        "inner",
        "exact",
        TypeError,
        "inner must be a prescore.Exact or prescore.Lsh object, got str 'exact'",
    ),
    (Selected, "inner", "auto", TypeError, "inner must be .* got str 'auto'"),
    (Selected, "inner", Exact, TypeError, "inner must be .* got type"),
    (Selected, "inner", Hyper(), TypeError, "inner must be .* got Hyper"),
    (Selected, "min_seq_len", -1, ValueError, "min_seq_len must be at least 0, got -1"),
    (Selected, "leaf_inclusive", "no", TypeError, "leaf_inclusive must be True or False, got str 'no'"),
    (Selected, "leaf_inclusive", True, ValueError, r"leaf_inclusive must be False with inner=Exact\(\), got True"),
    (Selected, "coupling", "early", TypeError, "coupling must be a prescore.Coupling object, got str 'early'"),
    (
        Selected,
        "coupling",
        Coupling(residual_weight="all"),
        ValueError,
        r"coupling.residual_weight must be 'selected' with inner=Exact\(\), got 'all'",
    ),
    (
        Selected,
        "coupling",
        Coupling(overlap="count"),
        ValueError,
        r"coupling.overlap must be 'exclude' with inner=Exact\(\), got 'count'",
    ),
    (Selected, "coupling", Coupling("zero"), ValueError, "remainder must be \"none\" .* got 'centroids'"),
    (Hyper, "lsh", Exact(), TypeError, "lsh must be a prescore.Lsh object, got Exact"),
    (Hyper, "lsh", None, TypeError, "lsh must be a prescore.Lsh object, got NoneType None"),
    (Hyper, "sinks", 1.0, TypeError, r"sinks must be an int, got float 1\.0"),
    (Hyper, "min_seq_len", -1, ValueError, "min_seq_len must be at least 0, got -1"),
    (Hyper, "leaf_inclusive", 1, TypeError, "leaf_inclusive must be True or False, got int 1"),
    (Lsh, "block_size", -256, ValueError, "block_size must be at least 0, got -256"),
    (Lsh, "sample_size", 2.5, TypeError, r"sample_size must be an int, got float 2\.5"),
    (Lsh, "n_projections", 0, ValueError, "n_projections must be at least 1, got 0"),
    (Lsh, "n_projections", 31, ValueError, "n_projections must be at most 30, got 31"),
    (Lsh, "alignment", "block", ValueError, "alignment must be one of .* got 'block'"),
    (Coupling, "mask", "drop", ValueError, "coupling.mask must be one of .* got 'drop'"),
    (Coupling, "mask", None, ValueError, "coupling.mask must be one of .* got None"),
    (Coupling, "residual_weight", "n", ValueError, "coupling.residual_weight must be one of .* got 'n'"),
    (Coupling, "overlap", "ignore", ValueError, "coupling.overlap must be one of .* got 'ignore'"),
    (Routed, "rows", -1, ValueError, "rows must be at least 0, got -1"),
    (Routed, "leaf_size", 0, ValueError, "leaf_size must be at least 1, got 0"),
    (Routed, "chunk_size", 0, ValueError, "chunk_size must be at least 1, got 0"),
    (Routed, "sinks", -1, ValueError, "sinks must be at least 0, got -1"),
    (Routed, "exact_until", 0.5, TypeError, r"exact_until must be an int, got float 0\.5"),
    (Routed, "tolerance", -0.5, ValueError, r"tolerance must be finite .* got -0\.5"),
    (Routed, "tolerance", 5.0, ValueError, r"tolerance must be at most 2\.0, got 5\.0"),
    (Routed, "confidence", 0.9, ValueError, r"confidence must be None without a tolerance, got 0\.9"),
    (KMeans, "rule", "closest", ValueError, "rule must be one of .* got 'closest'"),
    (KMeans, "n_clusters", 0, ValueError, "n_clusters must be at least 1, got 0"),
    (KMeans, "max_iter", -1, ValueError, "max_iter must be at least 0, got -1"),
    (KMeans, "max_iter", 2.0, TypeError, r"max_iter must be an int, got float 2\.0"),
    (KMeans, "normalize", 1, TypeError, "normalize must be True or False, got int 1"),
    (KMeans, "noise", -0.1, ValueError, r"noise must be finite and at least 0\.0, got -0\.1"),
    (KMeans, "seeding", "farthest", ValueError, "seeding must be one of .* got 'farthest'"),
    (KMeans, "fit_size", -2, ValueError, "fit_size must be at least 0, got -2"),
    (Minkowski, "p", 0.0, ValueError, r"p must be finite and above 0\.0, got 0\.0"),
    (GaussianKMeans, "n_features", 1, ValueError, "n_features must be at least 2, got 1"),
    (Leverage, "sketch_size", 0, ValueError, "sketch_size must be at least 1, got 0"),
    (Leverage, "normalize", None, TypeError, "normalize must be True or False, got NoneType None"),
    (Leverage, "noise", math.nan, ValueError, "noise must be finite .* got nan"),
    (Companions, "n_tables", 0, ValueError, "n_tables must be at least 1, got 0"),
    (Companions, "window", 1, ValueError, "window must be at least 2, got 1"),
]
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


@pytest.mark.parametrize("config", [Routed(), Hyper(), Exact()], ids=lambda c: type(c).__name__)
def test_a_selection_needs_a_configuration_that_selects(config):
    message = f"selection must come with a Selected configuration, got {type(config).__name__}"
    assert_refused(prescore.prescored_attention, (_call(config=config, selection=CHOSEN), ValueError, message))


@pytest.mark.parametrize("config", [Routed(), Selected(), Exact()], ids=lambda c: type(c).__name__)
def test_hyper_attention_wants_a_hyper(config):
    message = f"config must be a prescore.Hyper object, got {type(config).__name__}"
    assert_refused(prescore.hyper_attention, (_call(config=config), TypeError, message))


def test_what_a_configuration_may_be():
    message = "layer 3 must be a prescore.Routed, Selected, Hyper or Exact, or None, got dict"
    with pytest.raises(TypeError, match=message):
        check_config({"type": "Routed"}, "layer 3")
    assert check_config(None) == Routed()
    assert check_config(Exact()) == Exact()


@pytest.mark.parametrize(
    ("kind", "name", "value", "error", "message"), FIELDS, ids=[f"{c[0].__name__}.{c[1]}={c[2]}" for c in FIELDS]
)
def test_wrong_field(kind, name, value, error, message):
    with pytest.raises(error, match=message) as caught:
        kind(**{name: value})
    assert "\n" not in str(caught.value)
    if hasattr(kind, "replace"):
        with pytest.raises(error, match=message):
            kind().replace(**{name: value})


def test_no_key_read_at_all_is_refused():
    with pytest.raises(ValueError, match="block_size or sample_size must be at least 1, got 0 and 0"):
        Lsh(block_size=0, sample_size=0)


@pytest.mark.parametrize("function", [prescore.score, prescore.select], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"key": KEY[0]}, ValueError, r"key must have 4 dimensions .* got \(2, 9, 4\)"),
        ({"key": "keys"}, TypeError, "key must be a torch.Tensor, got str"),
        ({"key": KEY.int()}, TypeError, "key must be .* got torch.int32"),
        ({"key": WITH_NAN}, ValueError, "key must be finite .* got nan"),
        ({"key": KEY, "key_padding_mask": MASK[0]}, ValueError, r"key_padding_mask must have .* got \(9,\)"),
        ({"key": KEY, "scorer": "paper"}, ValueError, "scorer must be one of .* got 'paper'"),
        ({"key": KEY, "scorer": Selected()}, TypeError, "scorer must be a name or .* got Selected"),
        ({"key": KEY, "generator": "seed"}, TypeError, "generator must be .* got str 'seed'"),
    ],
)
def test_wrong_keys(function, arguments, error, message):
    arguments = dict(arguments) if function is prescore.score else {"top_k": 3, **arguments}
    with pytest.raises(error, match=message):
        function(arguments.pop("key"), **arguments)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("top_k", 0, ValueError, "top_k must be a count of at least 1, got 0"),
        ("top_k", None, TypeError, "top_k must be .* got NoneType None"),
        ("sinks", -1, ValueError, "sinks must be at least 0, got -1"),
        ("recent", 1.0, TypeError, r"recent must be an int, got float 1\.0"),
        ("selector", "best", ValueError, "selector must be one of .* got 'best'"),
        ("min_fraction", -0.5, ValueError, r"min_fraction must be .* got -0\.5"),
    ],
)
def test_wrong_options_of_select(name, value, error, message):
    with pytest.raises(error, match=message):
        prescore.select(KEY, **{"top_k": 3, name: value})


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
    with pytest.raises(TypeError, match=r"scorer must be a class derived from prescore.Scorer, got <function"):
        prescore.register_scorer("a-function")(lambda keys: keys)
    assert "a-function" not in prescore.list_scorers()


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (None, TypeError, "config must be a mapping, got NoneType"),
        ({}, ValueError, "config type must be one of 'Routed', .* got None"),
        ({"type": "Lsh"}, ValueError, "config type must be one of .* got 'Lsh'"),
        ({"type": "PrescoreConfig"}, ValueError, "config type must be one of .* got 'PrescoreConfig'"),
        ({"type": "Selected", "topk": 3}, ValueError, r"Selected must .* got 'topk' \(did you mean 'top_k'\?\)"),
        ({"type": "Routed", "row": 3}, ValueError, r"Routed must .* got 'row' \(did you mean 'rows'\?\)"),
        ({"type": "Exact", "rows": 3}, ValueError, "Exact must have fields among none, got 'rows'"),
        (
            {"type": "Hyper", "lsh": {"type": "Lsh", "block": 3}},
            ValueError,
            r"Lsh must .* got 'block' \(did you mean 'block_size'\?\)",
        ),
        ({"type": "Hyper", "lsh": {"block_size": 3}}, ValueError, "lsh type must be one of .* got None"),
        ({"type": "Selected", "scorer": {"name": "kmean"}}, ValueError, "scorer must be one of .* got 'kmean'"),
        ({"type": "Selected", "scorer": {}}, ValueError, 'a scorer must have a "name"'),
        (
            {"type": "Selected", "scorer": {"name": "kmeans", "clusters": 3}},
            ValueError,
            r"KMeans must .* got 'clusters' \(did you mean 'n_clusters'\?\)",
        ),
        (
            {"type": "Selected", "coupling": {"type": "Coupling", "foo": 1}},
            ValueError,
            "Coupling must .* got 'foo'",
        ),
        ({"type": "Selected", "coupling": {"type": "Lsh"}}, ValueError, "coupling type must be .* got 'Lsh'"),
        ({"type": "Selected", "top_k": {"type": "Lsh"}}, TypeError, "top_k must be .* got dict"),
        ({"type": "Selected", "scorer": {"type": "KMeans"}}, ValueError, 'a scorer must have a "name"'),
        ({"type": "Selected", "inner": {"type": "Coupling"}}, ValueError, "'Exact', 'Lsh', got 'Coupling'"),
    ],
    ids=str,
)
def test_wrong_dictionaries(values, error, message):
    with pytest.raises(error, match=message):
        config_from_dict(values)


@pytest.mark.parametrize("config", [Routed(), Selected(), Hyper(), Exact(), Lsh(), Coupling()], ids=str)
def test_replacing_an_unknown_field(config):
    kind = type(config).__name__
    with pytest.raises(ValueError, match=f"{kind} must have fields among .* got 'nothing_here'"):
        config.replace(nothing_here=1)


def test_a_generator_does_not_advance_when_the_call_is_refused():
    generator = torch.Generator().manual_seed(1)
    state = generator.get_state()
    with pytest.raises(ValueError, match="multiple"):
        prescore.prescored_attention(QUERY[:, :3], KEY, VALUE, generator=generator)
    with pytest.raises(TypeError, match="selection"):
        prescore.prescored_attention(QUERY, KEY, VALUE, generator=generator, selection=3)
    with pytest.raises(ValueError, match="selection must come with a Selected"):
        prescore.prescored_attention(QUERY, KEY, VALUE, Routed(), generator=generator, selection=CHOSEN)
    with pytest.raises(ValueError, match="backend"):
        prescore.hyper_attention(QUERY, KEY, VALUE, generator=generator, backend="flash9")
    assert torch.equal(generator.get_state(), state)


WITHOUT_NUMBERS = {
    "meta": (lambda t: t.to("meta"), "query must be on a device that holds numbers, got meta"),
    "sparse": (lambda t: t.to_sparse(), "query must be a dense tensor, got torch.sparse_coo"),
    "nested": (
        lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged),
        "query must be a dense tensor, got a nested tensor",
    ),
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", WITHOUT_NUMBERS)
def test_tensors_that_are_not_dense_numbers(name, function):
    turn, message = WITHOUT_NUMBERS[name]
    with pytest.raises(ValueError, match=message):
        function(turn(QUERY), turn(KEY), turn(VALUE))


def test_padding_may_hold_anything():
    mask = MASK.clone()
    mask[1, 7] = False
    for function in FUNCTIONS:
        result = function(
            QUERY, WITH_NAN, VALUE.masked_fill(~mask[:, None, :, None], math.nan), key_padding_mask=mask
        )
        output = result if isinstance(result, torch.Tensor) else result.output
        assert torch.isfinite(output).all()
