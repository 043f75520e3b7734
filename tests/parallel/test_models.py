"""Models whose sequences lie on several ranks: logits, loss, gradients, generation, refusals."""

import re
from types import SimpleNamespace

import pytest
import torch
from oracles.tiny_language_model import tiny_language_model
from parallel_work import refused_models, run_as_core, run_generation, run_model, run_tensor_parallel
from tiny_models import prompts, tiny

import prescore
from prescore import Exact, Hyper, Lsh, Routed, Selected
from prescore.bench.language.documents import Document
from prescore.bench.language.model import LanguageModel
from prescore.bench.language.perplexity import make_windows, window_losses
from prescore.errors import Unsupported
from prescore.integrations.transformers.parallel import ContextParallel

CONFIGS = {
    "exact": Exact(),
    "selected": Selected(top_k=4, min_seq_len=8),
    "selected without draws": Selected(top_k=4, min_seq_len=8, remainder="none"),
    "routed": Routed(min_weight=1 / 16, cluster_size=4, chunk_size=8, exact_until=16),
    "hyper": Hyper(Lsh(4, 4), min_seq_len=8),
    "by draws": Selected.paper("uniform", 4, min_seq_len=8, inner=Lsh(2, 2)),
    "by layer": {"first:1": Selected.paper("kmeans", 4, min_seq_len=8)},
}
FLOAT32 = 5e-4
"""Two layers of sums in another order; logits and gradients are of size 1 to 10."""


@pytest.mark.parametrize(
    ("name", "side", "ranks"),
    [
        ("exact", "none", 2), ("exact", "left", 3), ("selected", "none", 3), ("selected", "right", 2),
        ("routed", "none", 2), ("routed", "left", 2), ("hyper", "none", 4), ("by layer", "none", 2),
    ],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_one_process(crew, name, side, ranks):
    ids, mask = prompts(batch=2, length=48, side=side, cut=0 if side == "none" else 20)
    given = None if side == "none" else mask
    results = crew.run(run_model, CONFIGS[name], ids, given, "Llama", ranks=ranks)
    model = tiny("Llama")
    labels = ids.masked_fill(mask == 0, -100)
    with prescore.apply(model, CONFIGS[name]):
        n_items = (labels[:, 1:] != -100).sum()
        wanted = model(ids, attention_mask=given, labels=labels, use_cache=False, num_items_in_batch=n_items)
        wanted.loss.backward()
    logits, real = torch.cat([result[0] for result in results], dim=1), mask.bool()
    torch.testing.assert_close(logits[real], wanted.logits[real].detach(), rtol=FLOAT32, atol=FLOAT32)
    for _, loss, grads, report in results:
        torch.testing.assert_close(loss, wanted.loss.detach(), rtol=1e-5, atol=1e-5)
        for found, parameter in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=FLOAT32, atol=FLOAT32)
        assert f"on {ranks} ranks" in report


@pytest.mark.parametrize("name", ["exact", "selected", "routed", "hyper"])
def test_greedy_generation_from_a_cache_of_shards(crew, name):
    """The prompt is read as one process reads it; steps read the keys of all ranks exactly."""
    ids, _ = prompts(batch=2, length=48, cut=0)
    results = crew.run(run_generation, CONFIGS[name], ids, 12, ranks=3)
    model = tiny("Llama")
    with torch.no_grad():
        with prescore.apply(model, CONFIGS[name]):
            result = model(ids, use_cache=True)
        wanted = [result.logits[:, -1].argmax(-1)]
        for _ in range(11):  # the model's own attention, over the same cache
            result = model(wanted[-1][:, None], past_key_values=result.past_key_values, use_cache=True)
            wanted.append(result.logits[:, -1].argmax(-1))
    for tokens, report in results:
        assert torch.equal(tokens, torch.stack(wanted, dim=1))
        assert "step over the keys of all ranks" in report


def test_refusals(crew):
    wanted = {
        "window": "layer 0 .* it has a sliding window",
        "length": r"input_ids shape must be the same .* got \[1, 12\] on rank 0 and \[1, 11\] on rank 1",
        "mask": r"attention_mask must have the shape \(1, 12\) of this rank's tokens, got \(1, 3\)",
        "configuration": "config must be the same on all ranks",
        "on_unsupported": "on_unsupported must be 'raise' with a mesh, got 'exact'",
        "group": "mesh must be a torch.distributed process group or DeviceMesh, got str",
        "cache": "^a cache of type DynamicCache on several ranks cannot run: it holds full sequences",
        "one cache": "a cache of type DynamicCache on several ranks cannot run: it holds full sequences",
        "weights": "in layer 0 .* cannot run: output_attentions=True asks for weights that are never formed",
        "new tokens": "max_new_tokens must be the same on all ranks of the group, got 2 on rank 0 and 3 on rank 1",
        "no new tokens": "max_new_tokens must be at least 1, got 0",
    }
    for found in crew.run(refused_models, ranks=2):
        assert set(found) == set(wanted)
        for name, sentence in wanted.items():
            assert re.search(sentence, found[name]), found[name]


def test_a_model_that_takes_no_positions():
    with pytest.raises(Unsupported, match="mesh on Linear cannot run: its forward takes no position_ids"):
        ContextParallel(None).attach([torch.nn.Linear(1, 1)])


@pytest.mark.parametrize("family", ["Qwen3", "GPT2", "OPT", "GPTNeoX", "Phi3"])
def test_families(crew, family):
    ids, _ = prompts(batch=1, length=48, cut=0)
    # without clusters: keys that differ by rounding, as those of shards do, may be clustered otherwise
    config = Selected("key-norm", 4, min_seq_len=8, remainder="none")
    results = crew.run(run_model, config, ids, None, family, ranks=2)
    logits = torch.cat([result[0] for result in results], dim=1)
    torch.testing.assert_close(logits, logits_of_one_process(config, ids, family), rtol=FLOAT32, atol=FLOAT32)


def logits_of_one_process(config, ids, family="Llama", **sizes):
    model = tiny(family, **sizes)
    with prescore.apply(model, config), torch.no_grad():
        return model(ids, use_cache=False).logits


# Ranks that get heads from elsewhere number them from 0, so draws are not those of one process: nothing is drawn.
@pytest.mark.parametrize("name", ["selected without draws", "routed"])
def test_under_a_registration_that_exchanges_heads(crew, name):
    """As DeepSpeed's Ulysses registers itself: the function of the name is wrapped, and sees full sequences."""
    ids, _ = prompts(batch=2, length=48, cut=0)
    found = torch.cat(crew.run(run_as_core, CONFIGS[name], ids, ranks=2), dim=1)
    torch.testing.assert_close(found, logits_of_one_process(CONFIGS[name], ids), rtol=FLOAT32, atol=FLOAT32)


@pytest.mark.parametrize("name", ["selected without draws", "routed", "by draws"])
def test_under_tensor_parallelism(crew, name, tmp_path):
    ids, _ = prompts(batch=2, length=48, cut=0)
    tiny("Llama", num_key_value_heads=4).save_pretrained(tmp_path)
    wanted = logits_of_one_process(CONFIGS[name], ids, num_key_value_heads=4)
    for n_heads, logits in crew.run(run_tensor_parallel, CONFIGS[name], ids, str(tmp_path), ranks=4):
        assert n_heads == [1, 1]  # of four, in both layers
        torch.testing.assert_close(logits, wanted, rtol=FLOAT32, atol=FLOAT32)


def test_a_length_that_ranks_cannot_share():
    loaded = LanguageModel("tiny", *tiny_language_model())
    (window,) = make_windows(loaded, [Document("text", "a text of many letters " * 20)], 97)
    with pytest.raises(ValueError, match="length must be a multiple of the 2 ranks, got 97"):
        window_losses(loaded, window, SimpleNamespace(size=2, rank=0))
