"""The C files compile where a compiler is, and nothing breaks where none is."""

import ctypes
import os
import re
import shutil
import subprocess
import sys

import pytest

from prescore.ops.native.build import ABI, FOLDER, build, is_up_to_date, levels_of_machine, library_name

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler here"
)


@needs_compiler
def test_every_level_is_built_and_says_its_interface(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    built = build(tmp_path)
    assert [path.name for path in built] == [library_name(level) for level in levels_of_machine()]
    assert sorted(tmp_path.iterdir()) == sorted(built)  # nothing is left behind
    assert ctypes.CDLL(str(built[0])).prescore_native_abi() == ABI


@pytest.mark.parametrize("compiler", ["/bin/false", "no-such-compiler"])
def test_without_a_working_compiler_nothing_is_built(tmp_path, monkeypatch, capfd, compiler):
    monkeypatch.setenv("CC", compiler)
    (tmp_path / library_name("avx2")).write_text("of other sources")
    assert build(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    said = capfd.readouterr().err
    assert said.startswith("prescore native: not built, plain torch is used: ")
    assert compiler in said
    assert said.count("\n") == 1


def test_without_any_compiler_nothing_is_built(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build(tmp_path / "out") == []
    assert "no C compiler found (tried cc, gcc, clang)" in capfd.readouterr().err


@needs_compiler
@pytest.mark.skipif(len(levels_of_machine()) == 1, reason="one level only is built for this processor")
def test_a_level_that_the_compiler_does_not_know_is_left_out(tmp_path, monkeypatch, capfd):
    compiler = tmp_path / "old-compiler"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *vnni*) echo "error: what is vnni?" >&2; exit 1;; esac\nexec cc "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    built = build(tmp_path / "out")
    assert [path.name for path in built] == [library_name("baseline"), library_name("avx2")]
    assert capfd.readouterr().err == "prescore native: level avx512 is left out: error: what is vnni?\n"


def test_levels_follow_the_kind_of_processor():
    assert list(levels_of_machine("x86_64")) == list(levels_of_machine("AMD64")) == ["baseline", "avx2", "avx512"]
    assert levels_of_machine("aarch64") == levels_of_machine("riscv64") == {"baseline": ()}
    assert set(levels_of_machine("x86_64")["avx2"]) < set(levels_of_machine("x86_64")["avx512"])


def test_a_newer_source_asks_for_a_new_build(tmp_path):
    sources = [*FOLDER.glob("*.c"), *FOLDER.glob("*.h"), FOLDER / "build.py"]
    newest = max(path.stat().st_mtime for path in sources)
    assert not is_up_to_date(tmp_path)  # there is no library
    library = tmp_path / library_name("baseline")
    library.touch()
    os.utime(library, (newest + 1, newest + 1))
    assert is_up_to_date(tmp_path)
    os.utime(library, (newest - 10, newest - 10))
    assert not is_up_to_date(tmp_path)


def test_building_needs_neither_torch_nor_the_package():
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1]); "
        "sys.exit(' '.join({'torch', 'setuptools', 'prescore'} & set(sys.modules)) or 0)"
    )
    command = [sys.executable, "-c", code, str(FOLDER / "build.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.c")), ids=lambda path: path.name)
def test_every_parallel_region_asks_how_many_threads_it_may_use(path):
    """The pool of OpenMP does not survive a fork; see threads.h."""
    text = path.read_text().replace("\\\n", " ")
    regions = re.findall(r"#\s*pragma omp .*\bparallel\b.*", text)
    assert [region for region in regions if "num_threads(prescore_threads())" not in region] == []
