"""The structure of a mask is recognised, and only if the mask has exactly that structure."""

import pytest
import torch

from prescore.integrations.masks import as_bool, exact_under_mask, full_mask, read_mask

N = 12


def causal(n_query=N, n_keys=N):
    return torch.ones(n_query, n_keys, dtype=torch.bool).tril(n_keys - n_query)


def padded(mask, valid):
    return (mask & valid[:, None, :])[:, None]


ALL = torch.ones(2, N, dtype=torch.bool)
LEFT = ALL.clone()
LEFT[0, :3] = False
RIGHT = LEFT.flip(1)
SEGMENTS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 2 + [1] * 10])
PACKED = causal() & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
PREFIX = causal()
PREFIX[4:9, 4:9] = True
WINDOW = causal() & ~causal().tril(-4)
MASKS = {
    "left": (padded(causal(), LEFT), "causal"),
    "right": (padded(causal(), RIGHT), "causal"),
    "chunk": (padded(causal(4), LEFT), "causal"),
    "full": (padded(torch.ones(N, N, dtype=torch.bool), LEFT), "full"),
    "window": (padded(WINDOW, LEFT), "window"),
    "late window": (padded(WINDOW[-4:], ALL), "window"),
    "packed": (PACKED[:, None], "packed"),
    "packed and padded": (padded(PACKED, RIGHT), "packed"),
    "prefix": (padded(PREFIX, LEFT), "ahead"),
    "late prefix": (padded(PREFIX[-7:], LEFT), "ahead"),
    "shifted": (padded(causal().roll(1, 1), ALL), "other"),
    "flipped": (causal().flip(0).expand(2, 1, N, N), "other"),
}


def read(mask, n_query=None, n_keys=None, is_causal=True):
    n_query = mask.shape[2] if n_query is None else n_query
    return read_mask(
        mask, n_query=n_query, n_keys=mask.shape[-1] if n_keys is None else n_keys, is_causal=is_causal
    )


@pytest.mark.parametrize("name", MASKS)
def test_structure_is_found_and_rebuilt(name):
    mask, kind = MASKS[name]
    form = read(mask)
    assert form.kind == kind
    assert torch.equal(full_mask(form, mask.shape[2], mask.device).expand_as(mask), mask)


@pytest.mark.parametrize("name", ["left", "packed", "window"])
def test_one_wrong_entry_is_noticed_also_when_it_comes_later(name):
    mask, kind = MASKS[name]
    mask = mask.clone()
    assert read(mask).kind == kind
    mask[1, 0, 10, 9] = ~mask[1, 0, 10, 9]
    assert read(mask).kind == "other"


def test_no_mask_and_padding_alone():
    for n_query, is_causal, kind in ((N, True, "causal"), (1, True, "full"), (N, False, "full")):
        assert read(None, n_query, N, is_causal).kind == kind
    for mask in (LEFT, LEFT[:, None, None, :]):
        form = read(mask, n_query=4)
        assert form.kind == "causal"
        assert torch.equal(form.valid, LEFT)


@pytest.mark.parametrize("valid", [LEFT, RIGHT & RIGHT[:1]], ids=["real", "padding"])
@pytest.mark.parametrize("n_query", [N, 8, 5])
def test_the_unused_end_of_a_static_cache_is_cut_off(valid, n_query):
    """Also behind prompts that all end in padding."""
    mask = torch.zeros(2, 1, n_query, 20, dtype=torch.bool)
    mask[..., :N] = padded(causal(n_query), valid)
    form = read(mask)
    assert (form.kind, form.n_keys) == ("causal", N)
    assert torch.equal(form.valid, valid)


def test_padding_that_also_blinds_padding_queries_is_padding():
    form = read(RIGHT[:, None, :, None] & RIGHT[:, None, None, :], is_causal=False)
    assert form.kind == "full"
    assert torch.equal(form.valid, RIGHT)


def test_float_masks():
    hidden = torch.zeros(3).masked_fill(torch.tensor([True, False, False]), torch.finfo(torch.float32).min)
    assert as_bool(hidden).tolist() == [False, True, True]
    assert as_bool(torch.tensor([0.0, 0.5])) is None
    assert read(torch.full((1, 1, N, N), 0.25)).kind == "other"


def test_a_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"attention_mask must end in \(4, 12\).*got \(2, 1, 5, 12\)"):
        read(padded(causal(5), LEFT), n_query=4)


def reference(query, key, value, mask, scale=None):
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


@pytest.mark.parametrize("n_kv_heads", [4, 2])
@pytest.mark.parametrize("name", ["window", "packed", "right", None])
def test_exact_attention_follows_every_form(name, n_kv_heads):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, h, N, 8, generator=generator) for h in (4, n_kv_heads, n_kv_heads))
    mask = None if name is None else MASKS[name][0]
    got = exact_under_mask(query, key, value, read(mask, N, N), scale=0.7)
    expected = reference(query, key, value, causal().expand(2, 1, N, N) if mask is None else mask, 0.7)
    # float32 sums of 12 terms in another order
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("n_query", [600, 300])
def test_windows_over_several_blocks(n_query):
    """Each block of queries reads every key that its windows reach."""
    n_keys, window = 600, 7
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, n_query), (1, n_keys), (1, n_keys))
    query, key, value = (torch.randn(1, *size, 4, generator=generator) for size in sizes)
    mask = causal(n_query, n_keys) & ~causal(n_query, n_keys).tril(n_keys - n_query - window)
    form = read(mask[None, None])
    assert (form.kind, form.window) == ("window", window)
    # float32 sums of 7 terms in another order
    got = exact_under_mask(query, key, value, form, scale=None)
    torch.testing.assert_close(got, reference(query, key, value, mask), atol=1e-6, rtol=1e-5)
