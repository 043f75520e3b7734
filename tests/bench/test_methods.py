"""Methods by name, fields by path, and measured attention against plain computations."""

import math
from functools import reduce
from operator import getitem

import pytest
import torch
from tiny_chatglm import TinyChatGLM
from tiny_models import tiny as tiny_model

import prescore
import prescore.bench.methods as bench_methods
from prescore import Exact, Hyper, KMeans, Leverage, Lsh, Routed, Selected, list_scorers
from prescore.bench.baselines import list_baselines
from prescore.bench.language.documents import Document
from prescore.bench.language.model import LanguageModel
from prescore.bench.language.perplexity import Window, make_windows, measure_loss, window_losses
from prescore.bench.methods import EXACT, Baseline, Local, Method, Sizes, change, parse_method
from prescore.bench.observed import Observed, observed
from prescore.integrations.attention import AttentionContext, PrescoredAttention, layer_seed
from prescore.integrations.patch import patches

TEXT = "In the beginning there was a key, and the key was with the query. " * 20
SMALL = Routed(chunk_size=32, cluster_size=16, min_weight=1 / 16, exact_until=0)


@pytest.fixture(scope="module")
def window(precise):
    return make_windows(precise, [Document("text", TEXT)], 200)[0]


@pytest.mark.parametrize("length", [512, 8192])
@pytest.mark.parametrize("leaf", [None, 64])
def test_a_name_means_the_same_as_in_python(length, leaf):
    size, lsh = leaf or length // 8, Lsh(length // 128, length // 128, alignment="rank")
    wanted = {
        "exact": Exact(),
        "local": Local(size),
        "default": Routed() if leaf is None else Routed(chunk_size=64, exact_until=64),
        "key-diff": Selected("key-diff", 32, min_seq_len=size),
        "paper:key-diff": Selected.paper("key-diff", 32, inner=lsh, min_seq_len=size),
        "hyper": Hyper(lsh, min_seq_len=size),
        "oracle": Baseline("oracle", {"budget": 32, "chunk_size": size}),
    }
    found = {name: parse_method(name, Sizes.of_text(length, leaf, 32)).config for name in wanted}
    assert found == wanted
    with pytest.raises(ValueError, match=r"top_k must be a count of keys for the baseline 'oracle', got 0\.5"):
        parse_method("oracle", Sizes.of_text(64, top_k=0.5))


@pytest.mark.parametrize("config", [Routed(), Selected(), Selected.early(), Hyper(), Exact()], ids=repr)
def test_every_path_is_a_field_that_can_be_set(config):
    for path in bench_methods.field_paths(config):
        value = reduce(getitem, path.split("."), config.to_dict())
        assert change(config, {path: value}) == config
    assert change(config, {}) == config


def test_nested_fields_words_and_objects():
    fields = {"top_k": 32, "scorer.n_clusters": 5, "inner.block_size": 16, "coupling.overlap": "count"}
    config = change(Selected.paper("kmeans", 64), fields)
    assert (config.top_k, config.scorer, config.inner.block_size) == (32, KMeans(n_clusters=5), 16)
    assert (config.inner.alignment, config.coupling.overlap) == ("rank", "count")
    assert change(Selected.paper("kmeans", 64), {"inner": "Exact"}).inner == Exact()
    # a part comes before the fields inside it, whatever the order
    fields = {"inner.block_size": 8, "scorer.sketch_size": 9, "inner": "Lsh", "scorer": "leverage"}
    made = change(Selected(), fields)
    assert (made.inner, made.scorer) == (Lsh(block_size=8), Leverage(sketch_size=9))
    assert change(Selected(), {"inner": Lsh(4, 4)}).inner == Lsh(4, 4)
    with_clusters = Selected(remainder=KMeans(n_clusters=3))
    assert change(with_clusters, {"remainder.n_clusters": 4}).remainder == KMeans(n_clusters=4)
    assert change(with_clusters, {"remainder": "none"}).remainder == "none"
    # fields that only go together
    assert change(Selected(), {"min_score": 0.5, "top_k": None}) == Selected(min_score=0.5)


@pytest.mark.parametrize("length", [12, 32, 53])
@pytest.mark.parametrize("local", [Local(16), Local(16, previous_chunk=True), Local(16, True, sinks=3)])
def test_local_attention_is_attention_under_its_mask(length, local):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, length, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, length, 8, generator=generator, dtype=torch.float64)
    row, column = torch.arange(length)[:, None], torch.arange(length)[None]
    visible = (column <= row) & ((column // 16 >= row // 16 - int(local.previous_chunk)) | (column < local.sinks))
    options = {"attn_mask": visible, "scale": 0.3, "enable_gqa": True}
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(local.attend(query, key, value, scale=0.3, seed=0), wanted)
    assert local.reads(length) == pytest.approx(float(visible.sum(1).double().mean()))


def test_reads_of_baselines_and_the_window_that_reads_as_much():
    streaming = [len({*range(max(0, i - 3), i + 1), *range(min(2, i + 1))}) for i in range(9)]
    assert Baseline("streaming", {"window": 4, "sinks": 2}).reads(9) == pytest.approx(sum(streaming) / 9)
    chunked = [i % 4 + 1 + min(3, i // 4 * 4) for i in range(10)]
    assert Baseline("oracle", {"chunk_size": 4, "budget": 3}).reads(10) == pytest.approx(sum(chunked) / 10)
    for reads in (1.0, 3.5, 60.2, 90.0, 128.5):
        window = bench_methods.sliding_window(256, reads, sinks=2).config
        narrower = window.settings["window"] - 1
        assert window.reads(256) >= reads
        assert narrower == 0 or Baseline("streaming", {"window": narrower, "sinks": 2}).reads(256) < reads


def test_exact_attention_changes_nothing(precise, window):
    plain = float(window_losses(precise, window).mean())
    results = measure_loss(precise, window, EXACT)
    assert results["loss"] == pytest.approx(plain, abs=1e-10)
    assert results["perplexity"] == pytest.approx(math.exp(plain))
    assert results["reads_per_query"] == 100.5
    assert precise.model.config._attn_implementation == "sdpa"


CONFIGS = [
    Selected("uniform", 16, min_seq_len=32, remainder="none"),
    Selected.paper("kmeans", 16, min_seq_len=32),
    Hyper.published(lsh=Lsh(8, 8, alignment="rank"), min_seq_len=32),
    SMALL,
]


def test_every_window_has_draws_of_its_own(tiny, window):
    tokens = window.tokens.clone()
    tokens[-1] = tokens[-2]
    for config, is_random in ((Exact(), False), (CONFIGS[0], True)):
        both = (Window("text", some, window.first) for some in (window.tokens, tokens))
        results = (measure_loss(tiny, one, Method("some", config), segments=2) for one in both)
        before, after = (one["segment_losses"][0] for one in results)  # the last token is in the other half
        assert (abs(before - after) > 1e-6) == is_random


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_a_configuration_does_what_apply_does(tiny, window, config, monkeypatch):
    monkeypatch.setattr(Window, "seed", lambda window, seed: seed)  # `apply` draws from seed 0
    with prescore.apply(tiny.model, config):
        expected = float(window_losses(tiny, window).mean())
    assert measure_loss(tiny, window, Method("some", config))["loss"] == pytest.approx(expected, abs=1e-6)
    assert abs(expected - float(window_losses(tiny, window).mean())) > 1e-5
    other = measure_loss(tiny, window, Method("some", config), seed=1)["loss"]
    assert (other == pytest.approx(expected, abs=1e-6)) == isinstance(config, Routed)  # which draws nothing


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_reads_are_those_of_the_call_with_the_seed(config):
    tensors = torch.randn(3, 1, 2, 200, 16, generator=torch.Generator().manual_seed(0))
    observer = Observed({3: PrescoredAttention(config, seed=5)}, [3])
    output = observer(*tensors, AttentionContext(layer=3, is_causal=True))
    options = {"is_causal": True, "generator": layer_seed(5, 3), "return_aux": True}
    plain, aux = prescore.prescored_attention(*tensors, config, **options)
    torch.testing.assert_close(output, plain, rtol=0, atol=0)
    assert observer.reads()[3] == pytest.approx(aux.stats.keys_per_query + aux.stats.centroids_per_query)


def test_only_the_chosen_layers_are_replaced(precise, window):
    local = Method("local", Local(25))
    one, both = (measure_loss(precise, window, local, layers=layers) for layers in ("last:1", "all"))
    assert (one["layers_replaced"], both["layers_replaced"]) == (1, 2)
    assert one["replaced_reads_per_query"] == both["reads_per_query"] == 13.0
    exact = measure_loss(precise, window, EXACT)
    assert len({round(results["loss"], 9) for results in (exact, one, both)}) == 3


NAMES = ["exact", "local", "default", "hyper", *list_baselines(), *list_scorers(), "random"]
NAMES += [*map("paper:{}".format, list_scorers()), "paper:kmedian-farthest-sample+centroids", "kmeans-balanced"]
FEW = {"lsh.block_size": 8, "lsh.sample_size": 8, "inner.block_size": 8, "inner.sample_size": 8}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_runs(precise, window, name):
    results = measure_loss(precise, window, parse_method(name, Sizes.of_text(200, 32, 16, FEW)))
    assert math.isfinite(results["loss"])
    assert 0 < results["reads_per_query"] <= 201


def test_sliding_window_layers_stay_as_they_are(window):
    sizes = {"vocab_size": 256, "max_position_embeddings": 512, "final_logit_softcapping": 2.0}
    gemma = LanguageModel("gemma", tiny_model("Gemma3", **sizes).double(), None)
    gemma.check_head()
    plain = float(window_losses(gemma, window).mean())
    assert measure_loss(gemma, window, EXACT)["loss"] == pytest.approx(plain, abs=1e-10)
    local = Method("local", Local(32))
    both, last = (measure_loss(gemma, window, local, layers=layers)["loss"] for layers in ("all", "last:1"))
    assert both == last != pytest.approx(plain, abs=1e-10)


def test_what_a_method_would_ignore_is_refused(window):
    sizes = {"vocab_size": 256, "max_position_embeddings": 512, "layer_types": ["full_attention"] * 2}
    gemma = LanguageModel("gemma", tiny_model("Gemma2", attn_logit_softcapping=5.0, **sizes), None)
    for name in ("local", "streaming", "default"):
        with pytest.raises(ValueError, match="its logits are soft-capped"):
            measure_loss(gemma, window, parse_method(name, Sizes.of_text(200, 32)))
    plain = float(window_losses(gemma, window).mean())
    with observed(gemma.model, Local(32), layers=[]):  # none is replaced
        assert float(window_losses(gemma, window).mean()) == pytest.approx(plain, rel=1e-5)


def test_chatglm_is_measured_through_the_same_function():
    torch.manual_seed(0)
    model = TinyChatGLM().double().eval()
    tokens = torch.randint(61, (1, 96), generator=torch.Generator().manual_seed(1))
    cores = [layer.self_attention.core_attention for layer in model.transformer.encoder.layers]
    with torch.no_grad():
        plain = model(tokens)[0]
        config = Selected("key-diff", top_k=8, min_seq_len=16, sinks=2, remainder="none")
        with prescore.apply(model, config, layers="first:2"):
            applied = model(tokens)[0]
        with observed(model, config, layers="first:2") as observer:
            torch.testing.assert_close(model(tokens)[0], applied)
            assert observer.results()["layers_replaced"] == 2
            assert observer.results()["reads_per_query"] < 48.5  # of exact attention
    assert (applied - plain).abs().max() > 1e-6
    assert [layer.self_attention.core_attention for layer in model.transformer.encoder.layers] == cores
    assert not patches(cores[0])
