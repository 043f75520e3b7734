"""Chunks of a prompt, static caches, assisted generation, packed sequences, training, threads."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from tiny_models import EVERY_KEY, ROUNDING, ROUTED, SMALL, forward, prompts, tiny
from transformers import DynamicCache, Trainer, TrainingArguments

import prescore
import prescore.integrations.transformers
from prescore import Routed, Selected
from prescore.integrations.transformers.cache import PrescoredCache

pytestmark = pytest.mark.filterwarnings("ignore:every chosen layer")  # of Mistral, tested in test_apply

COARSE = Selected(top_k=6, min_seq_len=8, sinks=2)
CONFIGS = {"every key": EVERY_KEY, "coarse": COARSE, "routed": ROUTED}
GENERATIONS = int(os.environ.get("GENERATIONS", "30"))
both = pytest.mark.parametrize("config", [COARSE, ROUTED], ids=["coarse", "routed"])


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Mistral"])
@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_in_chunks_equals_prefill_at_once(family, name):
    model = tiny(family)
    ids, mask = prompts(length=96, cut=5)
    # a chunk of at most 32 tokens counts as decoding, so it is compared with every key only
    sizes, cache = (40, 40, 16) if name == "every key" else (40, 40), DynamicCache(config=model.config)
    with prescore.apply(model, CONFIGS[name]):
        whole, done, parts = forward(model, ids, mask), 0, []
        for size in sizes:
            chunk, done = ids[:, done : done + size], done + size
            parts.append(forward(model, chunk, mask[:, :done], past_key_values=cache))
    real = mask[:, :done].bool()
    assert (torch.cat(parts, 1) - whole[:, :done])[real].abs().max() < ROUNDING


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", SMALL)
def test_right_padded_prompts_generate_the_same_with_any_cache(name, cache):
    model = tiny("Llama")
    ids, mask = prompts(side="right")
    mask[1, -2:] = 0  # every sequence ends in padding
    ids = ids * mask
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": mask}
    exact = model.generate(ids, **options)
    with prescore.apply(model, SMALL[name]):
        expected = model.generate(ids, **options)
        assert torch.equal(model.generate(ids, cache_implementation=cache, **options), expected)
    for config in (EVERY_KEY, Routed()):
        with prescore.apply(model, config):
            assert torch.equal(model.generate(ids, cache_implementation=cache, **options), exact)


def test_assisted_generation():
    model, assistant = tiny("Llama"), tiny("Llama", num_hidden_layers=1)
    ids, mask = prompts(batch=1, length=40, cut=0)

    def generate():
        options = {"assistant_model": assistant, "max_new_tokens": 12, "do_sample": False}
        return model.generate(ids, attention_mask=mask, **options)

    expected = generate()
    for config in (EVERY_KEY, EVERY_KEY.replace(top_k=1000)):
        with prescore.apply(model, config):
            assert torch.equal(generate(), expected)
    with prescore.apply(model, COARSE) as applied:
        cache = PrescoredCache(model.config)
        greedy = [forward(model, ids, past_key_values=cache)[:, -1:].argmax(-1)]
        cache.select()  # among the prompt, as several first tokens do
        while len(greedy) < 12:
            greedy.append(forward(model, greedy[-1], past_key_values=cache).argmax(-1))
        # the same selection: its crops never reach the prompt
        assert torch.equal(generate()[:, 40:], torch.cat(greedy, dim=1))
        assert applied.report()[0].path == "step over the selection"


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_sequences_do_not_see_each_other(name):
    model = tiny("Llama")
    ids, _ = prompts(length=44, side="none")
    positions = torch.cat([torch.arange(n) for n in (17, 27)])[None].expand(2, -1)
    with prescore.apply(model, CONFIGS[name]) as applied:
        packed = forward(model, ids, position_ids=positions, use_cache=False)
        assert applied.report()[0].last.mask == "packed"
        alone = [forward(model, part, use_cache=False) for part in ids.split((17, 27), dim=1)]
    assert (packed - torch.cat(alone, 1)).abs().max() < ROUNDING


def train(model, config, n_steps, checkpointing):
    """Losses, and the gradients of the first step."""
    ids, mask = prompts(batch=3, length=48)
    labels = ids.masked_fill(mask == 0, -100)
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer, losses, gradients = torch.optim.SGD(model.parameters(), lr=1e-2), [], []
    torch.manual_seed(11)
    with prescore.apply(model.train(), config) as applied:
        for _ in range(n_steps):
            loss = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            gradients = gradients or [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            losses.append(float(loss.detach()))
        assert applied.report()[0].path == "prescored"
    return losses, gradients


@pytest.mark.parametrize(
    ("family", "sizes"), [("Llama", {}), ("Llama", {"attention_dropout": 0.1}), ("Qwen3", {}), ("GPT2", {})]
)
@both
def test_training_lowers_the_loss_and_checkpointing_gives_the_same_gradients(family, sizes, config):
    """Dropout too: all runs start from one seed of torch's generator, which checkpointing restores."""
    gradients, n_steps = [], 12 if sizes else 3
    for checkpointing in (False, True):
        losses, first = train(tiny(family, **sizes), config, n_steps, checkpointing)
        assert sum(losses[-(n_steps // 3) :]) < sum(losses[: n_steps // 3])
        gradients.append(first)
    assert max(gradient.abs().max() for gradient in gradients[0]) > 1e-3
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(
            plain, recomputed, atol=1e-6, rtol=1e-4
        )  # recomputed sums may round differently


@pytest.mark.parametrize("config", [EVERY_KEY, COARSE], ids=["every key", "coarse"])
def test_a_step_on_a_cache_drops_too(config):
    model = tiny("Llama", attention_dropout=0.3)
    ids, mask = prompts(length=40)
    results = []
    with prescore.apply(model, config) as applied:
        for training in (False, True, True):
            cache = DynamicCache(config=model.config)
            forward(model.eval(), ids[:, :-1], mask[:, :-1], past_key_values=cache)
            torch.manual_seed(len(results))
            results.append(forward(model.train(training), ids[:, -1:], mask, past_key_values=cache))
            assert "step" in applied.report()[0].path
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not torch.allclose(results[one], results[other])


@pytest.mark.parametrize("lower", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["selected", "routed"])
def test_half_precision_and_autocast_read_step_and_train(name, dtype, lower):
    model = tiny("Llama", num_hidden_layers=1).to(dtype)
    ids, mask = prompts()
    with prescore.apply(model, SMALL[name]), torch.autocast("cpu", lower or torch.bfloat16, lower is not None):
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
        loss = model.train()(ids, attention_mask=mask, labels=ids).loss
    assert tokens.shape == (2, 27)
    loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_trainer(tmp_path):
    model = tiny("Llama")
    ids, mask = prompts(batch=8, length=40)
    columns = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    rows = [{name: column[number] for name, column in columns.items()} for number in range(8)]
    options = {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(str(tmp_path), gradient_checkpointing=True, **options, **quiet)
    with prescore.apply(model, COARSE) as applied:
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        assert applied.report()[0].path == "prescored"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["by name", "routed", "selected"])
def test_six_threads_give_the_tokens_of_one(name, cache, request):
    """`GENERATIONS=200 python -m pytest -k six_threads` runs longer."""
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-5)
    model = tiny("Llama", **({"attn_implementation": "prescored"} if name == "by name" else {}))
    texts = [prompts(batch=1 + n % 2, length=11 + n % 7, cut=0, seed=n) for n in range(GENERATIONS)]

    def generate(text):
        options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
        return model.generate(text[0], attention_mask=text[1], **options)

    if name != "by name":
        prescore.apply(model, SMALL[name])
    alone = [generate(text) for text in texts]
    with ThreadPoolExecutor(6) as pool:
        threaded = pool.map(generate, texts)
    assert all(torch.equal(one, other) for one, other in zip(alone, threaded, strict=True))
