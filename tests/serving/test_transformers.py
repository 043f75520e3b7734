"""The kernel of `kernels/`: what transformers calls, and which decode steps route."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from routed_checks import needs_native

import prescore
from prescore.integrations.decode import OVER_ALL, OVER_CLUSTERS, PROMPT

transformers = pytest.importorskip("transformers")
VARIANT = Path(__file__).parents[2] / "kernels" / "build" / "torch-cpu"
NAME = "kernel_of_prescore"  # a name with a slash would be looked up with the `kernels` library


@pytest.fixture
def model(monkeypatch):
    """A small model that attends with the kernel, as transformers installs it."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    spec = importlib.util.spec_from_file_location("kernel", VARIANT / "__init__.py")
    kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)
    assert kernel.supports_flash_attn()
    assert not hasattr(kernel, "flash_attn_varlen_func")  # transformers would prefer it, and pass no cache
    transformers.AttentionInterface.register(NAME, kernel.flash_attn_forward)
    transformers.AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=4096, attn_implementation=NAME,
    )  # fmt: skip
    torch.manual_seed(0)
    yield transformers.LlamaForCausalLM(config).eval()
    for registered in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        registered._global_mapping.pop(NAME)


def paths_of(model, monkeypatch, tokens, **options):
    """How each call of the last layer was answered, and the tokens generated."""
    from prescore.integrations.attention import PrescoredAttention

    paths, call = [], PrescoredAttention.__call__

    def traced(self, *given):
        output = call(self, *given)
        paths.append(self.last.path)
        return output

    monkeypatch.setattr(PrescoredAttention, "__call__", traced)
    answer = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0, **options)
    return paths[1::2], answer[0, tokens.shape[1] :].tolist()


@needs_native
@pytest.mark.parametrize("n_tokens", [600, 2400])
def test_decode_steps_route_where_the_cache_allows(model, monkeypatch, n_tokens):
    tokens = torch.randint(1, 64, (1, n_tokens), generator=torch.Generator().manual_seed(0))
    step = OVER_CLUSTERS if n_tokens > prescore.Routed().exact_until else OVER_ALL
    first, answer = paths_of(model, monkeypatch, tokens)
    assert first == [PROMPT, step, step, step]
    cache = transformers.DynamicCache(config=model.config)
    second, again = paths_of(model, monkeypatch, tokens, past_key_values=cache)
    assert (second, again) == (first, answer)
    # the next turn of a chat continues the cache
    longer = torch.cat((tokens, torch.tensor([answer]), tokens[:, :40]), dim=1)
    third, _ = paths_of(model, monkeypatch, longer, past_key_values=cache)
    assert third == first
    static, _ = paths_of(model, monkeypatch, tokens, cache_implementation="static", disable_compile=True)
    assert set(static[1:]) == {OVER_ALL}


def test_the_metadata_names_the_kernel():
    metadata = json.loads((VARIANT / "metadata.json").read_text())
    assert metadata["name"] == "prescore-attention"
    assert metadata["backend"] == {"type": "cpu"}


def test_every_module_can_be_imported_under_the_meta_device():
    """Servers import kernels while they build a model without memory."""
    code = """
import importlib, pkgutil, torch
with torch.device("meta"):
    import prescore
    for module in pkgutil.walk_packages(prescore.__path__, "prescore."):
        if not module.name.endswith(("__main__", "serving.vllm")) and "prescore_native" not in module.name:
            importlib.import_module(module.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
