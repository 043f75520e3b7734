"""Caches with int8 rows behind the local keys: every operation, beside a cache in the model's dtype."""

import copy

import pytest
import torch
from routed_checks import needs_native
from tiny_models import forward, prompts, steps, tiny

import prescore
from prescore import Exact
from prescore.integrations import decode
from prescore.integrations.decode import LayerCache
from prescore.integrations.transformers.cache import PrescoredCache
from prescore.routed.decode import StepAttention
from prescore.routed.int8_rows import from_int8_rows, to_int8_rows

CONFIG = prescore.Routed(min_weight=1 / 32, cluster_size=16, chunk_size=32, sinks=2, exact_until=32)
SIZES = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 1024, "initializer_range": 0.2}
IDS, MASK = prompts(length=300, cut=0)
PADDED_IDS, PADDED_MASK = prompts(length=300)
N_PROMPT = 200

pytestmark = needs_native


@pytest.fixture(scope="module")
def model():
    return tiny("Llama", **SIZES)


def filled(model, dtype=torch.int8, ids=IDS, mask=MASK, chunks=(N_PROMPT,)):
    """A cache that has read a prompt in chunks."""
    cache, start = PrescoredCache(model.config, dtype=dtype), 0
    for size in chunks:
        stop = start + size
        forward(model, ids[:, start:stop], mask[:, :stop], past_key_values=cache)
        start = stop
    return cache


def buffer(cache, layer=0):
    return cache.layers[layer].cache.buffer


def far_end(n_tokens):
    """Where the local keys begin: all but the last whole chunk and what follows."""
    return 2 + ((n_tokens - 2 - 1) // 32 - 1) * 32


def spread(model, ids, mask, start):
    """How far the logits of steps move when far keys and values are rounded, by exact attention in float64."""
    precise = copy.deepcopy(model).double()
    cache, rounded = PrescoredCache(precise.config), PrescoredCache(precise.config)
    with prescore.apply(precise, Exact()):
        for held in (cache, rounded):
            forward(precise, ids[:, :start], mask[:, :start], past_key_values=held)
        for layer in rounded.layers:
            for table in layer.cache.buffer._tables:
                some = table[:, :, : far_end(start)]
                table[:, :, : far_end(start)] = from_int8_rows(to_int8_rows(some), some.shape[-1], table.dtype)
            layer.show()
        results = [steps(precise, held, ids[:, start : start + 40], mask[:, :start]) for held in (cache, rounded)]
    return float((results[0] - results[1]).abs().max())


@pytest.mark.parametrize("chunks", [(200,), (96, 70, 34)])
def test_steps_after_prompts_in_chunks_crops_and_beams(model, chunks, tmp_path):
    """Steps cross chunks: what becomes far becomes int8 rows; operations keep what they keep elsewhere."""
    budget = 4 * spread(model, IDS, MASK, N_PROMPT)
    with prescore.apply(model, CONFIG) as applied:
        plain, int8 = (filled(model, dtype, chunks=chunks) for dtype in (None, torch.int8))
        assert buffer(int8).n_int8 == far_end(200)
        for first, count in ((200, 5), (205, 40)):
            results = [
                steps(model, cache, IDS[:, first : first + count], MASK[:, :first]) for cache in (plain, int8)
            ]
            assert 0 < (results[0] - results[1]).abs().max() < budget
        assert {entry.path for entry in applied.report().layers} == {"routed step"}
        assert buffer(int8).n_int8 == far_end(245)
        assert buffer(int8).length == 245
        loaded = PrescoredCache.load(int8.save(tmp_path / "cache") or tmp_path / "cache")
        assert buffer(loaded).n_int8 == far_end(245)
        n_tokens = 245
        for crop, order in ((-3, [1, 0]), (-80, [0, 0]), (-20, [1, 1])):
            n_tokens += crop
            for cache in (plain, int8, loaded):
                cache.crop(crop)
                cache.reorder_cache(torch.tensor(order))
            again = IDS[order][:, n_tokens : n_tokens + 4]
            first, second, third = (
                steps(model, cache, again, MASK[:, :n_tokens]) for cache in (plain, int8, loaded)
            )
            assert (first - second).abs().max() < budget
            assert (third - second).abs().max() < budget
            n_tokens += 4
    for cache in (plain, int8):
        assert cache.get_seq_length() == n_tokens


def test_the_fast_path_gives_what_all_keys_give(model, monkeypatch):
    called, original = [], StepAttention.attend_int8_rows
    with prescore.apply(model, CONFIG):
        cache = filled(model)
        other = copy.deepcopy(cache)
        monkeypatch.setattr(
            StepAttention, "attend_int8_rows", lambda *args: (called.append(0), original(*args))[1]
        )
        copies, copy_of = [], decode.from_int8_rows
        monkeypatch.setattr(decode, "from_int8_rows", lambda *args: (copies.append(0), copy_of(*args))[1])
        fast = steps(model, cache, IDS[:, 200:240], MASK[:, :200])
        assert len(copies) <= 2 * 2 * 2 * 2  # keys and values, at most twice, in two steps of two layers
        # a layer reads all keys at the first step, and where a chunk becomes far
        assert len(called) == 2 * (40 - 2)
        monkeypatch.setattr(LayerCache, "reads_int8_rows", lambda _: False)
        slow = steps(model, other, IDS[:, 200:240], MASK[:, :200])
    assert len(called) == 2 * (40 - 2)
    assert torch.allclose(fast, slow, rtol=1e-3, atol=1e-4)


def test_padded_batches_other_steps_and_other_attention(model):
    budget = 4 * spread(model, IDS, MASK, N_PROMPT)
    with prescore.apply(model, CONFIG) as applied:
        results = []
        for dtype in (None, torch.int8):
            cache = filled(model, dtype, PADDED_IDS, PADDED_MASK)
            result = [steps(model, cache, PADDED_IDS[:, 200:203], PADDED_MASK[:, :200])]
            mask = torch.nn.functional.pad(PADDED_MASK[:, :200], (0, 8), value=1)
            result.append(forward(model, PADDED_IDS[:, 203:208], mask, past_key_values=cache))
            results.append(torch.cat([result[0], result[1][:, -5:]], dim=1))
        assert buffer(cache).n_int8 == far_end(208) - 32
        assert (results[0] - results[1]).abs().max() < budget
        cache, plain = filled(model), filled(model, None)
        steps(model, cache, IDS[:, 200:202], MASK[:, :200])
        steps(model, plain, IDS[:, 200:202], MASK[:, :200])
        applied.undo()
        first, second = (steps(model, held, IDS[:, 202:204], MASK[:, :202]) for held in (plain, cache))
    assert (first - second).abs().max() < budget


def test_half_of_the_memory_and_what_the_report_says(model):
    half = copy.deepcopy(model).bfloat16()
    with prescore.apply(half, CONFIG):
        plain, cache = (filled(half, dtype, ids=IDS, chunks=(300,)) for dtype in (None, torch.int8))
        steps(half, cache, IDS[:, :3], MASK)
    report = cache.report()
    assert [layer["int8"] for layer in report["layers"]] == [far_end(303)] * 2
    rows = buffer(cache).int8_rows
    assert rows[0].shape[-1] == 32 + 2
    assert buffer(plain).key[..., : far_end(303), :].numel() * 2 / rows[0].numel() == pytest.approx(64 / 34)
    assert report["exact_bytes"] == 2 * 2 * buffer(cache).key.numel() * 2
    layer = cache.layers[0]  # nothing else holds the keys
    assert layer.keys.shape[2] == 303 - far_end(303)
    assert layer.keys.data_ptr() == buffer(cache).recent[0].data_ptr()


@pytest.mark.parametrize("config", [Exact(), prescore.Selected(top_k=64)], ids=["exact", "selected"])
def test_other_configurations_keep_the_dtype_of_the_model(model, config):
    with prescore.apply(model, config):
        results = []
        for dtype in (None, torch.int8):
            cache = filled(model, dtype)
            results.append(steps(model, cache, IDS[:, 200:204], MASK[:, :200]))
    assert torch.equal(*results)
    assert [layer["int8"] for layer in cache.report()["layers"]] == [0, 0]


def test_an_audit_sees_all_keys(model):
    with prescore.apply(model, CONFIG, audit=1.0) as applied:
        steps(model, filled(model), IDS[:, 200:204], MASK[:, :200])
        errors = applied.report()[0].last.errors
    assert errors.n > 0


def test_wrong_arguments(model):
    with pytest.raises(ValueError, match=r"dtype must be torch.int8 or None, got torch.float16"):
        PrescoredCache(model.config, dtype=torch.float16)
