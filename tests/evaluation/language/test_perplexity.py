"""Loss of replaced models against plain computations."""

import itertools
import math

import pytest
import torch
from oracles.tiny_language_model import tiny_language_model
from tiny_models import tiny as tiny_model

import prescore
from prescore.bench.language import methods
from prescore.bench.language.documents import Document
from prescore.bench.language.methods import measured_attention
from prescore.bench.language.model import LanguageModel
from prescore.bench.language.perplexity import loss_row, make_windows, measure_loss, streamed_loss
from prescore.integrations.attention import AttentionContext, layer_seed

TEXT = "In the beginning there was a key, and the key was with the query. " * 20


@pytest.fixture(scope="module")
def tiny():
    model, tokenizer = tiny_language_model()
    return LanguageModel("tiny", model.double(), tokenizer)


@pytest.fixture(scope="module")
def window(tiny):
    return make_windows(tiny, [Document("text", TEXT)], 200)[0]


def test_streamed_loss_is_the_models_own(tiny, window):
    with torch.no_grad():
        logits = tiny.model(input_ids=window.tokens[None]).logits[0]
    whole = torch.nn.functional.cross_entropy(logits[99:199].double(), window.tokens[100:200], reduction="none")
    torch.testing.assert_close(streamed_loss(tiny, window, at_once=7), whole)


def test_exact_through_the_door_changes_nothing(tiny, window):
    plain = float(streamed_loss(tiny, window).mean())
    figures = measure_loss(tiny, window, methods.exact())
    assert figures["loss"] == pytest.approx(plain, abs=1e-10)
    assert figures["perplexity"] == pytest.approx(math.exp(plain))
    assert figures["keys_per_query"] == 100.5
    assert figures["attention_seconds"] > 0
    assert tiny.model.config._attn_implementation == "sdpa"


def test_the_door_agrees_with_apply(tiny, window):
    for config in (
        prescore.Selected("uniform", 16, min_seq_len=32, remainder="none"),
        prescore.Hyper.published(lsh=prescore.Lsh(8, 8, alignment="rank"), min_seq_len=32),
        prescore.Routed(chunk_size=16, cluster_size=4, min_weight=1 / 16, exact_until=0),
    ):
        with prescore.apply(tiny.model, config):
            expected = float(streamed_loss(tiny, window).mean())
        figures = measure_loss(tiny, window, methods.prescored("some", config))
        assert figures["loss"] == pytest.approx(expected, abs=1e-10)
        assert abs(expected - float(streamed_loss(tiny, window).mean())) > 1e-6


def test_rows_of_every_layer_are_counted_and_change_nothing(tiny, window):
    for config in (
        prescore.Routed(chunk_size=16, cluster_size=4, min_weight=1 / 16, exact_until=0),
        prescore.Selected.paper("kmeans", 16, min_seq_len=32),
    ):
        method = methods.prescored("some", config)
        tensors = torch.randn(3, 1, 2, 200, 8, generator=torch.Generator().manual_seed(0))
        context = AttentionContext(layer=3, is_causal=True)
        output, count_keys, stats = method.attention(5)(*tensors, context)
        plain, aux = prescore.prescored_attention(
            *tensors, config, is_causal=True, generator=layer_seed(5, 3), return_aux=True
        )
        torch.testing.assert_close(output, plain, rtol=0, atol=0)
        assert count_keys() == aux.stats["keys_per_query"]
        assert {name: aux.stats[name] for name in stats} == dict(stats)
        with measured_attention(tiny.model, method) as meter:
            streamed_loss(tiny, window)
        assert set(meter.rows) == meter.replaced  # every layer, since the heads of each may differ


def test_the_seed_of_a_layer_reaches_a_baseline():
    tensors = torch.randn(3, 1, 2, 64, 8, generator=torch.Generator().manual_seed(0))
    method = methods.named("performer", leaf=16, top_k=8)
    one, same, layer, seed = (
        method.attention(seed)(*tensors, AttentionContext(layer=layer, is_causal=True)).output
        for seed, layer in ((0, 1), (0, 1), (0, 2), (1, 1))
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, layer)
    assert not torch.equal(one, seed)


@pytest.mark.parametrize("length", [12, 16, 37])
def test_leaves_alone_is_attention_under_a_block_diagonal_mask(length):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, length, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, length, 8, generator=generator, dtype=torch.float64)
    position = torch.arange(length)
    seen = (position[None] // 16 == position[:, None] // 16) & (position[None] <= position[:, None])
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(methods.leaves_alone(query, key, value, leaf=16, scale=0.3), wanted)


def test_local_only_forgets_everything_before_its_leaf(tiny):
    length = 256
    first = make_windows(tiny, [Document("a", TEXT)], length)[0]
    changed = first.tokens.clone()
    changed[:192] = changed[:192].flip(0)
    with measured_attention(tiny.model, methods.local(64), layers="all"):
        before, after = tiny.hidden(first.tokens), tiny.hidden(changed)
    torch.testing.assert_close(before[192:], after[192:])
    assert (before[:192] - after[:192]).abs().max() > 1e-3


def test_partial_replacement_lies_between(tiny, window):
    exact = measure_loss(tiny, window, methods.exact())
    one = measure_loss(tiny, window, methods.local(25), layers="first:1")
    both = measure_loss(tiny, window, methods.local(25))
    assert one["layers_replaced"] == 1
    assert both["layers_replaced"] == 2
    assert len({round(figures["loss"], 9) for figures in (exact, one, both)}) == 3


@pytest.mark.parametrize("name", methods.method_names())
def test_every_named_method_runs(tiny, window, name):
    method = methods.named(name, leaf=32, top_k=16, overrides=_few(name))
    figures = measure_loss(tiny, window, method)
    assert math.isfinite(figures["loss"])
    assert 0 < figures["keys_per_query"] <= 201


def _few(name):
    return {"lsh.block_size": 8, "lsh.sample_size": 8, "inner.block_size": 8, "inner.sample_size": 8}


@pytest.mark.parametrize(
    "name", ["kmeans", "hyper", "uniform", "performer", "reformer", "heavy-hitters", "streaming", "lev-attention"]
)
def test_no_method_but_the_oracle_sees_the_future(tiny, window, name):
    lsh = prescore.Lsh(8, 8, alignment="hash")
    overrides = {"lsh": lsh, "inner": lsh}
    method = methods.named(name, leaf=32, top_k=16, overrides=overrides)
    changed = window.tokens.clone()
    changed[150:] = changed[150:].flip(0)
    with measured_attention(tiny.model, method):
        before, after = tiny.hidden(window.tokens), tiny.hidden(changed)
    torch.testing.assert_close(before[:150], after[:150])


def test_layers_with_a_window_stay_as_they_are(window):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=16, max_position_embeddings=512,
        layer_types=["sliding_attention", "full_attention"], final_logit_softcapping=2.0,
    )  # fmt: skip
    gemma = LanguageModel("gemma", Gemma3ForCausalLM(config).double().eval(), None)
    gemma.check_head()
    plain = float(streamed_loss(gemma, window).mean())
    assert measure_loss(gemma, window, methods.exact())["loss"] == pytest.approx(plain, abs=1e-10)
    whole, last = (measure_loss(gemma, window, methods.local(32), layers=layers) for layers in ("all", "last:1"))
    assert whole["loss"] == last["loss"]
    assert whole["loss"] != pytest.approx(plain, abs=1e-10)


def test_seed_reaches_the_method(tiny, window):
    method = methods.named("uniform", leaf=32, top_k=8)
    one, same, other = (measure_loss(tiny, window, method, seed=seed)["loss"] for seed in (0, 0, 1))
    assert one == same
    assert one != other


def test_rows_of_a_row_can_be_found_again(tiny, window):
    row = loss_row(tiny, window, methods.exact(), experiment="x", layers="last:1", seed=3)
    assert row.seed == 3
    assert row.config["document"] == "text"
    assert row.config["digest"] == window.digest
    assert row.config["n_tokens"] == 200
    assert row.config["first"] == 100
    assert math.isfinite(row.measure()["loss"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["exact", "kmeans", "default"])
def test_lower_precision_moves_the_loss_little(window, dtype, name):
    model, tokenizer = tiny_language_model()
    method = methods.named(name, leaf=64, top_k=32, overrides={"inner": "Exact"} if name == "kmeans" else None)
    precise = measure_loss(LanguageModel("tiny", model.double(), tokenizer), window, method)["loss"]
    low = LanguageModel("tiny", model.to(dtype), tokenizer)
    low.check_head()
    # 100 positions whose logits carry a relative rounding of 2^-9 in bfloat16, after two layers
    assert measure_loss(low, window, method)["loss"] == pytest.approx(precise, rel=0.02)


def test_short_documents_are_refused_by_name_and_count(tiny):
    with pytest.raises(ValueError, match=r"document short must have at least 200 tokens, got 5"):
        make_windows(tiny, [Document("short", "hello")], 200)
    documents = [Document("short", "hello"), Document("long", TEXT)]
    kept = make_windows(tiny, documents, 200, skip_short=True)
    assert [window.document for window in kept] == ["long"]
    with pytest.raises(ValueError, match="at least 200 tokens, got 1 shorter"):
        make_windows(tiny, documents[:1], 200, skip_short=True)
    with pytest.raises(ValueError, match="first position must lie between 1 and 199, got 200"):
        make_windows(tiny, documents[1:], 200, first=200)


def test_past_the_trained_length_positions_are_scaled_and_said():
    model, tokenizer = tiny_language_model(max_positions=64)
    tiny = LanguageModel("tiny", model, tokenizer)
    window = make_windows(tiny, [Document("text", TEXT)], 128)[0]
    rotary = model.model.rotary_emb
    scaled = measure_loss(tiny, window, methods.exact())
    assert scaled["position_scaling"] == {"rope": "yarn", "factor": 2.0, "trained_length": 64}
    assert model.model.rotary_emb is rotary
    assert abs(scaled["loss"] - float(streamed_loss(tiny, window).mean())) > 1e-6
    inside = make_windows(tiny, [Document("text", TEXT)], 64)[0]
    assert "position_scaling" not in measure_loss(tiny, inside, methods.exact())


def test_a_head_that_is_not_plain_is_refused(tiny):
    class Odd(LanguageModel):
        def logits(self, hidden):
            return super().logits(hidden) * 1.5

    tiny.check_head()
    with pytest.raises(ValueError, match="measuring tiny cannot run: its logits are not"):
        Odd("tiny", tiny.model, tiny.tokenizer).check_head()


def test_dropout_is_refused(tiny, window):
    tiny.model.train()
    tiny.model.config.attention_dropout = 0.1
    for layer in tiny.model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    try:
        with pytest.raises(ValueError, match=r"drops attention weights with probability 0\.1"):
            measure_loss(tiny, window, methods.exact())
    finally:
        tiny.model.eval()
    assert tiny.model.config._attn_implementation == "sdpa"


def test_what_a_method_would_ignore_is_refused(window):
    sizes = {"vocab_size": 256, "max_position_embeddings": 512, "layer_types": ["full_attention"] * 2}
    gemma = LanguageModel("gemma", tiny_model("Gemma2", attn_logit_softcapping=5.0, **sizes), None)
    for method in (methods.local(32), methods.named("streaming", leaf=32), methods.named("default", leaf=32)):
        with pytest.raises(ValueError, match="its logits are soft-capped"):
            measure_loss(gemma, window, method)
    # a layer that is left alone keeps what it has
    plain = float(streamed_loss(gemma, window).mean())
    with measured_attention(gemma.model, methods.local(32), layers=[]):
        assert float(streamed_loss(gemma, window).mean()) == pytest.approx(plain, rel=1e-5)


def test_a_cache_is_refused(tiny, window):
    with torch.no_grad(), measured_attention(tiny.model, methods.exact()):
        past = tiny.model(input_ids=window.tokens[None, :50], use_cache=True).past_key_values
        with pytest.raises(ValueError, match="it has 1 queries for 51 keys; measure without a cache"):
            tiny.model(input_ids=window.tokens[None, 50:51], past_key_values=past)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"method must be one of .* got 'flash'"):
        methods.named("flash", leaf=32)
    with pytest.raises(ValueError, match=r"top_k must be a count of keys for the baseline 'oracle', got 0\.5"):
        methods.named("oracle", leaf=32, top_k=0.5)


def test_windows_are_spread_over_the_text_and_do_not_overlap(tiny):
    text = "".join(chr(97 + number % 26) for number in range(1000))
    tokens = tiny.encode(text)
    windows = make_windows(tiny, [Document("text", text)], 100, offset=50, per_document=4)
    starts = [50 + number * ((len(tokens) - 150) // 3) for number in range(4)]
    assert [window.document for window in windows] == [f"text, window {number}" for number in (1, 2, 3, 4)]
    for window, start in zip(windows, starts, strict=True):
        assert torch.equal(window.tokens, tokens[start : start + 100])
    assert all(second - first >= 100 for first, second in itertools.pairwise(starts))


def test_too_many_windows_are_refused(tiny):
    with pytest.raises(ValueError, match="document text must have at least 400 tokens, got"):
        make_windows(tiny, [Document("text", "abc " * 50)], 100, per_document=4)
