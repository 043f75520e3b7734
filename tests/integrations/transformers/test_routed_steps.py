"""Decoding with `Routed`: a step is the last row of a prompt of that length."""

import contextlib
import copy

import pytest
import torch

pytest.importorskip("transformers")
from transformers import LlamaConfig, LlamaForCausalLM

import prescore

CONFIG = prescore.Routed(min_weight=1 / 32, cluster_size=8, chunk_size=16, sinks=2, exact_until=16)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.5,
        eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def tokens(batch, length):
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(length))


def steps(model, ids, mask, n_prompt, cache=None):
    """Logits of every position from `n_prompt - 1` on, one token at a time."""
    out = model(ids[:, :n_prompt], attention_mask=mask[:, :n_prompt], use_cache=True, past_key_values=cache)
    logits, past = [out.logits[:, -1]], out.past_key_values
    for position in range(n_prompt, ids.shape[1]):
        out = model(
            ids[:, position : position + 1],
            attention_mask=mask[:, : position + 1],
            past_key_values=past,
            use_cache=True,
        )
        logits.append(out.logits[:, -1])
    return torch.stack(logits, dim=1), past


@torch.no_grad()
def test_steps_equal_one_long_prompt(model):
    ids = tokens(2, 150)
    mask = torch.ones_like(ids)
    with prescore.apply(model, CONFIG) as applied:
        whole = model(ids).logits[:, 89:]
        got, _ = steps(model, ids, mask, 90)
        paths = {entry.path for entry in applied.report().layers}
    torch.testing.assert_close(got, whole, rtol=1e-9, atol=1e-9)
    assert paths == {"routed step"}
    exact = model(ids).logits[:, 89:]
    assert (exact - whole).abs().max() > 1e-3  # the test would prove nothing if routing changed nothing


@torch.no_grad()
def test_left_padded_prompts_step_like_each_alone(model):
    ids = tokens(2, 150)
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with prescore.apply(model, CONFIG):
        alone, _ = steps(model, ids[1:, 37:], mask[1:, 37:], 60)
        out = model(ids[:, :97], attention_mask=mask[:, :97], position_ids=positions[:, :97], use_cache=True)
        got, past = [out.logits[1:, -1]], out.past_key_values
        for position in range(97, 150):
            out = model(
                ids[:, position : position + 1],
                attention_mask=mask[:, : position + 1],
                position_ids=positions[:, position : position + 1],
                past_key_values=past,
            )
            got.append(out.logits[1:, -1])
    torch.testing.assert_close(torch.stack(got, dim=1), alone, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_reordered_and_cropped_caches_go_on_rightly(model):
    ids = tokens(2, 120)
    mask = torch.ones_like(ids)
    with prescore.apply(model, CONFIG):
        _, past = steps(model, ids[:, :110], mask[:, :110], 90)
        past.reorder_cache(torch.tensor([1, 1]))
        got = model(ids[:1, 110:111].repeat(2, 1), past_key_values=past).logits[:, -1]
        twice = torch.cat((ids[1:, :110], ids[:1, 110:111]), dim=1)
        wanted = model(twice).logits[:, -1]
        torch.testing.assert_close(got, wanted.repeat(2, 1), rtol=1e-9, atol=1e-9)
        past.crop(-31)
        got = model(ids[1:, 80:81].repeat(2, 1), past_key_values=past).logits[:, -1]
        wanted = model(ids[1:, :81]).logits[:, -1]
        torch.testing.assert_close(got, wanted.repeat(2, 1), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_another_configuration_goes_its_own_way_on_the_same_cache(model):
    ids = tokens(1, 130)
    mask = torch.ones_like(ids)
    selected = prescore.Selected(top_k=8, min_seq_len=16)
    with prescore.apply(model, CONFIG) as applied:
        _, past = steps(model, ids[:, :122], mask[:, :122], 120)
        assert {entry.path for entry in applied.report().layers} == {"routed step"}
    with prescore.apply(model, selected) as applied:
        model(ids[:, 122:123], past_key_values=past)
        assert {entry.path for entry in applied.report().layers} == {"step over the selection"}
    anew = copy.deepcopy(past)
    for layer in anew.layers:
        layer._decoder._index = None  # clusters of all keys, made now
    with prescore.apply(model, CONFIG):
        got, expected = (model(ids[:, 123:124], past_key_values=cache).logits for cache in (past, anew))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_beams_and_greedy_generation_run(model):
    prompt = tokens(2, 100)
    with prescore.apply(model, CONFIG):
        greedy = model.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
        beams = model.generate(prompt, max_new_tokens=20, num_beams=3, do_sample=False, pad_token_id=0)
        again = [prompt]
        for _ in range(20):
            following = model(torch.cat(again, dim=1)).logits[:, -1].argmax(-1, keepdim=True)
            again.append(following)
    assert torch.equal(greedy, torch.cat(again, dim=1))
    assert beams.shape == greedy.shape


def test_inference_mode_with_padding(model):
    ids = tokens(2, 90)
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    with torch.inference_mode(), prescore.apply(model, CONFIG):
        inference = model(ids, attention_mask=mask.clone()).logits
    with torch.no_grad(), prescore.apply(model, CONFIG):
        plain = model(ids, attention_mask=mask).logits
    assert torch.equal(inference, plain)


@torch.no_grad()
def test_short_caches_are_stepped_exactly(model):
    ids = tokens(1, 120)
    with prescore.apply(model, CONFIG.replace(exact_until=200)) as applied:
        steps(model, ids, torch.ones_like(ids), 118)
        paths = {entry.path for entry in applied.report().layers}
    assert paths == {"step over all keys"}


@torch.no_grad()
def test_steps_keep_the_tolerance(model):
    ids = tokens(1, 120)
    exact = model(ids).logits[:, 117:]
    with prescore.apply(model, CONFIG.replace(tolerance=1e-9)) as applied:
        got = steps(model, ids, torch.ones_like(ids), 118)[0]
        paths = {entry.path for entry in applied.report().layers}
    torch.testing.assert_close(got, exact, rtol=0, atol=1e-6)
    assert paths == {"routed step"}


def test_steps_that_are_learned_from_are_exact(model):
    ids = tokens(1, 120)
    config = CONFIG.replace(exact_until=110)  # the prompt is exact too, so that gradients can be compared
    weights = model.model.layers[0].self_attn.k_proj.weight
    grads = []
    for apply in (False, True):
        with prescore.apply(model, config) if apply else contextlib.nullcontext():
            logits = steps(model, ids, torch.ones_like(ids), 110)[0]
        grads.append(torch.autograd.grad(logits[:, -1].logsumexp(-1).sum(), weights)[0])
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=1e-9)
