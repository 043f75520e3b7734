"""tools/versions.py: what is asked of pip, the record and the table; `make wheel` runs all of it."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TOOL = ROOT / "tools" / "versions.py"
versions = runpy.run_path(str(TOOL))


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_names_of_versions_are_looked_up():
    asked = versions["requirement"]
    assert asked("torch", "newest") == "torch"
    assert asked("torch", "2.9.1") == "torch==2.9.1"
    for name, oldest in (("torch", "2.13.0"), ("transformers", "5.18.0")):
        assert asked(name, "pinned") == f"{name}=={pins()[name]}"
        assert asked(name, "oldest") == f"{name}=={oldest}"


def test_other_packages_are_pinned_and_what_is_asked_for_is_not():
    lines = versions["constraints"](["torch==2.9.1", "transformers"]).splitlines()
    assert dict(line.split("==") for line in lines).keys() == pins().keys() - {
        *("torch", "transformers", "torchvision", "timm")
    }


def row(transformers, **results):
    same = {"torch": "2.13.0", "native": "avx2", "python": "3.11", "system": "Linux x86_64", "tests": "tests"}
    return {**same, "transformers": transformers, "result": "works", **results}


def test_a_pair_that_is_tested_again_replaces_its_line(tmp_path):
    save, path = versions["_save"], tmp_path / "new" / "records.jsonl"
    counts = {"passed": 3, "failed": 1, "skipped": 0, "failures": ["a.test"]}
    for each in (row("5.10.0"), row("5.9.0"), row("5.10.0", result="fails", **counts)):
        rows = save(path, each)
    assert rows == [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["transformers"] for each in rows] == ["5.9.0", "5.10.0"]
    table = versions["table"](
        [*rows[::-1], row("transformers==5.9.1", result="not tested", reason="it is not there")]
    )
    _, _, first, second, third, *notes = table.splitlines()
    assert first == "| 2.13.0 | 5.9.0 | 3.11 | Linux x86_64 | avx2 | works |"
    assert third.endswith("| fails: 3 passed, 1 failed, 0 skipped |")
    assert second.endswith("| not tested: it is not there |")
    assert notes == ["", "2.13.0, 5.10.0:", "", "- `a.test`"]


@pytest.mark.slow
def test_what_cannot_be_installed_is_a_line_with_the_reason(tmp_path):
    (tmp_path / "prescore-0-py3-none-any.whl").touch()
    options = ["--wheel", str(tmp_path), "--record", str(tmp_path / "records.jsonl"), "--torch", "0.0.1"]
    done = subprocess.run([sys.executable, TOOL, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "| torch==0.0.1 |" in done.stdout
    assert "not tested: " in done.stdout
