"""CI runs what developers run: every command of a workflow is a make target or a script of the repository."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
MAKEFILE = (ROOT / "Makefile").read_text()
JOBS = [(file, name, job) for file, workflow in WORKFLOWS.items() for name, job in workflow["jobs"].items()]
COMMANDS = sorted(
    {line for _, _, job in JOBS for step in job["steps"] for line in step.get("run", "").splitlines()}
)


def matrix_values(command):
    """The command once for every value of a matrix that it names."""
    names = set(re.findall(r"\$\{\{ matrix\.(\w+) \}\}", command))
    values = {
        name: {each for _, _, job in JOBS for each in job.get("strategy", {}).get("matrix", {}).get(name, ())}
        for name in names
    }
    for name in names:
        assert values[name], f"no job has a matrix of {name}"
    return (
        [re.sub(r"\$\{\{ matrix\.\w+ \}\}", each, command) for each in set.union(*values.values())]
        if names
        else [command]
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_a_target_or_a_script(command):
    for line in matrix_values(command):
        program, *words = shlex.split(line)
        if program == "make":
            targets = [word for word in words if "=" not in word]
            variables = [word.partition("=")[0] for word in words if "=" in word]
            assert targets
            assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in targets)
            assert all(re.search(rf"^{name} \?=", MAKEFILE, re.MULTILINE) for name in variables)
        elif program == "python":
            script, *options = words
            shown = subprocess.run(
                [sys.executable, ROOT / script, "--help"], capture_output=True, text=True, check=True
            ).stdout
            assert [option for option in options if option.startswith("--") and option not in shown] == []
        else:
            assert (ROOT / program).stat().st_mode & 0o100


def test_what_is_published_is_built_for_the_oldest_system_that_torch_supports():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    assert {settings[f"manylinux-{machine}-image"] for machine in ("x86_64", "aarch64")} == {"manylinux_2_28"}
    assert "--exclude libgomp.so.1" in settings["linux"]["repair-wheel-command"]
    needs = WORKFLOWS["release.yml"]["jobs"]["publish"]["needs"]
    assert set(needs) == set(WORKFLOWS["release.yml"]["jobs"]) - {"publish"}
