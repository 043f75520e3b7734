"""ChatGLM's core attention is found, replaced, and put back."""

import pytest
import torch
from tiny_chatglm import TinyChatGLM, CoreAttention

import prescore
from prescore import KMeans, Routed, Selected
from prescore.errors import Unsupported
from prescore.integrations.apply import observe
from prescore.integrations.patch import patches

EVERYTHING = Selected(top_k=1.0, remainder="none", min_seq_len=4)
COARSE = Selected(KMeans(n_clusters=3), top_k=6, min_seq_len=8, sinks=2)
ROUNDING = 1e-9  # float64, three layers without norms


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = TinyChatGLM().double().eval()
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
@pytest.mark.parametrize("top_k", [1.0, 1000])
def test_every_key_equals_the_original(model, ids, padded, top_k):
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    mask = mask if padded else None
    expected = generate(model, ids, mask)
    with prescore.apply(model, EVERYTHING.replace(top_k=top_k)) as applied:
        got = generate(model, ids, mask)
        assert applied.adapter == "chatglm"
    assert (got - expected).abs().max() < ROUNDING


def test_layers_and_undo(model, ids):
    layers = model.transformer.encoder.layers
    with prescore.apply(model, COARSE, layers="last:2") as applied:
        assert [len(patches(layer.self_attention.core_attention)) for layer in layers] == [0, 1, 1]
        assert applied.layers[2] == "transformer.encoder.layers.2.self_attention.core_attention"
        generate(model, ids, n_new=2)
        assert applied.report()[1].path == "step over the selection"
    assert is_untouched(model)
    with pytest.raises(RuntimeError, match="inside"), prescore.apply(model, COARSE):
        raise RuntimeError("inside")
    assert is_untouched(model)


def is_untouched(model):
    cores = [layer.self_attention.core_attention for layer in model.transformer.encoder.layers]
    clean = not any(name == "forward" or name.startswith("_prescore") for core in cores for name in core.__dict__)
    return clean and all(type(core) is CoreAttention for core in cores)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_twice_is_undone_in_any_order(model, ids, order):
    before = generate(model, ids)
    other = COARSE.replace(top_k=12)
    with prescore.apply(model, COARSE):
        of_a = generate(model, ids)
    with prescore.apply(model, other, layers="last:1"):
        of_b = generate(model, ids)
    both = {"a": prescore.apply(model, COARSE), "b": prescore.apply(model, other, layers="last:1")}
    assert torch.equal(generate(model, ids), of_b)
    both[order[0]].undo()
    assert torch.equal(generate(model, ids), of_b if order == "ab" else of_a)
    both[order[1]].undo()
    assert is_untouched(model)
    assert torch.equal(generate(model, ids), before)


def test_the_default_reads_short_texts_exactly(model, ids):
    expected = generate(model, ids)
    with prescore.apply(model, Routed()) as applied:
        assert (generate(model, ids) - expected).abs().max() < ROUNDING
        assert applied.report()[0].path == "step over all keys"


def test_observers_see_every_layer_and_change_nothing(model, ids):
    expected, seen = generate(model, ids, n_new=1), []
    with observe(model, lambda query, key, context: seen.append((context.layer, query.shape, key.shape))) as n:
        assert torch.equal(generate(model, ids, n_new=1), expected)
    assert n == 3
    assert seen == [(number, (2, 4, 40, 8), (2, 2, 40, 8)) for number in range(3)]
    assert is_untouched(model)


def strange_mask(length):
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    hidden[9, 4] = True
    return hidden.expand(1, 1, length, length)


def test_a_mask_of_no_known_form_is_refused_or_runs_as_the_model_would(model, ids, monkeypatch):
    with torch.no_grad():
        monkeypatch.setattr(model, "masks", lambda *args: strange_mask(40))
        attention_mask = torch.ones_like(ids)
        attention_mask[0, 0] = 0  # so that the model asks for its mask
        expected = model(ids, attention_mask)[0]
        with (
            prescore.apply(model, COARSE),
            pytest.raises(Unsupported, match=r"in layer 0 \(ChatGLM\) cannot run: the attention mask is neither"),
        ):
            model(ids, attention_mask)
        with (
            prescore.apply(model, COARSE, on_unsupported="exact") as applied,
            pytest.warns(UserWarning, match="ChatGLM runs exactly"),
        ):
            assert torch.equal(model(ids, attention_mask)[0], expected)
        assert applied.report()[2].path.startswith("exact: unsupported because the attention mask")


def test_real_selection_ignores_padding_and_batch(model, ids):
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with prescore.apply(model, COARSE):
        batched = generate(model, ids, mask)
        alone = generate(model, ids[:1, 7:])
        other = generate(model, ids[1:])
    assert (batched[0] - alone[0]).abs().max() < ROUNDING
    assert (batched[1] - other[0]).abs().max() < ROUNDING
    assert (other - generate(model, ids[1:])).abs().max() > 100 * ROUNDING


def test_interleaved_generations_do_not_mix(model, ids):
    """The module has no cache of its own to look at, so it must notice that the keys are another text's."""

    def step(text, past, token):
        with torch.no_grad():
            return model(text if past is None else token, None, past)

    first, second = ids[:1], ids[1:]
    token = torch.tensor([[5]])
    with prescore.apply(model, COARSE):
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
    with torch.no_grad(), prescore.apply(model, COARSE):
        _, past = model(ids)
        _, past = model(tokens[:, :1], None, past)
        expected, _ = model(tokens[:, 1:], None, past)
        swapped = tuple(tuple(t.flip(1) for t in pair) for pair in past)
        got, _ = model(tokens[:, 1:].flip(0), None, swapped)
    assert (got.flip(0) - expected).abs().max() < ROUNDING


def test_keys_are_scored_once_per_group(model, ids):
    with prescore.apply(model, COARSE):
        core = model.transformer.encoder.layers[0].self_attention.core_attention
        generate(model, ids, n_new=2)
        assert patches(core)[-1].attend._external.cache.selection.rows.key.shape[1] == 2


def test_another_layout_is_refused(model):
    with prescore.apply(model, COARSE):
        core = model.transformer.encoder.layers[0].self_attention.core_attention
        batch_first = torch.zeros(2, 4, 7, 8, dtype=torch.float64)
        with pytest.raises(Unsupported, match=r"4 heads, dim\], got \(2, 4, 7, 8\)"):
            core(batch_first, batch_first, batch_first, None)


def test_dropout_in_training_is_honoured(ids):
    model = TinyChatGLM(dropout=0.2).eval()
    with prescore.apply(model, COARSE), torch.no_grad():
        whole = model(ids)[0]
        model.train()
        torch.manual_seed(2)
        first, second = model(ids)[0], model(ids)[0]
        torch.manual_seed(2)
        assert torch.equal(model(ids)[0], first)
        assert not torch.allclose(first, second)
        assert torch.equal(model.eval()(ids)[0], whole)


def test_training_step(model, ids):
    with prescore.apply(model, COARSE):
        logits, _ = model.train()(ids)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert model.transformer.encoder.layers[0].self_attention.query_key_value.weight.grad.abs().max() > 0
