"""A cache and an application through any order of operations, against a twin that has no state to get wrong.

`make stateful RUNS=1000` runs longer, with fresh seeds.
"""

import copy
import os

import hypothesis.strategies as st
import pytest
import torch
from breaks import Break
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from routed_checks import needs_native
from tiny_models import VOCABULARY, tiny

import prescore
from prescore import Exact, Routed, Selected
from prescore.errors import Unsupported
from prescore.integrations.transformers import PrescoredCache

RUNS = int(os.environ.get("STATEFUL_RUNS", "25"))
FIXED = "STATEFUL_RUNS" not in os.environ
SETTINGS = settings(max_examples=RUNS, stateful_step_count=20, deadline=None, database=None, derandomize=FIXED)
SETTINGS = settings(SETTINGS, suppress_health_check=list(HealthCheck))
CONFIGS = {
    # with room for every key, so that a selection reads all of them
    "selected": Selected("key-norm", top_k=10_000, sinks=2),
    "without centroids": Selected("kmeans", top_k=10_000, sinks=0, remainder="none"),
    "routed": Routed(),
}
CLOSE = 1e-9
"""Of float64 logits."""
FAR = Routed(min_weight=1e-6, cluster_size=16, chunk_size=16, sinks=2, exact_until=16)
CLOSE_INT8 = 0.25
"""Root of the mean squared error of logits, of which the mean square is 5: rounding moves the worst call by 0.09,
and single logits by 0.7. Every far key of some weight is read, so that rounding chooses no others."""


class CacheMachine(RuleBasedStateMachine):
    """A cache under pre-scored attention, and an exact model that reads all tokens at every call."""

    model = twin = None  # made once
    close, options = CLOSE, {}

    @staticmethod
    def error(differences):
        return float(differences.abs().max())

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
        self._begin(CONFIGS[name], name, evict, refresh_every, batch, length, padding, seed)

    def _begin(self, config, name, evict, refresh_every, batch, length, padding, seed):
        self.evict = evict and name != "routed"
        plain = self.evict or name == "routed"  # a refresh would do nothing
        self.cache = PrescoredCache(
            evict=self.evict, refresh_every=None if plain else refresh_every, **self.options
        )
        self.applied = prescore.apply(self.model, config)
        self.generator = torch.Generator().manual_seed(seed)
        self.ids = torch.zeros(batch, 0, dtype=torch.int64)
        self.mask = torch.zeros(batch, 0, dtype=torch.int64)
        real = torch.ones(batch, length, dtype=torch.int64)
        real[0, : min(padding, length - 1)] = 0
        self._forward(length, real)

    def teardown(self):
        if hasattr(self, "applied"):
            self.applied.undo()

    def _forward(self, count, real=None):
        """New tokens: through the cache, and by the twin over all of them."""
        batch = self.ids.shape[0]
        ids = torch.randint(2, VOCABULARY, (batch, count), generator=self.generator)
        real = torch.ones(batch, count, dtype=torch.int64) if real is None else real
        self.ids, self.mask = torch.cat((self.ids, ids), 1), torch.cat((self.mask, real), 1)
        mask = None if bool(self.mask.all()) else self.mask
        with torch.no_grad():
            found = self.model(ids, attention_mask=mask, past_key_values=self.cache).logits
            expected = self.twin(self.ids, attention_mask=mask, use_cache=False).logits[:, -count:]
        assert self.error((found - expected)[real.bool()]) <= self.close

    def _take(self, index):
        self.ids, self.mask = self.ids[index], self.mask[index]

    @rule(count=st.integers(1, 4))
    def step(self, count):
        self._forward(count)

    @precondition(lambda self: not self.evict)
    @rule()
    def long_chunk(self):
        self._forward(40)

    @rule(count=st.integers(0, 6))
    def crop(self, count):
        length = self.ids.shape[1]
        left = max(1, length - count)
        try:
            self.cache.crop(left - length)
        except Unsupported:  # keys that were selected from are gone
            assert self.evict
            return
        self.ids, self.mask = self.ids[:, :left], self.mask[:, :left]

    @rule(seed=st.integers(0, 100), count=st.integers(1, 4))
    def take_sequences(self, seed, count):
        index = torch.randint(self.ids.shape[0], (count,), generator=torch.Generator().manual_seed(seed))
        self.cache.batch_select_indices(index)
        self._take(index)

    @rule(seed=st.integers(0, 100))
    def reorder(self, seed):
        index = torch.randperm(self.ids.shape[0], generator=torch.Generator().manual_seed(seed))
        self.cache.reorder_cache(index)
        self._take(index)

    @precondition(lambda self: self.ids.shape[0] <= 2)
    @rule()
    def repeat_sequences(self):
        self.cache.batch_repeat_interleave(2)
        self._take(torch.arange(self.ids.shape[0]).repeat_interleave(2))

    @rule()
    def select(self):
        self.cache.select()

    @rule()
    def save_and_load(self):
        self.cache.save(self.folder / "cache.safetensors")
        self.cache = PrescoredCache.load(self.folder / "cache.safetensors")

    @rule()
    def deep_copy(self):
        self.cache = copy.deepcopy(self.cache)

    @invariant()
    def length(self):
        if hasattr(self, "cache"):
            assert self.cache.get_seq_length() == self.ids.shape[1]


@pytest.fixture(name="machine")
def cache_machine(tmp_path):
    """The machine with its models; the longest text has room in them."""
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 1024}
    CacheMachine.model, CacheMachine.twin = (tiny("Llama", **sizes).double() for _ in range(2))
    CacheMachine.folder = tmp_path
    return CacheMachine


def test_caches_through_any_order_of_operations(machine):
    run_machine(machine, settings=SETTINGS)


class Int8CacheMachine(CacheMachine):
    """A cache with int8 rows, and a model that attends to all tokens at every call by the same configuration."""

    close, options = CLOSE_INT8, {"dtype": torch.int8}

    @staticmethod
    def error(differences):
        return float(differences.square().mean().sqrt())

    @initialize(
        batch=st.integers(1, 3), length=st.integers(40, 90), padding=st.integers(0, 3), seed=st.integers(0, 99)
    )
    def begin(self, batch, length, padding, seed):
        self._begin(FAR, "routed", False, None, batch, length, padding, seed)


@pytest.fixture(name="int8_machine")
def int8_cache_machine(tmp_path):
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 1024, "hidden_size": 64, "head_dim": 16}
    Int8CacheMachine.model, Int8CacheMachine.twin = (tiny("Llama", **sizes) for _ in range(2))
    Int8CacheMachine.folder = tmp_path
    with prescore.apply(Int8CacheMachine.twin, FAR):
        yield Int8CacheMachine


@needs_native
def test_caches_with_int8_rows_through_any_order_of_operations(int8_machine):
    run_machine(int8_machine, settings=settings(SETTINGS, max_examples=max(1, RUNS // 3)))


@needs_native
def test_rows_that_are_not_reordered_are_noticed(int8_machine, monkeypatch):
    right, wrong = (f"index_select(0, {rows}) for rows in self._rows" for rows in ("sequences", "sequences * 0"))
    Break("integrations.decode", right, wrong).apply(monkeypatch)
    quick = settings(SETTINGS, max_examples=1000, phases=[Phase.generate], print_blob=False)
    with pytest.raises(AssertionError, match=rf"assert .* <= {CLOSE_INT8}"):
        run_machine(int8_machine, settings=quick)


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
    run_machine(ApplyMachine, settings=settings(SETTINGS, max_examples=max(1, RUNS // 3)))


WRONG_NUMBER, OTHER_BATCH = (
    rf"assert .* <= {CLOSE}",
    "must be of as many sequences and heads as the inputs|path must be a file of PrescoredCache.save",
)
BREAKS = {
    "a crop keeps the selection": (
        Break("integrations.decode", "self.selection.crop(n_tokens - self.selection.n_selected_from)", "pass"),
        f"{WRONG_NUMBER}|path must be a file of PrescoredCache.save",
    ),
    "the selection is not reordered": (
        Break("integrations.decode", "self.selection.buffer.take(sequences)", "pass"),
        f"{WRONG_NUMBER}|{OTHER_BATCH}",
    ),
    "sequences are not repeated": (
        Break("integrations.transformers.cache", "repeat_interleave(repeats))", "repeat_interleave(1))"),
        f"{OTHER_BATCH}|indices must lie between 0 and",
    ),
}
"""What is broken, and how it is noticed."""


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_of_the_cache_is_noticed(name, machine, monkeypatch):
    change, noticed = BREAKS[name]
    change.apply(monkeypatch)
    quick = settings(SETTINGS, max_examples=1000, phases=[Phase.generate], print_blob=False)
    with pytest.raises((AssertionError, ValueError), match=noticed):
        run_machine(machine, settings=quick)
