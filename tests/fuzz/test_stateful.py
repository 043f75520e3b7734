"""A cache and an application through any order of operations, against a twin that has no state to get wrong.

`STATEFUL_RUNS=1000 python -m pytest tests/fuzz/test_stateful.py` runs longer.
"""

import copy
import os

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tiny_models import VOCABULARY, tiny

import prescore
from prescore import Exact, Routed, Selected
from prescore.errors import Unsupported
from prescore.integrations.attention import AttentionContext, PrescoredAttention
from prescore.integrations.decode import KVBuffer, LayerCache
from prescore.integrations.transformers.cache import PrescoredCache, PrescoredLayer

RUNS = int(os.environ.get("STATEFUL_RUNS", "25"))
SETTINGS = settings(
    max_examples=RUNS,
    stateful_step_count=20,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
HEADS, DIM = 2, 4
CONFIGS = {
    # with room for every key, so that what a selection reads is all there is
    "selected": Selected("key-norm", top_k=10_000, sinks=2),
    "without centroids": Selected("kmeans", top_k=10_000, sinks=0, remainder="none"),
    "routed": Routed(),
}
CLOSE = 1e-10


class CacheMachine(RuleBasedStateMachine):
    """A cache of one layer, and the keys, values and padding that it must stand for."""

    @initialize(
        name=st.sampled_from(sorted(CONFIGS)),
        evict=st.booleans(),
        refresh_every=st.sampled_from([None, 1, 3]),
        batch=st.integers(1, 3),
        length=st.integers(1, 12),
        padding=st.integers(0, 3),
        seed=st.integers(0, 2**20),
    )
    def begin(self, name, evict, refresh_every, batch, length, padding, seed):
        self.evict = evict and name != "routed"
        self.options = {"evict": self.evict, "refresh_every": None if self.evict else refresh_every}
        self.cache = PrescoredCache(**self.options)
        self.attend = PrescoredAttention(CONFIGS[name])
        self.generator = torch.Generator().manual_seed(seed)
        self.key = self.value = torch.zeros(batch, HEADS, 0, DIM, dtype=torch.float64)
        self.valid = torch.zeros(batch, 0, dtype=torch.bool)
        valid = torch.ones(batch, length, dtype=torch.bool)
        valid[0, : min(padding, length - 1)] = False
        self._forward(length, valid)

    def _forward(self, count, valid=None):
        """New tokens: through the cache, and by exact attention over the twin."""
        batch = self.key.shape[0]
        query, key, value = (
            torch.randn(batch, HEADS * groups, count, DIM, generator=self.generator, dtype=torch.float64)
            for groups in (2, 1, 1)
        )
        new = torch.ones(batch, count, dtype=torch.bool) if valid is None else valid
        self.key, self.value = torch.cat((self.key, key), 2), torch.cat((self.value, value), 2)
        self.valid = torch.cat((self.valid, new), 1)
        if self.cache.layers:
            self.layer.is_expected = True  # pre-scored attention follows
        new_key, new_value = self.cache.update(key, value, 0)
        mask = None if bool(self.valid.all()) else self.valid[:, None, None, :]
        context = AttentionContext(layer=0, mask=mask, is_causal=True, cache=self.layer.cache)
        output = self.attend(query, new_key, new_value, context)
        expected = prescore.exact_attention(
            query, self.key, self.value, is_causal=True, key_padding_mask=self.valid
        ).output
        assert float((output - expected)[new[:, None].expand(output.shape[:3])].abs().max()) <= CLOSE

    @property
    def layer(self):
        return self.cache.layers[0]

    @rule(count=st.integers(1, 4))
    def step(self, count):
        self._forward(count)

    @precondition(lambda self: not self.evict)
    @rule()
    def long_piece(self):
        self._forward(40)

    @rule(count=st.integers(0, 6))
    def crop(self, count):
        held = self.layer.cache
        left = max(1, held.n_tokens - count)
        if held.evicted and left < held.selection.n_selected_from:
            before = (held.n_tokens, held.selection.buffer.length)
            with pytest.raises(Unsupported, match="removes keys that were selected from"):
                self.layer.crop(left - held.n_tokens)
            assert (held.n_tokens, held.selection.buffer.length) == before
            return
        self.layer.crop(left - held.n_tokens)
        self.key, self.value, self.valid = self.key[:, :, :left], self.value[:, :, :left], self.valid[:, :left]

    @rule(seed=st.integers(0, 100), n_rows=st.integers(1, 4))
    def take_rows(self, seed, n_rows):
        batch = self.key.shape[0]
        index = torch.randint(batch, (n_rows,), generator=torch.Generator().manual_seed(seed))
        self.cache.batch_select_indices(index)
        self.key, self.value, self.valid = self.key[index], self.value[index], self.valid[index]

    @rule(seed=st.integers(0, 100))
    def reorder(self, seed):
        index = torch.randperm(self.key.shape[0], generator=torch.Generator().manual_seed(seed))
        self.cache.reorder_cache(index)
        self.key, self.value, self.valid = self.key[index], self.value[index], self.valid[index]

    @precondition(lambda self: self.key.shape[0] <= 2)
    @rule()
    def repeat_rows(self):
        self.cache.batch_repeat_interleave(2)
        self.key, self.value, self.valid = (
            t.repeat_interleave(2, dim=0) for t in (self.key, self.value, self.valid)
        )

    @rule()
    def select(self):
        self.cache.select()

    @rule()
    def save_and_load(self):
        path = self.folder / "cache.safetensors"
        self.cache.save(path)
        self.cache = PrescoredCache.load(path)

    @rule()
    def deep_copy(self):
        self.cache = copy.deepcopy(self.cache)

    @invariant()
    def counts(self):
        if hasattr(self, "cache"):
            assert self.cache.get_seq_length() == self.layer.cache.n_tokens == self.key.shape[2]
            if self.layer.cache.buffer is not None:
                assert torch.equal(self.layer.cache.buffer.key, self.key)


def test_caches_through_any_order_of_operations(tmp_path):
    CacheMachine.folder = tmp_path
    run_state_machine_as_test(CacheMachine, settings=SETTINGS)


SETTINGS_OF_APPLY = {
    "selected": Selected("key-norm", top_k=2, sinks=1, min_seq_len=4),
    "routed": Routed(min_weight=1 / 4, cluster_size=2, chunk_size=2, sinks=1, exact_until=0),
    "exact": Exact(),
}
IDS = torch.randint(2, VOCABULARY, (2, 14), generator=torch.Generator().manual_seed(0))


def _logits(model):
    with torch.no_grad():
        return model(IDS).logits


def _fresh_models():
    """Two models with weights of their own that share one configuration object."""
    first = tiny("Llama", num_hidden_layers=1)
    torch.manual_seed(1)
    return first, type(first)(first.config).eval()


class ApplyMachine(RuleBasedStateMachine):
    """Applications to two models that share a configuration, undone in any order."""

    table: dict = None  # (model, configuration or None) -> logits, each from an application of its own

    def __init__(self):
        super().__init__()
        self.models = _fresh_models()
        self.shared = self.models[0].config
        self.active = []

    @rule(number=st.integers(0, 1), name=st.sampled_from(sorted(SETTINGS_OF_APPLY)), inside=st.booleans())
    def apply(self, number, name, inside):
        model = self.models[number]
        applied = prescore.apply(model.model if inside else model, SETTINGS_OF_APPLY[name])
        self.active.append((number, name, applied))

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def undo(self, data):
        applied = self.active.pop(data.draw(st.integers(0, len(self.active) - 1)))[2]
        applied.undo()
        applied.undo()

    @rule(number=st.integers(0, 1))
    def change_setting(self, number):
        config = self.models[number].config
        config.use_cache = not config.use_cache

    @invariant()
    def newest_acts(self):
        for number, model in enumerate(self.models):
            names = [name for own, name, _ in self.active if own == number]
            assert torch.equal(_logits(model), self.table[number, names[-1] if names else None])

    def teardown(self):
        for _, _, applied in self.active:
            applied.undo()
        for model in self.models:
            assert model.config is model.model.config is self.shared
            assert not [name for m in model.modules() for name in vars(m) if name.startswith("_prescore")]
            assert not any(module._forward_pre_hooks for module in model.modules())
        assert self.shared._attn_implementation == "sdpa"


def test_applications_through_any_order():
    ApplyMachine.table = {}
    for number, model in enumerate(_fresh_models()):
        ApplyMachine.table[number, None] = _logits(model)
        for name, config in SETTINGS_OF_APPLY.items():
            with prescore.apply(model, config):
                ApplyMachine.table[number, name] = _logits(model)
    # a run asks the models at every step
    run_state_machine_as_test(ApplyMachine, settings=settings(SETTINGS, max_examples=max(1, RUNS // 2)))


BREAKS = {
    "a crop keeps the selection": lambda patch: patch.setattr(LayerCache, "crop", lambda self, n_tokens: None),
    "rows are not reordered": lambda patch: patch.setattr(KVBuffer, "take", lambda self, sequences: None),
    "padding is lost with the rows": lambda patch: patch.setattr(
        PrescoredLayer, "batch_repeat_interleave", lambda self, repeats: None
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_of_the_cache_is_noticed(name, tmp_path, monkeypatch):
    BREAKS[name](monkeypatch)
    CacheMachine.folder = tmp_path
    quick = settings(SETTINGS, max_examples=200, phases=[Phase.generate], database=None, print_blob=False)
    # a wrong number, a shape that no longer fits, or a refusal that did not come, for which pytest has a kind
    with pytest.raises(BaseException):  # noqa: B017, PT011
        run_state_machine_as_test(CacheMachine, settings=quick)
