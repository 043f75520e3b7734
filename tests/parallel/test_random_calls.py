"""Random calls of the fuzzer on several ranks: shards of the result of one process, or one refusal everywhere.

`RANK_CALLS=1000 python -m pytest tests/parallel/test_random_calls.py` runs longer.
"""

import os
import random
from dataclasses import replace

import pytest
import torch
from fuzz_cases import random_case
from fuzz_terms import CLOSE, FLIPPED
from parallel_work import attend, joined

import prescore

CALLS = int(os.environ.get("RANK_CALLS", "30"))
NAMES = ("query", "key", "value")


def shared_case(draw, ranks):
    """A case whose sequence lies in equal shards on some ranks."""
    case = random_case(draw)
    n_keys = -(-case.n_keys // ranks) * ranks
    n_query = n_keys if case.n_query == case.n_keys else min(n_keys, -(-case.n_query // ranks) * ranks)
    mask = case.mask if case.mask in ("none", "left", "right", "both") else "none"
    memory = "rows" if case.memory == "negated" else case.memory  # a pending sign is lost between processes
    sizes = {"n_keys": n_keys, "n_query": n_query, "mask": mask, "memory": memory}
    return replace(case, **sizes, dtype=torch.float64, given=False, dropout_p=0.0)


def compare(case, shards, wanted):
    """Shards of all ranks with the result of one process."""
    output, lse, *grads = joined(shards)
    apart = ~((output - wanted[0]).abs().amax(-1) <= CLOSE)
    apart |= ~(((lse - wanted[1]).abs() <= CLOSE) | (lse == wanted[1]))
    assert int(apart.sum()) <= FLIPPED * apart.numel(), (case, int(apart.sum()))
    if bool(apart.any()):
        return  # a flipped choice has other gradients
    for name, own, one in zip(NAMES, grads, wanted[2:5], strict=True):
        torch.testing.assert_close(own, one, rtol=1e-8, atol=1e-8, msg=lambda text, n=name: f"{case}, {n}: {text}")


def check_case(crew, case, ranks):
    """Whether the ranks ran it; raises where they differ from one process."""
    call = (case.config, case.tensors(), case.padding(), case.options())
    found = crew.outcomes(attend, *call, ranks=ranks)
    kinds = {kind for kind, _ in found}
    if kinds == {"raised"} and any(name != "Unsupported" for _, (name, _) in found):
        with pytest.raises(ValueError, match="must|cannot"):
            attend(None, *call)
    elif kinds != {"raised"}:
        assert kinds == {"done"}, (case, found)
        compare(case, [result for _, result in found], attend(None, *call))
    return kinds == {"done"}


def test_random_calls(crew):
    seed, ran = random.SystemRandom().randrange(2**31), 0
    print(f"seed {seed}")  # noqa: T201
    for number in range(CALLS):
        draw = random.Random(f"{seed}/ranks/{number}")
        ranks = draw.choice([2, 3, 4])
        ran += check_case(crew, shared_case(draw, ranks), ranks)
    assert ran >= CALLS // 2, f"seed {seed}: {ran} of {CALLS} calls ran"


def test_a_wrong_shard_is_noticed(crew):
    case = shared_case(random.Random("ranks"), 2)
    case = replace(case, config=prescore.Exact(), n_keys=8, n_query=8, mask="none", backend="auto", scale=0.3)
    assert check_case(crew, case, 2)
    found = crew.run(attend, case.config, case.tensors(), None, case.options(), ranks=2)
    with pytest.raises(AssertionError):
        compare(case, found, attend(None, case.config, case.tensors(), None, {**case.options(), "scale": 0.4}))
