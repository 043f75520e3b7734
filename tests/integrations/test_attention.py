"""`PrescoredAttention` in place of a layer's attention: paths, masks, refusals, seeds, what it keeps."""

import gc
import weakref

import pytest
import torch
from tiny_models import COARSE, ROUTED
from torch.nn.functional import scaled_dot_product_attention

import prescore
from prescore import Exact, Hyper, Lsh
from prescore.integrations import masks
from prescore.integrations.attention import AttentionContext, PrescoredAttention, layer_seed
from prescore.integrations.masks import as_bool, exact_under_mask, full_mask, read_mask

ENGINES = {"selected": COARSE, "routed": ROUTED.replace(exact_until=0), "hyper": Hyper(Lsh(8, 8), min_seq_len=8)}
CAUSAL = AttentionContext(layer=3, is_causal=True)


def qkv(n_query=40, n_keys=40, batch=2):
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(batch, 4, n_keys, 8, generator=draw)[:, :, n_keys - n_query :]
    return query, *(torch.randn(batch, 2, n_keys, 8, generator=draw) for _ in range(2))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", ENGINES)
def test_a_prompt_is_prescored_attention_with_a_seed_of_the_layer(name, is_causal):
    attend, (query, key, value) = PrescoredAttention(ENGINES[name], seed=7), qkv()
    context = AttentionContext(layer=3, is_causal=is_causal, scale=0.3)
    options = {"scale": 0.3, "generator": layer_seed(7, 3)}
    expected, aux = prescore.prescored_attention(
        query, key, value, ENGINES[name], is_causal=is_causal, return_aux=True, **options
    )
    assert torch.equal(attend(query, key, value, context), expected)
    last, kind = attend.last, "causal" if is_causal else "full"
    assert (last.path, last.mask, last.n_query, last.n_keys) == ("prescored", kind, 40, 40)
    assert last.reads == pytest.approx((aux.stats.keys_per_query, aux.stats.centroids_per_query))
    assert last.visible_keys == (20.5 if is_causal else 40)
    assert len({layer_seed(seed, layer) for seed in range(10) for layer in range(10)}) == 100
    step = query[:, :, -1:], key, value  # identity 10
    expected = prescore.prescored_attention(*step, ENGINES[name] if name == "selected" else Exact(), **options)
    torch.testing.assert_close(attend(*step, context), expected, atol=1e-6, rtol=1e-5)
    assert attend.last.path == f"step over {'the selection' if name == 'selected' else 'all keys'}"


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("n_query", [40, 3, 1])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_counted(is_causal, n_query, side):
    """Exact attention reads the real keys that real queries see, counted one by one."""
    real = torch.ones(2, 40, dtype=torch.bool)
    real[0, slice(9) if side == "left" else slice(-9, None)] = False
    visible = real[:, None, :].expand(2, n_query, 40)
    if is_causal:
        visible = visible & torch.ones(40, 40, dtype=torch.bool).tril()[-n_query:]
    counted = real if n_query == 40 else torch.ones(2, n_query, dtype=torch.bool)
    attend = PrescoredAttention(Exact())
    attend(*qkv(n_query), AttentionContext(layer=0, mask=real, is_causal=is_causal))
    assert attend.last.reads.keys == pytest.approx(float(visible.sum(-1)[counted].double().mean()))


@pytest.mark.parametrize("name", ENGINES)
def test_no_tensor_is_kept_to_count_keys(name):
    attend = PrescoredAttention(ENGINES[name])

    def call():
        inputs = qkv()
        return [weakref.ref(t) for t in (*inputs, attend(*inputs, CAUSAL))]

    for use in (call, lambda: attend.last.reads):  # the next call begins, or it is counted
        kept = call()
        use()
        gc.collect()
        assert [ref() for ref in kept] == [None] * 4


def test_several_queries_that_see_everything_are_no_step():
    """Without a causal mask they have no order that a step could follow."""
    inputs, attend = qkv(n_query=5), PrescoredAttention(COARSE)
    expected = prescore.prescored_attention(*inputs, COARSE, generator=layer_seed(0, 0))
    assert torch.equal(attend(*inputs, AttentionContext(layer=0)), expected)
    assert attend.last.path == "prescored"


@pytest.mark.parametrize("config", [COARSE, Exact()], ids=["selected", "exact"])
def test_a_mask_given_once_serves_the_whole_batch(config):
    padded = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    padded[..., :5] = False
    segments = torch.tensor([0] * 17 + [1] * 23)
    for mask in (padded, (segments[:, None] == segments).tril()[None, None]):
        once, each = (
            PrescoredAttention(config)(*qkv(), AttentionContext(layer=0, mask=own, is_causal=True))
            for own in (mask, mask.repeat(2, 1, 1, 1))
        )
        real = mask.any(-1)[0, 0]  # outputs of padding queries are not used
        assert torch.equal(once[:, :, real], each[:, :, real])


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
    n_query, n_keys = n_query or mask.shape[2], n_keys or mask.shape[-1]
    return read_mask(mask, n_query=n_query, n_keys=n_keys, is_causal=is_causal)


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


def test_float_masks():
    hidden = torch.zeros(3).masked_fill(torch.tensor([True, False, False]), torch.finfo(torch.float32).min)
    assert as_bool(hidden).tolist() == [False, True, True]
    assert as_bool(torch.tensor([0.0, 0.5])) is None
    assert read(torch.full((1, 1, N, N), 0.25)).kind == "other"


def test_a_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"attention_mask must end in \(4, 12\).*got \(2, 1, 5, 12\)"):
        read(padded(causal(5), LEFT), n_query=4)


@pytest.mark.parametrize("n_query", [600, 300])
@pytest.mark.parametrize("dim", [4, 64], ids=["torch", "native"])
@pytest.mark.parametrize("padding", ["none", "left", "right", "inside"])
def test_windows_over_several_blocks(n_query, dim, padding):
    """Each query reads every real key of its window, in native code and in torch's blocks."""
    n_keys, window = 600, 37
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, n_query), (2, n_keys), (2, n_keys))
    query, key, value = (torch.randn(2, *size, dim, generator=generator) for size in sizes)
    real = torch.ones(2, n_keys, dtype=torch.bool)
    places = {"none": slice(0), "left": slice(350), "right": slice(500, None), "inside": slice(480, 490)}
    real[0, places[padding]] = False
    mask = causal(n_query, n_keys) & ~causal(n_query, n_keys).tril(n_keys - n_query - window)
    form = read(padded(mask, real))
    assert (form.kind, form.window) == ("window", window)
    sees = padded(mask, real).any(-1)[..., None]
    expected = scaled_dot_product_attention(
        query, key, value, attn_mask=padded(mask, real), scale=0.2, enable_gqa=True
    )
    found = exact_under_mask(query, key, value, form, scale=0.2)
    # float32 sums of 37 terms in another order
    torch.testing.assert_close(found * sees, expected.nan_to_num() * sees, atol=2e-6, rtol=1e-5)
    with_gradient = exact_under_mask(query.clone().requires_grad_(), key, value, form, scale=0.2)
    assert with_gradient.requires_grad
    torch.testing.assert_close(found * sees, with_gradient * sees, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_windows_in_half_precision(dtype):
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, heads, 300, 256, generator=generator).to(dtype) for heads in (4, 1, 1))
    mask = (causal(300, 300) & ~causal(300, 300).tril(-128))[None, None]
    expected = scaled_dot_product_attention(
        query.double(), key.double(), value.double(), attn_mask=mask, enable_gqa=True
    )
    found = exact_under_mask(query, key, value, read(mask), scale=None)
    assert found.dtype == dtype
    # weights and outputs are rounded once each
    torch.testing.assert_close(
        found.double(), expected, atol=2 * torch.finfo(dtype).eps, rtol=torch.finfo(dtype).eps
    )


KINDS = {
    "causal": torch.ones(40, 40).tril(),
    "full": torch.ones(40, 40),
    "padded": torch.ones(40, 40).tril() * (torch.arange(40) >= 5),
    "window": torch.ones(40, 40).tril().triu(-8),
    "packed": torch.block_diag(torch.ones(15, 15), torch.ones(25, 25)).tril(),
    "ahead": torch.ones(40, 40).tril(3).where(torch.arange(40)[:, None] < 36, torch.ones(40, 40).tril()),
    "other": torch.ones(40, 40).tril() * (torch.arange(40) % 3 > 0),
}


@pytest.mark.parametrize("is_bias", [False, True], ids=["bool", "float"])
@pytest.mark.parametrize("by_head", [False, True], ids=["one", "by head"])
@pytest.mark.parametrize("n_query", [1, 2, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_attention_obeys_every_kind_of_mask_also_in_steps(kind, n_query, by_head, is_bias):
    mask = KINDS[kind][None, None, -n_query:].bool().expand(2, 4 if by_head else 1, n_query, 40).clone()
    if by_head:
        mask[:, 1, :, 20] = False
    if is_bias:  # finite numbers: no structure to read, and still to be obeyed
        mask = torch.where(mask, torch.linspace(-2, 0, 40), -1e9)
    query, key, value = qkv(n_query)
    form = read_mask(mask, n_query=n_query, n_keys=40, is_causal=True)
    found = exact_under_mask(query, key, value, form.for_batch(2), scale=None)
    wanted = scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), attn_mask=mask
    )
    is_shown = mask if mask.dtype == torch.bool else torch.ones_like(mask, dtype=torch.bool)
    sees = is_shown.expand(2, 4, n_query, 40).any(-1)
    if kind == "other":  # the last query is padding after the last real key: its output is not used
        sees[..., -1] = False
    torch.testing.assert_close(found[sees], wanted[sees], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", ["in place", "data", "numpy", "inference mode"])
def test_a_mask_that_changed_is_read_again(change):
    """A buffer for the mask that a caller fills anew for every forward, also where torch counts no version."""
    query, key, value = qkv()
    with torch.inference_mode(change == "inference mode"):
        mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
        layers = [(PrescoredAttention(Exact()), AttentionContext(number, mask=mask)) for number in (0, 1)]
        for hidden in (0, 15):
            target = {"data": mask.data, "numpy": mask.numpy()}.get(change, mask)
            target[..., 1 : 1 + hidden] = False
            wanted = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
            for attend, context in layers:
                torch.testing.assert_close(attend(query, key, value, context), wanted, rtol=1e-5, atol=1e-6)


def test_the_layers_of_a_forward_read_their_mask_once(monkeypatch):
    times = []
    read = masks._read
    monkeypatch.setattr(masks, "_read", lambda *given: times.append(1) or read(*given))
    query, key, value = qkv()
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    for _ in range(2):  # two forwards
        for number in range(3):
            PrescoredAttention(Exact())(query, key, value, AttentionContext(number, mask=mask))
    assert len(times) == 2
