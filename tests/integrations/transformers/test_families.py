"""Families of transformers: every key is sdpa, a selection ignores padding, batch and future; images, encoders."""

import pytest
import torch
import transformers
from tiny_models import (
    COARSE,
    EVERY_KEY,
    FAMILIES,
    ROUNDING,
    ROUTED,
    SIZES,
    SMALL,
    VOCABULARY,
    forward,
    prompts,
    steps,
    tiny,
)
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

import prescore
from prescore import Routed, Selected
from prescore.integrations.attention import AttentionContext, PrescoredAttention
from prescore.integrations.transformers import PrescoredCache

pytestmark = pytest.mark.filterwarnings("ignore:every chosen layer")  # of Mistral, tested in test_apply

SELECTIONS = {"selected": COARSE.replace(top_k=6), "routed": ROUTED.replace(min_weight=1 / 8)}
FEW = SMALL["selected"]


def logits(model, ids, mask=None):
    # positions count from the first real token, as in generate; OPT counts them itself
    mask = torch.ones_like(ids) if mask is None else mask
    return forward(model, ids, mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_equals_sdpa(family):
    model = tiny(family, attn_implementation="sdpa")
    for side in ("none", "left", "right"):
        ids, mask = prompts(side=side)
        real, expected = mask.bool(), logits(model, ids, mask)
        with prescore.apply(model, EVERY_KEY):
            assert (logits(model, ids, mask) - expected)[real].abs().max() < ROUNDING, side
        assert expected[real].std() > 0.1  # the comparison is not of zeros
    ids, mask = prompts()
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "disable_compile": True}
    expected = model.generate(ids, **options)
    for config, cache in (
        (EVERY_KEY, "static"),
        (EVERY_KEY, "dynamic"),
        (EVERY_KEY.replace(top_k=1000), "dynamic"),
    ):
        with prescore.apply(model, config):
            assert torch.equal(model.generate(ids, **options, cache_implementation=cache), expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_selection_ignores_padding_batch_and_future(family, selection, side):
    model = tiny(family)
    ids, mask = prompts(length=60, cut=11, side=side)
    real = mask[0].bool()
    alone, changed = ids[:1, real], torch.cat((ids[1:, :37], ids[1:, :23]), dim=1)
    with prescore.apply(model, SELECTIONS[selection]):
        batched, single, other, later = (
            logits(model, *each) for each in ((ids, mask), (alone,), (ids[1:],), (changed,))
        )
    # rounding differs with the batch, hence not equal
    assert (batched[0, real] - single[0]).abs().max() < ROUNDING
    assert (batched[1] - other[0]).abs().max() < ROUNDING
    assert (other[:, :37] - later[:, :37]).abs().max() < ROUNDING
    assert not torch.allclose(other[:, 37:], later[:, 37:])
    if family != "Mistral":  # whose windows stay exact
        assert (single - logits(model, alone)).abs().max() > 10 * ROUNDING  # the selection does leave keys out


N = 24
BLOCKS = {"prefix": [(0, 7)], "images": [(4, 9), (9, 12), (20, 23)], "one token": [(4, 5), (9, 11)]}


def gemma3():
    text = {**SIZES, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7}
    vision |= {"image_size": 16, "patch_size": 8}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **tokens)
    torch.manual_seed(0)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


@torch.no_grad()
def test_gemma3_reads_images_both_ways():
    generator = torch.Generator().manual_seed(0)
    images, mask = torch.zeros(2, N, dtype=torch.int64), torch.ones(2, N, dtype=torch.int64)
    images[:, 6:10] = images[1, 14:18] = 1
    mask[0, :3] = 0
    ids = torch.randint(10, 60, (2, N), generator=generator).masked_fill(images == 1, 5)
    pixels = torch.randn(3, 3, 16, 16, generator=generator)
    inputs = {"input_ids": ids, "token_type_ids": images, "attention_mask": mask, "pixel_values": pixels}
    model, real = gemma3(), mask.bool()
    expected = model(**inputs).logits
    with prescore.apply(model, Selected("key-norm", 1.0, min_seq_len=4)) as applied:
        assert (model(**inputs).logits - expected)[real].abs().max() < ROUNDING
        paths = [layer.path for layer in applied.report().layers]
        assert paths == ["exact: a sliding window or chunk is local already", "prescored"]
    with prescore.apply(model, FEW):
        assert not torch.allclose(model(**inputs).logits[real], expected[real], atol=1e-3)
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("name", SMALL)
def test_queries_that_look_ahead_are_exact_and_the_others_causal(name, blocks, side):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, N, 8, generator=generator) for heads in (4, 2, 2))
    real = torch.ones(2, N, dtype=torch.bool)
    real[0, {"none": slice(0), "left": slice(3), "right": slice(-3, None)}[side]] = False
    visible = torch.ones(N, N, dtype=torch.bool).tril()
    causal_mask = (visible & real[:, None, :])[:, None]
    for first, last in BLOCKS[blocks]:
        visible[first:last, first:last] = True
    mask = (visible & real[:, None, :])[:, None]
    attend = PrescoredAttention(SMALL[name])
    output = attend(query, key, value, AttentionContext(layer=0, mask=mask, is_causal=True))
    assert (attend.last.path, attend.last.mask) == ("prescored", "ahead")
    causal = attend(query, key, value, AttentionContext(layer=0, mask=causal_mask, is_causal=True))
    repeated = (t.repeat_interleave(2, dim=1) for t in (key, value))
    exact = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask)
    # a block's last token, and one that only padding follows, sees nothing ahead
    ahead = (mask & ~causal_mask).any(-1).expand(2, 4, N)
    assert ahead.any()
    torch.testing.assert_close(output[ahead], exact[ahead], atol=1e-5, rtol=1e-5)
    assert torch.equal(output[~ahead], causal[~ahead])


ENCODERS = {
    "Bert": {},
    "Roberta": {"max_position_embeddings": 130},
    "Electra": {"embedding_size": 32},
    "ModernBert": {"global_attn_every_n_layers": 1, "cls_token_id": 1, "sep_token_id": 2},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
}
TEXT = torch.randint(3, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
TEXT_MASK = torch.ones_like(TEXT)
TEXT_MASK[0, 30:] = 0


def encoder(family):
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
    config = getattr(transformers, f"{family}Config")
    settings = config(**{**sizes, "eos_token_id": 2, **ENCODERS.get(family, {})})
    return getattr(transformers, f"{family}Model")(settings).eval()


@torch.no_grad()
def states(model, ids=TEXT):
    return model(ids, attention_mask=TEXT_MASK)[0][TEXT_MASK.bool()]


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders(family):
    model, changed = encoder(family), TEXT.clone()
    expected = states(model)
    idle = pytest.warns(UserWarning, match="Selected changes nothing at 40 tokens")
    with idle, prescore.apply(model, Selected(top_k=1.0)):
        assert (states(model) - expected).abs().max() < ROUNDING
    with prescore.apply(model, Selected(top_k=6, recent=1, remainder="none")) as applied:
        few = states(model)
        assert (few - expected).abs().max() > 1e-2
        assert applied.report()[0].phases["prefill"].ran == "selected"
        assert applied.report().reads("prefill") == (6, 0)
        changed[0, 30:] = 7  # padding
        assert torch.equal(states(model, changed), few)
        changed[0, 29] = 7  # the last real token, always read, reaches earlier ones
        assert not torch.allclose(states(model, changed)[:5], few[:5], atol=1e-4)
    config = Routed(exact_until=0, min_weight=1 / 16, cluster_size=4, chunk_size=8, sinks=1)
    with prescore.apply(model, config) as applied:
        states(model)
        assert applied.report()[0].phases["prefill"].ran == "routed"
    assert torch.equal(states(model), expected)


def test_a_decoder_with_cross_attention_counts_its_causal_layers_only():
    with prescore.apply(tiny("GPT2", add_cross_attention=True), FEW) as applied:
        assert list(applied.layers.values()) == ["transformer.h.0.attn", "transformer.h.1.attn"]


@torch.no_grad()
def test_an_encoder_decoder_steps_over_its_own_cache_or_one_of_ours():
    sizes = {"attention_heads": 4, "ffn_dim": 48, "layers": 2}
    sizes = {f"{part}_{name}": size for name, size in sizes.items() for part in ("encoder", "decoder")}
    torch.manual_seed(0)
    config = transformers.BartConfig(**sizes, d_model=32, vocab_size=VOCABULARY, init_std=0.3)
    model = transformers.BartForConditionalGeneration(config).eval()
    ids, _ = prompts(batch=1, length=40, side="none")
    results = []
    with prescore.apply(model, SELECTIONS["selected"]) as applied:
        for own in (PrescoredCache(), DynamicCache()):
            cache = EncoderDecoderCache(own, DynamicCache())
            model(ids, decoder_input_ids=ids, past_key_values=cache)
            results.append(model(ids, decoder_input_ids=ids[:, :1], past_key_values=cache).logits)
            assert {entry.path for entry in applied.report().layers} == {"step over the selection"}
            held = [hasattr(layer, "cache") and layer.cache.selection is not None for layer in own.layers]
            assert held == [isinstance(own, PrescoredCache)] * 2
    assert (results[0] - results[1]).abs().max() < ROUNDING


def test_numbers_are_those_of_the_model_where_other_layers_have_no_attention():
    sizes = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1}
    model = tiny("Jamba", num_hidden_layers=4, mamba_d_state=4, **sizes)
    ids, _ = prompts(batch=1, length=40, side="none")
    exact = forward(model, ids)
    for layers, numbers in {"all": [1, 3], "last:1": [3], "odd": [1, 3], -1: [3], "even": []}.items():
        with prescore.apply(model, FEW, layers=layers) as applied:
            assert list(applied.layers) == numbers
    with prescore.apply(model, {3: FEW}) as applied:
        assert not torch.allclose(forward(model, ids), exact, atol=1e-3)
        assert applied.layers == {3: "model.layers.3.self_attn"}
        assert applied.report()[3].path == "prescored"
    with pytest.raises(ValueError, match=r"layers must be among the model's attention layers, 1, 3, .* got 0"):
        prescore.apply(model, FEW, layers=[0])


@pytest.mark.parametrize("config", [ROUTED.replace(min_weight=1e-9), EVERY_KEY, prescore.Exact()])
def test_a_model_keeps_its_own_cache(config):
    """MiniMax takes no cache but its own class; its prompts are pre-scored, its steps read every key."""
    kinds = {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2, "block_size": 16}
    model = tiny("MiniMax", num_experts_per_tok=1, **kinds)
    for cut in (0, 7):
        ids, mask = prompts(cut=cut)
        options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "use_cache": True}
        wanted, tokens = forward(model, ids, mask), model.generate(ids, **options)
        with prescore.apply(model, config) as applied:
            assert (forward(model, ids, mask) - wanted)[mask.bool()].abs().max() < ROUNDING
            assert torch.equal(model.generate(ids, **options), tokens)
            assert applied.report()[1].last.n_keys == 29


@pytest.mark.parametrize(
    "config", [EVERY_KEY.replace(top_k=4096), ROUTED.replace(min_weight=1e-9)], ids=["selected", "routed"]
)
@pytest.mark.parametrize("cache", [PrescoredCache, DynamicCache])
def test_steps_of_a_layer_that_attends_with_other_values_read_these_values(config, cache):
    """DiffLlama attends twice with the same keys, to two tensors made of the cached values."""
    model = tiny("DiffLlama", attn_implementation="sdpa")
    ids, _ = prompts(batch=1, length=50, side="none")
    expected = forward(model, ids)[:, 40:]
    with prescore.apply(model, config):
        held = cache(config=model.config)
        forward(model, ids[:, :40], past_key_values=held)
        got = steps(model, held, ids[:, 40:])
    assert (got - expected).abs().max() < ROUNDING
