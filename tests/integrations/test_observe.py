"""Observers see true queries and keys, and the model runs as it always does."""

import pytest
import torch
from tiny_models import prompts, tiny

import prescore
from prescore.errors import Unsupported
from prescore.integrations.apply import observe
from prescore.integrations.patch import patches


def run(model):
    ids, mask = prompts(length=32)
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "GPT2"])
def test_every_layer_is_shown_once(family):
    model = tiny(family)
    expected, seen = run(model), []
    with observe(model, lambda query, key, context: seen.append((context, query, key))) as n_layers:
        got = run(model)
    assert n_layers == 2
    assert [context.layer for context, _, _ in seen] == [0, 1]
    assert all(query.shape[2] == key.shape[2] == 32 for _, query, key in seen)
    assert (got - expected).abs().max() < 1e-4  # another exact kernel
    assert torch.equal(run(model), expected)
    assert not any(patches(module) for module in model.modules())


def test_an_observer_above_an_application_comes_off_again():
    model = tiny("Llama")
    exact = run(model)
    with prescore.apply(model, prescore.Selected(top_k=4, min_seq_len=4)):
        expected = run(model)
        with observe(model, lambda *shown: None):
            assert (run(model) - exact).abs().max() < 1e-4
        assert torch.equal(run(model), expected)


def test_an_error_in_an_observer_leaves_nothing_behind():
    model = tiny("Llama")

    def fail(*shown):
        raise RuntimeError("looked away")

    with pytest.raises(RuntimeError, match="looked away"), observe(model, fail):
        run(model)
    assert model.config._attn_implementation == "sdpa"
    assert not any(patches(module) for module in model.modules())


def test_models_without_an_attention_that_can_be_reached_are_refused():
    with pytest.raises(Unsupported, match="attention interface"), observe(tiny("Falcon"), lambda *shown: None):
        pass
