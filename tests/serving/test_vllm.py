"""vLLM with our backend: the answers of its own attention where prompts are short, and routed ones where long."""

import json
import os
import subprocess
import sys

import pytest
import torch

from prescore import serving
from prescore.integrations import offline

pytest.importorskip("vllm", reason="vLLM is not installed (docs/serving.md)")
pytestmark = [pytest.mark.slow, pytest.mark.model]
LENGTHS = (300, 2600, 1000, 3000)
"""Prompts of one batch: two read every key, two route."""
RUN = f"""
import json, sys, torch, vllm

if __name__ == "__main__":
    limits = {{"max_model_len": 4096, "max_num_batched_tokens": 1024, "enforce_eager": True}}
    engine = vllm.LLM(sys.argv[1], enable_prefix_caching=True, **limits)
    text = torch.randint(5, 4000, ({sum(LENGTHS)},), generator=torch.Generator().manual_seed(0))
    prompts = [vllm.TokensPrompt(prompt_token_ids=part.tolist()) for part in text.split({LENGTHS})]
    rounds = []
    for options in ({{"prompt_logprobs": 0}}, {{}}):  # the second round finds its prompts in the cache
        params = vllm.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **options)
        rounds.append(engine.generate(prompts, params, use_tqdm=False))
    logs = [[next(iter(entry.values())).logprob for entry in each.prompt_logprobs[1:]] for each in rounds[0]]
    results = {{
        "answers": [[list(each.outputs[0].token_ids) for each in one] for one in rounds],
        "losses": [-sum(log) / len(log) for log in logs],
        "cached": [each.num_cached_tokens for each in rounds[1]],
    }}
    open(sys.argv[2], "w").write(json.dumps(results))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three layers of the offline model, as a folder of transformers."""
    try:
        model, tokenizer = offline.load_model()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    target = tmp_path_factory.mktemp("model")
    model.model.layers = model.model.layers[:3]
    model.config.num_hidden_layers = 3
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def run(folder, variable):
    """Answers, losses of prompts and cached tokens, in a process of its own: vLLM loads plugins once."""
    script, results = folder / "run.py", folder / f"results-{variable}.json"
    script.write_text(RUN)
    # The engine in the same process: else it begins with what has arrived, and other batches round otherwise.
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **settings, serving.VARIABLE: variable}
    command = [sys.executable, str(script), str(folder), str(results)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(results.read_text())


def test_answers_and_losses(folder):
    exact, ours = run(folder, "0"), run(folder, "1")
    assert min(ours["cached"][1::2]) > 2048
    for row, length in enumerate(LENGTHS):
        if length <= 2048:
            assert ours["losses"][row] == exact["losses"][row]
            assert ours["answers"][0][row] == exact["answers"][0][row]
        else:
            assert ours["losses"][row] != exact["losses"][row]  # it routed
            assert ours["losses"][row] == pytest.approx(exact["losses"][row], abs=0.02)
    assert ours["answers"][0] == ours["answers"][1]
