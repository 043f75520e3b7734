"""The functional fuzzer: random calls, oracles that hold for any engine, and a small case that shows a failure.

    make fuzz CALLS=20000 SEED=1

Case `k` of seed `s` depends on nothing else, so any one can be run again: `make fuzz SEED=s FIRST=k CALLS=1`.
"""

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from fuzz_cases import Case, random_case
from fuzz_oracles import ORACLES, PassedOver, basics

from prescore import Exact, KeyNorm, Selected
from prescore.errors import Unsupported

SHRINKS_AT_MOST = 150
FAILURES_AT_MOST = 10
ORACLES_OF_A_CASE = 3
BAD_INPUTS = 0.08
"""Share of calls with one thing wrong."""


@dataclass(frozen=True)
class Failure:
    """A case that an oracle refutes."""

    oracle: str
    case: Case
    error: str

    def __str__(self):
        return (
            f"{self.oracle}: {self.error}\n"
            f"  from fuzz import check; from fuzz_cases import Case; from prescore import *; import torch\n"
            f"  check({self.oracle!r}, {self.case!r})"
        )


def check(oracle, case):
    """Run one oracle on one case; raises what is wrong. True unless the case was passed over."""
    try:
        basics(case) if oracle == "basics" else ORACLES[oracle](case)
    except PassedOver:
        return False
    except Unsupported:
        if case.backend != "auto":  # a named backend refuses what it cannot run
            return False
        raise
    return True


def refute(oracle, case):
    """The failure of a case under an oracle; None when it holds."""
    try:
        check(oracle, case)
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        return Failure(oracle, case, f"{type(error).__name__}: {message}")
    return None


def run_case(seed, number, checked=None):
    """The failure of case `number`, if there is one: the basics, and some oracles that apply."""
    draw = random.Random(f"{seed}/{number}")
    case = random_case(draw)
    others = [name for name in ORACLES if name != "bad_input"]
    order = ["bad_input"] if draw.random() < BAD_INPUTS else ["basics", *draw.sample(others, len(others))]
    checked = Counter() if checked is None else checked
    left = 1 + ORACLES_OF_A_CASE
    for oracle in order:
        try:
            applied = check(oracle, case)
        except Exception:
            return refute(oracle, case) or Failure(oracle, case, "fails at times only")
        checked[oracle] += applied
        left -= applied
        if not left:
            break
    return None


def shrink(failure):
    """A smaller case that the same oracle refutes."""
    left, found = SHRINKS_AT_MOST, failure
    while found is not None:
        failure, found = found, None
        for case in _simpler(failure.case):
            left -= 1
            found = refute(failure.oracle, case) if left > 0 else None
            if found is not None:
                break
    return failure


def _simpler(case):
    """Cases with one thing less, the greatest steps first."""
    for name, plain in (
        ("batch", 1), ("kv_heads", 1), ("heads_per_kv", 1), ("mask", "none"), ("scale", None), ("dropout_p", 0.0),
        ("backend", "auto"), ("dtype", torch.float64), ("keys", "gaussian"), ("given", False),
        ("is_causal", False), ("dim", 1), ("value_dim", 1),
    ):  # fmt: skip
        if getattr(case, name) != plain:
            yield replace(case, **{name: plain})
    for n_keys in sorted({1, case.n_keys // 2, case.n_keys * 3 // 4, case.n_keys - 1}):
        if 0 < n_keys < case.n_keys:
            n_query = n_keys if case.n_query == case.n_keys else min(case.n_query, n_keys)
            yield replace(case, n_keys=n_keys, n_query=n_query)
    if case.n_query > 1 and case.n_query != case.n_keys:
        yield replace(case, n_query=1)
    for config in _simpler_configs(case.config):
        yield replace(case, config=config)


def _simpler_configs(config):
    if isinstance(config, Selected) and config.scoring != KeyNorm():
        yield config.replace(scorer=KeyNorm())
    for field in fields(config):
        value, usual = getattr(config, field.name), getattr(type(config)(), field.name)
        if value == usual or (is_dataclass(value) and not isinstance(value, Exact)):
            continue
        try:
            yield config.replace(**{field.name: usual})
        except ValueError:
            continue


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    print(f"fuzzing {options.calls} calls with seed {seed}", flush=True)
    failures, checked, begin = [], Counter(), time.monotonic()
    for number in range(options.first, options.first + options.calls):
        if (found := run_case(seed, number, checked)) is not None:
            failures.append(found)
            print(f"\ncase {number}: {shrink(found)}", flush=True)
            if len(failures) == FAILURES_AT_MOST:
                break
        done = number + 1 - options.first
        if done % 500 == 0:
            print(f"{done} calls, {len(failures)} wrong, {time.monotonic() - begin:.0f} s", flush=True)
    counts = ", ".join(f"{name} {count}" for name, count in checked.items())
    print(f"seed {seed}: {done} calls, {len(failures)} wrong; checked {counts}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
