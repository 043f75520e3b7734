"""A replaced model under torch.compile: one opaque operator per layer, no graph break, the same numbers."""

import importlib.util

import pytest
import torch
from tiny_models import forward, prompts, tiny
from tiny_vision_models import pixels, tiny_timm
from transformers import StaticCache

import prescore
import prescore.integrations.transformers
from prescore import Routed, Selected
from prescore.errors import Unsupported
from prescore.int8.linear import use_int8_weights
from prescore.integrations.attention import PrescoredAttention
from prescore.integrations.patch import Patch

ROUTED = Routed(min_weight=1 / 4, cluster_size=2, chunk_size=2, sinks=1, exact_until=0)
COARSE = Selected("kmeans", top_k=3, sinks=1, min_seq_len=4)
IDS, MASK = prompts()
n_operators: list[int] = []


def compiled(model, backend="aot_eager"):
    torch._dynamo.reset()
    n_operators.clear()
    return torch.compile(model, fullgraph=True, backend=backend)


def counting(graph, inputs):
    """A backend that runs a graph as it is and counts our operators in it."""
    n_operators.append(sum("prescore.attend" in str(node.target) for node in graph.graph.nodes))
    return graph.forward


def counting_int8(graph, inputs):
    """The same for products of int8 weights."""
    n_operators.append(sum("prescore.int8_linear" in str(node.target) for node in graph.graph.nodes))
    return graph.forward


def operator(inputs, dropout=0.0, handle=-1):
    return torch.ops.prescore.attend(*inputs, None, None, True, dropout, False, "test", 0, handle)[0]


def test_outputs_and_gradients_are_those_of_the_eager_model():
    model = tiny("Llama")
    with prescore.apply(model, ROUTED) as applied:
        model(IDS, attention_mask=MASK, labels=IDS).loss.backward()
        expected = [parameter.grad.clone() for parameter in model.parameters()]
        logits = forward(model, IDS, MASK)
        model.zero_grad()
        output = compiled(model)(IDS, attention_mask=MASK, labels=IDS)
        torch.testing.assert_close(output.logits, logits)
        output.loss.backward()
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, wanted)
        assert applied.report()[1].path == "prescored"


def test_a_layer_is_one_operator_and_undo_is_noticed():
    model = tiny("Llama")
    before = forward(model, IDS)
    with prescore.apply(model, COARSE):
        fast = compiled(model, counting)
        during = forward(fast, IDS)
        assert n_operators == [2]
        with prescore.apply(model, ROUTED):
            inside = forward(fast, IDS)
            torch.testing.assert_close(inside, forward(model, IDS))
        assert not torch.allclose(inside, during, atol=1e-3)
        torch.testing.assert_close(forward(fast, IDS), during)
    assert not torch.allclose(during, before, atol=1e-3)
    torch.testing.assert_close(forward(fast, IDS), before)


@pytest.mark.parametrize(("config", "path"), [(COARSE, "step over the selection"), (ROUTED, "step over all keys")])
def test_a_static_cache_is_followed_through_compiled_steps(config, path):
    model = tiny("Llama")

    def generate(model):
        cache = StaticCache(config=model.config, max_cache_len=40)
        logits = [forward(model, IDS, past_key_values=cache)[:, -1]]
        for _ in range(3):
            logits.append(forward(model, logits[-1].argmax(-1)[:, None], past_key_values=cache)[:, -1])
        return torch.stack(logits)

    with prescore.apply(model, config) as applied:
        expected = generate(model)
        torch.testing.assert_close(generate(compiled(model)), expected)
        assert applied.report()[0].path == path


@torch.no_grad()
def test_modules_beside_attention_are_compiled_with_int8_products_and_steps_stay_routed():
    model = use_int8_weights(tiny("Llama", intermediate_size=64).to(torch.bfloat16))
    options = {"max_new_tokens": 4, "do_sample": False}
    torch._dynamo.reset()
    with prescore.apply(model, ROUTED) as applied:
        expected = model.generate(IDS, **options)
        for layer in model.model.layers:
            layer.mlp.compile(fullgraph=True, backend=counting_int8)
        n_operators.clear()
        assert torch.equal(model.generate(IDS, **options), expected)
        assert applied.report()[0].path == "routed step"
    assert n_operators
    assert set(n_operators) == {3}  # all layers of the MLP


def test_dropout_is_drawn_from_torch_and_again_in_the_backward_pass():
    patch = Patch(PrescoredAttention(COARSE), layer=0)
    inputs = [torch.randn(2, 2, 12, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def attend(seed):
        torch.manual_seed(seed)
        return operator(inputs, 0.4, patch.handle)

    output = attend(0)
    assert torch.equal(attend(0), output)
    assert not torch.equal(attend(1), output)
    grad = torch.randn_like(output)
    state = torch.get_rng_state()
    output.backward(grad)
    assert torch.equal(torch.get_rng_state(), state)
    # the output is linear in the values, as long as the same weights are dropped
    value = inputs[2]
    torch.testing.assert_close((value.grad * value).sum(), (grad * output).sum())


def test_by_name_a_graph_may_be_the_first_call():
    model = tiny("Llama", attn_implementation="prescored")
    fast = compiled(model, counting)
    first, second = (forward(fast, IDS, MASK, use_cache=False) for _ in range(2))
    assert n_operators == [2]
    torch.testing.assert_close(first, forward(model, IDS, MASK))
    assert torch.equal(first, second)
    assert len({layer.self_attn._prescore_default_patch.handle for layer in model.model.layers}) == 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = forward(model, IDS, MASK)
        torch.testing.assert_close(forward(compiled(model), IDS, MASK), expected)


@pytest.mark.parametrize("side", ["left", "none"])
def test_what_is_unsupported_runs_exactly_in_the_graph(side):
    """Soft caps in a full layer; the layer with a window is exact anyway."""
    sizes = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    ids, mask = prompts(side=side)
    expected = forward(tiny("Gemma2", attn_implementation="eager", **sizes), ids, mask)
    model = tiny("Gemma2", **sizes)
    with prescore.apply(model, COARSE, on_unsupported="exact"):
        fast = compiled(model)
        with pytest.warns(UserWarning, match="runs exactly: its logits are soft-capped") as said:
            output = fast(ids, attention_mask=mask, labels=ids, use_cache=False)
        assert len(said) == 1
        torch.testing.assert_close(output.logits[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)
        output.loss.backward()
    by_name = tiny("Gemma2", attn_implementation="prescored", **sizes)
    with pytest.raises(Exception, match=r"layer 1 \(Gemma2Attention\) cannot run: its logits are soft-capped"):
        forward(compiled(by_name), ids, mask, use_cache=False)


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
def test_a_vit_of_timm():
    model = tiny_timm()
    with prescore.apply(model, Selected("key-norm", top_k=5, min_seq_len=1)), torch.no_grad():
        torch.testing.assert_close(compiled(model)(pixels()), model(pixels()))


def test_the_operator_is_well_formed_and_names_a_patch_that_is_gone():
    patch = Patch(PrescoredAttention(COARSE), layer=0)
    inputs = [torch.randn(2, 2, 12, 4, requires_grad=True) for _ in range(3)]
    arguments = (*inputs, None, None, True, 0.0, False, "test", 0, patch.handle)
    torch.library.opcheck(torch.ops.prescore.attend.default, arguments)
    with pytest.raises(Unsupported, match="in test cannot run: what was applied to the model has been undone"):
        operator(inputs)


@pytest.mark.slow
def test_inductor_builds_it():
    model = tiny("Llama", num_hidden_layers=1)
    with prescore.apply(model, ROUTED):
        output = forward(compiled(model, "inductor"), IDS, MASK)
        torch.testing.assert_close(output, forward(model, IDS, MASK), atol=1e-4, rtol=1e-4)
