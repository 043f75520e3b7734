"""Prefill in pieces, static caches, packed sequences, training."""

import pytest
import torch
from tiny_models import VOCABULARY, prompts, tiny
from transformers import DynamicCache, StaticCache

import prescore
from prescore import Routed, Selected
from prescore.integrations.transformers.cache import PrescoredCache

pytestmark = pytest.mark.filterwarnings("ignore:every chosen layer")  # of Mistral, tested in test_apply

EVERYTHING = Selected(top_k=1.0, remainder="none", min_seq_len=4)
COARSE = Selected(top_k=6, min_seq_len=8, sinks=2)
ROUTED = Routed(min_weight=1 / 16, cluster_size=4, chunk_size=8, sinks=2, exact_until=8)


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Mistral"])
@pytest.mark.parametrize("config", [EVERYTHING, COARSE, ROUTED], ids=["everything", "coarse", "routed"])
def test_prefill_in_chunks_equals_prefill_at_once(family, config):
    model = tiny(family)
    ids, mask = prompts(length=96, cut=5)
    pieces = (40, 40, 16)  # a piece of at most 32 tokens counts as decoding, so it is compared with all keys only
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), prescore.apply(model, config):
        whole = model(ids, attention_mask=mask).logits
        done, parts = 0, []
        for size in pieces[: 3 if config is EVERYTHING else 2]:
            piece = ids[:, done : done + size]
            done += size
            parts.append(model(piece, attention_mask=mask[:, :done], past_key_values=cache).logits)
    real = mask[:, :done].bool()
    difference = (torch.cat(parts, 1) - whole[:, :done])[real].abs().max()
    assert difference < 1e-4


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_static_cache(family):
    model = tiny(family)
    ids, mask = prompts(length=20, cut=5)
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    expected = model.generate(ids, **options)
    with prescore.apply(model, EVERYTHING):
        cache = StaticCache(config=model.config, max_cache_len=40)
        assert torch.equal(model.generate(ids, **options, past_key_values=cache), expected)


def test_assisted_generation_and_sampling_with_every_key_equal_sdpa():
    model, assistant = tiny("Llama"), tiny("Llama", num_hidden_layers=1)
    ids, _ = prompts(batch=1, length=40, side="none")
    assisted = {"assistant_model": assistant, "max_new_tokens": 12, "do_sample": False}
    sampled = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.7}

    def generate(options):
        torch.manual_seed(3)
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    expected = [generate(options) for options in (assisted, sampled)]
    for config in (EVERYTHING, EVERYTHING.replace(top_k=1000)):
        with prescore.apply(model, config):
            got = [generate(options) for options in (assisted, sampled)]
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_assisted_generation_runs_on_a_selection():
    model, assistant = tiny("Llama"), tiny("Llama", num_hidden_layers=1)
    ids, _ = prompts(batch=1, length=40, side="none")
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    with torch.no_grad(), prescore.apply(model, COARSE) as applied:
        cache = PrescoredCache(model.config)
        greedy = [model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)]
        cache.select()  # among the prompt, as several first tokens do
        while len(greedy) < 12:
            greedy.append(model(greedy[-1], past_key_values=cache).logits.argmax(-1))
        assisted = model.generate(ids, assistant_model=assistant, **options)
        assert applied.report()[0].path == "step over the selection"
    # the same selection: its crops never reach the prompt
    assert torch.equal(assisted[:, 40:], torch.cat(greedy, dim=1))


@pytest.mark.parametrize("config", [EVERYTHING, COARSE, ROUTED], ids=["everything", "coarse", "routed"])
def test_packed_sequences_do_not_see_each_other(config):
    model = tiny("Llama")
    ids, _ = prompts(length=44, side="none")
    cuts = (17, 27)
    positions = torch.cat([torch.arange(n) for n in cuts])[None].expand(2, -1)
    with torch.no_grad(), prescore.apply(model, config) as applied:
        packed = model(ids, position_ids=positions, use_cache=False).logits
        assert applied.report()[0].last.mask == "packed"
        alone = [model(part, use_cache=False).logits for part in ids.split(cuts, dim=1)]
    assert (packed - torch.cat(alone, 1)).abs().max() < 1e-4


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPT2"])
@pytest.mark.parametrize("config", [COARSE, ROUTED], ids=["coarse", "routed"])
def test_training_step_lowers_the_loss(family, checkpointing, config):
    model = tiny(family)
    ids, mask = prompts(batch=3, length=48)
    labels = ids.masked_fill(mask == 0, -100)
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    with prescore.apply(model, config):
        model.train()
        for _ in range(3):
            loss = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("config", [COARSE, ROUTED], ids=["coarse", "routed"])
def test_checkpointing_gives_the_same_gradients(config):
    gradients = []
    for checkpointing in (False, True):
        model = tiny("Llama").train()
        ids, mask = prompts(length=40)
        if checkpointing:
            model.gradient_checkpointing_enable()
        with prescore.apply(model, config):
            model(ids, attention_mask=mask, labels=ids).loss.backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    assert gradients[0].abs().max() > 1e-3
    # recomputed sums may round differently
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("config", [COARSE, ROUTED], ids=["coarse", "routed"])
def test_attention_dropout_trains_and_checkpointing_draws_it_again(config):
    """Both runs start from one seed of torch's generator, which checkpointing restores."""
    ids, mask = prompts(batch=3, length=48)
    labels = ids.masked_fill(mask == 0, -100)
    gradients = []
    for dropout, checkpointing in ((0.1, False), (0.1, True), (0.0, False)):
        model = tiny("Llama", attention_dropout=dropout).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-2), []
        torch.manual_seed(11)
        with prescore.apply(model, config) as applied:
            for _ in range(12):
                loss = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss
                optimizer.zero_grad()
                loss.backward()
                if not losses:
                    gradients.append([p.grad.clone() for p in model.parameters()])
                optimizer.step()
                losses.append(float(loss.detach()))
            assert applied.report()[0].path == "prescored"
        assert sum(losses[-3:]) < sum(losses[:3])
    for plain, recomputed, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, atol=1e-6, rtol=1e-4)
        assert not torch.allclose(plain, whole, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("config", [EVERYTHING, COARSE], ids=["everything", "coarse"])
def test_a_step_on_a_cache_drops_too(config):
    model = tiny("Llama", attention_dropout=0.3)
    ids, mask = prompts(length=40)
    with torch.no_grad(), prescore.apply(model, config) as applied:
        results = []
        for training in (False, True, True):
            cache = DynamicCache(config=model.config)
            model.eval()(ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
            torch.manual_seed(len(results))
            model.train(training)
            results.append(model(ids[:, -1:], attention_mask=mask, past_key_values=cache).logits)
            assert "step" in applied.report()[0].path
    for first in range(3):
        for second in range(first):
            assert not torch.allclose(results[first], results[second])


def test_gradients_equal_sdpa_with_every_key():
    gradients = []
    for config in (None, EVERYTHING):
        model = tiny("Llama").train()
        ids, mask = prompts(length=30)
        labels = ids.masked_fill(mask == 0, -100)
        applied = None if config is None else prescore.apply(model, config)
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
        if applied is not None:
            applied.undo()
    for expected, got in zip(*gradients, strict=True):
        # two float32 kernels that sum in different orders
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


def test_half_precision_runs():
    model = tiny("Llama").to(torch.bfloat16)
    ids, mask = prompts()
    with torch.no_grad(), prescore.apply(model, COARSE):
        got = model(ids, attention_mask=mask).logits
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert got.dtype == torch.bfloat16
    assert torch.isfinite(got[mask.bool()].float()).all()
    assert tokens.shape == (2, ids.shape[1] + 4)
    assert int(tokens.max()) < VOCABULARY


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "config", [Routed(min_weight=1 / 4, cluster_size=2, chunk_size=2, exact_until=0), Selected(top_k=3)]
)
def test_autocast_of_any_type_reads_steps_and_trains(config, dtype, lower):
    model = tiny("Llama", num_hidden_layers=1).to(dtype)
    ids, mask = prompts()
    with prescore.apply(model, config), torch.autocast("cpu", dtype=lower):
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
        loss = model.train()(ids, attention_mask=mask, labels=ids).loss
    assert tokens.shape == (2, 27)
    loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_trainer(tmp_path):
    from transformers import Trainer, TrainingArguments

    model = tiny("Llama")
    ids, mask = prompts(batch=8, length=40)
    rows = [
        {"input_ids": row, "attention_mask": real, "labels": row.masked_fill(real == 0, -100)}
        for row, real in zip(ids, mask, strict=True)
    ]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        gradient_checkpointing=True,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    with prescore.apply(model, COARSE) as applied:
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        assert applied.report()[0].path == "prescored"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6
    assert losses[-1] < 0.8 * losses[0]
