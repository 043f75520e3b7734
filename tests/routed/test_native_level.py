"""A routed call says which compiled code ran its far part, or that plain torch did."""

import pytest
import torch
from native_cases import LEVELS, counted_calls, use_level
from oracles.inputs import attention_tensors

import prescore
from prescore import Routed, Selected, prescored_attention
from prescore.ops.native import library
from prescore.routed.decode import RoutedIndex

CONFIG = Routed(min_weight=1 / 32, cluster_size=16, chunk_size=32, sinks=3, exact_until=0)
SIZES = {"batch": 2, "heads": 2, "kv_heads": 1, "n_keys": 160, "dim": 16, "dtype": torch.float32}
REASON = "routed by plain torch, which is slower"


def native(config=CONFIG, *, sizes=SIZES, **options):
    """What a call says, which is what happened in it."""
    tensors = attention_tensors(**sizes)
    with counted_calls() as calls:
        _, aux = prescored_attention(*tensors, config, is_causal=True, return_aux=True, **options)
    assert bool(calls) == (aux.stats.native in LEVELS)
    return aux.stats.native


@pytest.mark.parametrize("level", LEVELS)
def test_the_level_that_ran(level, monkeypatch):
    use_level(level, monkeypatch)
    assert native() == level
    tensors = attention_tensors(**SIZES)
    bars = prescored_attention(*tensors, CONFIG.replace(tolerance=0.3), is_causal=True, return_aux=True)[1].stats
    assert bars.native == bars["native"] == level


def test_plain_torch_where_compiled_code_cannot_run(monkeypatch):
    assert native(backend="plain") == "none"
    assert native(dropout_p=0.1) == "none"
    assert native(CONFIG.replace(leaf_size=8)) == "none"
    assert native(sizes={**SIZES, "dtype": torch.float64}) == "none"
    assert native(sizes={**SIZES, "dim": 20}) == "none"
    monkeypatch.setenv(library.VARIABLE, "0")
    assert native() == "none"


def test_nothing_is_said_where_nothing_is_far():
    assert native(CONFIG.replace(exact_until=160)) is None
    assert native(Selected(top_k=16, min_seq_len=32)) is None


def test_a_batch_whose_last_sequence_is_too_short_to_route(monkeypatch):
    monkeypatch.setenv(library.VARIABLE, "0")
    mask = torch.ones(2, 160, dtype=torch.bool)
    mask[0, :140] = False  # the sequence of the latest start comes last in the order of work, or first
    for order in (mask, mask.flip(0)):
        assert native(key_padding_mask=order) == "none"


@pytest.mark.parametrize("tolerance", [None, 0.3])
def test_steps_say_it_too(tolerance, monkeypatch):
    query, key, value = attention_tensors(**SIZES)
    index = RoutedIndex(CONFIG.replace(tolerance=tolerance), scale=0.25)
    index.attend(query[:, :, 40:41], key[:, :, :41], value[:, :, :41])
    assert "native" not in index.figures
    index.attend(query[:, :, -1:], key, value)
    assert index.figures["native"] == library.loaded_level()
    index.attend(query[:, :, -1:], key, value, backend="plain")
    assert index.figures["native"] == "none"


def test_a_model_notes_that_plain_torch_ran(monkeypatch):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes)).eval()
    ids = torch.arange(160)[None] % 31 + 1

    def report():
        with prescore.apply(model, CONFIG) as applied:
            model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
        return applied.report()

    found, level = report(), library.loaded_level()
    assert [phase.last.native for phase in found[0].phases.values()] == [level, level]
    assert [note.startswith(REASON) for note in found.notes] == ([True] if level == "none" else [])
    monkeypatch.setenv(library.VARIABLE, "0")
    found = report()
    assert [phase.last.native for phase in found[0].phases.values()] == ["none", "none"]
    assert str(found).splitlines()[-1].startswith(f"note: {REASON}")
