"""The measuring door on ChatGLM's layout, against `prescore.apply` and the model's own attention."""

import pytest
import torch
from tiny_chatglm import TinyChatGLM

import prescore
from prescore.bench.language import methods
from prescore.bench.language.methods import measured_attention
from prescore.integrations.patch import patches


@pytest.fixture
def model():
    torch.manual_seed(0)
    return TinyChatGLM().double().eval()


@pytest.fixture
def tokens():
    return torch.randint(61, (1, 96), generator=torch.Generator().manual_seed(1))


def run(model, tokens):
    with torch.no_grad():
        return model(tokens)[0]


def test_exact_changes_nothing_and_is_timed(model, tokens):
    plain = run(model, tokens)
    cores = [layer.self_attention.core_attention for layer in model.transformer.encoder.layers]
    with measured_attention(model, methods.exact()) as meter:
        torch.testing.assert_close(run(model, tokens), plain)
    assert sorted(meter.seconds) == [0, 1, 2]
    assert meter.figures()["keys_per_query"] == 48.5
    assert [layer.self_attention.core_attention for layer in model.transformer.encoder.layers] == cores


def test_prescored_is_what_apply_does(model, tokens):
    config = prescore.Selected("key-diff", top_k=8, min_seq_len=16, sinks=2, remainder="none")
    with prescore.apply(model, config, layers="first:2"):
        applied = run(model, tokens)
    with measured_attention(model, methods.prescored("key-diff", config), layers="first:2") as meter:
        torch.testing.assert_close(run(model, tokens), applied)
    assert meter.figures()["layers_replaced"] == 2
    assert (applied - run(model, tokens)).abs().max() > 1e-6


def test_training_with_dropout_is_refused_and_nothing_is_left_behind(tokens):
    model = TinyChatGLM(dropout=0.5).train()
    core = model.transformer.encoder.layers[0].self_attention.core_attention
    with (
        pytest.raises(ValueError, match=r"drops attention weights with probability 0\.5"),
        measured_attention(model, methods.exact()),
    ):
        run(model, tokens)
    assert model.transformer.encoder.layers[0].self_attention.core_attention is core
    assert not patches(core)
