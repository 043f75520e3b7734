"""A replaced model under torch.compile: one opaque operator per layer, no graph break, the same numbers."""

import pytest
import torch
from tiny_models import prompts, tiny

import prescore
from prescore import Routed, Selected
from prescore.integrations.torchvision import import_timm

ROUTED = Routed(min_weight=1 / 4, cluster_size=2, chunk_size=2, sinks=1, exact_until=0)
COARSE = Selected("kmeans", top_k=3, sinks=1, min_seq_len=4)
IDS, MASK = prompts()


def compiled(model, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend)


def counting(graph, inputs):
    """A backend that runs a graph as it is and counts our operators in it."""
    found.append(sum("prescore.attend" in str(node.target) for node in graph.graph.nodes))
    return graph.forward


found: list[int] = []


def test_outputs_and_gradients_are_those_of_the_eager_model():
    model = tiny("Llama")
    with prescore.apply(model, ROUTED) as applied:
        model(IDS, attention_mask=MASK, labels=IDS).loss.backward()
        expected = [parameter.grad.clone() for parameter in model.parameters()]
        logits = model(IDS, attention_mask=MASK).logits
        model.zero_grad()
        fast = compiled(model)
        output = fast(IDS, attention_mask=MASK, labels=IDS)
        torch.testing.assert_close(output.logits, logits)
        output.loss.backward()
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, wanted)
        assert applied.report()[1].path == "prescored"


def test_a_layer_is_one_operator_and_undo_is_noticed():
    model = tiny("Llama")
    with torch.no_grad():
        before = model(IDS).logits
        found.clear()
        with prescore.apply(model, COARSE):
            fast = compiled(model, counting)
            during = fast(IDS).logits
            assert found == [2]
            with prescore.apply(model, ROUTED):
                inside = fast(IDS).logits
                torch.testing.assert_close(inside, model(IDS).logits)
            assert not torch.allclose(inside, during, atol=1e-3)
            torch.testing.assert_close(fast(IDS).logits, during)
        assert not torch.allclose(during, before, atol=1e-3)
        torch.testing.assert_close(fast(IDS).logits, before)


def test_a_static_cache_is_followed_through_compiled_steps():
    from transformers import StaticCache

    model = tiny("Llama")

    def steps(forward):
        cache = StaticCache(config=model.config, max_cache_len=40)
        logits = [forward(IDS, past_key_values=cache).logits[:, -1]]
        for _ in range(3):
            token = logits[-1].argmax(-1)[:, None]
            logits.append(forward(token, past_key_values=cache).logits[:, -1])
        return torch.stack(logits)

    with prescore.apply(model, COARSE) as applied, torch.no_grad():
        expected = steps(model)
        torch.testing.assert_close(steps(compiled(model)), expected)
        assert applied.report()[0].path == "step over the selection"


def test_dropout_is_drawn_from_torch_and_again_in_the_backward_pass():
    from prescore.integrations.attention import PrescoredAttention
    from prescore.integrations.patch import Patch

    patch = Patch(PrescoredAttention(COARSE), layer=0)
    query, key, value = (torch.randn(2, 2, 12, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def attend(seed):
        torch.manual_seed(seed)
        return torch.ops.prescore.attend(query, key, value, None, None, True, 0.4, False, "t", patch.handle)[0]

    output = attend(0)
    assert torch.equal(attend(0), output)
    assert not torch.equal(attend(1), output)
    grad = torch.randn_like(output)
    state = torch.get_rng_state()
    output.backward(grad)
    assert torch.equal(torch.get_rng_state(), state)
    # the output is linear in the values, as long as the same weights are dropped
    torch.testing.assert_close((value.grad * value).sum(), (grad * output).sum())


def test_a_model_with_dropout_trains():
    model = tiny("Llama", attention_dropout=0.4).train()
    with prescore.apply(model, ROUTED):
        fast = compiled(model)
        torch.manual_seed(0)
        first = fast(IDS, labels=IDS).loss
        other = fast(IDS, labels=IDS).loss
        first.backward()
        torch.manual_seed(0)
        assert torch.equal(fast(IDS, labels=IDS).loss, first)
        assert not torch.equal(other, first)


def test_autocast_and_the_name_alone():
    import prescore.integrations.transformers

    assert prescore.integrations.transformers.register() is None
    model = tiny("Llama", attn_implementation="prescored")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(IDS, attention_mask=MASK).logits
        torch.testing.assert_close(compiled(model)(IDS, attention_mask=MASK).logits, expected)


def test_the_name_alone_in_a_graph_before_any_other_call():
    import prescore.integrations.transformers

    assert prescore.integrations.transformers.register() is None
    model = tiny("Llama", attn_implementation="prescored")
    fast = compiled(model, counting)
    found.clear()
    with torch.no_grad():
        first, second = (fast(IDS, attention_mask=MASK, use_cache=False).logits for _ in range(2))
        assert found == [2]
        expected = model(IDS, attention_mask=MASK).logits
    torch.testing.assert_close(first, expected)
    assert torch.equal(first, second)
    handles = [layer.self_attn._prescore_default_patch.handle for layer in model.model.layers]
    assert len(set(handles)) == 2


def test_a_vit_of_timm():
    timm = import_timm()
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(
        img_size=32, patch_size=4, embed_dim=32, depth=1, num_heads=2, num_classes=3
    )
    images = torch.randn(2, 3, 32, 32)
    with prescore.apply(model.eval(), Selected("key-norm", top_k=5, min_seq_len=1)), torch.no_grad():
        torch.testing.assert_close(compiled(model)(images), model(images))


def test_the_operator_keeps_its_promises():
    from prescore.integrations.attention import PrescoredAttention
    from prescore.integrations.patch import Patch

    patch = Patch(PrescoredAttention(COARSE), layer=0)
    inputs = [torch.randn(2, 2, 12, 4, requires_grad=True) for _ in range(3)]
    arguments = (*inputs, None, None, True, 0.0, False, "test", patch.handle)
    torch.library.opcheck(torch.ops.prescore.attend.default, arguments)


def test_a_seat_that_is_gone_is_named():
    from prescore.errors import Unsupported

    inputs = [torch.randn(1, 1, 3, 4) for _ in range(3)]
    with pytest.raises(Unsupported, match="in test cannot run: what was applied to the model has been undone"):
        torch.ops.prescore.attend(*inputs, None, None, True, 0.0, False, "test", -1)


@pytest.mark.slow
def test_inductor_builds_it():
    model = tiny("Llama", num_hidden_layers=1)
    with prescore.apply(model, ROUTED), torch.no_grad():
        output = compiled(model, "inductor")(IDS, attention_mask=MASK).logits
        torch.testing.assert_close(output, model(IDS, attention_mask=MASK).logits, atol=1e-4, rtol=1e-4)
