"""What lies near, read by compiled code, against the fused operator; prepared decode steps."""

import pytest
import torch
from attention_checks import lanes
from native_cases import LEVELS, rows_apart, use_level
from oracles.inputs import attention_tensors

from prescore import Routed, exact_attention
from prescore.routed.attention import lanes_of, search_of, sources_of, view_of
from prescore.routed.layout import make_layout
from prescore.routed.local import attend_near
from prescore.routed.native import FarCall, PreparedStep, attend_near_compiled, make_tables
from prescore.routed.reference import Search

CONFIG = Routed(min_weight=1 / 32, cluster_size=16, chunk_size=64, sinks=5, exact_until=0)


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch):
    use_level(request.param, monkeypatch)
    return request.param


def one_lane(tensors, config, make_call, *, is_causal):
    """Queries, sources and view of all lanes of a call at once, behind its exact beginning."""
    call = make_call(tensors, is_causal)
    layout = make_layout(call.n_query, call.n_keys, causal=is_causal, config=config)
    (lane,) = lanes_of(call, layout.n_exact)
    sources = sources_of(lane, layout, call.backend)
    return lane.query, sources, view_of(lane, layout, search_of(config), call.scale, call.backend)


@pytest.fixture
def make_call():
    from prescore.call import Call
    from prescore.ops.backend import Needs, pick_backend

    def made(tensors, is_causal):
        backend = pick_backend(Needs.of(tensors[0]))
        return Call(*tensors, is_causal=is_causal, scale=0.2, backend=backend)

    return made


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [16, 64, 256])  # the last one is more than compiled code weighs at once
def test_near_rows_as_the_operator_reads_them(level, make_call, is_causal, dtype, chunk):
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "n_keys": 790, "dim": 32, "value_dim": 48}
    tensors = attention_tensors(**sizes, dtype=dtype)
    config = CONFIG.replace(chunk_size=chunk)
    query, sources, view = one_lane(tensors, config, make_call, is_causal=is_causal)
    found = [
        attend_near(query.to(own), sources._replace(key=sources.key.to(own), value=sources.value.to(own)), view)
        for own in (torch.float64, torch.float32)
    ]
    got = attend_near_compiled(query, sources, view)
    for wanted, usual, own in zip(*found, got, strict=True):
        assert (own - wanted).abs().max() <= 4 * (usual - wanted).abs().max()


@pytest.mark.parametrize("heads", [1, 2, 7])
def test_the_exact_beginning_is_exact_attention(level, heads):
    """It is longer than compiled code weighs at once, and its first queries see a few keys."""
    tensors = attention_tensors(heads=heads, kv_heads=1, n_keys=700, dim=16, value_dim=32, dtype=torch.float32)
    answer = lanes(*tensors, CONFIG.replace(exact_until=600))
    wanted = exact_attention(*tensors, is_causal=True)
    assert answer.figures["exact_queries"] == 600
    # float32 sums of up to 600 terms in another order
    torch.testing.assert_close(answer.attended.output[:, :, :600], wanted.output[:, :, :600], rtol=0, atol=1e-5)
    torch.testing.assert_close(answer.attended.lse[:, :, :600], wanted.lse[:, :, :600], rtol=0, atol=1e-5)
    assert (answer.attended.output[:, :, 600:] - wanted.output[:, :, 600:]).abs().max() > 1e-4


def test_queries_are_read_where_they_lie(level):
    """Those of a model are transposed: numbers of a head side by side, heads next to each other."""
    query, key, value = attention_tensors(
        heads=4, kv_heads=2, n_keys=400, dim=32, value_dim=32, dtype=torch.float32
    )
    moved = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)]
    assert moved[0].stride() != query.stride()
    got, wanted = lanes(*moved, CONFIG).attended, lanes(query, key, value, CONFIG).attended
    assert int(rows_apart(got, wanted, 1e-6).sum()) == 0


def prepared(make_call):
    tensors = attention_tensors(heads=4, kv_heads=2, n_keys=330, dim=32, value_dim=48, dtype=torch.float32)
    _, sources, _ = one_lane(tensors, CONFIG, make_call, is_causal=True)
    sources = sources._replace(spread=sources.spread[:, -1:], drift=sources.drift[:, -1:])
    query, key, value = tensors
    return PreparedStep(make_tables(sources), Search(32.0), 0.2), query[:, :, -1:].view(2, 2, 1, 32), key, value


def test_a_step_that_does_not_fit_is_refused(level, make_call, monkeypatch):
    step, query, key, value = prepared(make_call)
    step.attend(query, (key, value), 16, 200)
    monkeypatch.setattr(
        "prescore.routed.native.call_library", lambda *_: pytest.fail("compiled code must not be called")
    )
    for wrong in (query.double(), query[:1], query[..., :16], query.expand(-1, -1, 2, -1)):
        with pytest.raises(ValueError, match="must"):
            step.attend(wrong, (key, value), 16, 200)
    for wrong in ((key.double(), value), (key[:, :1], value), (key, value[..., :32]), (key, value[:, :, :-1])):
        with pytest.raises(ValueError, match="must"):
            step.attend(query, wrong, 16, 200)
    with pytest.raises(ValueError, match="rows up to"):
        step.attend(query, (key[:, :, :150], value[:, :, :150]), 16, 100)
    for nodes in (0, 17, -1):
        with pytest.raises(ValueError, match=f"visible nodes must lie between 1 and 16, got {nodes}"):
            step.attend(query, (key, value), nodes, 200)
    for first in (-1, 331):
        with pytest.raises(ValueError, match=f"near rows must lie within 330 keys, got {first}"):
            step.attend(query, (key, value), 16, first)


def test_every_number_of_a_step_is_set(level, make_call):
    """What a field of the structure is not told is 0, which no pointer and no count may be."""
    step, query, key, value = prepared(make_call)
    step.attend(query, (key, value), 16, 200)
    may_be_nothing = {"more"}
    for name, _ in FarCall._fields_:
        if name not in may_be_nothing and name not in ("query", "key", "value"):
            assert getattr(step._call, name), name
