"""int8 weights and activations: close to the layer they replace, a token at a time, or refused."""

import pytest
import torch
from oracles.tiny_language_model import tiny_language_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import prescore
from prescore.bench.language.generation import prefill
from prescore.errors import Unsupported
from prescore.int8 import linear as linear_module
from prescore.int8.linear import GROUP, Int8Linear, use_int8_weights
from prescore.integrations.transformers import PrescoredCache


def layer(n_in, n_out, *, bias, dtype):
    generator = torch.Generator().manual_seed(n_in)
    made = nn.Linear(n_in, n_out, bias=bias, dtype=dtype)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    return made, torch.randn(3, 50, n_in, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n_in", "n_out", "bias"), [(32, 48, False), (48, 7, True), (2, 1, True)])
@torch.no_grad()
def test_a_layer_is_close_to_the_one_it_replaces(n_in, n_out, bias, dtype, monkeypatch):
    linear, inputs = layer(n_in, n_out, bias=bias, dtype=dtype)
    inputs[0, 0] = 0
    inputs[0, 1] *= 1000  # its own scale: no other token becomes less precise
    quantised, wanted = Int8Linear(linear), linear(inputs).float()
    output = quantised(inputs)
    assert output.dtype == dtype
    scale = wanted.abs().amax(-1, keepdim=True)
    assert float(((output.float() - wanted).abs() / scale.clamp(min=1)).max()) < 0.05
    assert torch.equal(output[0, 0], linear.bias if bias else torch.zeros(n_out, dtype=dtype))
    # a token's result does not depend on the others, nor a weight on how many are converted at a time
    assert torch.equal(torch.stack([quantised(token) for token in inputs[1]]), output[1])
    monkeypatch.setattr(linear_module, "_BLOCK", 64)
    assert torch.equal(Int8Linear(linear).numbers, quantised.numbers)
    assert torch.equal(Int8Linear(linear).weight, quantised.weight)


CONTEXTS = {
    "zero": (lambda layer, some: layer(torch._efficientzerotensor(some.shape, dtype=some.dtype)), 0),
    "negated": (lambda layer, some: layer(torch._neg_view(some)), -1),
    "traced": (lambda layer, some: torch.jit.trace(layer, (some,))(some), 1),
    "graph": (lambda layer, some: make_fx(layer)(some)(some), 1),
    "inference": (lambda layer, some: torch.inference_mode()(layer)(some), 1),
}
"""How a layer is called, and with how many times the input."""


@pytest.mark.parametrize("context", CONTEXTS)
@torch.no_grad()
def test_whatever_calls_a_layer_gets_its_result(context):
    linear, inputs = layer(64, 48, bias=True, dtype=torch.bfloat16)
    quantised, (call, factor) = Int8Linear(linear), CONTEXTS[context]
    assert torch.equal(call(quantised, inputs[0]), quantised(factor * inputs[0]))


@torch.no_grad()
def test_tensors_without_numbers_give_shapes():
    linear, inputs = layer(64, 48, bias=True, dtype=torch.bfloat16)
    quantised = Int8Linear(linear)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert quantised(mode.from_tensor(inputs)).shape == (3, 50, 48)
    assert quantised.to("meta")(inputs.to("meta")).shape == (3, 50, 48)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_casts_of_the_model_leave_the_scales(dtype):
    linear, inputs = layer(64, 48, bias=False, dtype=torch.bfloat16)
    linear.weight.mul_(1e-5)
    quantised = Int8Linear(linear)
    wanted = quantised(inputs)
    model = nn.Sequential(quantised).to(dtype)
    assert quantised.scale.dtype == torch.float32
    assert torch.equal(model(inputs), wanted)


@torch.no_grad()
def test_in_a_compiled_graph_it_is_one_operator_with_the_same_result():
    linear, inputs = layer(32, 48, bias=True, dtype=torch.bfloat16)
    quantised = Int8Linear(linear)
    compiled = torch.compile(quantised, fullgraph=True, backend="aot_eager")
    for some in (inputs, inputs[:1, :1]):
        assert torch.equal(compiled(some), quantised(some))


@torch.no_grad()
def test_a_group_of_inputs_is_as_precise_as_it_is_alone():
    linear, inputs = layer(3 * GROUP, 48, bias=False, dtype=torch.float32)
    inputs[..., :GROUP] *= 1000  # would round all else away, were there one scale per token
    linear.weight[:, :GROUP] = 0
    quantised, alone = Int8Linear(linear), nn.Linear(2 * GROUP, 48, bias=False)
    alone.weight.copy_(linear.weight[:, GROUP:])
    assert torch.allclose(quantised(inputs), Int8Linear(alone)(inputs[..., GROUP:]), atol=1e-5)


@torch.no_grad()
def test_a_model_keeps_its_loss_and_its_chunks_give_one_result():
    model, _ = tiny_language_model()
    ids = torch.randint(200, (1, 320), generator=torch.Generator().manual_seed(0))
    config = prescore.Routed(chunk_size=32, cluster_size=8, exact_until=64)
    with prescore.apply(model, config):
        loss = float(model(ids, labels=ids).loss)
    use_int8_weights(model.to(torch.bfloat16))
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    are_int8 = [isinstance(module, Int8Linear) for module in linears]
    assert are_int8 == [True] * len(linears)
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    with prescore.apply(model, config) as applied:
        assert float(model(ids, labels=ids).loss) == pytest.approx(loss, abs=0.05)
        whole, chunks = (
            prefill(model, ids, PrescoredCache(model.config), chunk_size=size).float() for size in (None, 100)
        )
        assert "routed" in str(applied)
    assert torch.allclose(whole, chunks, atol=0.05 * float(whole.abs().max()))


def test_what_cannot_run_is_refused_and_changes_nothing():
    for kept in (nn.Linear(1, 4), nn.Linear(32, 2), nn.Linear(64, 4)):  # routers, classifiers
        assert type(use_int8_weights(nn.Sequential(kept))[0]) is nn.Linear
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(Unsupported, match=r"weights must be floating and on a CPU, got 1 torch.float32 on meta"):
        use_int8_weights(model)
    assert type(model[0]) is nn.Linear
    quantised = Int8Linear(nn.Linear(4, 4))
    for wrong in (torch.ones(2, 6), torch.ones(()), torch.ones(2, 4, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"input must be floating with 4 features .*, got \("):
            quantised(wrong)
    with pytest.raises(TypeError, match="model must be a torch module, got 'smollm2'"):
        use_int8_weights("smollm2")
    with pytest.raises(Unsupported, match="gradients through int8 weights"):
        quantised(torch.ones(1, 4, requires_grad=True))
