"""Models that share one configuration object, copies, and what is asked for beside the output."""

import copy
import itertools

import pytest
import torch
from tiny_models import prompts, tiny

import prescore
from prescore import Exact, Routed, Selected
from prescore.errors import Unsupported

COARSE = Selected("key-norm", top_k=3, sinks=1, min_seq_len=4)
ROUTED = Routed(min_weight=1 / 4, cluster_size=2, chunk_size=2, sinks=1, exact_until=0)
IDS, MASK = prompts()


def logits(model):
    with torch.no_grad():
        return model(IDS, attention_mask=MASK).logits


def twins(implementation):
    first = tiny("Llama", attn_implementation=implementation)
    second = type(first)(first.config).eval()
    assert first.config is second.config
    return first, second


def left_behind(*models):
    return [name for model in models for m in model.modules() for name in vars(m) if name.startswith("_prescore")]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("order", list(itertools.permutations("abc")), ids="".join)
def test_models_that_share_a_configuration_leave_each_other_alone(order, implementation):
    first, second = twins(implementation)
    shared = first.config
    own = [logits(first), logits(second)]
    applied = {"a": prescore.apply(first, COARSE)}
    assert torch.equal(logits(second), own[1])
    of_a = logits(first)
    applied["b"] = prescore.apply(second, ROUTED)
    of_b = logits(second)
    assert torch.equal(logits(first), of_a)
    applied["c"] = prescore.apply(first, ROUTED)
    of_c = logits(first)
    assert not torch.allclose(of_a, of_c, atol=1e-3)
    active = set("abc")
    for name in order:
        applied[name].undo()
        active.discard(name)
        expected = of_c if "c" in active else of_a if "a" in active else own[0]
        assert torch.equal(logits(first), expected)
        assert torch.equal(logits(second), of_b if "b" in active else own[1])
    assert first.config is second.config is first.model.layers[0].self_attn.config is shared
    assert shared._attn_implementation == implementation
    assert not left_behind(first, second)


def test_what_is_changed_meanwhile_is_kept():
    first, second = twins("sdpa")
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
    before = logits(model)
    with prescore.apply(model, COARSE) as applied:
        during = logits(model)
        twin = copy.deepcopy(model)
        with pytest.raises(Unsupported, match="a copy of an Applied cannot run: it undoes"):
            copy.deepcopy(applied)
    assert torch.equal(logits(model), before)
    assert torch.equal(logits(twin), during)
    with prescore.apply(twin, Exact()):
        torch.testing.assert_close(logits(twin), before, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits(twin), during)


def test_weights_are_refused_or_exact():
    expected = tiny("Llama", attn_implementation="eager")(IDS, attention_mask=MASK, output_attentions=True)
    model = tiny("Llama")
    with (
        prescore.apply(model, COARSE),
        pytest.raises(Unsupported, match="output_attentions=True asks"),
    ):
        model(IDS, attention_mask=MASK, output_attentions=True)
    with prescore.apply(model, COARSE, on_unsupported="exact"):
        with pytest.warns(UserWarning, match="runs exactly: output_attentions=True"):
            output = model(IDS, attention_mask=MASK, output_attentions=True)
        assert output.attentions is not None
        assert len(output.attentions) == len(expected.attentions)
        real = MASK.bool()[:, None, :, None]  # eager lets padded queries see padding
        for own, wanted in zip(output.attentions, expected.attentions, strict=True):
            torch.testing.assert_close(own * real, wanted * real)
        torch.testing.assert_close(output.logits[MASK.bool()], expected.logits[MASK.bool()])
        assert not torch.allclose(logits(model), output.logits, atol=1e-3)
    with prescore.apply(model, Exact()):
        assert len(model(IDS, attention_mask=MASK, output_attentions=True).attentions) == 2
