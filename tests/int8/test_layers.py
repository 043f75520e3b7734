"""Decoder layers with int8 weights by native code: as the layers' own forward, or not taken."""

import copy
import io

import pytest
import torch
import transformers
from routed_checks import needs_native
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import DynamicCache

import prescore
from prescore.errors import Unsupported
from prescore.int8.linear import use_int8_weights
from prescore.integrations.transformers import PrescoredCache
from prescore.integrations.transformers import layers as layers_module
from prescore.integrations.transformers.layers import NativeLayer, use_native_layers

pytestmark = needs_native
SIZES = {"vocab_size": 96, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 32}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
GEMMA = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
TAKEN = {"Llama": {}, "Qwen2": {}, "Qwen3": {}, "Mistral": {"sliding_window": 24}, "Gemma3Text": GEMMA}
OTHERS = {
    "Granite": {"residual_multiplier": 0.3},
    "Gemma2": {"attn_logit_softcapping": 2.0},
    "Helium": {"hidden_size": 128},  # rotates neighbours
    "Olmo2": {},
    "SmolLM3": {"no_rope_layers": [0, 0]},
}
"""Families with layers of these modules, or nearly, that compute something else."""


def made(family, dtype=torch.bfloat16, **options):
    sizes = {
        **SIZES,
        **{**TAKEN, **OTHERS}[family],
        **options,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{family}Config")(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
        for parameter in model.parameters():
            size = 1.0 if parameter.ndim > 1 else 0.3
            parameter.data += size * torch.randn(parameter.shape).to(dtype) / parameter.shape[-1] ** 0.5
    return model


def by_modules(model):
    """The same model, run by its modules."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, NativeLayer):
            layer.__class__ = type(layer).__mro__[2]
    return model


@torch.no_grad()
def continued(model, n_prompt=400, n_steps=6, cache=None):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 96, (1, n_prompt + n_steps), generator=generator)
    cache = DynamicCache(config=model.config) if cache is None else cache
    first = model(tokens[:, :n_prompt], past_key_values=cache).logits
    steps = [
        model(tokens[:, n : n + 1], past_key_values=cache).logits for n in range(n_prompt, n_prompt + n_steps)
    ]
    return torch.cat((first, *steps), dim=1).float()[0]


def native_calls(monkeypatch):
    called, original = [], layers_module.call_library
    monkeypatch.setattr(
        layers_module, "call_library", lambda name, call: (called.append(name), original(name, call))
    )
    return called


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", TAKEN)
def test_prompts_and_steps_are_those_of_the_modules(family, dtype, monkeypatch):
    model = use_int8_weights(made(family, dtype))
    assert [type(layer).__name__ for layer in model.modules() if isinstance(layer, NativeLayer)] == [
        type(model.model.layers[0]).__name__
    ] * 2
    modules, called = by_modules(model), native_calls(monkeypatch)
    wanted = continued(modules)
    assert not called
    results = {"sdpa": continued(model)}
    assert called == ["prescore_layer_before", "prescore_layer_after"] * 14
    with prescore.apply(model, prescore.Exact()):
        results["prescored"] = continued(model)
        results["our cache"] = continued(model, cache=PrescoredCache(model.config))
    for name, got in results.items():
        error = float((got - wanted).norm() / wanted.norm())
        assert error < (0.02 if dtype == torch.float32 else 0.06), name


@pytest.mark.parametrize("family", OTHERS)
def test_layers_that_compute_something_else_keep_their_forward(family):
    model = use_int8_weights(made(family))
    assert not any(isinstance(layer, NativeLayer) for layer in model.modules())


def test_every_part_of_a_layer_counts():
    """With one part changed, a step is no longer that of the layer before."""
    model = use_int8_weights(made("Gemma3Text", torch.float32))
    wanted = continued(model)
    layer = model.model.layers[1]
    for name, parameter in layer.named_parameters():
        with torch.no_grad():
            parameter.mul_(2)
        changed = continued(model)
        assert float((changed - wanted).norm() / wanted.norm()) > 0.01, name
        assert torch.allclose(changed, continued(by_modules(model)), atol=0.1), name
        with torch.no_grad():
            parameter.div_(2)


def test_steps_follow_new_weights():
    model, other = (use_int8_weights(made("Qwen2", torch.float32)) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    other.model.layers[0].mlp.up_proj.weight = -other.model.layers[0].mlp.up_proj.weight
    continued(model)
    model.load_state_dict(other.state_dict())
    wanted = continued(other)
    assert float((continued(model) - wanted).norm() / wanted.norm()) < 0.02  # numbers are rounded twice
    model.to(torch.bfloat16)
    assert float((continued(model) - wanted).norm() / wanted.norm()) < 0.06


def test_copies_and_files_are_layers_of_the_same_kind():
    model = use_int8_weights(made("Llama"))
    wanted = continued(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert sum(isinstance(layer, NativeLayer) for layer in other.modules()) == 2
        assert torch.equal(continued(other), wanted)


@torch.no_grad()
def test_where_somebody_looks_inside_modules_run(monkeypatch):
    model = use_int8_weights(made("Llama"))
    called, token = native_calls(monkeypatch), torch.tensor([[5]])

    def step(**options):
        called.clear()
        return model(token, past_key_values=DynamicCache(), **options)

    step()
    assert called
    seen = []
    for name in ("self_attn", "mlp.act_fn", "input_layernorm", "mlp.gate_proj"):
        module = model.model.layers[1].get_submodule(name)
        handle = module.register_forward_hook(lambda *_: seen.append(1))
        step()
        assert len(called) == 2
        assert seen.pop() == 1
        handle.remove()
    model.model.layers[1].mlp._compiled_call_impl = model.model.layers[1].mlp.forward  # as after mlp.compile()
    step()
    assert len(called) == 2
    model.model.layers[1].mlp._compiled_call_impl = None
    called.clear()
    model(torch.tensor([[5], [6]]), past_key_values=DynamicCache())
    make_fx(lambda token: model(token, past_key_values=DynamicCache()).logits)(token)
    with torch.enable_grad(), pytest.raises(Unsupported, match="gradients"):
        model(inputs_embeds=torch.randn(1, 1, 96, dtype=torch.bfloat16), past_key_values=DynamicCache())
    assert not called
    assert len(step(output_hidden_states=True, output_attentions=True).hidden_states) == 3
    assert not called
    model = use_int8_weights(made("Llama")).train()
    step()
    assert not called
    assert not use_native_layers(use_int8_weights(made("Llama").train()))
