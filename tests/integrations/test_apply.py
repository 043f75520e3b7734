"""`prescore.apply`: what it changes, what it refuses, and that it leaves nothing behind."""

import copy
import pickle
import re
import subprocess
import sys
import warnings
from unittest.mock import Mock

import pytest
import torch
import transformers
from integration_checks import check_dropout, check_undo_in_any_order
from routed_checks import needs_native
from tiny_models import ROUNDING, forward, leftovers, prompts, steps, tiny
from torch import nn

import prescore
from prescore import Exact, Routed, Selected
from prescore.errors import Unsupported
from prescore.integrations.apply import observe, replace_attention
from prescore.integrations.attention import original_attention
from prescore.integrations.patch import patches
from prescore.integrations.transformers import PrescoredCache, attention

COARSE = Selected(top_k=4, min_seq_len=4, sinks=1, remainder="none")
IDS, MASK = prompts(length=32)


def logits(model):
    return forward(model, IDS, MASK)[MASK.bool()]


def is_untouched(model):
    return model.config._attn_implementation == "sdpa" and not leftovers(model)


def test_everything_is_restored():
    model = tiny("Llama")
    before = logits(model)
    with prescore.apply(model, COARSE) as applied:
        assert not torch.allclose(logits(model), before, atol=1e-3)
        assert list(applied.layers.values()) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
        assert applied.adapter == "transformers.language"
        assert "Selected(top_k=4, sinks=1, remainder='none', min_seq_len=4) in 2 of 2 layers" in repr(applied)
    assert "undone" in repr(applied)
    assert is_untouched(model)
    assert torch.equal(logits(model), before)
    assert applied.report()[0].path == "prescored"  # the report can still be read
    with pytest.raises(ValueError, match="apply again"), applied:
        pass


def test_layers_choose_where_and_how():
    model = tiny("Llama")
    exact = logits(model)
    with prescore.apply(model, COARSE, layers="first:1"):
        first = logits(model)
    assert not torch.allclose(first, exact, atol=1e-3)
    other = Selected("uniform", top_k=4, min_seq_len=4)
    for config, layers, configs, expected in (
        (COARSE, [], {}, exact),
        ({"even": None}, "all", {}, exact),
        (Exact(), "all", {0: Exact(), 1: Exact()}, exact),
        ({"last:1": Selected(top_k=1.0, min_seq_len=4)}, "all", None, exact),
        ({"all": COARSE, -1: None}, "all", {0: COARSE}, first),
        ({(0, -2, 0): COARSE, "odd": Exact()}, "all", {0: COARSE, 1: Exact()}, first),
        ({1: COARSE, "last:1": None, 0: COARSE}, "all", {0: COARSE}, first),
        ({"all": COARSE}, "first:1", {0: COARSE}, first),
        ({"all": COARSE, 0: other}, "all", {0: other, 1: COARSE}, None),
    ):
        with prescore.apply(model, config, layers=layers) as applied:
            assert configs is None or applied.configs == configs
            got = logits(model)
            if expected is None:
                assert not torch.allclose(got, first, atol=1e-3)
            else:
                assert (got - expected).abs().max() < ROUNDING
    wrapper = nn.ModuleDict({"inside": model})
    with prescore.apply(wrapper, COARSE, layers="last:1") as applied:
        assert applied.layers == {1: "inside.model.layers.1.self_attn"}
        assert not torch.allclose(logits(model), exact, atol=1e-3)
        assert [(entry.layer, entry.path) for entry in applied.report().layers] == [(1, "prescored")]
    assert is_untouched(model)


@pytest.mark.parametrize(
    ("config", "options", "error", "match"),
    [
        ({"top_k": 5}, {}, ValueError, "layers of config must be .*, got 'top_k'"),
        ({"all": 3}, {}, TypeError, r"config\['all'\] must be a prescore.Routed.*got int"),
        ({1: {"top_k": 3}}, {}, TypeError, r"config\[1\] must be .*got dict"),
        ("routed", {}, TypeError, "config must be a prescore.Routed.*got str 'routed': pass an object"),
        (None, {"layers": "first:99"}, ValueError, "at most the model's 2 layers, got 'first:99'"),
        (None, {"layers": "last:0"}, ValueError, "got 'last:0'"),
        (None, {"layers": [7]}, ValueError, "attention layers, 0 to 1, or -2 to -1, got 7"),
        (None, {"layers": 1.5}, TypeError, "layers must be .* got 1.5"),
        (None, {"on_unsupported": "skip"}, ValueError, "must be one of 'raise', 'exact', got 'skip'"),
        (None, {"mesh": "two"}, TypeError, "mesh must be a torch.distributed process group .*, got str"),
        (None, {"top_k": 5}, TypeError, r"'top_k': pass a configuration, such as prescore.Selected\(top_k=5\)"),
        (None, {"topk": 5}, TypeError, "argument 'topk'$"),
        (None, {"audit": 0.0}, ValueError, r"audit must be finite and above 0\.0, got 0\.0"),
        (None, {"audit": 1.5}, ValueError, r"audit must be at most 1\.0, got 1\.5"),
        (None, {"audit": True}, TypeError, "audit must be a number, got bool True"),
        (None, {"backend": "fast"}, ValueError, "backend must be one of 'auto', 'native', .*, got 'fast'"),
        (None, {"backend": "plain", "mesh": "two"}, ValueError, "backend must be 'auto' with a mesh, got 'plain'"),
        (Routed, {}, TypeError, r"config must be .* got the type Routed: write Routed\(\)"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named_and_change_nothing(config, options, error, match):
    model = tiny("Llama")
    with pytest.raises(error, match=match):
        prescore.apply(model, config, **options)
    assert is_untouched(model)


def test_every_call_of_a_layer_takes_the_named_backend():
    model, config = tiny("Llama"), Routed(cluster_size=4, chunk_size=8, sinks=1, exact_until=0)
    ids, mask = prompts(batch=1, length=32, cut=0)
    with prescore.apply(model, config, backend="plain") as applied, torch.no_grad():
        cache = PrescoredCache()
        model(ids, attention_mask=mask, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
    assert [phase.last.stats["backend"] for phase in applied.report()[0].phases.values()] == ["plain", "plain"]
    with (
        prescore.apply(model, config, backend="triton"),
        pytest.raises(Unsupported, match="backend 'triton' cannot run"),
    ):
        model(ids)


def test_applications_are_undone_in_any_order():
    model = tiny("Llama", attn_implementation="eager")
    check_undo_in_any_order(model, logits, COARSE, COARSE.replace(top_k=6), "first:1")
    assert model.config._attn_implementation == "eager"


def test_any_function_may_replace_attention():
    model = tiny("Llama")
    before, attend = logits(model), Mock(wraps=original_attention)
    undo = replace_attention(model, {1: attend})
    assert (logits(model) - before).abs().max() < ROUNDING
    query, key, _, context = attend.call_args.args
    assert (context.layer, context.owner, attend.call_count) == (1, "LlamaAttention", 1)
    assert (query.shape, key.shape) == ((2, 4, 32, 8), (2, 2, 32, 8))
    undo()
    undo()
    assert is_untouched(model)
    with pytest.raises(ValueError, match="layers 0 to 1, got one for layer 2"):
        replace_attention(model, {2: attend})
    assert is_untouched(model)


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "GPT2"])
def test_an_observer_sees_every_layer_once_and_changes_nothing(family):
    model, note = tiny(family), Mock()
    expected = logits(model)
    with observe(model, note) as n:
        assert (logits(model) - expected).abs().max() < ROUNDING
    seen = [(context.layer, query.shape[2], key.shape[2]) for (query, key, context), _ in note.call_args_list]
    assert (n, seen) == (2, [(0, 32, 32), (1, 32, 32)])
    with prescore.apply(model, COARSE):
        applied = logits(model)
        with observe(model, note):
            assert (logits(model) - expected).abs().max() < ROUNDING
        assert torch.equal(logits(model), applied)
    note.side_effect = RuntimeError("no")
    with pytest.raises(RuntimeError, match="no"), observe(model, note):
        logits(model)
    assert torch.equal(logits(model), expected)
    assert is_untouched(model)


def test_a_failure_half_way_leaves_nothing_behind(monkeypatch):
    model = tiny("Llama")
    monkeypatch.setattr(type(model), "set_attn_implementation", Mock(side_effect=RuntimeError("switch")))
    with pytest.raises(RuntimeError, match="switch"):
        prescore.apply(model, COARSE)
    assert is_untouched(model)


def test_other_models_are_refused_by_name():
    with pytest.raises(TypeError, match="got str 'a model': load the model first"):
        prescore.apply("a model")
    with torch.device("meta"):
        deberta = transformers.DebertaModel(transformers.DebertaConfig(num_hidden_layers=1))
        swin = transformers.SwinModel(transformers.SwinConfig(embed_dim=24, depths=[1], num_heads=[3]))
    for model, match in (
        (tiny("Bloom", n_layer=2, n_head=4), "apply on BloomForCausalLM .*attention interface"),
        (deberta, "apply on DebertaModel cannot run: its attention does not go through"),
        (swin, "SwinModel.*SwinAttention"),
        (nn.Linear(2, 2), "apply on Linear"),
    ):
        with pytest.raises(Unsupported, match=match):
            prescore.apply(model)
        with pytest.raises(Unsupported, match=match), observe(model, lambda *shown: None):
            pass
        assert not leftovers(model)


def test_local_layers_stay_exact_with_a_warning_where_all_are():
    local = "exact: a sliding window or chunk is local already"
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 16}
    for family, sizes in {"Mistral": {}, "Llama4": {**experts, "no_rope_layers": [1, 1]}}.items():
        model = tiny(family, **sizes)
        exact = logits(model)
        message = f"every chosen layer of {family}ForCausalLM has a sliding window or chunk"
        with pytest.warns(UserWarning, match=message) as said, prescore.apply(model, COARSE) as applied:
            assert (logits(model) - exact).abs().max() < ROUNDING
        assert said[0].filename == __file__
        assert {entry.path for entry in applied.report().layers} == {local}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        applied = prescore.apply(tiny("Gemma3"), COARSE)
        logits(applied.model)
        assert [entry.path for entry in applied.report().layers] == [local, "prescored"]
        # a window over all positions of the model is no window
        applied = prescore.apply(tiny("Phi3", sliding_window=128), COARSE)
    applied.model.generate(IDS, attention_mask=MASK, max_new_tokens=2, do_sample=False)
    assert applied.report()[0].path == "step over the selection"


UNKNOWN = torch.ones(2, 1, 32, 32, dtype=torch.bool).tril()
UNKNOWN[..., 9, 4] = False
FOREIGN = {
    "Gemma2": ({"sliding_window": 200}, MASK, "soft-capped"),
    "GptOss": ({"num_local_experts": 2, "num_experts_per_tok": 2}, MASK, "learned attention sinks"),
    "Llama": ({"attn_implementation": "sdpa"}, UNKNOWN, "the attention mask is neither"),
}


@pytest.mark.parametrize("family", FOREIGN)
def test_unsupported_features_raise_or_run_exactly(family):
    sizes, mask, reason = FOREIGN[family]
    model = tiny(family, **{"attn_implementation": "eager", "layer_types": ["full_attention"] * 2, **sizes})

    def logits():
        return forward(model, IDS, mask)[MASK.bool()]

    expected = logits()
    refusal = rf'attention in layer 0 \({family}\w+\) cannot run: .*{reason}.*; on_unsupported="exact" would'
    if family == "Llama":
        with prescore.apply(model, COARSE), pytest.raises(Unsupported, match=refusal):
            logits()
    else:  # refused before the first forward
        with pytest.raises(Unsupported, match=refusal):
            prescore.apply(model, COARSE)
    with prescore.apply(model, Exact()):  # which needs nothing that is unsupported
        assert (logits() - expected).abs().max() < ROUNDING
    with prescore.apply(model, COARSE, on_unsupported="exact") as applied:
        with pytest.warns(UserWarning, match=f"runs exactly: .*{reason}") as said:
            got = logits()
        assert len(said) == 1  # two layers, one reason
        assert reason in applied.report()[0].path
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            logits()  # once
    assert (got - expected).abs().max() < ROUNDING


def test_a_model_with_position_biases_is_refused_unless_no_chosen_layer_has_one():
    sizes = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    with pytest.raises(Unsupported, match=r"layer 0 \(T5ForConditionalGeneration\) .* a position bias"):
        prescore.apply(t5)
    for config, layers in ((Exact(), "all"), (COARSE, [])):
        prescore.apply(t5, config, layers=layers).undo()
    local = tiny("Gemma2", sliding_window=9, layer_types=["sliding_attention", "full_attention"])
    with pytest.warns(UserWarning, match="every chosen layer"):
        prescore.apply(local, COARSE, layers=[0])  # a capped layer, which stays exact anyway
    with pytest.raises(Unsupported, match=r"layer 1 .* soft-capped"):
        prescore.apply(local, COARSE)


def test_everything_can_be_imported_under_a_default_device_without_memory():
    script = (
        "import torch; torch.set_default_device('meta'); import prescore.integrations.transformers, prescore; "
    )
    script += "[getattr(prescore, name) for name in prescore.__all__]"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_an_older_transformers_is_refused(monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "5.3.1")
    with pytest.raises(ImportError, match=r"transformers must be at least 5\.18, got 5\.3\.1"):
        attention.register()


@pytest.mark.parametrize(
    ("library", "version", "tested"),
    [(transformers, "5.24.0", "5.18 to 5.23"), (torch, "2.14.0+cpu", "2.13"), (torch, "2.12.1", "2.13")],
)
def test_versions_that_were_not_tested_are_warned_of(monkeypatch, library, version, tested):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention.register()
    monkeypatch.setattr(library, "__version__", version)
    message = re.escape(f"prescore was tested with {library.__name__} {tested}, got {version}")
    with pytest.warns(UserWarning, match=f"^{message}$"):
        attention.register()


def test_dropout_in_training_is_drawn_from_torch():
    check_dropout(tiny("Llama", attention_dropout=0.3), logits, COARSE)


@needs_native
def test_the_name_alone_means_the_default_configuration(tmp_path):
    tiny("Llama", head_dim=16, max_position_embeddings=8192).save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    ids, _ = prompts(batch=1, length=5000, side="none")

    def run():
        cache = PrescoredCache(model.config)
        return forward(model, ids, past_key_values=cache, logits_to_keep=4), steps(model, cache, ids[:, :2])

    exact = run()
    with prescore.apply(model):
        expected = run()
    assert not torch.allclose(expected[0], exact[0], atol=1e-5)
    model = type(model).from_pretrained(tmp_path, attn_implementation="prescored").eval()
    assert all(map(torch.equal, run(), expected))
    layer = model.model.layers[0].self_attn
    assert layer._prescore_default_patch.attend.last.path == "routed step"
    assert not patches(layer)
    with prescore.apply(model, Exact()):  # and an application on top of it comes off again
        assert all((got - wanted).abs().max() < ROUNDING for got, wanted in zip(run(), exact, strict=True))
    assert model.config._attn_implementation == "prescored"
    assert all(map(torch.equal, run(), expected))


def test_changes_of_the_configuration_meanwhile_stay():
    model = tiny("Llama")
    model.config.removed = object()
    with prescore.apply(model, COARSE):
        model.config.later = 7
        del model.config.removed
    assert model.config.later == 7
    assert not hasattr(model.config, "removed")
    other = copy.deepcopy(model.config)
    with prescore.apply(model, COARSE):
        model.config = other
    assert model.config is other


def test_a_copy_of_a_model_stays_applied_and_an_application_is_not_copied():
    model = tiny("Llama")
    before = forward(model, IDS, MASK)
    with prescore.apply(model, COARSE) as applied:
        during = forward(model, IDS, MASK)
        twin, third = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        with pytest.raises(Unsupported, match="a copy of an Applied cannot run: it belongs to one model"):
            copy.deepcopy(applied)
    assert torch.equal(forward(model, IDS, MASK), before)
    assert torch.equal(forward(twin, IDS, MASK), during)
    assert torch.equal(forward(third, IDS, MASK), during)
    with prescore.apply(twin, Exact()):
        torch.testing.assert_close(forward(twin, IDS, MASK), before, atol=1e-4, rtol=1e-4)
    assert torch.equal(forward(twin, IDS, MASK), during)


def test_weights_are_refused_or_exact():
    inputs = {"attention_mask": MASK, "output_attentions": True}
    expected = tiny("Llama", attn_implementation="eager")(IDS, **inputs)
    model = tiny("Llama")
    with prescore.apply(model, COARSE), pytest.raises(Unsupported, match="output_attentions=True asks"):
        model(IDS, **inputs)
    with prescore.apply(model, COARSE, on_unsupported="exact"):
        with pytest.warns(UserWarning, match="runs exactly: output_attentions=True"):
            output = model(IDS, **inputs)
        real = MASK.bool()[:, None, :, None]  # eager lets padding queries see padding
        for got, wanted in zip(output.attentions, expected.attentions, strict=True):
            torch.testing.assert_close(got * real, wanted * real)
        torch.testing.assert_close(output.logits[MASK.bool()], expected.logits[MASK.bool()])
        assert not torch.allclose(forward(model, IDS, MASK), output.logits, atol=1e-3)
    with prescore.apply(model, Exact()):
        assert len(model(IDS, **inputs).attentions) == 2
