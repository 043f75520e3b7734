"""Run transformers' own tests with pre-scored attention under the name of sdpa.

    python tools/transformers_suite.py CHECKOUT --model llama --model qwen2

runs the test files of these models in a checkout of transformers twice, with sdpa and with ours under its name,
and lists what fails with ours alone. A refusal (`Unsupported`) is listed apart. A test counts as reached only if
it called attention; many tests of a model file do not.

Texts of the tests are short, and the default is exact there. Two configurations split every text and must still
equal exact attention: `--config '{"type": "Selected", "top_k": 1.0, "sinks": 0, "min_seq_len": 2}'`, blocks of two
tokens of which every key is kept; and `--config '{"type": "Routed", "min_weight": 1.0, "cluster_size": 1,
"chunk_size": 2, "sinks": 1, "exact_until": 0}'`, where every centroid represents one key. `-k` selects tests.
`--on-unsupported exact` is that of `prescore.apply`. Tests that compare two ways to run a model also pass with an
approximation, because with their weights (deviation 0.02) all keys weigh nearly the same; `initializer_range=0.3`
in the model's tester makes them notice.

Without a clone, `pip download --no-deps --no-binary :all: transformers==5.22.2` has the common tests of models.
Add below its `tests`, each folder with an `__init__.py`:

- `utils/test_configuration_utils.py` with `config_common_kwargs`, values that any configuration takes;
- `exporters/test_export.py` with an empty class `ExportTesterMixin`;
- `generation/test_utils.py` with an empty class `GenerationTesterMixin`, or one with tests of `generate`;
- `models/llama/test_modeling_llama.py`, ...: a `TestCase` on `ModelTesterMixin` of
  `tests/test_modeling_common.py`, with a `model_tester` that makes a tiny configuration and inputs.

The module is also the pytest plugin of these runs: it replaces sdpa, and notes in a JSON file what each test did.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from prescore.config import Routed, config_from_dict

FILE = Path(__file__).resolve()
Notes = dict[str, dict[str, Any]]
"""What each test did, by name: `outcome`, `said`, and `calls` of attention."""
SDPA = "sdpa"
"""As configuration: sdpa stays, and is only counted."""
REFUSAL = "prescore.errors.Unsupported: "
"""torch.compile has an `Unsupported` too."""
USUAL_EXITS = (0, 1, 5)
"""All passed, some failed, none collected."""


def compare(usual: Notes, ours: Notes) -> dict[str, list[str]]:
    """Names of tests by what they did in both runs, from the notes of each."""
    groups: dict[str, list[str]]
    groups = {name: [] for name in ("passed", "refused", "fail with both", "fail with prescore alone", "skipped")}
    for name, test in ours.items():
        kind = test["outcome"]
        if kind == "failed" and usual.get(name, {}).get("outcome") == "failed":
            kind = "fail with both"
        elif kind == "failed":
            is_refused = all(REFUSAL in said for said in test["said"])
            kind = "refused" if is_refused else "fail with prescore alone"
        groups[kind].append(name)
    return groups


def run_tests(checkout: Path, models: list[str], config: str, options: list[str]) -> Notes:
    """What each test of some models did under a configuration, as `_Notes` writes it."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        folders = [(checkout / "tests" / "models" / model).resolve() for model in models]
        files = [str(path) for folder in folders for path in sorted(folder.glob("test_modeling_*.py"))]
        settings = [f"--prescore-report={report}", f"--prescore-config={config}", *options]
        command = [sys.executable, "-m", "pytest", "-p", FILE.stem, "-q", *settings, *files]
        paths = os.pathsep.join((str(FILE.parent), os.environ.get("PYTHONPATH", "")))
        environment = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in USUAL_EXITS or not report.exists():
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
            raise RuntimeError(f"the tests of {checkout} must run, got exit code {done.returncode}:\n{tail}")
        return json.loads(report.read_text())


def main() -> int:
    """The command; 1 = something fails with ours alone, 2 = nothing could run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of transformers")
    parser.add_argument("--model", action="append", required=True, help="folder of tests/models; may be repeated")
    parser.add_argument("--config", help="JSON of a configuration; default: Routed()")
    parser.add_argument("--on-unsupported", choices=("raise", "exact"), default="raise", help="as in apply")
    parser.add_argument("-k", dest="keyword", default="", help="as pytest's -k")
    given = parser.parse_args()
    config = given.config or json.dumps(Routed().to_dict())
    try:
        config_from_dict(json.loads(config))  # a wrong one is refused before any test runs
        for model in given.model:
            if not (given.checkout / "tests" / "models" / model).is_dir():
                raise FileNotFoundError(f"model must be a folder of {given.checkout}/tests/models, got {model!r}")
        options = [f"--prescore-on-unsupported={given.on_unsupported}", "-k", given.keyword]
        usual, ours = (run_tests(given.checkout, given.model, each, options) for each in (SDPA, config))
    except (OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    groups = compare(usual, ours)
    ran = [test for test in ours.values() if test["outcome"] != "skipped"]
    n_reached = sum(test["calls"] > 0 for test in ran)
    lines = [f"{len(ran)} tests, {n_reached} reached prescore, {len(groups['passed'])} passed"]
    for kind in ("refused", "fail with both", "fail with prescore alone"):
        lines += [f"{len(groups[kind])} {kind}", *(f"  {name}" for name in groups[kind])]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if groups["fail with prescore alone"] else 0


# The plugin.


def pytest_addoption(parser: Any) -> None:
    """Where to write, the configuration as JSON, and what happens to unsupported features."""
    parser.addoption("--prescore-report", required=True)
    parser.addoption("--prescore-config", default=SDPA)
    parser.addoption("--prescore-on-unsupported", default="raise")


def pytest_configure(config: Any) -> None:
    """Replace sdpa before any test is collected."""
    notes = _Notes(Path(config.getoption("--prescore-report")))
    replace_sdpa(notes, config.getoption("--prescore-config"), config.getoption("--prescore-on-unsupported"))
    config.pluginmanager.register(notes)


class _Notes:
    """What each test did."""

    def __init__(self, path: Path) -> None:
        self.path, self.running = path, ""
        self.calls: dict[str, int] = defaultdict(int)
        self.tests: Notes = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Remember which test runs."""
        self.running = nodeid

    def pytest_runtest_setup(self) -> None:
        """Seed both runs alike."""
        from transformers import set_seed

        set_seed(0)
        for name, module in list(sys.modules.items()):
            if name.endswith("test_modeling_common"):
                module.global_rng.seed(0)  # where transformers' tests draw their inputs

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the worst outcome: a test passes where its parts (unittest's subTest) fail, which report first."""
        said, known = report.longreprtext[-2000:], self.tests.get(report.nodeid, {})
        is_part = hasattr(report, "context")
        is_whole = not is_part and (report.when == "call" or report.outcome == "skipped")
        if known.get("outcome") != "failed" and (is_whole or report.outcome == "failed"):
            self.tests[report.nodeid] = {"outcome": report.outcome, "said": [said]}
        elif is_part and report.outcome == "failed":
            known["said"].append(said)

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        found = {name: {**test, "calls": self.calls[name]} for name, test in self.tests.items()}
        self.path.write_text(json.dumps(found))


def replace_sdpa(notes: _Notes, config: str, on_unsupported: str) -> None:
    """Register attention and mask under transformers' name `sdpa`; every call counts for the test that runs."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface

    from prescore.integrations.transformers import attention as ours

    attend, made = AttentionInterface._global_mapping[SDPA], None
    if config != SDPA:
        attend, made = ours.prescored_attention_forward, config_from_dict(json.loads(config))
        AttentionMaskInterface.register(SDPA, ours.prescored_mask)

    # a graph counts while it is traced; a changing number would have it traced again at every call
    @torch.compiler.assume_constant_result
    def count() -> None:
        notes.calls[notes.running] += 1

    def counted(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        count()
        if made is not None:
            ours.default_patch(module, made, on_unsupported)
        return attend(module, *args, **kwargs)

    AttentionInterface.register(SDPA, counted)


if __name__ == "__main__":
    sys.exit(main())
