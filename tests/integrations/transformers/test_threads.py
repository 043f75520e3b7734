"""Generations in several threads on one model never mix, whoever owns the caches.

`GENERATIONS=200 python -m pytest tests/integrations/transformers/test_threads.py` runs longer.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_models import VOCABULARY, tiny

import prescore
import prescore.integrations.transformers
from prescore import Routed, Selected

N_THREADS = 6
GENERATIONS = int(os.environ.get("GENERATIONS", "30"))
ROUTED = Routed(min_weight=1 / 4, cluster_size=2, chunk_size=2, sinks=1, exact_until=0)
COARSE = Selected("kmeans", top_k=3, sinks=1, min_seq_len=4)


@pytest.fixture(autouse=True)
def _switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def texts(count):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(2, VOCABULARY, (1 + number % 2, 11 + number % 7), generator=generator)
        for number in range(count)
    ]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("config", [None, ROUTED, COARSE], ids=["by name", "routed", "selected"])
def test_six_threads_give_the_tokens_of_one(config, cache):
    model = tiny("Llama", **({"attn_implementation": "prescored"} if config is None else {}))
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}

    def generate(ids):
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    jobs = texts(GENERATIONS)
    applied = None if config is None else prescore.apply(model, config)
    alone = [generate(ids) for ids in jobs]
    with ThreadPoolExecutor(N_THREADS) as pool:
        batched = list(pool.map(generate, jobs))
    for one, other in zip(alone, batched, strict=True):
        assert torch.equal(one, other)
    if applied is not None:
        applied.undo()
