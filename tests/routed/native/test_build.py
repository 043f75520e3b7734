"""How the libraries are built; tests/test_package.py compiles the C files."""

import os
import platform
import re
import subprocess
import sys

import pytest

from prescore.routed.native import library
from prescore.routed.native.build import (
    FOLDER,
    NOT_BUILT,
    build,
    c_files,
    checksum_file,
    find_command,
    is_up_to_date,
    levels_of_machine,
    library_name,
)

COMPILER = """#!/bin/sh
case "$*" in *{unknown}*) echo "error: unknown flag" >&2; exit 1;; esac
while [ "$1" != -o ]; do shift; done
touch "$2"
"""
"""Makes an empty file of everything but one flag."""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    def install(unknown):
        path = tmp_path / "compiler"
        path.write_text(COMPILER.format(unknown=unknown))
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))

    return install


def test_every_level_is_built_and_nothing_is_left_behind(tmp_path, compiler, capfd):
    compiler(unknown="no-such-flag")
    built = build(tmp_path / "out")
    said = f"prescore native: {tmp_path / 'compiler'} built {', '.join(levels_of_machine())}\n"
    assert capfd.readouterr().err == said
    assert [path.name for path in built] == [library_name(level) for level in levels_of_machine()]
    assert sorted((tmp_path / "out").iterdir()) == sorted([*built, *map(checksum_file, built)])


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_level_that_the_compiler_does_not_know_is_left_out(tmp_path, compiler, capfd, monkeypatch, machine):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    *others, last = levels_of_machine()
    compiler(unknown=levels_of_machine()[last][-1])
    built = build(tmp_path / "out")
    assert [path.name for path in built] == [library_name(level) for level in others]
    said, built_line = capfd.readouterr().err.splitlines()
    assert said == f"prescore native: level {last} is left out: error: unknown flag"
    assert built_line.endswith(f"compiler built {', '.join(others)}")


@pytest.mark.parametrize("name", ["/bin/false", "no-such-compiler", "", "none"])
def test_without_a_working_compiler_nothing_is_built(tmp_path, monkeypatch, capfd, name):
    monkeypatch.setenv("CC", name)
    if not name:
        monkeypatch.setenv("PATH", str(tmp_path))
    for old in (tmp_path / library_name("avx2"), checksum_file(tmp_path / library_name("avx2"))):
        old.write_text("of other sources")
    assert build(tmp_path) == []
    (note,) = tmp_path.iterdir()
    message = capfd.readouterr().err
    reason = message.removeprefix("prescore native: not built, plain torch is used: ")
    expected = {"": "no C compiler found (tried cc, gcc, clang)", "none": "made for any system"}.get(name, name)
    assert expected in reason
    assert message.count("\n") == 1
    # who uses what was built is told why
    assert note.read_text() == reason
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    monkeypatch.setattr(library, "_found", {})
    assert library.describe_native() == f"none (not built: {reason.strip()})"


def test_what_compiles_for_no_level_says_why(tmp_path, compiler, capfd):
    compiler(unknown="forward.c")  # an empty file compiles, the sources do not
    assert build(tmp_path / "out") == []
    assert (tmp_path / "out" / NOT_BUILT).read_text().endswith("compiler failed: error: unknown flag\n")
    assert capfd.readouterr().err.count("is left out") == len(levels_of_machine())


def test_levels_follow_the_kind_of_processor():
    levels = ["baseline", "avx2", "avx512", "avx512_bf16"]
    assert list(levels_of_machine("x86_64")) == list(levels_of_machine("AMD64")) == levels
    assert list(levels_of_machine("aarch64")) == list(levels_of_machine("arm64")) == ["baseline", "dotprod"]
    assert levels_of_machine("riscv64") == {"baseline": ()}
    assert set(levels_of_machine("x86_64")["avx2"]) < set(levels_of_machine("x86_64")["avx512"])


def test_a_newer_source_requires_a_new_build(tmp_path):
    sources = [*c_files(), *FOLDER.glob("*.h"), FOLDER / "build.py"]
    newest = max(path.stat().st_mtime for path in sources)
    assert not is_up_to_date(tmp_path)  # there is no library
    library = tmp_path / library_name("baseline")
    library.touch()
    for age, up_to_date in ((newest + 1, True), (newest - 10, False)):
        os.utime(library, (age, age))
        assert is_up_to_date(tmp_path) == up_to_date


def test_building_needs_neither_torch_nor_the_package():
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1]); "
        "sys.exit(' '.join({'torch', 'setuptools', 'prescore'} & set(sys.modules)) or 0)"
    )
    command = [sys.executable, "-c", code, str(FOLDER / "build.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_parallel_region_uses_the_threads_it_may():
    """Compilers without OpenMP know one way to use threads, and it is safe after a fork; see threads.h."""
    with_openmp = [path.name for path in c_files() if re.search(r"#\s*pragma omp|omp_", path.read_text())]
    assert with_openmp == ["threads.c"]


@pytest.mark.parametrize("first", ["exit 1", "exit 0"])
def test_the_next_compiler_is_tried_where_one_makes_no_library(tmp_path, monkeypatch, first):
    """As on macOS, where cc is there before a compiler is installed."""
    for name, text in (("cc", f"#!/bin/sh\n{first}\n"), ("gcc", COMPILER.format(unknown="no-such-flag"))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert find_command()[0] == str(tmp_path / "gcc")


@pytest.mark.parametrize(("system", "suffix"), [("linux", "so"), ("darwin", "dylib"), ("win32", "dll")])
def test_a_library_is_named_as_the_system_names_it(monkeypatch, system, suffix):
    monkeypatch.setattr(sys, "platform", system)
    assert library_name("baseline") == f"prescore_native_baseline.{suffix}"
