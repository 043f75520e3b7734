"""A mask's structure is recognised, and only if the mask says exactly that."""

import pytest
import torch

from prescore.integrations.masks import as_bool, exact_under_mask, full_mask, read_mask

N = 12


def causal(n_query=N, n_keys=N):
    return torch.ones(n_query, n_keys, dtype=torch.bool).tril(n_keys - n_query)


def padded(mask, valid):
    return (mask & valid[:, None, :])[:, None]


VALID = torch.ones(2, N, dtype=torch.bool)
VALID[0, :3] = False
RIGHT = VALID.flip(1)
SEGMENTS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 2 + [1] * 10])
PACKED = causal() & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
PREFIX = causal()
PREFIX[4:9, 4:9] = True
WINDOW = causal() & ~causal().tril(-4)


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (padded(causal(), VALID), "causal"),
        (padded(causal(), RIGHT), "causal"),
        (padded(causal(4), VALID), "causal"),
        (padded(torch.ones(N, N, dtype=torch.bool), VALID), "full"),
        (padded(WINDOW, VALID), "window"),
        (padded(WINDOW[-4:], torch.ones_like(VALID)), "window"),
        (PACKED[:, None], "packed"),
        (padded(PACKED, RIGHT), "packed"),
        (padded(PREFIX, VALID), "ahead"),
        (padded(PREFIX[-7:], VALID), "ahead"),
        (padded(causal().roll(1, 1), torch.ones_like(VALID)), "other"),
        (causal().flip(0).expand(2, 1, N, N), "other"),
    ],
    ids=[
        "left",
        "right",
        "chunk",
        "full",
        "window",
        "late-window",
        "packed",
        "packed-padded",
        "prefix",
        "late-prefix",
        "shifted",
        "other",
    ],
)
def test_structure_is_found_and_rebuilt(mask, kind):
    form = read_mask(mask, n_query=mask.shape[2], n_keys=N, is_causal=True)
    assert form.kind == kind
    rebuilt = full_mask(form, mask.shape[2], mask.device)
    assert torch.equal(rebuilt.expand_as(mask), mask)


@pytest.mark.parametrize("kind", ["causal", "packed", "window"])
def test_one_wrong_entry_is_noticed(kind):
    mask = {"causal": padded(causal(), VALID), "packed": PACKED[:, None], "window": padded(WINDOW, VALID)}[kind]
    mask = mask.clone()
    mask[1, 0, 10, 9] = ~mask[1, 0, 10, 9]
    assert read_mask(mask, n_query=N, n_keys=N, is_causal=True).kind == "other"


def test_no_mask_and_padding_alone():
    assert read_mask(None, n_query=N, n_keys=N, is_causal=True).kind == "causal"
    assert read_mask(None, n_query=1, n_keys=N, is_causal=True).kind == "full"
    assert read_mask(None, n_query=N, n_keys=N, is_causal=False).kind == "full"
    for mask in (VALID, VALID[:, None, None, :]):
        form = read_mask(mask, n_query=4, n_keys=N, is_causal=True)
        assert form.kind == "causal"
        assert torch.equal(form.valid, VALID)


def test_unused_end_of_a_static_cache_is_cut_off():
    mask = torch.zeros(2, 1, 5, 20, dtype=torch.bool)
    mask[..., :N] = padded(causal(5), VALID)
    form = read_mask(mask, n_query=5, n_keys=20, is_causal=True)
    assert (form.kind, form.n_keys) == ("causal", N)
    assert torch.equal(form.valid, VALID)


def test_unused_end_behind_prompts_that_all_end_in_padding():
    valid = RIGHT & RIGHT[:1]
    assert not valid[:, -3:].any()
    for past in (0, 4):
        mask = torch.zeros(2, 1, N - past, 20, dtype=torch.bool)
        mask[..., :N] = padded(causal(N - past), valid)
        form = read_mask(mask, n_query=N - past, n_keys=20, is_causal=True)
        assert (form.kind, form.n_keys) == ("causal", N)
        assert torch.equal(form.valid, valid)


def test_float_masks():
    hidden = torch.zeros(3).masked_fill(torch.tensor([True, False, False]), torch.finfo(torch.float32).min)
    assert as_bool(hidden).tolist() == [False, True, True]
    assert as_bool(torch.tensor([0.0, 0.5])) is None
    biased = torch.full((1, 1, N, N), 0.25)
    assert read_mask(biased, n_query=N, n_keys=N, is_causal=True).kind == "other"


def test_a_changed_mask_is_read_again():
    mask = padded(causal(), VALID)
    assert read_mask(mask, n_query=N, n_keys=N, is_causal=True).kind == "causal"
    mask[1, 0, 10, 9] = False
    assert read_mask(mask, n_query=N, n_keys=N, is_causal=True).kind == "other"


def test_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"attention_mask must end in \(4, 12\).*got \(2, 1, 5, 12\)"):
        read_mask(padded(causal(5), VALID), n_query=4, n_keys=N, is_causal=True)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("mask", [padded(WINDOW, VALID), PACKED[:, None], padded(causal(), RIGHT), None])
def test_exact_attention_follows_every_form(mask, heads):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads[0], N, 8, generator=generator)
    key, value = (torch.randn(2, heads[1], N, 8, generator=generator) for _ in range(2))
    form = read_mask(mask, n_query=N, n_keys=N, is_causal=True)
    got = exact_under_mask(query, key, value, form, scale=0.7)
    groups = heads[0] // heads[1]
    seen = causal().expand(2, 1, N, N) if mask is None else mask
    expected = torch.nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(groups, 1),
        value.repeat_interleave(groups, 1),
        attn_mask=seen,
        scale=0.7,
    )
    # float32 sums of 12 terms in another order
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("n_query", [600, 300])
def test_windows_over_several_blocks(n_query):
    """Blocks of queries read every key their windows reach, and no more is needed."""
    n_keys, window = 600, 7
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, n_query, 4, generator=generator)
    key, value = (torch.randn(1, 1, n_keys, 4, generator=generator) for _ in range(2))
    seen = causal(n_query, n_keys) & ~causal(n_query, n_keys).tril(n_keys - n_query - window)
    form = read_mask(seen[None, None], n_query=n_query, n_keys=n_keys, is_causal=True)
    assert (form.kind, form.window) == ("window", window)
    got = exact_under_mask(query, key, value, form, scale=None)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key.expand(-1, 2, -1, -1), value.expand(-1, 2, -1, -1), attn_mask=seen
    )
    # float32 sums of 7 terms in another order
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
