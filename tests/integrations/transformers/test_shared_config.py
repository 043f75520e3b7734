"""Models that share one configuration object, copies of models, and attention weights."""

import copy
import itertools

import pytest
import torch
from tiny_models import forward, leftovers, prompts, tiny

import prescore
from prescore import Exact, Routed, Selected
from prescore.errors import Unsupported

COARSE = Selected("key-norm", top_k=3, sinks=1, min_seq_len=4)
ROUTED = Routed(min_weight=1 / 4, cluster_size=2, chunk_size=2, sinks=1, exact_until=0)
IDS, MASK = prompts()


def twins(implementation="sdpa"):
    first = tiny("Llama", attn_implementation=implementation)
    second = type(first)(first.config).eval()
    assert first.config is second.config
    return first, second


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("order", list(itertools.permutations("abc")), ids="".join)
def test_models_that_share_a_configuration_leave_each_other_alone(order, implementation):
    first, second = twins(implementation)
    shared = first.config
    plain = [forward(first, IDS, MASK), forward(second, IDS, MASK)]
    applied = {"a": prescore.apply(first, COARSE)}
    assert torch.equal(forward(second, IDS, MASK), plain[1])
    of_a = forward(first, IDS, MASK)
    applied["b"] = prescore.apply(second, ROUTED)
    of_b = forward(second, IDS, MASK)
    assert torch.equal(forward(first, IDS, MASK), of_a)
    applied["c"] = prescore.apply(first, ROUTED)
    of_c = forward(first, IDS, MASK)
    assert not torch.allclose(of_a, of_c, atol=1e-3)
    active = set("abc")
    for name in order:
        applied[name].undo()
        active.discard(name)
        expected = of_c if "c" in active else of_a if "a" in active else plain[0]
        assert torch.equal(forward(first, IDS, MASK), expected)
        assert torch.equal(forward(second, IDS, MASK), of_b if "b" in active else plain[1])
    assert first.config is second.config is first.model.layers[0].self_attn.config is shared
    assert shared._attn_implementation == implementation
    assert not leftovers(first)
    assert not leftovers(second)


def test_changes_of_the_configuration_meanwhile_stay():
    first, second = twins()
    del_me = first.config.del_me = object()
    with prescore.apply(first, COARSE):
        first.config.use_cache = False
        first.config.later = 7
        del first.config.del_me
        assert second.config.del_me is del_me
    assert first.config.use_cache is second.config.use_cache is False
    assert first.config.later == 7
    assert not hasattr(first.config, "del_me")
    other = copy.deepcopy(first.config)
    with prescore.apply(first, COARSE):
        first.config = other
    assert first.config is other


def test_a_copy_of_a_model_stays_applied_and_an_application_is_not_copied():
    model = tiny("Llama")
    before = forward(model, IDS, MASK)
    with prescore.apply(model, COARSE) as applied:
        during = forward(model, IDS, MASK)
        twin = copy.deepcopy(model)
        with pytest.raises(Unsupported, match="a copy of an Applied cannot run: it belongs to one model"):
            copy.deepcopy(applied)
    assert torch.equal(forward(model, IDS, MASK), before)
    assert torch.equal(forward(twin, IDS, MASK), during)
    with prescore.apply(twin, Exact()):
        torch.testing.assert_close(forward(twin, IDS, MASK), before, atol=1e-4, rtol=1e-4)
    assert torch.equal(forward(twin, IDS, MASK), during)


def test_weights_are_refused_or_exact():
    inputs = {"attention_mask": MASK, "output_attentions": True}
    expected = tiny("Llama", attn_implementation="eager")(IDS, **inputs)
    model = tiny("Llama")
    with prescore.apply(model, COARSE), pytest.raises(Unsupported, match="output_attentions=True asks"):
        model(IDS, **inputs)
    with prescore.apply(model, COARSE, on_unsupported="exact"):
        with pytest.warns(UserWarning, match="runs exactly: output_attentions=True"):
            output = model(IDS, **inputs)
        real = MASK.bool()[:, None, :, None]  # eager lets padding queries see padding
        for got, wanted in zip(output.attentions, expected.attentions, strict=True):
            torch.testing.assert_close(got * real, wanted * real)
        torch.testing.assert_close(output.logits[MASK.bool()], expected.logits[MASK.bool()])
        assert not torch.allclose(forward(model, IDS, MASK), output.logits, atol=1e-3)
    with prescore.apply(model, Exact()):
        assert len(model(IDS, **inputs).attentions) == 2
