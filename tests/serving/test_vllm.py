"""vLLM with our backend: the answers of its own attention where prompts are short, and routed ones where long."""

import pytest
import torch

from prescore import serving
from prescore.bench import offline

vllm = pytest.importorskip("vllm", reason="vLLM is not installed (docs/serving.md)")
pytestmark = [pytest.mark.slow, pytest.mark.model]
LENGTHS = (300, 2600, 1000, 3000)
"""Prompts of one batch: two read every key, two route."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four layers of the offline model, as a folder of transformers."""
    try:
        model, tokenizer = offline.load_model()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    target = tmp_path_factory.mktemp("model")
    model.model.layers = model.model.layers[:4]
    model.config.num_hidden_layers = 4
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return str(target)


def answers(folder, monkeypatch, variable):
    """Greedy answers to a batch of prompts, then once more with a cached prefix, with the loss of each prompt."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv(serving.VARIABLE, variable)
    limits = {"max_model_len": 4096, "max_num_batched_tokens": 1024}
    engine = vllm.LLM(folder, enforce_eager=True, enable_prefix_caching=True, **limits)
    text = torch.randint(5, 4000, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    prompts = [vllm.TokensPrompt(prompt_token_ids=part.tolist()) for part in text.split(LENGTHS)]
    losses = vllm.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    plain = vllm.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    rounds = [engine.generate(prompts, params, use_tqdm=False) for params in (losses, plain)]
    logs = [[next(iter(entry.values())).logprob for entry in each.prompt_logprobs[1:]] for each in rounds[0]]
    return [[each.outputs[0].token_ids for each in one] for one in rounds], [-sum(log) / len(log) for log in logs]


def test_answers_and_losses(folder, monkeypatch):
    calls = []
    from prescore.serving.paged import PagedIndex

    attend = PagedIndex.attend
    monkeypatch.setattr(PagedIndex, "attend", lambda self, *given: calls.append(given[1]) or attend(self, *given))
    exact, exact_losses = answers(folder, monkeypatch, "0")
    assert not calls
    ours, losses = answers(folder, monkeypatch, "1")
    assert {request.n_keys > 2048 for request in calls} == {True}
    assert {request.queries.stop - request.queries.start for request in calls} >= {1}
    for row, length in enumerate(LENGTHS):
        assert losses[row] == pytest.approx(exact_losses[row], abs=0.02 if length > 2048 else 0)
        if length <= 2048:
            assert ours[0][row] == exact[0][row]
    assert ours[0] == ours[1]  # a cached prefix changes nothing
