"""Native code against the plain backend at every level; what it refuses; which backend runs."""

import random
from dataclasses import replace

import pytest
import torch
from fuzz_cases import random_case
from oracles.inputs import attention_tensors
from routed_checks import assert_alike, attend, check_native, levels_here, native_level, needs_native

from fuzz import check
from prescore import Exact, Routed, Selected, prescored_attention
from prescore.errors import Unsupported
from prescore.routed import native
from prescore.routed.layout import View, make_layout
from prescore.routed.native import library
from prescore.types import Attended

CONFIG = Routed(min_weight=1 / 32, cluster_size=16, chunk_size=64, sinks=5, exact_until=0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
both = pytest.mark.parametrize("is_causal", [True, False])


def tensors(n_keys=400, **sizes):
    usual = {"batch": 2, "heads": 4, "kv_heads": 2, "dim": 32, "value_dim": 48, "spread": 1.0}
    return attention_tensors(**{**usual, "dtype": torch.float32, "n_keys": n_keys, **sizes})


@pytest.fixture(params=levels_here() or [pytest.param("none", marks=pytest.mark.skip(reason="nothing is built"))])
def level(request):
    with native_level(request.param) as name:
        yield name


# --- results


@both
@pytest.mark.parametrize("min_weight", [1.0, 1 / 32, 1e-4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_code_is_the_plain_backend(level, is_causal, min_weight, dtype):
    stats = check_native(CONFIG.replace(min_weight=min_weight), tensors(300, dtype=dtype), is_causal=is_causal)
    assert stats.native_level == level
    assert (stats.far_keys_read > 0) == (min_weight < 1)


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        *(({"dim": dim, "value_dim": 16}, {}) for dim in (16, 64, 80, 128, 256)),
        ({"value_dim": 256}, {}),
        *(({"heads": heads, "kv_heads": kv_heads}, {}) for heads, kv_heads in ((1, 1), (7, 1), (4, 4))),
        *(({}, {"sinks": sinks}) for sinks in (0, 1, 16, 17, 100)),
        *(({}, {"chunk_size": size, "cluster_size": size}) for size in (16, 48, 128)),
        ({"n_keys": 900}, {"chunk_size": 256, "cluster_size": 128}),  # more local keys than are weighed at once
        ({}, {"exact_until": 300}),  # an exact beginning of more keys than that, too
    ],
    ids=str,
)
def test_sizes(level, sizes, changes):
    inputs = tensors(**{"batch": 1, "heads": 2, "kv_heads": 1, **sizes})
    check_native(CONFIG.replace(**changes), inputs, budget=4e-5)


# --- random calls


def test_random_calls(level):
    """The oracle of the fuzzer, at every level: any mask, sizes, where the tensors lie in memory, gradients."""
    cases = (random_case(random.Random(f"native/{number}")) for number in range(1200))
    assert sum(check("native_agrees", case) for case in cases) > 80


def test_nan_and_infinities_reach_no_earlier_query(level):
    for seed in range(40):
        draw = random.Random(seed)
        dtype, n_keys = draw.choice(DTYPES), draw.randint(150, 250)
        inputs = tensors(n_keys, batch=1, dtype=dtype, seed=seed)
        place, huge = draw.randrange(n_keys), torch.finfo(dtype).max
        for number in draw.sample(range(3), draw.randint(1, 3)):
            # public calls refuse keys and values that are not finite
            poison = huge if number else draw.choice((torch.nan, torch.inf, -torch.inf, huge))
            inputs[number][:, :, place, :: draw.choice((1, 7, 100))] = poison
        config = CONFIG.replace(min_weight=draw.choice((1.0, 1 / 8, 1e-6)), chunk_size=draw.choice((16, 64)))
        results = (attend(inputs, config, backend=backend)[0] for backend in ("native", "plain"))
        early = [Attended(*(t[:, :, :place] for t in result)) for result in results]
        budget = 1e-4 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
        assert_alike(*early, budget, n_flips=1, what=f"seed {seed}")


# --- which backend runs


SMALL = {"n_keys": 160, "heads": 2, "kv_heads": 1, "dim": 16, "value_dim": 16}
PLAIN_ONLY = {
    "float64": ({"dtype": torch.float64}, {}, {}, "it knows torch.float32, .* got torch.float64"),
    "head dimension": ({"dim": 20}, {}, {}, "the head dimension must be a multiple of 16 up to 256, got 20"),
    "large head": ({"dim": 272}, {}, {}, "the head dimension must be a multiple of 16 up to 256, got 272"),
    "value dimension": ({"value_dim": 8}, {}, {}, "the value dimension must be .* got 8"),
    "cluster size": ({}, {"cluster_size": 8}, {}, "clusters must have a multiple of 16 keys, got 8"),
    "dropout": ({}, {}, {"dropout_p": 0.1}, "it cannot drop attention weights"),
    "two": ({"dim": 20, "value_dim": 8}, {}, {}, "head dimension .* got 20; the value dimension .* got 8"),
}


@needs_native
@pytest.mark.parametrize("name", PLAIN_ONLY)
def test_native_is_refused_with_its_reasons_where_auto_runs_plain_torch(name, monkeypatch):
    sizes, changes, options, reason = PLAIN_ONLY[name]
    inputs, config = tensors(**{**SMALL, **sizes}), CONFIG.replace(**changes)
    with pytest.raises(Unsupported, match=f"backend 'native' cannot run: .*{reason}"):
        attend(inputs, config, backend="native", **options)
    monkeypatch.setattr(native, "call_library", lambda *_: pytest.fail("native code must not run"))
    stats = attend(inputs, config, **options)[1]
    assert stats.backend != "native"
    assert stats.native_level is None


def test_native_is_refused_without_a_library_and_for_other_configurations(monkeypatch):
    inputs = tensors(**SMALL)
    for config in (Exact(), Selected(top_k=16, min_seq_len=32)):
        with pytest.raises(Unsupported, match="backend 'native' cannot run: it runs Routed only"):
            attend(inputs, config, backend="native")
    assert native.unsupported(inputs[0].to("meta"), 16, CONFIG)[0] == "it runs on CPU tensors, got meta"
    monkeypatch.setenv(library.VARIABLE, "0")
    with pytest.raises(Unsupported, match=r"backend 'native' cannot run: none \(PRESCORE_NATIVE=0\)"):
        attend(inputs, CONFIG, backend="native")
    assert not native.can_run(inputs[0], 16, 16)
    stats = attend(inputs, CONFIG)[1]
    assert (stats.backend != "native", stats.native_level) == (True, None)


@needs_native
def test_native_is_refused_where_gradients_need_float64():
    query, *others = (tensor.requires_grad_() for tensor in tensors(**SMALL))
    large = [4096 * query, *others]
    with pytest.raises(Unsupported, match=r"gradients need float64 where abs\(lse\) is so large, got \d"):
        attend(large, CONFIG, backend="native")
    assert attend(large, CONFIG)[1].backend == "plain"
    assert attend([tensor.detach() for tensor in large], CONFIG, backend="native")[1].backend == "native"


@needs_native
def test_auto_takes_native_code_and_plain_never_does(monkeypatch):
    inputs = tensors(**SMALL)
    ran = []
    original = native.call_library
    monkeypatch.setattr(native, "call_library", lambda name, *rest: (ran.append(name), original(name, *rest)))
    for backend in ("auto", "native", "plain", "cpu-flash"):
        ran.clear()
        stats = attend(inputs, CONFIG, backend=backend)[1]
        is_native = backend in ("auto", "native")
        assert (stats.backend, bool(ran)) == ("native" if is_native else "plain", is_native)
        assert stats.native_level == (library.loaded_level() if is_native else None)
    ran.clear()
    for config in (CONFIG.replace(exact_until=160), Selected(top_k=16, min_seq_len=32)):
        stats = attend(inputs, config)[1]
        assert (stats.backend, stats.native_level, ran) == ("cpu-flash", None, [])
    mask = torch.ones(2, 160, dtype=torch.bool)
    mask[0, :140] = False  # one sequence is too short to route, whichever comes first
    for order in (mask, mask.flip(0)):
        assert attend(inputs, CONFIG, key_padding_mask=order)[1].backend == "native"


# --- nothing that C could read or write outside of gets through


WRONG = {
    "shorter": lambda t: t[..., :-1].contiguous(),
    "longer": lambda t: torch.cat((t, t[..., :1]), dim=-1),
    "another dtype": lambda t: t.to(torch.float64),
    "strided": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
}


def recorded_calls(monkeypatch):
    """Checked functions with their arguments, from a forward and backward pass."""
    calls = []

    def recording(function):
        def record(*arguments, **options):
            calls.append((function, arguments, options))
            return function(*arguments, **options)

        return record

    for name in ("routed_call", "_gradients"):
        monkeypatch.setattr(native, name, recording(getattr(native, name)))
    inputs = [t.requires_grad_() for t in tensors(150, batch=1, heads=2, kv_heads=1, dim=16)]
    prescored_attention(*inputs, CONFIG.replace(chunk_size=32), is_causal=True).sum().backward()
    monkeypatch.undo()
    monkeypatch.setattr(native, "call_library", lambda *_: pytest.fail("C must not be called"))
    return calls


def tensors_of(argument):
    """Name and tensor of what C reads in an argument, and a function that puts another tensor in its place."""
    if isinstance(argument, dict):
        for name, tensor in argument.items():
            yield name, tensor, lambda t, a=name: {**argument, a: t}
    elif isinstance(argument, View):
        for name, tensor in vars(argument).items():
            if isinstance(tensor, torch.Tensor):
                yield name, tensor, lambda t, a=name: replace(argument, **{a: t})


ROWS = r"^((key|value) must (be rows|have as many rows)|sizes must be|the key index must fit|output must be)"
"""What is wrong with keys and values."""


def refused(call, *arguments, match, **options):
    with pytest.raises(ValueError, match=match):
        call(*arguments, **options)


@needs_native
def test_a_wrong_tensor_is_refused(monkeypatch):
    n_refused = 0
    for function, arguments, options in recorded_calls(monkeypatch):
        for place, argument in enumerate(arguments):
            for name, tensor, put in tensors_of(argument):
                if name.startswith("local_") and not options["reads_local"]:
                    continue  # C does not see them
                n_refused += 1
                called = "visible" if name == "n_clusters" else name
                for change in WRONG.values():
                    with pytest.raises(ValueError, match=rf"^(sums of )?{called} must be \([\d, ]+\) contiguous"):
                        function(*arguments[:place], put(change(tensor)), *arguments[place + 1 :], **options)
    assert n_refused == 7 + 5 + 13


@needs_native
def test_a_wrong_field_of_the_key_index_reaches_c_in_its_shape_or_not_at_all(monkeypatch):
    """Fields are laid out anew, so that some may have other strides, dtypes or filler."""
    function, (inputs, index, *rest), options = recorded_calls(monkeypatch)[0]
    arrays, n_refused = function(inputs, index, *rest, **options).arrays, 0
    for name, tensor in index.tensors().items():
        for change in WRONG.values():
            try:
                call = function(inputs, replace(index, **{name: change(tensor)}), *rest, **options)
            except (ValueError, RuntimeError):
                n_refused += 1
                continue
            for field, array in call.arrays.items():
                assert array.shape == arrays[field].shape, (name, field)
                assert (array.dtype, array.stride()) == (arrays[field].dtype, arrays[field].stride())
    assert n_refused > 26


@needs_native
def test_wrong_queries_keys_values_and_views_are_refused(monkeypatch):
    made, (inputs, index, view, *rest), options = recorded_calls(monkeypatch)[0]
    query, key, value = inputs
    for wrong in (query.double(), query[:, :1], query[:, :, :-1], query[..., :-1], query.transpose(2, 3)):
        match = "^(query|output|sizes|the key index) must"
        refused(made, (wrong, key, value), index, view, *rest, match=match, **options)
    for rows, put in ((key, lambda t: (query, t, value)), (value, lambda t: (query, key, t))):
        for wrong in (rows.double(), rows[:, :-1], rows[..., :-1], rows[:0], rows.mT, torch._neg_view(rows)):
            refused(made, put(wrong), index, view, *rest, match=ROWS, **options)
    fewer = (query, key[:, :90], value[:, :90])
    short = replace(view, local_stop=view.local_stop.clamp_max(90))
    message = r"the key index must be of 90 keys, got position \d+"
    refused(made, fewer, index, short, *rest, match=message, **options)
    for field, number, message in (
        ("n_clusters", -1, "visible clusters must lie between 0 and"),
        ("n_clusters", 99, "visible clusters must be at most"),
        ("local_start", -1, "local keys must lie within 150 keys, got -1"),
        ("local_stop", 151, "local keys must lie within 150 keys, got 37 to 151"),
    ):
        changed = getattr(view, field).clone()
        changed[0, -1] = number
        other = replace(view, **{field: changed})
        refused(made, inputs, index, other, *rest, match=message, **options)


@needs_native
def test_chunks_beyond_the_keys_are_refused(monkeypatch):
    monkeypatch.setattr(native, "call_library", lambda *_: pytest.fail("C must not be called"))
    key = torch.zeros(1, 70, 16)
    layout = make_layout(70, 70, causal=True, config=CONFIG.replace(chunk_size=32))
    for place in ((-1, 2), (7, 2), (0, 3)):
        refused(native.build_index, key, key, layout, *place, match="chunks must lie within 70 keys")
    for wrong in (key.double(), key[:, :-1], key[..., :-1], key.mT):
        refused(native.build_index, key, wrong, layout, 0, 2, match=ROWS)
        refused(native.build_index, wrong, key, layout, 0, 2, match=ROWS)


@needs_native
def test_a_step_that_does_not_fit_is_refused(monkeypatch):
    _, ((query, key, value), index, *_), _ = recorded_calls(monkeypatch)[0]
    step = native.PreparedStep(index.under(index.key_cov.shape[1] - 1), 3.0, 0.25).attend
    query, key, value = query[:, :, -1:], key[None], value[None]
    calls = []
    monkeypatch.setattr(native, "call_library", lambda *arguments: calls.append(arguments))
    step(query, key, value, 6, 99)
    (_, structure) = calls.pop()
    for name, _ in native.RoutedCall._fields_:  # a field that is not set is 0
        assert name in ("query", "key", "value", "n_spans") or getattr(structure, name), name
    for wrong in (query.double(), query[:0], query[..., :-1], query.expand(-1, -1, 2, -1)):
        refused(step, wrong, key, value, 6, 99, match="^(query|a step|key|the key index) must")
    for wrong in ((key.double(), value), (key[:, :0], value), (key, value[..., :16]), (key, value[:, :, :-1])):
        refused(step, query, *wrong, 6, 99, match=ROWS)
    refused(step, query, key[:, :, :90], value[:, :, :90], 6, 80, match="the key index must be of 90 keys")
    for place in ((0, 99), (-1, 99), (99, 99), (6, -1), (6, 151)):
        refused(step, query, key, value, *place, match="^(a step must be one query|visible clusters must be)")
    assert not calls


@needs_native
def test_gradients_at_logits_of_real_layers_stay_in_native_code():
    """One head of the layer `smooth` has an lse of 1169. Gradients there err as those of torch's operator do."""
    query, key, value = (tensor.requires_grad_() for tensor in tensors(**SMALL))
    largest = attend([query, key, value], CONFIG)[0].lse.abs().amax().detach()
    inputs = [(query * (2000 / largest)).detach().requires_grad_(), key, value]
    attended, stats = attend(inputs, CONFIG)
    assert stats.backend == "native"
    assert 1024 < float(attended.lse.detach().abs().amax()) < 4096
    grads = torch.autograd.grad(attended.output.square().sum(), inputs)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    wanted = torch.autograd.grad(attend(doubles, CONFIG, backend="plain")[0].output.square().sum(), doubles)
    for got, want in zip(grads, wanted, strict=True):
        assert float((got - want).norm() / want.norm()) < 2**-10


@pytest.mark.parametrize("factor", [3e3, 1e4, 1e5])
def test_a_far_key_with_very_large_logits_leaves_numbers(level, factor):
    """The int8 logit of a heavy key may exceed the exact one that replaces it by more than exp can take."""
    query, key, value = tensors(700, dim=64, value_dim=64)
    key[:, :, 100] *= factor
    attended, stats = attend([query, key, value], CONFIG)
    assert stats.backend == "native"
    assert attended.output.isfinite().all()
    wanted, _ = attend([query, key, value], CONFIG, backend="plain")
    assert float((attended.lse - wanted.lse).abs().max() / wanted.lse.abs().max()) < 2**-20
