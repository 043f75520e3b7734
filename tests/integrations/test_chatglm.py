"""ChatGLM's core attention is found, replaced, and put back."""

import pytest
import torch
from chatglm_stand_in import ChatGLMStandIn, CoreAttention

import prescore
from prescore.errors import Unsupported
from prescore.integrations.chatglm import PrescoredCoreAttention

EVERYTHING = {"top_k": None, "inner": "exact", "remainder": "none", "min_seq_len": 4}
COARSE = {"top_k": 6, "min_seq_len": 8, "sinks": 2, "n_clusters": 3}
ROUNDING = 1e-9  # float64, three layers without norms


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = ChatGLMStandIn().double().eval()
    for layer in made.transformer.encoder.layers:
        layer.self_attention.query_key_value.weight.data *= 4  # sharp attention
    return made


@pytest.fixture
def ids():
    return torch.randint(1, 61, (2, 40), generator=torch.Generator().manual_seed(3))


def generate(model, ids, mask=None, n_new=6):
    """Greedy tokens, with the cache of tuples the original has."""
    tokens, past, new = ids, None, []
    with torch.no_grad():
        for _ in range(n_new):
            logits, past = model(tokens, mask, past)
            tokens = logits[:, -1:].argmax(-1)
            new.append(logits[:, -1])
            if mask is not None:
                mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
    return torch.stack(new, 1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("top_k", [None, 1000])
def test_every_key_equals_the_original(model, ids, padded, top_k):
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    mask = mask if padded else None
    expected = generate(model, ids, mask)
    with prescore.apply(model, **{**EVERYTHING, "top_k": top_k}) as applied:
        got = generate(model, ids, mask)
        assert applied.adapter == "chatglm"
    assert (got - expected).abs().max() < ROUNDING


def test_layers_and_undo(model, ids):
    layers = model.transformer.encoder.layers
    with prescore.apply(model, **COARSE, layers="last:2") as applied:
        kinds = [type(layer.self_attention.core_attention) for layer in layers]
        assert kinds == [CoreAttention, PrescoredCoreAttention, PrescoredCoreAttention]
        assert applied.layers[2] == "transformer.encoder.layers.2.self_attention.core_attention"
        generate(model, ids, n_new=2)
        assert applied.stats()[1]["path"] == "step over the selection"
    assert all(type(layer.self_attention.core_attention) is CoreAttention for layer in layers)
    with pytest.raises(RuntimeError, match="inside"), prescore.apply(model, **COARSE):
        raise RuntimeError("inside")
    assert all(type(layer.self_attention.core_attention) is CoreAttention for layer in layers)


def test_real_selection_ignores_padding_and_batch(model, ids):
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with prescore.apply(model, **COARSE):
        together = generate(model, ids, mask)
        alone = generate(model, ids[:1, 7:])
        other = generate(model, ids[1:])
    assert (together[0] - alone[0]).abs().max() < ROUNDING
    assert (together[1] - other[0]).abs().max() < ROUNDING
    assert (other - generate(model, ids[1:])).abs().max() > 100 * ROUNDING


def test_interleaved_generations_do_not_mix(model, ids):
    """The module has no cache of its own to look at, so it must notice that the keys are another text's."""

    def step(text, past, token):
        with torch.no_grad():
            return model(text if past is None else token, None, past)

    first, second = ids[:1], ids[1:]
    token = torch.tensor([[5]])
    with prescore.apply(model, **COARSE):
        expected = [step(second, None, None)]
        expected.append(step(None, expected[0][1], token))
        one = step(first, None, None)
        two = step(second, None, None)
        one = step(None, one[1], token)
        two = step(None, two[1], token)
    assert torch.equal(two[0], expected[1][0])
    assert not torch.allclose(one[0], two[0])


def test_reordered_beams_are_noticed(model, ids):
    """Beams of one prompt exchange their later tokens between steps."""
    ids = ids[:1].expand(2, -1)
    tokens = torch.tensor([[5, 6], [7, 8]])
    with torch.no_grad(), prescore.apply(model, **COARSE):
        _, past = model(ids)
        _, past = model(tokens[:, :1], None, past)
        expected, _ = model(tokens[:, 1:], None, past)
        swapped = tuple(tuple(t.flip(1) for t in pair) for pair in past)
        got, _ = model(tokens[:, 1:].flip(0), None, swapped)
    assert (got.flip(0) - expected).abs().max() < ROUNDING


def test_keys_are_scored_once_per_group(model, ids):
    with prescore.apply(model, **COARSE):
        core = model.transformer.encoder.layers[0].self_attention.core_attention
        generate(model, ids, n_new=2)
        assert core.selection._state.rows.key.shape[1] == 2


def test_another_layout_is_refused(model):
    with prescore.apply(model, **COARSE):
        core = model.transformer.encoder.layers[0].self_attention.core_attention
        batch_first = torch.zeros(2, 4, 7, 8, dtype=torch.float64)
        with pytest.raises(Unsupported, match=r"4 heads, dim\], got \(2, 4, 7, 8\)"):
            core(batch_first, batch_first, batch_first, None)


def test_dropout_in_training_is_honoured(ids):
    model = ChatGLMStandIn(dropout=0.2).eval()
    with prescore.apply(model, **COARSE), torch.no_grad():
        whole = model(ids)[0]
        model.train()
        torch.manual_seed(2)
        first, second = model(ids)[0], model(ids)[0]
        torch.manual_seed(2)
        assert torch.equal(model(ids)[0], first)
        assert not torch.allclose(first, second)
        assert torch.equal(model.eval()(ids)[0], whole)


def test_training_step(model, ids):
    with prescore.apply(model, **COARSE):
        logits, _ = model.train()(ids)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert model.transformer.encoder.layers[0].self_attention.query_key_value.weight.grad.abs().max() > 0
