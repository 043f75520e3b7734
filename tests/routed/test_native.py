"""Compiled code against plain torch and the definition, at every level of the processor."""

import pytest
import torch
from attention_checks import lanes
from native_cases import LEVELS, answers, compiled_answer, rows_apart, use_level
from oracles.inputs import attention_tensors

from prescore import Routed, exact_attention
from oracles.routed import routed_oracle
from prescore.ops.backend import Needs, pick_backend
from prescore.ops.native import library
from prescore.routed import native
from prescore.routed.index import encode_keys

CONFIG = Routed(min_weight=1 / 32, cluster_size=16, chunk_size=64, sinks=5, exact_until=0)
SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "n_keys": 400, "dim": 32, "value_dim": 48, "spread": 1.0}


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch):
    use_level(request.param, monkeypatch)
    return request.param


def assert_alike(compiled, plain, budget, *, n_flips=2):
    """Equal but for a few queries, where a key at the very limit is read by one and not by the other."""
    apart = rows_apart(compiled.attended, plain.attended, budget)
    assert int(apart.sum()) <= n_flips, f"{int(apart.sum())} of {apart.numel()} queries differ"
    found = [answer.figures["far_keys_read"] for answer in (compiled, plain)]
    assert found[0] == pytest.approx(found[1], rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("rows", [0, 16, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compiled_code_is_plain_torch(level, is_causal, rows, dtype):
    tensors = attention_tensors(**SIZES, dtype=dtype)
    compiled, plain = answers(tensors, CONFIG.replace(rows=rows), is_causal=is_causal)
    # float32 sums in another order; then a rounding of the output, which may fall either way
    budget = 2e-5 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    assert_alike(compiled, plain, budget)
    assert (compiled.figures["far_keys_read"] > 0) == (rows > 0)
    assert compiled.figures["keys_compared"] == pytest.approx(plain.figures["keys_compared"], rel=1e-3)


@pytest.mark.parametrize("is_causal", [True, False])
def test_compiled_code_is_the_definition(level, is_causal):
    tensors = attention_tensors(**SIZES, dtype=torch.float32)
    got = lanes(*tensors, CONFIG, is_causal=is_causal).attended
    wanted = routed_oracle(*tensors, CONFIG, is_causal=is_causal)
    assert int(rows_apart(got, wanted, 1e-4).sum()) <= 2


def gradients(attended, tensors, real):
    """Of a loss in which only some queries count, their lse too."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(attended.output.shape, generator=generator).to(attended.output.dtype)
    loss = ((attended.output * weight)[real]).sum() + attended.lse[real].sin().sum()
    return torch.autograd.grad(loss, tensors)


def assert_same_gradients(found, wanted, budget):
    for name, got, own in zip("qkv", found, wanted, strict=True):
        off = float((got.double() - own.double()).abs().max()) / float(own.abs().max())
        assert off < budget, f"gradient of {name} is {off} off"


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("rows", [0, 4, 16, 10**9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_plain_torch(level, is_causal, rows, dtype):
    tensors = [t.requires_grad_() for t in attention_tensors(**SIZES, dtype=dtype)]
    compiled, plain = answers(tensors, CONFIG.replace(rows=rows), is_causal=is_causal)
    budget = 2e-5 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    # queries at whose limit a key lies may have read other rows
    alike = ~rows_apart(compiled.attended, plain.attended, budget)
    assert int((~alike).sum()) <= 2
    both = [gradients(answer.attended, tensors, alike) for answer in (compiled, plain)]
    assert_same_gradients(*both, 5e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_are_those_of_the_definition(level, is_causal, padded):
    tensors = [t.requires_grad_() for t in attention_tensors(**{**SIZES, "n_keys": 250}, dtype=torch.float32)]
    valid = torch.arange(250) < torch.tensor([[250], [201]]) if padded else None
    got = compiled_answer(tensors, CONFIG, is_causal=is_causal, valid=valid).attended
    wanted = routed_oracle(*tensors, CONFIG, is_causal=is_causal, key_padding_mask=valid)
    real = torch.ones_like(got.lse, dtype=torch.bool) if valid is None else valid[:, None].expand(got.lse.shape)
    alike = ~rows_apart(got, wanted, 1e-4) & real
    assert int((~alike & real).sum()) <= 2
    assert_same_gradients(*(gradients(own, tensors, alike) for own in (got, wanted)), 1e-5)


def test_lanes_of_different_lengths(level):
    tensors = attention_tensors(**SIZES, dtype=torch.float32)
    valid = torch.arange(400) < torch.tensor([[400], [150]])
    compiled, plain = answers(tensors, CONFIG, is_causal=False, valid=valid)
    assert_alike(compiled, plain, 2e-5)


def test_more_sinks_than_one_vector_holds(level):
    tensors = attention_tensors(**SIZES, dtype=torch.float32)
    for sinks in (0, 1, 16, 17, 100):
        assert_alike(*answers(tensors, CONFIG.replace(sinks=sinks), is_causal=True), 2e-5)


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
def test_dimensions(level, dim):
    sizes = {**SIZES, "dim": dim, "value_dim": 16, "batch": 1}
    tensors = attention_tensors(**sizes, dtype=torch.float32)
    assert_alike(*answers(tensors, CONFIG, is_causal=True), 3e-5)


def test_a_needle_is_found(level):
    query, key, value = attention_tensors(**SIZES, dtype=torch.float32)
    key[:, :, 77] = 2.0
    query[:, :, 390:] = 2.0
    late = slice(390, None)
    got = lanes(query, key, value, CONFIG).attended.output[:, :, late]
    wanted = exact_attention(query, key, value, is_causal=True).output[:, :, late]
    assert float((got - wanted).abs().max()) < 1e-2
    lost = lanes(query, key, value, CONFIG.replace(rows=0)).attended.output[:, :, late]
    assert float((lost - wanted).abs().max()) > 0.1


def test_pieces_equal_the_whole_call(level):
    query, key, value = attention_tensors(**SIZES, dtype=torch.float32)
    whole = lanes(query, key, value, CONFIG).attended
    n_flips = 0
    for start, stop in ((0, 150), (150, 151), (151, 400)):
        piece = lanes(query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], CONFIG).attended
        own = type(whole)(whole.output[:, :, start:stop], whole.lse[:, :, start:stop])
        n_flips += int(rows_apart(piece, own, 2e-5).sum())
    assert n_flips <= 2


def test_what_it_cannot_run_is_left_to_plain_torch(level):
    query, backend = torch.zeros(1, 1, 8, 32), pick_backend(Needs.of(torch.zeros(1, 1, 8, 32)))
    assert native.level_for(query, 16, 16, backend) == level
    for wrong in ((query.double(), 16, 16), (query[..., :20], 16, 16), (query, 20, 16), (query, 16, 8)):
        assert native.level_for(*wrong, backend) == library.NO_LEVEL
    assert native.level_for(torch.zeros(1, 1, 8, 272), 16, 16, backend) == library.NO_LEVEL
    assert native.level_for(query, 16, 16, pick_backend(Needs.of(query), "plain")) == library.NO_LEVEL


def test_switched_off_there_is_none(monkeypatch):
    monkeypatch.setenv(library.VARIABLE, "0")
    assert library.load() is None
    query = torch.zeros(1, 1, 8, 32)
    assert native.level_for(query, 16, 16, pick_backend(Needs.of(query))) == library.NO_LEVEL


def test_codes_side_by_side():
    packed = encode_keys(torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))).packed
    blocks = native.side_by_side(packed)
    assert blocks.shape == (2, 3, 2, 6, 16, 4)
    for node, key, byte in ((0, 0, 0), (2, 17, 5), (1, 31, 23), (1, 15, 22)):
        assert blocks[1, node, key // 16, byte // 4, key % 16, byte % 4] == packed[1, node, key, byte]


@pytest.mark.parametrize("is_causal", [True, False])
def test_gradients_of_inputs_that_lie_as_models_have_them(level, is_causal):
    """`[B, N, H, D]` turned: where nothing is filled up, lanes are views of it."""
    sizes = {**SIZES, "batch": 1, "n_query": 5 + 6 * 64, "n_keys": 5 + 6 * 64}
    tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in attention_tensors(**sizes)]
    tensors = [t.float().requires_grad_() for t in tensors]
    assert not tensors[0].is_contiguous()
    compiled, plain = answers(tensors, CONFIG.replace(rows=0), is_causal=is_causal)
    grads = [torch.autograd.grad(a.attended.output.square().sum(), tensors) for a in (compiled, plain)]
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
