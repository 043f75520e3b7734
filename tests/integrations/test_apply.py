"""`prescore.apply`: what it changes, what it refuses, and that it leaves nothing behind."""

import warnings

import pytest
import torch
from tiny_models import prompts, tiny
from torch import nn

import prescore
from prescore.errors import Unsupported
from prescore.integrations.huggingface_attention import _PLAN

COARSE = {"top_k": 4, "min_seq_len": 4, "sinks": 1, "remainder": "none"}


def logits(model, **inputs):
    ids, mask = prompts(length=32)
    with torch.no_grad():
        return model(ids, attention_mask=mask, **inputs).logits[mask.bool()]


def is_untouched(model, implementation):
    hooks = [m for m in model.modules() if m._forward_pre_hooks]
    plans = [m for m in model.modules() if _PLAN in m.__dict__]
    return model.config._attn_implementation == implementation and not hooks and not plans


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_everything_is_restored(implementation):
    model = tiny("Llama", attn_implementation=implementation)
    before = logits(model)
    with prescore.apply(model, **COARSE) as applied:
        assert not torch.allclose(logits(model), before, atol=1e-3)
        assert list(applied.layers.values()) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
        assert applied.adapter == "huggingface"
    assert is_untouched(model, implementation)
    assert torch.equal(logits(model), before)
    applied.undo()
    assert is_untouched(model, implementation)
    assert applied.stats() == {}


def test_restored_after_an_exception():
    model = tiny("Llama")
    with pytest.raises(RuntimeError, match="inside"), prescore.apply(model, **COARSE):
        raise RuntimeError("inside")
    assert is_untouched(model, "sdpa")


def test_nested_applications_restore_each_other():
    model = tiny("Llama")
    with prescore.apply(model, **COARSE):
        outer = logits(model)
        with prescore.apply(model, **COARSE, layers="first:1"):
            inner = logits(model)
        assert torch.equal(logits(model), outer)
    assert not torch.allclose(inner, outer, atol=1e-3)
    assert is_untouched(model, "sdpa")


def test_layers_choose_where_and_how():
    model = tiny("Llama")
    exact = logits(model)
    with prescore.apply(model, **COARSE, layers=[]):
        assert (logits(model) - exact).abs().max() < 1e-4  # another exact kernel
    with prescore.apply(model, **COARSE, layers="last:1") as applied:
        last = logits(model)
        assert list(applied.stats()) == [1]
        assert applied.stats()[1]["path"] == "prescored"
    with prescore.apply(model, **COARSE, layers={"last:1": {"top_k": None, "inner": "exact"}}):
        everything = logits(model)
    assert not torch.allclose(last, exact, atol=1e-3)
    assert (everything - exact).abs().max() < 1e-4


def test_overrides_and_configs():
    model = tiny("Llama")
    config = prescore.PrescoreConfig(method="uniform", top_k=8)
    applied = prescore.apply(model, config, top_k=5, layers="first:1")
    assert applied.configs == {0: config.replace(top_k=5)}
    assert "1 layers" in repr(applied)
    applied.undo()
    with pytest.raises(ValueError, match="topk"):
        prescore.apply(model, topk=5)
    with pytest.raises(TypeError, match="got dict"):
        prescore.apply(model, {"top_k": 5})
    with pytest.raises(ValueError, match="first:99"):
        prescore.apply(model, layers="first:99")
    assert is_untouched(model, "sdpa")


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Bloom", {"n_layer": 2, "n_head": 4}),
        ("Falcon", {}),
    ],
)
def test_models_that_ignore_the_interface_are_named(family, sizes):
    model = tiny(family, **sizes)
    with pytest.raises(Unsupported, match=f"apply on {family}ForCausalLM cannot run: .*attention interface"):
        prescore.apply(model)
    assert is_untouched(model, model.config._attn_implementation)


def test_local_layers_stay_exact_and_that_is_said():
    model = tiny("Mistral")
    with pytest.warns(UserWarning, match="every chosen layer of MistralForCausalLM has a sliding window"):
        applied = prescore.apply(model, **COARSE)
    logits(model)
    assert applied.stats()[0]["path"] == "exact: a sliding window is local already"
    applied.undo()
    mixed = tiny("Gemma3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        applied = prescore.apply(mixed, **COARSE)
    logits(mixed)
    paths = [entry["path"] for entry in applied.stats().values()]
    assert paths == ["exact: a sliding window is local already", "prescored"]
    applied.undo()


def test_a_window_as_long_as_the_model_is_no_window():
    model = tiny("Phi3", sliding_window=128)  # all positions the model has
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        applied = prescore.apply(model, **COARSE)
    ids, mask = prompts(length=32)
    model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    assert applied.stats()[0]["path"] == "step over the selection"
    applied.undo()


def test_models_inside_a_wrapper_are_found():
    wrapper = nn.Module()
    wrapper.inside = tiny("Llama")
    with prescore.apply(wrapper, **COARSE, layers="last:1") as applied:
        logits(wrapper.inside)
        assert applied.layers == {1: "inside.model.layers.1.self_attn"}
        assert applied.stats()[1]["path"] == "prescored"
    assert is_untouched(wrapper.inside, "sdpa")


def test_unknown_models_are_refused():
    with pytest.raises(Unsupported, match="apply on Linear"):
        prescore.apply(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="got str"):
        prescore.apply("a model")


FOREIGN = [
    ("Gemma2", {"sliding_window": 200, "layer_types": ["full_attention"] * 2}, "soft-capped"),
    (
        "GptOss",
        {"layer_types": ["full_attention"] * 2, "num_local_experts": 2, "num_experts_per_tok": 2},
        "learned attention sinks",
    ),
]


@pytest.mark.parametrize(("family", "sizes", "reason"), FOREIGN)
def test_foreign_features_raise(family, sizes, reason):
    model = tiny(family, **sizes)
    with prescore.apply(model, **COARSE), pytest.raises(Unsupported, match=reason):
        logits(model)


@pytest.mark.parametrize(("family", "sizes", "reason"), FOREIGN)
def test_foreign_features_may_run_exactly(family, sizes, reason):
    model = tiny(family, **sizes, attn_implementation="eager")
    expected = logits(model)
    with prescore.apply(model, **COARSE, on_unsupported="exact") as applied:
        with pytest.warns(UserWarning, match=reason):
            got = logits(model)
        assert reason in applied.stats()[0]["path"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            logits(model)  # said once
    assert (got - expected).abs().max() < 1e-4


def test_dropout_in_training_is_not_ignored():
    model = tiny("Llama", attention_dropout=0.3)
    with prescore.apply(model, **COARSE) as applied:
        expected = logits(model)
        model.train()
        torch.manual_seed(1)
        first, second = logits(model), logits(model)
        assert applied.stats()[0]["path"] == "prescored"
        torch.manual_seed(1)
        assert torch.equal(logits(model), first)
        assert not torch.allclose(second, first)
        assert not torch.allclose(expected, first)
        model.eval()
        before = torch.random.get_rng_state()
        assert torch.equal(logits(model), expected)
        assert torch.equal(torch.random.get_rng_state(), before)  # without dropout nothing global is read


def test_a_mask_of_no_known_form_is_refused():
    model = tiny("Llama")
    ids, _ = prompts(length=16, side="none")
    strange = torch.ones(16, 16, dtype=torch.bool).tril()
    strange[9, 4] = False
    strange = strange.expand(2, 1, 16, 16)
    with torch.no_grad():
        expected = model(ids, attention_mask=strange).logits
        with prescore.apply(model, **COARSE), pytest.raises(Unsupported, match="mask is neither"):
            model(ids, attention_mask=strange)
        with prescore.apply(model, **COARSE, on_unsupported="exact"), pytest.warns(UserWarning, match="mask"):
            got = model(ids, attention_mask=strange).logits
    assert (got - expected).abs().max() < 1e-4


def test_attn_implementation_by_name(tmp_path):
    from transformers import LlamaForCausalLM

    import prescore.integrations.huggingface  # noqa: F401

    model = tiny("Llama")
    expected = logits(model)
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="prescored").eval()
    assert (logits(loaded) - expected).abs().max() < 1e-4  # short texts are exact by default
    model.set_attn_implementation("prescored")
    assert (logits(model) - expected).abs().max() < 1e-4
    ids, mask = prompts()
    generated = loaded.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    model.set_attn_implementation("sdpa")
    assert torch.equal(generated, model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False))


def test_registration_checks_itself(monkeypatch):
    from prescore.errors import PrescoreError
    from prescore.integrations import huggingface
    from prescore.integrations.huggingface_attention import prescored_attention_forward

    def no_mask(**kwargs):
        return None

    with pytest.raises(PrescoreError, match="does not hide padding"):
        huggingface._check_padding(prescored_attention_forward, no_mask)
