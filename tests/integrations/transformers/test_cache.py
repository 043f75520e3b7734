"""Selections in the cache: made once, carried along, reordered, cropped, saved, evicted."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import prompts, tiny
from transformers import DynamicCache, StaticCache

import prescore
from prescore import Exact, KMeans, Routed, Selected
from prescore.errors import Unsupported
from prescore.integrations.apply import replace_attention
from prescore.integrations.attention import PrescoredAttention, layer_seed
from prescore.integrations.transformers.cache import PrescoredCache, prescored_layers

COARSE = Selected(KMeans(n_clusters=3), top_k=8, min_seq_len=8, sinks=2)
ROUTED = Routed(min_weight=1 / 16, cluster_size=4, chunk_size=8, sinks=2, exact_until=8)
EVERYTHING = Selected(top_k=1.0, remainder="none", min_seq_len=4)
ROUNDING = 1e-4


def prefill(model, cache, ids, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1]


def steps(model, cache, tokens, mask=None):
    """Logits of tokens fed one by one."""
    rows = []
    for number in range(tokens.shape[1]):
        if mask is not None:
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
        rows.append(prefill(model, cache, tokens[:, number : number + 1], mask))
    return torch.stack(rows, dim=1)


@pytest.fixture
def model():
    return tiny("Llama")


def test_a_step_reads_the_selection_and_what_came_since(model):
    ids, mask = prompts(length=40)
    cache = PrescoredCache(model.config)
    with prescore.apply(model, COARSE) as applied:
        prefill(model, cache, ids, mask)
        assert cache.layers[0].state is None
        steps(model, cache, ids[:, :3], mask)
        seen = applied.report()[0].last
    state = cache.layers[0].state
    assert seen.path == "step over the selection"
    assert (seen.rows, seen.n_keys) == (8 + 3 + 2, 43)
    assert (state.n_selected_from, state.n_since) == (41, 2)
    assert state.n_rows == 8 + 3  # the budget, and a centroid per cluster
    assert cache.get_seq_length() == 43


def test_a_step_copies_no_past_keys(model):
    ids, _ = prompts(length=40, side="none")
    with prescore.apply(model, COARSE):
        cache = PrescoredCache(model.config)
        prefill(model, cache, ids)
        steps(model, cache, ids[:, :2])  # selects, and makes room once
        layer = cache.layers[0]
        before = layer.rows.key.data_ptr(), layer.state.rows.key.data_ptr()
        steps(model, cache, ids[:, 2:9])
        assert (layer.rows.key.data_ptr(), layer.state.rows.key.data_ptr()) == before
        assert layer.n_seen == 49


@pytest.mark.parametrize(("refresh_every", "n_steps"), [(1, 4), (None, 1)])
def test_fresh_selection_equals_prescored_attention(model, refresh_every, n_steps):
    """Identity 10: a step that selects is `prescored_attention` of that query over all keys."""
    ids, mask = prompts(length=40)
    stateless = DynamicCache(config=model.config)
    with prescore.apply(model, COARSE) as applied:
        cache = PrescoredCache(model.config, refresh_every=refresh_every)
        prefill(model, cache, ids, mask)
        with_state = steps(model, cache, ids[:, :n_steps], mask)
        assert applied.report()[0].path == "step over the selection"

    def anew(query, key, value, context):
        form = context.form(query, key)
        return prescore.prescored_attention(
            query,
            key,
            value,
            COARSE,
            is_causal=form.kind == "causal",
            key_padding_mask=form.valid,
            scale=context.scale,
            generator=layer_seed(0, context.layer),
        )

    undo = replace_attention(model, dict.fromkeys(range(2), anew))
    prefill(model, stateless, ids, mask)
    fresh = steps(model, stateless, ids[:, :n_steps], mask)
    undo()
    assert not prescored_layers(stateless)
    assert (with_state - fresh).abs().max() < ROUNDING


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_foreign_caches_decode_the_same(model, kind):
    """Without a place in the cache the layer remembers, and checks that the keys go on."""
    ids, mask = prompts(length=40)
    foreign = StaticCache(config=model.config, max_cache_len=60)
    with prescore.apply(model, COARSE):
        own = PrescoredCache(model.config)
        prefill(model, own, ids, mask)
        expected = steps(model, own, ids[:, :4], mask)
        if kind == "static":
            prefill(model, foreign, ids, mask)
            got = steps(model, foreign, ids[:, :4], mask)
    if kind == "dynamic":
        foreign = DynamicCache(config=model.config)
        functions = [PrescoredAttention(COARSE) for _ in range(2)]
        undo = replace_attention(model, dict(enumerate(functions)))  # which, unlike apply, upgrades no cache
        prefill(model, foreign, ids, mask)
        got = steps(model, foreign, ids[:, :4], mask)
        undo()
        assert functions[1].last.path == "step over the selection"
    assert not prescored_layers(foreign)
    assert (got - expected).abs().max() < ROUNDING


def test_refresh_every(model):
    ids, _ = prompts(length=40, side="none")
    made = []
    with prescore.apply(model, COARSE):
        cache = PrescoredCache(model.config, refresh_every=3)
        prefill(model, cache, ids)
        for number in range(7):
            steps(model, cache, ids[:, number : number + 1])
            made.append(cache.layers[0].state.n_selected_from)
    assert made == [41, 41, 41, 44, 44, 44, 47]


def test_a_selection_that_was_asked_for_stays(model, tmp_path):
    """`select` and `save` choose among the prompt; the first step does not choose again."""
    ids, _ = prompts(length=40, side="none")
    with prescore.apply(model, COARSE):
        selected, saved = PrescoredCache(model.config), PrescoredCache(model.config)
        for cache in (selected, saved):
            prefill(model, cache, ids)
        selected.select()
        saved.save(tmp_path / "cache")
        caches = (selected, saved, PrescoredCache.load(tmp_path / "cache"))
        results = [steps(model, cache, ids[:, :2]) for cache in caches]
    for cache, result in zip(caches, results, strict=True):
        assert (cache.layers[0].state.n_selected_from, cache.layers[0].state.n_since) == (40, 2)
        assert torch.equal(result, results[0])


def test_cache_is_made_by_itself_and_an_ordinary_one_is_upgraded(model):
    ids, mask = prompts(length=30)
    own = DynamicCache(config=model.config)
    with prescore.apply(model, COARSE):
        result = model.generate(
            ids, attention_mask=mask, max_new_tokens=3, do_sample=False, return_dict_in_generate=True
        )
        assert result.past_key_values.layers[1].state.n_since == 1
        prefill(model, own, ids, mask)
        assert own.layers[0].n_seen == 30
        with torch.no_grad():
            made = model(ids, attention_mask=mask, use_cache=True).past_key_values
        assert isinstance(made, PrescoredCache)
    # after the undo it serves as an ordinary cache
    assert steps(model, own, ids[:, :1], mask).isfinite().all()


def test_selection_goes_on_after_exact_steps(model):
    ids, _ = prompts(length=40, side="none")
    cache, other = PrescoredCache(model.config), PrescoredCache(model.config)
    with prescore.apply(model, COARSE, layers="first:1"):
        for filled in (cache, other):
            prefill(model, filled, ids)
            steps(model, filled, ids[:, :1])
    steps(model, cache, ids[:, 1:2])  # exact: the selection does not see this token
    with prescore.apply(model, COARSE, layers="first:1"):
        steps(model, cache, ids[:, 2:3])
        state = cache.layers[0].state
        assert state.n_since == 2
        assert torch.equal(state.rows.key[:, :, -2:], cache.layers[0].keys[:, :, -2:])


@pytest.mark.parametrize("config", [COARSE, EVERYTHING], ids=["coarse", "everything"])
def test_a_second_turn_is_read_like_a_prompt(model, config):
    ids, _ = prompts(length=120, side="none")
    exact = DynamicCache(config=model.config)
    cache = PrescoredCache(model.config)
    turns = ((0, 40), (40, 41), (41, 42), (42, 82), (82, 83))
    expected = [prefill(model, exact, ids[:, first:last]) for first, last in turns]
    with prescore.apply(model, config) as applied:
        got = [prefill(model, cache, ids[:, first:last]) for first, last in turns[:4]]
        assert applied.report()[0].path == "prescored"
        got.append(prefill(model, cache, ids[:, 82:83]))
    if config is EVERYTHING:
        assert (torch.stack(got) - torch.stack(expected)).abs().max() < ROUNDING
    else:
        assert cache.layers[0].state.n_selected_from == 83


def test_several_tokens_at_once_equal_one_by_one(model):
    ids, mask = prompts(length=40)
    with prescore.apply(model, COARSE):
        one, many = PrescoredCache(model.config), PrescoredCache(model.config)
        for cache in (one, many):
            prefill(model, cache, ids, mask)
            cache.select()  # among the prompt; by itself, a first token would choose among all keys
        singly = steps(model, one, ids[:, :5], mask)
        longer = torch.cat((mask, torch.ones_like(mask[:, :5])), dim=1)
        with torch.no_grad():
            parallel_group = model(ids[:, :5], attention_mask=longer, past_key_values=many).logits
    assert (singly - parallel_group).abs().max() < ROUNDING


def test_batch_of_different_lengths_equals_each_alone(model):
    ids, mask = prompts(length=40, cut=9)
    tokens = ids[:, :4]
    with prescore.apply(model, COARSE):
        cache = PrescoredCache(model.config)
        prefill(model, cache, ids, mask)
        parallel_group = steps(model, cache, tokens, mask)
        for row, first in ((0, 9), (1, 0)):
            alone = PrescoredCache(model.config)
            prefill(model, alone, ids[row : row + 1, first:])
            single = steps(model, alone, tokens[row : row + 1])
            assert (parallel_group[row] - single[0]).abs().max() < ROUNDING


def test_padding_among_later_tokens_is_not_seen(model):
    """One sequence gets fewer new tokens than the other; its gap is never attended to."""
    ids, mask = prompts(length=40, side="none")
    new = torch.tensor([[5, 6, 0], [7, 8, 9]])
    given = torch.tensor([[1, 1, 0], [1, 1, 1]])
    last = torch.tensor([[11], [11]])
    with torch.no_grad(), prescore.apply(model, COARSE):
        cache, alone = PrescoredCache(model.config), PrescoredCache(model.config)
        prefill(model, cache, ids, mask)
        cache.select()
        mask = torch.cat((mask, given), dim=1)
        model(new, attention_mask=mask, past_key_values=cache, position_ids=torch.tensor([[40, 41, 42]] * 2))
        mask = torch.cat((mask, torch.ones_like(last)), dim=1)
        places = torch.tensor([[42], [43]])
        got = model(last, attention_mask=mask, past_key_values=cache, position_ids=places).logits
        prefill(model, alone, ids[:1])
        alone.select()
        steps(model, alone, new[:1, :2])
        expected = steps(model, alone, last[:1])
    assert (got[0] - expected[0]).abs().max() < ROUNDING


def test_reorder_select_repeat_and_reset(model):
    ids, mask = prompts(length=40, cut=9)
    tokens = ids[:, :3]
    with prescore.apply(model, COARSE):
        cache = PrescoredCache(model.config)
        prefill(model, cache, ids, mask)
        steps(model, cache, tokens[:, :1], mask)
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
        plain = copy.deepcopy(cache)
        expected = steps(model, plain, tokens[:, 1:], mask)
        swapped = copy.deepcopy(cache)
        swapped.reorder_cache(torch.tensor([1, 0]))
        got = steps(model, swapped, tokens.flip(0)[:, 1:], mask.flip(0))
        assert (got.flip(0) - expected).abs().max() < ROUNDING
        doubled = copy.deepcopy(cache)
        doubled.batch_repeat_interleave(2)
        got = steps(model, doubled, tokens.repeat_interleave(2, 0)[:, 1:], mask.repeat_interleave(2, 0))
        assert (got[::2] - expected).abs().max() < ROUNDING
        second = copy.deepcopy(cache)
        second.batch_select_indices(torch.tensor([1]))
        got = steps(model, second, tokens[1:, 1:], mask[1:])
        assert (got - expected[1:]).abs().max() < ROUNDING
        cache.reset()
        assert cache.get_seq_length() == 0
        assert all(layer.request is None for layer in cache.layers)  # of what it was asked, nothing is left
        assert cache.layers[0].content.rows is None
        assert torch.equal(
            prefill(model, cache, ids, mask[:, :40]),
            prefill(model, PrescoredCache(model.config), ids, mask[:, :40]),
        )


def test_crop_forgets_tokens_and_keeps_what_it_can(model):
    ids, _ = prompts(length=40, side="none")
    with prescore.apply(model, COARSE):
        cache = PrescoredCache(model.config)
        prefill(model, cache, ids)
        cache.select()
        first = steps(model, cache, ids[:, :2])
        steps(model, cache, ids[:, 5:8])
        cache.crop(-5)
        assert cache.get_seq_length() == 40
        assert cache.layers[0].state.n_since == 0
        assert torch.equal(steps(model, cache, ids[:, :2]), first)
        cache.crop(-10)  # into the prompt
        assert cache.layers[0].state is None
        assert cache.get_seq_length() == 32
        short = PrescoredCache(model.config)
        prefill(model, short, ids[:, :32])
        expected = steps(model, short, ids[:, :2])
        assert (steps(model, cache, ids[:, :2]) - expected).abs().max() < ROUNDING
        cache.crop(-1)  # to the token that the selection was made with
        assert cache.layers[0].state.n_since == 0
        cache.crop(-1)
        assert cache.layers[0].state is None
        with pytest.raises(ValueError, match="at most 0, got 3"):
            cache.crop(3)


def test_eviction_frees_memory_and_changes_nothing_else(model):
    ids, mask = prompts(length=60)
    with prescore.apply(model, COARSE):
        kept, evicted = PrescoredCache(model.config), PrescoredCache(model.config, evict=True)
        for cache in (kept, evicted):
            prefill(model, cache, ids, mask)
        full = evicted.report()
        expected, got = steps(model, kept, ids[:, :4], mask), steps(model, evicted, ids[:, :4], mask)
        assert torch.equal(got, expected)
        report = evicted.report()
        assert report["layers"][0]["evicted"]
        assert evicted.get_seq_length() == 64
        assert evicted.layers[0].rows is None
        assert report["bytes"] == sum(layer.state.n_bytes for layer in evicted.layers)
        assert full["bytes"] == 2 * 2 * 2 * 2 * 60 * 8 * 4  # layers, K and V, batch, heads, tokens, dim, float32
        assert report["exact_bytes"] == full["bytes"] * 64 // 60
        with pytest.raises(Unsupported, match="further piece of the prompt"):
            prefill(model, evicted, ids[:, :40], torch.ones(2, 104))
    with pytest.raises(Unsupported, match="evicted"):
        steps(model, evicted, ids[:, :2], mask)


@pytest.mark.parametrize("with_config", [True, False])
def test_evicted_memory_really_falls(with_config):
    model = tiny("Llama", max_position_embeddings=512)
    ids, _ = prompts(batch=1, length=200, side="none")
    with prescore.apply(model, COARSE):
        cache = PrescoredCache(model.config if with_config else None, evict=True)
        prefill(model, cache, ids)
        cache.select()
        report = cache.report()
    assert report["bytes"] < report["exact_bytes"] / 10
    assert report["bytes"] == sum(
        table.untyped_storage().nbytes() for layer in cache.layers for table in layer.state.rows._tables
    )


def test_eviction_and_refreshing_exclude_each_other(model):
    with pytest.raises(ValueError, match=r"refresh_every must be None with evict=True.*got 2"):
        PrescoredCache(model.config, evict=True, refresh_every=2)
    with pytest.raises(ValueError, match="refresh_every must be at least 1, got 0"):
        PrescoredCache(model.config, refresh_every=0)
    with pytest.raises(TypeError, match="evict must be True or False, got str"):
        PrescoredCache(model.config, evict="yes")


def test_beam_search_with_every_key_equals_sdpa(model):
    ids, mask = prompts(length=24)
    options = {"attention_mask": mask, "num_beams": 4, "max_new_tokens": 10, "do_sample": False}
    expected = model.generate(ids, **options)
    for config in (EVERYTHING, EVERYTHING.replace(top_k=500)):
        with prescore.apply(model, config):
            assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("config", [COARSE, ROUTED], ids=["coarse", "routed"])
def test_beams_reorder_their_selections(model, config):
    """The score of every beam is that of its tokens fed alone, to a cache of its own."""
    ids, _ = prompts(batch=1, length=60, side="none")
    parted = 0
    with prescore.apply(model, config) as applied:
        found = model.generate(
            ids,
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=8,
            do_sample=False,
            length_penalty=0.0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        assert "step" in applied.report()[0].path
        for tokens, score in zip(found.sequences[:, None, 60:], found.sequences_scores, strict=True):
            cache = PrescoredCache(model.config)
            first = prefill(model, cache, ids)
            rest = steps(model, cache, tokens[:, :-1])
            predicted = torch.log_softmax(torch.cat((first[:, None], rest), dim=1), dim=-1)
            alone = predicted.gather(-1, tokens[..., None]).sum()
            assert float(score - alone) == pytest.approx(0, abs=1e-3)
            parted += not torch.equal(predicted.argmax(-1), tokens)
    assert parted >= 3  # the beams did part and were reordered
    assert found.sequences.unique(dim=0).shape[0] == 4


CONTINUE = """
import json, sys, torch
sys.path.insert(0, {folder!r})
from tiny_models import tiny
import prescore
from prescore.integrations.transformers.cache import PrescoredCache
for number, (family, evict, refresh_every, config) in enumerate({cases!r}):
    model = tiny(family)
    cache = PrescoredCache.load({tmp!r} + "/" + str(number))
    assert (cache.evict, cache.refresh_every) == (evict, refresh_every)
    config = prescore.config_from_dict(config)
    ids, mask = torch.tensor({ids!r}), torch.tensor({mask!r})
    with prescore.apply(model, config):
        out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False)
    print(json.dumps(out[:, ids.shape[1] :].tolist()))
"""


def test_saved_caches_continue_in_a_new_process(tmp_path):
    ids, mask = prompts(length=40)
    expected = []
    cases = [
        ("Llama", False, None, COARSE),
        ("Gemma3", True, None, COARSE),
        ("Llama", False, None, ROUTED),
        ("Llama", False, 2, COARSE),
    ]
    for number, (family, evict, refresh_every, config) in enumerate(cases):
        model = tiny(family)
        with prescore.apply(model, config):
            cache = PrescoredCache(model.config, evict=evict, refresh_every=refresh_every)
            prefill(model, cache, ids[:, :-1], mask[:, :-1])
            cache.save(tmp_path / str(number))
            out = model.generate(
                ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False
            )
        expected.append(out[:, 40:].tolist())
    code = CONTINUE.format(
        folder=str(Path(__file__).parents[2] / "support"),
        cases=[(*case, config.to_dict()) for *case, config in cases],
        tmp=str(tmp_path),
        ids=ids.tolist(),
        mask=mask.tolist(),
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.strip().splitlines()[-4:]] == expected


def test_a_loaded_cache_goes_on_refreshing(model, tmp_path):
    ids, _ = prompts(length=40, side="none")
    with prescore.apply(model, COARSE):
        cache = PrescoredCache(model.config, refresh_every=3)
        prefill(model, cache, ids)
        steps(model, cache, ids[:, :1])
        cache.save(tmp_path / "cache")
        loaded = PrescoredCache.load(tmp_path / "cache")
        assert loaded.layers[0].state.config == COARSE
        expected, got = steps(model, cache, ids[:, 1:4]), steps(model, loaded, ids[:, 1:4])
        assert loaded.layers[0].state.n_selected_from == 44
    assert torch.equal(got, expected)


def test_exact_layers_need_all_keys(model):
    ids, _ = prompts(length=40, side="none")
    cache = PrescoredCache(model.config, evict=True)
    with prescore.apply(model, {0: COARSE, 1: Exact()}):
        prefill(model, cache, ids)
        steps(model, cache, ids[:, :2])
    assert [layer.evicted for layer in cache.layers] == [True, False]
    with prescore.apply(model, Exact()), pytest.raises(Unsupported, match="evicted the unselected"):
        steps(model, cache, ids[:, :1])


def test_other_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    whole = (tmp_path / "other.safetensors").read_bytes()
    contents = {"other": whole, "cut": whole[:-1], "text": b"Call me Ishmael.", "nothing": b""}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    save_file({"a": torch.zeros(1)}, tmp_path / "list", metadata={"prescore": "[1]"})
    save_file({"a": torch.zeros(1)}, tmp_path / "broken", metadata={"prescore": "{"})
    for name in (*contents, "list", "broken"):
        with pytest.raises(ValueError, match=rf"path must be a file of PrescoredCache.save, got '.*{name}'"):
            PrescoredCache.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        PrescoredCache.load(tmp_path / "missing")
