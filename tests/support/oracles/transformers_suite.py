"""Run transformers' own tests with pre-scored attention under the name of sdpa.

    python -m oracles.transformers_suite CHECKOUT --model llama --model qwen2

runs the test files of these models in a checkout of transformers twice, with sdpa and with ours under its name,
and lists what fails with ours alone. A refusal (`Unsupported`) is listed apart. A test counts as reached only if
it called attention; many tests of a model file do not. docs/integrations.md says how to get such a checkout.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracles.transformers_plugin import CONFIG, ON_UNSUPPORTED, REPORT, SDPA

from prescore.config import Routed, config_from_dict

_PLUGIN = "oracles.transformers_plugin"
_REFUSAL = "prescore.errors.Unsupported: "  # torch.compile has an Unsupported too
_USUAL_EXITS = (0, 1, 5)  # all passed, some failed, none collected


@dataclass(frozen=True)
class SuiteResult:
    """Names of tests, by outcome of two runs.

    Attributes:
        n_tests: Tests that ran with ours.
        n_reached: Those of them that called our attention.
        passed: Passed with ours.
        refused: Do not fail with sdpa, and are refused by name with ours.
        broken: Do not fail with sdpa, and fail with ours in another way.
        fail_with_both: Fail with both.
    """

    n_tests: int
    n_reached: int
    passed: list[str]
    refused: list[str]
    broken: list[str]
    fail_with_both: list[str]

    def __str__(self) -> str:
        lines = [f"{self.n_tests} tests, {self.n_reached} reached prescore, {len(self.passed)} passed"]
        kinds = {
            "refused": self.refused,
            "fail with both": self.fail_with_both,
            "fail with prescore alone": self.broken,
        }
        for kind, names in kinds.items():
            lines.append(f"{len(names)} {kind}")
            lines += [f"  {name}" for name in names]
        return "\n".join(lines)


def run_suite(
    checkout: Path,
    models: Sequence[str],
    *,
    config: str | None = None,
    on_unsupported: str = "raise",
    options: Sequence[str] = (),
) -> SuiteResult:
    """Run the test files of some models with sdpa and with ours.

    Args:
        checkout: A checkout of transformers; its `tests/models` is read.
        models: Folders below it, such as `llama`.
        config: How to attend, as JSON of a configuration; None = the default.
        on_unsupported: What cannot be honoured raises, or runs exactly (`exact`).
        options: More arguments of pytest, such as `-k generate`.
    """
    folders = [checkout / "tests" / "models" / model for model in models]
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"model must be a folder of {folder.parent}, got {folder.name!r}")
    chosen = json.dumps(Routed().to_dict()) if config is None else config
    config_from_dict(json.loads(chosen))  # a wrong one is refused before any test runs
    usual = _run(checkout, folders, SDPA, options)
    ours = _run(checkout, folders, chosen, [f"{ON_UNSUPPORTED}={on_unsupported}", *options])
    failed = [name for name, test in ours.items() if test["outcome"] == "failed"]
    with_both = [name for name in failed if usual.get(name, {}).get("outcome") == "failed"]
    worse = [name for name in failed if name not in with_both]
    refused = [name for name in worse if all(_REFUSAL in said for said in ours[name]["said"])]
    ran = [test for test in ours.values() if test["outcome"] != "skipped"]
    return SuiteResult(
        n_tests=len(ran),
        n_reached=sum(test["calls"] > 0 for test in ran),
        passed=[name for name, test in ours.items() if test["outcome"] == "passed"],
        refused=refused,
        broken=[name for name in worse if name not in refused],
        fail_with_both=with_both,
    )


def _run(checkout: Path, folders: Sequence[Path], config: str, options: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [sys.executable, "-m", "pytest", "-p", _PLUGIN, "-q", f"{REPORT}={report}", f"{CONFIG}={config}"]
        files = [str(path.resolve()) for folder in folders for path in sorted(folder.glob("test_modeling_*.py"))]
        done = subprocess.run(
            [*command, *options, *files], cwd=checkout, capture_output=True, text=True, check=False
        )
        if done.returncode not in _USUAL_EXITS or not report.exists():
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
            raise RuntimeError(f"the tests of {checkout} must run, got exit code {done.returncode}:\n{tail}")
        found: dict[str, Any] = json.loads(report.read_text())
        return found


def suite_command(argv: Sequence[str] | None = None) -> int:
    """The command; 1 = something fails with ours alone."""
    parser = argparse.ArgumentParser(prog="python -m oracles.transformers_suite")
    parser.add_argument("checkout", type=Path, help="a checkout of transformers")
    parser.add_argument(
        "--model", action="append", required=True, help="a folder of tests/models; may be repeated"
    )
    parser.add_argument("--config", help="JSON of a configuration; default: Routed()")
    parser.add_argument(
        "--on-unsupported", choices=("raise", "exact"), default="raise", help="as in prescore.apply"
    )
    parser.add_argument("-k", dest="keyword", help="as pytest's -k")
    arguments = parser.parse_args(argv)
    options = [] if arguments.keyword is None else ["-k", arguments.keyword]
    try:
        result = run_suite(
            arguments.checkout,
            arguments.model,
            config=arguments.config,
            on_unsupported=arguments.on_unsupported,
            options=options,
        )
    except (OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{result}\n")
    return 1 if result.broken else 0


if __name__ == "__main__":
    sys.exit(suite_command())
