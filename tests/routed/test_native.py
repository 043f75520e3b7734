"""Native code against the plain backend at every level; what it refuses; which backend runs."""

import random
from dataclasses import replace

import pytest
import torch
from oracles.inputs import attention_tensors
from routed_checks import (
    assert_alike,
    attend,
    check_native,
    levels_here,
    loss_of,
    native_level,
    needs_native,
)

from prescore import Exact, Routed, Selected, prescored_attention
from prescore.errors import Unsupported
from prescore.ops.native import library
from prescore.routed import native
from prescore.routed.layout import View, make_layout
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


@both
@pytest.mark.parametrize("n_query", [300, 40])
@pytest.mark.parametrize("side", ["left", "right", "both", "holes"])
def test_padding(level, is_causal, n_query, side):
    position = torch.arange(300)
    mask = {
        "left": position >= torch.tensor([[0], [90]]),
        "right": position < torch.tensor([[300], [210]]),
        "both": (position >= torch.tensor([[50], [3]])) & (position < torch.tensor([[260], [297]])),
        "holes": position.remainder(40) != torch.tensor([[100], [3]]),
    }[side]
    if is_causal and n_query < 300 and side == "both":  # every query has padding before it: all of it is exact
        mask[0] = True
    check_native(CONFIG, tensors(300, n_query=n_query), is_causal=is_causal, mask=mask)


# --- random calls


class Case:
    """One random call, from a seed: sizes, dtype, and where each tensor lies in memory."""

    def __init__(self, seed, **fixed):
        self.pick = pick = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        size, n_clusters = pick.choice(((16, 1), (16, 2), (16, 4), (32, 1), (32, 2)))
        self.is_causal = fixed.get("is_causal", pick.random() < 0.6)
        self.config = Routed(
            min_weight=pick.choice((1.0, 1 / 2, 1 / 8, 1 / 60, 1e-6)),
            cluster_size=size,
            chunk_size=size * n_clusters,
            sinks=pick.choice((0, 1, 5, 16, 19)),
            exact_until=pick.choice((0, 0, 90)) if self.is_causal else 0,
        )
        least = max(self.config.sinks + 2 * self.config.chunk_size, self.config.exact_until)
        self.n_keys = least + pick.randint(1, self.config.chunk_size + 20)
        self.n_query = self.n_keys if fixed else pick.choice((self.n_keys, pick.randint(1, self.n_keys)))
        self.dtype = pick.choice((torch.float32, *DTYPES))
        shapes = ((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2), (2, 2, 1))
        self.batch, self.kv_heads, group = pick.choice(shapes)
        dim, value_dim = (16 * pick.choice((1, 1, 2, 4)) for _ in range(2))
        spread, heads = pick.choice((0.3, 1.0, 1.0, 3.0)), self.kv_heads * group
        self.tensors = [
            self._strided(heads, self.n_query, dim, spread),
            self._strided(self.kv_heads, self.n_keys, dim, spread),
            self._strided(self.kv_heads, self.n_keys, value_dim, 1.0),
        ]

    def _strided(self, heads, length, dim, spread):
        values = torch.randn(self.batch, heads, length, dim, generator=self.generator).to(self.dtype) * spread
        way = self.pick.choice(("plain", "plain", "heads inside", "wide", "long", "odd"))
        before = self.pick.randint(1, 5)
        if way == "heads inside":  # as models have them: [B, N, H, D]
            return values.transpose(1, 2).contiguous().transpose(1, 2)
        if way == "wide":
            room = torch.full((self.batch, heads, length, before + dim + 3), torch.nan, dtype=self.dtype)
            return room[..., before : before + dim].copy_(values)
        if way == "long":
            room = torch.full((self.batch, heads, before + length + 7, dim), torch.nan, dtype=self.dtype)
            return room[:, :, before : before + length].copy_(values)
        if way == "odd":  # vectors are not aligned
            room = torch.full((values.numel() + 9,), torch.nan, dtype=self.dtype)
            return room[before : before + values.numel()].view(values.shape).copy_(values)
        return values

    @property
    def budget(self):
        return 1e-4 if self.dtype == torch.float32 else 8 * torch.finfo(self.dtype).eps


@needs_native
def test_random_calls():
    """Rounding may move a key across the threshold: hardly ever, and in one query then."""
    n_differ = n_queries = 0
    for seed in range(160):
        case, levels = Case(seed), levels_here()
        backward = seed % 3 == 0
        inputs = [t.requires_grad_(backward) for t in case.tensors]
        plain, _ = attend(inputs, case.config, is_causal=case.is_causal, backend="plain")
        for level in levels:
            with native_level(level):
                got, stats = attend(inputs, case.config, is_causal=case.is_causal, backend="native")
                assert stats.native_level == level
                alike = assert_alike(got, plain, case.budget, n_flips=1, what=f"{level}, seed {seed},")
                n_differ, n_queries = n_differ + int((~alike).sum()), n_queries + alike.numel()
                if not backward:
                    continue
                grads = [torch.autograd.grad(loss_of(t, alike), inputs, retain_graph=True) for t in (got, plain)]
            for name, one, other in zip("qkv", *grads, strict=True):
                off = float((one.double() - other.double()).abs().max()) / max(1.0, float(other.abs().max()))
                assert off <= 5 * case.budget, f"seed {seed}, {level}: gradient of {name} is {off} off"
    assert n_differ <= 1e-4 * n_queries


@needs_native
def test_nan_and_infinities_reach_no_earlier_query():
    for seed in range(10_000, 10_040):
        case = Case(seed, is_causal=True)
        place, huge = case.pick.randint(0, case.n_keys - 1), torch.finfo(case.dtype).max
        for tensor in case.pick.sample(case.tensors, case.pick.randint(1, 3)):
            poison = case.pick.choice((torch.nan, torch.inf, -torch.inf, huge))
            if tensor is not case.tensors[0]:
                poison = huge  # public calls refuse other keys and values
            tensor[:, :, place, :: case.pick.choice((1, 7, 100))] = poison
        plain, _ = attend(case.tensors, case.config, backend="plain")
        for level in levels_here():
            with native_level(level):
                got, _ = attend(case.tensors, case.config, backend="native")
            early = [Attended(*(t[:, :, :place] for t in result)) for result in (got, plain)]
            assert_alike(*early, case.budget, n_flips=1, what=f"{level}, seed {seed},")


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

    for name in ("run", "_gradients"):
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
    elif isinstance(argument, list):
        for i, tensor in enumerate(argument):
            yield f"sum {i}", tensor, lambda t, i=i: [*argument[:i], t, *argument[i + 1 :]]
    elif isinstance(argument, native.Tables | View):
        for name, tensor in vars(argument).items():
            if isinstance(tensor, torch.Tensor):
                yield name, tensor, lambda t, a=name: replace(argument, **{a: t})


@needs_native
def test_a_wrong_tensor_is_refused(monkeypatch):
    n_refused = 0
    for function, arguments, options in recorded_calls(monkeypatch):

        def run(put, tensor, place, function=function, arguments=arguments, options=options):
            function(*arguments[:place], put(tensor), *arguments[place + 1 :], **options)

        for place, argument in enumerate(arguments):
            if isinstance(argument, native.Tables) and function.__name__ != "run":
                continue  # checked when the function runs
            for name, tensor, put in tensors_of(argument):
                if name.startswith("local_") and not options["reads_local"]:
                    continue  # C does not see them
                n_refused += 1
                for change in WRONG.values():
                    with pytest.raises(ValueError, match="must"):
                        run(put, change(tensor), place)
    assert n_refused == 18 + 16 + 13


@needs_native
def test_wrong_queries_keys_and_values_are_refused(monkeypatch):
    run, arguments, options = recorded_calls(monkeypatch)[0]
    name, query, keys, *rest = arguments
    for wrong in (query.double(), query[:, :1], query[:, :, :-1], query[..., :-1], query.transpose(2, 3)):
        with pytest.raises(ValueError, match="must"):
            run(name, wrong, keys, *rest, **options)
    for field in ("key", "value"):
        own = getattr(keys, field)
        wrongs = [own.double(), own[:, :-1], own[..., :-1], own[:0], own.transpose(1, 2), torch._neg_view(own)]
        for wrong in wrongs:
            with pytest.raises(ValueError, match="must"):
                run(name, query, keys._replace(**{field: wrong}), *rest, **options)
    fewer = keys._replace(key=keys.key[:, :90], value=keys.value[:, :90])
    view = replace(rest[0], local_stop=rest[0].local_stop.clamp_max(90))
    with pytest.raises(ValueError, match=r"tables must be of 90 keys, got position \d+"):
        run(name, query, fewer, view, *rest[1:], **options)


@needs_native
@pytest.mark.parametrize(
    ("field", "number", "message"),
    [
        ("n_clusters", -1, "visible clusters must lie between 0 and"),
        ("n_clusters", 99, "visible clusters must be at most"),
        ("local_start", -1, "local keys must lie within 150 keys, got -1"),
        ("local_stop", 151, "local keys must lie within 150 keys, got 37 to 151"),
    ],
)
def test_a_view_beyond_the_keys_is_refused(field, number, message, monkeypatch):
    run, (name, query, keys, view, *rest), options = recorded_calls(monkeypatch)[0]
    changed = getattr(view, field).clone()
    changed[0, -1] = number
    with pytest.raises(ValueError, match=message):
        run(name, query, keys, replace(view, **{field: changed}), *rest, **options)


@needs_native
def test_wrong_columns_of_tables_are_refused(monkeypatch):
    tables = recorded_calls(monkeypatch)[0][1][4]
    for changes in ({"sink_columns": 8}, {"sinks": -1}, {"sinks": 17}, {"sink_columns": 32, "sinks": 20}):
        with pytest.raises(ValueError, match="columns must"):
            replace(tables, **changes)


@needs_native
def test_chunks_beyond_the_keys_are_refused(monkeypatch):
    monkeypatch.setattr(native, "call_library", lambda *_: pytest.fail("C must not be called"))
    key = torch.zeros(1, 70, 16)
    layout = make_layout(70, 70, causal=True, config=CONFIG.replace(chunk_size=32))
    for begin, n_chunks in ((-1, 2), (7, 2), (0, 3)):
        with pytest.raises(ValueError, match="chunks must lie within 70 keys"):
            native.build_clusters(key, key, layout, begin, n_chunks)
    for wrong in (key.double(), key[:, :-1], key[..., :-1], key.transpose(1, 2)):
        for pair in ((key, wrong), (wrong, key)):
            with pytest.raises(ValueError, match="must"):
                native.build_clusters(*pair, layout, 0, 2)


@needs_native
def test_a_step_that_does_not_fit_is_refused(monkeypatch):
    _, arguments, _ = recorded_calls(monkeypatch)[0]
    _, query, keys, _, tables, _ = arguments
    covs = (t[:, -1:].contiguous() for t in (tables.key_cov, tables.key_value_cov))
    tables = replace(tables, **dict(zip(("key_cov", "key_value_cov"), covs, strict=True)))
    step = native.PreparedStep(tables, 3.0, 0.25)
    query, key, value = query[:, :, -1:], keys.key[None], keys.value[None]
    calls = []
    monkeypatch.setattr(native, "call_library", lambda *arguments: calls.append(arguments))
    step.attend(query, key, value, 6, 99)
    (_, structure) = calls.pop()
    for name, _ in native.RoutedCall._fields_:  # a field that is not set is 0
        assert name in ("query", "key", "value") or getattr(structure, name), name
    for wrong in (query.double(), query[:0], query[..., :-1], query.expand(-1, -1, 2, -1)):
        with pytest.raises(ValueError, match="must"):
            step.attend(wrong, key, value, 6, 99)
    for wrong in ((key.double(), value), (key[:, :0], value), (key, value[..., :16]), (key, value[:, :, :-1])):
        with pytest.raises(ValueError, match="must"):
            step.attend(query, *wrong, 6, 99)
    with pytest.raises(ValueError, match="tables must be of 90 keys"):
        step.attend(query, key[:, :, :90], value[:, :, :90], 6, 80)
    for n_clusters, start in ((0, 99), (-1, 99), (99, 99), (6, -1), (6, 151)):
        with pytest.raises(ValueError, match="must"):
            step.attend(query, key, value, n_clusters, start)
    assert not calls
