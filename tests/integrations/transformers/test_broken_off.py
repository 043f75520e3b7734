"""A forward that is refused half way leaves its cache as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import VOCABULARY, tiny

import prescore
from prescore import Routed, Selected
from prescore.errors import Unsupported
from prescore.integrations.transformers import PrescoredCache

SELECTED = Selected(top_k=8, min_seq_len=8, sinks=1)
ROUTED = Routed(min_weight=1 / 16, chunk_size=8, cluster_size=4, sinks=1, exact_until=8)
IDS = torch.randint(2, VOCABULARY, (1, 60), generator=torch.Generator().manual_seed(3))


def held(cache):
    """What is held of each layer; the room for later tokens may have grown."""
    layers = cache.report()["layers"]
    return [{name: count for name, count in layer.items() if name != "bytes"} for layer in layers]


def assert_goes_on_as(model, cache, other, ids):
    own, wanted = (model(ids, past_key_values=each).logits for each in (cache, other))
    torch.testing.assert_close(own, wanted)


def asks_for_weights(model, cache):
    model(IDS[:, :40], past_key_values=cache, output_attentions=True)


def has_another_batch(model, cache):
    model(IDS[:, :2].expand(2, -1), past_key_values=cache)


def has_a_mask_of_no_structure(model, cache):
    mask = torch.rand(1, 1, 3, 63, generator=torch.Generator().manual_seed(0)) < 0.5
    model(IDS[:, :3], past_key_values=cache, attention_mask=mask)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
@pytest.mark.parametrize("config", [SELECTED, ROUTED], ids=["selected", "routed"])
@pytest.mark.parametrize("n_steps", [0, 2])
@pytest.mark.parametrize("refused", [asks_for_weights, has_another_batch, has_a_mask_of_no_structure])
def test_a_refused_forward_changes_no_cache(family, config, n_steps, refused):
    model = tiny(family)
    with torch.no_grad(), prescore.apply(model, config):
        cache = PrescoredCache(model.config)
        model(IDS, past_key_values=cache)
        for token in IDS[0, :n_steps]:
            model(token.view(1, 1), past_key_values=cache)
        before, other = held(cache), copy.deepcopy(cache)
        with pytest.raises((Unsupported, ValueError, RuntimeError)):  # the last by a layer of transformers
            refused(model, cache)
        assert held(cache) == before
        for token in IDS[0, 5:8]:
            assert_goes_on_as(model, cache, other, token.view(1, 1))


def test_a_question_too_long_for_an_evicted_cache_can_be_asked_in_pieces():
    model = tiny("Llama")
    with torch.no_grad(), prescore.apply(model, SELECTED):
        cache = PrescoredCache(model.config, evict=True)
        model(IDS, past_key_values=cache)
        model(IDS[:, :1], past_key_values=cache)
        other = copy.deepcopy(cache)
        with pytest.raises(Unsupported, match="evicted"):
            model(IDS[:, :40], past_key_values=cache)
        assert_goes_on_as(model, cache, other, IDS[:, :20])


def test_an_eviction_is_taken_back_too():
    model = tiny("Llama")
    with torch.no_grad(), prescore.apply(model, SELECTED):
        cache = PrescoredCache(model.config, evict=True)
        model(IDS, past_key_values=cache)
        other = copy.deepcopy(cache)

        def fail(*args):
            raise RuntimeError("no")

        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no"):  # layer 0 has selected and evicted by then
            model(IDS[:, :1], past_key_values=cache)
        hook.remove()
        assert held(cache) == held(other)
        assert_goes_on_as(model, cache, other, IDS[:, :30])


def test_indices_and_repeats_outside_are_refused():
    model = tiny("Llama")
    with torch.no_grad(), prescore.apply(model, SELECTED):
        cache = PrescoredCache(model.config)
        model(IDS, past_key_values=cache)
    with pytest.raises(ValueError, match=r"indices must lie between 0 and 0, got \[1\]"):
        cache.reorder_cache(torch.tensor([1]))
    with pytest.raises(ValueError, match="repeats must be at least 1, got -1"):
        cache.batch_repeat_interleave(-1)
    with pytest.raises(TypeError, match="config must be a model's configuration or None, got str"):
        PrescoredCache("x")


def test_a_tolerance_with_gradients_is_refused_or_exact():
    model = tiny("Llama")
    tolerant = ROUTED.replace(tolerance=0.05)
    with prescore.apply(model, tolerant), pytest.raises(Unsupported, match=r"layer 0 .*no_grad.*on_unsupported"):
        model(IDS)
    with prescore.apply(model, tolerant, on_unsupported="exact"), pytest.warns(UserWarning, match="runs exactly"):
        found = model(IDS).logits
    torch.testing.assert_close(found, model(IDS).logits)


def test_one_token_of_a_language_model_is_no_reason_to_warn(recwarn):
    model = tiny("Llama")
    with torch.no_grad(), prescore.apply(model):
        model.generate(torch.tensor([[1]]), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert not [warning for warning in recwarn if "changes nothing" in str(warning.message)]


def test_what_was_undone_cannot_be_entered():
    applied = prescore.apply(tiny("Llama"), SELECTED)
    applied.undo()
    with pytest.raises(ValueError, match="apply again"), applied:
        pass
