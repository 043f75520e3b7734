"""Hugging Face ViTs, and that both libraries give the same logits for the same weights and seed."""

import importlib.util

import pytest
import torch
import transformers
from integration_checks import check_dropout, check_undo_in_any_order
from tiny_models import leftovers
from tiny_vision_models import SHAPE, huggingface_from_timm, pixels, spread, tiny_huggingface, tiny_timm

import prescore
import prescore.integrations.transformers
from prescore import Hyper, KMeans, Lsh, Routed, Selected
from prescore.integrations.apply import find_adapter, replace_attention
from prescore.integrations.attention import AttentionContext, PrescoredAttention
from prescore.integrations.patch import patches

FEW = Selected(KMeans(n_clusters=3), top_k=8, sinks=0, remainder="none")
CENTROIDS = FEW.replace(scorer=KMeans(n_clusters=3, rule="farthest", normalize=False), remainder="centroids")
SAMPLED = FEW.replace(scorer=KMeans(n_clusters=3, rule="farthest"), selector="sample")
HAS_TIMM = all(importlib.util.find_spec(name) is not None for name in ("timm", "torchvision"))
needs_timm = pytest.mark.skipif(not HAS_TIMM, reason="timm or torchvision is not installed")
REGISTERS = ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig")
FAMILIES = {
    ("ViTForImageClassification", "ViTConfig"): 1,
    ("DeiTForImageClassification", "DeiTConfig"): 2,
    ("Dinov2ForImageClassification", "Dinov2Config"): 1,
    REGISTERS: 5,
    ("CLIPVisionModel", "CLIPVisionConfig"): 1,
    ("SiglipVisionModel", "SiglipVisionConfig"): 0,
}


@torch.inference_mode()
def answer(model):
    return model(pixel_values=pixels())[0]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[0])
def test_families(family):
    model = tiny_huggingface(*family)
    before, implementation = answer(model), model.config._attn_implementation
    with prescore.apply(model, Selected(top_k=1.0)) as applied:
        assert applied.adapter == "transformers.vision"
        assert len(applied.layers) == 2
        # the same sums in another order of operations, float32
        torch.testing.assert_close(answer(model), before, rtol=1e-3, atol=1e-3)
        assert patches(model.get_submodule(applied.layers[0]))[-1].n_prefix == FAMILIES[family]
    with prescore.apply(model, FEW, layers=[1]) as applied:
        assert list(applied.layers) == [1]
        assert (answer(model) - before).abs().max() > 1e-3
    assert torch.equal(answer(model), before)
    assert model.config._attn_implementation == implementation
    assert not leftovers(model)


def test_the_text_tower_of_clip_is_left_alone():
    text = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 96}
    config = transformers.CLIPConfig(vision_config=SHAPE, text_config={**text, "vocab_size": 50})
    model = spread(transformers.CLIPModel(config))
    inputs = {"pixel_values": pixels(), "input_ids": torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])}
    with torch.inference_mode():
        before = model(**inputs)
        with prescore.apply(model, FEW) as applied:
            after = model(**inputs)
    assert all(name.startswith("vision_model") for name in applied.layers.values())
    assert torch.equal(after.text_embeds, before.text_embeds)
    assert not torch.allclose(after.image_embeds, before.image_embeds)


def test_attention_dropout_is_honoured_in_training():
    model = tiny_huggingface(attention_probs_dropout_prob=0.25, hidden_dropout_prob=0.0)
    check_dropout(model, answer, FEW)


def test_twice_is_undone_in_any_order():
    model = tiny_huggingface()
    check_undo_in_any_order(model, answer, FEW, SAMPLED, [0])
    assert model.config._attn_implementation == "sdpa"


def test_the_name_alone_knows_the_prefix_too():
    model = tiny_huggingface(*REGISTERS)
    before = answer(model)
    model.set_attn_implementation("prescored")
    torch.testing.assert_close(answer(model), before, rtol=1e-3, atol=1e-3)
    layer = model.get_submodule(find_adapter(model).layers(model)[0])
    assert layer._prescore_default_patch.n_prefix == 5


@pytest.mark.parametrize(
    "config",
    [
        FEW,
        Selected("key-norm", min_score=3.0, sinks=0, remainder="none"),
        Routed(min_weight=1.0, cluster_size=4, chunk_size=8, sinks=0, exact_until=0),
        Hyper(Lsh(4, 0), min_seq_len=0),
    ],
    ids=["selected", "min score", "routed", "hyper"],
)
def test_every_configuration_with_sinks_reads_the_prefix(config):
    functions = (PrescoredAttention(each) for each in (config, config.replace(sinks=5)))
    model, results = tiny_huggingface(*REGISTERS), []
    for attend in (*functions, PrescoredAttention(config, protect_prefix=False)):
        undo = replace_attention(model, {0: attend, 1: attend})
        results.append(answer(model))
        undo()
    assert torch.equal(results[0], results[1])
    assert not torch.allclose(results[0], results[2])
    assert PrescoredAttention(config.replace(sinks=7)).with_prefix(5, 21).sinks == 7


@pytest.mark.parametrize("top_k", [2, 0.05])
@pytest.mark.parametrize("padded", [False, True])
def test_prefix_tokens_are_read_whatever_the_budget(top_k, padded):
    """Without centroids, a query reads the tokens before the patches and nothing else."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 24, 8, generator=generator) for _ in range(3))
    real = torch.ones(2, 24, dtype=torch.bool)
    real[1, 20:] = not padded
    attend = PrescoredAttention(Selected("uniform", top_k=top_k, sinks=0, remainder="none"))
    got = attend(query, key, value, AttentionContext(layer=0, n_prefix=5, mask=real if padded else None))
    expected = prescore.exact_attention(query, key[:, :, :5], value[:, :, :5]).output
    torch.testing.assert_close(got[1], expected[1], atol=1e-6, rtol=1e-5)  # float32, another order of summing
    # a share is raised for the shortest sequence, and may keep a token more of a longer one
    n_read = 6 if padded and isinstance(top_k, float) else 5
    assert attend.last.reads == (pytest.approx((n_read + 5) / 2), 0)


@needs_timm
@pytest.mark.parametrize("protect", [True, False])
@pytest.mark.parametrize("config", [FEW, CENTROIDS, SAMPLED], ids=["nearest", "centroids", "sampled"])
@torch.inference_mode()
def test_timm_and_huggingface_agree(config, protect):
    ours = tiny_timm().double()
    theirs = huggingface_from_timm(ours.state_dict()).double()
    images, results = pixels().double(), []
    for seed in (5, 6):
        attend = PrescoredAttention(config, protect_prefix=protect, seed=seed)
        for model in (ours, theirs):
            undo = replace_attention(model, {0: attend, 1: attend})
            results.append(model(images))
            undo()
    # float64: a rounding difference of float32 may move a key to another cluster
    torch.testing.assert_close(results[0], results[1].logits, rtol=1e-9, atol=1e-9)
    assert not torch.equal(results[0], results[2])
