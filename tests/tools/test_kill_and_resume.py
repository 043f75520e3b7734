"""Killed commands and full disks, a few times each; `python tools/kill_and_resume.py` does it often."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent.parent / "tools" / "kill_and_resume.py"


@pytest.fixture
def tool(monkeypatch):
    spec = importlib.util.spec_from_file_location("kill_and_resume", TOOL)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kill_and_resume", module)  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="commands are killed as forked processes")
def test_commands_survive_kills_and_full_disks():
    # a process of its own: one with threads must not fork
    few = ["--kills", "2", "--disks", "1", "--command", "perplexity", "--command", "speed"]
    command = [sys.executable, str(TOOL), *few]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["perplexity", "speed"]
    assert all("2 kills" in line and "1 full disks" in line for line in lines)


def record(key, **results):
    return json.dumps({"key": key, "results": results}) + "\n"


def test_rows_lost_repeated_or_changed_are_noticed(tool, tmp_path):
    whole = object.__new__(tool.Undisturbed)
    path = tmp_path / "records.jsonl"
    path.write_text(record("a", loss=1.0, seconds=2.0) + record("b", loss=[3.0, 4.0], seconds=5.0))
    whole.paths = set(tool._results(tmp_path))
    whole.fixed = {name: value for name, value in tool._results(tmp_path).items() if "seconds" not in name}
    assert whole.fixed == {"a/loss": 1.0, "b/loss/0": 3.0, "b/loss/1": 4.0}
    a, b = record("a", loss=1.0, seconds=7.0), record("b", loss=[3.0, 4.0], seconds=6.0)
    path.write_text(b + a)
    whole.compare(tmp_path)
    for wrong, said in (
        (a, "the same rows"),
        (b + a + a, "once"),
        (b.replace("4.0", "4.5") + a, "another b/loss/1"),
    ):
        path.write_text(wrong)
        with pytest.raises(tool.Disturbed, match=said):
            whole.compare(tmp_path)
