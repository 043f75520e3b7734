"""ChatGLM's core attention is found, replaced, and put back."""

import pytest
import torch
from integration_checks import check_dropout, check_undo_in_any_order
from tiny_chatglm import CoreAttention, TinyChatGLM
from tiny_models import COARSE, EVERY_KEY, leftovers

import prescore
from prescore.errors import Unsupported
from prescore.integrations.apply import observe
from prescore.integrations.patch import patches

ROUNDING = 1e-9  # float64, three layers without norms
IDS = torch.randint(1, 61, (2, 40), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS)
MASK[0, :7] = 0


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = TinyChatGLM().double().eval()
    for layer in made.transformer.encoder.layers:
        layer.self_attention.query_key_value.weight.data *= 4  # sharp attention
    return made


def cores(model):
    return [layer.self_attention.core_attention for layer in model.transformer.encoder.layers]


def is_untouched(model):
    return not leftovers(model) and all(type(core) is CoreAttention for core in cores(model))


@torch.no_grad()
def generate(model, ids, mask=None, n_new=6):
    """Logits of greedy tokens, with the cache of tuples that the original has."""
    tokens, cache, new = ids, None, []
    for _ in range(n_new):
        logits, cache = model(tokens, mask, cache)
        tokens = logits[:, -1:].argmax(-1)
        new.append(logits[:, -1])
        mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)
    return torch.stack(new, 1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("top_k", [1.0, 1000])
def test_every_key_equals_the_original(model, padded, top_k):
    mask = MASK if padded else None
    expected = generate(model, IDS, mask)
    with prescore.apply(model, EVERY_KEY.replace(top_k=top_k)) as applied:
        assert (generate(model, IDS, mask) - expected).abs().max() < ROUNDING
        assert applied.adapter == "chatglm"


def test_layers_undo_and_copies_of_heads(model):
    with prescore.apply(model, COARSE, layers="last:2") as applied:
        assert [len(patches(core)) for core in cores(model)] == [0, 1, 1]
        assert applied.layers[2] == "transformer.encoder.layers.2.self_attention.core_attention"
        generate(model, IDS, n_new=2)
        assert applied.report()[1].path == "step over the selection"
        selection = patches(cores(model)[1])[-1].attend._external.selection
        assert selection.buffer.key.shape[1] == 2  # keys are scored once per KV head
    assert is_untouched(model)


def test_twice_is_undone_in_any_order(model):
    check_undo_in_any_order(model, lambda each: generate(each, IDS), COARSE, COARSE.replace(top_k=12), "last:1")
    assert is_untouched(model)


def test_observers_see_every_layer_and_change_nothing(model):
    expected, seen = generate(model, IDS, n_new=1), []
    with observe(model, lambda query, key, context: seen.append((context.layer, query.shape, key.shape))) as n:
        assert torch.equal(generate(model, IDS, n_new=1), expected)
    assert n == 3
    assert seen == [(number, (2, 4, 40, 8), (2, 2, 40, 8)) for number in range(3)]
    assert is_untouched(model)


@torch.no_grad()
def test_an_unknown_mask_is_refused_or_runs_as_the_model_would(model, monkeypatch):
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    hidden[9, 4] = True
    monkeypatch.setattr(model, "masks", lambda *args: hidden.expand(1, 1, 40, 40))
    mask = MASK  # so that the model asks for its mask
    expected = model(IDS, mask)[0]
    refused = pytest.raises(Unsupported, match=r"in layer 0 \(ChatGLM\) cannot run: the attention mask is neither")
    with prescore.apply(model, COARSE), refused:
        model(IDS, mask)
    applied = prescore.apply(model, COARSE, on_unsupported="exact")
    with applied, pytest.warns(UserWarning, match="ChatGLM runs exactly"):
        assert torch.equal(model(IDS, mask)[0], expected)
    assert applied.report()[2].path.startswith("exact: unsupported because the attention mask")


def test_a_selection_ignores_padding_and_batch(model):
    with prescore.apply(model, COARSE):
        batched = generate(model, IDS, MASK)
        alone, other = generate(model, IDS[:1, 7:]), generate(model, IDS[1:])
    assert (batched[0] - alone[0]).abs().max() < ROUNDING
    assert (batched[1] - other[0]).abs().max() < ROUNDING
    assert (other - generate(model, IDS[1:])).abs().max() > 100 * ROUNDING


def test_another_layout_is_refused(model):
    batch_first = torch.zeros(2, 4, 7, 8, dtype=torch.float64)
    with prescore.apply(model, COARSE), pytest.raises(Unsupported, match=r"4 heads, dim\], got \(2, 4, 7, 8\)"):
        cores(model)[0](batch_first, batch_first, batch_first, None)


def test_training_with_dropout():
    check_dropout(TinyChatGLM(dropout=0.2), lambda each: generate(each, IDS, n_new=1), COARSE)
