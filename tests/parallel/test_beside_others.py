"""`prescored` as the core attention of other libraries that distribute a model."""

import pytest
import torch
from parallel_work import run_as_core, run_tensor_parallel
from tiny_models import prompts, tiny

import prescore
from prescore import Routed, Selected

CONFIGS = {
    "selected": Selected("key-norm", 4, min_seq_len=8),
    "routed": Routed(min_weight=1 / 16, cluster_size=4, chunk_size=8, exact_until=16),
}
FLOAT32 = 5e-4


def logits_of_one_process(config, ids, **sizes):
    model = tiny("Llama", **sizes)
    with prescore.apply(model, config), torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_under_a_registration_that_exchanges_heads(crew, name):
    """As DeepSpeed's Ulysses registers itself: the function of the name is wrapped, and sees full sequences."""
    ids, _ = prompts(batch=2, length=48, cut=0)
    found = torch.cat(crew.run(run_as_core, CONFIGS[name], ids, ranks=2), dim=1)
    torch.testing.assert_close(found, logits_of_one_process(CONFIGS[name], ids), rtol=FLOAT32, atol=FLOAT32)


@pytest.mark.parametrize("name", CONFIGS)
def test_under_tensor_parallelism(crew, name, tmp_path):
    ids, _ = prompts(batch=2, length=48, cut=0)
    tiny("Llama", num_key_value_heads=4).save_pretrained(tmp_path)
    wanted = logits_of_one_process(CONFIGS[name], ids, num_key_value_heads=4)
    for n_heads, logits in crew.run(run_tensor_parallel, CONFIGS[name], ids, str(tmp_path), ranks=4):
        assert n_heads == [1, 1]  # of four, in both layers
        torch.testing.assert_close(logits, wanted, rtol=FLOAT32, atol=FLOAT32)
