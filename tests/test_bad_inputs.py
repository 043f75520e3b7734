"""Wrong calls: the right exception, and one sentence that names the argument and the value got."""

import math
import re

import pytest
import torch
from oracles.inputs import attention_tensors
from torch._subclasses.fake_tensor import FakeTensorMode

import prescore
from prescore import Coupling, Exact, Hyper, KMeans, Lsh, Routed, Selected, Selection, config_from_dict
from prescore.config import check_config

QUERY, KEY, VALUE = attention_tensors(batch=2, heads=4, kv_heads=2, n_query=5, n_keys=9, dim=4, value_dim=3)
MASK = torch.ones(2, 9, dtype=torch.bool)
CHOSEN = Selection(torch.zeros(2, 2, 3, dtype=torch.int64), torch.ones(2, 2, 3, dtype=torch.bool))
FUNCTIONS = (prescore.exact_attention, prescore.hyper_attention, prescore.prescored_attention)
MOST = 2**31 - 1


def spoilt(tensor, place, number):
    changed = tensor.clone()
    changed[place] = number
    return changed


FEW = {"key": KEY[:, :, :4], "value": VALUE[:, :, :4]}
META = {"query": QUERY.to("meta"), "key": KEY.to("meta"), "value": VALUE.to("meta")}
NESTED = torch.nested.nested_tensor(list(QUERY), layout=torch.jagged)
HOLLOW = {
    "a dense tensor, got a nested tensor": lambda tensor: torch.nested.nested_tensor(list(tensor)),
    "a dense tensor, got torch.sparse_coo": torch.Tensor.to_sparse,
    "a dense tensor, got torch.sparse_csr": lambda tensor: tensor.flatten(0, -2).to_sparse_csr(),
    "on a device that holds numbers, got meta": lambda tensor: tensor.to("meta"),
    "numbers, got a fake tensor": FakeTensorMode().from_tensor,
}
"""Tensors that attention cannot read, and what is said of them."""
TENSORS = [
    ({"query": QUERY[0]}, ValueError, r"query must have 4 dimensions .* got \(4, 5, 4\)"),
    ({"key": KEY[None]}, ValueError, r"key must have 4 dimensions .* got \(1, 2, 2, 9, 4\)"),
    ({"value": [1.0]}, TypeError, "value must be a torch.Tensor, got list"),
    ({"query": QUERY.long()}, TypeError, "query must be .* got torch.int64"),
    ({"key": KEY + 0j}, TypeError, "key must be .* got torch.complex128"),
    ({"key": KEY.float()}, TypeError, "key must have the query's dtype .* got torch.float32"),
    ({"value": VALUE.half()}, TypeError, "value must have the query's dtype .* got torch.float16"),
    ({"key": KEY[:1], "value": VALUE[:1]}, ValueError, "key must have .* batch size 2, got 1"),
    ({"value": VALUE[:1]}, ValueError, "value must have the query's batch size 2, got 1"),
    ({"key": KEY[..., :3]}, ValueError, "key must have the query's head dimension 4, got 3"),
    ({"query": QUERY[..., :0], "key": KEY[..., :0]}, ValueError, r"got \(2, 4, 5, 0\)"),
    ({"value": VALUE[:, :, :7]}, ValueError, r"value must have .* got \(2, 7\)"),
    ({"value": VALUE[:, :1]}, ValueError, r"value must have .* got \(1, 9\)"),
    ({"query": QUERY[:, :3]}, ValueError, "multiple of the key's 2 heads, got 3"),
    ({"key": KEY[:, :0], "value": VALUE[:, :0]}, ValueError, "multiple of the key's 0 heads, got 4"),
    ({"key": spoilt(KEY, (1, 0, 7, 2), math.nan)}, ValueError, r"key must be finite .* got nan at \(1, 0, 7, 2\)"),
    ({"key": spoilt(KEY, (0, 1, 3, 0), -math.inf)}, ValueError, r"key must be .* got -inf at \(0, 1, 3, 0\)"),
    ({"value": spoilt(VALUE, (0, 1, 2, 1), math.nan)}, ValueError, r"value must be .* got nan at \(0, 1, 2, 1\)"),
    ({"value": spoilt(VALUE, (1, 0, 8, 0), math.inf)}, ValueError, r"value must be .* got inf at \(1, 0, 8, 0\)"),
    ({"key_padding_mask": MASK[:, :8]}, ValueError, r"key_padding_mask must have shape \(2, 9\) .* got \(2, 8\)"),
    ({"key_padding_mask": MASK.float()}, TypeError, "key_padding_mask must be bool .*, got torch.float32"),
    ({"key_padding_mask": [True]}, TypeError, "key_padding_mask must be .* got list"),
    ({"is_causal": "yes"}, TypeError, "is_causal must be True or False, got str 'yes'"),
    ({**FEW, "is_causal": True}, ValueError, "query length must be at most the key length 4 .* got 5"),
    ({"scale": math.inf}, ValueError, "scale must be finite, got inf"),
    ({"scale": -(10**400)}, ValueError, r"scale must be finite, got -0x1b4.*\.\.\."),
    ({"scale": "1"}, TypeError, "scale must be a number, got str '1'"),
    (
        {"backend": QUERY.numpy()},
        ValueError,
        r"backend must be one of 'auto', .*, got \(2, 4, 5, 4\) float64",
    ),
    (
        {"backend": "flash9"},
        ValueError,
        "backend must be one of 'auto', 'native', 'triton', 'plain', 'cpu-flash', 'cuda-efficient', got 'flash9'",
    ),
    (META, ValueError, "query must be on a device that holds numbers, got meta"),
    ({"query": QUERY.to_sparse()}, ValueError, "query must be a dense tensor, got torch.sparse_coo"),
    ({"query": NESTED}, ValueError, "query must be a dense tensor, got a nested tensor"),
    *(({"value": make(VALUE)}, ValueError, f"value must .*{rule}") for rule, make in HOLLOW.items()),
    *(({"key_padding_mask": make(MASK)}, ValueError, f"mask must .*{rule}") for rule, make in HOLLOW.items()),
]
"""Refused by all three functions."""
RANDOM = [
    ({"generator": 0.5}, TypeError, "generator must be .* got float 0.5"),
    ({"generator": True}, TypeError, "generator must be .* got bool True"),
    ({"config": {"top_k": 3}}, TypeError, "config must be .* got dict"),
    ({"config": Selected}, TypeError, "config must be .* got (the type Selected: write Selected|type|ABCMeta)"),
]
"""Refused by those that take a configuration."""
SELECTIONS = [
    (torch.zeros(2, 2, 3), TypeError, "selection must be a prescore.Selection, got Tensor"),
    (Selection(CHOSEN.indices[:, :1], CHOSEN.valid[:, :1]), ValueError, r"selection must have .* got \(2, 1, 3\)"),
    (Selection(CHOSEN.indices, CHOSEN.valid[..., :2]), ValueError, r"got \(2, 2, 3\) and \(2, 2, 2\)"),
    (Selection(None, None), TypeError, "selection.indices must be a torch.Tensor, got NoneType"),
    (Selection(CHOSEN.indices + 9, CHOSEN.valid), ValueError, r"indices in 0\.\.8, got 9"),
    (Selection(CHOSEN.indices - 1, CHOSEN.valid), ValueError, r"indices in 0\.\.8, got -1"),
    *((Selection(make(CHOSEN.indices), CHOSEN.valid), ValueError, rule) for rule, make in HOLLOW.items()),
    *((Selection(CHOSEN.indices, make(CHOSEN.valid)), ValueError, rule) for rule, make in HOLLOW.items()),
]
UNSELECTED = (Routed(), Hyper(), Exact())
NOT_SELECTED = (ValueError, "selection must come with a Selected configuration, got (Routed|Hyper|Exact)")
NOT_HYPER = (TypeError, "config must be a prescore.Hyper object, got (Routed|Selected|Exact)")
CALLS = [
    *((function, *row) for row in TENSORS for function in FUNCTIONS),
    *((function, *row) for row in RANDOM for function in FUNCTIONS[1:]),
    *((prescore.prescored_attention, {"selection": chosen}, *rest) for chosen, *rest in SELECTIONS),
    *((prescore.prescored_attention, {"config": c, "selection": CHOSEN}, *NOT_SELECTED) for c in UNSELECTED),
    *((prescore.hyper_attention, {"config": c}, *NOT_HYPER) for c in (Routed(), Selected(), Exact())),
]
SDPA = [
    ({"attn_mask": MASK}, TypeError, r"takes no attn_mask: pass is_causal=True .* got attn_mask \(2, 9\)"),
    ({"dropout": 0.5}, TypeError, r"got an unexpected argument 'dropout'"),
    ({"causal": True}, TypeError, r"got an unexpected argument 'causal' \(did you mean 'is_causal'\?\)"),
]
CALLS += [(function, *row) for row in SDPA for function in (FUNCTIONS[0], FUNCTIONS[2])]
SWAPPED = r"inputs are \[batch, heads, sequence, dim\]; transpose\(1, 2\) swaps heads and sequence"
BY_TOKEN = {"query": torch.randn(1, 12, 8, 4), "key": torch.randn(1, 12, 4, 4), "value": torch.randn(1, 12, 4, 4)}
CALLS += [
    (function, {**BY_TOKEN, "is_causal": True}, ValueError, f"query length must be .* got 8: {SWAPPED}")
    for function in FUNCTIONS
]
BOTH = {"remainder": "none", "coupling": Coupling("zero", blocks="all"), "inner": Lsh()}
BY_SCORE = {"top_k": None, "min_score": 0.5}
FIELDS = [
    (Selected, {"scorer": ["kmeans"]}, TypeError, r"scorer must be a name or .* got list \['kmeans'\]"),
    (Selected, {"top_k": 0}, ValueError, "top_k must be a count of at least 1, got 0"),
    (Selected, {"top_k": 1.5}, ValueError, r"top_k must be a fraction .* got 1\.5"),
    (Selected, {"top_k": math.nan}, ValueError, "top_k must be .* got nan"),
    (Selected, {"top_k": 2**70}, ValueError, f"top_k must be a count of at most {MOST}, got {2**70}"),
    (Selected, {"min_fraction": 1.5}, ValueError, r"min_fraction must be at most 1\.0, got 1\.5"),
    (Selected, {"remainder": KMeans(rule="farthest")}, ValueError, "remainder.rule must be .* got 'farthest'"),
    (Selected, {"coupling": Coupling("zero")}, ValueError, "remainder must be \"none\" .* got 'centroids'"),
    (Selected, {"coupling": Coupling(blocks="all")}, ValueError, "coupling.blocks must be .* got 'all'"),
    (Selected, {"coupling": Coupling(overlap="count")}, ValueError, "coupling.overlap must be .* got 'count'"),
    (Selected, {"coupling": Coupling(residual_weight="all")}, ValueError, "residual_weight must be .* got 'all'"),
    (Hyper, {"lsh": Exact()}, TypeError, "lsh must be a prescore.Lsh object, got Exact"),
    (Lsh, {"n_projections": 0}, ValueError, "n_projections must be at least 1, got 0"),
    (Lsh, {"n_projections": 31}, ValueError, "n_projections must be at most 30, got 31"),
    (Routed, {"min_weight": 0}, ValueError, r"min_weight must be finite and above 0\.0, got 0"),
    (Routed, {"min_weight": 1.5}, ValueError, r"min_weight must be at most 1\.0, got 1\.5"),
    (Routed, {"cluster_size": 0}, ValueError, "cluster_size must be at least 1, got 0"),
    (Routed, {"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
    (KMeans, {"n_clusters": 0}, ValueError, "n_clusters must be at least 1, got 0"),
    (KMeans, {"noise": -0.1}, ValueError, r"noise must be finite and at least 0\.0, got -0\.1"),
    (KMeans, {"fit_size": 0}, ValueError, r"fit_size must be None \(fit on all keys\) or at least 1, got 0"),
    (prescore.Minkowski, {"p": 0.0}, ValueError, r"p must be finite and above 0\.0, got 0\.0"),
    (prescore.GaussianKMeans, {"n_features": 1}, ValueError, "n_features must be at least 2, got 1"),
    (prescore.Leverage, {"sketch_size": 0}, ValueError, "sketch_size must be at least 1, got 0"),
    (prescore.Companions, {"n_tables": 0}, ValueError, "n_tables must be at least 1, got 0"),
    (prescore.Companions, {"window": 1}, ValueError, "window must be at least 2, got 1"),
    (Lsh, {"block_size": 0, "sample_size": 0}, ValueError, "block_size or sample_size must be .* got 0 and 0"),
    (Selected, {"top_k": 3, "min_score": 0.5}, ValueError, "top_k must be None where min_score is given, got 3"),
    (Selected, {**BY_SCORE, "selector": "sample"}, ValueError, "selector must be .* got 'sample'"),
    (Selected, BOTH, ValueError, 'coupling.blocks must be "selected" where mask="zero" .* got \'all\''),
]
"""Wrong types and choices of every field are in test_every_option.py."""
KEYS = [
    ({"key": KEY[0]}, ValueError, r"key must have 4 dimensions .* got \(2, 9, 4\)"),
    ({"key": "keys"}, TypeError, "key must be a torch.Tensor, got str"),
    ({"key": KEY.int()}, TypeError, "key must be .* got torch.int32"),
    ({"key_padding_mask": MASK[0]}, ValueError, r"key_padding_mask must have .* got \(9,\)"),
    ({"scorer": "paper"}, ValueError, "scorer must be one of .* got 'paper'"),
    ({"scorer": Selected()}, TypeError, "scorer must be a name or .* got Selected"),
    ({"generator": "seed"}, TypeError, "generator must be .* got str 'seed'"),
]
"""Refused by `score` and `select`."""
OF_SELECT = [
    ({"top_k": 0}, ValueError, "top_k must be a count of at least 1, got 0"),
    ({"recent": 1.0}, TypeError, r"recent must be an int, got float 1\.0"),
    ({"selector": "best"}, ValueError, "selector must be one of .* got 'best'"),
    ({"min_fraction": -0.5}, ValueError, r"min_fraction must be .* got -0\.5"),
]
DICTIONARIES = [
    (None, TypeError, "config must be a mapping, got NoneType"),
    ({}, ValueError, "config type must be one of 'Routed', .* got None"),
    ({"type": "Lsh"}, ValueError, "config type must be one of .* got 'Lsh'"),
    ({"type": "Hyper", "lsh": {"block_size": 3}}, ValueError, "lsh type must be one of .* got None"),
    ({"type": "Selected", "scorer": {"name": "kmean"}}, ValueError, "scorer must be one of .* got 'kmean'"),
    ({"type": "Selected", "scorer": {}}, ValueError, 'a scorer must have a "name"'),
    ({"type": "Selected", "coupling": {"type": "Lsh"}}, ValueError, "coupling type must be .* got 'Lsh'"),
    ({"type": "Selected", "top_k": {"type": "Lsh"}}, TypeError, "top_k must be .* got dict"),
    ({"type": "Selected", "scorer": {"type": "KMeans"}}, ValueError, 'a scorer must have a "name"'),
    ({"type": "Selected", "inner": {"type": "Coupling"}}, ValueError, "'Exact', 'Lsh', got 'Coupling'"),
]
PART = prescore.exact_attention(QUERY, KEY, VALUE)
SHORTER = prescore.Attended(PART.output[:, :, :4], PART.lse[:, :, :4])
ELSEWHERE = prescore.Attended(PART.output.to("meta"), PART.lse.to("meta"))
MERGES = [
    ((), ValueError, "at least one Attended, got none"),
    ((PART, PART.output), TypeError, "parts must be Attended, got Tensor at 1"),
    ((PART, SHORTER), ValueError, r"one shape \(2, 4, 5, 3\), got \(2, 4, 4, 3\) at 1"),
    ((PART, PART._replace(lse=None)), TypeError, "the lse of part 1 must be a torch.Tensor, got NoneType"),
    ((PART, ELSEWHERE), ValueError, "the output of part 1 must be on a device that holds numbers, got meta"),
    *(
        ((PART._replace(output=PART.output.to(dtype)),), TypeError, f"the output of part 0 must be .* got {dtype}")
        for dtype in (torch.int32, torch.complex64, torch.float8_e4m3fn)
    ),
    ((PART, PART._replace(lse=PART.lse.to(torch.int64))), TypeError, "lse of part 1 must be .* got torch.int64"),
    ((PART._replace(output=PART.output.to_sparse()),), ValueError, "must be a dense tensor, got torch.sparse_coo"),
    ((PART._replace(lse=SHORTER.lse), PART), ValueError, r"lse of shape \(2, 4, 5\), got \(2, 4, 4\) at 0"),
]

NOT_NUMBERS = [
    *((Routed, "sinks", "sinks must be an int"), (Selected, "min_fraction", "min_fraction must be a number")),
    *((Selected, "selector", "selector must be one of 'top', 'sample'"), (Selected, "inner", "inner must be a")),
    *((Selected, "scorer", "scorer must be a name"), (Hyper, "leaf_inclusive", "leaf_inclusive must be True")),
]
"""Settings that a tensor or an array is passed to; its numbers would fill a page."""


def register(name, made):
    return prescore.register_scorer(name)(made)


REGISTRATIONS = [
    ("", None, TypeError, "name must be a non-empty str, got ''"),
    ("kmeans", type("Impostor", (prescore.Scorer,), {}), ValueError, "name must be new, got 'kmeans'"),
    ("new", len, TypeError, "scorer must be a class derived from prescore.Scorer, got <built-in function len"),
    ("new", prescore.KeyNorm(), TypeError, r"a class derived from prescore.Scorer, got KeyNorm\(\)"),
    ("new", type("Duck", (), {"score": len}), TypeError, "derived from prescore.Scorer, got .*Duck"),
]
OTHERS = [
    *((prescore.score, {"key": KEY, **changes}, *rest) for changes, *rest in KEYS),
    *((prescore.select, {"key": KEY, "top_k": 3, **changes}, *rest) for changes, *rest in KEYS + OF_SELECT),
    *((config_from_dict, {"values": values}, *rest) for values, *rest in DICTIONARIES),
    *((lambda parts: prescore.merge(*parts), {"parts": parts}, *rest) for parts, *rest in MERGES),
    *((register, {"name": name, "made": made}, *rest) for name, made, *rest in REGISTRATIONS),
    (check_config, {"config": MASK}, TypeError, r"got Tensor \(2, 9\) torch.bool: masks are is_causal=True and"),
    (check_config, {"config": {}, "name": "layer 3"}, TypeError, "layer 3 must be a .* or None, got dict"),
]


def refused(error, message, call, *arguments, **options):
    """Whether a call raises that error, in one sentence."""
    with pytest.raises(error, match=message) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)


def shown(given):
    """A test id that is the same in every process: tensors and functions by their kind and name."""
    text = getattr(given, "__name__", None) or re.sub(r"<[^>]*>|tensor\(.*", "...", str(given), flags=re.DOTALL)
    return text[:40]


@pytest.mark.parametrize(("function", "changes", "error", "message"), CALLS, ids=shown)
def test_wrong_call(function, changes, error, message):
    options = {"query": QUERY, "key": KEY, "value": VALUE, **changes}
    tensors = [options.pop(name) for name in ("query", "key", "value")]
    generator = torch.Generator().manual_seed(1)
    if function is not prescore.exact_attention:
        options.setdefault("generator", generator)
    before = [tensor.clone() for tensor in (QUERY, KEY, VALUE)]
    states = torch.random.get_rng_state(), generator.get_state()
    refused(error, message, function, *tensors, **options)
    after = (QUERY, KEY, VALUE, torch.random.get_rng_state(), generator.get_state())
    assert all(torch.equal(*both) for both in zip((*before, *states), after, strict=True))


@pytest.mark.parametrize(("kind", "fields", "error", "message"), FIELDS, ids=shown)
def test_wrong_fields(kind, fields, error, message):
    refused(error, message, kind, **fields)
    if hasattr(kind, "replace"):
        refused(error, message, kind().replace, **fields)


@pytest.mark.parametrize(("kind", "field", "rule"), NOT_NUMBERS)
def test_messages_name_the_shape_of_a_tensor_and_not_its_numbers(kind, field, rule):
    error = ValueError if "one of" in rule else TypeError
    for given, text in ((QUERY, r"\(2, 4, 5, 4\) torch.float64"), (QUERY.numpy(), r"\(2, 4, 5, 4\) float64")):
        refused(error, f"^{rule}.*, got .*{text}$", kind, **{field: given})
    refused(error, f"^{rule}.*, got .*nested$", kind, **{field: NESTED})


@pytest.mark.parametrize(("function", "options", "error", "message"), OTHERS, ids=shown)
def test_wrong_arguments_of_other_functions(function, options, error, message):
    refused(error, message, function, **options)
    assert "new" not in prescore.list_scorers()


@pytest.mark.parametrize("function", [prescore.exact_attention, prescore.prescored_attention])
def test_what_torch_calls_otherwise_and_means_nothing_else_is_accepted(function):
    options = {"attn_mask": None, "enable_gqa": True}
    plain, same = (function(QUERY, KEY, VALUE, **some) for some in ({}, options))
    assert torch.equal(plain[0], same[0])
