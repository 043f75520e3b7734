"""What a query is said to read is what the engine reads for it."""

import pytest
import torch

from prescore import Exact, Routed, prescored_attention
from prescore.bench.demo.run import (
    MOST_FOUND,
    QueryReading,
    WatchedLayer,
    demo_windows,
    layer_looks,
    look_of,
    reading_row,
    watched,
)

CONFIG = Routed(min_weight=1 / 16, cluster_size=16, chunk_size=32, sinks=4, exact_until=0)


@pytest.fixture(scope="module")
def given():
    """Queries that look for single keys more than a model of random weights does."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        2 * torch.randn(heads, rows, 16, generator=generator) for heads, rows in ((4, 24), (2, 512), (2, 512))
    )
    return WatchedLayer(query, key, value, None)


def test_looks_are_those_of_the_engine(given):
    """Its rows and its error, on the same queries and keys."""
    inputs = (given.query[None], given.key[None], given.value[None])
    output, aux = prescored_attention(*inputs, CONFIG, is_causal=True, return_aux=True)
    exact = prescored_attention(*inputs, Exact(), is_causal=True)
    error = (output - exact).norm(dim=-1) / exact.norm(dim=-1)
    looks = layer_looks(given, CONFIG)
    assert list(looks) == [0, 1, 2, 3]
    every = [look for head in looks.values() for look in head]
    assert sum(look.rows[1] for look in every) / len(every) == pytest.approx(aux.stats.far_keys_read, rel=0.02)
    assert aux.stats.far_keys_read > 1
    told = torch.tensor([[look.error for look in head] for head in looks.values()]) / 10_000
    torch.testing.assert_close(told, error[0], atol=1e-3, rtol=0.02)
    assert error.max() > 0.002  # there is an error to be told


def test_weights_are_all_of_the_softmax(given):
    for look in (look for head in layer_looks(given, CONFIG).values() for look in head):
        assert sum(look[:4]) == pytest.approx(10_000, abs=3)
        assert sum(look.chunks) == pytest.approx(look.centroids, abs=len(look.chunks))
        assert len(look.heaviest) == 2 * min(MOST_FOUND, look.rows[1])
        weights = look.heaviest[1::2]
        assert weights == sorted(weights, reverse=True)
        # a row found is neither a first token nor in the local part
        assert all(CONFIG.sinks <= row < 512 - 24 - CONFIG.chunk_size for row in look.heaviest[::2])


def test_a_look_in_plain_numbers():
    weights = torch.tensor([0.1, 0.2, 0.0, 0.05, 0.3])
    anyway = torch.tensor([True, False, False, False, True])
    read = torch.tensor([True, True, False, True, True])
    look = look_of(weights, anyway, read, torch.tensor([0.25, 0.1]), 1, torch.tensor(0.01))
    assert look == QueryReading(1000, 3000, 2500, 3500, 100, [1, 2], [2500, 1000], [1, 2000, 3, 500])


def test_layers_are_watched_while_the_default_runs(tiny, text):
    """What a layer is given depends on the attention of those before it."""
    window = demo_windows(text, 512)[0]
    last = {rows: watched(tiny, window, CONFIG.replace(rows=rows), [0, 1], 24, 0) for rows in (CONFIG.rows, 10**6)}
    first, second = last.values()
    assert list(first) == [0, 1]
    assert first[0].query.shape == (4, 24, 8)
    assert first[0].key.shape == (2, 512, 8)
    assert torch.equal(first[0].key, second[0].key)
    assert not torch.equal(first[1].key, second[1].key)


def test_row_holds_what_the_page_shows(tiny, text):
    window = demo_windows(text, 512)[0]
    before = tiny.hidden(window.tokens)
    row = reading_row(tiny, window, CONFIG, layers=[0, 1])
    figures = row.measure()
    assert "".join(figures["pieces"]) == tiny.tokenizer.decode(window.tokens.tolist())
    assert figures["first"] == 512 - 96
    assert (figures["sinks"], figures["chunk"]) == (4, 32)
    assert figures["heads"] == [[layer, head] for layer in (0, 1) for head in range(4)]
    weight = [[sum(look[kind] for look in head) for head in figures["looks"]] for kind in (2, 3)]
    assert weight[0][figures["searching"]] == max(weight[0])
    assert weight[1][figures["smooth"]] == max(weight[1])
    assert row.config["part"] == "reading"
    assert torch.equal(tiny.hidden(window.tokens), before)  # the model is as it was
