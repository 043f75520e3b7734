"""Encoders of transformers: queries see both sides, padding is never read, and what cannot be served says why."""

import pytest
import torch
from tiny_models import OLD_SIZES, SIZES, VOCABULARY

import prescore
from prescore import Routed, Selected
from prescore.errors import Unsupported

transformers = pytest.importorskip("transformers")

SMALL = {**{k: v for k, v in SIZES.items() if k not in ("head_dim", "num_key_value_heads")}, "eos_token_id": 2}
FAMILIES = {
    "Bert": {},
    "Roberta": {"max_position_embeddings": 130},
    "Electra": {"embedding_size": 32},
    "ModernBert": {"global_attn_every_n_layers": 1, "cls_token_id": 1, "sep_token_id": 2},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
}
COARSE = Selected(top_k=6, recent=1, remainder="none")


def encoder(family):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **FAMILIES.get(family, {})})
    return getattr(transformers, f"{family}Model")(config).eval()


def states(model, ids, mask):
    with torch.no_grad():
        return model(ids, attention_mask=mask)[0][mask.bool()]


@pytest.fixture
def text():
    ids = torch.randint(3, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 30:] = 0
    return ids, mask


@pytest.mark.parametrize("family", FAMILIES)
def test_all_keys_are_the_model_itself_and_fewer_are_not(family, text):
    model, (ids, mask) = encoder(family), text
    expected = states(model, ids, mask)
    idle = pytest.warns(UserWarning, match="Selected changes nothing at 40 tokens")
    with idle, prescore.apply(model, Selected(top_k=1.0)):
        assert (states(model, ids, mask) - expected).abs().max() < 1e-4
    with prescore.apply(model, COARSE) as applied:
        few = states(model, ids, mask)
        assert (few - expected).abs().max() > 1e-2
        assert applied.report()[0].phases["prefill"].ran == "selected"
        assert applied.report().rows("prefill") == 6
        other = ids.clone()
        other[0, 30:] = 7  # padding
        assert torch.equal(states(model, other, mask), few)
        other = ids.clone()
        other[0, 29] = 7  # the last real token, always read, reaches earlier ones
        assert not torch.allclose(states(model, other, mask)[:5], few[:5], atol=1e-4)
    assert torch.equal(states(model, ids, mask), expected)


def test_queries_choose_in_an_encoder_too(text):
    model, (ids, mask) = encoder("Bert"), text
    with prescore.apply(
        model, Routed(exact_until=0, min_weight=1 / 16, cluster_size=4, chunk_size=8, sinks=1)
    ) as applied:
        states(model, ids, mask)
    assert applied.report()[0].phases["prefill"].ran == "routed"


@pytest.mark.parametrize("family", ["Deberta", "MPNet"])
def test_an_encoder_that_ignores_the_interface_is_refused_with_the_true_reason(family):
    with pytest.raises(Unsupported, match=f"apply on {family}Model cannot run: its attention does not go through"):
        prescore.apply(encoder(family))


def test_a_decoder_counts_its_causal_layers_only():
    sizes = {**OLD_SIZES, "vocab_size": VOCABULARY}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, add_cross_attention=True)).eval()
    with prescore.apply(model, COARSE) as applied:
        assert list(applied.layers.values()) == ["transformer.h.0.attn", "transformer.h.1.attn"]
