"""timm models: what is replaced, what is kept, what is refused, and that undo leaves nothing behind."""

import contextlib
import copy
import importlib.util
from unittest.mock import Mock

import pytest
import torch
from torch import nn

if importlib.util.find_spec("timm") is None or importlib.util.find_spec("torchvision") is None:
    pytest.skip("timm or torchvision is not installed", allow_module_level=True)

from integration_checks import check_dropout, check_undo_in_any_order
from tiny_models import leftovers
from tiny_vision_models import pixels, tiny_timm

import prescore
from prescore import KMeans, Selected
from prescore.errors import Unsupported
from prescore.integrations import timm as adapter
from prescore.integrations.attention import PrescoredAttention
from prescore.integrations.patch import patches
from prescore.integrations.torchvision import import_timm

# before any `from timm...` below, whichever test runs first
import_timm()

FEW = Selected(KMeans(n_clusters=3), top_k=8, sinks=0, remainder="none")
TOKENS = torch.randn(20, 20, 48, generator=torch.Generator().manual_seed(0))
FLOAT32 = {"rtol": 1e-4, "atol": 1e-4}  # the same sums in another order of operations


@torch.inference_mode()
def answer(model):
    return model(pixels())


def replace_attention(model, config, **options):
    attend = PrescoredAttention(config, **options)
    return adapter.replace_attention(model, dict.fromkeys(range(len(adapter.layers(model))), attend))


@pytest.fixture
def layer():
    """One attention layer, as a model of its own."""
    from timm.layers import Attention

    torch.manual_seed(0)
    model = nn.Module()
    model.attn = Attention(48, num_heads=3, gated=True).eval()
    return model


@pytest.mark.parametrize(
    ("options", "n_prefix"),
    [
        ({}, 1),
        ({"qk_norm": True}, 1),
        ({"reg_tokens": 4}, 5),
        ({"class_token": False, "global_pool": "avg"}, 0),
        ({"init_values": 0.5}, 1),
        ({"scale_attn_norm": True}, 1),
    ],
    ids=str,
)
def test_every_key_selected_is_the_model_itself_and_undo_restores(options, n_prefix):
    model = tiny_timm(**options)
    before = answer(model)
    with prescore.apply(model, Selected(top_k=1.0)) as applied:
        torch.testing.assert_close(answer(model), before, **FLOAT32)
        assert applied.adapter == "timm"
        assert applied.layers == {0: "blocks.0.attn", 1: "blocks.1.attn"}
        assert patches(model.blocks[1].attn)[-1].n_prefix == n_prefix
    with prescore.apply(model, FEW):
        assert (answer(model) - before).abs().max() > 1e-2
    with prescore.apply(model, FEW, layers="last:1"):
        assert ["forward" in block.attn.__dict__ for block in model.blocks] == [False, True]
    assert torch.equal(answer(model), before)
    assert not leftovers(model)


def test_a_gate_is_kept(layer):
    before = layer.attn(TOKENS)
    sdpa = nn.functional.scaled_dot_product_attention
    undo = adapter.replace_attention(layer, {0: lambda query, key, value, context: sdpa(query, key, value)})
    torch.testing.assert_close(layer.attn(TOKENS), before)
    layer.attn.gate.weight.data.add_(0.5)
    assert not torch.allclose(layer.attn(TOKENS), before)
    undo()


def test_projection_and_attention_dropout_are_kept():
    model = tiny_timm(proj_drop_rate=0.5).train()
    with prescore.apply(model, FEW):
        assert not torch.equal(model(pixels()), model(pixels()))
    check_dropout(tiny_timm(attn_drop_rate=0.25), answer, FEW)


def test_padding_masks_are_honoured_and_other_masks_refused(layer):
    """Also the mask of NaFlex, which blinds padding queries too."""
    tokens = TOKENS[:2]
    real = torch.ones(2, 20, dtype=torch.bool)
    real[1, 12:] = False
    keys_only = real[:, None, None, :].expand(2, 1, 20, 20)
    both = real[:, None, :, None] & real[:, None, None, :]
    naflex = torch.zeros(both.shape).masked_fill(~both, torch.finfo(torch.float32).min)
    undo = replace_attention(layer, FEW.replace(top_k=6))
    with torch.no_grad():
        for mask in (keys_only, naflex):
            masked = layer.attn(tokens, attn_mask=mask)
            torch.testing.assert_close(masked[1:, :12], layer.attn(tokens[1:, :12]), **FLOAT32)
            torch.testing.assert_close(masked[:1], layer.attn(tokens[:1]), **FLOAT32)
        odd = keys_only.clone()
        odd[0, 0, 3, 5] = False
        with pytest.raises(Unsupported, match=r"in layer 0 \(Attention\) .* the attention mask is neither"):
            layer.attn(tokens, attn_mask=odd)
    undo()


@pytest.mark.parametrize("batch", [2, 20])
@pytest.mark.parametrize("name", ["causal", "padding", "random"])
def test_a_square_mask_is_queries_by_keys_whatever_the_batch(layer, batch, name):
    mask = {
        "causal": torch.ones(20, 20, dtype=torch.bool).tril(),
        "padding": torch.ones(1, 1, 1, 20, dtype=torch.bool).index_fill(3, torch.arange(12, 20), False),
        "random": torch.rand(20, 20, generator=torch.Generator().manual_seed(0)).fill_diagonal_(1) > 0.5,
    }[name]
    warns = pytest.warns(UserWarning, match="runs exactly") if name == "random" else contextlib.nullcontext()
    with torch.no_grad():
        before = layer.attn(TOKENS[:batch], attn_mask=mask)
        undo = replace_attention(layer, Selected(top_k=1.0), on_unsupported="exact")
        with warns:
            got = layer.attn(TOKENS[:batch], attn_mask=mask)
        undo()
    torch.testing.assert_close(got, before, **FLOAT32)


def test_a_copy_runs_on_its_own_weights():
    model = tiny_timm()
    with prescore.apply(model, FEW):
        twin = copy.deepcopy(model)
        before = answer(twin)
        with torch.no_grad():
            model.blocks[0].attn.qkv.weight.zero_()
        assert torch.equal(answer(twin), before)


def test_twice_is_undone_in_any_order():
    check_undo_in_any_order(tiny_timm(), answer, FEW, FEW.replace(top_k=20), [0])


def test_a_forward_that_was_replaced_before_comes_back():
    model = tiny_timm()
    layer = model.blocks[0].attn
    layer.forward = counted = Mock(wraps=layer.forward)
    with prescore.apply(model, FEW):
        answer(model)
        assert not counted.called
    answer(model)
    assert counted.call_count == 1
    assert layer.forward is counted


def test_plain_architectures_are_served_and_others_refused_by_name():
    for name, match in {
        "swin_tiny_patch4_window7_224": r"SwinTransformer.*WindowAttention",
        "beit_base_patch16_224": r"Beit cannot.*timm\.models\.beit\.Attention",
        "eva02_tiny_patch14_224": r"Eva cannot.*EvaAttention",
        "cait_xxs24_224": r"Cait.*TalkingHeadAttn",
        "mixer_s16_224": r"MlpMixer.*plain Attention",
        "resnet18": r"ResNet.*plain Attention",
    }.items():
        with torch.device("meta"):
            model = import_timm().create_model(name)
        with pytest.raises(Unsupported, match=match):
            prescore.apply(model, FEW)
    for name, wanted in {
        "deit_tiny_distilled_patch16_224": (12, 2),
        "vit_small_patch14_reg4_dinov2": (12, 5),
        "vit_base_patch16_siglip_224": (12, 0),
        "deit3_small_patch16_224": (12, 1),
        "vit_small_patch16_18x2_224": (36, 1),
        "pit_ti_224": (12, 1),
        "pit_ti_distilled_224": (12, 2),
    }.items():
        with torch.device("meta"):
            model = import_timm().create_model(name)
        names = adapter.layers(model)
        assert (len(names), adapter.tokens_before_patches(model, names[0])) == wanted, name
