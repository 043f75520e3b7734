"""500 random calls at every run, with a fresh seed; any number by `make fuzz CALLS=20000`."""

import random

import pytest
import torch
from fuzz_cases import Case, random_case
from fuzz_oracles import ORACLES

import prescore
from fuzz import refute, run_case, shrink
from prescore import Exact, Hyper, KMeans, Lsh, Routed, Selected

CALLS = 500
PARTS = 10


@pytest.fixture(scope="module")
def seed():
    return random.SystemRandom().randrange(2**31)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls_hold(part, seed):
    for number in range(part * CALLS // PARTS, (part + 1) * CALLS // PARTS):
        failure = run_case(seed, number)
        assert failure is None, f"make fuzz SEED={seed} FIRST={number} CALLS=1: {shrink(failure)}"


def test_a_case_is_its_seed_and_its_text():
    names = {name: getattr(prescore, name) for name in prescore.__all__}
    for number in range(50):
        case = random_case(random.Random(f"0/{number}"))
        assert case == random_case(random.Random(f"0/{number}"))
        assert eval(repr(case), {**names, "Case": Case, "torch": torch}) == case


def test_every_oracle_and_every_field_has_its_turn():
    cases = [random_case(random.Random(f"1/{number}")) for number in range(1500)]
    for kind in (Routed, Selected, Hyper, Exact):
        configs = [case.config for case in cases if type(case.config) is kind]
        assert configs
        for name in vars(kind()):
            assert len({repr(getattr(config, name)) for config in configs}) > 1, name
    assert {case.mask for case in cases} >= {"left", "right", "both", "holes"}
    assert {case.dtype for case in cases} >= {torch.float16, torch.bfloat16}
    assert any(case.given for case in cases)


def test_a_failure_is_made_small(monkeypatch):
    def wrong(case):
        assert not (isinstance(case.config, Selected) and case.n_keys > 20 and case.mask == "left"), "too long"

    monkeypatch.setitem(ORACLES, "dense", wrong)
    config = Selected(KMeans(n_clusters=3), 0.4, inner=Lsh(8, 4, 3, "rank"), min_seq_len=4)
    large = Case(config, n_keys=100, n_query=40, batch=3, mask="left", group=3, dropout_p=0.3, scale=2.0, seed=5)
    small = shrink(refute("dense", large)).case
    assert (small.n_keys, small.batch, small.group, small.mask) == (21, 1, 1, "left")
    assert (small.scale, small.dropout_p) == (None, 0.0)
