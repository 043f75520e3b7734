"""`PrescoredCache`: selections and clusters are made once, reordered, cropped, saved, evicted."""

import contextlib
import copy
import json
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import COARSE, ROUNDING, ROUTED, forward, prompts, steps, tiny
from transformers import DynamicCache, StaticCache

import prescore
from prescore import Exact
from prescore.errors import Unsupported
from prescore.integrations.apply import replace_attention
from prescore.integrations.attention import PrescoredAttention
from prescore.integrations.transformers.cache import PrescoredCache, PrescoredLayer

IDS, MASK = prompts(length=40)
WHOLE, _ = prompts(length=120, side="none")
FINE = prescore.Routed(min_weight=1 / 32, cluster_size=8, chunk_size=16, sinks=2, exact_until=16)
FLOAT64 = {"rtol": 1e-9, "atol": 1e-9}
both = pytest.mark.parametrize("config", [COARSE, ROUTED], ids=["coarse", "routed"])


@pytest.fixture
def model():
    return tiny("Llama")


@pytest.fixture(scope="module")
def precise():
    """A model in float64, in which a step and a prompt differ by rounding alone."""
    return tiny("Llama", max_position_embeddings=512, initializer_range=0.5).double()


def filled(model, ids=IDS, mask=MASK, **options):
    """A cache that has read a prompt."""
    cache = PrescoredCache(model.config, **options)
    forward(model, ids, mask, past_key_values=cache)
    return cache


def selection(cache, layer=0):
    return cache.layers[layer].cache.selection


def paths(applied):
    return {entry.path for entry in applied.report().layers}


def longer(mask, count=1):
    return torch.nn.functional.pad(mask, (0, count), value=1)


def test_a_step_reads_the_selection_and_what_came_since(model):
    """And copies no keys, once there is room."""
    with prescore.apply(model, COARSE) as applied:
        cache = filled(model)
        assert selection(cache) is None
        steps(model, cache, IDS[:, :3], MASK)
        last, layer = applied.report()[0].last, cache.layers[0].cache
        before = layer.buffer.key.data_ptr(), layer.selection.buffer.key.data_ptr()
        steps(model, cache, IDS[:, 3:9], longer(MASK, 3))
    assert (last.path, last.n_keys) == ("step over the selection", 43)
    assert last.reads == (8 + 2, 3)  # the budget and later tokens, and a centroid per cluster
    assert cache.get_seq_length() == 49
    assert (selection(cache).n_selected_from, selection(cache).n_since, selection(cache).n_entries) == (41, 8, 11)
    assert (layer.buffer.key.data_ptr(), layer.selection.buffer.key.data_ptr()) == before


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_caches_of_transformers_decode_the_same(model, kind):
    """The layer remembers the selection, and checks that the keys go on."""
    with prescore.apply(model, COARSE):
        expected = steps(model, filled(model), IDS[:, :4], MASK)
    options = {"config": model.config}
    cache = DynamicCache(**options) if kind == "dynamic" else StaticCache(**options, max_cache_len=60)
    functions = [PrescoredAttention(COARSE) for _ in range(2)]
    undo = replace_attention(model, dict(enumerate(functions)))  # unlike apply, it upgrades no cache
    forward(model, IDS, MASK, past_key_values=cache)
    got = steps(model, cache, IDS[:, :4], MASK)
    undo()
    assert functions[1].last.path == "step over the selection"
    assert not any(isinstance(layer, PrescoredLayer) for layer in cache.layers)
    assert (got - expected).abs().max() < ROUNDING


def test_a_cache_is_made_by_itself_upgraded_passed_by_position_and_usable_afterwards(model):
    cache, third = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with prescore.apply(model, COARSE) as applied, torch.no_grad():
        options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
        result = model.generate(IDS, attention_mask=MASK, **options)
        assert selection(result.past_key_values, 1).n_since == 1
        forward(model, IDS, MASK, past_key_values=cache)
        assert cache.layers[0].cache.n_tokens == 40
        assert isinstance(model(IDS, use_cache=True).past_key_values, PrescoredCache)
        model(IDS, MASK, None, third)
        model(IDS[:, :1], None, None, third)
        assert paths(applied) == {"step over the selection"}
        assert selection(third).n_selected_from == 41
    assert steps(model, cache, IDS[:, :1], MASK).isfinite().all()


def test_a_selection_is_made_again_after_so_many_tokens_also_when_loaded(model, tmp_path):
    made = []
    with prescore.apply(model, COARSE):
        cache = filled(model, WHOLE[:, :40], None, refresh_every=3)
        for number in range(7):
            steps(model, cache, WHOLE[:, number : number + 1])
            made.append(selection(cache).n_selected_from)
        assert made == [41, 41, 41, 44, 44, 44, 47]
        cache.save(tmp_path / "cache")
        loaded = PrescoredCache.load(tmp_path / "cache")
        assert (selection(loaded).config, loaded.refresh_every) == (COARSE, 3)
        expected, got = (steps(model, each, WHOLE[:, 1:4]) for each in (cache, loaded))
    assert selection(loaded).n_selected_from == 50
    assert torch.equal(got, expected)


def test_a_selection_on_request_stays(model, tmp_path):
    """`select` and `save` choose among the prompt; the first step, or several, do not choose again."""
    with prescore.apply(model, COARSE):
        selected, saved, several = filled(model), filled(model), filled(model)
        selected.select()
        several.select()
        saved.save(tmp_path / "cache")
        caches = (selected, saved, PrescoredCache.load(tmp_path / "cache"))
        results = [steps(model, cache, IDS[:, :2], MASK) for cache in caches]
        at_once = forward(model, IDS[:, :2], longer(MASK, 2), past_key_values=several)
    for cache, result in zip(caches, results, strict=True):
        assert (selection(cache).n_selected_from, selection(cache).n_since) == (40, 2)
        assert torch.equal(result, results[0])
    assert (results[0] - at_once).abs().max() < ROUNDING


def test_a_crop_keeps_what_it_can(model):
    ids = WHOLE[:, :40]
    with prescore.apply(model, COARSE):
        cache = filled(model, ids, None)
        cache.select()
        first = steps(model, cache, ids[:, :2])
        steps(model, cache, ids[:, 5:8])
        cache.crop(-5)
        assert (cache.get_seq_length(), selection(cache).n_since) == (40, 0)
        assert torch.equal(steps(model, cache, ids[:, :2]), first)
        cache.crop(-10)  # into the prompt
        assert selection(cache) is None
        assert cache.get_seq_length() == 32
        expected = steps(model, filled(model, ids[:, :32], None), ids[:, :2])
        assert (steps(model, cache, ids[:, :2]) - expected).abs().max() < ROUNDING
        cache.crop(-1)  # to the token that the selection was made with
        assert selection(cache).n_since == 0
        cache.crop(-1)
        assert selection(cache) is None


def test_eviction_frees_memory_and_changes_nothing_else(model):
    with prescore.apply(model, {0: COARSE, 1: Exact()}):
        mixed = filled(model, evict=True)
        steps(model, mixed, IDS[:, :2], MASK)
        assert [layer.cache.evicted for layer in mixed.layers] == [True, False]
    with prescore.apply(model, COARSE):
        cache, evicted = filled(model), filled(model, evict=True)
        full = evicted.report()
        expected, got = (steps(model, each, IDS[:, :4], MASK) for each in (cache, evicted))
        assert torch.equal(got, expected)
        report = evicted.report()
        assert report["layers"][0]["evicted"]
        assert (report["layers"][0]["selected"], report["layers"][0]["centroids"]) == (8, 3)
        assert evicted.get_seq_length() == 44
        assert full["bytes"] == 2 * 2 * 2 * 2 * 40 * 8 * 4  # layers, K and V, batch, heads, tokens, dim, float32
        assert report["exact_bytes"] == full["bytes"] * 44 // 40
        with pytest.raises(Unsupported, match="a crop to 30 tokens removes keys that were selected from"):
            evicted.crop(-14)
    with pytest.raises(Unsupported, match="does not go through prescore"):
        steps(model, evicted, IDS[:, :2], MASK)
    for config, reason in (
        (Exact(), "evicted the unselected"),
        (COARSE.replace(top_k=5), "configuration changed"),
    ):
        with prescore.apply(model, config), pytest.raises(Unsupported, match=reason):
            steps(model, evicted, IDS[:, :1], longer(MASK, 4))
    with prescore.apply(model, COARSE.replace(top_k=5)):  # with all keys it selects again
        steps(model, cache, IDS[:, :1], longer(MASK, 4))
    assert (selection(cache).config.top_k, selection(cache).n_selected_from) == (5, 45)


def test_evicted_memory_really_falls():
    model = tiny("Llama", max_position_embeddings=512)
    with prescore.apply(model, COARSE):
        cache = filled(model, prompts(batch=1, length=400, side="none")[0], None, evict=True)
        cache.select()
    buffers = [layer.cache.selection.buffer for layer in cache.layers]
    held = sum(table.untyped_storage().nbytes() for buffer in buffers for table in buffer._tables)
    assert cache.report()["bytes"] == held < cache.report()["exact_bytes"] / 4
    assert all(layer.cache.buffer is None for layer in cache.layers)


def test_an_evicted_cache_with_windows_continues_with_another_model_object(tmp_path):
    tokens, options = [], {"attention_mask": MASK, "max_new_tokens": 6, "do_sample": False}
    for saved in (True, False):
        model = tiny("Gemma3")
        with prescore.apply(model, COARSE):
            cache = filled(model, IDS[:, :-1], MASK[:, :-1], evict=True)
            if saved:
                cache.save(tmp_path / "cache")
                cache = PrescoredCache.load(tmp_path / "cache")
            assert cache.evict
            assert [layer.get_seq_length() for layer in cache.layers] == [39, 39]
            tokens.append(model.generate(IDS, past_key_values=cache, **options))
    assert torch.equal(*tokens)


def test_other_files_are_refused(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "broken", metadata={"prescore": "{"})
    contents = {"cut": (tmp_path / "broken").read_bytes()[:-1], "text": b"Call me Ishmael.", "nothing": b""}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=rf"path must be a file of PrescoredCache.save, got '.*{path.name}'"):
            PrescoredCache.load(path)
    with pytest.raises(FileNotFoundError):
        PrescoredCache.load(tmp_path / "missing")


EDITS = {
    "fewer tokens": lambda facts: facts["layers"][0].update(n_tokens=41),
    "other entries": lambda facts: facts["layers"][0]["selection"].update(n_entries=10),
    "an earlier selection": lambda facts: facts["layers"][0]["selection"].update(n_selected_from=39),
    "more centroids": lambda facts: facts["layers"][0]["selection"].update(n_centroids=12),
    "no number": lambda facts: facts["layers"][0].update(n_tokens="42"),
    "no selection": lambda facts: facts["layers"][0].update(selection=None),
    "no configuration": lambda facts: facts["layers"][0].pop("chosen_by"),
    "another configuration": lambda facts: facts["layers"][0]["selection"].update(config={"type": "Exact"}),
    "a type that is no configuration": lambda facts: facts["layers"][0]["chosen_by"]["config"].update(
        type="os.system"
    ),
    "an unknown field": lambda facts: facts["layers"][0]["selection"].update(budget=3),
    "first head": lambda facts: facts["layers"][0]["chosen_by"].update(first_head=0.5),
    "seed": lambda facts: facts["layers"][0]["chosen_by"].update(seed="1"),
    "a layer less": lambda facts: facts["layers"].pop(),
    "evict": lambda facts: facts.update(evict="yes"),
    "window": lambda facts: facts["layers"][0].update(window=9),
    "valid": lambda facts: "0.valid",
    "value": lambda facts: "0.value",
    "bias": lambda facts: "0.selection.bias",
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_file_whose_numbers_do_not_fit_its_tensors_is_refused(model, tmp_path, edit):
    with prescore.apply(model, COARSE):
        cache = filled(model)
        cache.select()
        steps(model, cache, IDS[:, :2], MASK)
    cache.save(tmp_path / "cache")
    PrescoredCache.load(tmp_path / "cache")
    tensors = load_file(tmp_path / "cache")
    with safe_open(tmp_path / "cache", framework="pt") as file:
        facts = json.loads(file.metadata()["prescore"])
    cut = EDITS[edit](facts)
    if isinstance(cut, str) and cut in tensors:
        tensors[cut] = tensors[cut][:, :-1].contiguous()
    save_file(tensors, tmp_path / "cache", metadata={"prescore": json.dumps(facts)})
    with pytest.raises(ValueError, match=r"path must be a file of PrescoredCache.save, got .* \(.+\)"):
        PrescoredCache.load(tmp_path / "cache")


CHANGED_TENSORS = {
    "wider values": ("0.selection.value", lambda t: torch.cat((t, t), dim=3), "other sizes or dtypes"),
    "a bias in half precision": ("0.selection.bias", lambda t: t.half(), "a bias of torch.float16 beside keys of"),
    "keys in float64": ("0.selection.", lambda t: t.double(), "a bias of|other sizes or dtypes"),
    "other later values": ("0.value", lambda t: t + 1, "a selection followed by other values"),
}


@pytest.mark.parametrize("change", CHANGED_TENSORS)
def test_a_file_whose_tensors_do_not_fit_each_other_is_refused_at_once(model, tmp_path, change):
    """Such a cache would fail at its next step."""
    with prescore.apply(model, COARSE):
        cache = filled(model)
        cache.select()
        steps(model, cache, IDS[:, :2], MASK)
    cache.save(tmp_path / "cache")
    tensors, (prefix, changed, reason) = load_file(tmp_path / "cache"), CHANGED_TENSORS[change]
    with safe_open(tmp_path / "cache", framework="pt") as file:
        metadata = file.metadata()
    tensors = {name: changed(t) if name.startswith(prefix) else t for name, t in tensors.items()}
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "cache", metadata=metadata)
    with pytest.raises(ValueError, match=rf"got .*cache' \(.*({reason})"):
        PrescoredCache.load(tmp_path / "cache")


def test_a_cache_of_another_head_size_is_refused_at_its_next_step(model, tmp_path):
    """No file says what the model's sizes are."""
    with prescore.apply(model, ROUTED):
        filled(model).save(tmp_path / "cache")
        tensors = load_file(tmp_path / "cache")
        with safe_open(tmp_path / "cache", framework="pt") as file:
            metadata = file.metadata()
        for name in ("1.key", "1.value"):
            save_file({**tensors, name: tensors[name][..., 1:].clone()}, tmp_path / name, metadata=metadata)
            with pytest.raises(
                ValueError, match=r"past_key_values must be .* and of their sizes, .* got \[\(2, 2, "
            ):
                steps(model, PrescoredCache.load(tmp_path / name), IDS[:, :1], MASK)


def test_a_saved_selection_covers_the_tokens_of_exact_steps(model, tmp_path):
    with prescore.apply(model, COARSE):
        cache = filled(model)
        steps(model, cache, IDS[:, :1], MASK)
    steps(model, cache, IDS[:, 1:3], longer(MASK))
    cache.save(tmp_path / "cache")
    with prescore.apply(model, COARSE):
        caches = (cache, PrescoredCache.load(tmp_path / "cache"))
        got, expected = (steps(model, each, IDS[:, 3:5], longer(MASK, 3)) for each in caches)
    assert torch.equal(got, expected)
    assert (selection(cache).n_selected_from, selection(cache).n_since) == (41, 4)
    assert torch.equal(selection(cache).buffer.key[:, :, -4:], cache.layers[0].keys[:, :, -4:])


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("read_before", [True, False])
def test_the_cache_of_an_interrupted_forward_is_refused(model, stop, read_before):
    """Neither is an Exception, so that torch calls no hooks for them."""
    ids = WHOLE[:1, :60]
    with torch.no_grad(), prescore.apply(model, COARSE):
        cache = filled(model, ids, None) if read_before else PrescoredCache(model.config)
        hook = model.model.layers[1].register_forward_pre_hook(Mock(side_effect=stop))
        with pytest.raises(stop):
            model(ids[:, :40], past_key_values=cache)
        hook.remove()
        tokens = "60 and 100" if read_before else "0 and 40"
        for each in (cache, copy.deepcopy(cache)):
            with pytest.raises(ValueError, match=f"got {tokens} after an interrupted forward"):
                model(ids[:, :1], past_key_values=each)
        cache.reset()  # another text
        assert torch.equal(forward(model, ids, past_key_values=cache), forward(model, ids, past_key_values=None))


def test_the_cache_of_an_interrupted_forward_goes_back_when_apply_ends(model):
    """Nothing looks at the lengths of its layers any more."""
    ids = WHOLE[:1, :61]
    cache = PrescoredCache(model.config)
    with prescore.apply(model, COARSE):
        forward(model, ids[:, :60], past_key_values=cache)
        hook = model.model.layers[1].register_forward_pre_hook(Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            forward(model, ids[:, 60:], past_key_values=cache)
        hook.remove()
        assert [layer.get_seq_length() for layer in cache.layers] != [60] * len(cache.layers)
    assert [layer.get_seq_length() for layer in cache.layers] == [60] * len(cache.layers)
    alike = PrescoredCache(model.config)
    with prescore.apply(model, COARSE):
        forward(model, ids[:, :60], past_key_values=alike)
    got, expected = (forward(model, ids[:, 60:], past_key_values=each) for each in (cache, alike))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("family", ["Jamba", "Lfm2"])
def test_a_failed_step_leaves_the_states_of_hybrid_layers_as_they_were(family):
    """Convolutions and recurrences write them in place; a token that is tried again must not count twice."""
    sizes = {
        "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4},
        "Lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    }
    model = tiny(family, num_hidden_layers=4, **sizes[family])
    ids = WHOLE[:1, :61]
    with torch.no_grad(), prescore.apply(model, ROUTED):
        results = []
        for fails in (False, True):
            cache = DynamicCache(config=model.config)
            forward(model, ids[:, :60], past_key_values=cache)
            if fails:
                hook = model.model.layers[3].register_forward_pre_hook(Mock(side_effect=RuntimeError("stop")))
                with pytest.raises(RuntimeError, match="stop"):
                    forward(model, ids[:, 60:], past_key_values=cache)
                hook.remove()
            results.append(forward(model, ids[:, 60:], past_key_values=cache))
    assert torch.equal(*results)


def test_an_evicted_cache_reads_a_longer_turn_in_chunks(model):
    """As its refusal says."""
    ids, more = WHOLE[:1, :60], WHOLE[:1, 60:110]
    options = {"max_new_tokens": 3, "do_sample": False}
    with prescore.apply(model, COARSE):
        cache = PrescoredCache(model.config, evict=True)
        first = model.generate(ids, past_key_values=cache, **options)
        turn = torch.cat((first, more), dim=1)
        with pytest.raises(Unsupported, match=r"51 new tokens at once need all keys; .* prefill_chunk_size=32"):
            model.generate(turn, past_key_values=cache, **options)
        assert model.generate(turn, past_key_values=cache, prefill_chunk_size=32, **options).shape == (1, 116)


def test_wrong_arguments_are_named(model):
    cache = filled(tiny("Llama", attn_implementation="prescored"))
    for match, use in {
        "refresh_every must be None with evict=True.*got 2": lambda: PrescoredCache(evict=True, refresh_every=2),
        "refresh_every must be at least 1, got 0": lambda: PrescoredCache(refresh_every=0),
        "evict must be True or False, got str": lambda: PrescoredCache(evict="yes"),
        "config must be a model's configuration or None, got str": lambda: PrescoredCache("x"),
        "at most 0, got 3": lambda: cache.crop(3),
        r"between 0 and 1, got \[2\]": lambda: cache.reorder_cache(torch.tensor([2])),
        "repeats must be at least 1, got -1": lambda: cache.batch_repeat_interleave(-1),
    }.items():
        with pytest.raises((ValueError, TypeError), match=match):
            use()


REFUSED = {
    "weights": ("output_attentions=True asks for weights", {"ids": WHOLE[:1, :40], "output_attentions": True}),
    # the second sentence is torch's, by a sliding-window layer of transformers
    "another batch": ("must be of as many sequences|Sizes of tensors must match", {"ids": WHOLE[:, :2]}),
    "a mask without structure": (
        r"attention mask is neither causal|must end in \(3, (11|65)\)",
        {"ids": WHOLE[:1, :3], "mask": (torch.arange(189) % 5 < 2).view(1, 1, 3, 63)},
    ),
}


def content(cache):
    """What is held of each layer; the room for later tokens may have grown."""
    return [{**layer, "bytes": None} for layer in cache.report()["layers"]]


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
@both
@pytest.mark.parametrize("n_steps", [0, 2])
@pytest.mark.parametrize("refused", REFUSED)
def test_a_refused_forward_leaves_its_cache_as_it_was(family, config, n_steps, refused):
    model, ids, (message, inputs) = tiny(family), WHOLE[:1, :60], REFUSED[refused]
    with torch.no_grad(), prescore.apply(model, config):
        cache = filled(model, ids, None)
        if n_steps:
            steps(model, cache, ids[:, :n_steps])
        before, other = content(cache), copy.deepcopy(cache)
        with pytest.raises((Unsupported, ValueError, RuntimeError), match=message):
            forward(model, past_key_values=cache, **inputs)
        assert content(cache) == before
        torch.testing.assert_close(steps(model, cache, ids[:, 5:8]), steps(model, other, ids[:, 5:8]))


def test_an_eviction_is_taken_back(model):
    ids = WHOLE[:1, :60]
    with torch.no_grad(), prescore.apply(model, COARSE):
        cache = filled(model, ids, None, evict=True)
        other = copy.deepcopy(cache)
        hook = model.model.layers[1].register_forward_pre_hook(Mock(side_effect=RuntimeError("no")))
        with pytest.raises(RuntimeError, match="no"):  # layer 0 has selected and evicted by then
            model(ids[:, :1], past_key_values=cache)
        hook.remove()
        assert content(cache) == content(other)
        got, expected = (forward(model, ids[:, :1], past_key_values=each) for each in (cache, other))
        torch.testing.assert_close(got, expected)


def whole_and_stepwise(model, config, ids, n_prompt, mask=None):
    """Logits from position `n_prompt - 1` on: of one prompt, and of steps; and the paths of the last step."""
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with prescore.apply(model, config) as applied:
        whole = forward(model, ids, mask, position_ids=positions)[:, n_prompt - 1 :]
        cache = PrescoredCache(model.config)
        logits = []
        for first, last in ((0, n_prompt), *((n, n + 1) for n in range(n_prompt, ids.shape[1]))):
            place = {"position_ids": positions[:, first:last], "past_key_values": cache}
            logits.append(forward(model, ids[:, first:last], mask[:, :last], **place)[:, -1])
        return whole, torch.stack(logits, dim=1), paths(applied)


def test_routed_steps_equal_one_long_prompt_padded_or_not(precise):
    ids, _ = prompts(length=150, side="none")
    whole, got, taken = whole_and_stepwise(precise, FINE, ids, 90)
    assert taken == {"routed step"}
    torch.testing.assert_close(got, whole, **FLOAT64)
    # the test would prove nothing if routing changed nothing
    assert (forward(precise, ids)[:, 89:] - whole).abs().max() > 1e-3
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    _, padded, _ = whole_and_stepwise(precise, FINE, ids, 97, mask)
    _, alone, _ = whole_and_stepwise(precise, FINE, ids[1:, 37:], 60)
    torch.testing.assert_close(padded[1:], alone, **FLOAT64)
    # a short cache is read in full
    _, got, taken = whole_and_stepwise(precise, FINE.replace(exact_until=200), ids, 148)
    assert taken == {"step over all keys"}
    torch.testing.assert_close(got, forward(precise, ids)[:, 147:], **FLOAT64)


def test_routed_caches_go_on_after_reordering_crops_and_other_configurations(precise):
    ids = WHOLE
    twice = ids[1:].repeat(2, 1)
    with prescore.apply(precise, FINE):
        cache = filled(precise, ids[:, :90], None)
        steps(precise, cache, ids[:, 90:110])
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_select_indices(torch.tensor([True, False]))
        cache.batch_repeat_interleave(2)
        got = steps(precise, cache, twice[:, 110:111])
        torch.testing.assert_close(got, forward(precise, twice[:, :111])[:, -1:], **FLOAT64)
        cache.crop(-31)
        forward(precise, twice[:, :40], past_key_values=cache)  # a chunk of a prompt: no step sees the crop
        got = steps(precise, cache, twice[:, 40:41])
        expected = forward(precise, torch.cat((twice[:, :80], twice[:, :41]), dim=1))[:, -1:]
        torch.testing.assert_close(got, expected, **FLOAT64)
    with prescore.apply(precise, prescore.Selected(top_k=8, min_seq_len=16)) as applied:
        steps(precise, cache, ids[:, 81:82])
        assert paths(applied) == {"step over the selection"}
    anew = copy.deepcopy(cache)
    for layer in anew.layers:
        layer.cache._index = None  # clusters of all keys, made now
    with prescore.apply(precise, FINE) as applied:
        got, expected = (steps(precise, each, ids[:, 82:83]) for each in (cache, anew))
        assert paths(applied) == {"routed step"}
    torch.testing.assert_close(got, expected, **FLOAT64)


def test_inference_mode_with_padding(model):
    with prescore.apply(model, ROUTED):
        with torch.inference_mode():
            inference = model(IDS, attention_mask=MASK.clone()).logits
        assert torch.equal(inference, forward(model, IDS, MASK))


def test_steps_with_gradients_are_exact(precise):
    ids, grads = WHOLE[:1], []
    for context in (contextlib.nullcontext(), prescore.apply(precise, FINE.replace(exact_until=110))):
        with context:  # the prompt is exact too, so that gradients can be compared
            cache = PrescoredCache(precise.config)
            precise(ids[:, :110], past_key_values=cache)
            logits = [precise(token, past_key_values=cache).logits for token in ids[:, 110:].split(1, dim=1)]
        weights = precise.model.layers[0].self_attn.k_proj.weight
        grads.append(torch.autograd.grad(logits[-1].logsumexp(-1).sum(), weights)[0])
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=1e-9)


ALL_KEYS = {
    "routed": ROUTED.replace(min_weight=1e-9),
    "selected": prescore.Selected("key-norm", top_k=4096, min_seq_len=8, remainder="none"),
}
CHANGES = {
    "first tokens hidden from a step on": lambda mask, n: mask.index_fill(1, torch.arange(20), int(n < 3)),
    "padding at first, and then none": lambda mask, n: mask.index_fill(1, torch.arange(20), int(n >= 3)),
    "hidden more and more": lambda mask, n: mask.index_fill(1, torch.arange(5 * n), 0),
    "a hole from a step on": lambda mask, n: mask.index_fill(1, torch.arange(8, 20), int(n < 3)),
    "no mask from a step on": lambda mask, n: mask.index_fill(1, torch.arange(20), 0) if n < 3 else None,
    "a mask from a step on": lambda mask, n: None if n < 3 else mask.index_fill(1, torch.arange(20), 0),
}


@pytest.mark.parametrize("name", ALL_KEYS)
@pytest.mark.parametrize("change", CHANGES)
def test_steps_follow_an_attention_mask_that_changes(model, change, name):
    """The key index and the selection are made anew where the mask of earlier tokens is another one."""
    ids = WHOLE[:1]

    def logits():
        cache, rows = DynamicCache(config=model.config), []
        for n in range(6):
            begin, end = (0, 60) if n == 0 else (59 + n, 60 + n)
            mask = CHANGES[change](torch.ones(1, end, dtype=torch.int64), n)
            position = torch.arange(begin, end)[None]
            rows.append(
                forward(model, ids[:, begin:end], mask, past_key_values=cache, position_ids=position)[:, -1]
            )
        return torch.stack(rows)

    wanted = logits()
    with prescore.apply(model, ALL_KEYS[name]) as applied:
        got = logits()
    assert (got - wanted).abs().max() < ROUNDING
    if change != "a hole from a step on":
        assert paths(applied) == {"routed step" if name == "routed" else "step over the selection"}


@pytest.mark.parametrize("name", ALL_KEYS)
def test_steps_after_a_crop_to_padding_alone(model, name):
    """The first real token is another one, though no mask of earlier tokens has changed."""
    ids = WHOLE[:1]

    def logits():
        cache, rows = DynamicCache(config=model.config), []
        mask = torch.cat((torch.zeros(1, 56, dtype=torch.int64), torch.ones(1, 4, dtype=torch.int64)), 1)
        for n in range(6):
            begin, end = (0, 60) if n == 0 else (59 + n, 60 + n)
            if n == 3:
                cache.crop(50 - cache.get_seq_length())
                mask = mask[:, :50]
            mask = mask if n == 0 else torch.nn.functional.pad(mask, (0, 1), value=1)
            position = (mask.cumsum(1) - 1).clamp_min(0)[:, begin - end :]
            rows.append(
                forward(model, ids[:, begin:end], mask, past_key_values=cache, position_ids=position)[:, -1]
            )
        return torch.stack(rows)

    wanted = logits()
    with prescore.apply(model, ALL_KEYS[name]):
        got = logits()
    assert (got - wanted).abs().max() < ROUNDING


def test_an_evicted_cache_refuses_another_mask_of_earlier_tokens(model):
    with prescore.apply(model, COARSE):
        cache = filled(model, WHOLE[:1, :40], None, evict=True)
        steps(model, cache, WHOLE[:1, 40:41])
        mask = torch.ones(1, 42, dtype=torch.int64)
        mask[:, :9] = 0
        with pytest.raises(Unsupported, match="the attention mask of earlier tokens changed"):
            forward(model, WHOLE[:1, 41:42], mask, past_key_values=cache)
