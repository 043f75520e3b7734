"""Masks in which some tokens see each other both ways: prefixes, and the images of Gemma3."""

import pytest
import torch
from tiny_models import SIZES

import prescore
from prescore import Hyper, Lsh, Routed, Selected
from prescore.integrations.attention import AttentionContext, PrescoredAttention

N = 24
COARSE = Selected("key-norm", top_k=3, sinks=1, min_seq_len=4)
CONFIGS = {
    "selected": COARSE,
    "routed": Routed(min_weight=1 / 4, cluster_size=2, chunk_size=2, sinks=1, exact_until=0),
    "hyper": Hyper(Lsh(2, 2), min_seq_len=4),
}


def gemma3():
    import transformers

    text = {**SIZES, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**text),
        vision_config=transformers.SiglipVisionConfig(**vision, image_size=16, patch_size=8),
        mm_tokens_per_image=4,
        image_token_index=5,
        boi_token_index=6,
        eoi_token_index=7,
    )
    torch.manual_seed(0)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def a_prompt_with_images():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 60, (2, N), generator=generator)
    images = torch.zeros_like(ids)
    images[:, 6:10] = 1
    images[1, 14:18] = 1
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    pixels = torch.randn(3, 3, 16, 16, generator=generator)
    ids = ids.masked_fill(images == 1, 5)
    return {"input_ids": ids, "token_type_ids": images, "attention_mask": mask, "pixel_values": pixels}


def test_gemma3_reads_images_both_ways():
    model, inputs = gemma3(), a_prompt_with_images()
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**inputs).logits
        with prescore.apply(model, Selected("key-norm", 1.0, min_seq_len=4)) as applied:
            torch.testing.assert_close(model(**inputs).logits[real], expected[real], atol=1e-4, rtol=1e-4)
            assert [layer.path for layer in applied.report().layers] == [
                "exact: a sliding window is local already",
                "prescored",
            ]
        with prescore.apply(model, COARSE):
            assert not torch.allclose(model(**inputs).logits[real], expected[real], atol=1e-3)
            model.generate(**inputs, max_new_tokens=3, do_sample=False)
        assert torch.equal(model(**inputs).logits, expected)


def both_ways(blocks, valid):
    """Causal, and every block sees all of itself."""
    seen = torch.ones(N, N, dtype=torch.bool).tril()
    for first, last in blocks:
        seen[first:last, first:last] = True
    return (seen & valid[:, None, :])[:, None]


VALID = torch.ones(2, N, dtype=torch.bool)
LEFT = VALID.clone()
LEFT[0, :3] = False
BLOCKS = {"prefix": [(0, 7)], "images": [(4, 9), (9, 12), (20, 23)], "one token": [(4, 5), (9, 11)]}


@pytest.mark.parametrize("valid", [VALID, LEFT, LEFT.flip(1)], ids=["whole", "left", "right"])
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_that_look_ahead_are_exact_and_the_others_causal(name, blocks, valid):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, N, 8, generator=generator)
    key, value = (torch.randn(2, 2, N, 8, generator=generator) for _ in range(2))
    mask = both_ways(BLOCKS[blocks], valid)
    attend = PrescoredAttention(CONFIGS[name])
    output = attend(query, key, value, AttentionContext(layer=0, mask=mask, is_causal=True))
    assert (attend.last.path, attend.last.mask) == ("prescored", "ahead")
    causal = attend(query, key, value, AttentionContext(layer=0, mask=both_ways([], valid), is_causal=True))
    repeated = (t.repeat_interleave(2, dim=1) for t in (key, value))
    exact = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask)
    ahead = torch.zeros(N, dtype=torch.bool)
    for first, last in BLOCKS[blocks]:
        ahead[first : last - 1] = True
    # a block's last token, and one that only padding follows, sees nothing ahead
    ahead = (mask & ~both_ways([], valid)).any(-1).expand(2, 4, N)
    assert ahead.any()
    torch.testing.assert_close(output[ahead], exact[ahead], atol=1e-5, rtol=1e-5)
    assert torch.equal(output[~ahead], causal[~ahead])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CONFIGS)
def test_right_padded_prompts_generate_the_same_with_a_static_cache(name, cache):
    from tiny_models import prompts, tiny

    model = tiny("Llama")
    ids, mask = prompts(side="right")
    mask[1, -2:] = 0  # every row ends in padding
    ids = ids * mask
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": mask}
    with prescore.apply(model, CONFIGS[name]):
        expected = model.generate(ids, **options)
        assert torch.equal(model.generate(ids, cache_implementation=cache, **options), expected)
    # with every key the padded row that generation reads is that of sdpa
    everything = Selected("key-norm", 1.0, min_seq_len=4)
    expected = model.generate(ids, **options)
    for config in (everything, Routed()):
        with prescore.apply(model, config):
            assert torch.equal(model.generate(ids, cache_implementation=cache, **options), expected)
