"""`prescore.apply`: what it changes, what it refuses, and that it leaves nothing behind."""

import warnings

import pytest
import torch
from tiny_models import prompts, tiny
from torch import nn

import prescore
from prescore import Exact, KMeans, Routed, Selected
from prescore.errors import Unsupported
from prescore.integrations.apply import replace_attention
from prescore.integrations.attention import attend_exactly
from prescore.integrations.patch import patches

COARSE = Selected(top_k=4, min_seq_len=4, sinks=1, remainder="none")


def logits(model, **inputs):
    ids, mask = prompts(length=32)
    with torch.no_grad():
        return model(ids, attention_mask=mask, **inputs).logits[mask.bool()]


def is_untouched(model, implementation):
    hooks = [m for m in model.modules() if m._forward_pre_hooks]
    taken = [m for m in model.modules() if any(name.startswith("_prescore") for name in m.__dict__)]
    return model.config._attn_implementation == implementation and not hooks and not taken


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_everything_is_restored(implementation):
    model = tiny("Llama", attn_implementation=implementation)
    before = logits(model)
    with prescore.apply(model, COARSE) as applied:
        assert not torch.allclose(logits(model), before, atol=1e-3)
        assert list(applied.layers.values()) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
        assert applied.adapter == "transformers.language"
    assert is_untouched(model, implementation)
    assert torch.equal(logits(model), before)
    applied.undo()
    assert is_untouched(model, implementation)
    assert applied.report()[0].path == "prescored"  # what it did can still be read


def test_restored_after_an_exception():
    model = tiny("Llama")
    with pytest.raises(RuntimeError, match="inside"), prescore.apply(model, COARSE):
        raise RuntimeError("inside")
    assert is_untouched(model, "sdpa")


def test_nested_applications_restore_each_other():
    model = tiny("Llama")
    with prescore.apply(model, COARSE):
        outer = logits(model)
        with prescore.apply(model, COARSE, layers="first:1"):
            inner = logits(model)
        assert torch.equal(logits(model), outer)
    assert not torch.allclose(inner, outer, atol=1e-3)
    assert is_untouched(model, "sdpa")


def test_layers_choose_where_and_how():
    model = tiny("Llama")
    exact = logits(model)
    with prescore.apply(model, COARSE, layers=[]):
        assert (logits(model) - exact).abs().max() < 1e-4  # another exact kernel
    with prescore.apply(model, COARSE, layers="last:1") as applied:
        last = logits(model)
        assert [entry.layer for entry in applied.report().layers] == [1]
        assert applied.report()[1].path == "prescored"
    with prescore.apply(model, {"last:1": Selected(top_k=1.0, min_seq_len=4)}):
        everything = logits(model)
    assert not torch.allclose(last, exact, atol=1e-3)
    assert (everything - exact).abs().max() < 1e-4


def test_configurations_by_layer():
    model = tiny("Llama")
    exact = logits(model)
    with prescore.apply(model, COARSE, layers="first:1"):
        first = logits(model)
    with prescore.apply(model, {"all": COARSE, -1: None}) as applied:
        assert applied.configs == {0: COARSE}
        assert torch.equal(logits(model), first)
    with prescore.apply(model, {(0,): COARSE, "odd": Exact()}) as applied:
        assert applied.configs == {0: COARSE, 1: Exact()}
        assert torch.equal(logits(model), first)
        assert applied.report()[1].path == "exact"
    other = Selected("uniform", top_k=4, min_seq_len=4)
    with prescore.apply(model, {"all": COARSE, 0: other}) as applied:
        assert applied.configs == {0: other, 1: COARSE}
        assert not torch.allclose(logits(model), first, atol=1e-3)
    with prescore.apply(model, {"all": COARSE}, layers="first:1") as applied:
        assert applied.configs == {0: COARSE}
    with prescore.apply(model, {"even": None}) as applied:
        assert applied.configs == {}
        assert (logits(model) - exact).abs().max() < 1e-4  # another exact kernel
    with prescore.apply(model, Exact()) as applied:
        assert (logits(model) - exact).abs().max() < 1e-4
        assert not any(m._forward_pre_hooks for m in model.modules())  # no cache has anything to carry
    assert is_untouched(model, "sdpa")


@pytest.mark.parametrize(
    ("config", "options", "error", "said"),
    [
        ({"top_k": 5}, {}, ValueError, "layers of config must be .*, got 'top_k'"),
        ({"all": 3}, {}, TypeError, r"config\['all'\] must be a prescore.Routed.*got int"),
        ("routed", {}, TypeError, "config must be a prescore.Routed.*got str"),
        (None, {"layers": "first:99"}, ValueError, "first:99"),
        ({"last:99": None}, {}, ValueError, "last:99"),
        (
            None,
            {"on_unsupported": "ignore"},
            ValueError,
            "on_unsupported must be one of 'raise', 'exact', got 'ignore'",
        ),
        (
            None,
            {"mesh": "two"},
            TypeError,
            "mesh must be a torch.distributed process group or DeviceMesh, got str",
        ),
        (
            {"all": None},
            {"on_unsupported": "garbage"},
            ValueError,
            "on_unsupported must be one of .* got 'garbage'",
        ),
        (None, {"top_k": 5}, TypeError, "top_k"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(config, options, error, said):
    model = tiny("Llama")
    with pytest.raises(error, match=said):
        prescore.apply(model, config, **options)
    assert is_untouched(model, "sdpa")


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_applications_are_undone_in_any_order(order):
    model = tiny("Llama", attn_implementation="eager")
    before = logits(model)
    other = COARSE.replace(top_k=6)
    with prescore.apply(model, COARSE):
        of_a = logits(model)
    with prescore.apply(model, other, layers="first:1"):
        of_b = logits(model)
    assert not torch.allclose(of_a, of_b, atol=1e-3)
    both = {"a": prescore.apply(model, COARSE), "b": prescore.apply(model, other, layers="first:1")}
    assert torch.equal(logits(model), of_b)  # the newer one acts, in all layers
    both[order[0]].undo()
    assert torch.equal(logits(model), of_b if order == "ab" else of_a)
    both[order[0]].undo()  # does nothing
    assert torch.equal(logits(model), of_b if order == "ab" else of_a)
    both[order[1]].undo()
    assert is_untouched(model, "eager")
    assert torch.equal(logits(model), before)


def test_a_model_and_its_inside_are_undone_in_any_order():
    model = tiny("Llama")
    outer = prescore.apply(model, COARSE)
    inner = prescore.apply(model.model, COARSE)
    outer.undo()
    assert model.config._attn_implementation == "prescored"
    inner.undo()
    assert is_untouched(model, "sdpa")


def test_three_threads_do_not_disturb_one_another():
    """One model, one application, a static cache each: the state of a generation is its thread's own."""
    from concurrent.futures import ThreadPoolExecutor

    from transformers import StaticCache

    model = tiny("Llama")
    config = Selected(KMeans(n_clusters=3), top_k=8, min_seq_len=8, sinks=2)
    texts = [prompts(batch=1, length=40, side="none", seed=seed)[0] for seed in range(3)]

    def generate(ids):
        cache = StaticCache(config=model.config, max_cache_len=60)
        options = {"max_new_tokens": 12, "do_sample": False, "disable_compile": True}
        return model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)

    with prescore.apply(model, config):
        alone = [generate(ids) for ids in texts]
        with ThreadPoolExecutor(3) as pool:
            batched = list(pool.map(generate, texts))
    for one, other in zip(alone, batched, strict=True):
        assert torch.equal(one, other)


def test_the_text_of_an_application_says_what_it_is():
    model = tiny("Llama")
    applied = prescore.apply(model, {"all": Routed(), 0: COARSE})
    assert repr(applied) == (
        "<Applied to LlamaForCausalLM (transformers.language), 2 of 2 layers: "
        "Selected(top_k=4, sinks=1, remainder='none', min_seq_len=4), Routed()>"
    )
    applied.undo()
    assert ", undone: " in repr(applied)
    assert "KMeans(n_clusters=3)" in repr(prescore.apply(model, Selected(KMeans(n_clusters=3)), layers=[1]))


def test_any_function_may_take_the_place_of_attention():
    model = tiny("Llama")
    before = logits(model)
    seen = []

    def look(query, key, value, context):
        seen.append((context.layer, context.owner, tuple(query.shape), tuple(key.shape)))
        return attend_exactly(query, key, value, context)

    undo = replace_attention(model, {1: look})
    assert (logits(model) - before).abs().max() < 1e-4  # another exact kernel
    assert seen == [(1, "LlamaAttention", (2, 4, 32, 8), (2, 2, 32, 8))]
    undo()
    undo()
    assert is_untouched(model, "sdpa")
    with pytest.raises(ValueError, match="layers 0 to 1, got one for layer 2"):
        replace_attention(model, {2: look})
    assert is_untouched(model, "sdpa")


def test_a_refused_switch_leaves_nothing_behind(monkeypatch):
    model = tiny("Llama")

    def fail(*args, **kwargs):
        raise RuntimeError("switch")

    monkeypatch.setattr(type(model), "set_attn_implementation", fail)
    with pytest.raises(RuntimeError, match="switch"):
        prescore.apply(model, COARSE)
    assert is_untouched(model, "sdpa")
    monkeypatch.undo()
    monkeypatch.setattr("prescore.integrations.transformers.language._warn_if_all_local", fail)
    with pytest.raises(RuntimeError, match="switch"):
        prescore.apply(model, COARSE)
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
        applied = prescore.apply(model, COARSE)
    logits(model)
    assert applied.report()[0].path == "exact: a sliding window is local already"
    applied.undo()
    mixed = tiny("Gemma3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        applied = prescore.apply(mixed, COARSE)
    logits(mixed)
    paths = [entry.path for entry in applied.report().layers]
    assert paths == ["exact: a sliding window is local already", "prescored"]
    applied.undo()


def test_a_window_as_long_as_the_model_is_no_window():
    model = tiny("Phi3", sliding_window=128)  # all positions the model has
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        applied = prescore.apply(model, COARSE)
    ids, mask = prompts(length=32)
    model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    assert applied.report()[0].path == "step over the selection"
    applied.undo()


def test_models_inside_a_wrapper_are_found():
    wrapper = nn.Module()
    wrapper.inside = tiny("Llama")
    with prescore.apply(wrapper, COARSE, layers="last:1") as applied:
        logits(wrapper.inside)
        assert applied.layers == {1: "inside.model.layers.1.self_attn"}
        assert applied.report()[1].path == "prescored"
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
    with prescore.apply(model, COARSE), pytest.raises(Unsupported, match=reason):
        logits(model)


@pytest.mark.parametrize(("family", "sizes", "reason"), FOREIGN)
def test_foreign_features_may_run_exactly(family, sizes, reason):
    model = tiny(family, **sizes, attn_implementation="eager")
    expected = logits(model)
    with prescore.apply(model, COARSE, on_unsupported="exact") as applied:
        with pytest.warns(UserWarning, match=reason) as told:
            got = logits(model)
        assert len(told) == 1  # two layers, one reason
        assert reason in applied.report()[0].path
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            logits(model)  # said once
    assert (got - expected).abs().max() < 1e-4


def test_dropout_in_training_is_not_ignored():
    model = tiny("Llama", attention_dropout=0.3)
    with prescore.apply(model, COARSE) as applied:
        expected = logits(model)
        model.train()
        torch.manual_seed(1)
        first, second = logits(model), logits(model)
        assert applied.report()[0].path == "prescored"
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
        with prescore.apply(model, COARSE), pytest.raises(Unsupported, match="mask is neither"):
            model(ids, attention_mask=strange)
        with prescore.apply(model, COARSE, on_unsupported="exact"), pytest.warns(UserWarning, match="mask"):
            got = model(ids, attention_mask=strange).logits
    assert (got - expected).abs().max() < 1e-4


def test_attn_implementation_by_name(tmp_path):
    from transformers import LlamaForCausalLM

    import prescore.integrations.transformers  # noqa: F401

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


def test_the_name_alone_means_the_default_configuration():
    model = tiny("Llama", max_position_embeddings=8192)
    ids, _ = prompts(batch=1, length=5000, side="none")
    with torch.no_grad():
        exact = model(ids, logits_to_keep=4).logits
        with prescore.apply(model):
            expected = model(ids, logits_to_keep=4).logits
        model.set_attn_implementation("prescored")
        got = model(ids, logits_to_keep=4).logits
        assert not patches(model.model.layers[0].self_attn)
        with prescore.apply(model, Exact()):  # and an application on top of it comes off again
            assert (model(ids, logits_to_keep=4).logits - exact).abs().max() < 1e-4
        assert model.config._attn_implementation == "prescored"
        assert torch.equal(model(ids, logits_to_keep=4).logits, expected)
    assert torch.equal(got, expected)
    assert not torch.allclose(got, exact, atol=1e-5)


def test_registration_checks_itself():
    from prescore.errors import PrescoreError
    from prescore.integrations.transformers import attention as door

    def no_mask(**kwargs):
        return None

    with pytest.raises(PrescoreError, match="does not hide padding"):
        door.check_padding(door.prescored_attention_forward, no_mask)
    door.check_padding(door.prescored_attention_forward, door.prescored_mask)
